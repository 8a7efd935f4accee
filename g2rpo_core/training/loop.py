"""Runs a training that can resume: iterations, measurements between them, and checkpoints."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from g2rpo_core.data.embeddings import DTYPES
from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.launcher import Terminated
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import write_whole
from g2rpo_core.foundation.manifest import find_whole, write_manifest
from g2rpo_core.foundation.runs import TRAINING_RECORDS
from g2rpo_core.models.loading import describe_trained
from g2rpo_core.models.policy import SNAPSHOTS, snapshot
from g2rpo_core.training.drift import NEVER_STOPS, DriftError, find_warnings, history
from g2rpo_core.training.experience import NonFiniteError
from g2rpo_core.training.learning import GAIN, learning_lines
from g2rpo_core.training.metrics import HELDOUT, START, write_records
from g2rpo_core.training.settings import SMALL
from g2rpo_core.training.trainer import Trainer

# In the scratch folder: a line for every iteration as it ends, so that a killed run keeps its curve
CURVE = "records.jsonl"


def train(
    trainer: Trainer,
    folder: Path,
    heldout: Callable[[], dict],
    progress: Callable[[dict], None],
    warn: Callable[[int, str], None] = lambda iteration, text: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """Run all iterations and return their records from 0 on; collective.

    folder: from `checkpoint.scratch`; heldout: called when `training.monitor` says so; progress:
    called with every new record; warn: called with an iteration and a warning (`drift.py`), once
    until that is over; note: with each line of `Trainer.can_learn`, once. DriftError if
    `training.drift.stop` says so. After SIGTERM, writes a checkpoint and raises Terminated; after a
    number that stops the run, also writes one, to reproduce the error from. Final weights and
    records (except seconds) do not depend on stops.
    """
    settings, processes = trainer.training, trainer.processes
    kept = checkpoint.Checkpoints(folder, settings.checkpoints.keep, processes)
    due = _Due(trainer)

    def save() -> None:
        kept.save(records[-1]["iteration"], trainer.state(), records)
        due.saved()

    records, curve = _begin(trainer, kept, folder, heldout), folder / CURVE
    if processes.rank == 0:
        write_whole(curve, "".join(map(_line, records)))
    progress(records[-1])
    look = _Drift(trainer, warn, note)
    try:
        look(records)
        for record in trainer.run(records[-1]):
            kept.publish()
            iteration, last = record["iteration"], record["iteration"] == settings.iterations
            # Held-out images are of the weights that are kept: the average, if there is one
            if iteration % settings.monitor.every == 0 or last:
                with trainer.result():
                    record |= heldout()
            records.append(record)
            if processes.rank == 0:
                with curve.open("a") as file:
                    file.write(_line(record))
            progress(record)
            if iteration in settings.snapshots:
                keep_snapshot(trainer, folder, iteration)
            if due(iteration) or last:
                save()
            look(records)
        kept.finish()
    except (Terminated, NonFiniteError, DriftError) as error:
        # Within an update the previous checkpoint stays: the rest is computed again, bit for bit
        if trainer.weights_unchanged or isinstance(error, DriftError):
            save()
        kept.finish()
        if isinstance(error, NonFiniteError):
            hint = f"the same command resumes before it, from {folder}"
            raise NonFiniteError(f"{error}; nothing of that iteration was kept; {hint}") from None
        raise
    return records


def _begin(
    trainer: Trainer, kept: checkpoint.Checkpoints, folder: Path, heldout: Callable[[], dict]
) -> list[dict]:
    """Return the records so far: restore the newest checkpoint, or measure the start.

    An EMA begins as the weights.
    """
    if not (written := checkpoint.checkpoints(folder)):
        return [{**START, **trainer.start(), **heldout()}]
    records = checkpoint.load_records(written[-1], kept.processes)
    last = records[-1]["iteration"]
    # Measured because a shorter run ended there; the curve must be the same as without that stop
    if last % trainer.training.monitor.every and last < trainer.training.iterations:
        records[-1] = {
            name: value
            for name, value in records[-1].items()
            if not name.startswith((HELDOUT, GAIN))
        }
    load = partial(checkpoint.load_state, written[-1], processes=kept.processes)
    trainer.restore(load, updated=records[-1]["iteration"] > 0)
    return records


class _Due:
    """Tells whether a checkpoint is due, by iterations or by the first process's clock.

    All processes get the same answer.
    """

    def __init__(self, trainer: Trainer):
        self.settings, self.processes = trainer.training.checkpoints, trainer.processes
        self.saved()

    def saved(self) -> None:
        self.last = time.monotonic()

    def __call__(self, iteration: int) -> bool:
        if self.settings.minutes is None:
            return iteration % self.settings.every == 0
        # Clocks differ: with its own, a process would wait for a checkpoint that another skips
        return self.processes.gather(time.monotonic() - self.last >= 60 * self.settings.minutes)[0]


class _Drift:
    """Looks at a run's records and calls `warn` once for each warning until that is over.

    And `note` for each new line on learning. The same on all processes.
    """

    def __init__(
        self, trainer: Trainer, warn: Callable[[int, str], None], note: Callable[[str], None]
    ):
        self.settings, self.warn, self.warned = trainer.training, warn, dict[str, str]()
        self.note, self.noted = note, set[str]()
        self.trained = describe_trained(trainer.sizes)
        self.updates = trainer.method.num_updates(trainer.sampling.steps)

    def __call__(self, records: list[dict]) -> None:
        """Warn of what the last record shows; DriftError if `training.drift.stop` says so."""
        iteration = records[-1]["iteration"]
        for line in (self.trained, *learning_lines(self.settings, records)):
            if line not in self.noted:
                self.noted.add(line)
                self.note(line)
        warnings = find_warnings(records, self.settings, self.updates)
        for name in (name for name in warnings if name not in self.warned):
            self.warn(iteration, warnings[name])
        # Not a set of all so far: a warning that comes back is given again
        self.warned = warnings
        stopping = [text for name, text in warnings.items() if name != NEVER_STOPS]
        if stopping and self.settings.drift.stop:
            raise DriftError(
                f"iteration {iteration}: {'; '.join(stopping)}; set training.drift.stop: "
                "false to go on from here"
            )


def finish(trainer: Trainer, folder: Path, records: list[dict]) -> None:
    """Write weights and snapshots into `out` in scratch, then the manifest FINISHED. Collective.

    The last checkpoint stays: if `out` is damaged until DVC has it, the run goes on from that.
    UserError for a damaged snapshot.
    """
    out, training = folder / "out", trainer.training
    # What a kill left may be of earlier weights
    lost: list[str] = []
    if trainer.processes.rank == 0:
        shutil.rmtree(out, ignore_errors=True)
        kept = [snapshot(folder, iteration) for iteration in training.snapshots]
        lost = [str(path) for path in kept if find_whole(_manifest(path), path) is None]
    if problem := trainer.processes.first(lost[0] if lost else None):
        raise UserError(
            f"{problem}: is damaged, and no checkpoint before it is left: delete {folder}, and the "
            "same command trains the run again"
        )
    with trainer.result():
        trainer.policy.save(out, DTYPES[training.save_dtype])
    if trainer.processes.rank == 0:
        if training.snapshots:
            checkpoint.publish(folder / SNAPSHOTS, out / SNAPSHOTS)
        keep = training.checkpoints.finished
        keep = _bytes_of_checkpoint(trainer) < SMALL if keep is None else keep
        about = {"records": records, "keep": keep}
        write_manifest(folder / checkpoint.FINISHED, out, about=about)
        for old in checkpoint.checkpoints(folder)[:-1]:
            checkpoint.discard(old)


def write_finished(
    trainer: Trainer,
    name: str,
    records: list[dict],
    folder: Path,
    timings: Path,
    about: Mapping[str, object],
) -> None:
    """Write the records of a finished run beside its weights, into `out` in scratch `folder`.

    about: what the file in `timings` says of the run.
    """
    out = folder / "out"
    (out / TRAINING_RECORDS).unlink(missing_ok=True)  # it may be a link to what DVC has
    updates = trainer.method.num_updates(trainer.sampling.steps)
    warnings = history(records, trainer.training, updates)
    write_records(records, name, out, timings, warnings, about, describe_trained(trainer.sizes))


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
    """Save the weights next to the checkpoints, first under a temporary name; collective."""
    final = snapshot(folder, iteration)
    temporary = final.with_suffix(".tmp")
    with trainer.result():
        trainer.policy.save(temporary, DTYPES[trainer.training.save_dtype])
    if trainer.processes.rank == 0:
        checkpoint.replace(temporary, final)
        write_manifest(_manifest(final), final)


def _manifest(snapshot: Path) -> Path:
    """Return the file beside `snapshots` that says that one of them is whole."""
    return snapshot.parent.with_name(f"{SNAPSHOTS}-{snapshot.name}.json")
