"""Prompts of a data set on a hub, with styles from lists of their own."""

import json
import re

import pytest

from g2rpo_core.data.choice import fetch_prompts
from g2rpo_core.hub.download import Revisions
from g2rpo_core.hub.settings import HubPrompts
from tests.fixtures.errors import refused

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def prompts(hub, tmp_path):
    """prompts(**changes) -> those of a data set with each prompt once per comparison."""
    annotations, lists = tmp_path / "annotations", tmp_path / "lists"
    annotations.mkdir()
    (lists / "benchmark").mkdir(parents=True)
    rows = [{"prompt": f"a cat, {number // 3}", "human_preference": [1, 0]} for number in range(9)]
    rows.append(
        {"prompt": "a  cat, 0 ", "human_preference": [0, 1]}
    )  # another text, and the same prompt
    (annotations / "train.json").write_text(json.dumps(rows))
    (annotations / "images.tar.gz").write_bytes(b"not asked for")
    (lists / "benchmark" / "anime.json").write_text(json.dumps(["a cat, 0", "a dog"]))
    (lists / "benchmark" / "photo.json").write_text(json.dumps(["a cat, 2"]))
    hub.add("somebody/annotations", REVISION, annotations)
    hub.add("somebody/lists", REVISION, lists)

    def fetch(**changes):
        settings = {"repo": "somebody/annotations", "files": ["train.json"], **changes}
        return fetch_prompts(
            "prompts.train",
            HubPrompts.model_validate_json(json.dumps(settings)),
            Revisions(tmp_path / "revisions.json"),
        )

    return fetch


def test_each_prompt_comes_once_at_the_revision_of_the_lock(prompts, hub, tmp_path):
    assert [(one.id, one.text) for one in prompts(distinct=4)] == [
        (f"train-00000{3 * n}", f"a cat, {n}") for n in range(3)
    ]
    assert json.loads((tmp_path / "revisions.json").read_text()) == {
        "somebody/annotations": REVISION
    }
    assert [file for file, _ in hub.ranges] == ["train.json"]


def test_prompts_that_no_encoder_takes_are_left_out_and_counted(prompts, capsys, tmp_path):
    """They belong to the published count."""
    file = tmp_path / "annotations" / "train.json"
    rows = json.loads(file.read_text())
    texts = ["a \x1b[31mcat", "a\0cat", "\ud800", "\u200b"]
    file.write_text(json.dumps([*rows, *({"prompt": text} for text in texts), {"prompt": "a dog"}]))
    assert [one.text for one in prompts(distinct=9)] == [
        "a cat, 0",
        "a cat, 1",
        "a cat, 2",
        "a dog",
    ]
    said = (
        "prompts.train: 4 prompts were left out: with a control character, "
        "or no character that is seen\n"
    )
    assert said in capsys.readouterr().out


def test_styles_come_from_the_lists_that_have_the_prompts(prompts, capsys):
    files = {"anime": "benchmark/anime.json", "photo": "benchmark/photo.json"}
    styled = prompts(styles={"repo": "somebody/lists", "revision": REVISION, "files": files})
    assert [one.style for one in styled] == ["anime", "", "photo"]
    assert "1 of 3 prompts are in none of the style lists" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"distinct": 5},
            (
                "has 4 different prompts at 0123456789abcdef0123456789abcdef01234567, "
                "but prompts.train.distinct says 5"
            ),
        ),
        ({"files": ["test.json"]}, "has no file test.json"),
        (
            {"files": ["*.gz"]},
            "prompts are read from .txt, .csv, .jsonl, .json, .parquet, not from .gz",
        ),
        ({"repo": "somebody/nothing"}, "does not exist, or is private"),
        ({"revision": "f" * 40}, "has no revision ffff"),
    ],
)
def test_what_is_not_as_the_profile_says_ends_in_one_line(prompts, changes, message):
    with refused(re.escape(message)):
        prompts(**changes)
