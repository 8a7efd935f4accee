"""Print what a training needs, before machines are rented, for `g2rpo plan`."""

import json as to_json
from dataclasses import asdict

from g2rpo_core.config import load_profile, load_run, profile_path
from g2rpo_core.estimate.cards import card_of, rate_of
from g2rpo_core.estimate.machines import ASSUMED, DISK, Rate, checked_machines
from g2rpo_core.estimate.plan import Plan, make_plan
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo

DEFAULT_MEMORY = 79.0  # GiB of a card of 80 GB


def plan(
    profile: str | None,
    method: str,
    gpus: int,
    nodes: int | None,
    card: str | None,
    memory: float | None,
    shard: int | None,
    inside: float,
    between: float,
    rate: float | None,
    json: bool,
) -> None:
    """Check the options, then print the plan."""
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
    if rate is not None and not 0 < rate < float("inf"):
        raise UserError(f"plan: --rate {rate} must be above 0")
    if shard is not None and (shard < 1 or gpus % shard):
        raise UserError(f"plan: --shard {shard} must divide --gpus {gpus}")
    # The rate: given, of a card, or assumed
    used = ASSUMED
    if rate is not None:
        used = Rate(ms=rate, source="given")
    elif card:
        used = rate_of(card, settings.run(method).training.parallel.compile)
    # Print
    found = make_plan(settings, method, machines, shard, used)
    if json:
        echo(to_json.dumps(asdict(found) | {"rate": used.source}))
        return
    echo(f"{name}, {method}, {gpus} GPUs of {memory:g} GiB, {found.gpus_per_model} per model")
    echo(*_describe(found, used.source))


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 or not value else f"{value:.2g}"


def _tenths(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def _describe(plan: Plan, source: str) -> list[str]:
    at_most = ", ".join(
        f"{count} latents per call of the {phase}" for phase, count in plan.latents_per_call.items()
    )
    tenths = lambda parts: ", ".join(f"{key} {value:.1f}" for key, value in parts.items())
    seconds = ", ".join(f"{key} {_whole(value)}" for key, value in plan.seconds.items())
    for key, value in plan.communication_seconds.items():
        seconds += f", communication of the {key} {value:.1f}" if value else ""
    lines = [
        (
            f"forward evaluations: {plan.evaluations_per_prompt} per prompt, "
            f"{plan.evaluations_per_iteration} per iteration; {at_most}"
        ),
        (
            "total compute per prompt, with what is trained, decoded and scored: "
            f"{plan.compute_per_prompt:g} forward evaluations"
        ),
        (
            f"memory per GPU: {plan.memory_total_gib:.1f} GiB: "
            f"{'fits' if plan.fits else 'DOES NOT FIT'}"
        ),
        *(f"  {part:12} {gib:9.2f}" for part, gib in plan.memory_gib.items()),
        f"  (by phase: {tenths(plan.phases_gib)})",
        (
            f"time: {_whole(plan.seconds_per_iteration)} s per iteration at "
            f"{_tenths(plan.ms_per_evaluation)} ms per forward evaluation ({source}): {seconds}"
        ),
        (
            f"the whole run: {_tenths(plan.hours)} hours, {_whole(plan.gpu_hours)} GPU-hours; "
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
    lines += ["can this run learn?", *(f"  {line}" for line in plan.can_learn)]
    if plan.not_counted:
        lines.append(
            f"not counted: the models of {', '.join(plan.not_counted)}, which are small, "
            "run elsewhere or are your own"
        )
    return lines
