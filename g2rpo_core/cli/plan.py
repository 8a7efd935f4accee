"""`g2rpo plan`: what a profile needs, before you rent machines."""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.errors import UserError
from g2rpo_core.estimate.machines import ASSUMED_TFLOPS, BETWEEN, INSIDE, checked_machines

if TYPE_CHECKING:  # these import torch and diffusers, which would slow down --help
    from g2rpo_core.config import Profile
    from g2rpo_core.estimate.budget import Way
    from g2rpo_core.estimate.plan import Plan


def plan(
    profile: Annotated[str, typer.Option(help="name of a file in profiles/")],
    method: Annotated[str, typer.Option(help="an entry of the profile's methods")] = "g2rpo",
    gpus: Annotated[int, typer.Option(help="GPUs on all nodes together")] = 1,
    nodes: Annotated[
        int | None, typer.Option(help="number of nodes (default: as few as possible, with up to 8 GPUs each)")
    ] = None,
    memory: Annotated[float, typer.Option(help="GiB per GPU")] = 80,
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

    Example: g2rpo plan --profile flux_hps_clip --gpus 16 --memory 141
    """
    run(SimpleNamespace(**locals()))


def run(args: SimpleNamespace) -> None:
    from g2rpo_core.config import load_profile, profile_path, training_of
    from g2rpo_core.estimate.budget import cheapest
    from g2rpo_core.estimate.plan import changes, make_plan

    profile = load_profile(profile_path(args.profile))
    if profile.models.source != "hub":
        raise UserError(
            f"plan: profile {args.profile} builds its own small models, which fit on any machine; plan one of published models"
        )
    if args.method not in profile.methods:
        raise UserError(f"plan: --method {args.method}: profile {args.profile} has only {', '.join(profile.methods)}")
    machines = checked_machines("plan", args.gpus, args.memory, args.nodes, args.inside, args.between)
    if args.hours is not None and not 0 < args.hours < float("inf"):
        raise UserError(f"plan: --hours {args.hours} must be above 0")
    if args.shard is not None and (args.shard < 1 or args.gpus % args.shard):
        raise UserError(f"plan: --shard {args.shard} must divide --gpus {args.gpus}")
    rate, source = _rate(args.rate, profile, args.method)
    if args.hours:
        way, fastest = cheapest(profile, args.method, machines, args.hours, rate)
        if args.json:
            print(
                json.dumps(
                    {"cheapest": asdict(way) if way else None, "fastest": asdict(fastest) if fastest else None, "rate": source}
                )
            )
        else:
            print(
                "\n".join(
                    _lines_of_ways(args, training_of(profile.training, profile.methods, args.method).iterations, way, fastest)
                )
            )
        sys.exit(0 if way else 1)
    plan = make_plan(profile, args.method, machines, args.shard, rate)
    what = changes(profile, args.method, machines, plan.fits, args.shard)
    if args.json:
        keys = ("memory_total_gib", "fits", "hours", "gpu_hours")
        rows = [{"change": label} | {key: getattr(changed, key) for key in keys} for label, changed in what]
        print(json.dumps(asdict(plan) | {"rate": source, "changes": rows}))
        return
    print("\n".join(_lines(args, plan, source, what)))


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


def _lines_of_ways(args: SimpleNamespace, iterations: int, way: "Way | None", fastest: "Way | None") -> list[str]:
    title = f"{args.profile}, {args.method}, at most {args.gpus} GPUs of {args.memory:g} GiB and {args.hours:g} hours"
    if fastest is None:
        return [f"{title}: no way fits into {args.memory:g} GiB, not even a LoRA of rank 32"]
    if way is None:
        part = int(args.hours / fastest.plan.hours * iterations)
        return [f"{title}: no way is that fast; the fastest does {part} of the {iterations} iterations: {_way(fastest)}"]
    return [f"{title}: the cheapest way is {_way(way)}"]


def _way(way: "Way") -> str:
    settings = [f"{name}: {_setting(value)}" for name, value in way.settings.items()]
    return (
        f"{way.gpus} GPUs for {way.plan.hours:.1f} hours, {way.plan.gpu_hours:.0f} GPU-hours, {way.plan.memory_total_gib:.1f} GiB per GPU"
        + (", with training." + ", training.".join(settings) if settings else ", with the profile's settings")
    )


def _setting(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one:g}" for key, one in value.items() if isinstance(one, int | float)) + "}"
    return str(value).lower()


def _lines(args: SimpleNamespace, plan: "Plan", source: str, what: "list[tuple[str, Plan]]") -> list[str]:
    calls = ", ".join(f"{count} latents per call of the {phase}" for phase, count in plan.latents_per_call.items())
    lines = [
        f"{args.profile}, {args.method}, {args.gpus} GPUs of {args.memory:g} GiB, {plan.gpus_per_model} per model",
        f"forward evaluations: {plan.evaluations_per_prompt} per prompt, {plan.evaluations_per_iteration} per iteration; {calls}",
        f"memory per GPU: {plan.memory_total_gib:.1f} GiB: {'fits' if plan.fits else 'DOES NOT FIT'}",
        *(f"  {part:12} {gib:9.2f}" for part, gib in plan.memory_gib.items()),
        "  (by phase: " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.phases_gib.items()) + ")",
        f"time: {plan.seconds_per_iteration:.0f} s per iteration at {plan.ms_per_evaluation:.1f} ms per forward evaluation ({source}): "
        + ", ".join(f"{key} {value:.0f}" for key, value in plan.seconds.items())
        + "".join(f", communication of the {key} {value:.1f}" for key, value in plan.communication_seconds.items() if value),
        f"the whole run: {plan.hours:.1f} hours, {plan.gpu_hours:.0f} GPU-hours",
        f"disk: {sum(plan.disk_gib.values()):.0f} GiB: " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.disk_gib.items()),
    ]
    if plan.not_counted:
        lines.append(f"not counted: the models of {', '.join(plan.not_counted)}, which run elsewhere or are your own")
    if what:
        lines.append("what would change:")
        lines += [
            f"  {label}: {one.memory_total_gib:.1f} GiB, {'fits' if one.fits else 'does not fit'}, {one.gpu_hours:.0f} GPU-hours"
            for label, one in what
        ]
    return lines
