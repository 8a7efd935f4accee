"""docs/howto/choose.md has the costs of the methods' own trees and objectives."""

from g2rpo_core.config import load_profile
from g2rpo_core.config.costs import cost_of_prompt
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "howto" / "choose.md").read_text()


def test_the_table_of_costs_is_that_of_flux_profiles_methods():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    for name in profile.methods:
        cost = cost_of_prompt(profile.run(name))
        numbers = (cost.evaluations, cost.trained, cost.others, cost.images, round(cost.total))
        assert f"| `{name}` | {' | '.join(f'{number:,}' for number in numbers)} |" in PAGE
