"""`g2rpo probe --cliff`: some optimizer steps at several rates, and what held-out scores lose."""

import json
import math

import pytest
import torch

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.cli.main import main
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.inference.cliff import Change, Walk, cliff, walks
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.projects import small_project
from tests.fixtures.rollouts import redness


@pytest.fixture
def walked(policy, embeddings, settings):
    """walked(rates) -> the walks."""

    def run(rates, updates=3):
        sampling, usual = settings
        changed = usual.model_copy(update={"num_generations": 4, "prompts_per_iteration": 1})
        method = METHODS["g2rpo"].changed(tree={"sde_steps": (0, 2), "granularities": (1, 3)})
        made = ResolvedRun(method, sampling, changed, "mine", None, "g2rpo")
        both, trained = (embeddings, embeddings), {"redness": redness}
        return list(walks(policy, made, rates, updates, both, trained, trained, 6, 0))

    return run


def test_every_walk_begins_from_the_same_weights_which_are_there_again_at_the_end(policy, walked):
    before = [each.clone() for each in policy.trained_parameters().values()]
    found, alone = walked([1e-4, 1e-3]), walked([1e-3])
    assert found[1] == alone[0] and 0 < found[0].drift < found[1].drift
    assert all(map(torch.equal, before, policy.trained_parameters().values()))
    # Each iteration of this entry makes one step
    assert [(walk.rate, walk.updates) for walk in found] == [(1e-4, 3), (1e-3, 3)]


def made(rate: float, mean: float, error: float = 0.01) -> Walk:
    return Walk("mine", rate, 20, 0.1, {"verifier": Change(mean, error)})


def test_the_cliff_is_the_smallest_rate_from_which_on_the_judge_is_lost():
    held, fallen = made(1.0, -0.019), made(2.0, -0.021)
    assert not held.changes["verifier"].lost and fallen.changes["verifier"].lost
    assert cliff([held, fallen, made(4.0, -0.5)], "verifier") == 2.0
    # One that falls at a small rate and not at a larger one has no cliff there
    assert cliff([made(1.0, -0.5), made(2.0, 0.0), made(4.0, -0.5)], "verifier") == 4.0
    assert cliff([made(1.0, -0.5), made(2.0, 0.0)], "verifier") is None
    assert cliff([held, made(2.0, math.nan)], "verifier") == 2.0
    # The error of a single prompt is not known: it cannot be lost
    assert not Change(-1.0, math.nan).lost


@pytest.fixture
def built(tmp_path, models, embeddings_folder):
    """A checkout of profile tiny with models and embeddings."""
    small_project(tmp_path, models)
    (tmp_path / "embeddings" / "tiny").mkdir(parents=True)
    for part in ("train", "test"):
        (tmp_path / "embeddings" / "tiny" / part).symlink_to(embeddings_folder)
    return tmp_path


def test_the_command_walks_names_the_cliff_and_refuses_what_it_cannot_do(built):
    words = ["probe", "--cliff", "--prompts", "2", "--updates", "2", "--methods", "mix_grpo"]
    # No rate that is finite gives weights that are
    out = run_here(main, *words, "--rates", "1,1e30", folder=built).stdout
    assert "cliff at 2.0e+25, where verifier is lost; begin with a quarter, 5.0e+24" in out
    (row,) = json.loads(run_here(main, *words, "--rates", "1", "--json", folder=built).stdout)
    # Four updates an iteration: no fewer can be made
    assert row["updates"] == 4 and set(row["changes"]) == {"verifier", "hps", "clip_score"}
    for change, complaint in (
        (["--rates", "2,1"], "--rates are rising factors of the rate, as 1,2,4,8 (got '2,1')"),
        (["--methods", "x"], "--methods x: profile tiny has only g2rpo,"),
        (["--judge", "hsp"], "--judge hsp: rewards.hsp: one of your own needs `class"),
    ):
        assert complaint in refusal(main, *words, *change, folder=built)
