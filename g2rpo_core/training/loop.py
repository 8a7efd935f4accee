"""A training run that can resume: the trainer's iterations, the measurements between them, and the checkpoints."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.termination import Terminated
from g2rpo_core.models.policy import snapshot
from g2rpo_core.training.drift import DriftError, updates_of, warnings_of
from g2rpo_core.training.experience import NonFiniteError
from g2rpo_core.training.metrics import START
from g2rpo_core.training.trainer import Trainer

CURVE = "records.jsonl"  # in the scratch folder: every iteration as it ends, so that a killed run keeps its curve


def train(
    trainer: Trainer,
    folder: Path,
    heldout: Callable[[], dict],
    progress: Callable[[dict], None],
    warn: Callable[[int, str], None] = lambda iteration, text: None,
) -> list[dict]:
    """The records of all iterations from 0 on, with `heldout()` when `training.monitor` says so; collective.

    folder: from `checkpoint.scratch`; progress: called with every new record; warn: called with an iteration and a warning
    (`drift.py`), once until that is over. Raises DriftError if `training.drift.stop` says so. After SIGTERM, writes a checkpoint
    and raises Terminated; after a number that stops the run, also writes one, from which the error can be reproduced. However
    often a run is stopped, its final weights and records (except their seconds) are the same.
    """
    settings, processes = trainer.training, trainer.processes
    kept = checkpoint.Checkpoints(folder, settings.checkpoints.keep, processes)
    if written := checkpoint.checkpoints(folder):
        records = checkpoint.load_records(written[-1], processes)
        trainer.restore(partial(checkpoint.load_state, written[-1], processes=processes), updated=records[-1]["iteration"] > 0)
    else:
        records = [{**START, **heldout()}]  # an EMA begins as the weights
    lines = folder / CURVE
    checkpoint.write_whole(lines, "".join(map(_line, records)).encode()) if processes.rank == 0 else None
    progress(records[-1])
    told: set[str] = set()

    def look() -> None:
        """On all processes, which have the same records."""
        found = warnings_of(records, settings, updates_of(trainer.method, trainer.sampling.steps))
        for name, text in found.items():
            if name not in told:
                warn(records[-1]["iteration"], text)
        told.clear()
        told.update(found)
        if found and settings.drift.stop:
            raise DriftError(
                f"iteration {records[-1]['iteration']}: {'; '.join(found.values())}; set training.drift.stop: false to go on from here"
            )

    def save() -> None:
        kept.save(records[-1]["iteration"], trainer.state(), records)

    try:
        look()
        for record in trainer.run(records[-1]):
            kept.publish()
            iteration = record["iteration"]
            if iteration % settings.monitor.every == 0 or iteration == settings.iterations:
                with trainer.result():
                    record |= heldout()
            records.append(record)
            if processes.rank == 0:
                with lines.open("a") as file:
                    file.write(_line(record))
            progress(record)
            if iteration in settings.snapshots:
                keep_snapshot(trainer, folder, iteration)
            if iteration % settings.checkpoints.every == 0 or iteration == settings.iterations:
                save()
            look()
        kept.finish()
    except (Terminated, NonFiniteError, DriftError) as error:
        if trainer.weights_unchanged or isinstance(
            error, DriftError
        ):  # otherwise the previous checkpoint stays, and everything after it is computed again, bit for bit
            save()
        kept.finish()
        if isinstance(error, NonFiniteError):
            again = f"the same command resumes before it, from {folder}"
            raise NonFiniteError(f"{error}; nothing of that iteration was kept; {again}") from None
        raise
    return records


def _line(record: dict) -> str:
    return json.dumps(record) + "\n"


def keep_snapshot(trainer: Trainer, folder: Path, iteration: int) -> None:
    """Saves the current weights beside the checkpoints.

    Collective. Uses a temporary name: an earlier attempt may have left half a copy.
    """
    final = snapshot(folder, iteration)
    aside = final.with_suffix(".tmp")
    with trainer.result():
        trainer.policy.save(aside)
    if trainer.processes.rank == 0:
        checkpoint.replace(aside, final)
