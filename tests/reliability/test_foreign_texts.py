"""Whatever a name, a prompt, a vote or an answer holds: no command lets it control a terminal.

Each place that a person or a server can fill gets generated texts that would: escape sequences,
bells, C1 controls, marks of direction, separators, and line breaks that would forge a line of ours.
"""

import csv
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from ruamel.yaml import YAML
from safetensors.torch import save_file

from g2rpo_core.cli.main import main
from g2rpo_core.foundation.texts import steering
from tests.fixtures.commands import run_here, run_module
from tests.fixtures.score_server import HEALTH, answering
from tests.fixtures.votes import write_votes
from tests.reliability.test_generated_inputs import FEW, MANY

FORGED = "error: forged"
PIECES = [
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x1b[31m",
    "\x9b31m",
    "\x07",
    "\u202egnp",
    "\u2066",
    "\u2028",
    "\x85",
    f"\n{FORGED}\n",
    f"\r{FORGED}",
    "\ud800",
    "caf\u00e9 \u5b57",
]


def drawn(count: int) -> list[str]:
    """Texts of two to five pieces and a word, the same in each session; the first has all."""
    chance = random.Random(0)
    return ["a" + "".join(PIECES)] + [
        "a" + "b".join(chance.sample(PIECES, chance.randint(2, 5))) for _ in range(count - 1)
    ]


def writable(text: str) -> str:
    """A text that a UTF-8 file can hold."""
    return text.replace("\ud800", "")


def of_a_file(text: str) -> str:
    """A name that a file can have."""
    return text.replace("\ud800", "\udcff").replace("/", "")[:60]


def yaml(file: Path, data: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data))  # which is YAML, with every character as its escape


def pictures(home: Path, prompt: str | None = None) -> Path:
    folder = home / "images"
    folder.mkdir()
    about = PngInfo()
    if prompt is not None:
        about.add_text("g2rpo", json.dumps({"prompt": prompt}))
    Image.new("RGB", (32, 32)).save(folder / "one.png", pnginfo=about)
    return folder


def score(home: Path, *words: object) -> tuple:
    return (main, "score", "--reward", "hps", "--profile", "small", *words)


def prompt_in_a_list(home: Path, text: str) -> tuple:
    with (pictures(home) / "prompts.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["file", "prompt"], ["one.png", writable(text)]])
    return score(home, "images")


def file_in_a_list(home: Path, text: str) -> tuple:
    with (pictures(home) / "prompts.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["file", "prompt"], [writable(text), "a circle"]])
    return score(home, "images")


def column_of_a_list(home: Path, text: str) -> tuple:
    (pictures(home) / "prompts.csv").write_text(f'"{writable(text)}","x"\n1,2\n')
    return score(home, "images")


def prompt_in_a_picture(home: Path, text: str) -> tuple:
    pictures(home, text)
    return score(home, "images")


def prompt_beside_a_picture(home: Path, text: str) -> tuple:
    (pictures(home) / "one.txt").write_text(writable(text))
    return score(home, "images")


def name_of_a_picture(home: Path, text: str) -> tuple:
    folder = pictures(home)
    (folder / "one.png").rename(folder / f"{of_a_file(text)}.png")
    (home / "prompts.txt").write_text("a circle\n")
    return score(home, "--prompts", "prompts.txt", "images")


def name_of_a_folder(home: Path, text: str) -> tuple:
    pictures(home).rename(home / of_a_file(text))
    return score(home, of_a_file(text))


def name_of_a_prompt_file(home: Path, text: str) -> tuple:
    pictures(home)
    (home / f"{of_a_file(text)}.txt").write_text("a circle\na square\n")
    return score(home, "--prompts", f"{of_a_file(text)}.txt", "images")


def prompt_to_draw(home: Path, text: str) -> tuple:
    return main, "generate", "--profile", "small", "--out", "drawn", text.replace("\ud800", "")


def prompts_to_draw(home: Path, text: str) -> tuple:
    (home / "texts.jsonl").write_text(json.dumps({"prompt": text}))
    return main, "generate", "--profile", "small", "--out", "drawn", "--file", "texts.jsonl"


def run_to_draw(home: Path, text: str) -> tuple:
    return main, "generate", "--profile", "small", "--out", "drawn", "--run", of_a_file(text), "a"


def run_to_export(home: Path, text: str) -> tuple:
    return main, "export", of_a_file(text), "--form", "lora", "--profile", "small", "--out", "made"


def name_of_a_profile(home: Path, text: str) -> tuple:
    return main, "profile", "show", text.replace("\ud800", "")


def comment_of_a_profile(home: Path, text: str) -> tuple:
    file = home / "profiles" / "mine.yaml"
    file.write_text(f"# {writable(text)}\nextends: tiny\n")
    return main, "profile", "list"


def key_of_a_profile(home: Path, text: str) -> tuple:
    yaml(home / "profiles" / "mine.yaml", {"extends": "tiny", text: {text: text}})
    return main, "profile", "show", "mine"


def value_of_a_profile(home: Path, text: str) -> tuple:
    for name in ("one", "two"):
        labels = {"mine": {"class": "a.b:C", "label": f"{name} {text}"}}
        yaml(home / "profiles" / f"{name}.yaml", {"extends": "tiny", "rewards": labels})
    return main, "profile", "diff", "one", "two"


def source_of_prompts(home: Path, text: str) -> tuple:
    prompts = {"train": f"{text}.csv", "test": f"{text}.csv"}
    yaml(home / "profiles" / "mine.yaml", {"extends": "tiny", "prompts": prompts})
    yaml(home / "params.yaml", {"profile": "mine", "methods": ["g2rpo"], "seeds": [1]})
    from pipeline.check import main as check

    return (check,)


def names_in_params(home: Path, text: str) -> tuple:
    yaml(home / "params.yaml", {"profile": text, "methods": [text], "seeds": [text]})
    from pipeline.check import main as check

    return (check,)


def votes_of_somebody(home: Path, text: str) -> tuple:
    file = write_votes(home / "votes" / "small.parquet", 6)
    table = pd.read_parquet(file)
    for column in ("voter", "left_run", "prompt"):
        table.loc[1, column] = writable(text)
    table.to_parquet(file, index=False)
    return main, "votes", "--profile", "small", "--reward", "hps"


def winner_of_a_vote(home: Path, text: str) -> tuple:
    file = write_votes(home / "votes" / "small.parquet", 6)
    table = pd.read_parquet(file)
    table.loc[1, "winner"] = writable(text)
    table.to_parquet(file, index=False)
    return main, "votes", "--profile", "small", "--reward", "hps"


def reward_to_score_by(home: Path, text: str) -> tuple:
    pictures(home, "a circle")
    return main, "score", "--reward", text.replace("\ud800", ""), "--profile", "small", "images"


def lock_of_models(home: Path, text: str) -> tuple:
    lock = home / "models" / "small" / "models.lock.json"
    entries = json.loads(lock.read_text())
    lock.unlink()
    lock.write_text(json.dumps(entries | {"hps": {"folder": text, "files": {text: text}}}))
    pictures(home, "a circle")
    return score(home, "images")


def study_to_report(home: Path, text: str) -> tuple:
    return main, "report", "--study", of_a_file(text)


def profile_to_plan(home: Path, text: str) -> tuple:
    return main, "plan", "--profile", of_a_file(text), "--gpus", "1"


def code_of_a_reward(home: Path, text: str) -> tuple:
    mine = {"extends": "small", "rewards": {"mine": {"class": f"os:{text}"}}}
    yaml(home / "profiles" / "mine.yaml", mine)
    pictures(home, "a circle")
    return main, "score", "--reward", "mine", "--profile", "mine", "images"


def class_of_a_base_model(home: Path, text: str) -> tuple:
    index = home / "models" / "small" / "pipeline" / "model_index.json"
    yaml(index, json.loads(index.read_text()) | {"_class_name": text})
    return main, "generate", "--profile", "small", "--out", "drawn", "a circle"


def names_of_weights(home: Path, text: str) -> tuple:
    save_file({writable(text): torch.zeros(2, 2)}, home / "lora.safetensors")
    words = ("--profile", "small", "--out", "drawn", "--run", "lora.safetensors", "a circle")
    return main, "generate", *words


PLACES: list[Callable[[Path, str], tuple]] = [
    prompt_in_a_list,
    file_in_a_list,
    column_of_a_list,
    prompt_in_a_picture,
    prompt_beside_a_picture,
    name_of_a_picture,
    name_of_a_folder,
    name_of_a_prompt_file,
    prompt_to_draw,
    prompts_to_draw,
    run_to_draw,
    run_to_export,
    name_of_a_profile,
    comment_of_a_profile,
    key_of_a_profile,
    value_of_a_profile,
    source_of_prompts,
    names_in_params,
    votes_of_somebody,
    winner_of_a_vote,
    reward_to_score_by,
    lock_of_models,
    study_to_report,
    profile_to_plan,
    code_of_a_reward,
    class_of_a_base_model,
    names_of_weights,
]


def check(text: str, out: str, err: str) -> None:
    """Of the carriage returns of progress bars nothing else may come with them."""
    assert "Traceback" not in err, err[-2000:]
    for shown in (out, err.replace("\r", "")):
        assert not steering(shown), (steering(shown), shown)
        assert not any(line.startswith(FORGED) for line in shown.splitlines()), shown
    assert f"\r{FORGED}" not in err


@contextmanager
def copied(project: Path, home: Path) -> Iterator[Path]:
    """The small project with its models by links, but for the lock."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(project, home, copy_function=shutil.copy)
    yield home


@pytest.mark.pipeline
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_no_text_controls_the_terminal_of_a_command(finished, tmp_path, place, many):
    for text in drawn(MANY // 40 if many else 1):
        with copied(finished, tmp_path / "project") as home:
            command, *words = place(home, text)
            done = run_here(command, *words, folder=home)
            check(text, done.stdout, done.stderr)
            assert done.stdout or done.stderr, "nothing was said at all"


def answer(status: int, body: bytes, *_: object) -> tuple[int, bytes]:
    return status, body


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.pipeline
def test_no_answer_of_a_server_controls_the_terminal(finished, tmp_path, many):
    """Reasons, notes, labels, versions, and pages of errors."""
    for number, text in enumerate(drawn(FEW if many else 4)):
        bodies = [
            {"scores": [None], "reasons": [text]},
            {"scores": [text]},
            {"scores": [0.5]},
            {"detail": text},
        ]
        body = bodies[number % len(bodies)]
        said = HEALTH | {"note": text, "label": text, "version": text}
        status = 500 if "detail" in body else 200
        with (
            answering(partial(answer, status, json.dumps(body).encode()), said) as served,
            copied(finished, tmp_path / "project") as home,
        ):
            server = {"url": served.url, "reward": "hps", "tries": 1, "backoff": 0}
            yaml(
                home / "profiles" / "mine.yaml",
                {"extends": "small", "rewards": {"theirs": {"server": server}}},
            )
            pictures(home, "a circle")
            words = ("score", "--reward", "theirs", "--profile", "mine", "images")
            done = run_here(main, *words, folder=home)
            check(text, done.stdout, done.stderr)


REWARD = """
class Reward:
    def score(self, images, prompts):
        raise RuntimeError({text!a})
"""


@pytest.mark.pipeline
def test_no_error_that_nobody_foresaw_controls_the_terminal(finished, tmp_path):
    """A reward of the user's own ends a command with a traceback, whose message has a prompt."""
    (text,) = drawn(1)
    with copied(finished, tmp_path / "project") as home:
        (home / "own.py").write_text(REWARD.format(text=text))
        mine = {"extends": "small", "rewards": {"mine": {"class": "own:Reward"}}}
        yaml(home / "profiles" / "mine.yaml", mine)
        pictures(home, "a circle")
        words = ("score", "--reward", "mine", "--profile", "mine", "--models", "models/small")
        done = run_module("g2rpo_core.cli", *words, "images", folder=home)
    assert done.returncode == 1 and "RuntimeError" in done.stderr, (done.stderr, sys.path)
    check(text, done.stdout, done.stderr.replace("Traceback", ""))


def test_the_pieces_would_control_a_terminal():
    assert all(steering(piece) or FORGED in piece for piece in PIECES[:-1])
    assert YAML(typ="safe").load('{"a": "\\u001b"}') == {"a": "\x1b"}
