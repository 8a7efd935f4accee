"""Write what params.yaml names as Slurm jobs, and submit them on request.

Without --method it is everything that params.yaml names: one job that prepares models, prompts and
embeddings, one for each run, the base and each published model, and one for the report, each after
those that it needs. What is up to date gets no job. DVC knows a run when its job has ended.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from g2rpo_core.estimate.machines import GPUS_OF_A_NODE
from g2rpo_core.foundation.errors import STATUS_FOLDER, UserError
from g2rpo_core.foundation.manifest import write_sealed
from g2rpo_core.foundation.runs import BASE, run_name
from g2rpo_core.foundation.texts import echo, reason
from pipeline.jobs import JOBS, SUBMITTED, queued, submitted
from stages.dvc import run_dvc
from stages.entry import ends_in_one_line

TEMPLATE = Path(__file__).with_name("job.sbatch.j2")
CPUS, MEMORY = 8, 64  # for each GPU of a part of a node: cores, GiB
LATE = 90  # seconds that Slurm may be late with a signal


@dataclass(frozen=True)
class Job:
    """A job of the campaign."""

    name: str
    """Of its file, without the profile."""
    nodes: int = 1
    gpus: int = 1
    """Of each node."""
    command: str = ""
    """Of a job on one node, for DVC."""
    stages: tuple[tuple[str, str], ...] = ()
    """Of a job on all nodes: DVC's name of each stage, and its words."""
    after: tuple[str, ...] = ()
    """Names of jobs."""
    grace: float = 0.0


@ends_in_one_line
def main() -> None:
    args = parsed(sys.argv[1:])
    for option in (args.time, args.mem or "", *args.option):
        if not option.isprintable():
            raise UserError(f"launch: {option!r}: must be one line")
    if args.nodes < 1 or args.gpus_per_node < 1:
        raise UserError("launch: --nodes and --gpus-per-node must be above 0")
    profile, jobs = campaign(args)
    files = {job.name: write_job(job, profile, args) for job in jobs}
    if not jobs:
        echo("everything that params.yaml names is up to date", file=sys.stderr)
    if not args.submit:
        for file in files.values():
            echo(file)
        return
    # Submit each job after those that it needs
    if not shutil.which("sbatch"):
        raise UserError(
            "launch: there is no sbatch on this machine; the files are "
            f"{' '.join(map(str, files.values()))}"
        )
    numbers, states = submitted(), queued()
    for job in jobs:
        key = files[job.name].stem
        if numbers.get(key) in states:
            echo(f"{files[job.name]}: is already job {numbers[key]}, {states[numbers[key]]}")
            continue
        numbers[key] = submit(
            files[job.name], [numbers[files[name].stem] for name in job.after if name in files]
        )
        write_sealed(SUBMITTED, numbers)
        echo(f"{files[job.name]}: job {numbers[key]}")


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="g2rpo launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", help="the profile of params.yaml, as a check")
    parser.add_argument(
        "--method", help="only this method of params.yaml, or base, which is only evaluated"
    )
    parser.add_argument("--seed", type=int, help="only this seed of params.yaml")
    parser.add_argument("--nodes", type=int, default=1, help="machines of a run")
    parser.add_argument(
        "--gpus-per-node", type=int, default=GPUS_OF_A_NODE, help="processes on each"
    )
    parser.add_argument(
        "--time",
        default="24:00:00",
        help="time limit of a job (24:00:00); a run that needs longer is queued again",
    )
    parser.add_argument(
        "--cpus",
        type=int,
        help=f"cores of a node (with {GPUS_OF_A_NODE} GPUs all, else {CPUS} for each)",
    )
    parser.add_argument(
        "--mem",
        help=(
            f"memory of a node, as sbatch has it (with {GPUS_OF_A_NODE} GPUs all, "
            f"else {MEMORY}G for each)"
        ),
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="--PARTITION=NAME",
        help="an option for sbatch; may be repeated",
    )
    parser.add_argument("--submit", action="store_true", help="also call sbatch")
    return parser.parse_args(words)


def campaign(args: argparse.Namespace) -> tuple[str, list[Job]]:
    """Return the profile and the jobs in order of need; UserError if one could not start."""
    # Late, so that --help does not wait for torch
    from g2rpo_core.config import load_profile, load_run, profile_path
    from pipeline.graph import read_graph

    # What is not up to date, by DVC
    wanted = load_run()
    if args.profile not in (None, wanted.profile):
        raise UserError(
            f"launch: params.yaml has profile {wanted.profile}, not {args.profile}: name it there"
        )
    if (done := run_dvc("repro", "profile")).returncode:
        raise UserError(f"launch: dvc repro profile: {reason(done.stderr)}")
    stale: set[str] = set()
    for name, stage in read_graph().items():
        if stage.changed or stale & set(stage.needs):
            stale.add(name)
    # The runs, the base and published models that are asked for
    profile = load_profile(profile_path(wanted.profile))
    runs = [(method, seed) for method in wanted.methods for seed in wanted.seeds]
    entries = [(BASE[0], BASE[1]), *runs, *((name, 0) for name in wanted.published)]
    whole = args.method is None and args.seed is None
    chosen = [
        one
        for one in entries
        if args.method in (None, one[0])
        and (args.seed in (None, one[1]) or one[0] == BASE[0] == args.method)
    ]
    if not chosen:
        asked = run_name(args.method or next(iter(wanted.methods), BASE[0]), args.seed or 0)
        raise UserError(
            f"launch: dvc repro has no train@{asked} of {wanted.profile}: name profile, "
            "method and seed in params.yaml"
        )
    # Their jobs
    targets = [name for name in ("published", "embed") if name == "embed" or wanted.published]
    jobs = [Job("prepare", command=f"repro {' '.join(targets)}")] if stale & set(targets) else []
    before = tuple(job.name for job in jobs)
    for method, seed in chosen:
        training = profile.run(method).training if (method, seed) in runs else None
        job = _job_of(wanted.profile, method, seed, training is not None, stale, before, args)
        _check(profile, training, args)
        if job.stages:
            jobs.append(replace(job, grace=training.checkpoints.grace) if training else job)
    if whole and "report" in stale:
        jobs.append(
            Job(
                "report",
                gpus=0,
                command="repro --single-item report",
                after=tuple(job.name for job in jobs),
            )
        )
    return wanted.profile, jobs


def _job_of(
    profile: str,
    method: str,
    seed: int,
    trained: bool,
    stale: set[str],
    before: tuple[str, ...],
    args: argparse.Namespace,
) -> Job:
    run, words = run_name(method, seed), f"--profile {profile} --method {method} --seed {seed}"
    evaluated = (
        f"evaluate@{run}"
        if trained
        else "evaluate_base"
        if method == BASE[0]
        else f"evaluate_published@{method}"
    )
    stages = [(f"train@{run}", f"stages.train {words}")] * trained + [
        (evaluated, f"stages.evaluate {words}")
    ]
    return Job(
        run,
        args.nodes,
        args.gpus_per_node,
        stages=tuple(stage for stage in stages if stage[0] in stale),
        after=before,
    )


def _check(profile, training, args: argparse.Namespace) -> None:
    """Raise UserError if training or evaluation does not take the job's number of processes."""
    asked = ({"training": training.processes} if training else {}) | {
        "evaluation": profile.evaluation.processes
    }
    count = args.nodes * args.gpus_per_node
    for section, processes in asked.items():
        if processes not in ("auto", count):
            raise UserError(
                f"launch: {section}.processes is {processes}, but the job has {count} GPUs: "
                "write auto"
            )
    if training and training.prompts_per_iteration % count:
        raise UserError(
            f"launch: {training.prompts_per_iteration} prompts per iteration cannot be shared "
            f"evenly by {count} GPUs"
        )


def write_job(job: Job, profile: str, args: argparse.Namespace) -> Path:
    """Write a job's file for `sbatch`."""
    # Late, so that --help does not wait for torch
    from g2rpo_core.distributed.launcher import MARGIN, SHUTDOWN, SHUTDOWN_DEFAULT

    file = JOBS / f"{profile}-{job.name}.sbatch"
    template = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    ).from_string(TEMPLATE.read_text())
    text = template.render(
        job=job,
        profile=profile,
        file=file,
        options=[*_resources(job, args), *args.option],
        time=args.time,
        grace=round(job.grace),
        late=LATE,
        checkout=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        programs=shlex.quote(str(Path(sys.executable).parent)),
        shutdown=f"{SHUTDOWN}={max(SHUTDOWN_DEFAULT, round(job.grace) + MARGIN)}",
        status=STATUS_FOLDER,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _resources(job: Job, args: argparse.Namespace) -> Iterator[str]:
    """Yield what the job asks for on each node: all of it, or a part for its GPUs."""
    if job.gpus:
        yield f"--gpus-per-node={job.gpus}"
    whole = job.gpus >= GPUS_OF_A_NODE and not args.cpus
    yield "--exclusive" if whole else f"--cpus-per-task={args.cpus or CPUS * max(1, job.gpus)}"
    yield f"--mem={args.mem or (0 if whole else f'{MEMORY * max(1, job.gpus)}G')}"


def submit(file: Path, after: list[str]) -> str:
    """Submit a job after others; return the number that Slurm gives it."""
    needs = (
        [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
    )
    done = subprocess.run(
        ["sbatch", "--parsable", *needs, str(file)], capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"launch: sbatch {file}: {reason(done.stderr)}")
    return done.stdout.strip().split(";")[0]


if __name__ == "__main__":
    main()
