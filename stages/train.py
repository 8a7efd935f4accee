"""Stage `train`: trains one method with one seed and keeps the weights and the records of its iterations."""

from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from g2rpo_core import rewards
from g2rpo_core.config import method_of, sampling_of, training_of
from g2rpo_core.embeddings import DTYPES, EmbeddingStore
from g2rpo_core.errors import UserError
from g2rpo_core.evaluation import heldout_means
from g2rpo_core.model_store import ModelStore
from g2rpo_core.policy import Policy
from g2rpo_core.trainer import Trainer
from stages.common import REPORTS, arguments, run_name, sections, stage, write_json

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

    def heldout() -> dict[str, float]:
        return heldout_means(policy, stores["test"], monitored, monitor.prompts, sampling)

    records = [{"iteration": 0, "evaluations": 0, "trained": 0, "seconds": 0.0, **heldout()}]
    bar = tqdm(total=training.iterations, desc=run_name(args.method, args.seed), unit="iteration", mininterval=2)
    for record in Trainer(policy, method, sampling, training, stores["train"], trained, int(args.seed)).run():
        if record["iteration"] % monitor.every == 0 or record["iteration"] == training.iterations:
            record |= heldout()
        records.append(record)
        bar.set_postfix(
            {name: f"{record[f'reward_{name}']:.3f}" for name in trained}
            | {"evaluations/s": round(record["evaluations"] / record["seconds"])}
        )
        bar.update()
    bar.close()

    run = Path("runs", args.profile, run_name(args.method, args.seed))
    policy.save(run)
    table = pd.DataFrame(records)
    table.to_parquet(run / "records.parquet", index=False)
    measured = table[table.filter(like="heldout_").notna().all(axis=1)]
    columns = ["iteration", "evaluations", "trained", "seconds", *measured.filter(like="heldout_")]
    write_json(REPORTS / "curves" / f"{run_name(args.method, args.seed)}.json", measured[columns].to_dict("records"))
    last = records[-1]
    write_json(
        REPORTS / "metrics" / "train" / f"{run_name(args.method, args.seed)}.json",
        {key: last[key] for key in last if key in columns} | {"max_ratio_drift": float(table.ratio_drift.max())},
    )


if __name__ == "__main__":
    main()
