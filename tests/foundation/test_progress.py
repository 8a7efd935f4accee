"""Progress bars in a log."""

from g2rpo_core.foundation.progress import Bar


def test_a_log_has_the_last_line_of_a_bar_and_nothing_that_is_redrawn(capsys):
    """Not even the postfix, which tqdm draws each time that it is set."""
    with Bar(total=3, desc="train", unit="iteration") as bar:
        for loss in range(3):
            bar.update()
            bar.set_postfix(loss=loss)
    text = capsys.readouterr().err
    assert text.startswith("train: 100%|") and "3/3" in text and "loss=2" in text
    assert text.count("\n") == 1 and text.endswith("\n") and "\r" not in text
