"""Stage `train`: trains a method with a seed; keeps the weights and the iterations' records."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from g2rpo_core.architectures.table import check_trainable
from g2rpo_core.config import Profile
from g2rpo_core.config.costs import compute_of
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed.checkpoint import (
    check_room,
    claim,
    find_finished,
    last_iteration,
    publish,
    release,
    scratch,
    still_decide,
)
from g2rpo_core.distributed.device import check_device
from g2rpo_core.distributed.launcher import STATUS, Terminated, Termination, join_processes
from g2rpo_core.foundation.runs import run_name, start_of
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.models.policy import Policy, policy_settings
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.scoring import note_cut
from g2rpo_core.tracking.display import Display
from g2rpo_core.training.loop import bytes_needed, finish, train, write_finished
from g2rpo_core.training.metrics import HeldOut
from g2rpo_core.training.trainer import Trainer
from stages.dvc import commit
from stages.entry import arguments, ends_in_one_line, entry_of, say, sections
from stages.paths import model_folders, run_paths, training_inputs
from stages.versions import code_of

SECTIONS = ("numerics", "sampling", "rewards", "training", "methods")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    read = lambda: sections(args, *SECTIONS)
    paths, settings = run_paths(args.profile, args.study), read()
    run, name = entry_of(args, settings), run_name(args.method, args.seed)
    training, grace = run.training, run.training.checkpoints.grace
    processes, device = join_processes(training.processes, training.prompts_per_iteration, grace)
    processes.share(training.prompts_per_iteration)  # refused before anything loads
    models, embeddings = model_folders(args)
    check_device(store := ModelStore(models))
    started = ModelStore(start_of(Path("published", args.profile), args.method), "published")
    check_trainable(store.source("pipeline"), training.start and started.source(training.start))
    start = None if training.start is None else started.weights(training.start)
    claim("train", f"{paths.name}/{name}", processes)
    termination = Termination(grace).watch()

    # Load what is trained, on which prompts and by which rewards
    policy = Policy.load_to_train(
        store.folder("pipeline"),
        training.lora,
        int(args.seed),
        training.parallel,
        processes,
        run.method.objective.needs_base,
        start,
        **policy_settings(run.sampling.drawn, device, **run.sampling.size),
    )
    prompts, held_out = (EmbeddingStore(embeddings / part) for part in ("train", "test"))
    prompts.load_encoders(store.folder("pipeline"), device)
    # Each once, whether trained on, measured on held-out images or both: it may take gigabytes
    asked = dict.fromkeys([*training.rewards, *training.monitor.rewards])
    monitored = registry.load(asked, models, device, settings.rewards)
    rewards = {reward: monitored[reward] for reward in training.rewards}
    if processes.rank == 0:  # every process has all prompts
        measured = held_out.prompts[: training.monitor.prompts]
        note_cut(monitored, (prompt.text for prompt in (*prompts.prompts, *measured)))
    trainer = Trainer(run, policy, prompts, rewards, int(args.seed), processes, termination)

    # Train from the last checkpoint on, unless DVC alone has not taken the finished run
    dependencies, end = training_inputs(args, training.start), training.end
    folder = scratch(
        "train", f"{paths.name}/{name}", decides(settings, args), dependencies, processes, end
    )
    check_room(bytes_needed(trainer, folder), f"training {name}", processes)
    missing = registry.max_missing(list(monitored), settings.rewards)
    how = (run.sampling, processes, missing, training.reward_weights, folder)
    measure = HeldOut(policy, held_out, monitored, training.monitor.prompts, *how)
    display = Display(f"{paths.name}/{name}", trainer, held_out, last_iteration(folder))
    records = find_finished(folder, processes)
    if records is None:
        records = train_to_end(trainer, folder, name, measure, display)

    # Publish the run; it is kept here until DVC knows it, so that the next start ends at once
    if processes.rank == 0:
        about = {"profile": args.profile, "compute": compute_of(run)}
        write_finished(trainer, name, records, folder, paths.timings, about)
        publish(folder / "out", paths.runs / name)
        unchanged = lambda: still_decide(folder, decides(read(), args), dependencies)
        if commit(f"train@{name}", args, paths, unchanged):
            release(folder)


def train_to_end(
    trainer: Trainer, folder: Path, name: str, measure: Callable[[], dict], display: Display
) -> list[dict]:
    """Train from the last checkpoint on, and write the weights aside; return the records.

    Exit if asked to stop.
    """
    trainer.watch = display.group
    try:
        records = train(trainer, folder, measure, display.record, display.warn, display.note)
    except Terminated:
        at = last_iteration(folder)
        line = f"{name}: stopped as asked after iteration {at}; the same command resumes from there"
        if trainer.processes.rank == 0:
            say(line)
        sys.exit(STATUS)
    finally:
        display.finish()
    finish(trainer, folder, records)
    return records


def decides(settings: SimpleNamespace | Profile, args: SimpleNamespace) -> dict[str, object]:
    """Return what decides a run, for its scratch folder."""
    run, rewards = settings.run(args.method), settings.rewards
    return {
        "seed": args.seed,
        "sampling": run.sampling,
        "rewards": rewards,
        "training": run.training,
        "method": run.method,
        **code_of("train"),
    }


if __name__ == "__main__":
    main()
