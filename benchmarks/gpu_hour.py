"""Measure on one GPU what README.md says of FLUX.1-dev's shape, in as many calls as it takes.

    python -m benchmarks.gpu_hour --minutes 8 --out FOLDER [--size tiny --device cpu]

Nothing is downloaded. Steps run in the order of their value, each in a process of its own, whose
last line becomes a JSON file of FOLDER. A step that is done, or would not end in time, is skipped.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

STEPS = {  # name -> seconds on an H100, rounded up; a module and its options
    "first": (60, "benchmarks.gpu_first"),
    "first-deterministic": (70, "benchmarks.gpu_first", "--deterministic"),
    "flux": (150, "benchmarks.flux", "--batches", "1", "12"),
}


def run(words: list[str], file: Path, seconds: float) -> str:
    """Run a module for so many seconds at most, and write what it said last; return how it went."""
    log = file.with_suffix(".log")
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return "stopped at the deadline"
    last = (log.read_text(errors="replace").splitlines() or ["no output"])[-1]
    if done.returncode:
        return f"failed: {last[:300]}"
    file.write_text(f"{last}\n")
    return "done"


def main() -> None:
    """Parse the options and run the steps; exit status 1 if some are not done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--minutes", type=float, default=8.0, help="until the last step must have ended")
    option("--out", type=Path, default=Path(".cache", "gpu_hour"))
    option("--size", choices=("flux", "tiny"), default="flux")
    option("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    for name, (seconds, *words) in STEPS.items():
        file, left = args.out / f"{name}.json", deadline - time.monotonic()
        if not file.exists():
            if left < (seconds if args.size == "flux" else 1):
                print(f"{name}: not begun, with {left:.0f} seconds left", flush=True)
                continue
            words += ["--json", "--size", args.size, "--device", args.device]
            print(f"{name}: {run(words, file, left)}", flush=True)
    sys.exit(not all((args.out / f"{name}.json").exists() for name in STEPS))


if __name__ == "__main__":
    main()
