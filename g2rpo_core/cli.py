"""The command `g2rpo`: what is asked without running the pipeline."""

import argparse
import json
import sys

from . import score
from .errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(prog="g2rpo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_plan(commands)
    score.add_parser(commands)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


def _add_plan(commands) -> None:
    parser = commands.add_parser("plan", help="what a profile needs: evaluations, memory of each GPU, seconds, disk")
    parser.add_argument("--profile", required=True, help="name of a file in profiles/ of a flux_* profile")
    parser.add_argument("--method", help="one of the profile's methods; the first if not given")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory", type=float, default=80, help="GiB of each GPU")
    parser.add_argument("--rate", type=float, help="evaluations a second and GPU that were measured (python -m benchmarks.flux)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    from .config import load_profile, profile_path
    from .plan import RATE, plan

    profile = load_profile(profile_path(arguments.profile))
    method = arguments.method or next(iter(profile.methods))
    if method not in profile.methods:
        raise UserError(f"--method {method}: not in the profile; allowed are {', '.join(profile.methods)}")
    if profile.models.source != "hub":
        raise UserError(f"--profile {arguments.profile}: the plan is of FLUX.1-dev; profiles with `source: hub` have it")
    try:
        made = plan(profile, method, arguments.gpus, arguments.memory, arguments.rate or RATE)
    except ValueError as error:
        raise UserError(f"--gpus {arguments.gpus}: {error}") from None
    if arguments.json:
        print(json.dumps(made.to_dict(), indent=1))
        return
    print(f"{method} of profile {arguments.profile} on {arguments.gpus} GPUs of {arguments.memory:g} GiB")
    print(f"evaluations      {made.evaluations_per_prompt:,} a prompt, {made.evaluations_per_iteration:,} an iteration")
    for name, value in made.memory_gib.items():
        print(f"  {name:<14} {value:8.2f} GiB")
    print(f"memory           {made.total_gib} GiB of each GPU at the peak: {'fits' if made.fits else 'does not fit'}")
    for line in made.advice:
        print(f"  change: {line}")
    rate = "the given rate" if arguments.rate else f"{RATE:g} evaluations/s a GPU, assumed and not measured"
    print(f"an iteration     {made.seconds_per_iteration:,} s at {rate}")
    print("disk             " + ", ".join(f"{name} {value} GiB" for name, value in made.disk_gib.items()))


if __name__ == "__main__":
    main()
