"""A run that knows whether it can learn: each way of learning nothing is named, no other run is."""

import itertools
import math

import pytest
import torch

from g2rpo_core.distributed import checkpoint
from g2rpo_core.models.loading import describe_trained
from g2rpo_core.training.drift import DriftError, find_warnings
from g2rpo_core.training.learning import judge_noise, signal_line
from g2rpo_core.training.loop import train
from g2rpo_core.training.metrics import HeldOut
from g2rpo_core.training.settings import TrainingSettings
from tests.fixtures.rollouts import redness, small_method


class Noisy:
    """Redness with noise of a deviation, other at every call; None: nothing but noise."""

    def __init__(self, deviation: float | None):
        self.deviation, self.generator = deviation, torch.Generator().manual_seed(0)

    def __call__(self, images, prompts):
        noise = torch.randn(len(images), generator=self.generator)
        return noise if self.deviation is None else redness(images, None) + self.deviation * noise


def in_bfloat16(policy) -> None:
    policy.dtype = torch.bfloat16
    policy.transformer.to(torch.bfloat16)


# changes of the settings, and of the policy -> the names of warnings after two iterations
WAYS = [
    ({}, None, set()),
    ({"rewards": {"redness": 1e-6}}, None, set()),  # only the ratio of weights matters
    ({"learning_rate": 1e-10}, None, {"rounded"}),
    ({}, in_bfloat16, {"rounded"}),
    ({"adv_clip_max": 1e-9}, None, {"eps"}),
    ({"max_grad_norm": 1e-7}, None, {"eps"}),
    ({"adv_clip_max": 1e-9, "adam_epsilon": 1e-20}, None, set()),
    ({"rewards": {"redness": -1.0}}, None, {"sign"}),
]


@pytest.mark.parametrize("changes, spoil, expected", WAYS)
def test_a_way_of_learning_nothing_is_named_and_an_ordinary_run_is_not(
    make_trainer, policy, changes, spoil, expected
):
    if spoil:
        spoil(policy)
    changes = {"learning_rate": 1e-4, "max_old_policy_ratio_error": None} | changes
    trainer = make_trainer(small_method("g2rpo"), **changes)
    records = [{"iteration": 0, **trainer.start()}, *trainer.run()]
    warnings = find_warnings(records, trainer.training, 1).keys() - {"ratio"}
    assert warnings == expected
    assert any(line.startswith("warning: ") for line in trainer.can_learn(records)) == bool(
        find_warnings(records, trainer.training, 1)
    )
    if "rounded" in expected:  # before the first iteration
        assert find_warnings(records[:1], trainer.training, 1).keys() == expected


def test_weights_of_rewards_matter_only_in_their_ratio(tiny):
    weigh = lambda **rewards: (
        TrainingSettings.model_validate(
            tiny.training.model_dump() | {"rewards": rewards}
        ).reward_weights
    )
    assert weigh(a=1.0, b=1.0, c=0.0) == weigh(a=2e-6, b=2e-6, c=0.0) == {"a": 1, "b": 1, "c": 0}
    assert weigh(a=0.8, b=-0.2) == pytest.approx({"a": 1.6, "b": -0.4}) == weigh(a=8.0, b=-2.0)


def test_a_judge_that_is_no_function_of_the_image_ends_the_run_before_its_first_update(
    make_trainer, policy, tmp_path
):
    """A little noise is a warning with its number, and one that answers alike has none."""
    before = policy.transformer.proj_out.weight.clone()
    make = lambda **how: make_trainer(small_method("g2rpo"), num_generations=12, **how)
    with pytest.raises(DriftError, match="redness: asked again .* no function of the image"):
        train(make(reward=Noisy(None)), tmp_path, dict, lambda record: None)
    assert torch.equal(policy.transformer.proj_out.weight, before)
    assert checkpoint.last_iteration(tmp_path) == 0
    record = next(make().run())
    assert record["noise_redness"] == 0
    noisy = make(reward=Noisy(0.3 * record["reward_std_redness"]))
    records = [{"iteration": 0}, next(noisy.run())]
    assert 0.1 < records[1]["noise_redness"] < 0.5
    assert "noise_redness" in find_warnings(records, noisy.training, 1)


def test_a_share_of_noise_is_the_deviation_of_answers_by_their_spread():
    """Of a thousand images, with noise of half of the deviation of what is judged."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1000, 3, 1, 1, generator=generator)
    judge = lambda images, prompts: (
        images[:, 0, 0, 0] + 0.5 * torch.randn(len(images), generator=generator)
    )
    scores = judge(images, None)[None]
    noise = judge_noise({"one": judge}, images, "a", scores)
    assert noise == {"one": pytest.approx(0.5 / math.sqrt(1.25), abs=0.02)}


def test_held_out_scores_are_compared_with_another_prompt_and_with_the_start(
    policy, embeddings, settings, tmp_path
):
    """Also after a stop; a judge that is given the wrong prompts is named."""
    texts = [prompt.text for prompt in embeddings.prompts]
    right = lambda images, prompts: (
        redness(images, None)
        + torch.tensor([float(texts.index(text) == place) for place, text in zip(places, prompts)])
    )
    blind = lambda images, prompts: redness(images, None)
    rewards = {"right": right, "blind": blind}
    sampling = settings[0].model_copy(update={"decode_batch": 24})
    measure = lambda: HeldOut(
        policy,
        embeddings,
        rewards,
        6,
        sampling,
        weights={"right": 1.0, "blind": 1.0},
        folder=tmp_path,
    )
    places = range(6)
    first = measure()
    start = first()
    assert start["prompt_gap_right"] == 1 and start["prompt_gap_error_right"] == 0
    assert start["prompt_gap_blind"] == 0 and "gain" not in start
    with torch.no_grad():
        policy.transformer.proj_out.weight.mul_(1.1)
    later = first()
    (tmp_path / "iteration-000001").mkdir()  # as a run that resumes
    assert measure()() == later
    rise = [later[f"heldout_{name}"] - start[f"heldout_{name}"] for name in rewards]
    assert later["gain"] == pytest.approx(sum(rise), abs=1e-6) and later["gain_error"] > 0
    records = [{"iteration": 0, "prompt_gap_hps": 0.1, "prompt_gap_error_hps": 0.06}]
    training = settings[1].model_copy(update={"rewards": {"hps": 1.0}})
    assert find_warnings(records, training, 1).keys() == {"prompt_hps"}


@pytest.mark.parametrize(
    "gain, said",
    [
        (0.03, "told from chance"),
        (0.01, "not told from chance; at this slope it would be from 80 on"),
        (-0.01, "no rise that more iterations would show"),
    ],
)
def test_a_gain_is_told_from_chance_or_when_it_would_be(settings, gain, said):
    assert signal_line({"iteration": 40, "gain": gain, "gain_error": 0.01}).endswith(said)


def test_modules_that_train_are_listed_by_block_and_kind():
    of_lora = lambda module: {f"{module}.lora_{part}.default.weight": 8 for part in "AB"}
    blocks = [
        f"{stack}.{number}.attn.{kind}"
        for stack, number, kind in itertools.product(
            ("double", "single"), range(2), ("to_q", "to_k")
        )
    ]
    sizes = {name: size for block in blocks for name, size in of_lora(block).items()}
    assert describe_trained(sizes) == (
        "128 weights: a LoRA on 8 modules in 2 double (attn.to_q, attn.to_k), "
        "2 single (attn.to_q, attn.to_k)"
    )
    assert describe_trained({"double.0.norm.weight": 2, "proj.weight": 3, "proj.bias": 1}) == (
        "6 weights: all weights of 2 modules in 1 double, 1 outside of blocks"
    )
