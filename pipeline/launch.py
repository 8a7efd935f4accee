"""Start this node's processes of a stage of a run that several nodes share.

The same command starts on each node, by srun in a Slurm job, or by hand. Processes that die are
started again and go on from the last checkpoint.
"""

import argparse
import os
import sys
from pathlib import Path

from g2rpo_core.foundation.errors import STATUS_FOLDER, UserError
from stages.entry import at_least_one, ends_in_one_line

RESTARTS = 3


@ends_in_one_line
def main() -> None:
    args = _parsed()
    # Late, so that --help does not wait for torch
    import torch

    from g2rpo_core.config import load_profile, load_run, profile_path
    from g2rpo_core.distributed.launcher import MARGIN, SHUTDOWN, SHUTDOWN_DEFAULT

    name, gpus = args.profile or load_run().profile, max(1, torch.cuda.device_count())
    profile = load_profile(profile_path(name))
    if args.stage == "train" and args.method not in profile.methods:
        raise UserError(f"launch: {name} has no method {args.method!r}")
    training = profile.run(args.method).training if args.stage == "train" else profile.training
    seconds = max(SHUTDOWN_DEFAULT, round(training.checkpoints.grace) + MARGIN)
    environment = {
        # Processes that replace others must not find the addresses of those
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        SHUTDOWN: str(seconds),  # that torch leaves a checkpoint at SIGTERM
        **os.environ,
    }
    if "SLURM_STEP_ID" in os.environ:  # what only the user can mend is then not tried again
        number = [os.environ.get(f"SLURM_{of}") for of in ("JOB_ID", "RESTART_COUNT", "STEP_ID")]
        folder = Path(".cache", "statuses", "-".join(each or "0" for each in number))
        environment[STATUS_FOLDER] = str(folder.absolute())
    words = {
        "nnodes": args.nodes,
        "nproc-per-node": args.gpus_per_node or gpus,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": args.endpoint,
        "rdzv-id": args.endpoint,
        "max-restarts": RESTARTS,
    }
    command = [sys.executable, "-m", "g2rpo_core.distributed.launcher", "torchrun"]
    command += [f"--{word}={value}" for word, value in words.items()]
    command += ["-m", f"stages.{args.stage}", "--profile", name]
    command += ["--method", args.method, "--seed", str(args.seed)]
    os.execve(sys.executable, command, environment)  # signals reach the launcher itself


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="g2rpo launch", description=__doc__)
    parser.add_argument("stage", choices=("train", "evaluate"))
    parser.add_argument("--profile", help="default: the one in params.yaml")
    parser.add_argument("--method", required=True, help="of the profile; base is only evaluated")
    parser.add_argument("--seed", type=int, required=True)
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    parser.add_argument(
        "--nodes", type=at_least_one, default=nodes, help="default: those of the Slurm job"
    )
    parser.add_argument(
        "--gpus-per-node", type=at_least_one, help="processes on each (default: its GPUs)"
    )
    parser.add_argument(
        "--endpoint", metavar="HOST:PORT", required=True, help="a free port of the first node"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
