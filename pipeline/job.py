"""Makes a run one job on a Slurm cluster: writes the file for `sbatch`. DVC knows the run when the job has ended.

The job first runs the stages before the run, then starts training and evaluation on all nodes at once.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from g2rpo_core.common.runs import BASE, run_name
from g2rpo_core.foundation.errors import UserError
from stages.common import ROOT, ends_in_one_line

CONFIGURATIONS = ROOT / "g2rpo_core" / "distributed" / "accelerate"
TEMPLATE = Path(__file__).with_name("job.sbatch.j2")
JOBS = Path(".cache", "jobs")


@ends_in_one_line
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="g2rpo launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", required=True, help="the profile of params.yaml")
    parser.add_argument("--method", required=True, help="a method of params.yaml, or base, which is only evaluated")
    parser.add_argument("--seed", type=int, default=0, help="a seed of params.yaml; 0 for base")
    parser.add_argument("--nodes", type=int, default=1, help="machines of the job")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="processes on each")
    parser.add_argument("--time", default="24:00:00", help="time limit of the job (24:00:00)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="--PARTITION=NAME", help="an option for sbatch; may be repeated"
    )
    parser.add_argument("--submit", action="store_true", help="also call sbatch")
    file = write_job(parser.parse_args())
    print(file)


def write_job(args: argparse.Namespace) -> Path:
    """Write the job's file; UserError if the job could not start."""
    # Late, so that --help does not wait for torch
    from g2rpo_core.config import load_profile, profile_path
    from pipeline.graph import read_graph

    # Check that params.yaml has this run
    profile, run = load_profile(profile_path(args.profile)), run_name(args.method, args.seed)
    if args.nodes < 1 or args.gpus_per_node < 1:
        raise UserError("launch: --nodes and --gpus-per-node must be above 0")
    base = args.method == BASE[0]
    names = ["evaluate_base"] if base else [f"train@{run}", f"evaluate@{run}"]
    graph = read_graph()
    if names[0] not in graph or f"--profile {args.profile} " not in (graph[names[0]].command + " "):
        raise UserError(f"launch: dvc repro has no {names[0]} of {args.profile}: name profile, method and seed in params.yaml")
    # Check that training and evaluation take the job's number of processes
    training = profile.run(args.method).training if not base else profile.training
    asked = ({} if base else {"training": training.processes}) | {"evaluation": profile.evaluation.processes}
    count = args.nodes * args.gpus_per_node
    for section, processes in asked.items():
        if processes not in ("auto", count):
            raise UserError(f"launch: {section}.processes is {processes}, but the job has {count} GPUs: write auto")
    if not base and training.prompts_per_iteration % count:
        raise UserError(f"launch: {training.prompts_per_iteration} prompts per iteration cannot be shared evenly by {count} GPUs")
    # Write the file
    file = JOBS / f"{args.profile}-{run}.sbatch"
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    text = template.render(
        file=file, profile=args.profile, method=args.method, seed=args.seed, run=run, names=names, nodes=args.nodes,
        gpus=args.gpus_per_node, processes=args.gpus_per_node, time=args.time, grace=round(training.checkpoints.grace),
        options=args.option, checkout=Path.cwd(), python=sys.executable, here=CONFIGURATIONS, before="embed",
        stages=["evaluate"] if base else ["train", "evaluate"],
    )  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if args.submit:
        submit(file)
    return file


def submit(file: Path) -> None:
    if not shutil.which("sbatch"):
        raise UserError(f"launch: there is no sbatch on this machine; the file is {file}")
    done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"launch: sbatch {file}: {done.stderr.strip()}")
    print(done.stdout.strip())


if __name__ == "__main__":
    main()
