"""What changed between two reports, by how much, and whether it is significant.

Each is a commit of this project (or a branch or tag; `now` means the files in this folder), a study, or a profile.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from dvc.api import DVCFileSystem
from dvc.exceptions import DvcException
from dvc.scm import SCMError
from ruamel.yaml import YAML

from g2rpo_core.config import load_profile, load_study, profile_path, resolve
from g2rpo_core.errors import UserError
from g2rpo_core.evaluation.results import SCORES, reported
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.files import read_table
from g2rpo_core.reporting.comparison import Change, Side, changed_settings, changes
from g2rpo_core.rewards.registry import labels
from g2rpo_core.settings import name_problem
from stages.common import ends_in_one_line

NOW = "now"


@ends_in_one_line
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="g2rpo report --compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="A", help="such as HEAD~1, now, a study or a profile")
    parser.add_argument("after", metavar="B")
    parser.add_argument("--out", type=Path, help="also write the Markdown to this file")
    args = parser.parse_args()
    text = "\n".join(lines(side(args.before), side(args.after))) + "\n"
    print(text, end="")
    if args.out:
        try:
            args.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"compare: --out {args.out}: {error.strerror}: give a file that can be written") from None


def side(name: str) -> Side:
    """One side of the comparison: a study or profile by its name, or a commit."""
    if name_problem(name):
        return of_commit(name)
    if Path("studies", name, "params.yaml").exists():
        study = load_study(name)
        path, home = profile_path(study.profile), Path("studies", name, "evaluations")
        return _side(name, resolve(path, study).data, load_profile(path, study).evaluation, tables_in(home))
    if profile_path(name).exists():
        path = profile_path(name)
        return _side(name, resolve(path).data, load_profile(path).evaluation, tables_in(Path("evaluations", name)))
    return of_commit(name)


def of_commit(name: str) -> Side:
    """The evaluations of a commit's own profile, from DVC's cache.

    UserError if there is no such commit, or they are not in the cache.
    """
    known = [
        *(path.stem for path in Path("profiles").glob("*.yaml")),
        *(path.parent.name for path in Path("studies").glob("*/params.yaml")),
    ]
    yaml = YAML(typ="safe", pure=True)
    try:
        files = DVCFileSystem(".", rev=None if name == NOW else name)
        profile = yaml.load(files.read_text("params.yaml"))["profile"]
        data = yaml.load(files.read_text("reports/profile.yaml"))
        found = [file for file in files.find(f"evaluations/{profile}", maxdepth=2) if file.endswith("/results.parquet")]
        tables = [pd.read_parquet(io.BytesIO(files.read_bytes(file))) for file in sorted(found)]
    except SCMError:
        raise UserError(
            f"compare: {name}: no commit, study or profile of that name; there are {', '.join(sorted(known))}, and {NOW}"
        ) from None
    except (DvcException, OSError, KeyError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        again = f"git checkout {name} && dvc repro" if name != NOW else "dvc repro"
        raise UserError(
            f"compare: {name}: its evaluations are not in DVC's cache here ({reason}): run `dvc fetch`, or make them: {again}"
        ) from None
    return _side(name, data, EvaluationSettings.model_validate(data["evaluation"], strict=False), tables)


def tables_in(folder: Path) -> list[pd.DataFrame]:
    return [read_table(file, SCORES, "`dvc repro evaluate` makes it again") for file in sorted(folder.glob("*/results.parquet"))]


def _side(name: str, profile: dict, evaluation: EvaluationSettings, tables: list[pd.DataFrame]) -> Side:
    if not tables:
        raise UserError(f"compare: {name} has no evaluations: `dvc repro evaluate` makes them")
    return Side(name, profile, reported(pd.concat(tables, ignore_index=True), evaluation))


def lines(before: Side, after: Side) -> Iterator[str]:
    """The comparison in Markdown."""
    found = changes(before, after)
    named = labels({**_section(before), **_section(after)})
    told = [one for one in found if one.tone]
    yield f"# {before.name} and {after.name}\n"
    yield (f"{len(told)} of {len(found)} differences are significant (95 %)." if told else "No difference is significant (95 %).")
    settings = changed_settings(before, after)
    yield "\n## Settings that differ\n"
    if settings:
        yield f"| setting | {before.name} | {after.name} |\n|---|---|---|"
        yield from (f"| `{key}` | {_shown(one)} | {_shown(other)} |" for key, one, other in settings)
    else:
        yield "None."
    yield f"\n## Rewards\n\nDifferences are {after.name} minus {before.name}, paired by prompt. With three or more seeds, the interval is over seeds.\n"
    yield f"| model | reward | {before.name} | {after.name} | difference | 95 % interval | significant |\n|---|---|---|---|---|---|---|"
    yield from (_row(one, named) for one in found)
    for one, other in ((before, after), (after, before)):
        if alone := [f"{method}-{seed}" for method, seed in one.runs if (method, seed) not in other.runs]:
            yield f"\nOnly in {one.name}: {', '.join(alone)}."


def _section(one: Side) -> dict:
    section = one.profile.get("rewards")
    return section if isinstance(section, dict) else {}


def _row(one: Change, named: dict[str, str]) -> str:
    mean = sum(found.mean for found in one.seeds.values()) / len(one.seeds)
    intervals = [one.over_seeds] if one.over_seeds else list(one.seeds.values())
    shown = "; ".join(f"{found.low:+.4f}, {found.high:+.4f}" for found in intervals)
    verdict = {"up": "higher", "down": "lower", "": "no"}[one.tone]
    return f"| {one.method} | {named.get(one.reward, one.reward)} | {one.before:.4f} | {one.after:.4f} | {mean:+.4f} | {shown} | {verdict} |"


def _shown(value: object) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
