"""Everything that the report shows, from the files that the stages before it made."""

import json
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from g2rpo_core.algorithm.methods import LABELS as METHOD_LABELS
from g2rpo_core.algorithm.methods import Method
from g2rpo_core.common.dvc_lock import read_lock
from g2rpo_core.common.runs import BASE, run_name
from g2rpo_core.common.seeding import seed_of
from g2rpo_core.config.comparisons import Comparison
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.errors import UserError
from g2rpo_core.evaluation.image_stats import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.results import chosen, image_folder, reported
from g2rpo_core.files import complaint, remade_by
from g2rpo_core.reporting import charts
from g2rpo_core.reporting.paper import paper_rows
from g2rpo_core.reporting.pictures import picture
from g2rpo_core.reporting.sources import Sources, check_whole, model_lines, prompt_counts, records_of, scores_of
from g2rpo_core.reporting.tables import (
    Gain,
    Row,
    Run,
    cells,
    gains,
    main_table,
    method_pairs,
    missing_table,
    most_changed,
    named_beforehand,
    standings,
    style_table,
    win_rates,
)
from g2rpo_core.reporting.verdict import summary, verdict
from g2rpo_core.rewards.registry import labels as reward_labels
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.drift import history, updates_of
from g2rpo_core.training.settings import TrainingSettings

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "dvc", "pyarrow", "numpy")
IMAGES, FIRST, WORST = 12, 6, 6  # prompts drawn for the page, those of them on its first screen, and those that fell most
SHOWN = 4  # methods on the first screen beside the base
NOTICE = {
    "built": "Profile {} is synthetic: images of coloured shapes by small models that were trained on this machine. Nothing on this page is a result of the paper.",
    "hub": "Profile {}: published weights, trained and evaluated as stated below.",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """An entry of the profile's `methods` with its settings resolved. method: the published method that it starts from."""

    label: str | None
    method: str
    settings: Method
    sampling: SamplingSettings
    training: TrainingSettings


@dataclass(frozen=True)
class Published:
    """Published weights: the method whose row in the paper is theirs. How they were trained is not known here."""

    method: str
    sampling: None = None
    training: None = None


def build_context(
    profile: str,
    sources: Sources,
    settings: SimpleNamespace,
    entries: Mapping[str, Entry],
    runs: list[Run],
    published: Sequence[str] = (),
    comparisons: Sequence[Comparison] = (),
) -> dict:
    """Everything that the templates show.

    settings: the sections of the profile; entries: the entries of its `methods` by name; runs: (entry, seed) in the report's
    order; published: names from the section `published`, which appear in tables on evaluation but not in tables on training;
    comparisons: those that a study named before its runs.
    """
    others = [(name, 0) for name in published]
    evaluated = {run: sources.evaluations / run_name(*run) for run in [BASE, *runs, *others]}
    everything = pd.concat(
        [scores_of(run, folder, sources.repro, published) for run, folder in evaluated.items()], ignore_index=True
    )
    results = reported(everything, settings.evaluation)
    check_whole(everything, evaluated, settings, sources.repro, published)
    records = {run: records_of(run, sources.runs / run_name(*run), sources.repro) for run in runs}
    rewards, monitor = settings.evaluation.rewards, settings.training.monitor
    names = list(dict.fromkeys(method for method, _ in runs))
    labels = {BASE[0]: "base model"} | {name: entries[name].label or METHOD_LABELS.get(name, name) for name in names}
    trained_on = {name: entries[name].training.rewards for name in names}
    weights = trained_on | {name: settings.published[name].trained_on for name in published}
    labels |= {name: settings.published[name].label or name for name in published}
    evaluation = settings.evaluation
    variants = [
        (checkpoint, steps, main_table(chosen(everything, checkpoint, steps), BASE, [*runs, *others], rewards, weights))
        for checkpoint in evaluation.checkpoints
        for steps in evaluation.steps
    ]
    measured_stats = [name for name in IMAGE_STATS if name in set(results.reward)]
    few = len(names) <= 3  # methods; with more of them, only the training reward is compared
    rows = variants[0][2]
    crowded = len(runs) > 50  # then methods are compared over seeds alone: a table of all pairs of runs says nothing
    pairs = [] if crowded else method_pairs(results, runs, list(rewards) if few else [], trained_on)
    together: dict[str, list[str]] = {}  # methods with the same training reward
    for name in names:
        together.setdefault(json.dumps(trained_on[name], sort_keys=True), []).append(name)
    verifier = [name for name in rewards if name == "verifier"]
    ranked = [(trained_on[group[0]], found) for group in together.values() if (found := standings(rows, group, verifier))]
    variant_gains = [  # the gain over seeds of every method in each variant
        (trained_on[group[0]], [{one.method: one.gain for one in standings(found, group, [])} for _, _, found in variants])
        for group in together.values()
    ]
    groups = [] if crowded else [[run for run in runs if run[0] in group] for group in together.values()]
    monitored = [name.removeprefix("heldout_") for table in records.values() for name in table.filter(like="heldout_")]
    measured = list(dict.fromkeys([*settings.training.rewards, *monitored]))
    named = reward_labels(settings.rewards)
    plot = charts.curves(
        {run: table[table.filter(like="heldout_").notna().all(axis=1)] for run, table in records.items()},
        {f"heldout_{name}": named[name] for name in measured},
        {"iteration": "iterations", "num_forward_evals": "forward evaluations (NFE) in rollouts"},
        labels,
    )
    gained = gains(rows, list(rewards))
    titles = {None: "training reward"} | {name: f"{named[name]}, {_whose(name, weights)}" for name in rewards}
    outside = [reward for reward in rewards if not any(reward in of_method for of_method in weights.values())]
    best = _best_seeds(gained)
    theirs = {name: Published(settings.published[name].method or name) for name in published}
    paper = paper_rows(variants, settings, {**entries, **theirs}, weights)
    return {
        "profile": profile,
        "notice": NOTICE["hub" if settings.models.source == "hub" else "built"].format(profile),
        "summary": summary(rows, pairs if few else [], labels),
        "prompts": results.prompt_id.nunique(),
        "prompt_counts": prompt_counts(sources.prompts),
        "steps": settings.evaluation.steps[0],
        "labels": labels,
        "reward_labels": named,
        "rewards": rewards,
        "trained_on": trained_on or {name: weights[name] for name in published if weights[name]},
        "mixed": len(together) > 1,
        "outside": [reward for reward in rewards if not names or not all(reward in trained_on[name] for name in names)],
        "rows": rows,
        "pairs": pairs,
        "matrices": [
            (trained_on[group[0][0]], list(zip(group, win_rates(results, group, trained_on[group[0][0]])))) for group in groups
        ],
        "standings": ranked,
        "comparisons": named_beforehand(rows, comparisons),
        "missing": missing_table(everything),
        "variants": variants,
        "variant_gains": [(weights, found) for weights, found in variant_gains if len(found) > 1 and found[0]],
        "image_stat_labels": {name: IMAGE_STATS[name] for name in measured_stats},
        "image_stats": [
            (
                row,
                cells(results, BASE, (row.method, row.seed), measured_stats),
                {name: None if name in weights[row.method] else cell.difference for name, cell in row.cells.items()},
            )
            for row in rows
            if row.trained
        ],
        "styles": style_table(results, BASE, [run for run in [*runs, *others] if weights[run[0]]], weights),
        "names": names,
        "paper": paper,
        "beside_paper": [line for line in paper if not line["unlike"]],
        "costs": {
            run: table.iloc[-1].to_dict() | {"ratio_error": table.old_policy_ratio_error.max()} for run, table in records.items()
        },
        "granularities": granularity_lines(records),
        "drifted": [
            (run, iteration, text)
            for run, table in records.items()
            for entry in [entries[run[0]]]
            for iteration, text in history(
                table.to_dict("records"), entry.training, updates_of(entry.settings, entry.sampling.steps)
            )
        ],
        "monitored": monitor.prompts,
        "verdict": verdict(gained, ranked, pairs, labels, named, outside),
        "by_method": [
            (method, {one.reward: one for one in gained if one.method == method})
            for method in dict.fromkeys(one.method for one in gained)
        ],
        "titles": titles,
        "forest": charts.forest(gained, labels, titles),
        "curves": plot,
        **image_grids(sources, evaluated, results, settings, next(iter(weights.values())), labels, best),
        **settings_table([entries[name] for name in names], [labels[name] for name in names]),
        "models": model_lines(sources.quality),
        "provenance": provenance(sources.locks, runs, published, settings),
    }


def granularity_lines(records: dict[Run, pd.DataFrame]) -> list[dict]:
    """The records of `granularity_correlation`, as means over all iterations: one line per run, granularity and reward."""
    lines = []
    for run, table in records.items():
        for column in table.filter(like="correlation_"):
            reward, granularity = column.removeprefix("correlation_").rsplit("_", 1)
            gap = table[f"gap_{reward}_{granularity}"].mean()
            lines.append(
                {"run": run, "reward": reward, "granularity": granularity, "gap": gap, "correlation": table[column].mean()}
            )
    return lines


def _whose(reward: str, weights: Mapping[str, Mapping[str, float]]) -> str:
    """Whether all methods, some methods or none were trained on a reward."""
    trained = [reward in of_method for of_method in weights.values()]
    return "trained on" if all(trained) else "trained on by some" if any(trained) else "held out"


def _best_seeds(gained: Sequence[Gain]) -> dict[str, int]:
    """The seed of every method with the highest gain in its training reward; the methods with the highest gains come first."""
    own = sorted((one for one in gained if one.reward is None), key=lambda one: -one.by)
    return {one.method: max(one.seeds, key=lambda seed: one.seeds[seed].mean) for one in own}


def image_grids(
    sources: Sources,
    evaluated: dict[Run, Path],
    results: pd.DataFrame,
    settings: SimpleNamespace,
    weights: Mapping[str, float],
    labels: Mapping[str, str],
    best: Mapping[str, int],
) -> dict:
    """Test prompts with the images of the base and of every method's best seed: a seeded draw, and the worst cases."""
    prompts = {prompt.id: prompt.text for prompt in load_prompts(sources.prompts / "test.parquet")}
    if strange := set(results.prompt_id) - prompts.keys():
        reason = f"lacks the prompt {min(strange)} that was evaluated"
        raise UserError(complaint(sources.prompts / "test.parquet", reason, remade_by("evaluate")))
    columns: dict[Run, Path] = {}
    for (method, seed), folder in evaluated.items():
        if best.get(method, seed) == seed:
            checkpoint = settings.evaluation.checkpoints[0] if method in settings.methods else "final"
            columns[method, seed] = folder / image_folder(checkpoint, settings.evaluation.steps[0])

    def grid(ids: Sequence[str], runs: Sequence[Run]) -> list[dict]:
        return [
            {"prompt": prompts[key], "pictures": [picture(columns[run] / f"{key}.png", sources.page) for run in runs]}
            for key in ids
        ]

    drawn = random.Random(seed_of("report")).sample(sorted(prompts), min(IMAGES, len(prompts)))
    first = next(run for run in evaluated if run != BASE)
    worst = most_changed(results, first, BASE, weights or settings.training.rewards, WORST)
    label = lambda run: labels[run[0]] + (f", seed {run[1]}" if run[0] in settings.methods else "")
    few = [BASE, *[(method, seed) for method, seed in best.items() if (method, seed) in columns][:SHOWN]]
    everyone = list(columns)
    return {
        "pixelated": settings.evaluation.height < 128,
        "first_columns": [label(run) for run in few],
        "first_pictures": grid(drawn[:FIRST], few),
        "image_columns": [label(run) for run in everyone],
        "image_rows": grid(drawn[FIRST:], everyone),
        "worst_of": label(first),
        "worst_rows": [line | {"fall": fall} for line, (_, fall) in zip(grid([key for key, _ in worst], everyone), worst)],
    }


def settings_table(entries: list[Entry], labels: list[str]) -> dict:
    """Every resolved setting, one column per method; `differs` marks settings that are not the same for all."""
    resolved = [
        {**entry.settings.model_dump(), **entry.training.model_dump(exclude={"monitor"}), **entry.sampling.model_dump()}
        for entry in entries
    ]
    values = {key: [shown(settings[key]) for settings in resolved] for key in resolved[0]} if resolved else {}
    return {
        "setting_columns": labels,
        "settings": [{"name": key, "values": row, "differs": len(set(row)) > 1} for key, row in values.items()],
    }


def shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def provenance(
    locks: tuple[Path, ...], runs: list[Run], published: Sequence[str], settings: SimpleNamespace
) -> list[tuple[str, str]]:
    """Versions, seeds, and DVC's hashes of every stage's code and outputs; the same inputs give the same lines."""
    lines = [
        ("versions", ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])),
        ("training seeds", ", ".join(str(seed) for seed in dict.fromkeys(seed for _, seed in runs))),
        ("other seeds", f"prompts {settings.prompts.seed}, evaluation {settings.evaluation.seed}"),
    ]
    stages: dict[str, dict] = {}
    for lock in filter(Path.exists, dict.fromkeys(locks)):
        stages |= read_lock(lock)
    wanted = ["models", "prompts", "embed", "evaluate_base"]
    wanted += [f"{stage}@{run_name(*run)}" for stage in ("train", "evaluate") for run in runs]
    wanted += ["published", *(f"evaluate_published@{name}" for name in published)] if published else []
    listed = lambda entries: ", ".join(f"{entry['path'].removeprefix('../../')} {entry['md5']}" for entry in entries)
    code: list[dict] = next((stages[name].get("deps", []) for name in wanted if name.startswith("train@") and name in stages), [])
    lines.append(("code of training", listed(entry for entry in code if "g2rpo_core/" in entry["path"]) or "not in dvc.lock"))
    return lines + [(f"dvc.lock {name}", listed(stages.get(name, {}).get("outs", [])) or "not in dvc.lock") for name in wanted]


def headline(rows: list[Row]) -> dict:
    """The numbers of the first table: every mean, and the gain in the training reward."""
    return {
        run_name(row.method, row.seed): {reward: cell.mean for reward, cell in row.cells.items()}
        | (
            {"training_reward_gain": row.trained.mean, "training_reward_gain_standard_errors": row.trained.standard_errors}
            if row.trained
            else {}
        )
        for row in rows
    }
