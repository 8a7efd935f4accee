"""What a message about a file says to do, by where the file lies."""

from pathlib import Path

import pytest

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import existing, hint_for, read_json

MAKES = "the stage `{0}` makes it: dvc repro {0}"


@pytest.mark.parametrize(
    "path, hint",
    [
        ("models/tiny/pipeline/vae/config.json", MAKES.format("models")),
        ("reports/models.json", MAKES.format("models")),
        ("reports/report.json", MAKES.format("report")),
        ("prompts/tiny/train.parquet", MAKES.format("prompts")),
        ("embeddings/tiny/train/part-00000.parquet", MAKES.format("embed")),
        ("runs/tiny/mix_grpo-7/transformer", MAKES.format("train@mix_grpo-7")),
        ("reports/curves/mix_grpo-7.json", MAKES.format("train@mix_grpo-7")),
        ("evaluations/tiny/base-0/results.parquet", MAKES.format("evaluate_base")),
        ("evaluations/tiny/g2rpo-1/results.parquet", MAKES.format("evaluate@g2rpo-1")),
        ("evaluations/tiny/theirs-0/results.parquet", MAKES.format("evaluate_published@theirs")),
        ("reports/metrics/g2rpo-1.json", MAKES.format("evaluate@g2rpo-1")),
        ("published/tiny/theirs/weights.safetensors", MAKES.format("published")),
        ("studies/mine/runs/g2rpo-1/lora", "the stage `train@g2rpo-1` makes it: cd studies/mine && dvc repro train@g2rpo-1"),
        ("studies/mine/evaluations/base-0", "the stage `evaluate_base` makes it: cd studies/mine && dvc repro evaluate_base"),
        ("studies/mine/dvc.lock", "restore it with git checkout, or delete it: cd studies/mine && dvc repro writes it again"),
        (".cache/resume/train/tiny/g2rpo-1", "delete .cache/resume/train/tiny/g2rpo-1, and the same command resumes from what is left"),
        ("hub/models--a--b/model.bin", "delete it, then dvc repro --force --single-item models (or published) fetches it"),
        ("mine/models/prompts.txt", ""),
    ],
)  # fmt: skip
def test_a_path_says_what_makes_it(path, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    Path("published", "tiny", "theirs").mkdir(parents=True)
    assert hint_for(tmp_path / path) == hint
    assert path.startswith("hub") or hint_for(path) == hint


def test_a_file_outside_the_checkout_has_no_hint(tmp_path, monkeypatch):
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    assert hint_for(tmp_path / "models" / "tiny") == ""


def test_readers_end_with_the_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (file := Path("reports", "metrics", "g2rpo-1.json")).parent.mkdir(parents=True)
    with pytest.raises(UserError, match="g2rpo-1.json: does not exist; the stage `evaluate@g2rpo-1` makes it"):
        existing(file)
    file.write_text("[")
    with pytest.raises(UserError, match="g2rpo-1.json: cannot be read.*; the stage `evaluate@g2rpo-1` makes it"):
        read_json(file)
