"""The commands that ask nothing of the pipeline but its models, as a user runs them."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from diffusers import FluxTransformer2DModel
from PIL import Image

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here, run_module
from tests.fixtures.projects import link_made
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
MODULES = ("pipeline.rehearse", "pipeline.launch", "pipeline.todo")
pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module")
def project(models, embeddings_folder, tmp_path_factory):
    """A folder with the profiles, the tiny models, and a run of other weights than the base's."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    (folder / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    link_made(folder, "tiny", models, embeddings_folder)
    trained = FluxTransformer2DModel.from_pretrained(models / "pipeline" / "transformer")
    randomize(trained)
    trained.save_pretrained(folder / "runs" / "tiny" / "g2rpo-1" / "transformer")
    return folder


def test_every_command_helps_with_an_example_and_waits_for_no_torch():
    script = (
        "import re, sys; from importlib import import_module; from typer.testing import CliRunner; "
        "from g2rpo_core.cli.commands import app\n"
        f"for command in {COMMANDS}:\n"
        "    done = CliRunner().invoke(app, [*command.split(), '--help'])\n"
        "    said = re.sub(r'\\s+', ' ', done.stdout)\n"
        "    assert done.exit_code == 0 and f'Example: g2rpo {command}' in said, command\n"
        f"for module in {MODULES}: import_module(module)\n"
        "print(sorted({'torch', 'diffusers', 'transformers', 'gradio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_pictures_depend_on_prompt_seed_and_weights_and_say_what_made_them(project):
    def pictures(*words):
        words = ("a small red circle", "--out", "out", "--seeds", "1,3", "--steps", "3", *words)
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


A_CIRCLE = ["generate", "a circle"]
WHOLE = "generate: --steps must be at least 1 and at most 100"
FINITE = "generate: --guidance and --lora-scale must be finite numbers"
RISING = "probe: --granularities are rising whole numbers from 1"


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["generate", "a circle " * 20], "prompt 0000 has 41 tokens ('a circle"),
        (
            [*A_CIRCLE, "--run", "g2rpo-9"],
            "g2rpo-9: no trained weights; profile tiny has base, g2rpo-1",
        ),
        ([*A_CIRCLE, "--steps", "0"], WHOLE),
        ([*A_CIRCLE, "--guidance", "nan"], FINITE),
        ([*A_CIRCLE, "--device", "mps"], "--device mps: only cuda and cpu are supported"),
        (
            [*A_CIRCLE, "--out", "/proc/pictures"],
            "--out /proc/pictures: cannot be written (No such file or directory)",
        ),
        (
            ["probe", "--group", "1"],
            f"{RISING}, as 1,2,3; --prompts is at least 1, --group at least 2",
        ),
        (
            ["probe", "--profile", "tiny_sd3"],
            "embeddings/tiny_sd3/train/part-00000.parquet: does not exist; the stage `embed` makes",
        ),
        (["doctor", "--profile", "tinny"], "profiles/tinny.yaml: no such profile; there are "),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_the_doctor_says_what_a_published_profile_lacks_and_what_to_do(hub, tmp_path, monkeypatch):
    """With a hub that has no more than two repositories."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    models = load_profile(ROOT / "profiles" / "flux_lora_1gpu.yaml").models.repos
    for name, licensed in (("pipeline", "token"), ("hps", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "HPS_v2.1_compressed.pt").write_text("{}")
        hub.add(models[name].repo, models[name].revision, tmp_path / name, licensed)
    done = run_here(main, "doctor", "--profile", "flux_lora_1gpu", folder=tmp_path)
    expected = (
        "RED  GPUs: torch finds none here: .*; else go to a node with GPUs",
        "RED  hub: .*FLUX.1-dev is gated: accept its licence at .*hf auth login",
        "ok   hub: xswu/HPSv2: may be downloaded",
        "RED  hub: .*PickScore_v1 does not exist",
        "(ok |RED)  disk of .* GiB free, needs [0-9]+",
        "(ok |RED)  host memory: ",
    )
    for pattern in expected:
        assert re.search(f"^{pattern}", done.stdout, re.MULTILINE), (pattern, done.stdout)
    red = len(re.findall("^RED", done.stdout, re.MULTILINE))
    told = f"error: doctor: {red} checks of profile flux_lora_1gpu are red\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_profiles_are_listed_and_their_differences_shown():
    listed = run_here(main, "profile", "list", folder=ROOT)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == sorted(
        path.stem for path in (ROOT / "profiles").glob("*.yaml")
    )
    shown = run_here(main, "profile", "diff", "flux_hps_clip", "flux_hps", folder=ROOT)
    assert shown.stdout == "training.rewards.clip_score: 1.0 -> -\n"


def test_another_profiles_prompts_come_from_the_stage(tmp_path):
    for name in ("stages", "g2rpo_core", "profiles", "params.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = run_module("g2rpo_core.cli", "prompts", "--profile", "tiny_verdict", folder=tmp_path)
    assert done.stdout == "256 train prompts, 512 test prompts\n", done.stderr
    assert (tmp_path / "prompts" / "tiny_verdict" / "train.parquet").exists()


def test_what_is_shown_is_the_whole_profile_with_where_each_value_comes_from(tmp_path):
    name = "flux_lora_1gpu"
    done = run_here(main, "profile", "show", name, folder=ROOT)
    assert done.returncode == 0, done.stderr
    (tmp_path / "shown.yaml").write_text(done.stdout)
    shown, profile = (
        load_profile(tmp_path / "shown.yaml"),
        load_profile(ROOT / "profiles" / f"{name}.yaml"),
    )
    for section in set(type(profile).model_fields) - {"methods"}:
        assert getattr(shown, section) == getattr(profile, section), section
    runs = ([each.run(method) for method in each.methods] for each in (shown, profile))
    assert next(runs) == next(runs)
    comments = [line.partition("# ")[2] for line in done.stdout.splitlines() if "# " in line]
    assert any(comment.startswith(f"profiles/{name}.yaml:") for comment in comments)
    assert "default" in comments and "published" in comments
