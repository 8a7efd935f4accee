"""Prompts of a data set on a hub, with styles from lists of their own."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pandas as pd
import pytest

from g2rpo_core.data.choice import fetch_prompts
from g2rpo_core.hub.settings import HubPrompts
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.errors import refused
from tests.fixtures.small_hub import HubHandler
from tests.fixtures.waiting import HUNG

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
            tmp_path / "revisions.json",
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
        (
            {"files": ["*.gz"]},
            "prompts are read from .txt, .csv, .jsonl, .json, .parquet, not from .gz",
        ),
    ],
)
def test_what_is_not_as_the_profile_says_ends_in_one_line(prompts, changes, message):
    with refused(re.escape(message)):
        prompts(**changes)


@pytest.mark.pipeline
def test_a_stopped_download_ends_at_once_and_the_next_start_names_its_rest(hub, here, monkeypatch):
    """Left alone, the client would first finish its files, which may take hours."""
    chunks_asked, go_on, send = threading.Event(), threading.Event(), HubHandler.send_content

    def send_late(handler, path, content, **headers):
        if "/chunks/" in handler.path:
            chunks_asked.set()
            go_on.wait(HUNG)
        send(handler, path, content, **headers)

    monkeypatch.setattr(HubHandler, "send_content", send_late)
    Path("published").mkdir()
    pd.DataFrame({"prompt": ["a cat", "a dog"]}).to_parquet("published/train.parquet")
    hub.add("somebody/prompts", REVISION, Path("published"))
    Path("profiles").mkdir()
    train = {"repo": "somebody/prompts", "revision": REVISION, "files": ["train.parquet"]}
    Path("profiles", "mine.yaml").write_text(
        json.dumps({"extends": "tiny", "prompts": {"train": train}})
    )
    Path("profiles", "tiny.yaml").symlink_to(ROOT / "profiles" / "tiny.yaml")
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(here / "home"), "HF_HUB_OFFLINE": "0"}
    stage = subprocess.Popen(
        [sys.executable, "-m", "stages.prompts", "--profile", "mine"],
        env=os.environ | environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    assert chunks_asked.wait(HUNG)
    stage.terminate()
    stopped = b"error: stopped; complete files are kept, and the same command goes on\n"
    assert stage.communicate(timeout=HUNG)[1].endswith(stopped) and stage.returncode == 143
    go_on.set()
    done = run_module("stages.prompts", "--profile", "mine", folder=here, **environ)
    named = re.search(r": 1 unfinished downloads, .*: rm '(.*)'/(.*), if none", done.stdout)
    assert done.returncode == 0 and named, done.stderr
    assert len(list(Path(named[1]).glob(named[2]))) == 1
