"""Measure on one GPU all that README.md says of it, in as many calls as it takes.

    python -m benchmarks.gpu_hour --minutes 8 --out FOLDER [--from STEP] [--only STEP ...]
    [--size tiny --device cpu]

Nothing is downloaded. Steps run in the order of their value, each in a process of its own. FOLDER
gets a log and a JSON file of each step that is done. Steps that are done, or would not end in time,
are skipped. `--list` prints the steps.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASES = (0, 1, 2)
EQUAL_ITERATIONS = ("g2rpo", "mix_grpo", "g2rpo_no_mgai", "dance_grpo")
EQUAL_COMPUTE = ("mix_grpo_compute", "nft_shared_compute")
BESIDE = 6  # processes that share the card, where a step's seconds do not matter
TINY_SECONDS = 20.0  # of any step at size tiny
RESUMES = 60.0  # that are worth to begin what resumes
GRACE = 20.0  # seconds in which a training that is stopped writes a checkpoint


@dataclass(frozen=True)
class Step:
    """A step: its name is that of its files."""

    name: str
    seconds: float
    """On an H100, at size flux, rounded up; those at equal compute have not been seen to end."""
    words: tuple[str, ...]
    """The module, and options beside --size, --device and --json."""
    needs: str | None = None
    """The step that must be done."""
    beside: bool = False
    """Whether it runs beside its neighbours of the same kind."""
    resumes: bool = False
    """Whether a call that stops it loses little: it is begun although it may not end in time."""


def steps() -> list[Step]:
    """Return all steps, the most valuable first."""
    of = lambda *words: ("benchmarks.gpu_steps", *map(str, words))
    beside = {"beside": True}
    small = [Step(f"base-{base}", 250, of("base", base), **beside) for base in BASES]
    small += [
        Step("compiled", 410, of("compiled"), **beside),
        Step("card", 160, of("card"), **beside),
    ]
    for methods, seconds in ((EQUAL_ITERATIONS, 190), (EQUAL_COMPUTE, 700)):
        for method in methods:
            small += [
                Step(
                    f"{method}-{base}", seconds, of("run", base, method), f"base-{base}", True, True
                )
                for base in BASES
            ]
    small += [
        Step(f"base_scores-{base}", 30, of("scores", base), f"base-{base}", **beside)
        for base in BASES
    ]
    return [
        Step("first", 60, ("benchmarks.gpu_first",)),
        Step("first-deterministic", 70, ("benchmarks.gpu_first", "--deterministic")),
        *small,
        Step("kernels", 140, ("benchmarks.gpu_steps", "kernels")),
        Step("flux", 180, ("benchmarks.flux", "--batches", "1", "12")),
    ]


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout from anywhere."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def last_line(output: str) -> str:
    """Return what a process said last: its result, or what went wrong."""
    return (output.strip().splitlines() or ["no output"])[-1]


class Runner:
    """Runs steps until a deadline; folder: where their files are."""

    def __init__(self, folder: Path, minutes: float, size: str, device: str):
        self.folder, self.size, self.device = folder, size, device
        self.deadline = time.monotonic() + 60 * minutes
        self.printing = threading.Lock()
        self.open: set[str] = set()  # steps of this call that have not ended yet
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, asked: Sequence[Step]) -> list[str]:
        """Run the steps that are not done; return the names of those that are not done after it."""
        self.open = {step.name for step in asked}
        for beside, group in groupby(asked, lambda step: step.beside):
            with ThreadPoolExecutor(BESIDE if beside else 1) as pool:
                list(pool.map(self.step, group))
        return [step.name for step in asked if not self.done(step.name)]

    def done(self, name: str) -> bool:
        """Return whether a step has left its result."""
        return (self.folder / f"{name}.json").exists()

    def step(self, step: Step) -> None:
        """Run one step, unless it is done, lacks what it needs, or would not end in time."""
        try:
            if self.done(step.name):
                return
            while step.needs in self.open:  # it began before, beside this one
                time.sleep(0.2)
            left = self.deadline - time.monotonic()
            if step.needs and not self.done(step.needs):
                self.say(f"{step.name}: not begun, because {step.needs} is not done")
            elif left < (RESUMES if step.resumes else self.seconds(step)):
                self.say(f"{step.name}: not begun, with {left:.0f} seconds left")
            else:
                self.start(step, left)
        finally:
            self.open.discard(step.name)

    def seconds(self, step: Step) -> float:
        return step.seconds if self.size == "flux" else TINY_SECONDS

    def start(self, step: Step, left: float) -> None:
        """Run a step's process, for so many seconds at most, and write what its last line says."""
        log, failed = (self.folder / f"{step.name}.{kind}" for kind in ("log", "failed"))
        failed.unlink(missing_ok=True)
        module, *words = step.words
        command = [sys.executable, "-m", module, *words, "--json"]
        command += ["--size", self.size, "--device", self.device]
        if module == "benchmarks.gpu_steps":
            command += ["--home", str(self.folder / "work")]
        start = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )
            try:
                status: int | str = process.wait(left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                status = "stopped at the deadline"
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = round(time.monotonic() - start, 1)
        last = last_line(log.read_text(errors="replace"))
        if status == 0:
            result = {
                "step": step.name,
                "wall_seconds": seconds,
                "size": self.size,
                "result": json.loads(last),
            }
            aside = log.with_suffix(".tmp")
            aside.write_text(json.dumps(result, indent=1) + "\n")
            aside.rename(log.with_suffix(".json"))
        else:
            failed.write_text(f"{status}: {last}\n")
        self.say(
            f"{step.name}: {'done' if status == 0 else f'failed ({status}): {last[:300]}'}, "
            f"{seconds:.0f} s"
        )

    def say(self, line: str) -> None:
        with self.printing:
            print(line, flush=True)


def has_cuda() -> bool:
    """Return whether torch finds a GPU, by a process that then frees its memory."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def main() -> None:
    """Parse the options and run the steps; exit status 1 if some are not done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in steps()]
    one = {"choices": names, "metavar": "STEP"}
    option = parser.add_argument
    option("--minutes", type=float, default=8.0, help="until the last step must have ended")
    option("--out", type=Path, default=Path(".cache", "gpu_hour"))
    option("--from", dest="first", help="leave out the steps before this one", **one)
    option("--only", nargs="+", help="these steps alone", **one)
    option("--size", choices=("flux", "tiny"), default="flux")
    option("--device", choices=("cuda", "cpu"), default="cuda")
    option("--list", action="store_true", help="print the steps and their seconds on an H100")
    args = parser.parse_args()
    start = names.index(args.first) if args.first else 0
    asked = [step for step in steps()[start:] if not args.only or step.name in args.only]
    if args.list:
        print("\n".join(f"{step.name:22} {step.seconds:4.0f} s" for step in asked))
        return
    if args.device == "cuda" and not has_cuda():
        parser.exit(1, "error: no CUDA device; run on one, or try `--size tiny --device cpu`\n")
    left = Runner(args.out.resolve(), args.minutes, args.size, args.device).run(asked)
    print(
        f"{len(asked) - len(left)} of {len(asked)} steps are done, in {args.out}"
        + (f"; not {', '.join(left)}" if left else "")
    )
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
