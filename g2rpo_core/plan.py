"""What a profile needs before anybody rents it: evaluations, memory per GPU by part, seconds an iteration, disk.

Assumed, and said in the output: all GPUs but those of other shards hold one model (fully sharded); weights, gradients and AdamW's
states are float32, gathered blocks bfloat16; with an adapter the frozen weights are bfloat16. Time for communication is not counted.
"""

import json
import random
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from functools import partial

from . import flux
from .config import Adapter, Profile, TrainingSettings, load_profile, method_of, profile_path, sampling_of, training_of
from .errors import UserError

GIB = 2**30
RESERVE_GIB = 3.0  # CUDA context, communication buffers, and what the allocator cannot fill
ASSUMED_TFLOPS = 400.0  # of a transformer in bfloat16: 40 % of the 989 dense TFLOP/s in the data sheets of H100 SXM and H200
DECODE_SLOWER, SCORE_SLOWER = 2, 15  # against bfloat16, by the same data sheets: TF32 convolutions, float32 products

# ViT-H-14 (open_clip's parameters; bytes a picture = 12 float32 of its 257 x 1280 states at once: residual, norm, MLP, ...)
_VIT_H = (986_109_441, 12 * 257 * 1280 * 4, 0.324e12)
# parameters, bytes and operations a picture. PickScore is a ViT-H-14, too, ImageReward a ViT-L/16 with BLIP's text encoder
SCORERS = {"hps": _VIT_H, "clip_score": _VIT_H, "pickscore": _VIT_H, "image_reward": (446_720_000, 12 * 197 * 1024 * 4, 0.15e12)}


@dataclass(frozen=True)
class Plan:
    """What one profile, method and number of GPUs need. memory_gib: per GPU, by part; they add up to `memory_total_gib`.

    `activations` is the most of the phases in `activations_gib`, as these follow each other; seconds: of one iteration, by phase;
    evaluations: means over the run's iterations; not_counted: rewards whose size is not known here.
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

    rate: milliseconds per transformer evaluation of one GPU; without it, ASSUMED_TFLOPS. UserError where the GPUs cannot share the
    prompts of an iteration evenly.
    """
    from .embeddings import DTYPES
    from .footprint import transformer_cost, transformer_parameters, vae_cost

    method = method_of(profile.methods, name)
    sampling = sampling_of(profile.sampling, profile.methods, name)
    training = training_of(profile.training, profile.methods, name)
    adapter, group = training.adapter, training.group_size
    shard = shard or min(training.parallel.shard_size or gpus, gpus)
    if training.prompts_per_iteration % gpus:
        raise UserError(
            f"plan: --gpus {gpus}: {training.prompts_per_iteration} prompts an iteration cannot be shared evenly by {gpus} GPUs"
        )
    trees = _trees(method, sampling.steps, training.iterations)
    evaluations = sum(tree.evaluations(group) for tree in trees) / len(trees)
    widest = max(trees, key=lambda tree: tree.evaluations(group))
    prompts = training.prompts_per_iteration // gpus

    factor = 2 * 2 ** (len(flux.VAE["block_out_channels"]) - 1)
    tokens = (sampling.height // factor) * (sampling.width // factor), profile.embed.max_sequence_length
    states = len(method.trained(len(widest.decisions), random.Random(0)))
    if method.branching == "all":  # all but the first noisy step have a state for every member
        states = 1 + (states - 1) * group
    call = {
        "rollout": max(1, sampling.batch_tokens // sum(tokens)),
        "update": min(prompts * states, max(1, training.batch_tokens // sum(tokens))),
    }
    cost = partial(
        transformer_cost,
        tuple(flux.TRANSFORMER.items()),
        image_tokens=tokens[0],
        text_tokens=tokens[1],
        dtype=DTYPES[sampling.dtype],
    )
    train = partial(cost, training=True, adapter=adapter, checkpointing=training.checkpointing)
    counts = transformer_parameters(flux.TRANSFORMER, adapter)
    pictures = len(widest.leaves) * len(widest.leaves[0]) * group  # of one prompt: decoded and scored by themselves
    picture = 3 * sampling.height * sampling.width * 4
    decode = vae_cost(tuple(flux.VAE.items()), min(sampling.decode_batch, pictures), sampling.height, sampling.width)
    asked = dict.fromkeys([*training.rewards, *training.monitor.rewards])
    scorers = [name for name in asked if name in SCORERS]

    frozen = counts.all - counts.trained
    width = DTYPES[sampling.dtype].itemsize
    whole = counts.all * width if width < 4 and not adapter else 0  # unsharded: autocast's copies
    gathered = (2 * counts.block + counts.rest) * width + (
        0 if adapter else counts.block * 4
    )  # one computes, the next is fetched
    phases = {
        "rollout": cost(call["rollout"], training=False).bytes,
        "decoding": decode.bytes + 2 * pictures * picture,  # the parts, and what they are put together to
        "scoring": pictures * picture + max((min(256, pictures) * SCORERS[one][1] for one in scorers), default=0),
        "update": train(call["update"]).bytes,
        "optimizer": 4 * counts.trained / shard,  # AdamW's square roots of all second moments at once
    }
    parts = {
        "weights": (4 * counts.trained + width * frozen) / shard,
        "base": 4 * counts.all / shard if method.kl and not adapter else 0,
        "gradients": 4 * counts.trained / shard,
        "optimizer": 8 * counts.trained / shard,
        "gathered": gathered if shard > 1 else whole,
        "replica": width * counts.all if training.parallel.replica and shard > 1 else 0,
        "activations": max(phases.values()),
        "rewards": sum(4 * SCORERS[one][0] for one in scorers),
        "vae": 4 * _vae_parameters(),
        "reserve": RESERVE_GIB * GIB,
    }
    total = sum(parts.values()) / GIB

    flops = cost(1, training=False).flops
    ms = rate or flops / (ASSUMED_TFLOPS * 1e9)
    per_flop = ms / 1e3 / flops
    seconds = {
        "rollout": evaluations * prompts * ms / 1e3,
        "decoding": prompts * decode.flops * -(-pictures // sampling.decode_batch) * per_flop * DECODE_SLOWER,
        "scoring": prompts
        * pictures
        * sum(SCORERS[one][2] for one in training.rewards if one in SCORERS)
        * per_flop
        * SCORE_SLOWER,
        "update": prompts * states * (train(1).flops + (flops if method.kl else 0)) * per_flop,
    }
    gib = lambda values: {key: round(value / GIB, 3) for key, value in values.items()}
    return Plan(
        evaluations_per_prompt=_whole(evaluations),
        evaluations_per_iteration=_whole(evaluations * training.prompts_per_iteration),
        prompts_per_gpu=prompts,
        gpus_per_model=shard,
        latents_per_call=call,
        memory_gib=gib(parts),
        memory_total_gib=round(total, 3),
        activations_gib=gib(phases),
        fits=total <= memory,
        ms_per_evaluation=round(ms, 3),
        seconds={key: round(value, 3) for key, value in seconds.items()},
        seconds_per_iteration=round(sum(seconds.values()), 3),
        disk_gib=gib(_disk(profile, training, counts)),
        not_counted=[name for name in asked if name not in SCORERS],
    )


def _trees(method, steps: int, iterations: int) -> list:
    """The tree of every iteration of a run (of a window drawn at random, those of seed 0)."""
    from .tree import build

    branches = [method.branches(steps, iteration) for iteration in range(iterations)]
    built = {one: build(one, method.granularities, steps, method.grid) for one in set(branches)}
    return [built[one] for one in branches]


def _whole(value: float) -> float:
    return int(value) if value == int(value) else round(value, 1)


def _vae_parameters() -> int:
    from diffusers import AutoencoderKL

    from .footprint import count_parameters

    return count_parameters(lambda: AutoencoderKL(**flux.VAE))


def _disk(profile: Profile, training: TrainingSettings, counts) -> dict[str, float]:
    """Bytes of the models' files, of the encoded prompts, and of one run's trained weights."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from .embeddings import DTYPES
    from .footprint import count_parameters

    published = counts.all if training.adapter is None else counts.all - counts.trained
    encoders = count_parameters(lambda: CLIPTextModel(CLIPTextConfig(**flux.CLIP_TEXT)))
    encoders += count_parameters(lambda: T5EncoderModel(T5Config(**flux.T5)))
    row = profile.embed.max_sequence_length * flux.TRANSFORMER["joint_attention_dim"] + flux.TRANSFORMER["pooled_projection_dim"]
    prompts = profile.prompts.train_count + profile.prompts.test_count
    used = dict.fromkeys([*training.rewards, *training.monitor.rewards, *profile.evaluation.rewards])
    return {
        "flux": 2 * (published + encoders + _vae_parameters()),  # published in bfloat16
        "rewards": sum(2 * 4 * SCORERS[one][0] for one in used if one in SCORERS),  # pickled, and converted to safetensors
        "embeddings": prompts * row * DTYPES[profile.embed.dtype].itemsize,
        "trained": 4 * counts.trained * (1 + len(training.snapshots)),
        "checkpoints": 12 * counts.trained * (training.checkpoints.keep + 1),  # one more while it is written
    }


def changes(profile: Profile, name: str, gpus: int, memory: float, shard: int | None = None) -> list[tuple[str, float, bool]]:
    """What to change for less memory: the change, GiB per GPU with it, whether that fits. Each is planned as a whole."""
    training = training_of(profile.training, profile.methods, name)
    lora = {"adapter": Adapter(rank=32, alpha=32.0).model_dump(mode="json")} if training.adapter is None else {}
    checkpointing = {} if training.checkpointing else {"checkpointing": True}
    one = {"batch_tokens": 1}
    options = [
        ("training.checkpointing: true", checkpointing),
        ("training.batch_tokens for one latent a call", one),
        ("both", checkpointing | one if checkpointing else {}),
        ("training.adapter: LoRA of rank 32", lora),
        ("LoRA and training.checkpointing: true", lora | checkpointing if lora and checkpointing else {}),
        ("LoRA, checkpointing and one latent a call", lora | checkpointing | one if lora else {}),
    ]
    found = []
    for label, change in options:
        if change:
            plan = make_plan(_changed(profile, name, change), name, gpus, memory, shard)
            found.append((label, plan.memory_total_gib, plan.fits))
    if shard and shard < gpus:
        plan = make_plan(profile, name, gpus, memory)
        found.append((f"--shard {gpus}: one model over all GPUs", plan.memory_total_gib, plan.fits))
    best = checkpointing | one
    for more in (2, 4, 8, 16, 32):
        if more > (shard or gpus):
            plan = make_plan(_changed(profile, name, best), name, max(more, gpus), memory, more)
            if plan.fits:
                found.append((f"{more} GPUs to a model, checkpointing, one latent a call", plan.memory_total_gib, True))
                break
    return found


def _changed(profile: Profile, name: str, training: dict) -> Profile:
    run = profile.methods[name]
    run = run.model_copy(update={"training": run.training | training})
    return profile.model_copy(update={"methods": {**profile.methods, name: run}})


def add_parser(commands) -> None:
    """Adds `plan` to the commands of g2rpo."""
    parser: ArgumentParser = commands.add_parser("plan", help="what a profile needs: memory, time, disk", description=__doc__)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--method", default="g2rpo", help="an entry of the profile's methods (g2rpo)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory", type=float, default=80, help="GiB of one GPU (80)")
    parser.add_argument("--shard", type=int, help="GPUs that share one model, a divisor of --gpus (all)")
    parser.add_argument("--rate", help="milliseconds per evaluation, or `measured`: on this machine's GPU (assumed if left out)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: Namespace) -> None:
    profile = load_profile(profile_path(args.profile))
    if profile.models.source != "hub":
        raise UserError(
            f"plan: profile {args.profile} builds small models of its own that any machine holds; plan a flux_* profile"
        )
    if args.method not in profile.methods:
        raise UserError(f"plan: --method {args.method}: profile {args.profile} has only {', '.join(profile.methods)}")
    if args.gpus < 1 or args.memory <= 0:
        raise UserError("plan: --gpus and --memory must be above 0")
    if args.shard is not None and (args.shard < 1 or args.gpus % args.shard):
        raise UserError(f"plan: --shard {args.shard} must divide --gpus {args.gpus}")
    rate, source = _rate(args.rate, profile, args.method)
    plan = make_plan(profile, args.method, args.gpus, args.memory, args.shard, rate)
    what = [] if plan.fits else changes(profile, args.method, args.gpus, args.memory, args.shard)
    if args.json:
        rows = [{"change": label, "memory_total_gib": gib, "fits": fits} for label, gib, fits in what]
        print(json.dumps(asdict(plan) | {"rate": source, "changes": rows}))
        return
    print("\n".join(_lines(args, plan, source, what)))


def _rate(given: str | None, profile: Profile, method: str) -> tuple[float | None, str]:
    if given is None:
        return None, f"assumed: {ASSUMED_TFLOPS:.0f} TFLOP/s in bfloat16; not measured"
    if given == "measured":
        from .footprint import measured_rate

        sampling = sampling_of(profile.sampling, profile.methods, method)
        factor = 2 * 2 ** (len(flux.VAE["block_out_channels"]) - 1)
        tokens = (sampling.height // factor) * (sampling.width // factor), profile.embed.max_sequence_length
        return measured_rate(flux.TRANSFORMER, max(1, sampling.batch_tokens // sum(tokens)), *tokens), "measured on this machine"
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UserError(f"plan: --rate {given}: give milliseconds per evaluation, above 0, or `measured`")
    return rate, "given"


def _lines(args: Namespace, plan: Plan, source: str, what: list) -> list[str]:
    calls = ", ".join(f"{count} latents in a call of the {phase}" for phase, count in plan.latents_per_call.items())
    lines = [
        f"{args.profile}, {args.method}, {args.gpus} GPUs of {args.memory:g} GiB, {plan.gpus_per_model} to a model",
        f"evaluations: {plan.evaluations_per_prompt} a prompt, {plan.evaluations_per_iteration} an iteration; {calls}",
        f"memory per GPU: {plan.memory_total_gib:.1f} GiB: {'fits' if plan.fits else 'DOES NOT FIT'}",
        *(f"  {part:12} {gib:9.2f}" for part, gib in plan.memory_gib.items()),
        "  (activations: the most of " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.activations_gib.items()) + ")",
        f"time: {plan.seconds_per_iteration:.0f} s an iteration at {plan.ms_per_evaluation:.1f} ms an evaluation ({source}), communication aside: "
        + ", ".join(f"{key} {value:.0f}" for key, value in plan.seconds.items()),
        "disk, GiB: " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.disk_gib.items()),
    ]
    if plan.not_counted:
        lines.append(f"not counted: the models of {', '.join(plan.not_counted)}, which run elsewhere or are your own")
    if what:
        lines.append("what to change:")
        lines += [f"  {label}: {gib:.1f} GiB, {'fits' if fits else 'does not fit'}" for label, gib, fits in what]
    return lines
