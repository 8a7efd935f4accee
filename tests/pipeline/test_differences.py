"""How far two files of every kind are said to be from each other."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from g2rpo_core.data.embeddings import write_negative
from g2rpo_core.foundation.errors import UserError
from pipeline.differences import difference


@pytest.fixture
def apart(tmp_path):
    """Return what is said of two files of one name, each written by `write(path, content)`."""

    def said(name, write, old, new):
        for folder, content in (("old", old), ("new", new)):
            (tmp_path / folder).mkdir(exist_ok=True)
            write(tmp_path / folder / name, content)
        return difference(tmp_path / "old" / name, tmp_path / "new" / name, name)

    return said


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))


def write_table(path: Path, columns: dict) -> None:
    pd.DataFrame(columns).to_parquet(path)


def test_weights_are_apart_by_their_relative_distance(apart):
    old = {"a": torch.full((3,), 2.0), "b": torch.tensor([2.0], dtype=torch.bfloat16)}
    new = {"a": torch.full((3,), 2.0), "b": torch.tensor([1.0], dtype=torch.bfloat16)}
    said = "weights: relative distance 0.25 over 2 tensors; at most 0.5, in b"
    assert (
        apart("model.safetensors", lambda path, tensors: save_file(tensors, path), old, new) == said
    )


def test_tensors_of_another_shape_or_name_are_counted(apart):
    old, new = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(3), "c": torch.ones(2)}
    said = apart("model.safetensors", lambda path, tensors: save_file(tensors, path), old, new)
    assert said == (
        "weights: relative distance 0 over 0 tensors; 3 tensors only in one of them, "
        "or of another shape"
    )


def test_a_table_names_the_columns_that_differ_and_those_that_moved_most_first(apart):
    old = {
        "same": [1, 2, 3],
        "far": [1.0, 2.0, 3.0],
        "near": [1.0, 2.0, 3.0],
        "word": ["a", "b", "c"],
    }
    new = old | {"far": [4.0, 5.0, 6.0], "near": [1.0, 2.0, 3.5], "word": ["a", "b", "d"]}
    assert apart("a.parquet", write_table, old, new) == (
        "table: far: 3 of 3 values differ, by 3 at most and 3 on average; "
        "the mean moves by 5.2 of its standard errors; "
        "near: 1 of 3 values differ, by 0.5 at most and 0.17 on average; "
        "the mean moves by 0.29 of its standard errors; "
        "word: 1 of 3 values differ"
    )
    assert (
        apart("a.parquet", write_table, {"a": [1], "b": [1]}, {"b": [1], "c": [1]})
        == "table: lacks a; new: c"
    )
    assert apart("a.parquet", write_table, {"a": [1, 2]}, {"a": [1]}) == "table: a: 2 -> 1 values"


def test_a_score_that_went_missing_is_a_difference(apart):
    said = apart("a.parquet", write_table, {"score": [1.0, 2.0]}, {"score": [1.0, None]})
    assert said == "table: score: 1 of 2 values differ"


def test_scores_are_compared_reward_by_reward(apart):
    old = {"reward": ["hps", "hps", "verifier", "verifier"], "score": [1.0, 3.0, 0.0, 1.0]}
    new = old | {"score": [2.0, 4.0, 0.0, 1.0]}
    said = (
        "table: score of hps: 2 of 2 values differ, by 1 at most and 1 on average; "
        "the mean moves by 1 of its standard errors"
    )
    assert apart("results.parquet", write_table, old, new) == said


def test_the_tensors_of_embeddings_are_compared_as_numbers(tmp_path):
    for name, value in (("old", 1.0), ("new", 1.5)):
        (tmp_path / name).mkdir()
        write_negative(tmp_path / name, {"pooled": torch.tensor([[0.0, value]])}, "bfloat16")
    (old,), (new,) = ([*(tmp_path / name).rglob("*.parquet")] for name in ("old", "new"))
    assert difference(old, new, new.name).startswith(
        "table: pooled: 1 of 2 values differ, by 0.5 at most and 0.25 on average"
    )


def test_json_names_the_numbers_that_differ_most(apart):
    old = {"a": {"near": 100, "far": 1.0}, "list": [1, 2], "name": "x", "gone": 0}
    new = {"a": {"near": 101, "far": 1.5}, "list": [1, 4], "name": "y", "more": 0}
    assert apart("a.json", write_json, old, new) == (
        "JSON: 3 of 5 numbers differ, most: list.1: 2 -> 4, a.far: 1 -> 1.5, a.near: 100 -> 101; "
        "other values: name: x -> y; lacks gone; new: more"
    )
    assert apart("a.json", write_text, "[1]", "[ 1]") == "JSON: the same values, written otherwise"


@pytest.mark.parametrize("name", ["a.md", "a.png", "a.pt", "plain"])
def test_of_other_files_only_the_size_is_told(apart, name):
    assert apart(name, write_text, "abc", "abcd") == "differs (3 -> 4 bytes)"


@pytest.mark.parametrize("name", ["a.safetensors", "a.parquet", "a.json"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name):
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"\x00, not whole")
    with pytest.raises(UserError, match=f"{name}: (cannot be read|is not)") as refused:
        difference(tmp_path / "old" / name, tmp_path / "new" / name, name)
    assert "\n" not in str(refused.value)
