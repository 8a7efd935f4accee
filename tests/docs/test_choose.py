"""docs/howto/choose.md has the costs of the methods' own trees and objectives."""

from g2rpo_core.config import load_profile
from g2rpo_core.config.costs import cost_of_prompt
from g2rpo_core.estimate.cards import CARDS, rate_of
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import make_plan
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "howto" / "choose.md").read_text()


def test_the_table_of_costs_is_that_of_flux_profiles_methods():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    for name in profile.methods:
        cost = cost_of_prompt(profile.run(name))
        numbers = (cost.evaluations, cost.trained, cost.others, cost.images, round(cost.total))
        assert f"| `{name}` | {' | '.join(f'{number:,}' for number in numbers)} |" in PAGE


WORDS = " ".join(PAGE.split())


def test_what_300_iterations_cost_is_what_the_table_of_costs_gives():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    millions = [
        f"{cost_of_prompt(profile.run(name)).total * 16 * 300 / 1e6:.1f}"
        for name in ("g2rpo", "g2rpo_no_mgai", "dance_grpo", "mix_grpo")
    ]
    said = (
        "cost G²RPO {} million forward evaluations in total, G²RPO w/o MGAI {}, DanceGRPO {} and "
        "MixGRPO {}."
    )
    assert said.format(*millions) in WORDS


def test_what_a_replication_costs_is_what_the_planner_says():
    """On 8 H100; twelve runs are three seeds of four methods."""
    profile = load_profile(ROOT / "profiles" / "sd35_medium_hps_clip.yaml")
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
