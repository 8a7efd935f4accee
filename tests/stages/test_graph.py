"""dvc.yaml against the code: what a stage reads is what it declares, or a change would silently not run it again."""

import importlib
import os
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from g2rpo_core.config import load_study

from .closure import ROOT, closure

STAGES = {
    stage if file == "dvc.yaml" else f"study: {stage}": entry
    for file in ("dvc.yaml", "studies/study.yaml")
    for stage, entry in YAML(typ="safe", pure=True).load((ROOT / file).read_text())["stages"].items()
}


def module_of(stage: str) -> str:
    return STAGES[stage]["cmd"].split()[2].removeprefix("stages.")


@pytest.mark.parametrize("stage", STAGES)
def test_code_dependencies_are_what_the_module_imports(stage):
    declared = sorted(path for path in STAGES[stage]["deps"] if path.endswith(".py"))
    assert declared == closure(module_of(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_the_sections_that_the_module_loads(stage):
    (declared,) = (value for entry in STAGES[stage]["params"] for key, value in entry.items() if key.startswith("profiles/"))
    sections = set(importlib.import_module(f"stages.{module_of(stage)}").SECTIONS)
    if stage.startswith("study"):  # brings its methods itself, and lays changes over the others
        own = next(value for entry in STAGES[stage]["params"] for key, value in entry.items() if key.startswith("studies/"))
        assert "changes" in own and any(name.startswith("entries") for name in own) == ("methods" in sections)
        sections -= {"methods"}
    assert {name.split(".")[0] for name in declared} == sections


@pytest.mark.parametrize("folder", sorted((ROOT / "studies").glob("*/params.yaml")), ids=lambda file: file.parent.name)
def test_studies_share_one_graph_and_are_valid(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    graph = folder.with_name("dvc.yaml")
    assert graph.is_symlink() and graph.resolve() == ROOT / "studies" / "study.yaml"
    study = load_study(folder.parent.name)
    assert set(study.methods) == set(study.entries)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sees_no_section_but_its_own(stage):
    source = (ROOT / "stages" / f"{module_of(stage)}.py").read_text()
    assert source.count("sections(args, *SECTIONS)") == 1
    assert module_of(stage) == "report" or "load_profile" not in source


@pytest.mark.parametrize(
    "command, message",
    [
        (["embed", "--profile", "tiny"], "the stage `prompts` makes it: dvc repro prompts"),
        (["train", "--profile", "tiny", "--method", "g2rpo", "--seed", "1"], "the stage `models` makes it: dvc repro models"),
        (
            ["evaluate", "--profile", "tiny", "--method", "g2rpo", "--seed", "1"],
            "the stage `train@g2rpo-1` makes it: dvc repro train@g2rpo-1",
        ),
        (["report", "--profile", "tiny"], "the stage `evaluate` makes it: dvc repro evaluate"),
        (
            ["train", "--profile", "tiny", "--method", "ppo", "--seed", "1"],
            "profiles/tiny.yaml: methods: there is no 'ppo', only g2rpo, ",
        ),
        (["models", "--profile", "tinny"], "profiles/tinny.yaml: no such profile; there are"),
    ],
)
def test_a_stage_without_its_inputs_says_which_stage_makes_them(command, message, tmp_path):
    for name in ("profiles", "params.yaml", "reports"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-m", f"stages.{command[0]}", *command[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 1
    assert message in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_published_weights_that_cannot_be_had_say_what_to_do(tmp_path):
    for name in ("profiles", "params.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "stages.models", "--profile", "flux_hps_clip"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**environment(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert (
        done.stderr.startswith("error: models.repos.pipeline: black-forest-labs/FLUX.1-dev is not in the cache")
        and done.stderr.count("\n") == 1
    )


def environment() -> dict:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
