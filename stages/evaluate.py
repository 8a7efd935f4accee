"""Stage `evaluate`: samples the test prompts with one run, the base model or published weights, and scores the images."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from torchvision.utils import save_image
from tqdm import tqdm

from g2rpo_core.bases.table import published_schedule
from g2rpo_core.common.model_store import LOCK, ModelStore
from g2rpo_core.common.runs import BASE, run_name
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed import checkpoint
from g2rpo_core.errors import made_by
from g2rpo_core.evaluation.evaluate import evaluate_batch
from g2rpo_core.evaluation.results import SCORES, image_folder, reported
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.files import read_table, remade_by
from g2rpo_core.models.policy import SNAPSHOTS, Policy, snapshot
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.scoring import check_missing
from stages.common import RunPaths, arguments, declared_code, ends_in_one_line, run_paths, sections, write_json
from stages.launch import adopt, how_to_sample, join_processes

SECTIONS = ("evaluation", "rewards", "sampling")
PART = [column for column in SCORES if column not in ("method", "seed")]  # of a batch's scores


@dataclass(frozen=True)
class Weights:
    """The weights to evaluate.

    folder: theirs, None for the base; files: those that decide them; stage: the one that evaluates them.
    """

    folder: Path | None
    checkpoints: tuple[int | str, ...]
    files: tuple[Path, ...]
    made_by: str
    stage: str


def weights_of(profile: str, method: str, name: str, paths: RunPaths, evaluation: EvaluationSettings) -> Weights:
    """The weights of the base, of published weights or of a run; UserError if the stage before has not made them."""
    if method == BASE[0]:
        return Weights(None, ("final",), (), "models", "evaluate_base")
    published = Path("published", profile, method)
    if (published / LOCK).exists():
        folder = ModelStore(published, "published").folder(method)
        return Weights(folder, ("final",), (published / LOCK,), "published", f"evaluate_published@{method}")
    stage = f"train@{name}"
    run = made_by(stage, paths.runs / name / "records.parquet", paths.repro).parent
    return Weights(run, evaluation.checkpoints, (run / "transformer", run / "lora", run / SNAPSHOTS), stage, f"evaluate@{name}")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    paths, settings = run_paths(args.profile, args.study), sections(args, *SECTIONS)
    evaluation, sampling = settings.evaluation, settings.sampling
    processes, device = join_processes(evaluation.processes)
    models, name = Path("models", args.profile), run_name(args.method, args.seed)
    checkpoint.claim("evaluate", f"{paths.name}/{name}", processes)
    weights = weights_of(args.profile, args.method, name, paths, evaluation)
    store = EmbeddingStore(Path("embeddings", args.profile, "test"))
    scorers = registry.load(evaluation.rewards, models, device, settings.rewards)
    pipeline = ModelStore(models).folder("pipeline")
    dependencies = [
        *declared_code("evaluate"),
        models / LOCK,
        Path("embeddings", args.profile, "test"),
        *weights.files,
    ]
    decides = {"evaluation": evaluation, "rewards": settings.rewards, "sampling": sampling}
    folder = checkpoint.scratch("evaluate", f"{paths.name}/{name}", decides, dependencies, processes)
    parts = range(-(-len(store) // evaluation.batch))
    missing, reasons = registry.max_missing(evaluation.rewards, settings.rewards), pd.DataFrame()
    variants = [(kept, steps) for kept in weights.checkpoints for steps in evaluation.steps]
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
    for kept in weights.checkpoints:
        size = {"height": evaluation.height, "width": evaluation.width}
        trained = snapshot(weights.folder, kept) if weights.folder else None
        policy = Policy.load(
            pipeline, trained, remade_by(weights.made_by, paths.repro), **how_to_sample(sampling, device, **size)
        )
        if trained and evaluation.trained_share < 1:
            policy.use_base(pipeline)
        share = evaluation.trained_share if trained else 1.0
        schedule = published_schedule(policy.architecture, pipeline, policy.image_tokens)
        for steps in evaluation.steps:
            variant = (kept, steps)
            shown = folder / "out" / image_folder(*variant)
            shown.mkdir(parents=True, exist_ok=True)
            for number in todo[variant]:
                prompts, images, part = evaluate_batch(policy, store, scorers, evaluation, schedule.sigmas(steps), number, share)
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
    adopt(weights.stage, paths)


def complete(file: Path) -> bool:
    """Whether a part was made and lacks no score: scores that an interrupted run could not get are requested again."""
    return file.exists() and bool(read_table(file, ["reason"], again_of(file)).reason.isna().all())


def again_of(file: Path) -> str:
    """What to do about a damaged part of an interrupted evaluation."""
    return f"delete {file} and run the same command again"


def stop_at_missing(reasons: pd.DataFrame, total: int, largest: dict[str, float]) -> None:
    """Raises UserError if a reward lacks more than its share of `total` scores; reasons: the rows of missing scores."""
    for reward, rows in reasons.groupby("reward") if len(reasons) else ():
        check_missing(reward, len(rows), total, largest.get(reward, 0.0), rows.reason.iloc[0])


if __name__ == "__main__":
    main()
