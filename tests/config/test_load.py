"""Profiles that extend others, and where each value of a profile comes from."""

import pytest
from pydantic.json_schema import models_json_schema

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.config import Profile, load_profile, resolve
from g2rpo_core.config.load import KEEPS_NULL
from g2rpo_core.rewards.registry import SPECS
from tests.conftest import ROOT
from tests.fixtures.errors import refused


@pytest.fixture
def profiles(tmp_path):
    """A folder with the project's profile `tiny`; profiles(name, text) writes another beside it."""
    (tmp_path / "tiny.yaml").write_text((ROOT / "profiles" / "tiny.yaml").read_text())

    def write(name: str, text: str):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


def test_a_profile_that_extends_another_is_laid_over_it_key_by_key(profiles, tiny):
    profiles(
        "mine",
        "extends: tiny\ntraining: {iterations: 7, monitor: {every: 3}}\n"
        "evaluation: {rewards: [clip_score, hps]}\n",
    )
    deeper = load_profile(profiles("deeper", "extends: mine\ntraining:\n  monitor: {prompts: 9}\n"))
    training = deeper.training
    assert (training.iterations, training.monitor.every, training.monitor.prompts) == (7, 3, 9)
    assert training.monitor.rewards == tiny.training.monitor.rewards
    # A list is a value: it takes the place of the other
    rewards = {"rewards": ("clip_score", "hps")}
    assert deeper.evaluation == tiny.evaluation.model_copy(update=rewards)
    assert (deeper.models, deeper.methods) == (tiny.models, tiny.methods)


def test_null_takes_an_inherited_key_away(profiles, tiny):
    text = (
        "extends: tiny\ntraining: {rewards: {clip_score: null}}\nevaluation: {diversity: null}\n"
        "methods: {flow_grpo: null, dance_grpo: {training: null}}\n"
    )
    mine = load_profile(profiles("mine", text))
    assert mine.training.rewards == {"hps": 1.0}
    assert mine.evaluation.diversity is None
    assert list(mine.methods) == [name for name in tiny.methods if name != "flow_grpo"]
    assert mine.run("dance_grpo").training == mine.training


def test_null_is_none_where_none_is_a_value_of_its_own(profiles):
    """Not the default, also where it repeats or takes back what a parent says."""
    profiles(
        "first",
        "extends: tiny\ntraining: {tracking: {samples: {every: 5}}}\n"
        "models: {image_reward: {muon_rate: 0.01}}\n",
    )
    null = "training: {tracking: {samples: null}}\nmodels: {image_reward: {muon_rate: null}}\n"
    profiles("second", f"extends: first\n{null}")
    for name in ("second", "third"):
        mine = load_profile(profiles("third", f"extends: second\n{null}").with_name(f"{name}.yaml"))
        assert mine.training.tracking.samples is None and mine.models.image_reward.muon_rate is None


def test_all_settings_whose_null_is_no_default_are_known():
    roots = [(model, "validation") for model in (Profile, *(spec.settings for spec in SPECS))]
    _, schema = models_json_schema(roots)
    fields = [
        each for model in schema["$defs"].values() for each in model.get("properties", {}).items()
    ]
    assert KEEPS_NULL == {
        name
        for name, field in fields
        if {"type": "null"} in field.get("anyOf", []) and field.get("default") is not None
    }


@pytest.mark.parametrize(
    "text, complaint",
    [
        (
            "training: {learning_rate: null}",
            "mine.yaml: training.learning_rate: Field required",
        ),
        ("extends: tinny", "tinny.yaml: no such profile; there are mine, tiny"),
        ("extends: mine", "mine.yaml: extends: the profiles extend each other in a circle"),
        (
            "methods: {g2rpo_two: {settings: {tree: {eta: 0.5}}}}",
            "methods.g2rpo_two: unknown method 'g2rpo_two'; .* needs `method:`",
        ),
        (
            "methods: {g2rpo_eta0.5: {method: g2rpo}}",
            r"methods.*must have no dot, at which DVC would split it \(got 'g2rpo_eta0.5'\)",
        ),
        *(
            (
                f"methods: {{{entry}}}",
                r"settings.objective.trust: has no effect: with one update an iteration",
            )
            for entry in (
                "nft_shared: {settings: {objective: {trust: 0.1}}}",
                "mine: {method: diffusion_nft, settings: {objective: {old: null, trust: 0.1}}}",
                "rvm: {settings: {objective: {trust: 0.5}}}",
            )
        ),
    ],
)
def test_a_mistake_in_what_is_extended_is_one_line(profiles, text, complaint):
    base = "" if text.startswith("extends") else "extends: tiny\n"
    with refused(complaint):
        load_profile(profiles("mine", base + text))


def test_the_origin_of_a_value_is_the_line_that_says_it(profiles):
    path = profiles(
        "mine",
        "# a profile\nextends: tiny\ntraining:\n  iterations: 7\n"
        "  rewards: {clip_score: null, hps: 2.0}\n",
    )
    resolved = resolve(path)
    assert resolved.origin["training.iterations"] == f"{path}:4"
    assert resolved.origin["training.rewards.hps"] == f"{path}:5"
    assert "training.rewards.clip_score" not in resolved.origin
    parent = path.with_name("tiny.yaml")
    for key, value in (
        ("training.learning_rate", "learning_rate: 2.0e-5"),
        ("evaluation.diversity.prompts", "diversity: {prompts: 64"),
    ):
        file, _, line = resolved.origin[key].rpartition(":")
        assert file == str(parent) and value in parent.read_text().splitlines()[int(line) - 1]


def test_a_named_variant_departs_from_the_method_that_it_names(profiles):
    variant = (
        "{method: g2rpo, label: G²RPO of two steps, settings: {tree: {sde_steps: [0, 1, 2, 3, 4], "
        "window: {size: 2, order: scattered}}}, "
        "sampling: {steps: 12}, training: {num_generations: 6}}"
    )
    profile = load_profile(profiles("mine", f"extends: tiny\nmethods:\n  g2rpo_two: {variant}\n"))
    run = profile.run("g2rpo_two")
    window = {"size": 2, "order": "scattered"}
    assert run.method == METHODS["g2rpo"].changed(
        tree={"sde_steps": (0, 1, 2, 3, 4), "window": window}
    )
    assert (run.label, run.sampling.steps) == ("G²RPO of two steps", 12)
    assert run.training.num_generations == 6
    assert profile.run("g2rpo").method.tree.window is None
