"""Run one stage as one of many processes, at true size and without data.

The stage's own `main` runs, from its command line to its last file, in a runtime that only counts
(`runtime`), with tensors that have no data (`simulate`). Prints one JSON line.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from peft import LoraConfig

import stages.embed
import stages.evaluate
import stages.train
from g2rpo_core.config import load_profile
from g2rpo_core.distributed.checkpoint import FINISHED
from g2rpo_core.estimate.tracing import shape_of
from g2rpo_core.foundation.runs import TRAINING_RECORDS
from g2rpo_core.foundation.texts import echo
from g2rpo_core.models.loading import lora_config
from g2rpo_core.weights.adapter import LORA_FILE
from pipeline.rehearsal import simulate
from pipeline.rehearsal.meter import GIB, Meter
from pipeline.rehearsal.runtime import Rehearsed

STAGES = {
    "embed": stages.embed,
    "train": stages.train,
    "resume": stages.train,
    "evaluate": stages.evaluate,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="pipeline.rehearsal", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    options = {
        "home": Path,
        "profile": str,
        "method": str,
        "gpus": int,
        "nodes": int,
        "memory": float,
        "rank": int,
    }
    for name, kind in options.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args()
    # Replace the runtime
    warnings.filterwarnings("ignore")
    per_node = args.gpus // args.nodes
    local = args.rank % per_node
    meter = Meter(args.memory * GIB, per_node)
    runtime = Rehearsed(meter, args.rank, args.gpus, local, prepare(args))
    simulate.gpus(per_node, local, args.memory)
    simulate.storages(meter.resized, meter.pause)
    simulate.files(runtime.count_weights)
    # Run the stage as its command does
    words = ["--profile", args.profile]
    if args.stage != "embed":
        words += ["--method", args.method, "--seed", "0"]
    sys.argv = [args.stage, *words]
    ended = None
    try:
        with simulate.WithoutData(), meter:
            STAGES[args.stage].main(runtime)
    except BaseException as error:  # noqa: BLE001 - whatever ends a stage is reported
        if not isinstance(error, SystemExit) or error.code:
            # Stages turn what a machine lacks into one line and an exit
            cause = (
                error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
            )
            ended = f"{type(cause).__name__}: {cause}"
            traceback.print_exc()
    echo(json.dumps(report(args, runtime, ended)))
    sys.stdout.flush()
    os._exit(0 if ended is None else 1)


def report(args: argparse.Namespace, runtime: Rehearsed, ended: str | None) -> dict:
    """Return the figures of a stage that ran; ended: the error that ended it, if any."""
    meter = runtime.meter
    # Equal collectives are one entry with a count
    kinds: dict[tuple, Counter] = defaultdict(Counter)
    for call in meter.collectives:
        figures: dict[str, Any] = {"calls": 1, "bytes": call.bytes, "sent": call.sent}
        kinds[call.phase, call.name, call.group, call.between_nodes].update(figures)
    keys = ("phase", "name", "group", "between_nodes")
    collectives = [{**dict(zip(keys, kind)), **sums} for kind, sums in kinds.items()]
    phases = {
        name: {
            "gpu": phase.peak["cuda"],
            "host": phase.peak["cpu"],
            "flops": phase.flops,
            "seconds": phase.seconds,
        }
        for name, phase in meter.phases.items()
    }
    order = [(call.phase, call.name, call.group, call.bytes) for call in meter.collectives]
    return {
        "stage": args.stage,
        "rank": args.rank,
        "ended": ended,
        "phases": phases,
        "collectives": collectives,
        "order": hashlib.sha256(repr(order).encode()).hexdigest(),
        "written": dict(runtime.written),
        "updates": runtime.updates,
    }


def prepare(args: argparse.Namespace) -> LoraConfig | None:
    """Make the stage's folder with the outputs of earlier stages (`inputs`), and change into it.

    Return the adapter of the run that is evaluated, if its weights are a LoRA's.
    """
    profile = load_profile(args.home / "profiles" / f"{args.profile}.yaml")
    own = f"train-{args.method}" if args.stage == "resume" else f"{args.stage}-{args.method}"
    cwd = args.home / f"{own}-{args.rank}"
    if args.stage != "resume":
        shutil.rmtree(cwd, ignore_errors=True)
        cwd.mkdir()
    else:  # the run that is resumed has ended, here
        for done in cwd.glob(f".cache/resume/train/*/*/*/{FINISHED}"):
            done.unlink()
    for source in [args.home / "profiles", *(args.home / "inputs").glob("*/*")]:
        link = cwd / source.relative_to(
            args.home if source.name == "profiles" else args.home / "inputs"
        )
        link.parent.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to(source.resolve())
    os.chdir(cwd)
    # An evaluation needs a run
    if args.stage != "evaluate" or args.method == "base":
        return None
    lora = profile.run(args.method).training.lora
    run = Path("runs", args.profile, f"{args.method}-0")
    weights = run / ("lora" if lora else "transformer")
    weights.mkdir(parents=True, exist_ok=True)
    (run / TRAINING_RECORDS).touch()
    shutil.copy(Path("models", args.profile, "pipeline", "transformer", "config.json"), weights)
    if lora:
        (weights / LORA_FILE).touch()  # it is looked for, and not read
    return lora_config(shape_of(profile)[0], lora) if lora else None
