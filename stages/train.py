"""Stage `train`: trains one method with one seed and keeps the weights and the records of its iterations."""

import sys
from contextlib import suppress
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from g2rpo_core.common.model_store import LOCK, ModelStore
from g2rpo_core.common.runs import run_name
from g2rpo_core.config import method_of, sampling_of, study_path, training_of
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.termination import STATUS, Terminated, Termination
from g2rpo_core.errors import UserError
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import SNAPSHOTS, Policy
from g2rpo_core.rewards import registry
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.training.drift import history, updates_of
from g2rpo_core.training.loop import train
from g2rpo_core.training.monitor import heldout_means
from g2rpo_core.training.tracking import Tracking
from g2rpo_core.training.trainer import Trainer
from stages.common import RunPaths, arguments, declared_code, ends_in_one_line, run_paths, say, sections, write_json
from stages.launch import adopt, how_to_sample, join_processes, machine

SECTIONS = ("sampling", "rewards", "training", "methods")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    paths, settings = run_paths(args.profile, args.study), sections(args, *SECTIONS)
    if args.method not in settings.methods:
        file = f"{study_path(args.study)}: entries" if args.study else f"profiles/{args.profile}.yaml: methods"
        raise UserError(f"{file}: there is no {args.method!r}, only {', '.join(settings.methods)}")
    method = method_of(settings.methods, args.method)
    training = training_of(settings.training, settings.methods, args.method)
    sampling, monitor = sampling_of(settings.sampling, settings.methods, args.method), training.monitor
    processes, device = join_processes(training.processes)
    checkpoint.claim("train", f"{paths.name}/{run_name(args.method, args.seed)}", processes)
    termination = Termination(training.checkpoints.grace).watch()
    models, embeddings, name = Path("models", args.profile), Path("embeddings", args.profile), run_name(args.method, args.seed)
    policy = Policy.load_to_train(
        ModelStore(models).folder("pipeline"), training.lora, int(args.seed), training.parallel, processes,
        base=method.kl_coef > 0, **how_to_sample(sampling, device),
    )  # fmt: skip
    stores = {part: EmbeddingStore(embeddings / part) for part in ("train", "test")}
    monitored = registry.load(list(dict.fromkeys([*training.rewards, *monitor.rewards])), models, device, settings.rewards)
    missing = registry.max_missing(list(monitored), settings.rewards)
    trained_on = {reward: monitored[reward] for reward in training.rewards}
    trainer = Trainer(policy, method, sampling, training, stores["train"], trained_on, int(args.seed), processes, termination)

    decides = {"seed": args.seed, "sampling": sampling, "rewards": settings.rewards, "training": training, "method": method}
    dependencies = [*declared_code("train"), models / LOCK, embeddings]
    folder = checkpoint.scratch("train", f"{paths.name}/{name}", decides, dependencies, processes)
    first = checkpoint.last_iteration(folder)
    # a checkpoint is weights and two moments, one more than `keep` while it is written; the run's own, and DVC's copy of it
    count = sum(parameter.numel() for parameter in policy.trained_parameters().values())
    coming = training.checkpoints.keep + 1 - len(checkpoint.checkpoints(folder))
    checkpoint.check_room(4 * count * (3 * max(coming, 0) + 2 + len(training.snapshots)), f"training {name}", processes)
    tracking = Tracking(f"{paths.name}/{name}", training.tracking, first) if processes.rank == 0 else None

    def show_group(iteration: int, prompt: str, images: torch.Tensor, scores: torch.Tensor) -> None:
        if tracking and training.tracking.samples_due(iteration):
            tracking.group(iteration, images, dict(zip(trained_on, scores.tolist())), prompt)

    trainer.watch = show_group
    bar = tqdm(total=training.iterations, initial=first, desc=name, unit="iteration", mininterval=2, disable=processes.rank > 0)

    def progress(record: dict) -> None:
        with suppress(OSError):  # of a stderr that nobody reads any more: showing progress never ends a training
            if record["num_forward_evals"]:
                bar.set_postfix(
                    {reward: f"{record[f'reward_{reward}']:.3f}" for reward in trained_on}
                    | {"NFE/s": round(record["num_forward_evals"] / record["seconds"])}
                )
            bar.update(record["iteration"] - bar.n)
        if tracking:
            tracking.record(record, trainer.num_images)
        if (samples := training.tracking.samples) and training.tracking.samples_due(record["iteration"]):
            # by all processes, because sharded weights need them in every call
            how = (samples.prompts, even_sigmas(sampling.steps, sampling.shift), 0, sampling.decode_batch)
            with trainer.result():
                batches = list(generate_images(policy, stores["test"], *how))
            if tracking:
                texts = [prompt.text for part, _ in batches for prompt in part]
                tracking.samples(record["iteration"], torch.cat([images for _, images in batches]), texts)

    def warn(iteration: int, text: str) -> None:
        if processes.rank == 0:
            with suppress(OSError):
                tqdm.write(f"warning: {name}, iteration {iteration}: {text}", file=sys.stderr)
            if tracking:
                tracking.warn(iteration, text)

    try:
        records = train(
            trainer,
            folder,
            lambda: heldout_means(policy, stores["test"], monitored, monitor.prompts, sampling, processes, missing),
            progress,
            warn,
        )
    except Terminated:
        if processes.rank == 0:
            say(
                f"{name}: stopped as asked after iteration {checkpoint.last_iteration(folder)}; the same command resumes from there"
            )
        sys.exit(STATUS)
    finally:
        if tracking:
            tracking.finish()
    with suppress(OSError):
        bar.close()

    run = paths.runs / name
    with trainer.result():
        policy.save(run)
    if processes.rank == 0:
        if training.snapshots:
            checkpoint.publish(folder / SNAPSHOTS, run / SNAPSHOTS)
        write_records(records, run, name, paths, history(records, training, updates_of(method, sampling.steps)))
        if adopt(f"train@{name}", paths):  # otherwise the next start ends at once with what is left in scratch
            checkpoint.discard(folder)


def write_records(records: list[dict], run: Path, name: str, paths: RunPaths, warnings: list[tuple[int, str]]) -> None:
    """Writes the records as a table, the curve of held-out rewards and, outside what DVC hashes, seconds and warnings."""
    table = pd.DataFrame(records)
    seconds = table.pop("seconds")
    table.to_parquet(run / "records.parquet", index=False)
    measured = table[table.filter(like="heldout_").notna().all(axis=1)]
    columns = ["iteration", "num_forward_evals", "num_transitions", *measured.filter(like="heldout_")]
    write_json(paths.reports / "curves" / f"{name}.json", measured[columns].to_dict("records"))
    drifted = {"warnings": [f"iteration {iteration}: {text}" for iteration, text in warnings]} if warnings else {}
    took = {"seconds": dict(zip(table.iteration.tolist(), seconds.round(3)))}
    write_json(paths.timings / f"{name}.json", {**machine(), **drifted, **took})


if __name__ == "__main__":
    main()
