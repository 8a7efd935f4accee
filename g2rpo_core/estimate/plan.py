"""What a profile needs, by arithmetic: forward evaluations, memory per GPU by part, hours, GPU-hours, disk.

Weights, gradients and AdamW's states are float32, gathered blocks bfloat16; with a LoRA the frozen weights are bfloat16.
Computation and communication are added up, although they partly overlap; monitors and checkpoints between iterations are not
counted. `g2rpo rehearse` covers loading, embedding, saving, evaluation and the host by running the stages themselves; a test
compares the two.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from g2rpo_core.algorithm.methods import Method
from g2rpo_core.bases.base import Base, Published
from g2rpo_core.config import Profile, method_of, sampling_of, training_of
from g2rpo_core.errors import UserError
from g2rpo_core.estimate.bases import encoder_of, encoding_shapes, shape_of
from g2rpo_core.estimate.communication import Sharding, sent
from g2rpo_core.estimate.machines import (
    ASSUMED_TFLOPS,
    DECODE_SLOWER,
    RESERVE_GIB,
    SCORE_SLOWER,
    Machines,
    nodes_of,
)
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.rewards.registry import REWARDS, settings_of
from g2rpo_core.rewards.spec import ModelSize
from g2rpo_core.rollout.rollout import num_calls
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.settings import TrainingSettings

GIB = 2**30
LORA = LoraSettings(rank=32, alpha=32.0)  # tried if all weights do not fit


@dataclass(frozen=True)
class Plan:
    """What a profile and method need on a number of GPUs.

    phases_gib: GiB per GPU in each phase of an iteration, one after the other; memory_gib: those of the largest phase, by part,
    and memory_total_gib in all; seconds: an iteration's computation, by phase; sent_gb: what a GPU sends in an iteration, by
    phase; communication_seconds: how long that takes by itself; hours, gpu_hours: of all iterations; evaluations (forward
    evaluations of the transformer, NFE, with those of classifier-free guidance): means over the run's iterations; not_counted: rewards whose size is not known here.
    """

    evaluations_per_prompt: float
    evaluations_per_iteration: float
    prompts_per_gpu: int
    gpus_per_model: int
    latents_per_call: dict[str, int]
    memory_gib: dict[str, float]
    memory_total_gib: float
    phases_gib: dict[str, float]
    fits: bool
    ms_per_evaluation: float
    seconds: dict[str, float]
    sent_gb: dict[str, float]
    communication_seconds: dict[str, float]
    seconds_per_iteration: float
    hours: float
    gpu_hours: float
    disk_gib: dict[str, float]
    not_counted: list[str]


def make_plan(profile: Profile, name: str, machines: Machines, shard: int | None = None, rate: float | None = None) -> Plan:
    """The plan of method `name`, with each model sharded over `shard` GPUs (default: as the profile says, or all).

    rate: milliseconds per forward evaluation of the transformer on one GPU; without it, ASSUMED_TFLOPS counts. UserError if the
    GPUs cannot share the prompts of an iteration evenly.
    """
    from g2rpo_core.data.embeddings import DTYPES
    from g2rpo_core.estimate.tracing import Call, transformer_cost, transformer_parameters, vae_cost

    base, shape = shape_of(profile)
    method = method_of(profile.methods, name)
    sampling = sampling_of(profile.sampling, profile.methods, name)
    training = training_of(profile.training, profile.methods, name)
    forward_evals = base.forward_evals(sampling.guidance)  # of the velocity of one latent
    lora, group = training.lora, training.num_generations
    gpus = machines.gpus
    shard = shard or min(training.parallel.shard_size or gpus, gpus)
    if training.prompts_per_iteration % gpus:
        raise UserError(
            f"plan: --gpus {gpus}: {training.prompts_per_iteration} prompts per iteration cannot be shared evenly by {gpus} GPUs"
        )
    trees = _trees(method, sampling.steps, training.iterations)
    evaluations = forward_evals * sum(tree.num_forward_evals(group) for tree in trees) / len(trees)
    widest = max(trees, key=lambda tree: tree.num_forward_evals(group))
    prompts = training.prompts_per_iteration // gpus

    tokens = _tokens(base, shape, profile, sampling)
    trained = len(method.trained(len(widest.sde_steps), random.Random(0)))
    ends, widths = widest.transitions(), widest.widths(group)
    # of each trained transition the states and their next ones; of a share that is drawn, the first ones
    transitions = [(widths[before], widths[after]) for before, after in ends[:trained]]
    states = sum(before for before, _ in transitions)
    at_once = {
        "rollout": max(1, sampling.batch_tokens // (sum(tokens) * forward_evals)),
        "update": max(1, training.batch_tokens // (sum(tokens) * forward_evals)),
    }
    updates = _update_calls(method, prompts, transitions, group, at_once["update"])
    latents = {
        "rollout": at_once["rollout"],
        "update": min(prompts * max(_states(transitions).values()), at_once["update"]),
    }
    call = partial(Call, image_tokens=tokens[0], text_tokens=tokens[1], dtype=DTYPES[sampling.dtype])
    train = partial(call, training=True, lora=lora, checkpointing=training.gradient_checkpointing)
    cost = partial(transformer_cost, base, shape.transformer)
    counts = transformer_parameters(base, shape.transformer, lora)
    images = len(widest.leaves) * len(widest.leaves[0]) * group  # of one prompt: decoded and scored by themselves
    around = {node for pair in ends for node in pair} if method.credit == "gain" else set()
    scored = images + sum(widths[index] for index in around)  # clean predictions, too
    image = 3 * sampling.height * sampling.width * 4
    decode = vae_cost(tuple(shape.vae.items()), min(sampling.decode_batch, images), sampling.height, sampling.width)
    scorers = dict.fromkeys([*training.rewards, *training.monitor.rewards])
    sizes = _sizes(profile, scorers)

    frozen = counts.all - counts.trained
    width = DTYPES[sampling.dtype].itemsize
    if shard > 1:  # one block computes, the next is fetched, and one that was read in float32 is cast
        gathered = (2 * counts.block + counts.rest) * width + (0 if lora else counts.block * 4)
    else:
        gathered = counts.all * width if width < 4 and not lora else 0  # autocast's copies
    activations = {
        "rollout": cost(call(latents["rollout"] * forward_evals, training=False)).bytes,
        "decoding": images * image + max(decode.bytes, images * image),  # the parts, and the last call or their concatenation
        "scoring": images * image + max((min(size.at_once, images) * size.bytes_per_image for size in sizes.values()), default=0),
        "update": cost(train(latents["update"] * forward_evals)).bytes,
        "optimizer": 4 * counts.trained / shard,  # AdamW's square roots of all second moments at once
    }
    lasting = {
        "weights": (4 * counts.trained + width * frozen) / shard + 4 * counts.buffers,
        "base": 4 * (counts.all / shard + counts.buffers) if method.kl_coef and not lora else 0,
        "optimizer": 8 * counts.trained / shard,
        "ema": 4 * counts.trained / shard if training.ema else 0,
        "replica": width * counts.all + 4 * counts.buffers if training.parallel.replica and shard > 1 else 0,
        "rewards": sum(size.bytes for size in sizes.values()),
        "vae": 4 * _vae_parameters(shape),
        "reserve": RESERVE_GIB * GIB,
    }
    # gradients of a single call come as activations go; those of several are kept, unsharded if only the last call sums them
    kept = 4 * counts.trained / (1 if training.parallel.reduce == "update" else shard) if max(updates) > 1 else 0
    gradients = {"update": kept, "optimizer": 4 * counts.trained / shard}
    passing = {
        phase: {
            "activations": size,
            "gradients": gradients.get(phase, 0),
            "gathered": gathered if phase in ("rollout", "update") else 0,
        }
        for phase, size in activations.items()
    }
    phases = {phase: sum(lasting.values()) + sum(parts.values()) for phase, parts in passing.items()}
    largest = max(phases, key=lambda phase: phases[phase])
    parts = lasting | passing[largest]

    flops = cost(call(1, training=False)).flops
    ms = rate or flops / (ASSUMED_TFLOPS * 1e9)
    per_flop = ms / 1e3 / flops
    seconds = {
        "rollout": evaluations * prompts * ms / 1e3,
        "decoding": prompts * decode.flops * -(-scored // sampling.decode_batch) * per_flop * DECODE_SLOWER,
        "scoring": prompts
        * scored
        * sum(sizes[name].flops_per_image for name in training.rewards if name in sizes)
        * per_flop
        * SCORE_SLOWER,
        "update": prompts * states * forward_evals * (cost(train(1)).flops + (flops if method.kl_coef else 0)) * per_flop,
    }
    different = {id(tree): tree for tree in trees}
    calls_of = {key: num_calls(tree, prompts, group, at_once["rollout"]) for key, tree in different.items()}
    calls = sum(calls_of[id(tree)] for tree in trees) / len(trees)
    parallel, kl = training.parallel, bool(method.kl_coef) and not lora
    gigabytes, communication = sent(
        Sharding(machines, shard), counts, width, calls, updates, kl, parallel.replica, parallel.reduce == "call"
    )
    iteration = sum(seconds.values()) + sum(communication.values())
    hours = iteration * training.iterations / 3600
    gib = lambda values: {key: round(value / GIB, 3) for key, value in values.items()}
    rounded = lambda values: {key: round(value, 3) for key, value in values.items()}
    return Plan(
        evaluations_per_prompt=_whole(evaluations),
        evaluations_per_iteration=_whole(evaluations * training.prompts_per_iteration),
        prompts_per_gpu=prompts,
        gpus_per_model=shard,
        latents_per_call=latents,
        memory_gib=gib(parts),
        memory_total_gib=round(phases[largest] / GIB, 3),
        phases_gib=gib(phases),
        fits=phases[largest] / GIB <= machines.memory,
        ms_per_evaluation=round(ms, 3),
        seconds=rounded(seconds),
        sent_gb=rounded(gigabytes),
        communication_seconds=rounded(communication),
        seconds_per_iteration=round(iteration, 3),
        hours=round(hours, 2),
        gpu_hours=round(hours * gpus, 1),
        disk_gib=gib(_disk(base, shape, profile, training, counts)),
        not_counted=[name for name in scorers if name not in sizes],
    )


def _update_calls(method: Method, prompts: int, transitions: list[tuple[int, int]], group: int, size: int) -> list[int]:
    """The calls of each optimizer step of an iteration; transitions: states and next states of the training transitions."""
    updates = method.updates_per_rollout
    calls = lambda rows: -(-prompts * rows // size)
    if updates == "step":
        return [calls(before) for before, _ in transitions]
    parts = [group] if updates == "iteration" else [len(part) for part in np.array_split(range(group), updates) if len(part)]
    # one state that all depart from stays one; of those of the members, a part has its own
    of_part = lambda part: [(before, after) if part == group or before == 1 else (part, part) for before, after in transitions]
    return [sum(map(calls, _states(of_part(part)).values())) for part in parts]


def _states(transitions: list[tuple[int, int]]) -> Counter[int]:
    """How many states there are of each number of next states: those go through the model together."""
    counts: Counter[int] = Counter()
    for before, after in transitions:
        counts[after // before] += before
    return counts


def measured_rate(profile: Profile, name: str) -> float:
    """Milliseconds per forward evaluation of method `name`'s calls on this machine's GPU; UserError without one."""
    from g2rpo_core.estimate import tracing

    sampling = sampling_of(profile.sampling, profile.methods, name)
    base, shape = shape_of(profile)
    image_tokens, text_tokens = _tokens(base, shape, profile, sampling)
    batch = max(1, sampling.batch_tokens // (image_tokens + text_tokens))
    return tracing.measured_rate(base, shape.transformer, batch, image_tokens, text_tokens)


def _tokens(base: Base, shape: Published, profile: Profile, sampling: SamplingSettings) -> tuple[int, int]:
    """Image and text tokens of one latent."""
    factor = 2 * 2 ** (len(shape.vae["block_out_channels"]) - 1)
    encoded = encoding_shapes(base, shape, profile.embed.max_sequence_length)
    return (sampling.height // factor) * (sampling.width // factor), encoded["context"][0]


def _trees(method, steps: int, iterations: int) -> list:
    """The tree of every iteration of a run (for windows drawn at random, with seed 0)."""
    branches = [method.branches(steps, iteration) for iteration in range(iterations)]
    built = {each: method.tree(steps, branches.index(each)) for each in set(branches)}
    return [built[each] for each in branches]


def _sizes(profile: Profile, rewards: Iterable[str]) -> dict[str, ModelSize]:
    """The model sizes of the rewards that are computed here, where they are known."""
    specs = [REWARDS[name] for name in rewards if name in REWARDS and not settings_of(profile.rewards, name).remote]
    return {spec.name: spec.size for spec in specs if spec.size is not None}


def _whole(value: float) -> float:
    return int(value) if value == int(value) else round(value, 1)


def _vae_parameters(shape: Published) -> int:
    from diffusers import AutoencoderKL

    from g2rpo_core.estimate.tracing import count_parameters

    return count_parameters(lambda: AutoencoderKL(**shape.vae))


def _disk(base: Base, shape: Published, profile: Profile, training: TrainingSettings, counts) -> dict[str, float]:
    """Bytes of the models' files, of the encoded prompts, and of one run's trained weights."""
    from g2rpo_core.data.embeddings import DTYPES
    from g2rpo_core.estimate.tracing import count_parameters

    published = (counts.all if training.lora is None else counts.all - counts.trained) + counts.buffers
    encoders = sum(count_parameters(partial(encoder_of, *each)) for each in shape.encoders.values())
    row = sum(prod(size) for size in encoding_shapes(base, shape, profile.embed.max_sequence_length).values())
    prompts = profile.prompts.train_count + profile.prompts.test_count
    used = dict.fromkeys([*training.rewards, *training.monitor.rewards, *profile.evaluation.rewards])
    sizes = _sizes(profile, used).values()
    return {
        "pipeline": 2 * (published + encoders + _vae_parameters(shape)),  # published in 16 bits
        "rewards": sum(2 * size.bytes for size in sizes),  # most are pickled, and converted to safetensors
        "embeddings": prompts * row * DTYPES[profile.embed.dtype].itemsize,
        "trained": 4 * (counts.trained + (0 if training.lora else counts.buffers)) * (1 + len(training.snapshots)),
        "checkpoints": (16 if training.ema else 12)
        * counts.trained
        * (training.checkpoints.keep + 1),  # one more while it is written
    }


def changes(profile: Profile, name: str, machines: Machines, fits: bool, shard: int | None = None) -> list[tuple[str, Plan]]:
    """The changes that affect memory and time most, each with its plan; combined changes only if the plan does not fit."""
    training = training_of(profile.training, profile.methods, name)
    lora: dict = {"lora": LORA.model_dump(mode="json")} if training.lora is None else {}
    checkpointing: dict = {} if training.gradient_checkpointing else {"gradient_checkpointing": True}
    smallest: dict = {"batch_tokens": 1}
    replica: dict = (
        {"parallel": training.parallel.model_dump() | {"replica": not training.parallel.replica}} if machines.gpus > 1 else {}
    )
    options: list[tuple[str, dict]] = [
        ("training.gradient_checkpointing: true", checkpointing),
        ("training.gradient_checkpointing: false", {} if checkpointing else {"gradient_checkpointing": False}),
        ("training.lora: LoRA of rank 32", lora),
        (f"training.parallel.replica: {str(not training.parallel.replica).lower()}", replica),
    ]
    if not fits:
        options += [
            ("training.batch_tokens for one latent per call", smallest),
            ("checkpointing and one latent per call", checkpointing | smallest if checkpointing else {}),
            ("LoRA and training.gradient_checkpointing: true", lora | checkpointing if lora and checkpointing else {}),
            ("LoRA, checkpointing and one latent per call", lora | checkpointing | smallest if lora else {}),
        ]
    planned = [(label, make_plan(changed(profile, name, change), name, machines, shard)) for label, change in options if change]
    now = shard or min(training.parallel.shard_size or machines.gpus, machines.gpus)
    for size in divisors(machines.gpus):
        if size != now:
            planned.append((f"training.parallel.shard_size: {size}", make_plan(profile, name, machines, size)))
    best = checkpointing | smallest
    for more in () if fits else (2, 4, 8, 16, 32):
        if more > machines.gpus and training.prompts_per_iteration % more == 0:
            plan = make_plan(changed(profile, name, best), name, replace(machines, gpus=more, nodes=nodes_of(more)), more)
            if plan.fits:
                planned.append((f"{more} GPUs per model, checkpointing, one latent per call", plan))
                break
    return planned


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def changed(profile: Profile, name: str, training: dict) -> Profile:
    """The profile with other settings of `training` for a method."""
    run = profile.methods[name]
    run = run.model_copy(update={"training": run.training | training})
    return profile.model_copy(update={"methods": {**profile.methods, name: run}})
