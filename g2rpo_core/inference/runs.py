"""Find the trained runs of a profile and their weights."""

from pathlib import Path
from typing import Literal, get_args

from g2rpo_core.common.runs import BASE, check_one_kind
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_json

RUNS, METRICS = Path("runs"), Path("reports", "metrics")
Kind = Literal["transformer", "lora"]


def find_kind(folder: Path) -> Kind | None:
    """Return what a run's folder holds: whole weights or a LoRA; None for neither. UserError if it holds both."""
    check_one_kind(folder)
    return next((kind for kind in get_args(Kind) if (folder / kind).is_dir()), None)


def trained_runs(profile: str) -> list[str]:
    """List the names of the profile's runs that have weights, sorted."""
    return sorted(path.name for path in (RUNS / profile).glob("*") if any((path / kind).is_dir() for kind in get_args(Kind)))


def find_weights(run: str, profile: str) -> Path | None:
    """Return the folder with the weights of a run, named as `g2rpo-1` or by its path; None for the base. UserError if there are none."""
    if run == BASE[0]:
        return None
    for folder in (RUNS / profile / run, Path(run)):
        if find_kind(folder):
            return folder
    raise UserError(f"{run}: no trained weights; profile {profile} has {', '.join([BASE[0], *trained_runs(profile)])}")


def tiny_rewards(names: list[str], models: Path) -> str | None:
    """Return a note that scores come from small models trained here, not from published ones; None if they do not.

    models: the folder of the stage `models`.
    """
    from g2rpo_core.common.model_store import LOCK
    from g2rpo_core.rewards.registry import REWARDS

    if not (models / LOCK).exists():  # rewards computed by a server need none
        return None
    entries = read_json(models / LOCK, dict)
    tiny = [REWARDS[name].label for name in names if "folder" in entries.get(name, {})]
    return f"tiny models, not {', '.join(tiny)}" if tiny else None
