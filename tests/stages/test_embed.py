"""Prompts that encoding would cut: a data set's are left out, a user's are named."""

import sys

import pytest

from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.data.prompts import Prompt, write_prompts
from stages import embed
from tests.conftest import ROOT

LONG = Prompt("long", "a red circle " * 9, "")
SHORT = Prompt("short", "a red circle", "")


@pytest.fixture
def encode(models, tmp_path, monkeypatch):
    """encode(train prompts, of a data set or not) runs the stage on them, with one short test prompt of a file."""

    def run(prompts: list[Prompt], data_set: bool) -> None:
        write_prompts(tmp_path / "prompts" / "tiny" / "train.parquet", prompts, data_set=data_set)
        write_prompts(tmp_path / "prompts" / "tiny" / "test.parquet", [SHORT])
        embed.main()

    for name, place in (("models/tiny", models), ("profiles", ROOT / "profiles")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["embed", "--profile", "tiny"])
    return run


@pytest.mark.pipeline
def test_long_prompts_of_a_data_set_are_left_out_and_counted(encode, tmp_path, capsys):
    encode([SHORT, LONG], data_set=True)
    assert EmbeddingStore(tmp_path / "embeddings" / "tiny" / "train").prompts == [SHORT]
    assert capsys.readouterr().out == "1 of 2 train prompts were left out: over embed.max_sequence_length = 12\n"


@pytest.mark.pipeline
@pytest.mark.parametrize("prompts, data_set", [([SHORT, LONG], False), ([LONG], True)])
def test_long_prompts_of_a_file_and_a_set_of_nothing_else_are_refused(encode, capsys, prompts, data_set):
    with pytest.raises(SystemExit) as ended:
        encode(prompts, data_set)
    said = capsys.readouterr().err.splitlines()[-1]  # after a library's progress bar
    assert ended.value.code == 1 and said.startswith("error: prompt long has 28 tokens")
