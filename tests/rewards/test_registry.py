"""What the project has to know of every built-in reward fits together."""

import pytest

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards.registry import REWARDS, SPECS, labels, max_missing, models_of, settings_of
from g2rpo_core.rewards.spec import RewardSettings

CUSTOM = {
    "redness": {"class": "my_rewards:Redness"},
    "blueness": {"class": "my_rewards:Blueness", "label": "Blue", "max_missing": 0.3},
}


def test_names_aliases_and_labels_belong_to_one_reward_each():
    names = [name for spec in SPECS for name in (spec.name, *spec.aliases)]
    assert len(set(names)) == len(names) and list(REWARDS) == [spec.name for spec in SPECS]
    assert len({spec.label for spec in SPECS}) == len(SPECS) and all(spec.label for spec in SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_reward_says_which_models_it_reads_and_they_are_built(spec, models):
    assert len(set(spec.models)) == len(spec.models) and set(spec.open_clip) <= set(spec.models)
    assert models_of({}, spec.name) == spec.models
    store = ModelStore(models)
    assert all(store.folder(name).is_dir() for name in spec.models)
    assert all("architecture" in store.entry(name) for name in spec.open_clip)
    assert bool(spec.models) != spec.worlds_only  # the verifier alone needs none
    assert spec.size is None or min(spec.size.parameters, spec.size.bytes_per_image, spec.size.flops_per_image) > 0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_settings_that_a_section_leaves_out_have_defaults(spec):
    settings = settings_of({}, spec.name)
    assert isinstance(settings, spec.settings) and isinstance(settings, RewardSettings) and not settings.remote
    assert max_missing([spec.name], {}) == {spec.name: settings.max_missing}


def test_a_reward_from_a_server_and_one_of_the_users_own_need_no_model():
    served = {"unified_reward": {"server": {"url": "http://localhost:8000/v1", "model": "UnifiedReward"}}}
    assert models_of({}, "unified_reward") == ("unified_reward",)
    assert models_of(served, "unified_reward") == () and settings_of(served, "unified_reward").remote
    assert models_of(CUSTOM, "redness") == ()


def test_rewards_of_the_users_own_stand_beside_the_built_in_ones():
    assert labels(CUSTOM) == {spec.name: spec.label for spec in SPECS} | {"redness": "redness", "blueness": "Blue"}
    assert max_missing(["hps", "blueness"], CUSTOM) == {"hps": 0.05, "blueness": 0.3}
