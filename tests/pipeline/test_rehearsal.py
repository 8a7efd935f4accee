"""Profiles of published weights at true size on the machines that they name, pretended."""

import re

import pytest

from g2rpo_core.estimate.plan import make_plan
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.pipeline.test_flux_profiles import HUB, PROFILES
from tools.reference import machines_of


@pytest.mark.pipeline
@pytest.mark.parametrize("name", HUB)
def test_it_fits_the_machines_that_it_names(name):
    """By the plan of its first method, and of every method of one profile."""
    profile, named = PROFILES[name], machines_of(name)
    assert profile.training.processes in ("auto", named.gpus)
    assert profile.evaluation.processes == "auto"
    for method in list(profile.methods)[: None if name == "flux_hps_clip" else 1]:
        assert make_plan(profile, method, named).fits, method


@pytest.mark.slow
@pytest.mark.pipeline
def test_the_plan_is_within_a_tenth_of_what_the_stages_take(tmp_path):
    """But for scoring, whose time both only estimate, and which is a larger share of few pixels."""
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    name = "flux_hps_clip"
    named = machines_of(name)
    words = [f"--gpus={named.gpus}", f"--nodes={named.nodes}", f"--memory={named.memory:g}"]
    done = run_module("pipeline.rehearse", "--profile", name, *words, folder=tmp_path)
    assert done.returncode == 0 and ": fits\n" in done.stdout, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +([\d. ]+)$", done.stdout, re.MULTILINE)
    found = {phase: list(map(float, figures.split())) for phase, figures in rows}
    assert list(found) == ["embed", "load", "rollout", "update", "save", "evaluate"]
    for phase in ("rollout", "update"):
        gib, planned, sent, planned_sent = found[phase]
        assert gib == pytest.approx(planned, rel=0.1), phase
        assert sent == pytest.approx(planned_sent, rel=0.1), phase
    plan = make_plan(PROFILES[name], "g2rpo", named)
    seconds = float(re.search(r"overlapped: ([\d.]+), planned", done.stdout)[1])
    apart = abs(plan.seconds_per_iteration - seconds)
    assert apart <= 0.1 * seconds + 0.2 * plan.seconds["scoring"]


@pytest.mark.pipeline
def test_a_compiler_that_is_missing_is_named(tmp_path):
    words = ("--profile", "flux_smoke", "--gpus", "1", "--memory", "79")
    done = run_module("pipeline.rehearse", *words, PATH=str(tmp_path))
    assert done.returncode == 1 and done.stderr.startswith("error: rehearse needs a C++ compiler")
    assert done.stderr.count("\n") == 1
