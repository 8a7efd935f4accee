"""Runs studies, or makes a new one.

    python -m studies run compare      skips finished stages and resumes interrupted ones
    python -m studies verify compare   compares what a run made here with the committed hashes
    python -m studies new my_study     makes a folder studies/my_study to edit
    python -m studies list

`python -m studies compare` is `run compare`. Several stages run side by side, each with its share
of the CPUs; every stage's output is in .cache/studies/<study>/.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from g2rpo_core.config import Study, load_run, load_study
from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.runs import run_name
from g2rpo_core.foundation.texts import echo
from pipeline.graph import chosen, read_graph
from pipeline.runner import SIDE_BY_SIDE, run_with_bar, stop_on_signals
from stages.entry import at_least_one, ends_in_one_line
from studies.bases import base_graph, base_params, lend_models, of_base
from studies.committed import hashes_in, read_committed, states, write_seconds

STUDIES = Path("studies")
GRAPH = STUDIES / "study.yaml"
# These files make a folder its own DVC project with the main one's cache. git ignores them, so DVC
# must not ask git.
PROJECT = {
    ".dvc/config": "[core]\n    analytics = false\n    no_scm = true\n"
    "[cache]\n    dir = {up}../.dvc/cache\n",
}
PARAMS = """\
# What is compared: entries replace the profile's methods, and changes override its other sections.
study: {name}
profile: {profile}
seeds: [1, 2, 3]
title: {title}
about: >-
  What is compared here, and at what budgets: the first lines of the report.
equal: [iterations] # what all runs share: iterations, evaluations, compute, seconds, or nothing
methods: [g2rpo, dance_grpo]
entries:
  g2rpo: {{}}
  dance_grpo: {{}}
changes: {{}}
comparisons: [] # named before the runs: {{method: g2rpo, against: dance_grpo, reward: verifier}}
"""


@ends_in_one_line
def main() -> None:
    args = parsed(sys.argv[1:])
    if args.action == "list":
        echo(*names())
    elif args.action == "new":
        new(args.study)
    elif args.action == "verify":
        verify(args.study)
    else:
        run(args.study, args.side_by_side)


def parsed(words: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="python -m studies", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    command = actions.add_parser("run", help="bring a study up to date")
    command.add_argument("study", help=f"one of {', '.join(names())}")
    command.add_argument(
        "--side-by-side",
        type=at_least_one,
        default=SIDE_BY_SIDE,
        help="stages at once (default: %(default)s)",
    )
    command = actions.add_parser(
        "verify", help="compare what a run made here with the committed hashes"
    )
    command.add_argument("study", help=f"one of {', '.join(names())}")
    command = actions.add_parser("new", help="make the folder of a new study")
    command.add_argument("study", metavar="NAME", help="letters, digits and _")
    actions.add_parser("list", help="list the studies")
    if words and words[0] in names():
        words = ["run", *words]
    return parser.parse_args(words)


def names() -> list[str]:
    return sorted(file.parent.name for file in STUDIES.glob("*/params.yaml"))


def run(name: str, side_by_side: int) -> None:
    """Update the main project's prompts, models and embeddings, then the study.

    That is its stages, report, table, hashes and seconds. A study with bases builds models and
    embeddings for each.
    """
    study, folder = load_study(name), STUDIES / name
    if (profile := load_run().profile) != study.profile:
        raise UserError(
            f"{folder}/params.yaml: profile: {study.profile}, but params.yaml names {profile}: "
            "make both the same"
        )
    take("study", name)
    # What studies share
    stop = stop_on_signals()
    logs = Path(".cache", "studies", name)
    last = "prompts" if study.bases else "embed"
    shared = chosen(read_graph(), [last])
    if any(stage.changed for stage in shared.values()):
        run_with_bar(shared, side_by_side, logs.with_name(last), stop)
    # The study itself, or each base and the report over all
    if not study.bases:
        write_project(folder)
        run_with_bar(read_graph(folder), side_by_side, logs, stop)
    for base in study.bases:
        home = folder / f"base-{base}"
        write_project(
            home,
            "../../../",
            {"dvc.yaml": base_graph(GRAPH), "params.yaml": base_params(of_base(study, base))},
        )
        lend_models(home, study.profile)
        run_with_bar(read_graph(home), side_by_side, logs / home.name, stop)
    if study.bases:
        command = [
            sys.executable,
            "-m",
            "stages.report",
            "--profile",
            study.profile,
            "--study",
            name,
        ]
        if status := subprocess.run(command).returncode:
            sys.exit(status)
    # What is committed of it
    named_hashes(study).to_csv(folder / "runs.txt", sep=" ")
    write_seconds(
        folder / "seconds.json", study, [home / "reports" / "timings" for home in homes(study)]
    )
    echo(f"report: {(folder / 'reports' / 'report.html').resolve()}")


def write_project(folder: Path, up: str = "../../", files: Mapping[str, str] | None = None) -> None:
    """Make a folder a DVC project with these files, or the graph of all studies.

    up: the path to the main project.
    """
    ignored = {".dvcignore": Path(".dvcignore").read_text()}
    for file, text in {**PROJECT, **ignored, **(files or {"dvc.yaml": GRAPH.read_text()})}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.replace("{up}", up))


def homes(study: Study) -> list[Path]:
    """Return the folders of a study's runs: its own, or those of its bases."""
    return [STUDIES / of_base(study, base).study for base in study.bases] or [STUDIES / study.study]


def named_hashes(study: Study, here: bool = False) -> pd.DataFrame:
    """Return the hashes of a study's base and runs, on each of its bases; UserError without any.

    here: as in `hashes_in`.
    """
    named = [
        "base-0",
        *(run_name(method, seed) for method in study.methods for seed in study.seeds),
    ]
    tables = []
    for home in homes(study):
        if not (home / "dvc.lock").exists():
            raise UserError(f"{home} was not run here: python -m studies run {study.study}")
        hashes = hashes_in(home / "dvc.lock", here)
        found = hashes.loc[[run for run in named if run in hashes.index]]
        tables.append(found.rename(index=f"{home.name}/{{}}".format) if study.bases else found)
    return pd.concat(tables)


def verify(name: str) -> None:
    """Print runs that differ from the committed ones or are missing; exit status 1 if any."""
    now = named_hashes(load_study(name), here=True)
    compared = states(read_committed(STUDIES / name / "runs.txt"), now)
    counts = compared.str.split().str[0].value_counts()
    for run, state in compared.items():
        if not state.startswith("equal"):
            echo(f"{run} {state}")
    echo(
        ", ".join(f"{counts.get(state, 0)} {state}" for state in ("equal", "different", "missing"))
    )
    if counts.get("equal", 0) < len(compared):
        sys.exit(1)


def new(name: str) -> None:
    """Make a folder that `run` takes; UserError if it already exists."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise UserError(
            f"{name!r} is not a valid name for a study: use letters, digits and _, such as my_study"
        )
    folder = STUDIES / name
    if folder.exists():
        raise UserError(f"{folder} exists; choose another name")
    params = PARAMS.format(
        name=name, profile=load_run().profile, title=name.replace("_", " ").capitalize()
    )
    folder.mkdir()
    (folder / "params.yaml").write_text(params)
    echo(f"{folder / 'params.yaml'}: edit what is compared, then python -m studies run {name}")


if __name__ == "__main__":
    main()
