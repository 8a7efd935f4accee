"""Stage `evaluate`: samples the test prompts with one run, the base model or published weights, and scores the images."""

from dataclasses import dataclass
from pathlib import Path

from g2rpo_core.common.model_store import LOCK, ModelStore
from g2rpo_core.common.runs import BASE, run_name
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed.checkpoint import forget_finished, still_decide
from g2rpo_core.distributed.machine import REAL, Machine
from g2rpo_core.evaluation.results import SCORES, reported_means
from g2rpo_core.evaluation.run import Evaluation
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.files import existing, write_json
from g2rpo_core.models.policy import SNAPSHOTS, Policy, policy_settings, snapshot
from g2rpo_core.rewards import registry
from stages.common import RunPaths, arguments, commit, declared_code, ends_in_one_line, model_folders, run_paths, sections

SECTIONS = ("numerics", "evaluation", "rewards", "sampling")


@ends_in_one_line
def main(machine: Machine = REAL) -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    read = lambda: sections(args, *SECTIONS)
    paths, settings = run_paths(args.profile, args.study), read()
    evaluation, sampling = settings.evaluation, settings.sampling
    models, embeddings = model_folders(args)
    machine.check_device(ModelStore(models))
    processes, device = machine.join(evaluation.processes)
    name = run_name(args.method, args.seed)
    machine.claim("evaluate", f"{paths.name}/{name}", processes)

    # Read what is evaluated, and find the state of an interrupted evaluation
    weights = find_weights(args.profile, args.method, name, paths, evaluation)
    forget_finished(f"{paths.name}/{name}", paths.runs / name, processes)
    store = EmbeddingStore(embeddings := embeddings / "test")
    with machine.phase("load"):
        scorers = registry.load(evaluation.rewards, models, device, settings.rewards, machine)
    pipeline = ModelStore(models).folder("pipeline")
    decides = lambda now: {"evaluation": now.evaluation, "rewards": now.rewards, "sampling": now.sampling}
    dependencies = [*declared_code("evaluate"), models / LOCK, embeddings, *weights.files]
    folder = machine.scratch("evaluate", f"{paths.name}/{name}", decides(settings), dependencies, processes)
    missing = registry.max_missing(evaluation.rewards, settings.rewards)
    parts = Evaluation(folder, evaluation, weights.checkpoints, store, missing, processes)
    machine.check_room(parts.bytes_left(), f"evaluating {name}", processes)

    # Sample and score what is left
    share = evaluation.trained_share if weights.folder else 1.0
    size = {"height": evaluation.height, "width": evaluation.width}

    def load(kept: int | str) -> Policy:
        trained = snapshot(weights.folder, kept) if weights.folder else None
        with machine.phase("load"):
            policy = Policy.load(pipeline, trained, machine, **policy_settings(sampling, device, **size))
        if share < 1:
            policy.use_base(pipeline)
        return policy

    parts.run(name, load, pipeline, scorers, share)
    if processes.rank > 0:
        return

    # Write the outputs
    table = parts.table().assign(method=args.method, seed=int(args.seed))[SCORES]
    table.to_parquet(folder / "out" / "results.parquet", index=False)
    write_json(paths.reports / "metrics" / f"{name}.json", reported_means(table, evaluation))
    machine.publish(folder / "out", paths.evaluations / name)
    machine.discard(folder)
    commit(weights.stage, args, paths, lambda: still_decide(folder, decides(read()), dependencies))


@dataclass(frozen=True)
class Weights:
    """The weights to evaluate."""

    folder: Path | None
    """Or a file; None for the base."""
    checkpoints: tuple[int | str, ...]
    """Iterations, or `final`."""
    files: tuple[Path, ...]
    """Files and folders whose content decides the weights."""
    stage: str
    """DVC's name of the stage that evaluates them."""


def find_weights(profile: str, method: str, name: str, paths: RunPaths, evaluation: EvaluationSettings) -> Weights:
    """Return the weights of the base, of published weights or of a run; UserError if the stage before has not made them."""
    if method == BASE[0]:
        return Weights(None, ("final",), (), "evaluate_base")
    published = Path("published", profile, method)
    if (published / LOCK).exists():
        place = ModelStore(published, "published").weights(method)
        return Weights(place, ("final",), (published / LOCK,), f"evaluate_published@{method}")
    run = existing(paths.runs / name / "records.parquet").parent
    return Weights(run, evaluation.checkpoints, (run / "transformer", run / "lora", run / SNAPSHOTS), f"evaluate@{name}")


if __name__ == "__main__":
    main()
