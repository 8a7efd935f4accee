"""Print what a training needs, before machines are rented, for `g2rpo plan`."""

import json as to_json
import sys
from dataclasses import asdict, dataclass

from g2rpo_core.config import Profile, load_profile, load_run, profile_path
from g2rpo_core.estimate.budget import Way, changes, cheapest, has_room
from g2rpo_core.estimate.calls import Calls, calls_of, describe_calls
from g2rpo_core.estimate.campaign import make_campaign
from g2rpo_core.estimate.cards import card_of, rate_of
from g2rpo_core.estimate.machines import ASSUMED, DISK, Machines, Rate, checked_machines
from g2rpo_core.estimate.plan import Plan, make_plan, measured_rate
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo

DEFAULT_MEMORY = 79.0  # GiB of a card of 80 GB


@dataclass(frozen=True)
class Asked:
    """What is planned, as the output repeats it."""

    profile: str
    method: str
    gpus: int
    memory: float
    """GiB per GPU."""
    price: float | None
    """Of a GPU for an hour."""

    @property
    def machines(self) -> str:
        return f"{self.gpus} GPUs of {self.memory:g} GiB"


def plan(
    profile: str | None,
    campaign: bool,
    price: float | None,
    method: str,
    gpus: int,
    nodes: int | None,
    card: str | None,
    memory: float | None,
    hours: float | None,
    shard: int | None,
    inside: float,
    between: float,
    rate: str | None,
    json: bool,
) -> None:
    """Check the options, then print the plan, or with `hours` the cheapest way.

    Exit status 1 if no way is that fast.
    """
    # Check the options
    name = profile or load_run().profile
    settings = load_profile(profile_path(name))
    if method not in settings.methods:
        raise UserError(
            f"plan: --method {method}: profile {name} has only {', '.join(settings.methods)}"
        )
    if memory is None:
        memory = card_of(card).memory if card else DEFAULT_MEMORY
    machines = checked_machines("plan", gpus, memory, nodes, inside, between)
    for option, value in (("hours", hours), ("price", price)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"plan: --{option} {value} must be above 0")
    if shard is not None and (shard < 1 or gpus % shard):
        raise UserError(f"plan: --shard {shard} must divide --gpus {gpus}")
    asked = Asked(name, method, gpus, memory, price)
    assumed = _rate(rate, card, settings, method)
    if campaign:
        print_campaign(asked, settings, machines, assumed, json)
        return
    if hours:
        sys.exit(0 if print_cheapest(asked, settings, machines, hours, assumed, json) else 1)
    # The plan, and what single changes would do
    found = make_plan(settings, method, machines, shard, assumed)
    alternatives = changes(settings, method, machines, found.fits, shard, assumed)
    if json:
        keys = ("memory_total_gib", "fits", "hours", "gpu_hours")
        changed_plans = [
            {"change": label} | {key: getattr(changed, key) for key in keys}
            for label, changed, _ in alternatives
        ]
        echo(to_json.dumps(asdict(found) | {"rate": assumed.source, "changes": changed_plans}))
        return
    calls = calls_of(settings, method, machines)
    echo(*_describe(asked, machines, found, calls, assumed.source, alternatives))


def print_cheapest(
    asked: Asked, profile: Profile, machines: Machines, hours: float, rate: Rate, json: bool
) -> bool:
    """Print the cheapest way to train within `hours`; return whether there is one."""
    way, fastest = cheapest(profile, asked.method, machines, hours, rate)
    if json:
        rows = {
            "cheapest": way and asdict(way),
            "fastest": fastest and asdict(fastest),
            "rate": rate.source,
        }
        echo(to_json.dumps(rows))
    else:
        iterations = profile.run(asked.method).training.iterations
        echo(*_describe_ways(asked, hours, iterations, way, fastest, rate))
    return way is not None


def print_campaign(
    asked: Asked, profile: Profile, machines: Machines, rate: Rate, json: bool
) -> None:
    """Print what all runs and evaluations of params.yaml take, a line each, and the sum."""
    run = load_run()
    published = run.published if asked.profile == run.profile else ()
    campaign = make_campaign(profile, run, published, machines, rate)
    if json:
        echo(to_json.dumps(asdict(campaign) | {"rate": rate.source, "price": asked.price}))
        return
    echo(f"{asked.profile}, all of params.yaml, {asked.machines} ({rate.source})")
    for entry in campaign.entries:
        hours = ", ".join(f"{what} {value:.1f}" for what, value in entry.hours.items())
        kept = f"; keeps {entry.disk_gib:.1f} GiB" if entry.disk_gib else ""
        echo(
            f"  {entry.name}: {hours} hours; "
            f"{_cost(entry.gpu_hours, asked.price)}{kept}{'' if entry.fits else '; DOES NOT FIT'}"
        )
    echo(
        f"all, one after the other: {campaign.hours / 24:.1f} days; "
        f"{_cost(campaign.gpu_hours, asked.price)}"
    )
    parts = ", ".join(f"{key} {gib:.1f}" for key, gib in campaign.disk_gib.items())
    echo(f"disk, with DVC's copies: {sum(campaign.disk_gib.values()):.0f} GiB: {parts}")


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 or not value else f"{value:.2g}"


def _tenths(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def _cost(gpu_hours: float, price: float | None) -> str:
    return f"{_whole(gpu_hours)} GPU-hours" + (
        f", {gpu_hours * price:,.0f} at {price:g} an hour" if price else ""
    )


def _rate(given: str | None, card: str | None, profile: Profile, method: str) -> Rate:
    """Return the rate that --rate or --card give."""
    if given is None:
        return rate_of(card, profile.run(method).training.parallel.compile) if card else ASSUMED
    if given == "measured":
        return Rate(ms=measured_rate(profile, method), source="measured on this machine")
    try:
        ms = float(given)
    except ValueError:
        ms = 0.0
    if not 0 < ms < float("inf"):
        raise UserError(
            f"plan: --rate {given}: give milliseconds per forward evaluation, above 0, "
            "or `measured`"
        )
    return Rate(ms=ms, source="given")


def _describe_ways(
    asked: Asked, hours: float, iterations: int, way: Way | None, fastest: Way | None, rate: Rate
) -> list[str]:
    title = (
        f"{asked.profile}, {asked.method}, at most {asked.machines} and {hours:g} hours "
        f"({rate.source})"
    )
    if fastest is None:
        return [f"{title}: no way fits into {asked.memory:g} GiB, not even a LoRA of rank 32"]
    if way is None:
        part = int(hours / fastest.plan.hours * iterations)
        return [
            (
                f"{title}: no way is that fast; the fastest does {part} of the {iterations} "
                f"iterations: {_describe_way(fastest)}"
            )
        ]
    pasted = ["as a profile of your own:", *_pasted(asked, way.whole)] if way.whole else []
    return [f"{title}: the cheapest way is {_describe_way(way)}", *pasted]


def _describe_way(way: Way) -> str:
    settings = [f"{name}: {_describe_setting(value)}" for name, value in way.settings.items()]
    return (
        f"{way.gpus} GPUs for {way.plan.hours:.1f} hours, {way.plan.gpu_hours:.0f} GPU-hours, "
        f"{way.plan.memory_total_gib:.1f} GiB per GPU"
        + (
            ", with training." + ", training.".join(settings)
            if settings
            else ", with the profile's settings"
        )
    )


def _describe_setting(value: object) -> str:
    if not isinstance(value, dict):
        return str(value).lower()
    numbers = {key: one for key, one in value.items() if isinstance(one, int | float)}
    return "{" + ", ".join(f"{key}: {number:g}" for key, number in numbers.items()) + "}"


def _describe(
    asked: Asked,
    machines: Machines,
    plan: Plan,
    calls: list[Calls],
    source: str,
    alternatives: list[tuple[str, Plan, dict]],
) -> list[str]:
    at_most = ", ".join(
        f"{count} latents per call of the {phase}" for phase, count in plan.latents_per_call.items()
    )
    tenths = lambda parts: ", ".join(f"{key} {value:.1f}" for key, value in parts.items())
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    seconds = ", ".join(f"{key} {_whole(value)}" for key, value in plan.seconds.items())
    for key, value in plan.communication_seconds.items():
        seconds += f", communication of the {key} {value:.1f}" if value else ""
    lines = [
        f"{asked.profile}, {asked.method}, {asked.machines}, {plan.gpus_per_model} per model",
        (
            f"forward evaluations: {plan.evaluations_per_prompt} per prompt, "
            f"{plan.evaluations_per_iteration} per iteration; {at_most}"
        ),
        *([describe_calls(calls)] if calls else []),
        (
            "total compute per prompt, with what is trained, decoded and scored: "
            f"{plan.compute_per_prompt:g} forward evaluations"
        ),
        f"memory per GPU: {plan.memory_total_gib:.1f} GiB: {verdict}",
        *(f"  {part:12} {gib:9.2f}" for part, gib in plan.memory_gib.items()),
        f"  (by phase: {tenths(plan.phases_gib)})",
        (
            f"time: {_whole(plan.seconds_per_iteration)} s per iteration at "
            f"{_tenths(plan.ms_per_evaluation)} ms per forward evaluation ({source}): {seconds}"
        ),
        (
            f"the whole run: {_tenths(plan.hours)} hours, {_cost(plan.gpu_hours, asked.price)}; "
            f"sampling one evaluation: {plan.evaluation_hours:.1f} hours"
        ),
        (
            f"checkpoints: {plan.checkpoints} in the background, {plan.saving_hours:.1f} hours of "
            f"writing at {DISK:g} GB/s for each node"
        ),
        f"disk: {sum(plan.disk_gib.values()):.0f} GiB: {tenths(plan.disk_gib)}",
    ]
    if plan.prompt_tokens < plan.most_prompt_tokens:
        lines.append(
            f"time is that of prompts of {plan.prompt_tokens} tokens, as padding is left out; "
            f"memory has room for {plan.most_prompt_tokens}"
        )
    if plan.not_counted:
        lines.append(
            f"not counted: the models of {', '.join(plan.not_counted)}, which are small, "
            "run elsewhere or are your own"
        )
    lines += _changes(alternatives)
    return lines if plan.fits else [*lines, *_advise(asked, machines, alternatives)]


def _changes(alternatives: list[tuple[str, Plan, dict]]) -> list[str]:
    lines = [
        f"  {label}: {each.memory_total_gib:.1f} GiB, "
        f"{'fits' if each.fits else 'does not fit'}, {each.gpu_hours:.0f} GPU-hours"
        for label, each, _ in alternatives
    ]
    return ["what would change:", *lines] if lines else []


def _advise(
    asked: Asked, machines: Machines, alternatives: list[tuple[str, Plan, dict]]
) -> list[str]:
    """Return a profile to paste whose plan fits, if possible one that trains the same weights."""
    roomy = [
        (settings, each)
        for _, each, settings in alternatives
        if settings and has_room(each, machines)
    ]
    if not roomy:
        return []
    settings, each = min(roomy, key=lambda one: ("lora" in one[0], one[1].gpu_hours))
    title = f"a profile of your own that fits, with room left ({each.memory_total_gib:.1f} GiB):"
    return [title, *_pasted(asked, settings)]


def _pasted(asked: Asked, settings: dict) -> list[str]:
    """Return the lines of a profile with these settings of `training` for the method."""
    return [
        f"  extends: {asked.profile}",
        f"  methods: {{{asked.method}: {{training: {to_json.dumps(settings)}}}}}",
    ]
