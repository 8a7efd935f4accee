"""Print what `benchmarks.gpu_hour` brought home as Markdown, and pack it into one file.

python -m benchmarks.gpu_table FOLDER|FILE [--pack FILE]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from benchmarks.gpu_hour import BASES, EQUAL_COMPUTE, EQUAL_ITERATIONS
from g2rpo_core.algorithm.methods import LABELS

TRAINED = ("hps", "clip_score")  # the training reward of small_gpu is their sum
Results = dict[str, dict]  # step -> its file


def read(path: Path) -> Results:
    """Return the results of a folder of `gpu_hour`, or of a packed file."""
    if path.is_file():
        return json.loads(path.read_text())
    return {file.stem: json.loads(file.read_text()) for file in sorted(path.glob("*.json"))}


def packed(results: Results) -> Results:
    """Return results with the seconds of the first and last iteration: all that tables need."""

    def few(value: object) -> object:
        if isinstance(value, dict):
            seconds = value.get("seconds")
            if isinstance(seconds, dict) and all(str(key).isdigit() for key in seconds):
                kept = {"1", max(seconds, key=int)}
                return {
                    **value,
                    "seconds": {key: each for key, each in seconds.items() if key in kept},
                }
            return {key: few(each) for key, each in value.items()}
        return [few(each) for each in value] if isinstance(value, list) else value

    return few(results)  # type: ignore[return-value]


def gains(results: Results) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield method, base, and the gain of each score and of the training reward over the base."""
    for method in (*EQUAL_ITERATIONS, *EQUAL_COMPUTE):
        for base in BASES:
            if {f"{method}-{base}", f"base_scores-{base}"} <= results.keys():
                run, before = (
                    results[f"{name}-{base}"]["result"]["scores"]
                    for name in (method, "base_scores")
                )
                gained = {name: run[name] - before[name] for name in run}
                yield method, base, gained | {"training": sum(gained[name] for name in TRAINED)}


def table(results: Results) -> list[str]:
    """Return profile small_gpu's table: gains by base, their means, and seconds per iteration."""
    found = list(gains(results))
    lines = [
        "| method | training reward, by base | mean | PickScore | verifier | NFE | s/iteration |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(method for method, _, _ in found):
        of_bases = {base: gained for name, base, gained in found if name == method}
        average = lambda key, of_bases=of_bases: (
            f"{mean(gained[key] for gained in of_bases.values()):+.4f}"
        )
        runs = [results[f"{method}-{base}"]["result"] for base in of_bases]
        seconds = [run["timings"]["seconds"] for run in runs]
        last = max(map(int, seconds[0]))
        each = [
            (every[str(last)] - every["1"]) / (last - 1) for every in seconds
        ]  # the first one compiles
        cells = [
            LABELS.get(method, method),
            ", ".join(f"{gained['training']:+.4f}" for gained in of_bases.values()),
            *map(average, ("training", "pickscore", "verifier")),
            f"{runs[0]['records'][-1]['num_forward_evals']:,}",
            f"{min(each):.2f}–{max(each):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Parse the options, print the tables, and pack the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--pack", type=Path, help="also write all results into this file")
    args = parser.parse_args()
    results = read(args.results) if args.results.exists() else {}
    if not results:
        parser.exit(1, f"error: {args.results}: holds no results of benchmarks.gpu_hour\n")
    print("\n".join(table(results)))
    if args.pack:
        args.pack.write_text(json.dumps(packed(results), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
