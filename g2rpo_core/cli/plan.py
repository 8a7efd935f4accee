"""Define `g2rpo plan`: what a training needs, before machines are rented."""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.estimate.cards import CARDS, card_of, rate_of
from g2rpo_core.estimate.machines import ASSUMED, BETWEEN, DISK, INSIDE, Rate, checked_machines
from g2rpo_core.foundation.errors import UserError

if TYPE_CHECKING:  # these import torch and diffusers, which would slow down --help
    from g2rpo_core.config import Profile
    from g2rpo_core.estimate.budget import Way
    from g2rpo_core.estimate.machines import Machines
    from g2rpo_core.estimate.plan import Plan

DEFAULT_MEMORY = 79.0  # GiB of a card of 80 GB


def plan(
    profile: Annotated[str | None, typer.Option(help="name of a file in profiles/ (default: the one in params.yaml)")] = None,
    campaign: Annotated[bool, typer.Option("--campaign", help="plan all runs and evaluations that params.yaml names")] = False,
    price: Annotated[float | None, typer.Option(help="of a GPU for an hour, in any currency: also print what it costs")] = None,
    method: Annotated[str, typer.Option(help="an entry of the profile's methods")] = "g2rpo",
    gpus: Annotated[int, typer.Option(help="GPUs on all nodes together")] = 1,
    nodes: Annotated[
        int | None, typer.Option(help="number of nodes (default: as few as possible, with up to 8 GPUs each)")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help=f"the GPUs' memory and rate, of {', '.join(CARDS)}; --memory and --rate go before it")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="GiB per GPU, as torch sees them: a card of 80 GB has 79 (the default), of 141 GB 139, of 24 GB 23"),
    ] = None,
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
    if args.method not in profile.methods:
        raise UserError(f"plan: --method {args.method}: profile {args.profile} has only {', '.join(profile.methods)}")
    card = card_of(args.card) if args.card else None
    if args.memory is None:
        args.memory = card.memory if card else DEFAULT_MEMORY
    machines = checked_machines("plan", args.gpus, args.memory, args.nodes, args.inside, args.between)
    for option in ("hours", "price"):
        if (value := getattr(args, option)) is not None and not 0 < value < float("inf"):
            raise UserError(f"plan: --{option} {value} must be above 0")
    if args.shard is not None and (args.shard < 1 or args.gpus % args.shard):
        raise UserError(f"plan: --shard {args.shard} must divide --gpus {args.gpus}")
    rate = _rate(args, profile)
    if args.campaign:
        print_campaign(args, profile, machines, rate)
        return
    # The cheapest way within a time
    if args.hours:
        way, fastest = cheapest(profile, args.method, machines, args.hours, rate)
        if args.json:
            rows = {"cheapest": way and asdict(way), "fastest": fastest and asdict(fastest), "rate": rate.source}
            print(json.dumps(rows))
        else:
            print("\n".join(_describe_ways(args, profile.run(args.method).training.iterations, way, fastest, rate)))
        sys.exit(0 if way else 1)
    # The plan, and what single changes would do
    plan = make_plan(profile, args.method, machines, args.shard, rate)
    alternatives = changes(profile, args.method, machines, plan.fits, args.shard, rate)
    if args.json:
        keys = ("memory_total_gib", "fits", "hours", "gpu_hours")
        changed_plans = [{"change": label} | {key: getattr(changed, key) for key in keys} for label, changed, _ in alternatives]
        print(json.dumps(asdict(plan) | {"rate": rate.source, "changes": changed_plans}))
        return
    print("\n".join(_describe(args, machines, plan, rate.source, alternatives)))


def print_campaign(args: SimpleNamespace, profile: "Profile", machines: "Machines", rate: Rate) -> None:
    """Print what all runs and evaluations of params.yaml take, one line for each, and all together."""
    from g2rpo_core.config import load_run
    from g2rpo_core.estimate.campaign import make_campaign

    run = load_run()
    published = run.published if args.profile == run.profile else ()
    campaign = make_campaign(profile, run, published, machines, rate)
    if args.json:
        print(json.dumps(asdict(campaign) | {"rate": rate.source, "price": args.price}))
        return
    print(f"{args.profile}, all of params.yaml, {args.gpus} GPUs of {args.memory:g} GiB ({rate.source})")
    for entry in campaign.entries:
        hours = ", ".join(f"{what} {value:.1f}" for what, value in entry.hours.items())
        kept = f"; keeps {entry.disk_gib:.1f} GiB" if entry.disk_gib else ""
        print(
            f"  {entry.name}: {hours} hours; {_cost(entry.gpu_hours, args.price)}{kept}{'' if entry.fits else '; DOES NOT FIT'}"
        )
    print(f"all, one after the other: {campaign.hours / 24:.1f} days; {_cost(campaign.gpu_hours, args.price)}")
    parts = ", ".join(f"{key} {gib:.1f}" for key, gib in campaign.disk_gib.items())
    print(f"disk, with DVC's copies: {sum(campaign.disk_gib.values()):.0f} GiB: {parts}")


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 or not value else f"{value:.2g}"


def _tenths(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def _cost(gpu_hours: float, price: float | None) -> str:
    return f"{_whole(gpu_hours)} GPU-hours" + (f", {gpu_hours * price:,.0f} at {price:g} an hour" if price else "")


def _rate(args: SimpleNamespace, profile: "Profile") -> Rate:
    """Return the rate that --rate or --card give."""
    if args.rate is None:
        return rate_of(args.card, profile.run(args.method).training.parallel.compile) if args.card else ASSUMED
    if args.rate == "measured":
        from g2rpo_core.estimate.plan import measured_rate

        return Rate(ms=measured_rate(profile, args.method), source="measured on this machine")
    try:
        ms = float(args.rate)
    except ValueError:
        ms = 0.0
    if not 0 < ms < float("inf"):
        raise UserError(f"plan: --rate {args.rate}: give milliseconds per forward evaluation, above 0, or `measured`")
    return Rate(ms=ms, source="given")


def _describe_ways(args: SimpleNamespace, iterations: int, way: "Way | None", fastest: "Way | None", rate: Rate) -> list[str]:
    title = (
        f"{args.profile}, {args.method}, at most {args.gpus} GPUs of {args.memory:g} GiB and {args.hours:g} hours ({rate.source})"
    )
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
        f"time: {_whole(plan.seconds_per_iteration)} s per iteration at {_tenths(plan.ms_per_evaluation)} ms per forward evaluation ({source}): "
        + ", ".join(f"{key} {_whole(value)}" for key, value in plan.seconds.items())
        + "".join(f", communication of the {key} {value:.1f}" for key, value in plan.communication_seconds.items() if value),
        f"the whole run: {_tenths(plan.hours)} hours, {_cost(plan.gpu_hours, args.price)}; sampling one evaluation: {plan.evaluation_hours:.1f} hours",
        f"checkpoints: {plan.checkpoints} in the background, {plan.saving_hours:.1f} hours of writing at {DISK:g} GB/s for each node",
        f"disk: {sum(plan.disk_gib.values()):.0f} GiB: " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.disk_gib.items()),
    ]
    if plan.prompt_tokens < plan.most_prompt_tokens:
        lines.append(
            f"time is that of prompts of {plan.prompt_tokens} tokens, as padding is left out; memory has room for {plan.most_prompt_tokens}"
        )
    if plan.not_counted:
        lines.append(f"not counted: the models of {', '.join(plan.not_counted)}, which are small, run elsewhere or are your own")
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
