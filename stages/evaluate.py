"""Stage `evaluate`: pictures of the test prompts by one run or by the base model, and their scores."""

from pathlib import Path

import pandas as pd
from torchvision.utils import save_image
from tqdm import tqdm

from g2rpo_core import checkpoint, rewards
from g2rpo_core.embeddings import EmbeddingStore
from g2rpo_core.errors import made_by
from g2rpo_core.evaluation import check_missing, pictures, score
from g2rpo_core.model_store import LOCK
from stages.common import BASE, REPORTS, arguments, run_name, sections, stage, write_json
from stages.launch import load_policy, processes

SECTIONS = ("evaluation", "rewards", "sampling")


@stage
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed")
    settings = sections(args.profile, *SECTIONS)
    evaluation, sampling = settings.evaluation, settings.sampling
    world, device = processes(evaluation.processes)
    models, name = Path("models", args.profile), run_name(args.method, args.seed)
    trained = None
    if args.method != BASE[0]:
        trained = made_by(f"train@{name}", Path("runs", args.profile, name, "records.parquet")).parent
    policy = load_policy(models, evaluation, sampling, device, run=trained)
    store = EmbeddingStore(Path("embeddings", args.profile, "test"))
    scorers = rewards.load(evaluation.rewards, models, device, settings.rewards)
    inputs = [
        models / LOCK,
        Path("embeddings", args.profile, "test"),
        *([trained / "transformer", trained / "lora"] if trained else []),
    ]
    folder = checkpoint.scratch(
        "evaluate",
        f"{args.profile}/{name}",
        {"evaluation": evaluation, "rewards": settings.rewards, "sampling": sampling},
        inputs,
    )
    files = [folder / f"part-{number:05d}.parquet" for number in range(-(-len(store) // evaluation.batch))]
    mine = [number for number in range(world.rank, len(files), world.size) if not complete(files[number])]
    out = folder / "out"
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    missing, reasons = rewards.max_missing(evaluation.rewards, settings.rewards), pd.DataFrame()
    made = pictures(policy, store, len(store), evaluation.steps, sampling.shift, evaluation.seed, evaluation.batch, mine)
    bar = tqdm(total=len(files), initial=len(files) - len(mine), desc=f"evaluate {name}", unit="batch", disable=world.rank > 0)
    for number, (prompts, images) in zip(mine, made):
        for prompt, image in zip(prompts, images):
            save_image(image, out / "pictures" / f"{prompt.id}.png")
        part = score(scorers, prompts, images)
        checkpoint.write_whole(files[number], part.to_parquet(index=False))
        reasons = pd.concat([reasons, part.dropna(subset="reason")])
        stop_at_missing(reasons, len(store), missing)
        bar.update()
    bar.close()
    world.barrier()
    if world.rank > 0:
        return
    table = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    stop_at_missing(table.dropna(subset="reason"), len(store), missing)
    for column, value in (
        ("steps", evaluation.steps),
        ("checkpoint", "final"),
        ("seed", int(args.seed)),
        ("method", args.method),
    ):
        table.insert(0, column, value)
    table.to_parquet(out / "results.parquet", index=False)
    means = table.groupby("reward", sort=False).score.mean()
    write_json(REPORTS / "metrics" / "evaluate" / f"{name}.json", {reward: float(means[reward]) for reward in evaluation.rewards})
    checkpoint.publish(out, Path("evaluations", args.profile, name))
    checkpoint.discard(folder)


def complete(file: Path) -> bool:
    """Whether a part was made and no score in it is missing: what an interrupted run could not have is asked for again."""
    return file.exists() and pd.read_parquet(file, columns=["reason"]).reason.isna().all()


def stop_at_missing(reasons: pd.DataFrame, total: int, largest: dict[str, float]) -> None:
    """UserError if a reward misses more than its share of `total` scores; reasons: the rows of those that are missing."""
    for reward, rows in reasons.groupby("reward") if len(reasons) else ():
        check_missing(reward, len(rows), total, largest[reward], rows.reason.iloc[0])


if __name__ == "__main__":
    main()
