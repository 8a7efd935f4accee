"""Votes are kept, whoever else writes or is killed, and counted as scipy counts."""

import io
import subprocess
import sys
import threading

import pandas as pd
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms.functional import to_tensor

from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.inference.votes import about, add_vote, agreement, share, wilson, win_rates
from g2rpo_core.rewards.votes import SCHEMA, read_images, read_votes
from g2rpo_core.tasks.table import verify
from tests.conftest import ROOT
from tests.fixtures.votes import write_votes
from tests.fixtures.waiting import HUNG, until


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def vote(number: int, voter: str = "", winner: str = "left") -> tuple[dict, dict]:
    runs = {
        "left_run": "base",
        "right_run": "g2rpo-1",
        "left_seed": number,
        "right_seed": 2**32 - 1,
    }
    return {"prompt": "a red circle", "winner": winner, "voter": voter, **runs}, {
        "left": png(number),
        "right": png(255),
    }


def test_a_vote_is_a_row_and_its_images_are_beside_it(tmp_path):
    file = tmp_path / "votes" / "tiny.parquet"
    add_vote(file, *vote(1, "Ann", "equal"))
    add_vote(file, *vote(2))
    table = read_votes(file)
    assert table.columns.tolist() == SCHEMA.names and table.winner.tolist() == ["equal", "left"]
    assert table.voter.tolist() == ["Ann", ""] and table.right_seed.tolist() == [2**32 - 1] * 2
    assert table.time.is_monotonic_increasing and str(table.time.dtype.tz) == "UTC"
    assert [image.getpixel((0, 0)) for image in read_images(file, table, "left")] == [
        (1, 0, 0),
        (2, 0, 0),
    ]
    images = sorted((tmp_path / "votes" / "tiny").iterdir())
    assert len(images) == 3 and all(
        path.stem == sha256(path)[:16] for path in images
    )  # the same image is there once
    assert not list((tmp_path / "votes").rglob("*.tmp"))


def test_votes_of_several_threads_are_all_kept(tmp_path):
    file = tmp_path / "tiny.parquet"
    write = lambda voter: [add_vote(file, *vote(number, voter)) for number in range(5)]
    threads = [threading.Thread(target=write, args=[voter]) for voter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = read_votes(file)
    assert sorted(zip(table.voter, table.left_seed)) == [
        (voter, number) for voter in "abcd" for number in range(5)
    ]
    assert len(read_images(file, table, "left")) == 20


WRITER = """
import sys
from pathlib import Path
from g2rpo_core.inference.votes import add_vote
from tests.inference.test_votes import vote
for number in range(int(sys.argv[3])):
    add_vote(Path(sys.argv[1]), *vote(number % 200, sys.argv[2]))
    print(number + 1, flush=True)
"""


@pytest.mark.pipeline
def test_a_killed_writer_loses_no_vote_and_stops_no_other(tmp_path):
    file = tmp_path / "tiny.parquet"
    said = {voter: tmp_path / voter for voter in ("killed", "other")}

    def start(voter: str, count: int) -> subprocess.Popen:
        with said[voter].open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-c", WRITER, file, voter, str(count)], cwd=ROOT, stdout=output
            )

    killed, other = start("killed", 10**6), start("other", 20)
    try:
        until(lambda: len(said["killed"].read_text().split()) >= 5)
    finally:
        killed.kill()
        killed.wait()
        assert other.wait(timeout=HUNG) == 0
    counts = read_votes(file).voter.value_counts()
    told = len(said["killed"].read_text().splitlines())
    assert counts["other"] == 20 and told <= counts["killed"] <= told + 1
    for side in ("left", "right"):
        read_images(file, read_votes(file), side)
    add_vote(file, *vote(1, "afterwards"))  # the lock ended with the process
    assert read_votes(file).voter.iloc[-1] == "afterwards"


def test_intervals_are_scipys():
    for successes, count in ((0, 1), (1, 1), (3, 8), (50, 100), (999, 1000)):
        expected = stats.binomtest(successes, count).proportion_ci(method="wilson")
        assert wilson(successes, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0) and share(0, 0) == "0 of 0"
    assert share(6, 8) == "6 of 8, 75.0 % (40.9 % to 92.9 %)"


def test_a_run_wins_whichever_side_it_was_on():
    rows = (
        [("base", "g2rpo-1", "left")]
        + 3 * [("g2rpo-1", "base", "left")]
        + [("base", "g2rpo-1", "right"), ("base", "g2rpo-1", "equal")]
    )
    rows += [("g2rpo-1", "g2rpo-1", "left"), ("g2rpo-2", "base", "equal")]
    table = pd.DataFrame(rows, columns=["left_run", "right_run", "winner"])
    assert win_rates(table) == [
        "base beats g2rpo-1 in 1 of 5, 20.0 % (3.6 % to 62.4 %), and 1 equal",
        "base beats g2rpo-2 in 0 of 0, and 1 equal",
    ]


def test_a_voter_who_decides_by_the_verifier_agrees_with_it(tmp_path):
    file = write_votes(tmp_path / "mine.parquet", 40)
    table = read_votes(file)
    count = int((table.winner != "equal").sum())
    assert agreement("verifier", verify, file, table) == share(count, count)
    assert (
        agreement("verifier", verify, file, table.assign(prompt="a cat"))
        == f"0 of 0; left out: {count} with missing scores"
    )
    contrary = lambda images, prompts: (
        -verify(torch.stack([pixels(image) for image in images]), prompts)
    )
    assert agreement("mine", contrary, file, table) == share(0, count)
    alike = lambda images, prompts: torch.zeros(len(images))
    assert agreement("mine", alike, file, table) == f"0 of 0; left out: {count} with equal scores"
    left = int((table.winner == "left").sum())
    assert about(file, table).endswith(
        f"{40 - count} equal; the left image won {share(left, count)}"
    )


def pixels(image: Image.Image) -> torch.Tensor:
    return to_tensor(image)
