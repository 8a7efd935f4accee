"""Plan everything in params.yaml: runs with measurements and checkpoints, evaluations, disk."""

from dataclasses import dataclass

from g2rpo_core.config import Profile
from g2rpo_core.config.load import Run
from g2rpo_core.estimate.machines import ASSUMED, Machines, Rate
from g2rpo_core.estimate.plan import Plan, make_plan
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.runs import BASE, run_name

ONCE = ("pipeline", "rewards", "embeddings")  # parts of the disk that all runs share


@dataclass(frozen=True)
class Entry:
    """A run with its evaluation, or an evaluation alone, on all GPUs."""

    name: str
    hours: dict[str, float]
    """By what takes them; checkpoints as if nothing were computed while they are written."""
    gpu_hours: float
    disk_gib: float
    """Kept for good, with DVC's copy."""
    fits: bool


@dataclass(frozen=True)
class Campaign:
    """All entries, one after the other."""

    entries: list[Entry]
    hours: float
    gpu_hours: float
    disk_gib: dict[str, float]
    """By part, of everything; `checkpoints`: the largest run's, as a finished run has none."""


def make_campaign(
    profile: Profile, run: Run, published: tuple[str, ...], machines: Machines, rate: Rate = ASSUMED
) -> Campaign:
    """Plan a run's methods and seeds, and the base and published models evaluated beside them.

    Errors as `make_plan`.
    """
    if unknown := [name for name in run.methods if name not in profile.methods]:
        raise UserError(
            f"params.yaml: methods: {unknown[0]!r} is not in the profile, "
            f"which has {', '.join(profile.methods)}"
        )
    plans = {
        name: make_plan(profile, name, machines, rate=rate)
        for name in run.methods or list(profile.methods)[:1]
    }
    shared = next(iter(plans.values()))

    def alone(drawn: dict) -> dict[str, float]:
        """Return the hours of an evaluation without a run, and so without snapshots."""
        alike = lambda name: profile.sampling_of(name).drawn == drawn
        name = next(filter(alike, (*plans, *profile.methods)), next(iter(plans)))
        plan = plans[name] if name in plans else make_plan(profile, name, machines, rate=rate)
        return {"evaluation": plan.evaluation_hours / len(profile.evaluation.checkpoints)}

    of_base = sum(
        alone(drawn)["evaluation"] for drawn in profile.drawn(run.methods, published)["base"]
    )
    entries = [_entry(run_name(*BASE), {"evaluation": of_base}, 0.0, machines, shared.fits)]
    for method in run.methods:
        entries += [
            _entry(
                run_name(method, seed),
                _hours(plans[method]),
                2 * plans[method].disk_gib["trained"],
                machines,
                plans[method].fits,
            )
            for seed in run.seeds
        ]
    entries += [
        _entry(name, alone(profile.sampling_of(name).drawn), 0.0, machines, shared.fits)
        for name in published
    ]
    disk = {part: shared.disk_gib[part] * (2 if part == "embeddings" else 1) for part in ONCE}
    disk["runs"] = sum(entry.disk_gib for entry in entries)
    disk["checkpoints"] = (
        max(plan.disk_gib["checkpoints"] for plan in plans.values()) if run.methods else 0.0
    )
    hours = sum(sum(entry.hours.values()) for entry in entries)
    return Campaign(
        entries,
        round(hours, 2),
        round(hours * machines.gpus, 1),
        {key: round(gib, 1) for key, gib in disk.items()},
    )


def _hours(plan: Plan) -> dict[str, float]:
    return {
        "iterations": plan.hours,
        "monitor": plan.monitor_hours,
        "checkpoints": plan.saving_hours,
        "evaluation": plan.evaluation_hours,
    }


def _entry(
    name: str, hours: dict[str, float], disk: float, machines: Machines, fits: bool
) -> Entry:
    return Entry(name, hours, round(sum(hours.values()) * machines.gpus, 1), round(disk, 1), fits)
