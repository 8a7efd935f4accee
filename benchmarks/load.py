"""Measure whether memory stays bounded and what more processes gain.

    python -m benchmarks.load --models models/tiny [prompts|iterations|scaling]

The real stages run as separate processes in a temporary folder; the memory of each and its children
is sampled ten times per second. `prompts`: the stages prompts and embed, for growing numbers of
prompts; `iterations`: one training run of many iterations; `scaling`: seconds of training
iterations with 1, 2 and 4 processes, with equally many prompts in all (strong) or per process
(weak).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import pandas as pd
import psutil
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
PROMPTS = (1_000, 10_000, 103_700)
ITERATIONS = 1_000
PROCESSES = (1, 2, 4)
SMALL = {
    "num_generations": 4,
    "rewards": {"hps": 1.0},
    "learning_rate": 1e-6,
}  # how it learns does not matter


def write_project(folder: Path, models: Path, sections: dict) -> None:
    """Write a folder to run stages in, with profile `load`: tiny's, with changes in its sections."""
    profile = YAML(typ="safe", pure=True).load((ROOT / "profiles" / "tiny.yaml").read_text())
    profile["methods"] = {"g2rpo": {}}  # tiny's entries are for its own steps and rewards
    for name, changes in sections.items():
        profile[name] |= changes
    (folder / "profiles").mkdir(exist_ok=True)
    with (folder / "profiles" / "load.yaml").open("w") as file:
        YAML().dump(profile, file)
    (folder / "models").mkdir(exist_ok=True)
    if not (folder / "models" / "load").exists():
        (folder / "models" / "load").symlink_to(models.resolve())


def run_stage(folder: Path, name: str, *words: str) -> list[tuple[float, int]]:
    """Run a stage to its end; return (seconds, bytes that its processes hold) over its time."""
    start, held = time.perf_counter(), []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"stages.{name}", "--profile", "load", *words]
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        whole = psutil.Process(child.pid)
        while child.poll() is None:
            held.append((time.perf_counter() - start, sum_memory(whole)))
            time.sleep(0.1)
    if child.returncode:
        sys.exit((folder / f"{name}.log").read_text()[-2000:])
    return held


def sum_memory(process: psutil.Process) -> int:
    """Return the bytes that a process and its children hold."""
    total = 0
    try:
        for each in [process, *process.children(recursive=True)]:
            total += each.memory_info().rss
    except psutil.Error:
        pass  # one of them has just ended
    return total


def peak_mib(held: list[tuple[float, int]]) -> int:
    """Return the most that was held, in MiB."""
    return round(max(size for _, size in held) / 2**20)


def measure_prompts(folder: Path, models: Path, counts: tuple[int, ...]) -> list[dict]:
    """Measure memory and time of choosing and encoding prompts, by their number."""
    rows = []
    for count in counts:
        text = "".join(
            f"a large red circle above a small blue square, number {number}\n"
            for number in range(count)
        )
        (folder / "prompts.txt").write_text(text)
        sets = {
            "train": "prompts.txt",
            "train_count": count,
            "test": "prompts.txt",
            "test_count": 1,
        }
        write_project(
            folder,
            models,
            {
                "prompts": sets,
                "embed": {"max_sequence_length": 32},
                "evaluation": {"rewards": ["hps", "clip_score"]},
                "training": {"monitor": {"every": 1, "prompts": 1, "rewards": ["hps"]}},
            },
        )
        chosen, encoded = run_stage(folder, "prompts"), run_stage(folder, "embed")
        rows.append(
            {
                "prompts": count,
                "prompts_mib": peak_mib(chosen),
                "embed_mib": peak_mib(encoded),
                "embed_seconds": round(encoded[-1][0], 1),
                "parquet_mib": round(
                    sum(file.stat().st_size for file in (folder / "embeddings").rglob("*.parquet"))
                    / 2**20
                ),
            }
        )
    return rows


def write_embedded_project(folder: Path, models: Path, training: dict) -> None:
    """Write a folder with 64 embedded prompts, for a run with these settings of section `training`."""
    monitor = {"every": training["iterations"], "prompts": 1, "rewards": ["hps"]}
    sections = {
        "prompts": {"train_count": 64, "test_count": 16},
        "sampling": {"steps": 4},
        "training": SMALL | {"monitor": monitor} | training,
        "methods": {
            "g2rpo": {"settings": {"tree": {"sde_steps": [0, 1], "granularities": [1, 2]}}}
        },
    }
    write_project(folder, models, sections)
    if not (folder / "embeddings").exists():
        run_stage(folder, "prompts")
        run_stage(folder, "embed")


def measure_iterations(folder: Path, models: Path, count: int) -> list[dict]:
    """Measure the memory of one training run at four times."""
    write_embedded_project(folder, models, {"iterations": count, "prompts_per_iteration": 1})
    held = run_stage(folder, "train", "--method", "g2rpo", "--seed", "1")
    whole = held[-1][0]
    return [
        {
            "share_of_run": share,
            "mib": round(min(held, key=lambda sample: abs(sample[0] - share * whole))[1] / 2**20),
        }
        for share in (0.25, 0.5, 0.75, 0.95)
    ]


def measure_scaling(
    folder: Path, models: Path, processes: tuple[int, ...], count: int
) -> list[dict]:
    """Measure the seconds of an iteration by the number of processes."""
    rows = []
    for kind in ("strong", "weak"):
        for size in processes:
            several = max(processes) if kind == "strong" else size
            write_embedded_project(
                folder,
                models,
                {"iterations": count, "prompts_per_iteration": several, "processes": size},
            )
            run_stage(folder, "train", "--method", "g2rpo", "--seed", "1")
            timings = json.loads((folder / "reports" / "timings" / "g2rpo-1.json").read_text())
            seconds = (
                pd.Series(list(timings["seconds"].values())).diff().iloc[2:].median()
            )  # the first iteration warms up
            first = next((row["seconds"] for row in rows if row["kind"] == kind), seconds)
            rows.append(
                {
                    "kind": kind,
                    "processes": size,
                    "prompts": several,
                    "seconds": round(seconds, 4),
                    "of_one": round(first / seconds, 2),
                }
            )
    return rows


def main() -> None:
    """Parse the options, measure in temporary folders, and print the results."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="*",
        default=["prompts", "iterations", "scaling"],
        help="which to measure (default: all)",
    )
    parser.add_argument(
        "--models", type=Path, default=Path("models/tiny"), help="folder made by the stage models"
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)
    parser.add_argument(
        "--json", action="store_true", help="the last line is one object with all numbers"
    )
    args = parser.parse_args()
    if not (args.models / "models.lock.json").exists():
        sys.exit(
            f"error: {args.models}: no models there; the stage `models` makes them: "
            "dvc repro models"
        )
    # Each measurement has a folder of its own
    measured = {}
    for name in args.what:
        with tempfile.TemporaryDirectory() as folder:
            measures = {
                "prompts": lambda folder: measure_prompts(folder, args.models, tuple(args.prompts)),
                "iterations": lambda folder: measure_iterations(
                    folder, args.models, args.iterations
                ),
                "scaling": lambda folder: measure_scaling(
                    folder, args.models, tuple(args.processes), 12
                ),
            }
            measured[name] = measures[name](Path(folder))
        print(f"{name}\n{pd.DataFrame(measured[name]).to_string(index=False)}\n", flush=True)
    if args.json:
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
