"""Score a folder of images with any of the rewards, for `g2rpo score`."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from g2rpo_core.cli.options import read_rewards
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_text, write_whole, writing
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import LOCK
from g2rpo_core.inference.folder import list_in, pair, score_images
from g2rpo_core.inference.reward_models import folder_of_rewards
from g2rpo_core.inference.runs import tiny_rewards
from g2rpo_core.numerics.processes import device_of
from g2rpo_core.rewards.registry import (
    ALIASES,
    REWARDS,
    SPECS,
    code_of,
    load,
    max_missing,
    settings_of,
)
from g2rpo_core.rewards.remote import RemoteReward
from g2rpo_core.rewards.scoring import check_missing, note_cut
from g2rpo_core.rewards.spec import Reward, Section

SHOWN = 60  # characters of a prompt in a line about an image


def score(
    folder: Path,
    reward: list[str],
    prompts: Path | None,
    out: Path,
    profile: str | None,
    models: Path | None,
    published: bool,
    worst: int | None,
) -> None:
    """Score the folder and write the table.

    UserError before scoring if an input is missing or damaged, and after it if more scores are
    missing than `max_missing` allows. What was scored before an error is kept: the same command
    goes on from it.
    """
    # Check the options, before any model is loaded
    section, place = read_rewards(profile, models, published)
    names = _resolve(reward, section)
    if out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {out}: must end in .csv or .parquet")
    read = prompts or list_in(folder)
    if read and read.exists() and out.exists() and out.samefile(read):
        raise UserError(f"--out {out}: is the file of prompts: give another")
    table = pair(folder, prompts)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    home = folder_of_rewards(names, section, place)
    scorers = load(names, home, device_of(None), section)
    note_cut(scorers, table.prompt)
    decides = _decides(scorers, section, home / LOCK)
    for name, column in score_images(folder, table, scorers, decides).items():
        table[name] = column
    _write(out, table, scorers, section, home)
    if worst:
        _echo_lowest(table, names[0], worst)
    _check_missing(table, names, section)


def _decides(scorers: Mapping[str, Reward], section: Section, lock: Path) -> list:
    """Return what decides the scores, of images and prompts that are the same."""
    return [
        list(scorers),
        {name: section.get(name) for name in scorers},
        read_text(lock) if lock.exists() else None,
        [
            scorer.health.version if isinstance(scorer, RemoteReward) else code_of(scorer)
            for scorer in scorers.values()
        ],
    ]


def _write(
    out: Path,
    table: pd.DataFrame,
    scorers: Mapping[str, Reward],
    section: Section,
    models: Path,
) -> None:
    """Write the table, with a note on small models, and print the means."""
    here = tiny_rewards([name for name in scorers if not settings_of(section, name).remote], models)
    there = [scorer.health.note for scorer in scorers.values() if isinstance(scorer, RemoteReward)]
    if note := "; ".join(filter(None, [here, *there])):
        table["models"] = note
    with writing(out):
        write_whole(
            out,
            table.to_csv(index=False) if out.suffix == ".csv" else table.to_parquet(index=False),
        )
    means = ", ".join(f"{name} {table[name].mean():.4f}" for name in scorers)
    real = "; `--published` scores with the published weights" if here else ""
    echo(f"{out}: {len(table)} images, mean {means}{f' ({note})' if note else ''}{real}")


def _echo_lowest(table: pd.DataFrame, name: str, count: int) -> None:
    """Print a line for each of the images with the lowest scores: score, file, prompt."""
    lowest = table.dropna(subset=name).sort_values(name, kind="stable").head(count)
    echo(f"lowest by {name}:")
    for score, file, prompt in zip(lowest[name], lowest.file, lowest.prompt):
        shown = prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}…"
        echo(f"  {score:.4f}  {file}  {shown}")


def _resolve(reward: list[str], section: Section) -> list[str]:
    """Return the rewards' names; UserError for one that is unknown.

    reward: each a name, or several with commas between them.
    """
    reward = [name.strip() for given in reward for name in given.split(",")]
    any_image = [
        *(spec.name for spec in SPECS if not spec.tasks_only),
        *(name for name in section if name not in REWARDS),
    ]
    for name in reward:
        if ALIASES.get(name, name) not in any_image:
            raise UserError(
                f"--reward {name}: unknown; there are {', '.join([*any_image, *ALIASES])}"
            )
    return [ALIASES.get(name, name) for name in reward]


def _check_missing(table: pd.DataFrame, names: list[str], section: Section) -> None:
    for name, largest in max_missing(names, section).items():
        missing = table[table[name].isna()]
        reasons = missing.get(f"{name}_reason", missing[name].astype(str))
        check_missing(name, len(missing), len(table), largest, *reasons[:1])
