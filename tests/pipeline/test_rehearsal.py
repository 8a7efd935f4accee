"""Profiles of published weights at true size on the machines that they name, pretended."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from g2rpo_core.config import load_profile, resolve
from g2rpo_core.estimate.machines import RESERVE_GIB, Machines, count_nodes
from g2rpo_core.estimate.plan import make_plan
from pipeline.rehearsal import stub
from tests.conftest import ROOT
from tests.fixtures.commands import run_module

SMOKE = ["--gpus", "1", "--memory", "79", "--phase", "embed"]
PHASES = ["load", "embed", "rollout", "update", "save", "evaluate"]
REHEARSED = (
    "sd35_medium_lora_1gpu",
    "flux_hps_clip",
    "flux_lora_1gpu",
)  # `make rehearse` rehearses all


def machines_of(profile: str) -> list[str]:
    """The words of the command that the profile's comment gives."""
    text = (ROOT / "profiles" / f"{profile}.yaml").read_text()
    return re.search(
        rf"`g2rpo rehearse --profile {profile} (--gpus \d+(?: --nodes \d+)? --memory \d+)`", text
    )[1].split()


PROFILES = {
    path.stem: machines_of(path.stem)
    for path in sorted((ROOT / "profiles").glob("*.yaml"))
    if load_profile(path).models.source == "hub"
}


def rehearse(
    profile: str, words: list[str], folder: Path
) -> tuple[dict, subprocess.CompletedProcess]:
    """The command with --json in `folder`, with the project's profiles unless it has others."""
    if not (folder / "profiles").exists():
        (folder / "profiles").symlink_to(ROOT / "profiles")
    done = run_module("pipeline.rehearse", "--profile", profile, "--json", *words, folder=folder)
    last = done.stdout.strip().split("\n")[-1]
    return json.loads(last) if last.startswith("{") else {}, done


def machines(profile: str) -> Machines:
    """Those that its comment names."""
    words = dict(zip(PROFILES[profile][::2], PROFILES[profile][1::2]))
    gpus = int(words["--gpus"])
    return Machines(gpus, float(words["--memory"]), int(words.get("--nodes", count_nodes(gpus))))


@pytest.mark.pipeline
@pytest.mark.parametrize("name", PROFILES)
def test_every_method_is_planned_and_fits(name):
    """By arithmetic; `make rehearse` runs them all."""
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    named = machines(name)
    assert profile.training.processes in ("auto", named.gpus)
    assert profile.evaluation.processes == "auto"
    for method in profile.methods:
        assert make_plan(profile, method, named).fits, method


@pytest.mark.pipeline
def test_a_phase_alone_is_rehearsed_and_what_could_not_start_is_said(tmp_path):
    data = resolve(ROOT / "profiles" / "flux_lora_1gpu.yaml").data
    data["training"] |= {"processes": 4, "prompts_per_iteration": 4}
    (tmp_path / "profiles").mkdir()
    YAML().dump(data, tmp_path / "profiles" / "four.yaml")
    found, done = rehearse("four", ["--gpus", "1", "--memory", "80", "--phase", "embed"], tmp_path)
    assert done.returncode == 1, done.stderr
    assert found["problems"] == [
        "start: training.processes is 4, but there are 1 GPUs: write auto, or 1"
    ]
    assert (
        list(found["peak_gib"]) == ["embed"] and 9.0 < found["peak_gib"]["embed"] < 12.0
    )  # T5 has 8.9 GiB in bfloat16


def test_no_module_of_the_checkout_ends_the_process_that_imports_it():
    """The rehearsal's own did, with CUDA builds of torch, and every test with it."""
    packages = ("pipeline", "stages", "flows", "studies", "benchmarks", "g2rpo_core")
    code = """if True:
        import importlib, pkgutil, sys
        import torch
        packages, sys.argv[1:] = sys.argv[1:], []
        walked = [pkgutil.walk_packages([package], f"{package}.") for package in packages]
        names = [module.name for modules in walked for module in modules]
        for name in names:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        print(len(names))
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *packages], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and int(done.stdout.splitlines()[-1]) > 150, done.stderr


@pytest.mark.pipeline
@pytest.mark.parametrize("found", [b"", b"no library"])
def test_a_part_that_ends_without_figures_shows_why(found, tmp_path):
    """The part's process cannot load a library that was cut or replaced."""
    library = stub.build(tmp_path / ".cache" / "rehearsal")
    library.write_bytes(found)
    _, done = rehearse("flux_smoke", SMOKE, tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: rehearse: embed ended without figures, with status 1: OSError: "
    )
    assert str(library.name) in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (
            None,
            (
                "error: rehearse needs a C++ compiler: install g++ (Debian: apt install g++), "
                "then the same again\n"
            ),
        ),
        (
            "echo old.cpp: error: no such option >&2; exit 1",
            "error: rehearse: g++ cannot compile stub.cpp, which needs C++20: old.cpp: error",
        ),
    ],
)
def test_a_compiler_that_is_missing_or_too_old_is_named(compiler, said, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    if compiler:
        (tmp_path / "bin" / "g++").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "bin" / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    _, done = rehearse("flux_smoke", SMOKE, tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, method, phases",
    [
        (REHEARSED[0], "g2rpo_coarse", ["rollout", "update", "evaluate"]),
        *(pytest.param(name, "g2rpo", PHASES, marks=pytest.mark.engines) for name in REHEARSED),
    ],
)
def test_a_profile_fits_the_machines_it_names(name, method, phases, tmp_path):
    """The plan is within a tenth of what the stages take, but for scoring."""
    words = ["--method", method, *(word for phase in phases for word in ("--phase", phase))]
    found, done = rehearse(name, [*PROFILES[name], *words], tmp_path)
    assert done.returncode == 0 and found["fits"] and not found["problems"], done.stderr + str(
        found
    )
    assert list(found["peak_gib"]) == phases
    named = machines(name)
    plan = make_plan(load_profile(ROOT / "profiles" / f"{name}.yaml"), method, named)
    planned = {"rollout": ("rollout", "decoding", "scoring"), "update": ("update", "optimizer")}
    for phase, parts in planned.items():
        gib = max(plan.phases_gib[part] for part in parts) - RESERVE_GIB
        assert gib == pytest.approx(found["peak_gib"][phase], rel=0.1), phase
        if named.gpus > 1:
            assert plan.sent_gb[phase] == pytest.approx(
                found["collectives"][phase]["gb"], rel=0.1
            ), phase
    scoring = plan.seconds["scoring"] / plan.seconds_per_iteration  # which both only estimate
    assert plan.seconds_per_iteration == pytest.approx(
        found["seconds_per_iteration"], rel=0.1 + 0.1 * scoring
    )


@pytest.mark.slow
@pytest.mark.engines
def test_without_gradient_checkpointing_the_papers_setting_does_not_fit(tmp_path):
    data = resolve(ROOT / "profiles" / "flux_hps.yaml").data
    data["training"]["gradient_checkpointing"] = False
    (tmp_path / "profiles").mkdir()
    YAML().dump(data, tmp_path / "profiles" / "keeps_all.yaml")
    found, done = rehearse("keeps_all", [*PROFILES["flux_hps"], "--phase", "update"], tmp_path)
    assert done.returncode == 1 and not found["fits"]
    assert (
        found["problems"][0].startswith("train: OutOfMemoryError: ")
        and "in the phase 'update'" in found["problems"][0]
    )
