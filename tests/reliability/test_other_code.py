"""A training is killed, and goes on from another commit: with equal numbers only."""

import shutil
from functools import partial

import pytest

from stages import versions
from tests.fixtures.killed_stages import attempt, hashes
from tests.reliability.conftest import make_checkout

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
REFUSED = "is not resumed: the stage's code changed; it can be deleted"


def test_a_killed_training_resumes_where_the_code_computes_the_same(project, monkeypatch, capfd):
    whole = hashes(project / "runs")
    make_checkout(project)
    monkeypatch.setattr(versions, "ROOT", project)
    for made in (".cache", "runs"):
        shutil.rmtree(project / made)
    start = partial(attempt, project, "train", 1)  # its processes write into a file
    with capfd.disabled():
        _, (events, *_) = start()
    for made in (".cache", "runs"):
        shutil.rmtree(project / made)
    with capfd.disabled():
        ended, last = start(at=events // 2)
    assert ended == [-9], last
    home = project / ".cache" / "resume" / "train" / "small" / "g2rpo-1"
    (first,) = home.iterdir()
    assert (first / "iteration-000001").exists()
    # A commit that changes a number
    loss, said = project / "g2rpo_core" / "algorithm" / "loss.py", project / "said-train-0"
    text = loss.read_text()
    loss.write_text(text.replace("1 - clip_range", "1 - 2 * clip_range"))
    with capfd.disabled():
        ended, _ = start(at=events // 2)
    assert ended == [-9] and f"{first.relative_to(project)} {REFUSED}" in said.read_text()
    assert len(list(home.iterdir())) == 2
    # A later one with a comment, another format, and the number as it was
    loss.write_text(f"# a comment\n{text.replace('1 - clip_range', '(1 - clip_range)')}")
    said.unlink()
    with capfd.disabled():
        ended, _ = start()
    assert ended == [0] and hashes(project / "runs") == whole
    assert f"{first.relative_to(project)} {REFUSED}" not in said.read_text()
