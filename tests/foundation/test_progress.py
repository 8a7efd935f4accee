"""Progress bars in a log."""

import gc
import sys

import pytest

from g2rpo_core.foundation import progress
from g2rpo_core.foundation.progress import FOLLOWED, Bar


def test_a_log_has_the_last_line_of_a_bar_and_nothing_that_is_redrawn(capsys):
    """Not even the postfix, which tqdm draws each time that it is set."""
    with Bar(total=3, desc="train", unit="iteration") as bar:
        for loss in range(3):
            bar.update()
            bar.set_postfix(loss=loss)
    text = capsys.readouterr().err
    assert text.startswith("train: 100%|") and "3/3" in text and "loss=2" in text
    assert text.count("\n") == 1 and text.endswith("\n") and "\r" not in text


def test_a_long_run_prints_a_line_whenever_one_is_due(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with Bar(total=3, desc="train") as bar:
        for _ in range(3):
            bar.update()
            bar.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert all(any(f"{count}/3" in line for line in lines) for count in (0, 1, 2, 3))


def test_a_warning_between_leaves_the_lines_alone(capsys):
    with Bar(total=3, desc="train"), Bar.external_write_mode(file=sys.stderr):
        sys.stderr.write("warning\n")
    assert capsys.readouterr().err.startswith("warning\ntrain:   0%|")


def test_a_bar_that_is_followed_is_redrawn(capsys, monkeypatch):
    monkeypatch.setenv(FOLLOWED, "1")
    with Bar(total=3, desc="train") as bar:
        bar.update(3)
    assert "\rtrain: 100%|" in capsys.readouterr().err


def test_a_bar_of_another_process_shows_nothing(capsys):
    with Bar(total=3, desc="train", disable=True) as bar:
        bar.update(3)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("there", [{}, {"lines": True}, {"lines": True, "disable": False}])
def test_a_bar_whose_start_a_signal_ends_goes_without_a_word(capsys, there):
    bar = Bar.__new__(Bar)
    vars(bar).update(there)
    del bar
    gc.collect()
    assert capsys.readouterr() == ("", "")
