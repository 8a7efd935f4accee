"""Puts together everything that the report shows, from what was measured."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from g2rpo_core.config.costs import cost_of
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.results import image_folder
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint
from g2rpo_core.foundation.runs import BASE, is_base, run_name
from g2rpo_core.reporting import charts
from g2rpo_core.reporting.conclusions import comparisons
from g2rpo_core.reporting.measured import Compared, Measured, Sources
from g2rpo_core.reporting.render import embed_image
from g2rpo_core.reporting.tables import Gain, Run, compare_preregistered, gains, most_changed, pooled_difference, standings
from g2rpo_core.reporting.verdict import paper_rows, summary, verdict
from g2rpo_core.rewards.registry import labels as reward_labels
from g2rpo_core.rewards.registry import measured_by
from g2rpo_core.sampling.seeding import seed_of

# prompts drawn for the page, those of them on its first screen, and those that fell most
IMAGES, FIRST, WORST = 12, 6, 6
TOTAL = "total_compute"  # a column beside those of training records
SHOWN = 4  # methods on the first screen next to the base
NOTICE = {
    "built": "Profile {} is synthetic: images of coloured shapes by small models that were trained on this machine. Nothing on this page is a result of the paper.",
    "hub": "Profile {}: published weights, trained and evaluated as stated below.",
}  # fmt: skip
NO_IMAGES = {"first_columns": [], "first_pictures": [], "image_columns": [], "image_rows": [], "worst_of": "", "worst_rows": []}


def build_context(compared: Compared, measured: Measured, sources: Sources | None = None) -> dict:
    """Return all that the templates show; sources: where images are, None for a page without them."""
    settings = compared.settings
    gained = gains(measured.rows, list(settings.evaluation.rewards))
    shared = {
        "profile": compared.profile,
        "no_interval": without_interval(measured),
        "notice": NOTICE["hub" if settings.models.source == "hub" else "built"].format(compared.profile) + made_before(measured),
        "prompts": measured.about["prompts"],
        "prompt_counts": measured.about["prompt_counts"],
        "steps": settings.evaluation.steps[0],
        "names": compared.names,
        "labels": compared.labels,
        "reward_labels": reward_labels(settings.rewards),
        "rewards": settings.evaluation.rewards,
        "trained_on": compared.trained_on or {name: on for name, on in compared.weights.items() if on},
        "mixed": len(compared.groups) > 1,
        "bases_of": compared.bases_of,
        "drawn": {name: each.drawn for name, each in compared.drawn.items()} if len(compared.drawn) > 1 else {},
        "compared_with": compared_with(compared),
        "models": measured.about["models"],
        "unit": compared.unit,
        "equal": "",
        "training_seeds": compared.seeds,
        "over": what_intervals_are_over(compared),
        "pixelated": settings.evaluation.height < 128,
        "provenance": provenance(compared, measured),
        "hashes": measured.about["hashes"],
        "hashes_in": "",
    }
    return {
        **shared,
        **gain_tables(compared, measured, gained),
        **evaluation_tables(compared, measured),
        **training_tables(compared, measured),
        **(image_grids(sources, compared, measured, best_seeds(gained)) if sources else NO_IMAGES),
        **settings_table([compared.entries[name] for name in compared.names], [compared.labels[name] for name in compared.names]),
    }


def what_intervals_are_over(compared: Compared) -> str:
    """Return a sentence on what an interval over seeds or bases holds for; empty for published models."""
    if compared.unit == "base":
        runs = "one run" if len(compared.seeds) == 1 else f"the mean of {len(compared.seeds)} runs"
        return (
            f"Each value is {runs} on one build of the models, and the interval is over builds: Student's t on their means, so that a "
            "method may gain more on one base than on another."
        )
    if compared.settings.models.source == "hub":
        return ""
    return (
        "All runs share one build of the models: the intervals hold for this build alone, and another may end in another order."
    )


def compared_with(compared: Compared) -> str:
    """Return a sentence on which methods are compared with which base; empty where the base is drawn in one way."""
    if len(compared.drawn) == 1:
        return ""
    named = {base: [name for name in compared.sampling if compared.base_of((name, 0))[0] == base] for base in compared.drawn}
    listed = "; ".join(
        f"{compared.labels[base]}: {', '.join(compared.labels[name] for name in names)}" for base, names in named.items()
    )
    return f"Every run is drawn as it was trained, and compared with the base drawn alike. {listed[0].upper()}{listed[1:]}."


def without_interval(measured: Measured) -> str:
    """Return a sentence on differences without an interval; empty if there are none."""
    every = [cell.difference for row in measured.rows for cell in row.cells.values()]
    every += [cell.difference for cells in measured.stats.values() for cell in cells.values()]
    if all(difference is None or difference.known for difference in every):
        return ""
    return "An interval over prompts needs at least two test prompts with scores: [–] stands where there are fewer."


def made_before(measured: Measured) -> str:
    """Return a sentence on results that were made before numerics were recorded; empty for all others."""
    if "numerics" in measured.about["versions"]:
        return ""
    base = next((row.cells for row in measured.rows if is_base(row.method)), {})
    verifier = f", with a base whose exact verifier is {base['verifier'].mean:.3f}" if "verifier" in base else ""
    return f" These results were made with native numerics on one processor, which was not recorded{verifier}: a rerun has another base."


def gain_tables(compared: Compared, measured: Measured, gained: Sequence[Gain]) -> dict:
    """Compare every method with the base and with the others, in tables, sentences and a chart."""
    rewards, labels, weights = compared.settings.evaluation.rewards, compared.labels, compared.weights
    named = reward_labels(compared.settings.rewards)
    verifier = [name for name in rewards if name == "verifier"]
    on = [compared.trained_on[group[0]] for group in compared.groups]
    ranked = [
        (trained, found) for trained, group in zip(on, compared.groups) if (found := standings(measured.rows, group, verifier))
    ]
    # the gain over seeds of every method in each variant
    variant_gains = [
        (trained, [{one.method: one.gain for one in standings(rows, group, [])} for _, _, rows in measured.variants])
        for trained, group in zip(on, compared.groups)
    ]
    untrained = [reward for reward in rewards if not any(reward in of_method for of_method in weights.values())]
    titles = {None: "training reward"} | {name: f"{named[name]}, {_whose(name, weights)}" for name in rewards}
    return {
        "verdict": verdict(gained, ranked, measured.pairs, labels, named, untrained),
        "summary": summary(measured.rows, measured.pairs if compared.few else [], labels, compared.unit),
        "standings": ranked,
        "pooled": [pooled_difference(measured.rows, [one.method for one in found]) for _, found in ranked],
        "comparisons": compare_preregistered(measured.rows, compared.comparisons),
        "variant_gains": [(trained, found) for trained, found in variant_gains if len(found) > 1 and found[0]],
        "by_method": [
            (method, {one.reward: one for one in gained if one.method == method})
            for method in dict.fromkeys(one.method for one in gained)
        ],
        "titles": titles,
        "forest": charts.forest(gained, labels, titles),
    }


def evaluation_tables(compared: Compared, measured: Measured) -> dict:
    """Lay out single runs: rewards, pairs, styles, image statistics, missing scores, and the paper's numbers."""
    settings, weights, names = compared.settings, compared.weights, compared.names
    # Of weights that were trained elsewhere, the paper's row is known, and no settings
    elsewhere = lambda name: SimpleNamespace(published=settings.published[name].method or name, sampling=None, training=None)
    theirs = {name: elsewhere(name) for name in compared.published}
    paper = paper_rows(measured.variants, settings, {**compared.entries, **theirs}, weights)
    everywhere = lambda reward: names and all(reward in compared.trained_on[name] for name in names)
    return {
        "rows": measured.rows,
        "variants": measured.variants,
        "pairs": measured.pairs,
        "matrices": [(compared.trained_on[group[0][0]], list(zip(group, shares))) for group, shares in measured.matrices],
        "styles": measured.styles,
        "outside": [reward for reward in settings.evaluation.rewards if not everywhere(reward)],
        "image_stat_labels": {name: IMAGE_STATS[name] for name in next(iter(measured.stats.values()), {})},
        "image_stats": [
            (
                row,
                measured.stats[row.method, row.seed],
                {name: None if name in weights[row.method] else cell.difference for name, cell in row.cells.items()},
            )
            for row in measured.rows
            if row.trained
        ],
        "missing": measured.missing,
        "paper": paper,
        "beside_paper": [line for line in paper if not line["unlike"]],
    }


def training_tables(compared: Compared, measured: Measured) -> dict:
    """Show what training recorded: held-out rewards as a chart, costs, agreement of granularities, warnings."""
    training = compared.settings.training
    shown = {run: _with_cost(compared, run, table) for run, table in measured.records.items()}
    records = measured.records
    monitored = [name.removeprefix("heldout_") for table in records.values() for name in table.filter(like="heldout_")]
    named = reward_labels(compared.settings.rewards)
    return {
        "curves": charts.curves(
            {run: _measured_rows(table, compared.unit == "base") for run, table in shown.items()},
            {
                f"heldout_{name}": named[name] + (", gain" if compared.unit == "base" else "")
                for name in dict.fromkeys([*training.rewards, *monitored])
            },
            {"iteration": "iterations", "num_forward_evals": "forward evaluations (NFE) in rollouts", TOTAL: "total compute"},
            compared.labels,
        ),
        "monitored": training.monitor.prompts,
        "costs": {
            # methods without a ratio have no such column
            run: table.iloc[-1].to_dict()
            | {"ratio_error": table.old_policy_ratio_error.max() if "old_policy_ratio_error" in table else None}
            for run, table in shown.items()
        },
        "granularities": granularity_lines(records),
        "drifted": measured.warnings,
    }


def _measured_rows(records: pd.DataFrame, gains: bool) -> pd.DataFrame:
    """Return the records with held-out rewards; with `gains`, these as differences to the first, as bases start far apart."""
    heldout = records.filter(like="heldout_")
    rows = records[heldout.notna().all(axis=1)]
    return rows.assign(**(rows[heldout.columns] - rows[heldout.columns].iloc[0])) if gains and len(rows) else rows


def _with_cost(compared: Compared, run: Run, records: pd.DataFrame) -> pd.DataFrame:
    """Return a run's records with the total compute and the images until each."""
    cost = cost_of(compared.entries[run[0]], run[1], records)
    return records.assign(**{TOTAL: cost.total, "images": cost.images})


def granularity_lines(records: dict[Run, pd.DataFrame]) -> list[dict]:
    """Average the records of `granularity_correlation` over all iterations: one line per run, granularity and reward."""
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
    """Tell whether all methods, some methods or none were trained on a reward."""
    trained = [reward in of_method for of_method in weights.values()]
    return "trained on" if all(trained) else "trained on by some" if any(trained) else "held out"


def best_seeds(gained: Sequence[Gain]) -> dict[str, int]:
    """Return the seed of every method with the highest gain in its training reward, the methods with the highest gains first."""
    own = sorted((one for one in gained if one.reward is None), key=lambda one: -one.by)
    return {one.method: max(one.seeds, key=lambda seed: one.seeds[seed].mean) for one in own}


def image_grids(sources: Sources, compared: Compared, measured: Measured, best: Mapping[str, int]) -> dict:
    """Show test prompts with the images of the base and of every method's best seed: a seeded draw, and the worst cases."""
    settings, labels, results = compared.settings, compared.labels, measured.scores
    evaluated = sources.folders([*compared.base_runs, *compared.runs, *compared.others])
    prompts = {prompt.id: prompt.text for prompt in load_prompts(sources.prompts / "test.parquet")}
    if strange := set(results.prompt_id) - prompts.keys():
        reason = f"lacks the prompt {min(strange)} that was evaluated"
        raise UserError(complaint(sources.prompts / "test.parquet", reason))
    # The folder of each model's images: of a method, those of its best seed
    columns: dict[Run, Path] = {}
    for (method, seed), folder in evaluated.items():
        if best.get(method, seed) == seed:
            checkpoint = settings.evaluation.checkpoints[0] if method in settings.methods else "final"
            columns[method, seed] = folder / image_folder(checkpoint, settings.evaluation.steps[0])

    def grid(ids: Sequence[str], runs: Sequence[Run]) -> list[dict]:
        return [
            {"prompt": prompts[key], "pictures": [embed_image(columns[run] / f"{key}.png", sources.page) for run in runs]}
            for key in ids
        ]

    # The prompts: a draw that every reader gets, and the worst cases of the first run
    ids = sorted(set(results.prompt_id))
    drawn = random.Random(seed_of("report")).sample(ids, min(IMAGES, len(ids)))
    first = next(run for run in evaluated if not is_base(run[0]))
    weights = next(iter(compared.weights.values())) or measured_by(settings.training.rewards, settings.rewards)
    worst = most_changed(results, first, compared.base_of(first), weights, WORST)
    # The models: the best few on the first screen, all below
    label = lambda run: labels[run[0]] + (f", seed {run[1]}" if run[0] in settings.methods else "")
    few = [*compared.base_runs, *[(method, seed) for method, seed in best.items() if (method, seed) in columns][:SHOWN]]
    everyone = list(columns)
    return {
        "first_columns": [label(run) for run in few],
        "first_pictures": grid(drawn[:FIRST], few),
        "image_columns": [label(run) for run in everyone],
        "image_rows": grid(drawn[FIRST:], everyone),
        "worst_of": label(first),
        "worst_rows": [line | {"fall": fall} for line, (_, fall) in zip(grid([key for key, _ in worst], everyone), worst)],
    }


def settings_table(runs: list[ResolvedRun], labels: list[str]) -> dict:
    """Return every resolved setting, one column per method; `differs` marks settings that are not the same for all."""
    resolved = [
        {
            f"{part}.{key}": value
            for part, settings in {
                **run.method.model_dump(),
                "training": run.training.model_dump(exclude={"monitor"}),
                "sampling": run.sampling.model_dump(),
            }.items()
            for key, value in settings.items()
        }
        for run in runs
    ]
    # not all kinds of a method's part have all of them
    keys = dict.fromkeys(key for settings in resolved for key in settings)
    values = {key: [shown(settings.get(key, "")) for settings in resolved] for key in keys}
    return {
        "setting_columns": labels,
        "settings": [{"name": key, "values": row, "differs": len(set(row)) > 1} for key, row in values.items()],
    }


def shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def provenance(compared: Compared, measured: Measured) -> list[tuple[str, str]]:
    """Return versions and seeds as lines; the same inputs give the same lines."""
    return [
        ("versions", measured.about["versions"]),
        ("training seeds", ", ".join(map(str, compared.seeds or dict.fromkeys(seed for _, seed in compared.runs)))),
        *([("bases, by the seed of their models", ", ".join(map(str, compared.bases)))] if compared.bases else []),
        ("other seeds", f"prompts {compared.settings.prompts.seed}, evaluation {compared.settings.evaluation.seed}"),
    ]


def headline(context: Mapping) -> dict:
    """Return the numbers of the first table (every mean, and the gain in the training reward), and every comparison.

    Where the base is drawn in several ways, also these, in `drawn`.
    """
    means = {
        run_name(row.method, row.seed): {reward: cell.mean for reward, cell in row.cells.items()}
        | (
            {
                "training_reward_gain": row.trained.mean,
                "training_reward_gain_standard_errors": row.trained.standard_errors if row.trained.known else None,
            }
            if row.trained
            else {}
        )
        for row in context["rows"]
    }
    drawn = {run_name(name, BASE[1]): how for name, how in context.get("drawn", {}).items()}
    return means | ({"drawn": drawn} if drawn else {}) | {"comparisons": comparisons(context)}
