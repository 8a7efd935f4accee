"""Say which stages `dvc repro` would run, why, and for how long: `g2rpo todo`.

Nothing is run or written. Settings are those of the profile as it is now, whether the stage
`profile` has written them or not.
"""

import argparse
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from graphlib import TopologicalSorter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dvc.dependency.param import ParamsDependency
from dvc.repo import Repo, lock_repo

from g2rpo_core.foundation.files import read_json
from g2rpo_core.foundation.profiles import leaves
from g2rpo_core.foundation.runs import SCRATCH, read_lock
from g2rpo_core.foundation.texts import echo, some
from pipeline.cached import Params, restorable, unstored
from pipeline.graph import asking_dvc
from stages.entry import ends_in_one_line
from stages.paths import REPORTS
from stages.versions import versions

if TYPE_CHECKING:  # its package loads torch
    from g2rpo_core.config import MainRun, Profile

SETTINGS = REPORTS / "profile.yaml"
TIMINGS = REPORTS / "timings"
NEVER = "never run"


@dataclass(frozen=True)
class Due:
    """A stage that would run."""

    name: str
    why: str
    seconds: float | None
    """By the timings of an earlier run; None: not known."""
    restored: bool
    """DVC's cache has what it would make, from an earlier run with the same inputs."""

    @property
    def time(self) -> str:
        return "from DVC's cache" if self.restored else shown(self.seconds)


@ends_in_one_line
def main() -> None:
    argparse.ArgumentParser(
        prog="g2rpo todo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    # Late, so that --help does not wait for torch
    from g2rpo_core.config import load_profile, load_run, profile_path

    run = load_run()
    settings = load_profile(profile_path(run.profile))
    logging.getLogger("dvc").setLevel(
        logging.WARNING
    )  # it says that it restores what is only looked up
    with asking_dvc(), lock_repo(repo := Repo()):
        total = sum(bool(stage.cmd) for stage in repo.index.stages)
        stages = list(due(repo, run, settings))
    if not stages:
        echo(f"profile {run.profile}: nothing to do, all {total} stages are up to date")
        return
    known = [stage.seconds for stage in stages if stage.seconds is not None and not stage.restored]
    takes = (
        f"; {len(known)} of known time take {shown(sum(known))}, one after the other"
        if known
        else ""
    )
    restored = sum(stage.restored for stage in stages)
    taken = f", {restored} would be taken from DVC's cache" if restored else ""
    echo(
        f"profile {run.profile}: {len(stages) - restored} of {total} stages would run{taken}{takes}"
    )
    widths = [
        max(len(text) for text in column)
        for column in zip(*((stage.name, stage.time) for stage in stages))
    ]
    for stage in stages:
        echo(f"  {stage.name:{widths[0]}}  {stage.time:{widths[1]}}  {stage.why}")


def due(repo: Repo, run: "MainRun", settings: "Profile") -> Iterator[Due]:
    """Yield the stages that would run, each after those that it needs."""
    from g2rpo_core.config import profile_path, resolve
    from stages.profile import written_data

    file = Path("dvc.lock")
    ran_once = read_lock(file) if file.exists() else {}
    data = written_data(resolve(profile_path(run.profile)).data, run.methods, run.published)
    data["code"] = versions()
    graph = repo.index.graph
    params = lambda dep: (
        at(data, dep.params) if Path(dep.def_path) == SETTINGS else dep.read_params(flatten=False)
    )
    coming: dict[str, str | None] = {}
    found: set[str] = set()
    for stage in TopologicalSorter(
        {node: set(graph.successors(node)) for node in graph.nodes}
    ).static_order():
        if not stage.cmd:
            continue
        # Why it would run
        before = [
            each.name
            for each in graph.successors(stage)
            if each.name in found and each.name not in ("code", "profile")
        ]
        if stage.name not in ran_once:
            reasons = [NEVER]
        elif (last := ran_once[stage.name].get("cmd")) != stage.cmd:
            reasons = [f"last run as {last}"]
        else:
            reasons = list(changes(stage, params))
        if not reasons and before:
            reasons = [f"if {some(sorted(before))} makes something else"]
        if not reasons:
            continue
        # What that makes, and what it removes
        found.add(stage.name)
        reasons += [f"would remove {out}, {why}" for out in stage.outs if (why := unstored(out))]
        restored = restorable(stage, params, coming)
        coming.update(restored or dict.fromkeys((str(out.def_path) for out in stage.outs), None))
        seconds = None
        if stage.name.startswith("train@") and not restored:
            after, last, seconds = training_ahead(stage.name, run.profile, settings)
            if after and not before:
                # A run with a checkpoint is one that has run
                reasons = [each for each in reasons if each != NEVER]
                reasons.append(f"resumes after iteration {after} of {last}")
        yield Due(stage.name, "; ".join(reasons), seconds, restored is not None)


def changes(stage: Any, params: Params) -> Iterator[str]:
    """Yield why a stage that has run would run again.

    params: the values that a parameter file will have then.
    """
    made = [Path(out.def_path) for other in stage.repo.index.stages for out in other.outs]
    if missing := [str(out.def_path) for out in stage.outs if not out.exists]:
        yield f"not here: {some(missing)}"
    if touched := [str(out.def_path) for out in stage.outs if out.exists and out.status()]:
        yield f"changed by hand: {some(touched)}"
    settings, files = [], []
    for dep in stage.deps:
        path = Path(dep.def_path)
        if isinstance(dep, ParamsDependency):
            old, new = leaves(dep.hash_info.value or {}), leaves(params(dep))
            settings += [key for key in {**old, **new} if old.get(key) != new.get(key)]
        # What another stage makes is that stage's reason
        elif (
            not any(path.is_relative_to(out) or out.is_relative_to(path) for out in made)
            and dep.status()
        ):
            files.append(str(path))
    if code := [key for key in settings if key.startswith("code.")]:
        yield f"code of the stage {code[0].removeprefix('code.')}"
    if settings := [key for key in settings if key not in code]:
        yield f"settings: {some(settings)}"
    if files:
        yield f"changed: {some(files)}"


def at(data: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of dotted keys, those that are there."""
    found = {}
    for key in keys:
        with suppress(KeyError, TypeError):  # as DVC leaves out what is missing
            found[key] = reduce(lambda inner, part: inner[part], key.split("."), data)
    return found


def training_ahead(stage: str, profile: str, settings: "Profile") -> tuple[int, int, float | None]:
    """Return after which iteration a training would go on, its last one, and the seconds between.

    profile, settings: its name, and what it holds. Iteration 0: it would begin; seconds are in
    proportion to the compute of this profile's last run of the method, of any seed; None if there
    is none.
    """
    from g2rpo_core.config.costs import compute_of
    from g2rpo_core.distributed.checkpoint import resumes_after
    from stages.paths import training_inputs
    from stages.train import decides

    # Where it goes on, if its inputs are there
    name = stage.partition("@")[2]
    method, _, seed = name.rpartition("-")
    args = SimpleNamespace(profile=profile, method=method, seed=seed, study=None)
    run, after = settings.run(method), 0
    needed = training_inputs(args, run.training.start)
    last, of_profile = run.training.iterations, f"{profile}/{name}"
    if (SCRATCH / "train" / of_profile).exists() and all(path.exists() for path in needed):
        decide, end = decides(settings, args), run.training.end
        after = resumes_after("train", of_profile, decide, needed, end, settings.numerics)
    # How long that takes
    files = sorted(TIMINGS.glob(f"{method}-*.json"), key=lambda file: file.stem != name)
    for found in (read_json(file, dict) for file in files):
        if found.get("profile") == profile and found.get("compute") and found.get("seconds"):
            share = compute_of(run) / found["compute"] * (1 - after / last)
            return after, last, max(found["seconds"].values()) * share
    return after, last, None


def shown(seconds: float | None) -> str:
    """Return a time as people say it."""
    if seconds is None:
        return "time not known"
    return (
        f"about {seconds:.0f} s"
        if seconds < 90
        else f"about {seconds / 60:.0f} min"
        if seconds < 5400
        else f"about {seconds / 3600:.1f} h"
    )


if __name__ == "__main__":
    main()
