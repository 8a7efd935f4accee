"""Stage `evaluate`: images of the test prompts by one run, by the base model or by published weights, and their scores."""

from pathlib import Path

import pandas as pd
from torchvision.utils import save_image
from tqdm import tqdm

from g2rpo_core.common.model_store import LOCK, ModelStore
from g2rpo_core.common.runs import BASE, run_name
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed import checkpoint
from g2rpo_core.errors import made_by
from g2rpo_core.evaluation.evaluate import evaluate_batch
from g2rpo_core.evaluation.results import SCORES, image_folder, reported
from g2rpo_core.files import read_table, remade_by
from g2rpo_core.models.flux import SNAPSHOTS, Policy, snapshot
from g2rpo_core.models.generate import published_shift
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.scoring import check_missing
from stages.common import arguments, declared_code, ends_in_one_line, run_paths, sections, write_json
from stages.launch import adopt, how_to_sample, join_processes

SECTIONS = ("evaluation", "rewards", "sampling")
PART = [column for column in SCORES if column not in ("method", "seed")]  # of a batch's scores


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    paths, settings = run_paths(args.profile, args.study), sections(args, *SECTIONS)
    evaluation, sampling = settings.evaluation, settings.sampling
    processes, device = join_processes(evaluation.processes)
    models, name = Path("models", args.profile), run_name(args.method, args.seed)
    checkpoint.claim("evaluate", f"{paths.name}/{name}", processes)
    run, checkpoints = None, ("final",)  # of the base and of published weights, too, which have no others
    published = Path("published", args.profile, args.method)
    if (published / LOCK).exists():
        run = ModelStore(published, "published").folder(args.method)
    elif args.method != BASE[0]:
        run = made_by(f"train@{name}", paths.runs / name / "records.parquet", paths.repro).parent
        checkpoints = evaluation.checkpoints
    store = EmbeddingStore(Path("embeddings", args.profile, "test"))
    scorers = registry.load(evaluation.rewards, models, device, settings.rewards)
    pipeline = ModelStore(models).folder("pipeline")
    dependencies = [
        *declared_code("evaluate"),
        models / LOCK,
        Path("embeddings", args.profile, "test"),
        *(
            [published / LOCK]
            if (published / LOCK).exists()
            else [run / "transformer", run / "lora", run / SNAPSHOTS]
            if run
            else []
        ),
    ]
    decides = {"evaluation": evaluation, "rewards": settings.rewards, "sampling": sampling}
    folder = checkpoint.scratch("evaluate", f"{paths.name}/{name}", decides, dependencies, processes)
    parts = range(-(-len(store) // evaluation.batch))
    missing, reasons = registry.max_missing(evaluation.rewards, settings.rewards), pd.DataFrame()
    variants = [(kept, steps) for kept in checkpoints for steps in evaluation.steps]
    file_of = lambda variant, number: folder / "{}-{}-{:05d}.parquet".format(*variant, number)
    todo = {
        variant: [
            number for number in parts if number % processes.size == processes.rank and not complete(file_of(variant, number))
        ]
        for variant in variants
    }
    images = sum(map(len, todo.values())) * evaluation.batch * processes.size
    checkpoint.check_room(3 * evaluation.height * evaluation.width * images, f"evaluating {name}", processes)
    total = len(variants) * len(parts)
    bar = tqdm(
        total=total,
        initial=total - sum(map(len, todo.values())),
        desc=f"evaluate {name}",
        unit="batch",
        disable=processes.rank > 0,
    )
    for kept in checkpoints:
        size = {"height": evaluation.height, "width": evaluation.width}
        weights = snapshot(run, kept) if run else None
        policy = Policy.load(
            pipeline, weights, remade_by(f"train@{name}", paths.repro), **how_to_sample(sampling, device, **size)
        )
        if run and evaluation.trained_share < 1:
            policy.use_base(pipeline)
        share = evaluation.trained_share if run else 1.0
        shift = published_shift(pipeline, policy.image_tokens)
        for steps in evaluation.steps:
            variant = (kept, steps)
            shown = folder / "out" / image_folder(*variant)
            shown.mkdir(parents=True, exist_ok=True)
            for number in todo[variant]:
                prompts, images, part = evaluate_batch(policy, store, scorers, evaluation, steps, shift, number, share)
                for prompt, image in zip(prompts, images):
                    save_image(image, shown / f"{prompt.id}.png")
                checkpoint.write_whole(
                    file_of(variant, number), part.assign(checkpoint=str(kept), steps=steps).to_parquet(index=False)
                )
                reasons = pd.concat([reasons, part.dropna(subset="reason")])
                stop_at_missing(reasons, len(variants) * len(store), missing)
                bar.update()
    bar.close()
    processes.barrier()
    if processes.rank > 0:
        return
    files = [file_of(variant, number) for variant in variants for number in parts]
    table = pd.concat([read_table(file, PART, again_of(file)) for file in files], ignore_index=True)
    stop_at_missing(table.dropna(subset="reason"), len(variants) * len(store), missing)
    out = folder / "out"
    table = table.assign(method=args.method, seed=int(args.seed))[SCORES]
    table.to_parquet(out / "results.parquet", index=False)
    means = reported(table, evaluation).groupby("reward", sort=False).score.mean()
    write_json(paths.reports / "metrics" / f"{name}.json", {reward: float(means[reward]) for reward in evaluation.rewards})
    checkpoint.publish(out, paths.evaluations / name)
    checkpoint.discard(folder)
    stage = f"evaluate_published@{args.method}" if (published / LOCK).exists() else f"evaluate@{name}"
    adopt("evaluate_base" if args.method == BASE[0] else stage, paths)


def complete(file: Path) -> bool:
    """Whether a part was made and no score in it is missing: what an interrupted run could not have is asked for again."""
    return file.exists() and bool(read_table(file, ["reason"], again_of(file)).reason.isna().all())


def again_of(file: Path) -> str:
    """What to do about a damaged part of an interrupted evaluation."""
    return f"delete {file} and run the same command again"


def stop_at_missing(reasons: pd.DataFrame, total: int, largest: dict[str, float]) -> None:
    """UserError if a reward misses more than its share of `total` scores; reasons: the rows of those that are missing."""
    for reward, rows in reasons.groupby("reward") if len(reasons) else ():
        check_missing(reward, len(rows), total, largest.get(reward, 0.0), rows.reason.iloc[0])


if __name__ == "__main__":
    main()
