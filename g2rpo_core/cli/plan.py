"""`g2rpo plan`: what a profile needs before anybody rents it."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from g2rpo_core.config import Profile, load_profile, profile_path
from g2rpo_core.errors import UserError
from g2rpo_core.estimate import plan as estimate
from g2rpo_core.estimate.plan import ASSUMED_TFLOPS, Plan, changes, make_plan, measured_rate


def add_parser(commands) -> None:
    """Adds `plan` to the commands of g2rpo."""
    parser: ArgumentParser = commands.add_parser(
        "plan", help="what a profile needs: memory, time, disk", description=estimate.__doc__
    )
    parser.add_argument("--profile", required=True)
    parser.add_argument("--method", default="g2rpo", help="an entry of the profile's methods (g2rpo)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory", type=float, default=80, help="GiB of one GPU (80)")
    parser.add_argument("--shard", type=int, help="GPUs that share one model, a divisor of --gpus (all)")
    parser.add_argument(
        "--rate", help="milliseconds per forward evaluation, or `measured`: on this machine's GPU (assumed if left out)"
    )
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
        return measured_rate(profile, method), "measured on this machine"
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UserError(f"plan: --rate {given}: give milliseconds per forward evaluation, above 0, or `measured`")
    return rate, "given"


def _lines(args: Namespace, plan: Plan, source: str, what: list) -> list[str]:
    calls = ", ".join(f"{count} latents in a call of the {phase}" for phase, count in plan.latents_per_call.items())
    lines = [
        f"{args.profile}, {args.method}, {args.gpus} GPUs of {args.memory:g} GiB, {plan.gpus_per_model} to a model",
        f"forward evaluations: {plan.evaluations_per_prompt} a prompt, {plan.evaluations_per_iteration} an iteration; {calls}",
        f"memory per GPU: {plan.memory_total_gib:.1f} GiB: {'fits' if plan.fits else 'DOES NOT FIT'}",
        *(f"  {part:12} {gib:9.2f}" for part, gib in plan.memory_gib.items()),
        "  (activations: the most of " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.activations_gib.items()) + ")",
        f"time: {plan.seconds_per_iteration:.0f} s an iteration at {plan.ms_per_evaluation:.1f} ms a forward evaluation ({source}), communication aside: "
        + ", ".join(f"{key} {value:.0f}" for key, value in plan.seconds.items()),
        "disk, GiB: " + ", ".join(f"{key} {gib:.1f}" for key, gib in plan.disk_gib.items()),
    ]
    if plan.not_counted:
        lines.append(f"not counted: the models of {', '.join(plan.not_counted)}, which run elsewhere or are your own")
    if what:
        lines.append("what to change:")
        lines += [f"  {label}: {gib:.1f} GiB, {'fits' if fits else 'does not fit'}" for label, gib, fits in what]
    return lines
