"""The table of costs of docs/howto/choose.md has the numbers of the methods' own trees and objectives."""

from g2rpo_core.config import load_profile
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "howto" / "choose.md").read_text()


def test_the_table_of_costs_is_that_of_flux_profiles_methods():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    for name in profile.methods:
        run = profile.run(name)
        method, group = run.method, run.training.num_generations
        tree, objective = method.tree.build(run.sampling.steps), method.objective
        # an optimizer step for a part of the members meets a state that all share once each
        parts = objective.updates_per_rollout if isinstance(objective.updates_per_rollout, int) else 1
        trained = sum(parts if before == 1 else before for before, _ in objective.trained_rows(tree, group))
        rollout, other = tree.num_forward_evals(group), objective.extra_forwards * trained
        images = len(tree.leaves) * len(tree.leaves[0]) * group
        numbers = (rollout, trained, other, images, rollout + 3 * trained + other)
        assert f"| `{name}` | {' | '.join(f'{number:,}' for number in numbers)} |" in PAGE
