"""What a message about a file says to do, by where the file lies."""

import resource
from pathlib import Path

import pytest
import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import (
    is_full,
    read_json,
    what_lacks,
    write_whole,
    writing,
)
from g2rpo_core.foundation.layout import hint_for

MAKES = "the stage `{0}` makes it: dvc repro {0}"


@pytest.mark.parametrize(
    "path, hint",
    [
        ("models/tiny/pipeline/vae/config.json", MAKES.format("models")),
        ("runs/tiny/mix_grpo-7/transformer", MAKES.format("train@mix_grpo-7")),
        ("evaluations/tiny/base-0/results.parquet", MAKES.format("evaluate_base")),
        ("evaluations/tiny/theirs-0/results.parquet", MAKES.format("evaluate_published@theirs")),
        ("reports/metrics/g2rpo-1.json", MAKES.format("evaluate@g2rpo-1")),
        (
            "studies/mine/runs/g2rpo-1/lora",
            "the stage `train@g2rpo-1` makes it: cd studies/mine && dvc repro train@g2rpo-1",
        ),
        (
            ".cache/resume/train/tiny/g2rpo-1",
            (
                "delete .cache/resume/train/tiny/g2rpo-1, "
                "and the same command resumes from what is left"
            ),
        ),
        (
            "hub/models--a--b/model.bin",
            (
                "dvc repro --force --single-item models (or published) checks it, "
                "and mends it or says what to delete"
            ),
        ),
        ("mine/models/prompts.txt", ""),
    ],
)
def test_a_path_says_what_makes_it(path, hint, here, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(here / "hub"))
    Path("published", "tiny", "theirs").mkdir(parents=True)
    assert hint_for(here / path) == hint
    assert path.startswith("hub") or hint_for(path) == hint


def test_readers_end_with_the_hint(here):
    (file := Path("reports", "metrics", "g2rpo-1.json")).parent.mkdir(parents=True)
    file.write_text("[")
    with pytest.raises(
        UserError, match="g2rpo-1.json: cannot be read.*; the stage `evaluate@g2rpo-1` makes it"
    ):
        read_json(file)


def test_what_the_machine_lacks_is_told_from_a_fault_of_the_program():
    """Libraries in other languages say it in words alone."""
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as pythons:
        bytearray(2**62)
    said = [what_lacks(each) for each in (torchs.value, pythons.value, ValueError("a fault"))]
    assert said[0].startswith("there is not enough memory: ask for less at once")
    assert said == [said[0], said[0], None]


def test_an_output_that_cannot_be_written_is_named_with_why():
    full = "--out my.csv: the disk is full: make room, and run the same command again"
    with (
        pytest.raises(UserError, match=full),
        writing(Path("my.csv")),
        open("/dev/full", "w") as file,
    ):
        file.write("x")
    with pytest.raises(KeyError), writing(Path("my.csv")):
        {}["a fault of the program stays one"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(tmp_path):
    (tmp_path / "file").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (10, limits[1])
    )  # as a disk that is full after ten bytes
    try:
        with pytest.raises(OSError) as error:
            write_whole(tmp_path / "file", "longer than that")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_full(error.value) and [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
