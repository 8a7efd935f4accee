"""docs/howto/choose.md has the costs of the methods' own trees and objectives."""

from math import floor

import pytest

from g2rpo_core.config import load_profile
from g2rpo_core.config.costs import cost_of_prompt
from g2rpo_core.config.profile import Profile
from g2rpo_core.estimate.cards import CARDS, rate_of
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import Work, make_plan
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "howto" / "choose.md").read_text()
WORDS = " ".join(PAGE.split())
FLUX, SD35 = "flux_hps_clip", "sd35_medium_hps_clip"


def profile_of(name: str, **entries: dict) -> Profile:
    """Return a profile, with more entries."""
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    return profile.changed(methods={**profile.methods, **entries})


def work_of(profile: Profile, name: str) -> Work:
    """Return what the planner counts; its evaluations and compute are means over a run."""
    return Work(profile, name, Machines(1, CARDS["h200"].memory), None)


def test_the_table_of_costs_is_that_of_flux_profiles_methods():
    profile = profile_of(FLUX)
    for name in profile.methods:
        cost, work = cost_of_prompt(profile.run(name)), work_of(profile, name)
        counts = (work.evaluations, cost.trained, cost.others, cost.images, work.compute)
        numbers = [floor(count + 0.5) for count in counts]  # a half is rounded up
        assert f"| `{name}` | {' | '.join(f'{number:,}' for number in numbers)} |" in PAGE


def test_what_300_iterations_cost_is_what_the_table_of_costs_gives():
    profile = profile_of(FLUX)
    millions = [
        f"{work_of(profile, name).compute * 16 * 300 / 1e6:.1f}"
        for name in ("g2rpo", "g2rpo_no_mgai", "dance_grpo", "mix_grpo")
    ]
    said = (
        "cost G²RPO {} million forward evaluations in total, G²RPO w/o MGAI {}, DanceGRPO {} and "
        "MixGRPO {}."
    )
    assert said.format(*millions) in WORDS


@pytest.mark.parametrize(
    ("name", "entry", "prompts", "epochs", "row"),
    [
        (FLUX, "g2rpo", 16, 300, "G²RPO | FLUX.1-dev | HPS |"),
        (FLUX, "g2rpo", 16, 300, "G²RPO | FLUX.1-dev | HPS + CLIP |"),
        (FLUX, "dance_grpo", 16, 200, "DanceGRPO | FLUX.1-dev | HPS |"),
        (FLUX, "mix_grpo", 32, 300, "MixGRPO | FLUX.1-dev |"),
        (FLUX, "e_grpo", 8, 300, "E-GRPO | FLUX.1-dev |"),
        (SD35, "flow_grpo_own", 48, 2500, "Flow-GRPO | SD3.5-M | GenEval |"),
        (SD35, "flow_grpo_own", 48, 1000, "Flow-GRPO | SD3.5-M | OCR |"),
        (SD35, "nft", 48, 1000, "DiffusionNFT | SD3.5-M, no guidance | GenEval |"),
        (SD35, "nft", 48, 75, "DiffusionNFT | SD3.5-M, no guidance | OCR |"),
    ],
)
def test_planned_compute_is_that_of_published_settings(name, entry, prompts, epochs, row):
    """prompts: of an epoch. An epoch may have two optimizer steps, which papers call iterations."""
    own = {"sampling": {"steps": 10, "guidance": 1.0}, "training": {"num_generations": 24}}
    profile = profile_of(name, e_grpo={}, nft={"method": "diffusion_nft", **own})
    millions = work_of(profile, entry).compute * prompts * epochs / 1e6
    said = f"{millions:.0f}" if millions > 100 else f"{millions:.1f}"
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {row}"))
    assert line.split(" | ")[6].removeprefix("≤ ") == said


def test_a_forward_of_sd35_is_a_small_part_of_one_of_flux():
    flux, sd35 = (work_of(profile_of(name), "g2rpo").flops(training=False) for name in (FLUX, SD35))
    share = sd35 / flux
    assert f"has {share:.0%} of the operations".replace("%", " %") in WORDS


def test_published_loops_took_about_three_times_the_plan():
    """On H100, without compiled blocks: hours of 200 iterations on 16, seconds of one on 32."""
    at_25_steps = {"sampling": {"steps": 25}, "training": {"prompts_per_iteration": 32}}
    profile = profile_of(
        FLUX,
        dance_grpo={"training": {"iterations": 200}},
        mix_of_32={"method": "mix_grpo", **at_25_steps},
        dance_of_32={"method": "dance_grpo", **at_25_steps},
    )
    plan = lambda name, gpus: make_plan(
        profile, name, Machines(gpus, CARDS["h100"].memory), None, rate_of("h100", False)
    )
    hours = plan("dance_grpo", 16).gpu_hours
    seconds = [plan(name, 32).seconds_per_iteration for name in ("mix_of_32", "dance_of_32")]
    assert f"up to {16 * 12} GPU-hours on H800, and are {hours:.0f} on H100" in WORDS
    assert f"291 s; the plan has {seconds[0]:.0f} and {seconds[1]:.0f}." in WORDS
    assert all(2.5 < ratio < 3.5 for ratio in (16 * 12 / hours, 149 / seconds[0], 291 / seconds[1]))


def test_what_a_replication_costs_is_what_the_planner_says():
    """On 8 H100; twelve runs are three seeds of four methods."""
    profile = profile_of(SD35)
    rate = rate_of("h100", profile.training.parallel.compile)
    machines = Machines(8, CARDS["h100"].memory)
    hours = [
        round(make_plan(profile, name, machines, None, rate).gpu_hours)
        for name in ("g2rpo", "g2rpo_no_mgai", "dance_grpo", "mix_grpo")
    ]
    said = (
        "`g2rpo plan` gives {} GPU-hours for 300 iterations of G²RPO, {} w/o MGAI, {} for "
        "DanceGRPO and {} for MixGRPO: twelve runs, three seeds of each, take about {}, and "
        "DanceGRPO and MixGRPO at G²RPO's GPU-hours {} more."
    )
    assert said.format(*hours, 3 * sum(hours), 6 * hours[0]) in WORDS
