"""Stage `evaluate`: samples and scores the test prompts with a run, base or published weights."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed.checkpoint import (
    check_room,
    claim,
    discard,
    forget_finished,
    publish,
    scratch,
    still_decide,
)
from g2rpo_core.distributed.device import check_device
from g2rpo_core.distributed.launcher import join_processes
from g2rpo_core.evaluation.ceiling import write_ceiling
from g2rpo_core.evaluation.results import reported_means
from g2rpo_core.evaluation.run import Evaluation
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.files import existing, write_json
from g2rpo_core.foundation.runs import BASE, TRAINING_RECORDS, drawn_of, evaluation_folder, run_name
from g2rpo_core.hub.model_store import LOCK, ModelStore
from g2rpo_core.models.policy import SNAPSHOTS, Policy, policy_settings, snapshot
from g2rpo_core.rewards import registry
from stages.dvc import commit
from stages.entry import arguments, ends_in_one_line, sections
from stages.paths import RunPaths, model_folders, run_paths
from stages.versions import code_of

SECTIONS = ("numerics", "evaluation", "rewards", "drawn")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed", "study")
    read = lambda: sections(args, *SECTIONS)
    paths, settings = run_paths(args.profile, args.study), read()
    evaluation, (models, embeddings) = settings.evaluation, model_folders(args)
    check_device(ModelStore(models))
    processes, device = join_processes(evaluation.processes)
    name = run_name(args.method, args.seed)
    home = f"{paths.name}/{name}"
    claim("evaluate", home, processes)

    # Read what is evaluated, and find the state of an interrupted evaluation
    weights = find_weights(args.profile, args.method, name, paths, evaluation)
    drawn = drawn_of(args.method, settings.drawn)
    forget_finished(home, paths.runs / name, processes)
    store = EmbeddingStore(embeddings := embeddings / "test")
    scorers = registry.load(evaluation.rewards, models, device, settings.rewards)
    pipeline = ModelStore(models).folder("pipeline")
    decides = lambda now: {
        **code_of("evaluate"),
        **{section: getattr(now, section) for section in ("evaluation", "rewards")},
        "drawn": drawn_of(args.method, now.drawn),
    }
    dependencies = [models / LOCK, embeddings, *weights.files]
    folder = scratch("evaluate", home, decides(settings), dependencies, processes)
    may_lack = registry.max_missing(evaluation.rewards, settings.rewards)
    whole = partial(Evaluation, folder, evaluation, weights.checkpoints, store, may_lack, processes)
    parts = {
        method: whole(evaluation_folder(method, args.seed).relative_to(name)) for method in drawn
    }
    left = sum(each.bytes_left() for each in parts.values())
    check_room(left, f"evaluating {name}", processes)

    # Sample and score what is left, as the run draws; the base as each of the runs does
    share = evaluation.trained_share if weights.folder else 1.0

    def load(how: dict[str, object], kept: int | str) -> Policy:
        trained = snapshot(weights.folder, kept) if weights.folder else None
        policy = Policy.load(pipeline, trained, **policy_settings(how, device, **evaluation.size))
        if share < 1:
            policy.use_base(pipeline)
        return policy

    for method, how in drawn.items():
        parts[method].run(run_name(method, args.seed), partial(load, how), pipeline, scorers, share)
    if processes.rank > 0:
        return

    # Write the outputs
    tables = {method: part.write(method, int(args.seed)) for method, part in parts.items()}
    if weights.folder is None:
        write_ceiling(folder / "out", store.prompts, scorers, evaluation)
    metrics = paths.reports / "metrics" / f"{name}.json"
    write_json(metrics, reported_means(tables[args.method], evaluation))
    publish(folder / "out", paths.evaluations / name)
    discard(folder)
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


def find_weights(
    profile: str, method: str, name: str, paths: RunPaths, evaluation: EvaluationSettings
) -> Weights:
    """Return the weights of the base, of published weights or of a run; UserError if not made."""
    if method == BASE[0]:
        return Weights(None, ("final",), (), "evaluate_base")
    published = Path("published", profile, method)
    if (published / LOCK).exists():
        place = ModelStore(published, "published").weights(method)
        return Weights(place, ("final",), (published / LOCK,), f"evaluate_published@{method}")
    run = existing(paths.runs / name / TRAINING_RECORDS).parent
    return Weights(
        run,
        evaluation.checkpoints,
        (run / "transformer", run / "lora", run / SNAPSHOTS),
        f"evaluate@{name}",
    )


if __name__ == "__main__":
    main()
