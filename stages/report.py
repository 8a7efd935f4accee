"""Stage `report`: one self-contained report.html, report.md beside it, and the numbers of both as metrics."""

import base64
import json
import os
import platform
import random
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from ruamel.yaml import YAML

from g2rpo_core.charts import curves
from g2rpo_core.config import load_run, method_of, training_of
from g2rpo_core.prompts import load_prompts
from g2rpo_core.randomness import seed_of
from g2rpo_core.report import BASE, METHOD_LABELS, between_methods, main_table, trained_reward_difference
from g2rpo_core.rewards import LABELS
from g2rpo_core.statistics import Difference
from stages.common import REPORTS, arguments, made_by, run_name, sections, stage, write_json

SECTIONS = ("models", "prompts", "sampling", "training", "methods", "evaluation")
PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "dvc", "pyarrow", "numpy")
PICTURES = 12
NOTICE = {
    "shapes": "Profile `{}` is synthetic: pictures of coloured shapes by small models that were trained on this machine. Nothing on this page is a result of the paper.",
    "hub": "Profile `{}`: published weights, trained and evaluated as stated below.",
}  # fmt: skip


@stage
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args.profile, *SECTIONS)
    run = load_run()
    runs = [(method, seed) for method in run.methods for seed in run.seeds]
    context = build_context(args.profile, settings, runs)
    environment = Environment(
        loader=FileSystemLoader(REPORTS),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    for name in ("report.html", "report.md"):
        template = environment.get_template(f"template.{name.removeprefix('report.')}.j2")
        (REPORTS / name).write_text(template.render(context), encoding="utf-8")
    write_json(REPORTS / "metrics" / "report.json", headline(context))
    print(f"wrote {REPORTS / 'report.html'}")


def build_context(profile: str, settings: SimpleNamespace, runs: list[tuple[str, int]]) -> dict:
    """Everything that the templates show."""
    evaluated = {(BASE, 0): Path("evaluations", profile, run_name(BASE, 0))}
    evaluated |= {(method, seed): Path("evaluations", profile, run_name(method, seed)) for method, seed in runs}
    tables = [pd.read_parquet(made_by("evaluate", folder / "results.parquet")) for folder in evaluated.values()]
    results = pd.concat(tables, ignore_index=True)
    records = {run: pd.read_parquet(made_by("train", Path("runs", profile, run_name(*run), "records.parquet"))) for run in runs}
    rewards, trained_on = settings.evaluation.rewards, settings.training.rewards
    rows = [
        SimpleNamespace(
            label=row.label,
            method=row.method,
            seed=row.seed,
            trained=None if row.method == BASE else trained_reward_difference(results, row.method, row.seed, trained_on),
            cells=[
                SimpleNamespace(mean=cell.mean, missing=cell.missing, difference=cell.difference, tone=tone(cell.difference))
                for cell in row.cells.values()
            ],
        )
        for row in main_table(results, list(rewards))
    ]
    methods = list(dict.fromkeys(method for method, _ in runs))
    pairs = [
        SimpleNamespace(first=METHOD_LABELS[first], second=METHOD_LABELS[second], seed=seed, reward=LABELS[reward], difference=difference, tone=tone(difference))
        for place, first in enumerate(methods)
        for second in methods[place + 1 :]
        for seed in dict.fromkeys(seed for _, seed in runs)
        for reward in rewards
        for difference in [between_methods(results, first, second, seed, reward)]
    ]  # fmt: skip
    costs = [
        SimpleNamespace(
            label=METHOD_LABELS[method], seed=seed, iterations=int(table.iteration.iloc[-1]), evaluations=int(table.evaluations.iloc[-1]),
            trained=int(table.trained.iloc[-1]), seconds=table.seconds.iloc[-1], drift=table.ratio_drift.max(),
        )
        for (method, seed), table in records.items()
    ]  # fmt: skip
    monitored = settings.training.monitor
    names = list(dict.fromkeys([*trained_on, *monitored.rewards]))
    return {
        "profile": profile,
        "notice": NOTICE[settings.models.source].format(profile),
        "summary": summary(rows, trained_on),
        "prompts": results.prompt_id.nunique(),
        "steps": settings.evaluation.steps,
        "domain": "In-domain rewards are those that the training maximizes; the others it never sees.",
        "rewards": [
            SimpleNamespace(label=LABELS[name], domain="in-domain" if name in trained_on else "held out") for name in rewards
        ],
        "rows": rows,
        "pairs": pairs,
        "costs": costs,
        "monitored": monitored.prompts,
        "chart": curves(
            {run: table[table[f"heldout_{names[0]}"].notna()] for run, table in records.items()},
            {f"heldout_{name}": LABELS[name] for name in names},
            {"iteration": "iteration", "evaluations": "transformer evaluations"},
            METHOD_LABELS,
        ),
        **picture_grid(profile, evaluated, settings),
        **settings_table(settings, methods),
        "models": model_lines(),
        "provenance": provenance(profile, runs, settings),
    }


def tone(difference: Difference | None) -> str:
    """The class of a difference whose interval leaves out zero."""
    if difference is None or difference.low <= 0 <= difference.high:
        return ""
    return "up" if difference.mean > 0 else "down"


def summary(rows: list[SimpleNamespace], trained_on: dict[str, float]) -> list[str]:
    """One sentence a method: does its trained reward rise over the base's on held-out prompts, with every seed?"""
    sentences = []
    for label in dict.fromkeys(row.label for row in rows if row.trained):
        gains = [row.trained for row in rows if row.label == label]
        parts = ", ".join(f"{gain.mean:+.3f} ({gain.standard_errors:+.1f} standard errors)" for gain in gains)
        agree = all(gain.low > 0 for gain in gains)
        sentences.append(
            f"{label} changes the sum of the rewards it is trained on by {parts}, seed by seed: {'more' if agree else 'not more'} than chance with every seed."
        )
    return [f"Trained on {' + '.join(LABELS[name] for name in trained_on)}.", *sentences]


def picture_grid(profile: str, evaluated: dict[tuple[str, int], Path], settings: SimpleNamespace) -> dict:
    """PICTURES test prompts by a seeded draw, base and the first seed of every method side by side."""
    prompts = load_prompts(Path("prompts", profile, "test.parquet"))
    chosen = random.Random(seed_of("report")).sample(prompts, min(PICTURES, len(prompts)))
    columns = {}
    for (method, seed), folder in evaluated.items():
        columns.setdefault(method, (seed, folder))
    encode = lambda path: base64.b64encode(path.read_bytes()).decode()
    return {
        "chosen": f"{len(chosen)} prompts drawn at random from the test set, not selected; first seed of every method.",
        "pixelated": settings.evaluation.height < 128,
        "picture_columns": [METHOD_LABELS[method] for method in columns],
        "picture_rows": [
            {
                "prompt": prompt.text,
                "sources": [encode(folder / "pictures" / f"{prompt.id}.png") for _, folder in columns.values()],
            }
            for prompt in chosen
        ],
    }


def settings_table(settings: SimpleNamespace, methods: list[str]) -> dict:
    """Every setting of every method as it was resolved; a column each."""
    resolved = [
        {
            **method_of(settings.methods, name).model_dump(),
            **training_of(settings.training, settings.methods, name).model_dump(exclude={"monitor"}),
            **settings.sampling.model_dump(),
        }
        for name in methods
    ]
    return {
        "setting_columns": [METHOD_LABELS[name] for name in methods],
        "settings": [(key, [shown(values[key]) for values in resolved]) for key in resolved[0]],
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
        (name, "; ".join(f"{meaning.get(key, key)} {value:,.4g}" for key, value in values.items()))
        for name, values in quality.items()
    ]


def provenance(profile: str, runs: list[tuple[str, int]], settings: SimpleNamespace) -> list[tuple[str, str]]:
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
    lock = Path("dvc.lock")
    stages = YAML(typ="safe", pure=True).load(lock.read_text())["stages"] if lock.exists() else {}
    wanted = ["models", "prompts", "embed", "evaluate_base"]
    wanted += [f"{stage}@{method}-{seed}" for stage in ("train", "evaluate") for method, seed in runs]
    for name in wanted:
        outs = stages.get(name, {}).get("outs", [])
        lines.append((f"dvc.lock {name}", ", ".join(f"{out['path']} {out['md5']}" for out in outs) or "not in dvc.lock"))
    return lines


def headline(context: dict) -> dict:
    """The numbers worth a metric: every mean, and the trained gain in standard errors."""
    result = {}
    for row in context["rows"]:
        values = {reward.label: cell.mean for reward, cell in zip(context["rewards"], row.cells)}
        if row.trained:
            values |= {"trained gain": row.trained.mean, "trained gain in standard errors": row.trained.standard_errors}
        result[run_name(row.method, row.seed)] = values
    return result


if __name__ == "__main__":
    main()
