"""Stage `report`: one self-contained report.html, report.md beside it, their numbers as JSON, its charts as images, and seconds."""

from pathlib import Path
from types import SimpleNamespace

from g2rpo_core.config import MainRun, Run, Study, load_run, load_study, method_of, sampling_of, training_of
from g2rpo_core.reporting.context import Entry, build_context, headline
from g2rpo_core.reporting.render import in_script, render
from g2rpo_core.reporting.sources import Sources, seconds_of
from stages.common import REPORTS, arguments, ends_in_one_line, run_paths, sections, write_json

SECTIONS = ("models", "prompts", "sampling", "rewards", "training", "methods", "evaluation", "published")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    paths, settings = run_paths(args.profile, args.study), sections(args, *SECTIONS)
    asked: Run = load_study(args.study) if args.study else load_run()
    runs = [(method, seed) for method in asked.methods for seed in asked.seeds]
    locks = (Path("dvc.lock"), paths.lock)
    prompts = Path("prompts", args.profile)
    sources = Sources(paths.runs, paths.evaluations, prompts, REPORTS / "models.json", paths.reports, locks, paths.repro)
    published = asked.published if isinstance(asked, MainRun) else ()
    named = asked.comparisons if isinstance(asked, Study) else ()
    context = build_context(args.profile, sources, settings, entries_of(settings), runs, published, named)
    title = {"title": "G²RPO and its baselines", "about": ""}
    if isinstance(asked, Study):
        title = {"title": asked.title, "about": asked.about}
    paths.reports.mkdir(parents=True, exist_ok=True)
    for name, text in render(context | title).items():
        (paths.reports / name).write_text(text, encoding="utf-8")
    write_json(paths.reports / "report.json", headline(context["rows"]))
    seconds = seconds_of(runs, paths.timings, context["labels"])  # beside the page, whose hash is then the same every time
    paths.timings.mkdir(exist_ok=True)
    (paths.timings / "seconds.js").write_text(f"const SECONDS = {in_script(seconds)};\n", encoding="utf-8")
    print(f"wrote {paths.reports / 'report.html'}")


def entries_of(settings: SimpleNamespace) -> dict[str, Entry]:
    """Every entry of the section `methods` with its settings resolved."""
    return {
        name: Entry(
            run.label,
            run.method or name,
            method_of(settings.methods, name),
            sampling_of(settings.sampling, settings.methods, name),
            training_of(settings.training, settings.methods, name),
        )
        for name, run in settings.methods.items()
    }


if __name__ == "__main__":
    main()
