"""What a profile needs before anybody rents it: forward evaluations, memory per GPU by part, seconds an iteration, disk.

Assumed, and said in the output: all GPUs but those of other shards hold one model (fully sharded); weights, gradients and AdamW's
states are float32, gathered blocks bfloat16; with a LoRA the frozen weights are bfloat16. Time for communication is not counted.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from g2rpo_core.config import Profile, method_of, sampling_of, training_of
from g2rpo_core.errors import UserError
from g2rpo_core.estimate import published as flux
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.rewards.registry import REWARDS
from g2rpo_core.rewards.spec import ModelSize
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.settings import TrainingSettings

GIB = 2**30
RESERVE_GIB = 3.0  # CUDA context, communication buffers, and what the allocator cannot fill
ASSUMED_TFLOPS = 400.0  # of a transformer in bfloat16: 40 % of the 989 dense TFLOP/s in the data sheets of H100 SXM and H200
DECODE_SLOWER, SCORE_SLOWER = 2, 15  # against bfloat16, by the same data sheets: TF32 convolutions, float32 products


@dataclass(frozen=True)
class Plan:
    """What one profile, method and number of GPUs need. memory_gib: per GPU, by part; they add up to `memory_total_gib`.

    `activations` is the most of the phases in `activations_gib`, as these follow each other; seconds: of one iteration, by phase;
    evaluations (forward evaluations of the transformer, NFE): means over the run's iterations; not_counted: rewards whose size is not known here.
    """

    evaluations_per_prompt: float
    evaluations_per_iteration: float
    prompts_per_gpu: int
    gpus_per_model: int
    latents_per_call: dict[str, int]
    memory_gib: dict[str, float]
    memory_total_gib: float
    activations_gib: dict[str, float]
    fits: bool
    ms_per_evaluation: float
    seconds: dict[str, float]
    seconds_per_iteration: float
    disk_gib: dict[str, float]
    not_counted: list[str]


def make_plan(profile: Profile, name: str, gpus: int, memory: float, shard: int | None = None, rate: float | None = None) -> Plan:
    """The plan of method `name` on `gpus` GPUs of `memory` GiB, each model sharded over `shard` of them (all).

    rate: milliseconds per forward evaluation of the transformer on one GPU; without it, ASSUMED_TFLOPS. UserError where the GPUs cannot share the
    prompts of an iteration evenly.
    """
    from g2rpo_core.data.embeddings import DTYPES
    from g2rpo_core.estimate.tracing import Call, transformer_cost, transformer_parameters, vae_cost

    method = method_of(profile.methods, name)
    sampling = sampling_of(profile.sampling, profile.methods, name)
    training = training_of(profile.training, profile.methods, name)
    lora, group = training.lora, training.num_generations
    shard = shard or min(training.parallel.shard_size or gpus, gpus)
    if training.prompts_per_iteration % gpus:
        raise UserError(
            f"plan: --gpus {gpus}: {training.prompts_per_iteration} prompts an iteration cannot be shared evenly by {gpus} GPUs"
        )
    trees = _trees(method, sampling.steps, training.iterations)
    evaluations = sum(tree.num_forward_evals(group) for tree in trees) / len(trees)
    widest = max(trees, key=lambda tree: tree.num_forward_evals(group))
    prompts = training.prompts_per_iteration // gpus

    tokens = _tokens(profile, sampling)
    states = len(method.trained(len(widest.sde_steps), random.Random(0)))
    if method.branching == "all":  # all but the first SDE step have a state for every member
        states = 1 + (states - 1) * group
    latents = {
        "rollout": max(1, sampling.batch_tokens // sum(tokens)),
        "update": min(prompts * states, max(1, training.batch_tokens // sum(tokens))),
    }
    call = partial(Call, image_tokens=tokens[0], text_tokens=tokens[1], dtype=DTYPES[sampling.dtype])
    train = partial(call, training=True, lora=lora, checkpointing=training.gradient_checkpointing)
    cost = partial(transformer_cost, tuple(flux.TRANSFORMER.items()))
    counts = transformer_parameters(flux.TRANSFORMER, lora)
    images = len(widest.leaves) * len(widest.leaves[0]) * group  # of one prompt: decoded and scored by themselves
    image = 3 * sampling.height * sampling.width * 4
    decode = vae_cost(tuple(flux.VAE.items()), min(sampling.decode_batch, images), sampling.height, sampling.width)
    scorers = dict.fromkeys([*training.rewards, *training.monitor.rewards])
    sizes = _sizes(scorers)

    frozen = counts.all - counts.trained
    width = DTYPES[sampling.dtype].itemsize
    whole = counts.all * width if width < 4 and not lora else 0  # unsharded: autocast's copies
    gathered = (2 * counts.block + counts.rest) * width + (0 if lora else counts.block * 4)  # one computes, the next is fetched
    phases = {
        "rollout": cost(call(latents["rollout"], training=False)).bytes,
        "decoding": decode.bytes + 2 * images * image,  # the parts, and what they are put together to
        "scoring": images * image + max((min(256, images) * size.bytes_per_image for size in sizes.values()), default=0),
        "update": cost(train(latents["update"])).bytes,
        "optimizer": 4 * counts.trained / shard,  # AdamW's square roots of all second moments at once
    }
    parts = {
        "weights": (4 * counts.trained + width * frozen) / shard,
        "base": 4 * counts.all / shard if method.kl_coef and not lora else 0,
        "gradients": 4 * counts.trained / shard,
        "optimizer": 8 * counts.trained / shard,
        "gathered": gathered if shard > 1 else whole,
        "replica": width * counts.all if training.parallel.replica and shard > 1 else 0,
        "activations": max(phases.values()),
        "rewards": sum(4 * size.parameters for size in sizes.values()),
        "vae": 4 * _vae_parameters(),
        "reserve": RESERVE_GIB * GIB,
    }
    total = sum(parts.values()) / GIB

    flops = cost(call(1, training=False)).flops
    ms = rate or flops / (ASSUMED_TFLOPS * 1e9)
    per_flop = ms / 1e3 / flops
    seconds = {
        "rollout": evaluations * prompts * ms / 1e3,
        "decoding": prompts * decode.flops * -(-images // sampling.decode_batch) * per_flop * DECODE_SLOWER,
        "scoring": prompts
        * images
        * sum(sizes[name].flops_per_image for name in training.rewards if name in sizes)
        * per_flop
        * SCORE_SLOWER,
        "update": prompts * states * (cost(train(1)).flops + (flops if method.kl_coef else 0)) * per_flop,
    }
    gib = lambda values: {key: round(value / GIB, 3) for key, value in values.items()}
    return Plan(
        evaluations_per_prompt=_whole(evaluations),
        evaluations_per_iteration=_whole(evaluations * training.prompts_per_iteration),
        prompts_per_gpu=prompts,
        gpus_per_model=shard,
        latents_per_call=latents,
        memory_gib=gib(parts),
        memory_total_gib=round(total, 3),
        activations_gib=gib(phases),
        fits=total <= memory,
        ms_per_evaluation=round(ms, 3),
        seconds={key: round(value, 3) for key, value in seconds.items()},
        seconds_per_iteration=round(sum(seconds.values()), 3),
        disk_gib=gib(_disk(profile, training, counts)),
        not_counted=[name for name in scorers if name not in sizes],
    )


def measured_rate(profile: Profile, name: str) -> float:
    """Milliseconds per forward evaluation of method `name`'s calls on this machine's GPU; UserError without one."""
    from g2rpo_core.estimate import tracing

    sampling = sampling_of(profile.sampling, profile.methods, name)
    image_tokens, text_tokens = _tokens(profile, sampling)
    batch = max(1, sampling.batch_tokens // (image_tokens + text_tokens))
    return tracing.measured_rate(flux.TRANSFORMER, batch, image_tokens, text_tokens)


def _tokens(profile: Profile, sampling: SamplingSettings) -> tuple[int, int]:
    """Image and text tokens of one latent."""
    factor = 2 * 2 ** (len(flux.VAE["block_out_channels"]) - 1)
    return (sampling.height // factor) * (sampling.width // factor), profile.embed.max_sequence_length


def _trees(method, steps: int, iterations: int) -> list:
    """The tree of every iteration of a run (of a window drawn at random, those of seed 0)."""
    from g2rpo_core.rollout.tree import build

    branches = [method.branches(steps, iteration) for iteration in range(iterations)]
    built = {each: build(each, method.granularities, steps, method.grid) for each in set(branches)}
    return [built[each] for each in branches]


def _sizes(rewards: Iterable[str]) -> dict[str, ModelSize]:
    """Of the rewards whose model's size is known."""
    specs = [REWARDS[name] for name in rewards if name in REWARDS]
    return {spec.name: spec.size for spec in specs if spec.size is not None}


def _whole(value: float) -> float:
    return int(value) if value == int(value) else round(value, 1)


def _vae_parameters() -> int:
    from diffusers import AutoencoderKL

    from g2rpo_core.estimate.tracing import count_parameters

    return count_parameters(lambda: AutoencoderKL(**flux.VAE))


def _disk(profile: Profile, training: TrainingSettings, counts) -> dict[str, float]:
    """Bytes of the models' files, of the encoded prompts, and of one run's trained weights."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from g2rpo_core.data.embeddings import DTYPES
    from g2rpo_core.estimate.tracing import count_parameters

    published = counts.all if training.lora is None else counts.all - counts.trained
    encoders = count_parameters(lambda: CLIPTextModel(CLIPTextConfig(**flux.CLIP_TEXT)))
    encoders += count_parameters(lambda: T5EncoderModel(T5Config(**flux.T5)))
    row = profile.embed.max_sequence_length * flux.TRANSFORMER["joint_attention_dim"] + flux.TRANSFORMER["pooled_projection_dim"]
    prompts = profile.prompts.train_count + profile.prompts.test_count
    used = dict.fromkeys([*training.rewards, *training.monitor.rewards, *profile.evaluation.rewards])
    sizes = _sizes(used).values()
    return {
        "flux": 2 * (published + encoders + _vae_parameters()),  # published in bfloat16
        "rewards": sum(2 * 4 * size.parameters for size in sizes),  # pickled, and converted to safetensors
        "embeddings": prompts * row * DTYPES[profile.embed.dtype].itemsize,
        "trained": 4 * counts.trained * (1 + len(training.snapshots)),
        "checkpoints": 12 * counts.trained * (training.checkpoints.keep + 1),  # one more while it is written
    }


def changes(profile: Profile, name: str, gpus: int, memory: float, shard: int | None = None) -> list[tuple[str, float, bool]]:
    """What to change for less memory: the change, GiB per GPU with it, whether that fits. Each is planned as a whole."""
    training = training_of(profile.training, profile.methods, name)
    lora = {"lora": LoraSettings(rank=32, alpha=32.0).model_dump(mode="json")} if training.lora is None else {}
    checkpointing = {} if training.gradient_checkpointing else {"gradient_checkpointing": True}
    smallest = {"batch_tokens": 1}
    options: list[tuple[str, dict]] = [
        ("training.gradient_checkpointing: true", checkpointing),
        ("training.batch_tokens for one latent a call", smallest),
        ("both", checkpointing | smallest if checkpointing else {}),
        ("training.lora: LoRA of rank 32", lora),
        ("LoRA and training.gradient_checkpointing: true", lora | checkpointing if lora and checkpointing else {}),
        ("LoRA, checkpointing and one latent a call", lora | checkpointing | smallest if lora else {}),
    ]
    planned = []
    for label, change in options:
        if change:
            plan = make_plan(_changed(profile, name, change), name, gpus, memory, shard)
            planned.append((label, plan.memory_total_gib, plan.fits))
    if shard and shard < gpus:
        plan = make_plan(profile, name, gpus, memory)
        planned.append((f"--shard {gpus}: one model over all GPUs", plan.memory_total_gib, plan.fits))
    best = checkpointing | smallest
    for more in (2, 4, 8, 16, 32):
        if more > (shard or gpus):
            plan = make_plan(_changed(profile, name, best), name, max(more, gpus), memory, more)
            if plan.fits:
                planned.append((f"{more} GPUs to a model, checkpointing, one latent a call", plan.memory_total_gib, True))
                break
    return planned


def _changed(profile: Profile, name: str, training: dict) -> Profile:
    run = profile.methods[name]
    run = run.model_copy(update={"training": run.training | training})
    return profile.model_copy(update={"methods": {**profile.methods, name: run}})
