"""Stage `train`: trains one method with one seed and keeps the weights and the records of its iterations."""

import signal
import sys
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from g2rpo_core import rewards
from g2rpo_core.checkpoint import SCRATCH, Checkpoints, Interruptible, Terminated, identity
from g2rpo_core.config import method_of, sampling_of, training_of
from g2rpo_core.embeddings import DTYPES, EmbeddingStore
from g2rpo_core.errors import UserError
from g2rpo_core.evaluation import heldout_means
from g2rpo_core.model_store import LOCK, ModelStore
from g2rpo_core.policy import Policy
from g2rpo_core.trainer import NonFiniteError, Trainer
from stages.common import REPORTS, arguments, fresh, run_name, sections, stage, write_json

SECTIONS = ("sampling", "training", "methods")


@stage
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed")
    settings = sections(args.profile, *SECTIONS)
    if args.method not in settings.methods:
        raise UserError(f"profiles/{args.profile}.yaml: methods: there is no {args.method!r}, only {', '.join(settings.methods)}")
    method = method_of(settings.methods, args.method)
    training = training_of(settings.training, settings.methods, args.method)
    sampling, monitor = sampling_of(settings.sampling, settings.methods, args.method), training.monitor
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = Path("models", args.profile)
    policy = Policy.load(
        ModelStore(models).folder("pipeline"), adapter=training.adapter,
        height=sampling.height, width=sampling.width, guidance=sampling.guidance, dtype=DTYPES[sampling.dtype], device=device,
    )  # fmt: skip
    stores = {name: EmbeddingStore(Path("embeddings", args.profile, name)) for name in ("train", "test")}
    monitored = rewards.load(list(dict.fromkeys([*training.rewards, *monitor.rewards])), models, device)
    trained = {name: monitored[name] for name in training.rewards}

    interruptible = Interruptible()
    trainer = Trainer(policy, method, sampling, training, stores["train"], trained, int(args.seed), interruptible)
    name = run_name(args.method, args.seed)
    parts = {
        "method": method.model_dump(mode="json"),
        "sampling": sampling.model_dump(mode="json"),
        "training": training.model_dump(mode="json", exclude={"checkpoint"}),
        "seed": int(args.seed),
    }
    inputs = {"models": models / LOCK, "prompts": Path("embeddings", args.profile)}
    checkpoints = Checkpoints(SCRATCH / "train" / args.profile / name, identity(parts, inputs), training.checkpoint.keep)
    records = [{"iteration": 0, "evaluations": 0, "trained": 0, "seconds": 0.0}]
    if saved := checkpoints.load():
        trainer.load_state(saved["trainer"])
        records = saved["records"]
        print(f"{name} goes on after iteration {records[-1]['iteration']}")

    def measure(record: dict) -> None:
        """Held-out rewards, where they are due and not there yet."""
        due = record["iteration"] % monitor.every == 0 or record["iteration"] == training.iterations
        if due and not any(key.startswith("heldout_") for key in record):
            with interruptible():
                record |= heldout_means(policy, stores["test"], monitored, monitor.prompts, sampling)

    def save() -> Path:
        return checkpoints.save(records[-1]["iteration"], {"trainer": trainer.state(), "records": records})

    bar = tqdm(total=training.iterations, initial=records[-1]["iteration"], desc=name, unit="iteration", mininterval=2)
    try:
        measure(records[-1])
        for record in trainer.run():
            records.append(record)
            measure(record)
            bar.set_postfix(
                {key: f"{record[f'reward_{key}']:.3f}" for key in trained}
                | {"evaluations/s": round(record["evaluations"] / record["seconds"])}
            )
            bar.update()
            if record["iteration"] % training.checkpoint.every == 0:
                save()
    except Terminated:
        print(f"\nended by SIGTERM after iteration {records[-1]['iteration']}; {save()} has all of it", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except NonFiniteError as error:
        raise UserError(f"{error} ({save()} is the state before it: the same command repeats it)") from None
    bar.close()

    run = fresh(Path("runs", args.profile, name))
    policy.save(run)
    table = pd.DataFrame(records)
    table.to_parquet(run / "records.parquet", index=False)
    measured = table[table.filter(like="heldout_").notna().all(axis=1)]
    columns = ["iteration", "evaluations", "trained", "seconds", *measured.filter(like="heldout_")]
    write_json(REPORTS / "curves" / f"{name}.json", measured[columns].to_dict("records"))
    last = records[-1]
    write_json(
        REPORTS / "metrics" / "train" / f"{name}.json",
        {key: last[key] for key in last if key in columns} | {"max_ratio_drift": float(table.ratio_drift.max())},
    )
    checkpoints.remove()


if __name__ == "__main__":
    main()
