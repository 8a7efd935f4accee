"""Stage `train`: trains one method with one seed and keeps the weights and the records of its iterations."""

import sys
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from g2rpo_core import checkpoint, rewards
from g2rpo_core.config import method_of, sampling_of, study_path, training_of
from g2rpo_core.embeddings import EmbeddingStore
from g2rpo_core.errors import UserError
from g2rpo_core.evaluation import heldout_means
from g2rpo_core.model_store import LOCK
from g2rpo_core.policy import SNAPSHOTS
from g2rpo_core.termination import STATUS, Terminated, Termination
from g2rpo_core.trainer import Trainer
from g2rpo_core.training import train
from stages.common import Place, arguments, place, run_name, sections, stage, write_json
from stages.launch import load_policy, processes

SECTIONS = ("sampling", "rewards", "training", "methods")


@stage
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    here, settings = place(args.profile, args.study), sections(args, *SECTIONS)
    if args.method not in settings.methods:
        file = f"{study_path(args.study)}: entries" if args.study else f"profiles/{args.profile}.yaml: methods"
        raise UserError(f"{file}: there is no {args.method!r}, only {', '.join(settings.methods)}")
    method = method_of(settings.methods, args.method)
    training = training_of(settings.training, settings.methods, args.method)
    sampling, monitor = sampling_of(settings.sampling, settings.methods, args.method), training.monitor
    world, device = processes(training.processes)
    termination = Termination().watch()
    models, embeddings, name = Path("models", args.profile), Path("embeddings", args.profile), run_name(args.method, args.seed)
    policy = load_policy(models, sampling, sampling, device, adapter=training.adapter, seed=int(args.seed))
    policy.parallelize(training.parallel, world, keep_base=method.kl > 0)
    stores = {part: EmbeddingStore(embeddings / part) for part in ("train", "test")}
    monitored = rewards.load(list(dict.fromkeys([*training.rewards, *monitor.rewards])), models, device, settings.rewards)
    missing = rewards.max_missing(list(monitored), settings.rewards)
    trained = {reward: monitored[reward] for reward in training.rewards}
    trainer = Trainer(policy, method, sampling, training, stores["train"], trained, int(args.seed), world, termination)

    decides = {"seed": args.seed, "sampling": sampling, "rewards": settings.rewards, "training": training, "method": method}
    folder = checkpoint.scratch("train", f"{here.name}/{name}", decides, [models / LOCK, embeddings], world)
    bar = tqdm(total=training.iterations, desc=name, unit="iteration", mininterval=2, disable=world.rank > 0)

    def progress(record: dict) -> None:
        if record["evaluations"]:
            bar.set_postfix(
                {reward: f"{record[f'reward_{reward}']:.3f}" for reward in trained}
                | {"evaluations/s": round(record["evaluations"] / record["seconds"])}
            )
        bar.update(record["iteration"] - bar.n)

    try:
        records = train(
            trainer,
            folder,
            lambda: heldout_means(policy, stores["test"], monitored, monitor.prompts, sampling, world, missing),
            progress,
        )
    except Terminated:
        sys.exit(STATUS)
    bar.close()

    run = here.runs / name
    policy.save(run)
    if world.rank == 0:
        if training.snapshots:
            checkpoint.publish(folder / SNAPSHOTS, run / SNAPSHOTS)
        write_records(records, run, name, here)
        checkpoint.discard(folder)


def write_records(records: list[dict], run: Path, name: str, here: Place) -> None:
    """The records as a table, the curve of what was held out, and the last measurements."""
    table = pd.DataFrame(records)
    table.to_parquet(run / "records.parquet", index=False)
    measured = table[table.filter(like="heldout_").notna().all(axis=1)]
    columns = ["iteration", "evaluations", "trained", "seconds", *measured.filter(like="heldout_")]
    write_json(here.reports / "curves" / f"{name}.json", measured[columns].to_dict("records"))
    last = records[-1]
    write_json(
        here.reports / "metrics" / "train" / f"{name}.json",
        {key: last[key] for key in last if key in columns} | {"max_ratio_drift": float(table.ratio_drift.max())},
    )


if __name__ == "__main__":
    main()
