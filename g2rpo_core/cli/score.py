"""`g2rpo score`: scores a folder of images with any of the rewards."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.config import load_profile, load_run, profile_path
from g2rpo_core.errors import UserError
from g2rpo_core.files import read_json

if TYPE_CHECKING:
    import pandas as pd


def score(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="images")],
    reward: Annotated[
        list[str],
        typer.Option(help="hps, clip_score, pickscore, image_reward, unified_reward (hps_v2_1 is hps); may be repeated"),
    ],
    prompts: Annotated[Path, typer.Option(help="a text, line n for the n-th image by name; or a csv with columns file,prompt")],
    out: Annotated[Path, typer.Option(help=".csv or .parquet")] = Path("scores.csv"),
    profile: Annotated[
        str | None, typer.Option(help="whose models and section `rewards` are used; the one that params.yaml names")
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(help="another folder of the stage `models`; without --profile the rewards then have their default settings"),
    ] = None,
) -> None:
    """Scores a folder of images with any of the rewards: `file, prompt` and a column for each.

    A reward that can fail on an image has a second column, `<name>_reason`: why there is no score.

    Example: g2rpo score --reward hps_v2_1 --prompts prompts.txt pictures
    """
    run(SimpleNamespace(**locals()))


def run(args: SimpleNamespace) -> None:
    """UserError before any scoring where something is missing, and after it where more scores are than the reward's `max_missing`."""
    from g2rpo_core.cli.image_folder import pair
    from g2rpo_core.cli.image_folder import score as score_images
    from g2rpo_core.rewards.registry import SPECS

    aliases = {alias: spec.name for spec in SPECS for alias in spec.aliases}
    any_image = tuple(spec.name for spec in SPECS if not spec.shapes_only)
    names = [aliases.get(name, name) for name in args.reward]
    for given, name in zip(args.reward, names):
        if name not in any_image:
            raise UserError(f"--reward {given}: unknown; there are {', '.join([*any_image, *aliases])}")
    if args.out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {args.out}: must end in .csv or .parquet")
    table = pair(args.folder, args.prompts)
    profile: str | None = args.profile
    section: Mapping = {}
    if profile or args.models is None:
        profile = profile or load_run().profile
        section = load_profile(profile_path(profile)).rewards
    models = args.models or Path("models", str(profile))
    columns = score_images(args.folder, table, names, models, section)
    for name, values in columns.items():
        table[name] = values
    if note := of_tiny_models(names, models):
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


def of_tiny_models(names: list[str], models: Path) -> str | None:
    """What says that scores are those of small models that were trained here, and of none that was published; None if they are not."""
    from g2rpo_core.common.model_store import AGAIN, LOCK
    from g2rpo_core.rewards.registry import REWARDS

    if not (models / LOCK).exists():  # rewards that a server computes need none
        return None
    entries = read_json(models / LOCK, AGAIN, dict)
    tiny = [REWARDS[name].label for name in names if "folder" in entries.get(name, {})]
    return f"tiny models, not {', '.join(tiny)}" if tiny else None


def _check_missing(table: "pd.DataFrame", names: list[str], section: Mapping) -> None:
    from g2rpo_core.rewards.registry import max_missing
    from g2rpo_core.rewards.scoring import check_missing

    for name, largest in max_missing(names, section).items():
        missing = table[table[name].isna()]
        reasons = missing.get(f"{name}_reason", missing[name].astype(str))
        check_missing(name, len(missing), len(table), largest, *reasons[:1])
