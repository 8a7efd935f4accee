"""Stage `evaluate`: pictures of the test prompts by one run or by the base model, and their scores."""

from pathlib import Path

import pandas as pd
from torchvision.utils import save_image
from tqdm import tqdm

from g2rpo_core import checkpoint, rewards
from g2rpo_core.embeddings import EmbeddingStore
from g2rpo_core.errors import made_by
from g2rpo_core.evaluation import check_missing, evaluate_batch
from g2rpo_core.model_store import LOCK, ModelStore
from g2rpo_core.policy import SNAPSHOTS, snapshot
from g2rpo_core.results import SCORES, picture_folder, reported
from stages.common import BASE, arguments, place, run_name, sections, stage, write_json
from stages.launch import load_policy, processes

SECTIONS = ("evaluation", "rewards", "sampling")


@stage
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    here, settings = place(args.profile, args.study), sections(args, *SECTIONS)
    evaluation, sampling = settings.evaluation, settings.sampling
    world, device = processes(evaluation.processes)
    models, name = Path("models", args.profile), run_name(args.method, args.seed)
    run, checkpoints = None, ("final",)  # of the base, too, which has no others
    if args.method != BASE[0]:
        run = made_by(f"{here.stages}train@{name}", here.runs / name / "records.parquet").parent
        checkpoints = evaluation.checkpoints
    store = EmbeddingStore(Path("embeddings", args.profile, "test"))
    scorers = rewards.load(evaluation.rewards, models, device, settings.rewards)
    inputs = [
        models / LOCK,
        Path("embeddings", args.profile, "test"),
        *([run / "transformer", run / "lora", run / SNAPSHOTS] if run else []),
    ]
    decides = {"evaluation": evaluation, "rewards": settings.rewards, "sampling": sampling}
    folder = checkpoint.scratch("evaluate", f"{here.name}/{name}", decides, inputs)
    parts = range(-(-len(store) // evaluation.batch))
    missing, reasons = rewards.max_missing(evaluation.rewards, settings.rewards), pd.DataFrame()
    kinds = [(one, steps) for one in checkpoints for steps in evaluation.steps]
    file_of = lambda kind, number: folder / "{}-{}-{:05d}.parquet".format(*kind, number)
    todo = {
        kind: [number for number in parts if number % world.size == world.rank and not complete(file_of(kind, number))]
        for kind in kinds
    }
    total = len(kinds) * len(parts)
    bar = tqdm(
        total=total, initial=total - sum(map(len, todo.values())), desc=f"evaluate {name}", unit="batch", disable=world.rank > 0
    )
    for one in checkpoints:
        policy = load_policy(models, evaluation, sampling, device, run=snapshot(run, one) if run else None)
        if run and evaluation.trained_share < 1:
            policy.use_base(ModelStore(models).folder("pipeline"))
        share = evaluation.trained_share if run else 1.0
        for steps in evaluation.steps:
            kind = (one, steps)
            shown = folder / "out" / picture_folder(*kind)
            shown.mkdir(parents=True, exist_ok=True)
            for number in todo[kind]:
                prompts, images, part = evaluate_batch(policy, store, scorers, evaluation, steps, sampling.shift, number, share)
                for prompt, image in zip(prompts, images):
                    save_image(image, shown / f"{prompt.id}.png")
                checkpoint.write_whole(
                    file_of(kind, number), part.assign(checkpoint=str(one), steps=steps).to_parquet(index=False)
                )
                reasons = pd.concat([reasons, part.dropna(subset="reason")])
                stop_at_missing(reasons, len(kinds) * len(store), missing)
                bar.update()
    bar.close()
    world.barrier()
    if world.rank > 0:
        return
    table = pd.concat([pd.read_parquet(file_of(kind, number)) for kind in kinds for number in parts], ignore_index=True)
    stop_at_missing(table.dropna(subset="reason"), len(kinds) * len(store), missing)
    out = folder / "out"
    table = table.assign(method=args.method, seed=int(args.seed))[SCORES]
    table.to_parquet(out / "results.parquet", index=False)
    means = reported(table, evaluation).groupby("reward", sort=False).score.mean()
    write_json(
        here.reports / "metrics" / "evaluate" / f"{name}.json", {reward: float(means[reward]) for reward in evaluation.rewards}
    )
    checkpoint.publish(out, here.evaluations / name)
    checkpoint.discard(folder)


def complete(file: Path) -> bool:
    """Whether a part was made and no score in it is missing: what an interrupted run could not have is asked for again."""
    return file.exists() and pd.read_parquet(file, columns=["reason"]).reason.isna().all()


def stop_at_missing(reasons: pd.DataFrame, total: int, largest: dict[str, float]) -> None:
    """UserError if a reward misses more than its share of `total` scores; reasons: the rows of those that are missing."""
    for reward, rows in reasons.groupby("reward") if len(reasons) else ():
        check_missing(reward, len(rows), total, largest.get(reward, 0.0), rows.reason.iloc[0])


if __name__ == "__main__":
    main()
