"""Rehearse a profile on any machine: its stages at true size on simulated GPUs, against the plan.

Runs embed, two iterations of train with the profile's first method, and evaluate, as the first of
all processes. Prints the memory of a GPU by phase, what it sends, and the time of an iteration,
beside what `g2rpo plan` adds up.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

from g2rpo_core.estimate.machines import BETWEEN, INSIDE, checked_machines
from g2rpo_core.foundation.texts import echo
from stages.entry import ends_in_one_line


@ends_in_one_line
def main() -> None:
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
    args = parser.parse_args()
    machines = checked_machines("rehearse", args.gpus, args.memory, args.nodes, INSIDE, BETWEEN)
    quiet = dict.fromkeys(("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"), "error")
    os.environ |= {**quiet, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    warnings.filterwarnings("ignore")  # of what is simulated
    from pipeline.rehearsal import stub

    stub.load()
    # These import torch, before which the stub must be loaded
    from g2rpo_core.config import load_profile, profile_path
    from g2rpo_core.estimate.plan import make_plan
    from pipeline.rehearsal import report, stages

    profile = load_profile(profile_path(args.profile))
    method = next(iter(profile.methods))
    plan = make_plan(profile, method, machines)
    with tempfile.TemporaryDirectory() as folder:
        meters = stages.rehearse(profile, args.profile, method, machines, Path(folder))
    echo(*report.lines(f"{args.profile}, {method}", machines, meters, plan))
    sys.stdout.flush()
    os._exit(0 if report.fits(machines, meters) else 1)  # exit handlers would look for the GPU


if __name__ == "__main__":
    main()
