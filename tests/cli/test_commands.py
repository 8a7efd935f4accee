"""The commands that ask nothing of the pipeline but its models, as a user runs them."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
import typer
from diffusers import FluxTransformer2DModel
from PIL import Image
from ruamel.yaml import YAML

from g2rpo_core.cli import commands
from g2rpo_core.cli.commands import app
from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.inference.pictures import Pictures
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here, run_module
from tests.fixtures.weights import randomize

COMMANDS = (
    *[
        "doctor",
        "plan",
        "models",
        "prompts",
        "probe",
        "generate",
        "score",
        "demo",
        "export",
        "report",
    ],
    *("profile list", "profile show", "profile diff"),
)
# of the commands that hand their words to a module, what `--help` loads
MODULES = ("pipeline.rehearse", "pipeline.job", "pipeline.jobs", "pipeline.todo")
pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module")
def project(models, embeddings_folder, tmp_path_factory):
    """A folder with the profiles, the tiny models, and a run of other weights than the base's."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    (folder / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(models)
    (folder / "embeddings").mkdir()
    (folder / "embeddings" / "tiny").symlink_to(embeddings_folder.parent)
    profile = YAML(typ="safe").load(ROOT / "profiles" / "tiny.yaml")
    profile["evaluation"]["steps"] = [3]
    YAML().dump(profile, folder / "profiles" / "tiny.yaml")
    trained = FluxTransformer2DModel.from_pretrained(models / "pipeline" / "transformer")
    randomize(trained)
    trained.save_pretrained(folder / "runs" / "tiny" / "g2rpo-1" / "transformer")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example(command):
    done = run_here(main, *command.split(), "--help", folder=ROOT)
    assert done.returncode == 0 and f"Example: g2rpo {command}" in re.sub(r"\s+", " ", done.stdout)


def test_help_says_of_every_list_that_its_option_may_be_repeated():
    """A word given twice, where only one is taken, is lost without a word."""
    lists = []
    for name, command in typer.main.get_command(app).commands.items():
        lists += [
            (name, each)
            for each in command.params
            if each.param_type_name == "option" and each.multiple
        ]
    assert {(name, each.name) for name, each in lists} == {
        ("generate", "run"),
        ("score", "reward"),
        ("demo", "run"),
    }
    assert [(name, each.name) for name, each in lists if "may be repeated" not in each.help] == []


def test_what_runs_takes_the_options_of_its_command():
    """Their names, order and types: only help and defaults are the command's own."""
    compared = 0
    for node in ast.walk(ast.parse(Path(commands.__file__).read_text())):
        for each in getattr(node, "decorator_list", ()):
            if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "lazy":
                asked = getattr(commands, node.name)
                runs = getattr(import_module(f"g2rpo_core.cli.{each.args[0].value}"), node.name)
                assert get_type_hints(runs) == get_type_hints(asked), node.name
                assert list(inspect.signature(runs).parameters) == list(
                    inspect.signature(asked).parameters
                ), node.name
                compared += 1
    assert compared == 11


def test_help_waits_for_no_torch():
    script = (
        "import sys; from importlib import import_module; from typer.testing import CliRunner; "
        "from g2rpo_core.cli.commands import app\n"
        f"for command in {COMMANDS}: assert CliRunner().invoke(app, [*command.split(), "
        "'--help']).exit_code == 0, command\n"
        f"for module in {MODULES}: import_module(module)\n"
        "print(sorted({'torch', 'diffusers', 'transformers', 'gradio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_pictures_depend_on_prompt_seed_and_weights_and_say_what_made_them(project):
    def pictures(*words):
        words = ("a small red circle", "--out", "out", "--seeds", "1,3", *words)
        done = run_here(main, "generate", *words, folder=project)
        assert done.returncode == 0, done.stderr
        return [np.asarray(Image.open(project / file)) for file in done.stdout.split()]

    base, again, trained = pictures(), pictures(), pictures("--run", "g2rpo-1")
    half = pictures("--run", "g2rpo-1", "--trained-share", "0.5")
    assert len(base) == 2 and all(one.shape == (32, 32, 3) for one in base)
    assert all(np.array_equal(one, other) for one, other in zip(base, again))
    assert not np.array_equal(base[0], base[1])
    assert not np.array_equal(base[0], trained[0]) and not np.array_equal(trained[0], half[0])
    about = json.loads(Image.open(project / "out" / "g2rpo-1-0000-3.png").text["g2rpo"])
    expected = {"prompt": "a small red circle", "seed": 3, "steps": 3, "run": "g2rpo-1"}
    assert expected.items() <= about.items()
    # No other picture was written over, and prompts.csv says what each is
    names = [
        f"{run}-{number}-{seed}.png"
        for run, number in (("base", "0000"), ("g2rpo-1", "0000"), ("g2rpo-1", "0001"))
        for seed in (1, 3)
    ]
    table = pd.read_csv(project / "out" / "prompts.csv")
    assert table.file.tolist() == names == sorted(one.name for one in project.glob("out/*.png"))
    assert set(table.prompt) == {"a small red circle"} and table.seed.tolist() == [1, 3] * 3


def test_names_sort_as_prompts_and_seeds_do_however_many_there_are(tmp_path):
    prompts = [Prompt(str(number), f"prompt {number}", "") for number in range(10_002)]
    pictures = Pictures(tmp_path, ["base"], prompts, range(8, 12), {}, False)
    names = [
        pictures.path("base", number, seed).name
        for number in range(len(prompts))
        for seed in pictures.seeds
    ]
    assert (
        names == sorted(names) and names[0] == "base-00000-08.png" and len(set(names)) == len(names)
    )


def test_several_runs_are_all_drawn_in_the_order_given_and_put_into_one_picture(project):
    prompts = ["a small red circle", "a large blue square"]
    (project / "prompts.txt").write_text("\n".join(prompts))
    words = [
        "--file",
        "prompts.txt",
        "--seeds",
        "1-3",
        "--grid",
        "--out",
        "grid",
        "--run",
        "g2rpo-1",
        "--run",
        "base",
    ]
    done = run_here(main, "generate", *words, folder=project)
    names = [file.split("/")[1] for file in done.stdout.split()]
    assert done.returncode == 0 and len(names) == 2 * 2 * 3 + 1, done.stderr
    runs = [name.rsplit("-", 2)[0] for name in names[:-1]]
    assert runs == ["g2rpo-1"] * 6 + ["base"] * 6
    about = json.loads(Image.open(project / "grid" / "g2rpo-1-base-grid.png").text["g2rpo"])
    assert about["runs"] == ["g2rpo-1", "base"] and about["prompts"] == prompts
    table = pd.read_csv(project / "grid" / "prompts.csv")
    assert len(table) == 12 and set(table.file) == set(names[:-1])


A_CIRCLE = ["generate", "a circle"]
WHOLE = "generate: --steps must be at least 1 and at most 100"
FINITE = "generate: --guidance and --lora-scale must be finite numbers"
RISING = "probe: --granularities are rising whole numbers from 1"


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["generate", "a circle " * 20], "prompt 0000 has 41 tokens ('a circle"),
        (["generate"], "generate: give prompts, or a file of them with --file"),
        ([*A_CIRCLE, "--seeds", "1-x"], "generate: --seeds 1-x: give whole numbers from 0"),
        (
            [*A_CIRCLE, "--run", "g2rpo-9"],
            "g2rpo-9: no trained weights; profile tiny has base, g2rpo-1",
        ),
        ([*A_CIRCLE, "--steps", "0"], WHOLE),
        ([*A_CIRCLE, "--steps", "99999999"], WHOLE),
        ([*A_CIRCLE, "--guidance", "nan"], FINITE),
        ([*A_CIRCLE, "--lora-scale", "inf"], FINITE),
        (
            [*A_CIRCLE, "--seeds", "0-4000000000000"],
            "generate: --seeds 0-4000000000000: give whole numbers from 0",
        ),
        (["generate", "caf\udce9"], "prompt 0000 has the character '\\udce9': type it as UTF-8"),
        ([*A_CIRCLE, "--device", "mps"], "--device mps: only cuda and cpu are supported"),
        (
            [*A_CIRCLE, "--out", "/proc/pictures"],
            "--out /proc/pictures: cannot be written (No such file or directory)",
        ),
        ([*A_CIRCLE, "--out", "params.yaml"], "generate: --out params.yaml is not a folder"),
        (["generate", "--file", "nothing.txt"], "nothing.txt: no such prompt file"),
        (["probe", "--granularities", "3,1"], RISING),
        (
            ["probe", "--group", "1"],
            f"{RISING}, as 1,2,3; --prompts is at least 1, --group at least 2",
        ),
        (["probe", "--run", "g2rpo-9"], "g2rpo-9: no trained weights"),
        (["probe", "--device", "cuda:99"], "--device cuda:99: torch finds "),
        (["probe", "--device", "gpu"], "--device gpu: Expected one of cpu, cuda"),
        (
            ["probe", "--profile", "tiny_sd3"],
            "embeddings/tiny_sd3/train/part-00000.parquet: does not exist; the stage `embed` makes",
        ),
        (["doctor", "--profile", "tinny"], "profiles/tinny.yaml: no such profile; there are "),
        (
            ["profile", "show", "tinny"],
            "profiles/tinny.yaml: no such profile; there are ",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(project, words, complaint):
    assert refusal(main, *words, folder=project).startswith(f"error: {complaint}")


def test_the_probe_shows_every_step_and_the_same_as_json(project):
    words = ["probe", "--prompts", "2", "--group", "3", "--granularities", "1,3"]
    shown, listed = (run_here(main, *words, *more, folder=project) for more in ([], ["--json"]))
    assert shown.returncode == listed.returncode == 0, shown.stderr
    steps = json.loads(listed.stdout)
    assert [step["step"] for step in steps] == list(range(9)) and set(steps[0]["gap"]) == {"1", "3"}
    lines = shown.stdout.splitlines()
    assert lines[0] == "tiny, base: training reward hps + clip_score over 2 prompts, groups of 3"
    assert (
        lines[2].split()[:3] == ["0", "1.000", f"{steps[0]['spread']:.4f}"] and len(lines) == 2 + 9
    )


def test_the_doctor_names_what_is_missing_and_never_shows_a_token(project, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (project / "profiles" / "own.yaml").write_text(
        "extends: flux_hps\nprompts: {train: data/own.txt}\n"
    )
    done = run_here(main, "doctor", folder=project)
    assert done.returncode == 0 and "hf_secret" not in done.stdout
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["tokens in the environment"] == "HF_TOKEN"
    assert lines["Hugging Face hub"] == "logged in"
    assert lines["profile tiny"] == "nothing is missing"
    assert "the training prompts data/own.txt" in lines["profile own"]
    # profiles that need the same share a line
    (needs,) = (needs for names, needs in lines.items() if " flux_hps, flux_hps_clip, " in names)
    assert "the training prompts of ymhao/HPDv2, which dvc repro fetches" in needs
    named = [words for names in lines for words in re.findall(r"^profiles? (.*)", names)]
    assert sorted(", ".join(named).split(", ")) == sorted(
        path.stem for path in (project / "profiles").glob("*.yaml")
    )
    assert len(named) < 6


def test_profiles_are_listed_and_their_differences_shown():
    listed = run_here(main, "profile", "list", folder=ROOT)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == sorted(
        path.stem for path in (ROOT / "profiles").glob("*.yaml")
    )
    shown = run_here(main, "profile", "diff", "flux_hps_clip", "flux_hps", folder=ROOT)
    assert shown.stdout == "training.rewards.clip_score: 1.0 -> -\n"
    lora = run_here(
        main, "profile", "diff", "flux_hps_clip", "flux_lora_1gpu", folder=ROOT
    ).stdout.splitlines()
    assert (
        "training.lora.rank: - -> 32" in lora and "training.prompts_per_iteration: 16 -> 1" in lora
    )


def test_a_word_that_no_command_has_ends_with_status_two():
    done = run_here(main, "plan", "--gpu", "3", folder=ROOT)
    assert done.returncode == 2 and "No such option: --gpu" in done.stderr


@pytest.mark.pipeline
def test_a_studys_page_is_rendered_from_its_committed_table(tmp_path):
    page = tmp_path / "studies" / "marks_late" / "reports" / "report.html"
    for name in ("profiles", "stages", "g2rpo_core"):
        (tmp_path / name).symlink_to(ROOT / name)
    page.parents[1].mkdir(parents=True)
    for file in ("params.yaml", "results.parquet", "runs.txt"):
        (page.parents[1] / file).write_bytes((ROOT / "studies" / "marks_late" / file).read_bytes())
    done = run_here(main, "report", "--study", "marks_late", folder=tmp_path)
    assert done.stdout == f"{page}\n", done.stderr
    text = page.read_text()
    assert (
        "Late noise where fine detail counts" in text
        and "+0.0327 [+0.0213, +0.0440]" in text
        and "data:image" not in text
    )
    (page.parents[1] / "results.parquet").write_bytes(b"PAR1")
    damaged = run_module("g2rpo_core.cli", "report", "--study", "marks_late", folder=tmp_path)
    assert damaged.returncode == 1 and damaged.stderr.count("\n") == 1
    assert damaged.stderr.startswith("error: studies/marks_late/results.parquet: ")


def test_a_study_that_is_not_there_is_answered_with_those_that_are():
    known = ", ".join(sorted(path.parent.name for path in (ROOT / "studies").glob("*/params.yaml")))
    unknown = refusal(main, "report", "--study", "nope", folder=ROOT)
    assert unknown == f"error: report: --study nope: there are {known}\n"


def test_open_hands_the_report_to_the_browser(tmp_path, monkeypatch):
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    assert run_module("g2rpo_core.cli", "report", "--open").returncode == 0
    assert opened.read_text() == f"{(ROOT / 'reports' / 'report.html').as_uri()}\n"


def test_another_profiles_prompts_come_from_the_stage_and_a_mistake_is_one_line(tmp_path):
    for name in ("stages", "g2rpo_core"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    done, missing = (
        run_module("g2rpo_core.cli", "prompts", "--profile", name, folder=tmp_path)
        for name in ("tiny_verdict", "flux_hps")
    )
    assert done.stdout == "256 train prompts, 512 test prompts\n", done.stderr
    assert (tmp_path / "prompts" / "tiny_verdict" / "train.parquet").exists()
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1
    assert missing.stderr.startswith("error: prompts.test: ymhao/HPDv2 is not in the cache")


@pytest.mark.parametrize("name", ["tiny_verdict", "flux_lora_1gpu"])
def test_what_is_shown_is_the_whole_profile_with_where_each_value_comes_from(tmp_path, name):
    done = run_here(main, "profile", "show", name, folder=ROOT)
    assert done.returncode == 0, done.stderr
    (tmp_path / "shown.yaml").write_text(done.stdout)
    shown, profile = (
        load_profile(tmp_path / "shown.yaml"),
        load_profile(ROOT / "profiles" / f"{name}.yaml"),
    )
    for section in set(type(profile).model_fields) - {"methods"}:
        assert getattr(shown, section) == getattr(profile, section), section
    assert list(shown.methods) == list(profile.methods)
    for method in profile.methods:
        assert shown.run(method).method == profile.run(method).method
        assert shown.run(method).sampling == profile.run(method).sampling
        assert shown.run(method).training == profile.run(method).training
    comments = [line.partition("# ")[2] for line in done.stdout.splitlines() if "# " in line]
    assert any(comment.startswith(f"profiles/{name}.yaml:") for comment in comments)
    assert "default" in comments and "published" in comments
