"""Measure how far builds of the small base lie apart, over seeds of its fit and over numerics.

    python -m benchmarks.bases --models models/tiny --profile tiny [--seeds 0 1 2 3] [--numerics
    portable native]

Every base is built by the stage `models` and evaluated by the stage `evaluate`, in a folder of its
own. The scorers are those of `--models` for all of them, so only the base differs. A build takes
some minutes; prints a table of JSON lines as they end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

from g2rpo_core.hub.model_store import LOCK, QUALITY
from g2rpo_core.rewards.registry import REWARDS

ROOT = Path(__file__).parents[1]
NAME = "base"  # of the profile, and of its models
JUDGES = ("hps", "clip_score", "pickscore", "image_reward", "unified_reward", "verifier")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, required=True, help="built models, whose scorers judge"
    )
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument(
        "--numerics", nargs="+", choices=["portable", "native"], default=["portable", "native"]
    )
    args = parser.parse_args()
    for numerics in args.numerics:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                print(
                    json.dumps(
                        measure(Path(folder), args.models.resolve(), args.profile, seed, numerics)
                    ),
                    flush=True,
                )


def measure(folder: Path, models: Path, profile: str, seed: int, numerics: str) -> dict:
    """Build a base in a folder and evaluate it; return its fit losses and its mean scores."""
    # The base alone: no scorer is built
    changes = {"extends": profile, "numerics": numerics}
    scorers = {
        name: None for name in JUDGES if REWARDS[name].models
    }  # null removes what a parent has
    exact = {
        "rewards": {"hps": None, "clip_score": None, "verifier": 1.0},
        "monitor": {"every": 1, "prompts": 1, "rewards": ["verifier"]},
    }
    only_base = {
        "models": {"seed": seed, **scorers},
        "training": exact,
        "evaluation": {"rewards": ["verifier"]},
    }
    own_monitor = {"training": {"monitor": {"rewards": ["verifier"]}}}
    methods = {"methods": {"dance_grpo": own_monitor}}
    write_profile(folder, profile, changes | only_base | methods)
    run_stage(folder, "models")
    # The scorers of all
    lock, built = folder / "models" / NAME / LOCK, models / LOCK
    entries = json.loads(lock.read_text())
    for name, entry in json.loads(built.read_text()).items():
        if name != "pipeline":
            (folder / "models" / NAME / entry["folder"]).symlink_to(models / entry["folder"])
            entries[name] = entry
    lock.write_text(json.dumps(entries))
    write_profile(
        folder,
        profile,
        changes
        | {"models": {"seed": seed}, "evaluation": {"diversity": None, "rewards": list(JUDGES)}},
    )
    for stage in ("prompts", "embed"):
        run_stage(folder, stage)
    run_stage(folder, "evaluate", "--method", "base", "--seed", "0")
    losses = {
        name: values["loss"]
        for name, values in json.loads((folder / "models" / NAME / QUALITY).read_text()).items()
    }
    scores = json.loads((folder / "reports" / "metrics" / "base-0.json").read_text())
    return {"seed": seed, "numerics": numerics, "loss": losses, "scores": scores}


def write_profile(folder: Path, profile: str, changes: dict) -> None:
    """Write the profile beside those that it extends."""
    profiles = folder / "profiles"
    profiles.mkdir(exist_ok=True)
    for file in (ROOT / "profiles").glob("*.yaml"):
        if not (profiles / file.name).exists():
            (profiles / file.name).symlink_to(file)
    YAML().dump(changes, profiles / f"{NAME}.yaml")


def run_stage(folder: Path, stage: str, *words: str) -> None:
    """Run a stage to its end in a process of one thread; exit with its last words if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"stages.{stage}", "--profile", NAME, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{stage}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
