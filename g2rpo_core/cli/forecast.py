"""Define the commands that look ahead of a training: `g2rpo plan`, what it needs, and `g2rpo probe`, what it can learn from."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.cli.options import read_profile
from g2rpo_core.common.runs import BASE
from g2rpo_core.estimate.machines import ASSUMED_TFLOPS, BETWEEN, DISK, INSIDE, checked_machines
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.profiles import OF_BASE, folders_of
from g2rpo_core.inference.runs import find_weights

if TYPE_CHECKING:  # these import torch and diffusers, which would slow down --help
    from g2rpo_core.config import Profile
    from g2rpo_core.estimate.budget import Way
    from g2rpo_core.estimate.machines import Machines
    from g2rpo_core.estimate.plan import Plan
    from g2rpo_core.inference.gradients import Signal
    from g2rpo_core.inference.probe import Step


def plan(
    profile: Annotated[str | None, typer.Option(help="name of a file in profiles/ (default: the one in params.yaml)")] = None,
    campaign: Annotated[bool, typer.Option("--campaign", help="plan all runs and evaluations that params.yaml names")] = False,
    price: Annotated[float | None, typer.Option(help="of a GPU for an hour, in any currency: also print what it costs")] = None,
    method: Annotated[str, typer.Option(help="an entry of the profile's methods")] = "g2rpo",
    gpus: Annotated[int, typer.Option(help="GPUs on all nodes together")] = 1,
    nodes: Annotated[
        int | None, typer.Option(help="number of nodes (default: as few as possible, with up to 8 GPUs each)")
    ] = None,
    memory: Annotated[
        float, typer.Option(help="GiB per GPU, as torch sees them: a card of 80 GB has 79, of 141 GB 139, of 24 GB 23")
    ] = 79,
    hours: Annotated[float | None, typer.Option(help="find the cheapest way that takes no longer, on at most --gpus")] = None,
    shard: Annotated[
        int | None, typer.Option(help="GPUs that share one model, a divisor of --gpus (default: as the profile says)")
    ] = None,
    inside: Annotated[float, typer.Option(help="GB/s from a GPU to the others on its node")] = INSIDE,
    between: Annotated[float, typer.Option(help="GB/s from a GPU to those on other nodes")] = BETWEEN,
    rate: Annotated[
        str | None,
        typer.Option(help="milliseconds per forward evaluation, or `measured` on this machine's GPU (default: an assumed rate)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on the last line")] = False,
) -> None:
    """Estimate what a profile needs, before you rent machines: memory, hours, GPU-hours, disk.

    Example: g2rpo plan --profile flux_hps_clip --gpus 16 --memory 139 --campaign --price 2.5
    """
    print_plan(SimpleNamespace(**locals()))


def print_plan(args: SimpleNamespace) -> None:
    """Check the options, then print the plan, or with --hours the cheapest way; exit status 1 if none is that fast."""
    from g2rpo_core.config import load_profile, load_run, profile_path
    from g2rpo_core.estimate.budget import changes, cheapest
    from g2rpo_core.estimate.plan import make_plan

    # Check the options
    args.profile = args.profile or load_run().profile
    profile = load_profile(profile_path(args.profile))
    if profile.models.source != "hub":
        raise UserError(
            f"plan: profile {args.profile} builds its own small models, which fit on any machine; plan one of published models"
        )
    if args.method not in profile.methods:
        raise UserError(f"plan: --method {args.method}: profile {args.profile} has only {', '.join(profile.methods)}")
    machines = checked_machines("plan", args.gpus, args.memory, args.nodes, args.inside, args.between)
    for option in ("hours", "price"):
        if (value := getattr(args, option)) is not None and not 0 < value < float("inf"):
            raise UserError(f"plan: --{option} {value} must be above 0")
    if args.shard is not None and (args.shard < 1 or args.gpus % args.shard):
        raise UserError(f"plan: --shard {args.shard} must divide --gpus {args.gpus}")
    rate, source = _rate(args.rate, profile, args.method)
    if args.campaign:
        print_campaign(args, profile, machines, rate, source)
        return
    # The cheapest way within a time
    if args.hours:
        way, fastest = cheapest(profile, args.method, machines, args.hours, rate)
        if args.json:
            rows = {"cheapest": way and asdict(way), "fastest": fastest and asdict(fastest), "rate": source}
            print(json.dumps(rows))
        else:
            print("\n".join(_describe_ways(args, profile.run(args.method).training.iterations, way, fastest)))
        sys.exit(0 if way else 1)
    # The plan, and what single changes would do
    plan = make_plan(profile, args.method, machines, args.shard, rate)
    alternatives = changes(profile, args.method, machines, plan.fits, args.shard)
    if args.json:
        keys = ("memory_total_gib", "fits", "hours", "gpu_hours")
        changed_plans = [{"change": label} | {key: getattr(changed, key) for key in keys} for label, changed, _ in alternatives]
        print(json.dumps(asdict(plan) | {"rate": source, "changes": changed_plans}))
        return
    print("\n".join(_describe(args, machines, plan, source, alternatives)))


def print_campaign(args: SimpleNamespace, profile: "Profile", machines: "Machines", rate: float | None, source: str) -> None:
    """Print what all runs and evaluations of params.yaml take, one line for each, and all together."""
    from g2rpo_core.config import load_run
    from g2rpo_core.estimate.campaign import make_campaign

    run = load_run()
    published = run.published if args.profile == run.profile else ()
    campaign = make_campaign(profile, run, published, machines, rate)
    if args.json:
        print(json.dumps(asdict(campaign) | {"rate": source, "price": args.price}))
        return
    print(f"{args.profile}, all of params.yaml, {args.gpus} GPUs of {args.memory:g} GiB ({source})")
    for entry in campaign.entries:
        hours = ", ".join(f"{what} {value:.1f}" for what, value in entry.hours.items())
        kept = f"; keeps {entry.disk_gib:.1f} GiB" if entry.disk_gib else ""
        print(
            f"  {entry.name}: {hours} hours; {_cost(entry.gpu_hours, args.price)}{kept}{'' if entry.fits else '; DOES NOT FIT'}"
        )
    print(f"all, one after the other: {campaign.hours / 24:.1f} days; {_cost(campaign.gpu_hours, args.price)}")
    parts = ", ".join(f"{key} {gib:.1f}" for key, gib in campaign.disk_gib.items())
    print(f"disk, with DVC's copies: {sum(campaign.disk_gib.values()):.0f} GiB: {parts}")


def _cost(gpu_hours: float, price: float | None) -> str:
    return f"{gpu_hours:,.0f} GPU-hours" + (f", {gpu_hours * price:,.0f} at {price:g} an hour" if price else "")


def _rate(given: str | None, profile: "Profile", method: str) -> tuple[float | None, str]:
    if given is None:
        return None, f"assumed: {ASSUMED_TFLOPS:.0f} TFLOP/s in bfloat16; not measured"
    if given == "measured":
        from g2rpo_core.estimate.plan import measured_rate

        return measured_rate(profile, method), "measured on this machine"
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UserError(f"plan: --rate {given}: give milliseconds per forward evaluation, above 0, or `measured`")
    return rate, "given"


def _describe_ways(args: SimpleNamespace, iterations: int, way: "Way | None", fastest: "Way | None") -> list[str]:
    title = f"{args.profile}, {args.method}, at most {args.gpus} GPUs of {args.memory:g} GiB and {args.hours:g} hours"
    if fastest is None:
        return [f"{title}: no way fits into {args.memory:g} GiB, not even a LoRA of rank 32"]
    if way is None:
        part = int(args.hours / fastest.plan.hours * iterations)
        return [f"{title}: no way is that fast; the fastest does {part} of the {iterations} iterations: {_describe_way(fastest)}"]
    pasted = ["as a profile of your own:", *_pasted(args, way.whole)] if way.whole else []
    return [f"{title}: the cheapest way is {_describe_way(way)}", *pasted]


def _describe_way(way: "Way") -> str:
    settings = [f"{name}: {_describe_setting(value)}" for name, value in way.settings.items()]
    return (
        f"{way.gpus} GPUs for {way.plan.hours:.1f} hours, {way.plan.gpu_hours:.0f} GPU-hours, {way.plan.memory_total_gib:.1f} GiB per GPU"
        + (", with training." + ", training.".join(settings) if settings else ", with the profile's settings")
    )


def _describe_setting(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {number:g}" for key, number in value.items() if isinstance(number, int | float)) + "}"
    return str(value).lower()


def _describe(
    args: SimpleNamespace, machines: "Machines", plan: "Plan", source: str, alternatives: "list[tuple[str, Plan, dict]]"
) -> list[str]:
    from g2rpo_core.estimate.budget import has_room

    calls = ", ".join(f"{count} latents per call of the {phase}" for phase, count in plan.latents_per_call.items())
    lines = [
        f"{args.profile}, {args.method}, {args.gpus} GPUs of {args.memory:g} GiB, {plan.gpus_per_model} per model",
        f"forward evaluations: {plan.evaluations_per_prompt} per prompt, {plan.evaluations_per_iteration} per iteration; {calls}",
        f"total compute per prompt, with what is trained, decoded and scored: {plan.compute_per_prompt:g} forward evaluations",
        f"memory per GPU: {plan.memory_total_gib:.1f} GiB: {'fits' if plan.fits else 'DOES NOT FIT'}",
        *(f"  {part:12} {gib:9.2f}" for part, gib in plan.memory_gib.items()),
        "  (by phase: " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.phases_gib.items()) + ")",
        f"time: {plan.seconds_per_iteration:.0f} s per iteration at {plan.ms_per_evaluation:.1f} ms per forward evaluation ({source}): "
        + ", ".join(f"{key} {value:.0f}" for key, value in plan.seconds.items())
        + "".join(f", communication of the {key} {value:.1f}" for key, value in plan.communication_seconds.items() if value),
        f"the whole run: {plan.hours:.1f} hours, {_cost(plan.gpu_hours, args.price)}; sampling one evaluation: {plan.evaluation_hours:.1f} hours",
        f"checkpoints: {plan.checkpoints} in the background, {plan.saving_hours:.1f} hours of writing at {DISK:g} GB/s for each node",
        f"disk: {sum(plan.disk_gib.values()):.0f} GiB: " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.disk_gib.items()),
    ]
    if plan.not_counted:
        lines.append(f"not counted: the models of {', '.join(plan.not_counted)}, which run elsewhere or are your own")
    if alternatives:
        lines.append("what would change:")
        lines += [
            f"  {label}: {each.memory_total_gib:.1f} GiB, {'fits' if each.fits else 'does not fit'}, {each.gpu_hours:.0f} GPU-hours"
            for label, each, _ in alternatives
        ]
    # What to paste: if possible a change that trains the same weights
    roomy = [(settings, each) for _, each, settings in alternatives if settings and has_room(each, machines)]
    if not plan.fits and roomy:
        settings, each = min(roomy, key=lambda one: ("lora" in one[0], one[1].gpu_hours))
        lines.append(f"a profile of your own that fits, with room left ({each.memory_total_gib:.1f} GiB):")
        lines += _pasted(args, settings)
    return lines


def _pasted(args: SimpleNamespace, settings: dict) -> list[str]:
    """Return the lines of a profile with these settings of `training` for the method."""
    return [f"  extends: {args.profile}", f"  methods: {{{args.method}: {{training: {json.dumps(settings)}}}}}"]


def probe(
    profile: Annotated[str | None, typer.Option(help="default: the one in params.yaml")] = None,
    study: Annotated[
        str | None,
        typer.Option(help="instead of --profile: a study's entries and changes, or one of its bases, as my_study/base-2"),
    ] = None,
    run: Annotated[str, typer.Option(help="`base`, a run such as g2rpo-1, or a folder with `transformer` or `lora`")] = BASE[0],
    prompts: Annotated[int, typer.Option(help="how many training prompts, the first ones")] = 16,
    group: Annotated[int | None, typer.Option(help="members of a group (default: training.num_generations)")] = None,
    granularities: Annotated[str, typer.Option(help="step sizes of the tails, rising, the finest first")] = "1,2,3",
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: a GPU if there is one)")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="measure how much the policy gradients of prompts agree, for what they cost")
    ] = False,
    steps: Annotated[str, typer.Option(help="with --gradients: SDE steps, rising, as 2,3,4 (default: all)")] = "",
    methods: Annotated[
        str, typer.Option(help="with --gradients: also whole iterations of these entries, as mix_grpo,dance_grpo")
    ] = "",
    judge: Annotated[
        str | None, typer.Option(help="with --gradients: a reward to whose gradient the angle is measured, such as verifier")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list instead of the table")] = False,
) -> None:
    """Measure, before training, how the reward spreads when noise is added at each step, and whether coarse tails rank as fine ones do.

    It needs the stages models and embed. Noise that changes no score teaches nothing: choose sde_steps where the spread is large for its
    evaluations, and coarser tails where their correlation with the finest is near 1. With --gradients it measures instead how much the gradients of different prompts agree, by step,
    by tail alone and all together, and of whole methods: what teaches most for its evaluations.

    Example: g2rpo probe --prompts 32 --granularities 1,3
    """
    name, settings = read_profile(profile, study)
    members = group or settings.training.num_generations
    tails = _parse_rising(granularities, 1)
    if not tails or prompts < 1 or members < 2:
        raise UserError(
            "probe: --granularities are rising whole numbers from 1, as 1,2,3; --prompts is at least 1, --group at least 2"
        )
    title, folders = f"{study or name}, {run}", folders_of(name, study)
    if study and OF_BASE in study and run != BASE[0]:
        raise UserError(f"probe: --run {run}: with --study {study} only its base, {BASE[0]}, is probed")
    weights, rewards = find_weights(run, name), " + ".join(settings.training.rewards)
    if gradients:
        asked = SimpleNamespace(**locals(), names=[word for word in methods.split(",") if word])
        _print_gradients(asked, _measure_gradients(asked))
        return
    found, count = _measure(folders, settings, weights, prompts, tails, members, seed, device)
    if as_json:
        print(json.dumps([asdict(step) for step in found]))
        return
    print(f"{title}: training reward {rewards} over {count} prompts, groups of {members}")
    _print_table(found, tails)


def _measure_gradients(asked: SimpleNamespace) -> "list[Signal]":
    """Load policy, rewards and prompts, and probe the gradients of every step and of the named entries."""
    from tqdm import tqdm

    from g2rpo_core.algorithm.methods import METHODS
    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.common.processes import device_of
    from g2rpo_core.config.profile import ResolvedRun
    from g2rpo_core.data.embeddings import EmbeddingStore
    from g2rpo_core.inference.gradients import SIZE, Gradients, load_policy, probe_method, probe_steps
    from g2rpo_core.models.policy import policy_settings
    from g2rpo_core.rewards import registry

    # Check what is asked
    profile, sampling = asked.settings, asked.settings.sampling
    if unknown := [name for name in asked.names if name not in profile.methods]:
        raise UserError(f"probe: --methods {unknown[0]}: profile {asked.name} has only {', '.join(profile.methods)}")
    chosen = _parse_rising(asked.steps, 0) if asked.steps else tuple(range(sampling.steps - 1))
    if not chosen or chosen[-1] > sampling.steps - 2:
        raise UserError(f"probe: --steps are rising whole numbers from 0 to {sampling.steps - 2}, as 2,3,4 (got {asked.steps!r})")
    if asked.prompts < 3:
        raise UserError(f"probe: --prompts {asked.prompts}: --gradients compares prompts: give at least 3")
    # Load
    where, (folder, embeddings) = device_of(asked.device), asked.folders
    store = EmbeddingStore(embeddings / "train")
    store.load_encoders(ModelStore(folder).folder("pipeline"), where)
    training = profile.training.model_copy(update={"num_generations": asked.members})
    policy = load_policy(
        ModelStore(folder).folder("pipeline"), asked.weights, training.lora, asked.seed, policy_settings(sampling, where)
    )
    named = dict.fromkeys([*training.rewards, *([asked.judge] if asked.judge else [])])
    rewards = registry.load(list(named), folder, where, profile.rewards)
    # Every step with each tail alone and all together, and whole iterations
    sets = list(dict.fromkeys([*((each,) for each in asked.tails), asked.tails]))
    method = METHODS["g2rpo"].changed(tree={"sde_steps": chosen, "granularities": asked.tails})
    of_steps = ResolvedRun("g2rpo", None, "g2rpo", method, sampling, training)
    count = range(min(asked.prompts, len(store)))
    make = lambda entry: Gradients(policy, entry, store, rewards, asked.judge, asked.seed, SIZE)
    found = probe_steps(make(of_steps), tqdm(count, desc="steps", disable=None), sets)
    entries = [profile.run(name) for name in asked.names]
    return found + [probe_method(make(entry), tqdm(count, desc=entry.name, disable=None)) for entry in entries]


def _print_gradients(asked: SimpleNamespace, signals: "list[Signal]") -> None:
    """Print a line for every signal, or the JSON list."""
    if asked.as_json:
        rows = [asdict(each) | {"per_evaluation": each.per_evaluation, "per_compute": each.per_compute} for each in signals]
        print(json.dumps(rows))
        return
    print(f"{asked.title}: gradient of {asked.rewards} over {signals[0].prompts} prompts, groups of {asked.members}")
    print("what         tails    SNR²      ±     NFE  per 1,000  compute  per 1,000" + ("  cosine" if asked.judge else ""))
    for each in signals:
        what, tails = each.method if each.step is None else f"step {each.step}", ",".join(map(str, each.granularities))
        numbers = f"{each.snr2:7.3f} {each.error:6.3f} {each.evaluations:7,.0f} {1000 * each.per_evaluation:10.4f}"
        cosine = f" {each.cosine:7.2f}" if each.cosine is not None else "       -" if asked.judge else ""
        print(f"{what:12} {tails:6} {numbers} {each.compute:8,.0f} {1000 * each.per_compute:10.4f}{cosine}")


def _parse_rising(text: str, least: int) -> tuple[int, ...]:
    """Return rising whole numbers from `least`; none if the text is anything else."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        return ()
    return numbers if list(numbers) == sorted(set(numbers)) and numbers[0] >= least else ()


def _measure(
    folders: tuple[Path, Path],
    profile: "Profile",
    weights: Path | None,
    prompts: int,
    tails: tuple[int, ...],
    group: int,
    seed: int,
    device: str | None,
) -> "tuple[list[Step], int]":
    """Load policy, rewards and prompts, and probe every step; return the steps, and how many prompts were used."""
    from tqdm import tqdm

    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.common.processes import device_of
    from g2rpo_core.data.embeddings import EmbeddingStore
    from g2rpo_core.inference.probe import probe
    from g2rpo_core.models.policy import Policy, policy_settings
    from g2rpo_core.rewards import registry

    where, sampling, reward_weights, (models, embeddings) = device_of(device), profile.sampling, profile.training.rewards, folders
    store = EmbeddingStore(embeddings / "train")
    store.load_encoders(ModelStore(models).folder("pipeline"), where)
    policy = Policy.load(ModelStore(models).folder("pipeline"), weights, **policy_settings(sampling, where))
    rewards = registry.load(list(reward_weights), models, where, profile.rewards)
    count = min(prompts, len(store))
    first = tqdm(range(count), desc="prompts", disable=None)
    return probe(policy, rewards, reward_weights, store, first, sampling, tails, group, seed), count


def _print_table(steps: "list[Step]", tails: tuple[int, ...]) -> None:
    coarse = tails[1:]
    print(
        "step  sigma  spread  "
        + "  ".join(f"NFE λ={each}" for each in tails)
        + "".join(f"  corr. λ={each}   gap λ={each}" for each in coarse)
    )
    for step in steps:
        evaluations = "  ".join(f"{step.evaluations[each]:7,}" for each in tails)
        agreement = "".join(f"  {step.correlation[each]:9.2f}  {step.gap[each]:+8.4f}" for each in coarse)
        print(f"{step.step:4}  {step.sigma:5.3f}  {step.spread:6.4f}  {evaluations}{agreement}")
