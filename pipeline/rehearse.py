"""Rehearse a profile on any machine: the real stages at true size on simulated GPUs.

Each part runs as one of many simulated processes.

Each stage runs in its own process (`pipeline.rehearsal`). Its cost is measured operation by
operation: memory of GPU and host by phase, floating-point operations, what is sent between
processes, and what would be on disk.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ruamel.yaml import YAML
from tqdm import tqdm

from g2rpo_core.estimate.machines import (
    ASSUMED_TFLOPS,
    BETWEEN,
    DECODE_SLOWER,
    DISK,
    INSIDE,
    RESERVE_GIB,
    SCORE_SLOWER,
    Machines,
    checked_machines,
)
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo, reason
from stages.entry import ends_in_one_line

# imports torch and diffusers, which would slow down --help
if TYPE_CHECKING:
    from g2rpo_core.config import Profile

GIB = 2**30
HOME = Path(".cache", "rehearsal")
# A phase that users name -> the measured phases of which it is the maximum
PHASES: dict[str, tuple[str, ...]] = {
    "load": ("load", "start"),
    "embed": ("embed",),
    "rollout": ("rollout", "decode", "score", "monitor"),
    "update": ("update", "optimizer"),
    "save": ("save", "resume"),
    "evaluate": ("evaluate",),
}
SLOWER = {"decode": DECODE_SLOWER, "score": SCORE_SLOWER}  # than products in bfloat16
LAST = "train, last process"
ITERATIONS = 2  # AdamW has its moments from the second on


@dataclass(frozen=True)
class Rehearsal:
    """The figures of a method: a line of --json."""

    profile: str
    method: str
    fits: bool
    """Whether nothing is wrong and the peaks with RESERVE_GIB are within a GPU's memory."""
    peak_gib: dict[str, float]
    """Of a GPU, by phase, without the reserve."""
    collectives: dict[str, dict[str, float]]
    """By phase: the calls, the GB that a GPU sends, and the seconds that this takes by itself."""
    host_gib: float
    """Of a node."""
    disk_gib: float
    """Of the run's checkpoints and weights."""
    seconds_per_iteration: float
    """Computation at the assumed rate plus all collectives, without overlap."""
    hours: float
    """Of all iterations."""
    grace_seconds: float
    """At most, from SIGTERM to a written checkpoint."""
    problems: list[str]


@ends_in_one_line
def main() -> None:
    args = parsed(sys.argv[1:])
    from g2rpo_core.config import load_profile, profile_path

    profile = load_profile(profile_path(args.profile))
    machines = checked_machines(
        "rehearse", args.gpus, args.memory, args.nodes, args.inside, args.between
    )
    methods = (
        list(profile.methods)
        if args.method == ["all"]
        else args.method or list(profile.methods)[:1]
    )
    if unknown := [method for method in methods if method not in profile.methods]:
        raise UserError(
            f"profiles/{args.profile}.yaml: methods: there is no {unknown[0]!r}, "
            f"only {', '.join(profile.methods)}"
        )
    phases = args.phase or list(PHASES)
    done = []
    for method in methods:
        done.append(rehearsed(profile, args.profile, method, machines, phases, args.disk))
        if args.json:
            echo(json.dumps(asdict(done[-1])))
        else:
            echo(*lines(done[-1], machines))
    sys.exit(0 if all(rehearsal.fits for rehearsal in done) else 1)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="g2rpo rehearse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--profile", required=True, help="a file of profiles/ whose models are on the hub"
    )
    parser.add_argument("--gpus", type=int, required=True, help="GPUs on all nodes together")
    parser.add_argument("--nodes", type=int, default=1, help="machines that share the GPUs")
    parser.add_argument(
        "--memory",
        type=float,
        required=True,
        help="GiB per GPU, as torch sees them: a card of 80 GB has 79, of 141 GB 139",
    )
    parser.add_argument(
        "--method",
        action="append",
        help="a method of the profile, or `all` (default: the first one); may be repeated",
    )
    parser.add_argument(
        "--phase", action="append", choices=PHASES, help="run only this phase; may be repeated"
    )
    parser.add_argument(
        "--inside",
        type=float,
        default=INSIDE,
        metavar="GB/S",
        help=f"from a GPU to the others on its node ({INSIDE:g})",
    )
    parser.add_argument(
        "--between",
        type=float,
        default=BETWEEN,
        metavar="GB/S",
        help=f"from a GPU to those on other nodes ({BETWEEN:g})",
    )
    parser.add_argument(
        "--disk",
        type=float,
        default=DISK,
        metavar="GB/S",
        help=f"at which a node writes ({DISK:g})",
    )
    parser.add_argument("--json", action="store_true", help="one line per method")
    return parser.parse_args(words)


def rehearsed(
    profile: "Profile",
    name: str,
    method: str,
    machines: Machines,
    phases: Sequence[str],
    disk_rate: float,
) -> Rehearsal:
    """Run the parts that the phases need in parallel, and resume after them.

    The resumed run needs the first run's files.
    """
    from pipeline.rehearsal import stub
    from pipeline.rehearsal.inputs import make_inputs

    library = stub.build(HOME)
    problems = [*starts(profile, method, machines)]
    home = write_profile(name, method)
    make_inputs(home, name, profile)
    wanted = list(parts(phases, machines))
    done: dict[str, dict] = {}
    with (
        tqdm(
            total=len(wanted),
            desc=f"rehearse {name}, {method}",
            unit="part",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
        ) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for at_once in (
            [part for part in wanted if part.title != "resume"],
            [part for part in wanted if part.title == "resume"],
        ):
            if any(report["ended"] for report in done.values()):
                break
            running = {
                pool.submit(run_part, library, home, name, method, part, machines): part
                for part in at_once
            }
            for future in as_completed(running):
                done[running[future].title] = future.result()
                bar.update()
                bar.set_postfix_str(running[future].title)
    # Sum up; the last process must call the same collectives in the same order as the first
    reports = {part.title: done[part.title] for part in wanted if part.title in done}
    problems += [
        f"{title}: {report['ended']}" for title, report in reports.items() if report["ended"]
    ]
    if LAST in reports and not problems and reports[LAST]["order"] != reports["train"]["order"]:
        problems.append(
            f"train: process {machines.gpus - 1} calls other collectives than process 0: "
            "GPUs would wait forever"
        )
    return summary(profile, name, method, machines, phases, reports, problems, disk_rate)


@dataclass(frozen=True)
class Part:
    """A stage that is run as one simulated process."""

    title: str
    stage: str
    rank: int = 0
    """The number of the process that it simulates."""
    base: bool = False
    """Whether the base is evaluated instead of the method's weights."""


def parts(phases: Sequence[str], machines: Machines) -> Iterator[Part]:
    """Yield the parts to run, the longest first."""
    if {"load", "rollout", "update", "save"} & set(phases):
        yield Part("train", "train")
        if machines.gpus > 1:  # the last process must call the same collectives
            yield Part(LAST, "train", machines.gpus - 1)
    if "evaluate" in phases:
        yield Part("evaluate base", "evaluate", base=True)
        yield Part("evaluate", "evaluate")
    if "embed" in phases:
        yield Part("embed", "embed")
    if "save" in phases:
        yield Part("resume", "resume")


def starts(profile: "Profile", method: str, machines: Machines) -> Iterator[str]:
    """Yield the sections whose number of processes is not that of the GPUs: no run would start."""
    sections = {
        "training": profile.run(method).training.processes,
        "evaluation": profile.evaluation.processes,
    }
    for section, processes in sections.items():
        if processes not in ("auto", machines.gpus):
            yield (
                f"start: {section}.processes is {processes}, but there are {machines.gpus} GPUs: "
                f"write auto, or {machines.gpus}"
            )


def write_profile(name: str, method: str) -> Path:
    """Write the profile with two iterations that include everything; return its folder."""
    from g2rpo_core.config import profile_path, resolve

    # Two iterations, each with a measurement and a checkpoint, and one short evaluation
    data = resolve(profile_path(name)).data
    data["training"] |= {"iterations": ITERATIONS, "snapshots": [], "tracking": {"to": []}}
    data["training"]["monitor"] |= {
        "every": 1,
        "prompts": min(8, data["training"]["monitor"]["prompts"]),
    }
    data["training"]["checkpoints"] = {
        **data["training"].get("checkpoints", {}),
        "every": 1,
        "minutes": None,
    }
    data["evaluation"] |= {"steps": data["evaluation"]["steps"][:1], "checkpoints": ["final"]}
    if data["evaluation"].get("diversity"):
        data["evaluation"]["diversity"] = {"prompts": data["evaluation"]["batch"], "noises": 2}
    # The method may not undo that
    entry = data["methods"][method] or {}
    for key in ("iterations", "snapshots", "monitor"):
        entry.get("training", {}).pop(key, None)
    data["methods"] = {method: entry}
    home = HOME / f"{name}-{method}"
    (home / "profiles").mkdir(parents=True, exist_ok=True)
    with (home / "profiles" / f"{name}.yaml").open("w") as file:
        YAML().dump(data, file)
    return home


def run_part(
    library: Path, home: Path, profile: str, method: str, part: Part, machines: Machines
) -> dict:
    """Run one part with the library of `stub` and return its figures.

    UserError if it ended without any.
    """
    # Processes of other stages never wait for each other: one alone costs the same
    gpus, nodes = (machines.gpus, machines.nodes) if part.stage in ("train", "resume") else (1, 1)
    whose = "base" if part.base else method
    options = {
        "home": home.resolve(),
        "profile": profile,
        "method": whose,
        "gpus": gpus,
        "nodes": nodes,
        "memory": machines.memory - RESERVE_GIB,
        "rank": part.rank,
    }
    command = [sys.executable, "-m", "pipeline.rehearsal", str(library), part.stage]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # A GPU of this machine takes no part
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
    log = home / f"{part.stage}-{whose}-{part.rank}.log"
    log.write_text(done.stderr)
    last = done.stdout.strip().split("\n")[-1]
    if not last.startswith("{"):
        raise UserError(
            f"rehearse: {part.stage} ended without figures, {how_it_ended(done)}; see {log}"
        )
    return json.loads(last)


def how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    """Return the signal that ended a process, or its status and the last line that it wrote."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"by {name}" + (": this machine may lack memory" if name == "SIGKILL" else "")
    return f"with status {done.returncode}: {reason(done.stderr)}"


def summary(
    profile: "Profile",
    name: str,
    method: str,
    machines: Machines,
    phases: Sequence[str],
    reports: dict[str, dict],
    problems: list[str],
    disk_rate: float,
) -> Rehearsal:
    """Sum up a method from the reports of its parts, by title.

    Adds to the problems if SIGTERM leaves too little time.
    """
    training = profile.run(method).training
    highest = peaks(reports)
    peak = {phase: round(highest[phase], 2) for phase in phases if phase in highest}
    train = reports.get("train", {"phases": {}, "collectives": [], "written": {}, "updates": 0})

    # The time of an iteration: what is computed, then what is sent
    seconds: Counter = Counter()
    for one, phase in train["phases"].items():
        if one != "monitor":
            flops = phase["flops"] * SLOWER.get(one, 1) / ITERATIONS
            seconds[one] = flops / (ASSUMED_TFLOPS * 1e12)
    sent = collectives_by_phase(train["collectives"], machines)
    for phase in sent.keys() & {"rollout", "update", "optimizer"}:
        seconds[phase] += sent[phase]["seconds"]
    iteration = sum(seconds.values())

    # What is on disk, and the time until a checkpoint is there
    groups = min(training.parallel.shard_size or machines.gpus, machines.gpus)
    whole = train["written"].get("checkpoint", 0) * groups  # of one copy of the weights
    disk = whole * (training.checkpoints.keep + 1)
    disk += train["written"].get("weights", 0) * (1 + len(training.snapshots))
    # The checkpoint before may just have been begun
    updates = max(1, train["updates"] / ITERATIONS)
    grace = 2 * whole / (disk_rate * 1e9 * machines.nodes) + seconds["update"] / updates
    if grace > training.checkpoints.grace:
        problems.append(
            f"SIGTERM: a call and two checkpoints of {whole / GIB:.0f} GiB take {grace:.0f} s at "
            f"{disk_rate:g} GB/s per node: set "
            f"training.checkpoints.grace, now {training.checkpoints.grace:g}, to more"
        )
    fits = not problems and max(peak.values(), default=0.0) + RESERVE_GIB <= machines.memory
    rounded = lambda figures: {key: round(value, 2) for key, value in figures.items()}
    return Rehearsal(
        profile=name,
        method=method,
        fits=fits,
        peak_gib=peak,
        collectives={phase: rounded(figures) for phase, figures in sent.items()},
        host_gib=round(host_bytes(reports, machines) / GIB, 1),
        disk_gib=round(disk / GIB, 1),
        seconds_per_iteration=round(iteration, 1),
        hours=round(iteration * training.iterations / 3600, 1),
        grace_seconds=round(grace, 1),
        problems=problems,
    )


def peaks(reports: dict[str, dict]) -> dict[str, float]:
    """Return the peak GiB of a GPU in each phase of PHASES.

    All that the parts embed and evaluate did is one phase.
    """
    peak: dict[str, float] = {}
    for title, report in reports.items():
        if title == LAST:
            continue
        trained = title in ("train", "resume")
        for phase in PHASES if trained else (title.split()[0],):
            names = PHASES[phase] if trained else report["phases"]
            measured = [
                report["phases"][name]["gpu"] / GIB for name in names if name in report["phases"]
            ]
            peak[phase] = max([peak.get(phase, 0.0), *measured])
    return peak


def host_bytes(reports: dict[str, dict], machines: Machines) -> float:
    """Return the peak bytes on a node's host: of one process, or of all in training.

    The first process of a training may hold more than the others.
    """
    most = max(
        (phase["host"] for report in reports.values() for phase in report["phases"].values()),
        default=0,
    )
    if first := reports.get("train"):
        others = reports.get(LAST, {"phases": {}})["phases"]
        if others:
            both = [
                (phase["host"], others.get(name, phase)["host"])
                for name, phase in first["phases"].items()
            ]
            most = max(most, *(one + (machines.per_node - 1) * other for one, other in both))
    return most


def collectives_by_phase(collectives: list[dict], machines: Machines) -> dict[str, Counter]:
    """Return calls, GB sent per GPU and seconds of an iteration's collectives, by phase."""
    sent: dict[str, Counter] = {}
    for kind in collectives:
        rate = machines.rate(kind["between_nodes"])
        figures = {"calls": kind["calls"], "gb": kind["sent"] / 1e9, "seconds": kind["sent"] / rate}
        sent.setdefault(kind["phase"], Counter()).update(
            {key: value / ITERATIONS for key, value in figures.items()}
        )
    return sent


def lines(rehearsal: Rehearsal, machines: Machines) -> Iterator[str]:
    """Yield the figures as text for people."""
    verdict = "fits" if rehearsal.fits else "DOES NOT FIT"
    nodes = f" on {machines.nodes} nodes" if machines.nodes > 1 else ""
    yield (
        f"{rehearsal.profile}, {rehearsal.method}, {machines.gpus} GPUs of {machines.memory:g} "
        f"GiB{nodes}: {verdict}"
    )
    yield f"  GiB per GPU, without {RESERVE_GIB:g} kept in reserve: " + ", ".join(
        f"{phase} {gib:.1f}" for phase, gib in rehearsal.peak_gib.items()
    )
    if "save" in rehearsal.peak_gib:
        yield (
            f"  host {rehearsal.host_gib:.0f} GiB per node; disk {rehearsal.disk_gib:.0f} GiB for "
            f"the run, and its models; SIGTERM {rehearsal.grace_seconds:.0f} s"
        )
    if not rehearsal.seconds_per_iteration:
        yield from (f"  {problem}" for problem in rehearsal.problems)
        return
    yield (
        f"  {rehearsal.hours:.0f} hours, {rehearsal.seconds_per_iteration:.0f} s per iteration at "
        f"{ASSUMED_TFLOPS:.0f} TFLOP/s, with nothing overlapped; a GPU sends:"
    )
    for phase, sent in rehearsal.collectives.items():
        yield (
            f"    {phase}: {sent['gb']:.0f} GB in {sent['calls']:.0f} calls, "
            f"{sent['seconds']:.1f} s"
        )
    yield from (f"  {problem}" for problem in rehearsal.problems)


if __name__ == "__main__":
    main()
