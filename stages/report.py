"""Stage `report`: one self-contained report.html, report.md beside it, and the numbers of both as metrics."""

import base64
import json
import os
import platform
import random
import subprocess
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from ruamel.yaml import YAML

from g2rpo_core.charts import curves
from g2rpo_core.config import load_run, load_study, method_of, sampling_of, training_of
from g2rpo_core.errors import made_by
from g2rpo_core.looks import LABELS as LOOKS
from g2rpo_core.prompts import load_prompts
from g2rpo_core.randomness import seed_of
from g2rpo_core.report import (
    METHOD_LABELS,
    Row,
    Run,
    Weights,
    cells,
    main_table,
    method_pairs,
    missing_table,
    most_changed,
    standings,
    style_table,
    summary,
    tone,
    win_rates,
)
from g2rpo_core.results import chosen, picture_folder, reported
from g2rpo_core.rewards import labels as reward_labels
from stages.common import BASE, REPORTS, Place, arguments, place, run_name, sections, stage, write_json

SECTIONS = ("models", "prompts", "sampling", "rewards", "training", "methods", "evaluation")
PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "dvc", "pyarrow", "numpy")
PICTURES, WORST = 12, 6
TITLE = {"title": "G²RPO and its baselines", "about": ""}
NOTICE = {
    "shapes": "Profile {} is synthetic: pictures of coloured shapes by small models that were trained on this machine. Nothing on this page is a result of the paper.",
    "hub": "Profile {}: published weights, trained and evaluated as stated below.",
}  # fmt: skip


@stage
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    here, settings = place(args.profile, args.study), sections(args, *SECTIONS)
    asked = load_study(args.study) if args.study else load_run()
    context = build_context(args.profile, here, settings, [(method, seed) for method in asked.methods for seed in asked.seeds])
    context |= {"title": asked.title, "about": asked.about} if args.study else TITLE
    environment = Environment(
        loader=FileSystemLoader(REPORTS),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["tone"] = tone
    for name in ("report.html", "report.md"):
        template = environment.get_template(f"template.{name.removeprefix('report.')}.j2")
        here.reports.mkdir(parents=True, exist_ok=True)
        (here.reports / name).write_text(template.render(context), encoding="utf-8")
    write_json(here.reports / "metrics" / "report.json", headline(context["rows"]))
    print(f"wrote {here.reports / 'report.html'}")


def build_context(profile: str, here: Place, settings: SimpleNamespace, runs: list[tuple[str, int]]) -> dict:
    """Everything that the templates show."""
    evaluated = {run: here.evaluations / run_name(*run) for run in [BASE, *runs]}
    tables = [pd.read_parquet(made_by(f"{here.stages}evaluate", folder / "results.parquet")) for folder in evaluated.values()]
    everything = pd.concat(tables, ignore_index=True)
    results = reported(everything, settings.evaluation)
    records = {
        run: pd.read_parquet(made_by(f"{here.stages}train", here.runs / run_name(*run) / "records.parquet")) for run in runs
    }
    rewards, monitor = settings.evaluation.rewards, settings.training.monitor
    names = list(dict.fromkeys(method for method, _ in runs))
    labels = {"base": METHOD_LABELS["base"]} | {name: label_of(settings, name) for name in names}
    trained_on = {name: training_of(settings.training, settings.methods, name).rewards for name in names}
    evaluation = settings.evaluation
    variants = [
        (one, steps, main_table(chosen(everything, one, steps), BASE, runs, rewards, trained_on))
        for one in evaluation.checkpoints
        for steps in evaluation.steps
    ]
    measured_looks = [name for name in LOOKS if name in set(results.reward)]
    few = len(names) <= 3  # methods: between more of them, what was trained is compared alone
    rows = variants[0][2]
    pairs = method_pairs(results, runs, rewards if few else (), trained_on)
    together: dict[str, list[str]] = {}  # methods that were trained on the same
    for name in names:
        together.setdefault(json.dumps(trained_on[name], sort_keys=True), []).append(name)
    verifier = [name for name in rewards if name == "verifier"]
    ranked = [(trained_on[group[0]], found) for group in together.values() if (found := standings(rows, group, verifier))]
    gains = [  # over seeds, of every method in each variant
        (trained_on[group[0]], [{one.method: one.gain for one in standings(found, group, [])} for _, _, found in variants])
        for group in together.values()
    ]
    groups = [[run for run in runs if run[0] in group] for group in together.values()]
    monitored = [name.removeprefix("heldout_") for table in records.values() for name in table.filter(like="heldout_")]
    measured = list(dict.fromkeys([*settings.training.rewards, *monitored]))
    return {
        "profile": profile,
        "notice": NOTICE[settings.models.source].format(profile),
        "summary": summary(rows, pairs if few else [], labels),
        "prompts": results.prompt_id.nunique(),
        "steps": settings.evaluation.steps[0],
        "labels": labels,
        "reward_labels": reward_labels(settings.rewards),
        "rewards": rewards,
        "trained_on": trained_on,
        "mixed": len(together) > 1,
        "outside": [reward for reward in rewards if not all(reward in trained_on[name] for name in names)],
        "rows": rows,
        "pairs": pairs,
        "matrices": [
            (trained_on[group[0][0]], list(zip(group, win_rates(results, group, trained_on[group[0][0]])))) for group in groups
        ],
        "standings": ranked,
        "missing": missing_table(everything),
        "variants": variants,
        "variant_gains": [(weights, found) for weights, found in gains if len(found) > 1 and found[0]],
        "look_labels": {name: LOOKS[name] for name in measured_looks},
        "looks": [
            (
                row,
                cells(results, BASE, (row.method, row.seed), measured_looks),
                {name: None if name in trained_on[row.method] else cell.difference for name, cell in row.cells.items()},
            )
            for row in rows
            if row.trained
        ],
        "styles": style_table(results, BASE, runs, trained_on),
        "paper": paper_rows(variants, settings, trained_on),
        "costs": {run: table.iloc[-1].to_dict() | {"drift": table.ratio_drift.max()} for run, table in records.items()},
        "granularities": granularity_lines(records),
        "monitored": monitor.prompts,
        "chart": curves(
            {run: table[table.filter(like="heldout_").notna().all(axis=1)] for run, table in records.items()},
            {f"heldout_{name}": reward_labels(settings.rewards)[name] for name in measured},
            {"iteration": "iteration", "evaluations": "evaluations in rollouts", "seconds": "seconds of training"},
            labels,
        ),
        **picture_grids(profile, evaluated, results, settings, trained_on[names[0]], labels),
        **settings_table(settings, names, labels),
        "models": model_lines(),
        "provenance": provenance(here, runs, settings),
    }


def granularity_lines(records: dict[Run, pd.DataFrame]) -> list[dict]:
    """What the trainer's `agreement` recorded, as means over all iterations: a line for each run, granularity and reward."""
    lines = []
    for run, table in records.items():
        for column in table.filter(like="correlation_"):
            reward, granularity = column.removeprefix("correlation_").rsplit("_", 1)
            gap = table[f"gap_{reward}_{granularity}"].mean()
            lines.append(
                {"run": run, "reward": reward, "granularity": granularity, "gap": gap, "correlation": table[column].mean()}
            )
    return lines


def label_of(settings: SimpleNamespace, name: str) -> str:
    """The name of an entry of `methods` in the report."""
    return settings.methods[name].label or METHOD_LABELS.get(name, name)


def paper_rows(variants: list[tuple[str | int, int, list[Row]]], settings: SimpleNamespace, trained_on: Weights) -> list[dict]:
    """What the paper published for our runs' methods with the same rewards: columns as `evaluation.rewards`, None where it has none."""
    published = YAML(typ="safe", pure=True).load((REPORTS / "paper.yaml").read_text())
    ours = set(settings.evaluation.steps) if len(settings.evaluation.steps) > 1 else set()
    named = {name for table in published["tables"] for name in table["rows"]}
    lines = []
    for number, (_, steps, rows) in enumerate(variants):
        beside = {steps} & ours | ({50} - ours if number == 0 else set())
        tables = [one for one in published["tables"] if one["steps"] in beside]
        for row, table in product(rows, tables):
            key = row.method if row.method in named else settings.methods[row.method].method or row.method
            if key in table["rows"] and set(table["trained_on"]) == set(trained_on.get(row.method, {})):
                values = dict(zip(published["rewards"], table["rows"][key]))
                pairs = [(row.cells[reward].mean, values.get(reward)) for reward in settings.evaluation.rewards]
                lines.append({"table": f"{table['name']}, {table['steps']} steps", "row": row, "pairs": pairs})
    return lines


def picture_grids(
    profile: str, evaluated: dict[Run, Path], results: pd.DataFrame, settings: SimpleNamespace, weights: dict, labels: dict
) -> dict:
    """Test prompts with the pictures of the base and of every method's first seed: a seeded draw, and the worst cases."""
    prompts = {prompt.id: prompt.text for prompt in load_prompts(Path("prompts", profile, "test.parquet"))}
    columns = {}
    for (method, _), folder in evaluated.items():
        checkpoint = "final" if method == BASE[0] else settings.evaluation.checkpoints[0]
        columns.setdefault(method, folder / picture_folder(checkpoint, settings.evaluation.steps[0]))
    encode = lambda path: base64.b64encode(path.read_bytes()).decode()

    def grid(ids: list[str]) -> list[dict]:
        pictures = {key: [encode(file / f"{key}.png") for file in columns.values()] for key in ids}
        return [{"prompt": prompts[key], "sources": sources} for key, sources in pictures.items()]

    drawn = random.Random(seed_of("report")).sample(sorted(prompts), min(PICTURES, len(prompts)))
    first = next(run for run in evaluated if run != BASE)
    worst = most_changed(results, first, BASE, weights, WORST)
    return {
        "chosen": f"{len(drawn)} prompts drawn at random from the test set, not selected; first seed of every method.",
        "pixelated": settings.evaluation.height < 128,
        "picture_columns": [labels[method] for method in columns],
        "picture_rows": grid(drawn),
        "worst_of": f"{labels[first[0]]}, seed {first[1]}",
        "worst_rows": [line | {"fall": fall} for line, (_, fall) in zip(grid([key for key, _ in worst]), worst)],
    }


def settings_table(settings: SimpleNamespace, methods: list[str], labels: dict[str, str]) -> dict:
    """Every setting of every method as it was resolved, a column each; `differs` where they are not all the same."""
    resolved = [
        {
            **method_of(settings.methods, name).model_dump(),
            **training_of(settings.training, settings.methods, name).model_dump(exclude={"monitor"}),
            **sampling_of(settings.sampling, settings.methods, name).model_dump(),
        }
        for name in methods
    ]
    return {
        "setting_columns": [labels[name] for name in methods],
        "settings": [
            {"name": key, "values": (values := [shown(one[key]) for one in resolved]), "differs": len(set(values)) > 1}
            for key in resolved[0]
        ],
    }


def shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def model_lines() -> list[tuple[str, str]]:
    """What the stage `models` measured of each model."""
    quality = json.loads(made_by("models", REPORTS / "metrics" / "models.json").read_text())
    meaning = {
        "attribute": "right caption against one wrong attribute (chance 0.5)",
        "degraded": "clean against degraded picture (chance 0.5)",
    }
    return [
        (
            name,
            "; ".join(
                f"{meaning.get(key, key)} {value:,}" if isinstance(value, int) else f"{meaning.get(key, key)} {value:.3f}"
                for key, value in values.items()
            ),
        )
        for name, values in quality.items()
    ]


def provenance(here: Place, runs: list[tuple[str, int]], settings: SimpleNamespace) -> list[tuple[str, str]]:
    """Commit, versions, machine, seeds, and the hashes that dvc.lock has of every stage's outputs."""
    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()
    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", "g2rpo_core", "stages", "profiles", "params.yaml", "dvc.yaml"
    )
    lines = [
        ("commit", (git("rev-parse", "HEAD") or "not a git checkout") + (" with uncommitted changes" if changed else "")),
        ("versions", ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])),
        ("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"),
        ("training seeds", ", ".join(str(seed) for seed in dict.fromkeys(seed for _, seed in runs))),
        ("other seeds", f"prompts {settings.prompts.seed}, evaluation {settings.evaluation.seed}"),
    ]
    stages: dict[str, dict] = {}
    for lock in filter(Path.exists, dict.fromkeys((Path("dvc.lock"), here.lock))):
        stages |= YAML(typ="safe", pure=True).load(lock.read_text())["stages"]
    wanted = ["models", "prompts", "embed", "evaluate_base"]
    wanted += [f"{stage}@{method}-{seed}" for stage in ("train", "evaluate") for method, seed in runs]
    for name in wanted:
        outs = stages.get(name, {}).get("outs", [])
        lines.append((f"dvc.lock {name}", ", ".join(f"{out['path']} {out['md5']}" for out in outs) or "not in dvc.lock"))
    return lines


def headline(rows: list[Row]) -> dict:
    """The numbers worth a metric: every mean, and the gain in the trained sum."""
    return {
        run_name(row.method, row.seed): {reward: cell.mean for reward, cell in row.cells.items()}
        | ({"trained_gain": row.trained.mean, "trained_gain_standard_errors": row.trained.standard_errors} if row.trained else {})
        for row in rows
    }


if __name__ == "__main__":
    main()
