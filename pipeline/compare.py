"""Compares two reports: what changed, by how much, and whether it is significant.

Each is a commit of this project (or a branch or tag; `now` means the files in this folder), a
study, or a profile.
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator
from itertools import product
from math import isnan
from pathlib import Path
from typing import cast

import pandas as pd
from dvc.api import DVCFileSystem
from dvc.exceptions import DvcException
from dvc.scm import SCMError
from dvc_data.index import DataIndexDirError
from ruamel.yaml import YAML

from g2rpo_core.config import load_profile, load_study, profile_path, resolve
from g2rpo_core.evaluation.results import SCORES, reported
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import writing
from g2rpo_core.foundation.runs import BASE, run_name
from g2rpo_core.foundation.settings import name_problem
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import echo
from g2rpo_core.reporting.comparison import SAME, Side, changed_settings, changes
from g2rpo_core.reporting.recorded import read_results, scores_in
from g2rpo_core.reporting.tables import Line, lines_of
from g2rpo_core.rewards.registry import labels
from stages.entry import ends_in_one_line
from stages.paths import REPORTS

NOW = "now"
METRICS = REPORTS / "metrics"


@ends_in_one_line
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="g2rpo report --compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="A", help="such as HEAD~1, now, a study or a profile")
    parser.add_argument("after", metavar="B")
    parser.add_argument("--out", type=Path, help="also write the Markdown to this file")
    args = parser.parse_args()
    text = "\n".join(lines(side(args.before), side(args.after))) + "\n"
    echo(*text.splitlines())
    if args.out:
        with writing(args.out):
            args.out.write_text(text, encoding="utf-8")


def side(name: str) -> Side:
    """Read one side of the comparison: a study or profile by its name, or a commit."""
    if name_problem(name):
        return read_commit(name)
    study = load_study(name) if Path("studies", name, "params.yaml").exists() else None
    path = profile_path(study.profile if study else name)
    if not path.exists():
        return read_commit(name)
    home = Path("studies", name, "evaluations") if study else Path("evaluations", name)
    tables = [read_table(file, SCORES) for file in sorted(home.glob("*/results.parquet"))]
    if study and not tables:
        tables = [scores_in(read_results(home.with_name("results.parquet")))]
    return _side(name, resolve(path, study).data, load_profile(path, study).evaluation, tables)


def read_commit(name: str) -> Side:
    """Read a commit's own evaluations from DVC's cache, else its committed means.

    UserError if it has neither.
    """
    known = [
        *(path.stem for path in Path("profiles").glob("[!.]*.yaml")),
        *(path.parent.name for path in Path("studies").glob("*/params.yaml")),
    ]
    yaml = YAML(typ="safe")
    try:
        files = DVCFileSystem(".", rev=None if name == NOW else name)
        run = yaml.load(files.read_text("params.yaml"))
        data = yaml.load(files.read_text("reports/profile.yaml"))
        evaluation = EvaluationSettings.model_validate(data["evaluation"], strict=False)
        try:
            paths = [
                path
                for path in files.find(f"evaluations/{run['profile']}", maxdepth=2)
                if path.endswith("/results.parquet")
            ]
            tables = [pd.read_parquet(io.BytesIO(files.read_bytes(path))) for path in sorted(paths)]
        except (DvcException, DataIndexDirError, OSError):
            tables = []
        return _side(
            name, data, evaluation, tables or list(committed_means(files, run, evaluation))
        )
    except SCMError:
        raise UserError(
            f"compare: {name}: no commit, study or profile of that name; "
            f"there are {', '.join(sorted(known))}, and {NOW}"
        ) from None
    except (DvcException, OSError, KeyError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        command = f"git checkout {name} && dvc repro" if name != NOW else "dvc repro"
        raise UserError(
            f"compare: {name}: has no evaluations, nor means in {METRICS} ({reason}); "
            f"to make them: {command}"
        ) from None


def committed_means(
    files: DVCFileSystem, run: dict, evaluation: EvaluationSettings
) -> Iterator[pd.DataFrame]:
    """Yield mean rewards of the base and each run as tables of `SCORES` without prompt_id."""
    for method, seed in [BASE, *product(run["methods"], run["seeds"])]:
        means = json.loads(files.read_text(METRICS / f"{run_name(method, seed)}.json"))
        about = {
            "method": method,
            "seed": seed,
            "checkpoint": str(evaluation.checkpoints[0]),
            "steps": evaluation.steps[0],
        }
        rows = [
            about | {"reward": reward, "score": means[reward]}
            for reward in evaluation.rewards
            if reward in means
        ]
        yield pd.DataFrame(rows).reindex(columns=[*SCORES])


def _side(
    name: str, profile: dict, evaluation: EvaluationSettings, tables: list[pd.DataFrame]
) -> Side:
    if not tables:
        raise UserError(f"compare: {name} has no evaluations: `dvc repro evaluate` makes them")
    return Side(name, profile, reported(pd.concat(tables, ignore_index=True), evaluation))


def lines(before: Side, after: Side) -> Iterator[str]:
    """Yield the comparison in Markdown."""
    differences = lines_of(changes(before, after))
    sections = [cast(dict, side.profile.get("rewards") or {}) for side in (before, after)]
    names = labels(sections[0] | sections[1])
    significant = [change for change in differences if change.tone]
    # The result in a sentence, and what the sides lack
    yield f"# {before.name} and {after.name}\n"
    known = [change for change in differences if _is_known(change)]
    count = (
        f"{len(significant)} of {len(known)} differences are" if significant else "No difference is"
    )
    yield (
        f"{count} significant (95 %)."
        if known
        else "Whether a difference is significant is not known: only means are at hand."
    )
    if lacking := " and ".join(each.name for each in (before, after) if each.means_only):
        yield (
            f"\nOf {lacking} only mean rewards are at hand, no scores by prompt (`dvc repro` makes "
            "them): fewer than three seeds have no interval."
        )
    if any(change.method == BASE[0] and abs(change.difference) > SAME for change in differences):
        yield (
            "\nThe base differs, too (other models, or another machine): "
            "compare gains over the base, not scores."
        )
    # The settings
    settings = changed_settings(before, after)
    yield "\n## Settings that differ\n"
    if settings:
        yield f"| setting | {before.name} | {after.name} |\n|---|---|---|"
        yield from (
            f"| `{key}` | {_shown(one)} | {_shown(other)} |" for key, one, other in settings
        )
    else:
        yield "None."
    # The rewards of the runs that both have, then the other runs
    paired = "" if lacking else ", paired by prompt"
    yield (
        "\n## Rewards\n\n"
        f"Differences are {after.name} minus {before.name}{paired}. With three or more seeds, "
        "the interval is over seeds.\n"
    )
    yield (
        f"| model | reward | {before.name} | {after.name} | difference | 95 % interval | "
        "significant |\n|---|---|---|---|---|---|---|"
    )
    yield from (_row(change, names) for change in differences)
    for one, other in ((before, after), (after, before)):
        if alone := [
            f"{method}-{seed}" for method, seed in one.runs if (method, seed) not in other.runs
        ]:
            yield f"\nOnly in {one.name}: {', '.join(alone)}."


def _row(change: Line, names: dict[str, str]) -> str:
    known = _is_known(change)
    intervals = "; ".join(f"{low:+.4f}, {high:+.4f}" for low, high in change.intervals)
    verdict = {"up": "higher", "down": "lower", "": "no"}[change.tone]
    shown = f"{intervals} | {verdict}" if known else "not known | not known"
    numbers = f"{change.before:.4f} | {change.value:.4f} | {change.difference:+.4f}"
    return f"| {change.method} | {names.get(change.reward, change.reward)} | {numbers} | {shown} |"


def _is_known(change: Line) -> bool:
    """Tell whether a change has an interval.

    Means without scores by prompt have none with fewer than three seeds.
    """
    return not any(isnan(low) for low, _ in change.intervals)


def _shown(value: object) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
