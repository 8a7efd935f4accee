"""Texts from outside are shown so that they steer nothing."""

from hypothesis import given
from hypothesis import strategies as st

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo, markdown, steering, visible

# Escape sequences, C1 controls, marks of direction, separators, half of a surrogate pair
PIECES = ["\x1b]0;title\x07", "\x9b31m", "\u202egnp", "\u2066", "\u2028", "\x85", "\ud800"]
ANY = st.lists(st.text(max_size=9) | st.sampled_from([*PIECES, "\n", "\r", "|"])).map("".join)


@given(ANY)
def test_no_text_controls_a_terminal_or_begins_a_line_of_its_own(text):
    for shown in (visible(text), markdown(text), str(UserError(text))):
        assert not steering(shown) and "\n" not in shown
    assert "|" not in markdown(text).replace("\\|", "")
    assert all(steering(piece) for piece in PIECES)


def test_texts_of_every_language_stay_as_they_are(capsys):
    echo("caf\u00e9 \u05d0\u05d1 \U0001f415 a|b", "two\nlines")
    assert capsys.readouterr().out == "caf\u00e9 \u05d0\u05d1 \U0001f415 a|b\ntwo\\nlines\n"
