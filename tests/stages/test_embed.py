"""Prompts that encoding would cut are left out or named; large sets are encoded in training."""

import shutil
import sys

import pandas as pd
import pytest

from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.data.prompts import Prompt, write_prompts
from stages import embed, train
from tests.conftest import ROOT
from tests.fixtures.commands import run_here

LONG = Prompt("long", "a red circle " * 9, "")
SHORT = Prompt("short", "a red circle", "")


@pytest.fixture
def encode(models, here, monkeypatch):
    """encode(train prompts, of a data set or not, profile) runs the stage on them."""

    def run(prompts: list[Prompt], data_set: bool, profile: str = "tiny") -> None:
        write_prompts(here / "prompts" / profile / "train.parquet", prompts, data_set=data_set)
        write_prompts(here / "prompts" / profile / "test.parquet", [SHORT])
        monkeypatch.setattr(sys, "argv", ["embed", "--profile", profile])
        embed.main()

    shutil.copytree(ROOT / "profiles", here / "profiles")
    (here / "profiles" / "online.yaml").write_text("extends: tiny\nembed: {encode: online}\n")
    (here / "models").mkdir()
    for profile in ("tiny", "online"):
        (here / "models" / profile).symlink_to(models)
    return run


@pytest.mark.pipeline
def test_long_prompts_of_a_data_set_are_left_out_and_counted(encode, tmp_path, capsys):
    encode([SHORT, LONG], data_set=True)
    assert EmbeddingStore(tmp_path / "embeddings" / "tiny" / "train").prompts == [SHORT]
    assert (
        capsys.readouterr().out
        == "1 of 2 train prompts were left out: over embed.max_sequence_length = 12\n"
    )


@pytest.mark.pipeline
@pytest.mark.parametrize("prompts, data_set", [([SHORT, LONG], False), ([LONG], True)])
def test_long_prompts_of_a_file_and_a_set_of_nothing_else_are_refused(
    encode, capsys, prompts, data_set
):
    with pytest.raises(SystemExit) as ended:
        encode(prompts, data_set)
    said = capsys.readouterr().err.splitlines()[-1]  # after a library's progress bar
    assert ended.value.code == 1 and said.startswith("error: prompt long has 28 tokens")


@pytest.mark.pipeline
def test_a_run_trains_on_prompts_that_are_encoded_online(encode, models, tmp_path):
    text = (
        "extends: online\n"
        "methods: {g2rpo: {training: {iterations: 1, monitor: {every: 1, prompts: 1, rewards: "
        "[hps]}}}}\n"
    )
    for name, section in (("often", "online"), ("once", "tiny")):
        (tmp_path / "profiles" / f"{name}.yaml").write_text(text.replace("online", section))
        (tmp_path / "models" / name).symlink_to(models)
        encode([SHORT], False, name)
        done = run_here(
            train.main, "--profile", name, "--method", "g2rpo", "--seed", 1, folder=tmp_path
        )
        assert done.returncode == 0, done.stderr
    often, once = (
        pd.read_parquet(tmp_path / "runs" / name / "g2rpo-1" / "records.parquet")
        for name in ("often", "once")
    )
    columns = [name for name in often if not name.startswith(("seconds", "perf"))]
    pd.testing.assert_frame_equal(often[columns], once[columns], rtol=0, atol=1e-5)
