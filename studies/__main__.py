"""Runs studies, or makes a new one.

    python -m studies run compare      skips finished stages and resumes interrupted ones
    python -m studies new my_study     makes a folder studies/my_study to edit: methods, seeds, changes to the profile
    python -m studies list

`python -m studies compare` is `run compare`. Several stages run side by side, each with its share of the CPUs; every stage's
output is in .cache/studies/<study>/.
"""

import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from g2rpo_core.config import load_run, load_study
from g2rpo_core.errors import UserError
from stages.common import ends_in_one_line
from stages.graph import chosen, read_graph
from stages.runner import CPUS, run_with_bar, stop_on_signals

STUDIES = Path("studies")
GRAPH = STUDIES / "study.yaml"
PROJECT = {  # makes a folder its own DVC project, with the main one's cache
    ".dvc/config": "[core]\n    analytics = false\n    autostage = false\n[cache]\n    dir = ../../../.dvc/cache\n",
    ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
    ".dvcignore": "__pycache__\n.venv\n",
}
PARAMS = """\
# What is compared: entries replace the profile's methods, and changes override its other sections.
study: {name}
profile: {profile}
seeds: [1, 2, 3]
title: {title}
about: >-
  What is compared here, and at what budgets: the first lines of the report.
methods: [g2rpo, dance_grpo]
entries:
  g2rpo: {{}}
  dance_grpo: {{}}
changes: {{}}
comparisons: [] # to name before the runs: {{method: g2rpo, against: dance_grpo}}, and perhaps reward: verifier
"""


@ends_in_one_line
def main() -> None:
    args = parsed(sys.argv[1:])
    if args.action == "list":
        print("\n".join(names()))
    elif args.action == "new":
        new(args.study)
    else:
        run(args.study, max(1, args.side_by_side))


def parsed(words: list[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m studies", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    command = actions.add_parser("run", help="bring a study up to date")
    command.add_argument("study", help=f"one of {', '.join(names())}")
    command.add_argument("--side-by-side", type=int, default=min(2, CPUS), help="stages at once (default: %(default)s)")
    command = actions.add_parser("new", help="make the folder of a new study")
    command.add_argument("study", metavar="NAME", help="letters, digits and _")
    actions.add_parser("list", help="list the studies")
    if words and words[0] in names():
        words = ["run", *words]
    return parser.parse_args(words)


def names() -> list[str]:
    return sorted(file.parent.name for file in STUDIES.glob("*/params.yaml"))


def run(name: str, side_by_side: int) -> None:
    """Updates the models and embeddings of the main project, then runs the study's stages."""
    study = load_study(name)
    if (profile := load_run().profile) != study.profile:
        raise UserError(
            f"studies/{name}/params.yaml: profile: {study.profile}, but params.yaml names {profile}: make both the same"
        )
    stop = stop_on_signals()
    logs = Path(".cache", "studies", name)
    shared = chosen(read_graph(), ["embed"])
    if any(stage.changed for stage in shared.values()):
        run_with_bar(shared, side_by_side, logs.with_name("embed"), stop)
    run_with_bar(read_graph(STUDIES / name), side_by_side, logs, stop)
    print(f"report: {(STUDIES / name / 'reports' / 'report.html').resolve()}")


def new(name: str) -> None:
    """Makes a folder that `run` takes; UserError if it already exists."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise UserError(f"{name!r} is not a valid name for a study: use letters, digits and _, such as my_study")
    folder = STUDIES / name
    if folder.exists():
        raise UserError(f"{folder} exists; choose another name")
    params = PARAMS.format(name=name, profile=load_run().profile, title=name.replace("_", " ").capitalize())
    for file, text in {**PROJECT, "dvc.yaml": GRAPH.read_text(), "params.yaml": params}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    print(f"{folder / 'params.yaml'}: edit what is compared, then python -m studies run {name}")


if __name__ == "__main__":
    main()
