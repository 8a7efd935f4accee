"""Runs a training that can resume: the trainer's iterations, the measurements between them, and the checkpoints."""

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from g2rpo_core.data.embeddings import DTYPES
from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.launcher import Terminated
from g2rpo_core.foundation.files import write_whole
from g2rpo_core.models.policy import SNAPSHOTS, snapshot
from g2rpo_core.training.drift import NEVER_STOPS, DriftError, find_warnings
from g2rpo_core.training.experience import NonFiniteError
from g2rpo_core.training.metrics import HELDOUT, START
from g2rpo_core.training.settings import SMALL
from g2rpo_core.training.trainer import Trainer

CURVE = "records.jsonl"  # in the scratch folder: every iteration as it ends, so that a killed run keeps its curve


def train(
    trainer: Trainer,
    folder: Path,
    heldout: Callable[[], dict],
    progress: Callable[[dict], None],
    warn: Callable[[int, str], None] = lambda iteration, text: None,
) -> list[dict]:
    """Return the records of all iterations from 0 on, with `heldout()` when `training.monitor` says so; collective.

    folder: from `checkpoint.scratch`; progress: called with every new record; warn: called with an
    iteration and a warning (`drift.py`), once until that is over. Raises DriftError if
    `training.drift.stop` says so. After SIGTERM, writes a checkpoint and raises Terminated; after a
    number that stops the run, also writes one, from which the error can be reproduced. However
    often a run is stopped, its final weights and records (except their seconds) are the same.
    """
    settings, processes, runtime = trainer.training, trainer.processes, trainer.runtime
    kept, due = runtime.checkpoints(folder, settings.checkpoints.keep, processes), _Due(trainer)

    def save() -> None:
        state = trainer.state()
        with runtime.phase("save"):
            kept.save(records[-1]["iteration"], state, records)
            due.saved()

    # The records so far
    records, curve = _begin(trainer, kept, folder, heldout), folder / CURVE
    if processes.rank == 0:
        write_whole(curve, "".join(map(_line, records)))
    progress(records[-1])
    look = _Drift(trainer, warn)
    try:
        look(records)
        for record in trainer.run(records[-1]):
            kept.publish()
            iteration, last = record["iteration"], record["iteration"] == settings.iterations
            # The record, with what is measured on held-out prompts of what is kept: the average, if
            # there is one
            if iteration % settings.monitor.every == 0 or last:
                with trainer.result():
                    record |= heldout()
            records.append(record)
            if processes.rank == 0:
                with curve.open("a") as file:
                    file.write(_line(record))
            progress(record)
            # What outlives the iteration
            if iteration in settings.snapshots:
                keep_snapshot(trainer, folder, iteration)
            if due(iteration) or last:
                save()
            look(records)
        kept.finish()
    except (Terminated, NonFiniteError, DriftError) as error:
        # Within an update, the previous checkpoint stays, and what came after it is computed again,
        # bit for bit
        if trainer.weights_unchanged or isinstance(error, DriftError):
            save()
        kept.finish()
        if isinstance(error, NonFiniteError):
            resumes = f"the same command resumes before it, from {folder}"
            raise NonFiniteError(
                f"{error}; nothing of that iteration was kept; {resumes}"
            ) from None
        raise
    return records


def _begin(
    trainer: Trainer, kept: checkpoint.Checkpoints, folder: Path, heldout: Callable[[], dict]
) -> list[dict]:
    """Return the records so far: from the newest checkpoint, which is restored, or that of the start. An EMA begins as the weights."""
    if not (written := checkpoint.checkpoints(folder)):
        return [{**START, **heldout()}]
    records = kept.load_records(written[-1])
    last = records[-1]["iteration"]
    # A longer run would not have measured there; its curve must be the same as without the stop
    if (
        last % trainer.training.monitor.every and last < trainer.training.iterations
    ):  # measured because a shorter run ended there
        records[-1] = {
            name: value for name, value in records[-1].items() if not name.startswith(HELDOUT)
        }
    with trainer.runtime.phase("resume"):
        trainer.restore(partial(kept.load_state, written[-1]), updated=records[-1]["iteration"] > 0)
    return records


class _Due:
    """A callable that tells, on all processes the same, whether a checkpoint is due: by iterations, or by the first process's clock."""

    def __init__(self, trainer: Trainer):
        self.settings, self.processes = trainer.training.checkpoints, trainer.processes
        self.saved()

    def saved(self) -> None:
        self.last = time.monotonic()

    def __call__(self, iteration: int) -> bool:
        if self.settings.minutes is None:
            return iteration % self.settings.every == 0
        # Clocks differ: all follow the first one, or some would wait for a checkpoint that others
        # skip
        return self.processes.gather(time.monotonic() - self.last >= 60 * self.settings.minutes)[0]


class _Drift:
    """A callable that looks at a run's records, on all processes the same, and calls `warn` once for each warning until it is over."""

    def __init__(self, trainer: Trainer, warn: Callable[[int, str], None]):
        self.settings, self.warn, self.warned = trainer.training, warn, dict[str, str]()
        self.updates = trainer.method.num_updates(trainer.sampling.steps)

    def __call__(self, records: list[dict]) -> None:
        """Warn of what the last record shows; DriftError if `training.drift.stop` says so."""
        iteration = records[-1]["iteration"]
        warnings = find_warnings(records, self.settings, self.updates)
        for name in (name for name in warnings if name not in self.warned):
            self.warn(iteration, warnings[name])
        self.warned = warnings
        stopping = [text for name, text in warnings.items() if name != NEVER_STOPS]
        if stopping and self.settings.drift.stop:
            raise DriftError(
                f"iteration {iteration}: {'; '.join(stopping)}; set training.drift.stop: "
                "false to go on from here"
            )


def finish(trainer: Trainer, folder: Path, records: list[dict]) -> None:
    """Write weights and snapshots aside, into `out` in scratch, then FINISHED; only a longer run needs the last checkpoint. Collective."""
    out, runtime, training = folder / "out", trainer.runtime, trainer.training
    if trainer.processes.rank == 0:
        shutil.rmtree(out, ignore_errors=True)
    with trainer.result(), runtime.phase("save"):
        trainer.policy.save(out, DTYPES[training.save_dtype])
    if trainer.processes.rank == 0:
        if training.snapshots:
            runtime.publish(folder / SNAPSHOTS, out / SNAPSHOTS)
        write_whole(folder / checkpoint.FINISHED, json.dumps(records))
        keep = training.checkpoints.finished
        keep = _bytes_of_checkpoint(trainer) < SMALL if keep is None else keep
        for old in checkpoint.checkpoints(folder)[: -1 if keep else None]:
            runtime.discard(old)


def _bytes_of_checkpoint(trainer: Trainer) -> int:
    """Return the size of weights, two moments, and the EMA and the old policy if there are any."""
    # Float32 masters and both moments of AdamW
    copies = 3 + sum(average is not None for average in (trainer.ema, trainer.old))
    return 4 * copies * sum(parameter.numel() for parameter in trainer.parameters)


def bytes_needed(trainer: Trainer, folder: Path) -> float:
    """Return the bytes on disk that the run still takes: its checkpoints, snapshots and weights.

    There is one checkpoint more than `keep` while it is written. The final weights are there twice,
    as the run's own and as DVC's copy.
    """
    training, count = trainer.training, sum(parameter.numel() for parameter in trainer.parameters)
    coming = training.checkpoints.keep + 1 - len(checkpoint.checkpoints(folder))
    kept = DTYPES[training.save_dtype].itemsize * (2 + len(training.snapshots))
    return _bytes_of_checkpoint(trainer) * max(coming, 0) + count * kept


def _line(record: dict) -> str:
    return json.dumps(record) + "\n"


def keep_snapshot(trainer: Trainer, folder: Path, iteration: int) -> None:
    """Save the current weights next to the checkpoints, first under a temporary name; collective."""
    final = snapshot(folder, iteration)
    temporary = final.with_suffix(".tmp")
    with trainer.result(), trainer.runtime.phase("save"):
        trainer.policy.save(temporary, DTYPES[trainer.training.save_dtype])
    if trainer.processes.rank == 0:
        checkpoint.replace(temporary, final)
