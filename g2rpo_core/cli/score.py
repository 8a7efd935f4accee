"""`g2rpo score`: scores a folder of images with any of the rewards."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from g2rpo_core.cli.image_folder import SUFFIXES, pair, score
from g2rpo_core.config import load_profile, load_run, profile_path
from g2rpo_core.errors import UserError
from g2rpo_core.rewards.registry import SPECS, max_missing
from g2rpo_core.rewards.scoring import check_missing

ALIASES = {alias: spec.name for spec in SPECS for alias in spec.aliases}
ANY_IMAGE = tuple(spec.name for spec in SPECS if not spec.shapes_only)


def add_parser(commands) -> None:
    """Adds `score` to the command's subparsers."""
    parser = commands.add_parser("score", help="score a folder of images", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help=f"images, of {', '.join(SUFFIXES)}")
    parser.add_argument(
        "--reward", action="append", required=True, help=f"{', '.join(ANY_IMAGE)} (hps_v2_1 is hps); may be given again"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help="a text, line n for the n-th image by name; or a csv with columns file,prompt",
    )
    parser.add_argument("--out", type=Path, default=Path("scores.csv"), help=".csv or .parquet (default: %(default)s)")
    parser.add_argument("--profile", help="whose models and section `rewards` are used (default: the one that params.yaml names)")
    parser.add_argument(
        "--models",
        type=Path,
        help="another folder of the stage `models`; without --profile the rewards then have their default settings",
    )
    parser.set_defaults(run=run)


def run(args: Namespace) -> None:
    """Writes `file, prompt` and a column of scores for each reward; UserError before any scoring where something is missing.

    A reward that can fail on an image has a second column, `<name>_reason`: why there is no score. If that is so of more than the
    reward's `max_missing`, the file is written and a UserError says so.
    """
    names = [ALIASES.get(name, name) for name in args.reward]
    for given, name in zip(args.reward, names):
        if name not in ANY_IMAGE:
            raise UserError(f"--reward {given}: unknown; there are {', '.join([*ANY_IMAGE, *ALIASES])}")
    if args.out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {args.out}: must end in .csv or .parquet")
    table = pair(args.folder, args.prompts)
    profile: str | None = args.profile
    section: Mapping = {}
    if profile or args.models is None:
        profile = profile or load_run().profile
        section = load_profile(profile_path(profile)).rewards
    columns = score(args.folder, table, names, args.models or Path("models", str(profile)), section)
    for name, values in columns.items():
        table[name] = values
    aside = args.out.with_name(f".{args.out.name}")
    aside.parent.mkdir(parents=True, exist_ok=True)
    if args.out.suffix == ".csv":
        table.to_csv(aside, index=False)
    else:
        table.to_parquet(aside, index=False)
    aside.replace(args.out)
    means = ", ".join(f"{name} {table[name].mean():.4f}" for name in names)
    print(f"{args.out}: {len(table)} images, mean {means}")
    _check_missing(table, names, section)


def _check_missing(table: pd.DataFrame, names: list[str], section: Mapping) -> None:
    for name, largest in max_missing(names, section).items():
        missing = table[table[name].isna()]
        reasons = missing.get(f"{name}_reason", missing[name].astype(str))
        check_missing(name, len(missing), len(table), largest, *reasons[:1])
