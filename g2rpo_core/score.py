"""`g2rpo score`: scores a folder of pictures with any of the rewards."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from .errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
ALIASES = {"hps_v2_1": "hps", "hps-v2.1": "hps"}
FROM_PICTURES = (
    "hps",
    "clip_score",
    "pickscore",
    "image_reward",
    "unified_reward",
)  # the exact verifier reads tensors of the shape world alone
BATCH = 64  # pictures that are open at a time


def add_parser(commands) -> None:
    """Adds `score` to the command's subparsers."""
    parser = commands.add_parser("score", help="score a folder of pictures", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help=f"pictures, of {', '.join(SUFFIXES)}")
    parser.add_argument(
        "--reward", action="append", required=True, help=f"{', '.join(FROM_PICTURES)} (hps_v2_1 is hps); may be given again"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help="a text, line n for the n-th picture by name; or a csv with columns file,prompt",
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

    A reward that can fail on a picture has a second column, `<name>_reason`: why there is no score. If that is so of more than the
    reward's `max_missing`, the file is written and a UserError says so.
    """
    names = [ALIASES.get(name, name) for name in args.reward]
    for given, name in zip(args.reward, names):
        if name not in FROM_PICTURES:
            raise UserError(f"--reward {given}: unknown; there are {', '.join([*FROM_PICTURES, *ALIASES])}")
    if args.out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {args.out}: must end in .csv or .parquet")
    table = pair(args.folder, args.prompts)
    profile, section = args.profile, {}
    if profile or args.models is None:
        from .config import load_profile, load_run, profile_path

        profile = profile or load_run().profile
        section = load_profile(profile_path(profile)).rewards
    columns = score(args.folder, table, names, args.models or Path("models", profile), section)
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
    print(f"{args.out}: {len(table)} pictures, mean {means}")
    _check_missing(table, names, section)


def _check_missing(table: pd.DataFrame, names: list[str], section: Mapping) -> None:
    from . import rewards
    from .evaluation import check_missing

    for name, largest in rewards.max_missing(names, section).items():
        missing = table[table[name].isna()]
        reasons = missing.get(f"{name}_reason", missing[name].astype(str))
        check_missing(name, len(missing), len(table), largest, *reasons[:1])


def pair(folder: Path, prompts: Path) -> pd.DataFrame:
    """`file` (names within the folder) and `prompt`, a row for every picture; UserError where they do not fit together."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"{folder}: holds no picture ({', '.join(SUFFIXES)})")
    try:
        if prompts.suffix == ".csv":
            table = pd.read_csv(prompts, dtype=str, keep_default_na=False)
        else:
            table = pd.DataFrame({"prompt": prompts.read_text(encoding="utf-8").splitlines()})
    except FileNotFoundError:
        raise UserError(f"{prompts}: no such file") from None
    except ValueError as error:  # not UTF-8, not a csv, or empty
        raise UserError(f"{prompts}: cannot be read: {' '.join(str(error).split())}") from None
    if prompts.suffix == ".csv":
        if not {"file", "prompt"} <= set(table.columns):
            raise UserError(f"{prompts}: needs columns file,prompt; has {','.join(table.columns)}")
        unknown = sorted(set(table.file) - set(files))
        if unknown:
            raise UserError(f"{prompts}: {unknown[0]} is no picture of {folder}")
        table = table[["file", "prompt"]]
    else:
        if len(table) != len(files):
            raise UserError(f"{prompts}: {len(table)} lines for the {len(files)} pictures of {folder}; need one line a picture")
        table.insert(0, "file", files)
    if (table.prompt.str.strip() == "").any():
        raise UserError(f"{prompts}: the prompt of {table.file[table.prompt.str.strip() == ''].iloc[0]} is empty")
    return table


def score(folder: Path, table: pd.DataFrame, names: list[str], models: Path, section: Mapping) -> dict[str, list]:
    """Columns: each reward's scores of the table's pictures and prompts, and why scores are missing; section: a profile's `rewards`."""
    import torch
    from PIL import Image, UnidentifiedImageError
    from tqdm import tqdm

    from . import rewards

    scorers = rewards.load(names, models, "cuda" if torch.cuda.is_available() else "cpu", section)
    scores = defaultdict(list)
    for start in tqdm(range(0, len(table), BATCH), desc="score", unit_scale=BATCH, unit="picture"):
        part = table.iloc[start : start + BATCH]
        pictures = []
        for file in part.file:
            try:
                with Image.open(folder / file) as picture:
                    picture.load()
            except (UnidentifiedImageError, OSError, SyntaxError) as error:
                raise UserError(
                    f"{folder / file}: not a picture that can be read ({' '.join(str(error).split())[:99]})"
                ) from None
            pictures.append(picture)
        for name, scorer in scorers.items():
            if isinstance(scorer, rewards.Judge):
                values, reasons = scorer.judge(pictures, list(part.prompt))
                scores[name] += values.tolist()
                scores[f"{name}_reason"] += reasons
            else:
                scores[name] += scorer(pictures, list(part.prompt)).tolist()
    return scores
