"""`g2rpo score`: scores a folder of images with any of the rewards."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.cli.options import ModelsOfRewards, OfRewards
from g2rpo_core.errors import UserError
from g2rpo_core.inference.runs import tiny_rewards

if TYPE_CHECKING:
    import pandas as pd


def score(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of images")],
    reward: Annotated[
        list[str],
        typer.Option(
            help="hps, clip_score, pickscore, image_reward, unified_reward (hps_v2_1 is hps), or one that the profile gets from a "
            "server; may be repeated"
        ),
    ],
    prompts: Annotated[
        Path, typer.Option(help="text file with line n for the n-th image by name, or csv with columns file,prompt")
    ],
    out: Annotated[Path, typer.Option(help=".csv or .parquet")] = Path("scores.csv"),
    profile: OfRewards = None,
    models: ModelsOfRewards = None,
) -> None:
    """Score a folder of images with any of the rewards: a table of `file`, `prompt` and a column for each.

    A reward that can fail on an image has a second column, `<name>_reason`: why there is no score.

    Example: g2rpo score --reward hps_v2_1 --prompts prompts.txt pictures
    """
    run(SimpleNamespace(**locals()))


def run(args: SimpleNamespace) -> None:
    """Scores the folder and writes the table.

    UserError before scoring if an input is missing, and after it if more scores are missing than `max_missing` allows.
    """
    from g2rpo_core.cli.image_folder import pair
    from g2rpo_core.cli.image_folder import score as score_images
    from g2rpo_core.common.devices import device_of
    from g2rpo_core.config import load_profile, load_run, profile_path
    from g2rpo_core.rewards.registry import REWARDS, SPECS, load, settings_of
    from g2rpo_core.rewards.remote import RemoteReward

    profile: str | None = args.profile
    section: Mapping = {}
    if profile or args.models is None:
        profile = profile or load_run().profile
        section = load_profile(profile_path(profile)).rewards
    aliases = {alias: spec.name for spec in SPECS for alias in spec.aliases}
    any_image = [spec.name for spec in SPECS if not spec.worlds_only]
    any_image += [name for name in section if name not in REWARDS and settings_of(section, name).remote]
    names = [aliases.get(name, name) for name in args.reward]
    for given, name in zip(args.reward, names):
        if name not in any_image:
            raise UserError(f"--reward {given}: unknown; there are {', '.join([*any_image, *aliases])}")
    if args.out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {args.out}: must end in .csv or .parquet")
    table = pair(args.folder, args.prompts)
    models = args.models or Path("models", str(profile))
    scorers = load(names, models, device_of(None), section)
    for name, values in score_images(args.folder, table, scorers).items():
        table[name] = values
    here = tiny_rewards([name for name in names if not settings_of(section, name).remote], models)
    there = [scorer.health.note for scorer in scorers.values() if isinstance(scorer, RemoteReward)]
    if note := "; ".join(filter(None, [here, *there])):
        table["models"] = note
    aside = args.out.with_name(f".{args.out.name}")
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        if args.out.suffix == ".csv":
            table.to_csv(aside, index=False)
        else:
            table.to_parquet(aside, index=False)
        aside.replace(args.out)
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be written ({error.strerror})") from None
    means = ", ".join(f"{name} {table[name].mean():.4f}" for name in names)
    print(f"{args.out}: {len(table)} images, mean {means}{' (' + note + ')' if note else ''}")
    _check_missing(table, names, section)


def _check_missing(table: "pd.DataFrame", names: list[str], section: Mapping) -> None:
    from g2rpo_core.rewards.registry import max_missing
    from g2rpo_core.rewards.scoring import check_missing

    for name, largest in max_missing(names, section).items():
        missing = table[table[name].isna()]
        reasons = missing.get(f"{name}_reason", missing[name].astype(str))
        check_missing(name, len(missing), len(table), largest, *reasons[:1])
