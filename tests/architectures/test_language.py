"""Base models compared with diffusers' own pipelines: images, encodings, velocities, adapters."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from ruamel.yaml import YAML

from g2rpo_core.architectures.architecture import Architecture
from g2rpo_core.architectures.table import ARCHITECTURES, read_schedule, text_encoders
from g2rpo_core.config import load_profile
from g2rpo_core.data.embeddings import EmbeddingStore, check_lengths
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.estimate.tracing import shape_of
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.sampling.rollout import sample
from g2rpo_core.tiny_models.settings import BASES
from g2rpo_core.training.settings import RunSettings
from g2rpo_core.training.trainer import Trainer
from pipeline.check import complaints
from tests.conftest import ROOT, embed
from tests.fixtures.errors import refused
from tests.fixtures.rollouts import check_rows, redness, small_method
from tests.fixtures.weights import randomize

SIZE = {"height": 32, "width": 48}
REPO, INSTEAD = next(each for base in ARCHITECTURES.values() for each in base.distilled.items())


@dataclass(frozen=True)
class About:
    """What tests need to know of a base model beyond its Architecture."""

    scale: str
    """The argument of the pipeline's call that is our guidance."""
    alone: float
    """The largest guidance with a single evaluation."""
    times: str
    """The module that gets the time."""
    sigma_of: Callable[[torch.Tensor], torch.Tensor]
    """That time -> sigma."""

    rows: Callable[[DiffusionPipeline, list[str]], list[torch.Tensor]]
    """By the pipeline's own encode_prompt: the tokens of every text, [length, D]."""
    call: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the pipeline's call, for a list of texts."""
    tokens: int = 32
    """Text tokens that the transformer gets: 32 of the longest encoder, and CLIP's, if any."""


def rows_of_qwen_image(pipeline, texts):
    context, mask = pipeline.encode_prompt(texts)
    return [
        row if mask is None else row[keep.bool()]
        for row, keep in zip(context, context if mask is None else mask)
    ]


ABOUT = {
    "sd3": About(
        "guidance_scale",
        1.0,
        "time_text_embed.time_proj",
        lambda time: time / 1000,
        lambda pipeline, texts: list(
            pipeline.encode_prompt(texts, None, None, max_sequence_length=32)[0]
        ),
        tokens=48,
    ),
    "flux2": About(
        "guidance_scale",
        1.0,
        "time_guidance_embed.time_proj",
        lambda time: time / 1000,
        lambda pipeline, texts: list(pipeline.encode_prompt(texts, max_sequence_length=32)[0]),
    ),
    "zimage": About(
        "guidance_scale",
        0.0,
        "t_embedder",
        lambda time: 1 - time / 1000,
        lambda pipeline, texts: pipeline.encode_prompt(
            list(texts), do_classifier_free_guidance=False
        )[0],
    ),
    "qwen_image": About(
        "true_cfg_scale",
        1.0,
        "time_text_embed.time_proj",
        lambda time: time,
        rows_of_qwen_image,
        {"negative_prompt": " "},
    ),
}


@dataclass(frozen=True)
class Twin:
    """A small base model: where it lies, and encoded prompts."""

    about: About
    base: Architecture
    models: Path
    store: EmbeddingStore

    def policy(self, guidance: float = 4.0, load=Policy.load, **settings) -> Policy:
        return load(self.models / "pipeline", **{**SIZE, "guidance": guidance, **settings})

    def draw(
        self, pipeline, texts: list[str], guidance: float = 4.0, steps: int = 6
    ) -> torch.Tensor:
        """Images by the pipeline itself, from its own noise of seed 5."""
        pipeline.set_progress_bar_config(disable=True)
        how = {
            **SIZE,
            "num_inference_steps": steps,
            self.about.scale: guidance,
            "max_sequence_length": 32,
            "output_type": "pt",
        }
        how |= {name: [value] * len(texts) for name, value in self.about.call.items()}
        return pipeline(prompt=texts, generator=torch.Generator().manual_seed(5), **how).images

    def texts(self, count: int) -> list[str]:
        return [prompt.text for prompt in self.store.prompts[:count]]


@pytest.fixture(params=ABOUT)
def twin(request, twin_pipeline, once):
    name = request.param
    models = twin_pipeline(name)
    folder = once(f"{name}_embeddings_32", lambda folder: embed(folder, models, 12, max_length=32))
    return Twin(ABOUT[name], ARCHITECTURES[BASES[name]], models, EmbeddingStore(folder / "train"))


@pytest.fixture
def randomized(twin, tmp_path):
    """A diffusers pipeline with random output and modulation weights, and its twin on disk."""
    policy = twin.policy(load=Policy.load_to_train)
    randomize(policy.transformer)
    policy.save(tmp_path / "base")
    transformer = twin.base.transformer.from_pretrained(tmp_path / "base" / "transformer")
    pipeline = twin.base.pipeline.from_pretrained(twin.models / "pipeline", transformer=transformer)
    pipeline.save_pretrained(tmp_path / "models" / "pipeline")
    return pipeline, Twin(twin.about, twin.base, tmp_path / "models", twin.store)


@pytest.mark.parametrize("guided, steps", [(True, 6), (False, 3)])
def test_images_noise_and_noise_levels_are_those_of_plain_diffusers(randomized, guided, steps):
    pipeline, twin = randomized
    guidance = 4.0 if guided else twin.about.alone
    theirs = twin.draw(pipeline, twin.texts(3), guidance, steps)
    policy = twin.policy(guidance)
    sigmas = read_schedule(twin.base, twin.models / "pipeline", policy.image_tokens).sigmas(steps)
    torch.testing.assert_close(
        torch.tensor(sigmas), pipeline.scheduler.sigmas, rtol=1e-5, atol=1e-6
    )
    noise = policy.noise(torch.Generator().manual_seed(5), 3)
    field = policy.velocity(twin.store.conditioning(range(3)))
    ours = policy.decode(sample(field, noise, sigmas, 2), 2)
    # Much closer than other images are: VAEs that are hardly trained draw all of them alike
    difference = (theirs.flip(0) - theirs).abs().max()
    assert difference > 1e-3 and (ours - theirs).abs().max() < 0.02 * difference


def test_encodings_are_those_of_the_pipeline(twin):
    """However the prompts are batched; and all tokens that the model gets are counted."""
    pipeline = text_encoders(twin.models / "pipeline")
    stored, texts = (
        twin.store.conditioning([11, 0]),
        [twin.store.prompts[number].text for number in (11, 0)],
    )
    with torch.no_grad():
        for ours, given in ((stored.tensors, texts), (stored.negative, [twin.base.negative])):
            masks = ours.get("mask", torch.ones(len(given), twin.about.tokens))
            for context, mask, theirs in zip(
                ours["context"], masks, twin.about.rows(pipeline, given), strict=True
            ):
                torch.testing.assert_close(context[mask.bool()], theirs, rtol=1e-5, atol=1e-5)
    config = twin.base.transformer.load_config(twin.models / "pipeline" / "transformer")
    shapes = twin.base.encoding_shapes(config, 32, twin.about.tokens - 32)
    assert shapes == {name: tuple(tensor.shape[1:]) for name, tensor in stored.tensors.items()}
    assert twin.base.text_tokens(stored.tensors) == twin.about.tokens
    counter = twin.base.tokenizer(pipeline)
    short, long = Prompt("a", "a red circle", ""), Prompt("b", "a red circle " * 11, "")
    check_lengths([short], counter, 32)
    with pytest.raises(UserError, match="prompt b has [34][0-9] tokens"):
        check_lengths([short, long], counter, 32)


def test_rows_of_one_call_may_differ_in_sigma_and_prompt(randomized):
    _, twin = randomized
    check_rows(twin.policy(), twin.store)


def test_sigma_reaches_the_time_embedding_as_it_is(twin):
    policy, seen = twin.policy(twin.about.alone, dtype=torch.bfloat16), []
    policy.transformer.get_submodule(twin.about.times).register_forward_hook(
        lambda module, given, _: seen.append(given[0])
    )
    sigmas = torch.tensor([45 / 46, 0.9545454, 0.8333333, 0.7941176])
    policy.velocity(twin.store.conditioning([0]))(
        policy.noise(torch.Generator(), 4), sigmas, torch.zeros(4, dtype=torch.int64)
    )
    (times,) = seen
    assert times.dtype == torch.float32
    torch.testing.assert_close(twin.about.sigma_of(times), sigmas, rtol=1e-6, atol=1e-7)


def test_evaluations_are_counted_the_ratio_begins_at_one_and_weights_move(randomized, tiny):
    """A state a call in rollout and update alike, with prompts of several lengths and guidance."""
    _, twin = randomized
    policy = twin.policy(load=Policy.load_to_train)
    changes = {"iterations": 1, "prompts_per_iteration": 2, "num_generations": 2}
    changes |= {"rewards": {"redness": 1.0}, "batch_tokens": 1}
    training = tiny.training.model_copy(update=changes)
    sampling = tiny.sampling.model_copy(update={"steps": 6, "guidance": 4.0, "batch_tokens": 1})
    method, rows = small_method("g2rpo"), []

    def count(_, args, kwargs):
        if not torch.is_grad_enabled():
            rows.append(len(args[0] if args else kwargs["hidden_states"]))

    policy.transformer.register_forward_pre_hook(count, with_kwargs=True)
    before = [parameter.clone() for parameter in policy.trained_parameters().values()]
    (record,) = Trainer(
        RunSettings(method, sampling, training), policy, twin.store, {"redness": redness}, seed=1
    ).run()
    expected = 2 * method.tree.build(6, 0, 1).num_forward_evals(2) * 2
    assert sum(rows) == record["num_forward_evals"] == expected
    assert record["old_policy_ratio_error"] == 0.0 and record["grad_norm"] > 0
    assert not all(map(torch.equal, policy.trained_parameters().values(), before))


@pytest.fixture
def distilled(twin_pipeline, here) -> Path:
    """A pipeline in whose index it says so."""
    shutil.copytree(twin_pipeline("flux2") / "pipeline", here / "pipeline")
    index = here / "pipeline" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
    return here / "pipeline"


@pytest.mark.parametrize(
    "pipeline, match",
    [
        ({"repo": REPO}, f"{REPO} is distilled .* only generate; to train, name {INSTEAD}"),
        ({"repo": None, "folder": "pipeline"}, "^pipeline: is distilled .* only generate; to"),
    ],
)
def test_a_model_distilled_to_a_few_steps_is_not_trained(distilled, here, pipeline, match):
    """Neither planned, nor checked before dvc repro."""
    shutil.copytree(ROOT / "profiles", here / "profiles")
    pipeline |= {"revision": None, "sha256": None}
    YAML().dump(
        {"extends": "flux_hps_clip", "models": {"repos": {"pipeline": pipeline}}},
        here / "profiles" / "mine.yaml",
    )
    (here / "params.yaml").write_text("profile: mine\nmethods: [g2rpo]\nseeds: [1]\n")
    with pytest.raises(UserError, match=match):
        shape_of(load_profile(here / "profiles" / "mine.yaml"))
    assert any(re.search(match, problem) for problem in complaints())


def test_how_a_folder_says_it_is_sampled_is_followed_or_refused(distilled, twin_pipeline):
    """A distilled one without guidance, as by its own pipeline; by no other scheduler's rule."""
    plain = twin_pipeline("flux2") / "pipeline"
    load, train = (partial(one, **SIZE) for one in (Policy.load, Policy.load_to_train))
    for pipeline, start in ((distilled, None), (plain, distilled)):
        with refused("pipeline: is distilled .* to train, take the model that it was made from"):
            train(pipeline, start=start, guidance=1.0)
    with refused("sampling.guidance: .*pipeline is distilled .* of 4: set it to 1"):
        load(distilled, guidance=4.0)
    assert load(distilled, guidance=1.0).forward_evals == 1
    shutil.copy(plain / "model_index.json", distilled)
    (distilled / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "Heun"}')
    for either in (load, train):
        with refused("is sampled by Heun, here only FlowMatchEulerDiscreteScheduler"):
            either(distilled, guidance=1.0)


@pytest.mark.parametrize("guided", [True, False])
def test_padding_that_a_model_does_not_attend_to_is_left_out_and_changes_nothing(
    randomized, guided
):
    """Velocities and gradients are those with the padding; models that attend to it keep it."""
    _, twin = randomized
    policy = twin.policy(4.0 if guided else twin.about.alone, load=Policy.load_to_train)
    whole = twin.store.conditioning(range(4))
    cut = policy.cut(whole)
    if not twin.base.padded:
        assert cut is whole
        return
    assert cut.tensors["context"].shape[1] < 32 and not cut.unpadded
    # As many latents in a call, whatever the prompts: processes make equally many calls
    assert policy.batch_size(999, cut) == policy.batch_size(999, whole)
    latents, sigma, prompt = (
        policy.noise(torch.Generator().manual_seed(1), 4),
        torch.tensor([1.0, 0.7, 0.3, 0.9]),
        torch.arange(4),
    )
    found = []
    for conditioning in (whole, cut):
        policy.transformer.zero_grad()
        velocity = policy.velocity(conditioning)(latents, sigma, prompt)
        velocity.square().mean().backward()
        weights = policy.trained_parameters().values()
        gradients = [each.grad.flatten() for each in weights if each.grad is not None]
        found.append((velocity.detach(), torch.cat(gradients)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-6)
    assert found[0][1].abs().max() > 1e-4


def test_processes_cut_to_the_longest_prompt_of_all(twin):
    """Each process has its share of the prompts; one length for all, as if one process had them."""
    policy, store = twin.policy(twin.about.alone), twin.store
    if not twin.base.padded:
        pytest.skip("attends to its padding")
    together = policy.cut(store.conditioning(range(4)))

    class Two(ProcessGroup):
        def gather(self, value):
            return [
                twin.base.lengths(store.conditioning(part).tensors) for part in ([0, 1], [2, 3])
            ]

    for part in ([0, 1], [2, 3]):
        apart = policy.cut(store.conditioning(part), Two(0, 2))
        for name in twin.base.padded:
            assert torch.equal(apart.tensors[name], together.tensors[name][part])
        assert apart.unpadded == together.unpadded
