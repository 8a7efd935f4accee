"""A profile's needs: forward evaluations, memory per GPU by part, hours, GPU-hours, disk.

Weights, gradients and AdamW's states are float32, gathered blocks bfloat16; with a LoRA the frozen
weights are bfloat16. Computation and communication are added up, although they partly overlap;
measurements between iterations and checkpoints, which are written in the background, are counted
apart. `g2rpo rehearse` covers loading, embedding, saving and evaluation by running the stages
themselves; a test compares the two.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod

from g2rpo_core.algorithm.methods import Method
from g2rpo_core.architectures.architecture import Architecture, ModelShape
from g2rpo_core.config import Profile
from g2rpo_core.config.costs import cost_of_prompt, images_of, parts_of_updates
from g2rpo_core.data.embeddings import DTYPES
from g2rpo_core.estimate.machines import (
    ASSUMED,
    DECODE_SLOWER,
    DISK,
    RESERVE_GIB,
    SCORE_SLOWER,
    Machines,
    Rate,
    Sharding,
    sent,
)
from g2rpo_core.estimate.tracing import (
    count_kept,
    encoding_shapes,
    make_encoder,
    shape_of,
    transformer_parameters,
    vae_cost,
)
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.cost import Call, Cost, transformer_cost
from g2rpo_core.models.quantized import BITS, RESTORING
from g2rpo_core.rewards.registry import REWARDS, settings_of
from g2rpo_core.rewards.spec import ModelSize
from g2rpo_core.sampling.rollout import num_calls
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.learning import settings_lines

GIB = 2**30
# Tokens of the longest prompt of an iteration, where padding is left out: more than the CLIPs among
# the rewards read of one. Memory is that of embed.max_sequence_length, which a prompt may have
PROMPT_TOKENS = 77


@dataclass(frozen=True)
class Plan:
    """What a profile and method need on a number of GPUs, as means over the run's iterations."""

    prompt_tokens: int
    """Text tokens of a latent, for which time is counted."""
    most_prompt_tokens: int
    """For which memory has room."""
    evaluations_per_prompt: float
    """Forward evaluations of the transformer (NFE), with those of classifier-free guidance."""
    evaluations_per_iteration: float
    compute_per_prompt: float
    """In forward evaluations: all training, decoding and scoring, too (`config/costs.py`)."""
    prompts_per_gpu: int
    gpus_per_model: int
    latents_per_call: dict[str, int]
    memory_gib: dict[str, float]
    """GiB per GPU in the largest phase of an iteration, by part."""
    memory_total_gib: float
    phases_gib: dict[str, float]
    """GiB per GPU in each phase of an iteration, one after the other."""
    fits: bool
    ms_per_evaluation: float
    seconds: dict[str, float]
    """Computation of an iteration, by phase."""
    sent_gb: dict[str, float]
    """What a GPU sends in an iteration, by phase."""
    communication_seconds: dict[str, float]
    """How long sending takes by itself, by phase."""
    seconds_per_iteration: float
    hours: float
    """Of all iterations."""
    gpu_hours: float
    checkpoints: int
    """How many a run writes."""
    saving_hours: float
    """Of all checkpoints, at DISK GB/s for each node, if nothing is computed meanwhile."""
    evaluation_hours: float
    """Of one evaluation: sampling alone, without scores."""
    monitor_hours: float
    """Of all measurements on held-out prompts, in the same way."""
    disk_gib: dict[str, float]
    """`copies`: what DVC keeps in its cache where the file system cannot share blocks."""
    not_counted: list[str]
    """Rewards whose size is not known here."""
    can_learn: list[str]
    """What trains, and what the settings say of learning."""

    @property
    def disks(self) -> dict[str, float]:
        """Return the GiB of the checkout's folder, `here`, and of `HF_HOME`."""
        downloaded = self.disk_gib["pipeline"] + self.disk_gib["rewards"]
        return {"here": sum(self.disk_gib.values()) - downloaded, "HF_HOME": downloaded}


def make_plan(
    profile: Profile, name: str, machines: Machines, shard: int | None = None, rate: Rate = ASSUMED
) -> Plan:
    """Plan method `name`, with each model sharded over `shard` GPUs.

    shard: None for the profile's, or all. rate: of a forward evaluation of the transformer on one
    GPU. UserError if the GPUs cannot share the prompts of an iteration evenly.
    """
    work = Work(profile, name, machines, shard)
    # Memory: what lasts the whole run, and the largest phase
    lasting, passing = _lasting_bytes(work), _passing_bytes(work)
    phases = {
        phase: sum(lasting.values()) + sum(parts.values()) for phase, parts in passing.items()
    }
    largest = max(phases, key=lambda phase: phases[phase])
    # Time: computation and communication, one after the other
    ms = rate.ms_of(work.flops(training=False))
    seconds = _seconds(work, ms)
    gigabytes, communication = _communication(work)
    iteration = sum(seconds.values()) + sum(communication.values())
    hours = iteration * work.training.iterations / 3600
    # Checkpoints by the clock or by iterations, and the last
    disk, settings = _disk(work), work.training.checkpoints
    one = disk["checkpoints"] / (settings.keep + 1)
    written = 1 + int(
        hours * 60 / settings.minutes
        if settings.minutes
        else (work.training.iterations - 1) / settings.every
    )
    saving = written * one / (DISK * 1e9 * machines.nodes) / 3600
    gib = lambda values: {key: round(value / GIB, 3) for key, value in values.items()}
    rounded = lambda values: {key: round(value, 3) for key, value in values.items()}
    return Plan(
        prompt_tokens=work.usual[1],
        most_prompt_tokens=work.tokens[1],
        evaluations_per_prompt=_whole(work.evaluations),
        evaluations_per_iteration=_whole(work.evaluations * work.training.prompts_per_iteration),
        compute_per_prompt=round(work.compute, 1),
        prompts_per_gpu=work.prompts,
        gpus_per_model=work.shard,
        latents_per_call=work.latents,
        memory_gib=gib(lasting | passing[largest]),
        memory_total_gib=round(phases[largest] / GIB, 3),
        phases_gib=gib(phases),
        fits=phases[largest] / GIB <= machines.memory,
        ms_per_evaluation=round(ms, 6),
        seconds=rounded(seconds),
        sent_gb=rounded(gigabytes),
        communication_seconds=rounded(communication),
        seconds_per_iteration=round(iteration, 3),
        hours=round(hours, 4),
        gpu_hours=round(hours * machines.gpus, 3),
        checkpoints=written,
        saving_hours=round(saving, 2),
        evaluation_hours=round(_evaluation_hours(work, ms), 2),
        monitor_hours=round(_monitor_hours(work, ms), 2),
        disk_gib=gib(disk),
        not_counted=[name for name in work.scorers if not _is_counted(work, name)],
        can_learn=[work.counts.trains, *settings_lines(work.training)],
    )


class Work:
    """One GPU's part of an iteration: prompts, calls, latents, images, and the models' sizes."""

    def __init__(self, profile: Profile, name: str, machines: Machines, shard: int | None):
        self.base, self.shape = shape_of(profile)
        run = profile.run(name)
        self.profile, self.machines = profile, machines
        self.method, self.sampling, self.training = method, sampling, training = (
            run.method,
            run.sampling,
            run.training,
        )
        # Placement: prompts per GPU, GPUs per copy of the weights
        gpus, self.group = machines.gpus, training.num_generations
        self.shard = shard or min(training.parallel.shard_size or gpus, gpus)
        if training.prompts_per_iteration % gpus:
            raise UserError(
                f"plan: --gpus {gpus}: {training.prompts_per_iteration} prompts per iteration "
                f"cannot be shared evenly by {gpus} GPUs"
            )
        self.prompts = training.prompts_per_iteration // gpus
        self.forward_evals = self.base.forward_evals(sampling.guidance)  # per velocity of a latent
        # Trees of all iterations; memory is that of the widest
        self.trees = _trees(method, sampling.steps, training.iterations)
        evaluations = [tree.num_forward_evals(self.group) for tree in self.trees]
        self.evaluations = self.forward_evals * sum(evaluations) / len(self.trees)
        self.tree = max(self.trees, key=lambda tree: tree.num_forward_evals(self.group))
        # What is trained, as (states, next states)
        self.transitions = method.objective.trained_rows(self.tree, self.group)
        # Images of one prompt: decoded, and scored with the clean predictions
        self.images = len(self.tree.leaves) * len(self.tree.leaves[0]) * self.group
        self.scored = images_of(run, self.tree)
        cost = cost_of_prompt(run)
        self.trained = cost.trained
        self.compute = cost._replace(evaluations=self.evaluations, guided=self.forward_evals).total
        # Latents per call of the transformer
        self.tokens = _tokens(self.base, self.shape, profile, sampling)
        self.usual = _usual(self.base, self.tokens)
        tokens = sum(self.tokens) * self.forward_evals
        self.at_once = {
            "rollout": max(1, sampling.batch_tokens // tokens),
            "update": max(1, training.batch_tokens // tokens),
        }
        states = max(_states(self.transitions).values())
        self.latents = {
            "rollout": self.at_once["rollout"],
            "update": min(self.prompts * states, self.at_once["update"]),
        }
        self.updates = _update_calls(method, self.prompts, self.transitions, self.at_once["update"])
        # Models
        self.counts = transformer_parameters(self.base, self.shape.transformer, training.lora)
        self.width = DTYPES[sampling.dtype].itemsize
        self.scorers = list(dict.fromkeys([*training.rewards, *training.monitor.rewards]))
        self.sizes = _sizes(profile, self.scorers)

    @property
    def has_base(self) -> bool:
        """Return whether the KL term needs a copy of the initial weights; a LoRA's are frozen."""
        return self.method.objective.needs_base and not self.training.lora

    @property
    def encodes_online(self) -> bool:
        """Return whether text encoders stay on the GPU instead of encoded prompts on the disk."""
        return self.profile.embed.encode == "online"

    def cost(self, rows: int, *, training: bool, tokens: tuple[int, int] | None = None) -> Cost:
        """Trace a call of the transformer with that many rows, and its backward if `training`.

        tokens: None for the most.
        """
        lora, checkpointing = (
            (self.training.lora, self.training.gradient_checkpointing)
            if training
            else (None, False)
        )
        call = Call(
            rows,
            *(tokens or self.tokens),
            DTYPES[self.sampling.dtype],
            training,
            lora,
            checkpointing,
        )
        return transformer_cost(self.base, self.shape.transformer, call)

    def flops(self, *, training: bool) -> float:
        """Count the operations of a transformer call of one row with a prompt of usual length."""
        # In proportion to rows; the largest call is traced for its bytes, mostly of these tokens
        rows = self.latents["update" if training else "rollout"] * self.forward_evals
        return self.cost(rows, training=training, tokens=self.usual).flops / rows

    def decoding_cost(self) -> Cost:
        """Trace a call of the VAE's decoder."""
        batch = min(self.sampling.decode_batch, self.images)
        return vae_cost(
            self.base,
            tuple(self.shape.vae.items()),
            batch,
            self.sampling.height,
            self.sampling.width,
        )


def _lasting_bytes(work: Work) -> dict[str, float]:
    """Return the bytes on a GPU that stay from iteration to iteration, by part."""
    counts, shard, training = work.counts, work.shard, work.training
    frozen = counts.all - counts.trained
    quantize = work.sampling.quantize
    quantized, kept = (counts.linear, counts.linear * BITS[quantize] / 8) if quantize else (0, 0)
    return {
        "weights": (4 * counts.trained + work.width * (frozen - quantized)) / shard
        + kept
        + 4 * counts.buffers,
        "base": work.width * counts.all / shard + 4 * counts.buffers if work.has_base else 0,
        "optimizer": 8 * counts.trained / shard,
        "ema": 4 * counts.trained / shard if training.ema else 0,
        "old": 4 * counts.trained / shard if work.method.objective.old else 0,
        "replica": work.width * counts.all + 4 * counts.buffers
        if training.parallel.replica and work.machines.gpus > 1
        else 0,
        "rewards": sum(size.bytes for size in work.sizes.values()),
        "vae": 4 * _vae_parameters(work),
        "encoders": DTYPES[work.profile.embed.dtype].itemsize * _encoder_parameters(work)
        if work.encodes_online
        else 0,
        "reserve": RESERVE_GIB * GIB,
    }


def _passing_bytes(work: Work) -> dict[str, dict[str, float]]:
    """Return the bytes on a GPU that only one phase of an iteration holds, by phase and part."""
    counts, shard, images = work.counts, work.shard, work.images
    # Activations: those of the largest call, and images [N, 3, H, W] in float32
    image = 3 * work.sampling.height * work.sampling.width * 4
    scoring = max(
        (min(size.at_once, images) * size.bytes_per_image for size in work.sizes.values()),
        default=0,
    )
    activations = {
        "rollout": work.cost(work.latents["rollout"] * work.forward_evals, training=False).bytes,
        "decoding": images * image
        + max(work.decoding_cost().bytes, images * image),  # the last call, or the concatenation
        "scoring": images * image + scoring,
        "update": work.cost(work.latents["update"] * work.forward_evals, training=True).bytes,
        "optimizer": 4
        * counts.trained
        / shard,  # AdamW's square roots of all second moments at once
    }
    # Gathered weights: one block computes, the next is fetched, and one that was read in float32 is
    # cast
    if shard > 1:
        gathered = (2 * counts.block + counts.rest) * work.width + (
            0 if work.training.lora else counts.block * 4
        )
    else:
        copied = work.width < 4 and not work.training.lora  # by autocast
        gathered = counts.all * work.width if copied else 0
    if work.sampling.quantize:
        gathered = RESTORING * counts.largest
    # Gradients: those of a single call come as activations go; those of several are kept, unsharded
    # if only the last call sums them
    kept = (
        4 * counts.trained / (1 if work.training.parallel.reduce == "update" else shard)
        if max(work.updates) > 1
        else 0
    )
    gradients = {"update": kept, "optimizer": 4 * counts.trained / shard}
    return {
        phase: {
            "activations": size,
            "gradients": gradients.get(phase, 0),
            "gathered": gathered if phase in ("rollout", "update") else 0,
        }
        for phase, size in activations.items()
    }


def _seconds(work: Work, ms: float) -> dict[str, float]:
    """Return an iteration's seconds of computation by phase; ms: per forward evaluation."""
    flops = work.flops(training=False)
    per_flop = ms / 1e3 / flops
    decoded = work.decoding_cost().flops * -(-work.scored // work.sampling.decode_batch)
    scored = work.scored * sum(
        work.sizes[name].flops_per_image for name in work.training.rewards if name in work.sizes
    )
    on_host = work.scored * sum(_host_seconds(work.profile, name) for name in work.training.rewards)
    trained = work.trained * work.forward_evals
    per_state = work.flops(training=True) + flops * work.method.objective.extra_forwards
    return {
        "rollout": work.evaluations * work.prompts * ms / 1e3,
        "decoding": work.prompts * decoded * per_flop * DECODE_SLOWER,
        "scoring": work.prompts * (scored * per_flop * SCORE_SLOWER + on_host),
        "update": work.prompts * trained * per_state * per_flop,
    }


def _communication(work: Work) -> tuple[dict[str, float], dict[str, float]]:
    """Return the GB that a GPU sends in an iteration and the seconds that this takes, by phase."""
    # Iterations share trees: count the calls of each tree once
    different = {id(tree): tree for tree in work.trees}
    calls = {
        key: num_calls(tree, work.prompts, work.group, work.at_once["rollout"])
        for key, tree in different.items()
    }
    rollout_calls = sum(calls[id(tree)] for tree in work.trees) / len(work.trees)
    sharding, parallel = Sharding(work.machines, work.shard), work.training.parallel
    summed = parallel.reduce == "call"
    return sent(
        sharding,
        work.counts,
        work.width,
        rollout_calls,
        work.updates,
        work.has_base,
        parallel.replica,
        summed,
    )


def _update_calls(
    method: Method, prompts: int, transitions: list[tuple[int, int]], size: int
) -> list[int]:
    """Return the calls of each optimizer step of an iteration.

    transitions: (states, next states) of the training transitions.
    """
    updates = method.objective.updates_per_rollout
    calls = lambda rows: -(-prompts * rows // size)
    if updates == "step":
        return [calls(before) for before, _ in transitions]
    parts = parts_of_updates(transitions, 1 if updates == "iteration" else updates)
    return [sum(map(calls, _states(part).values())) for part in parts]


def _states(transitions: list[tuple[int, int]]) -> Counter[int]:
    """Count the states of each number of next states: those go through the model together."""
    counts: Counter[int] = Counter()
    for before, after in transitions:
        counts[after // before] += before
    return counts


def _tokens(
    architecture: Architecture, shape: ModelShape, profile: Profile, sampling: SamplingSettings
) -> tuple[int, int]:
    """Return the image and text tokens of one latent, with padding."""
    factor = 2 * architecture.vae_factor(shape.vae)
    encoded = encoding_shapes(architecture, shape, profile.embed.max_sequence_length)
    return (sampling.height // factor) * (sampling.width // factor), encoded["context"][0]


def _usual(architecture: Architecture, tokens: tuple[int, int]) -> tuple[int, int]:
    """Return one latent's image and text tokens, computed for a prompt of usual length."""
    return tokens[0], min(tokens[1], PROMPT_TOKENS) if architecture.padded else tokens[1]


def _trees(method, steps: int, iterations: int) -> list:
    """Build the tree of every iteration of a run (for windows drawn at random, with seed 0)."""
    branches = [method.tree.branches(steps, iteration) for iteration in range(iterations)]
    built = {each: method.tree.build(steps, branches.index(each)) for each in set(branches)}
    return [built[each] for each in branches]


def _sizes(profile: Profile, rewards: Iterable[str]) -> dict[str, ModelSize]:
    """Return the known model sizes of the rewards computed here; models built here are small."""
    if profile.models.source != "hub":
        return {}
    specs = [
        REWARDS[name]
        for name in rewards
        if name in REWARDS and not settings_of(profile.rewards, name).remote
    ]
    return {spec.name: spec.size for spec in specs if spec.size is not None}


def _host_seconds(profile: Profile, reward: str) -> float:
    """Return a reward's seconds per image on the host; 0 on the device, a server, or if unknown."""
    if reward not in REWARDS or not (seconds := REWARDS[reward].host_seconds):
        return 0.0
    settings = settings_of(profile.rewards, reward)
    return 0.0 if settings.remote else seconds(settings)


def _is_counted(work: Work, reward: str) -> bool:
    return reward in work.sizes or _host_seconds(work.profile, reward) > 0


def _whole(value: float) -> float:
    return int(value) if value == int(value) else round(value, 1)


def _vae_parameters(work: Work) -> int:
    return count_kept(
        work.base.vae.__name__, work.shape.vae, lambda: work.base.vae(**work.shape.vae)
    )


def _encoder_parameters(work: Work) -> int:
    return sum(
        count_kept(*each, partial(make_encoder, *each)) for each in work.shape.encoders.values()
    )


def _monitor_hours(work: Work, ms: float) -> float:
    """Return the hours in which all GPUs sample the images of a run's measurements.

    These are at the start, when they are due, and at the end.
    """
    monitor = work.training.monitor
    measurements = 1 + -(-work.training.iterations // monitor.every)
    return (
        measurements
        * monitor.prompts
        * work.sampling.steps
        * work.forward_evals
        * ms
        / 3.6e6
        / work.machines.gpus
    )


def _evaluation_hours(work: Work, ms: float) -> float:
    """Return the hours in which all GPUs sample one evaluation's images.

    ms: as in `_seconds`, at a training call's tokens.
    """
    evaluation, sampling = work.profile.evaluation, work.sampling
    tokens = _tokens(
        work.base,
        work.shape,
        work.profile,
        sampling.model_copy(update={"height": evaluation.height, "width": evaluation.width}),
    )
    each = (
        work.cost(1, training=False, tokens=_usual(work.base, tokens)).flops
        / work.flops(training=False)
        * ms
    )
    extra = evaluation.diversity
    images = work.profile.prompts.test_count + (extra.prompts * extra.noises if extra else 0)
    calls = images * sum(evaluation.steps) * len(evaluation.checkpoints)
    return calls * work.forward_evals * each / 3.6e6 / work.machines.gpus


def _disk(work: Work) -> dict[str, float]:
    """Return the bytes of model files, encoded prompts, and one run's trained weights."""
    profile, training, counts = work.profile, work.training, work.counts
    published = (
        counts.all if training.lora is None else counts.all - counts.trained
    ) + counts.buffers
    row = sum(
        prod(size)
        for size in encoding_shapes(
            work.base, work.shape, profile.embed.max_sequence_length
        ).values()
    )
    prompts = profile.prompts.test_count + (
        0 if work.encodes_online else profile.prompts.train_count
    )
    sizes = _sizes(profile, dict.fromkeys([*work.scorers, *profile.evaluation.rewards])).values()
    # Bytes per trained weight in a checkpoint
    moments = 12 + 4 * bool(training.ema) + 4 * bool(work.method.objective.old)
    embeddings = prompts * row * DTYPES[profile.embed.dtype].itemsize
    whole = DTYPES[training.save_dtype].itemsize * counts.trained + (
        0 if training.lora else 4 * counts.buffers
    )
    trained = whole * (1 + len(training.snapshots))
    return {
        "pipeline": 2
        * (published + _encoder_parameters(work) + _vae_parameters(work)),  # published in 16 bits
        # most are pickled, and converted to safetensors
        "rewards": sum(2 * size.bytes for size in sizes),
        "embeddings": embeddings,
        "trained": trained,
        "copies": embeddings + trained,
        "checkpoints": moments
        * counts.trained
        * (training.checkpoints.keep + 1),  # one more while it is written
    }
