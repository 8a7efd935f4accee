"""Stage `report`: writes a self-contained report.html, report.md, their numbers as JSON, charts as images, and seconds.

A study also gets its results.parquet. If it has no evaluations, as in a clone, its page is made from that table.
"""

from pathlib import Path

from g2rpo_core.common.processes import describe_machine
from g2rpo_core.config import MainRun, Run, Study, load_run, load_study
from g2rpo_core.foundation.files import write_json, write_whole
from g2rpo_core.reporting.context import build_context, headline
from g2rpo_core.reporting.measured import Compared, Sources, measure, read_seconds
from g2rpo_core.reporting.recorded import read_measured, write_results
from g2rpo_core.reporting.render import in_script, render, small
from stages.common import RunPaths, arguments, ends_in_one_line, run_paths, sections

SECTIONS = ("numerics", "models", "prompts", "sampling", "rewards", "training", "methods", "evaluation", "published")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    paths, settings = run_paths(args.profile, args.study), sections(args, *SECTIONS)
    # Name what is reported
    asked: Run = load_study(args.study) if args.study else load_run()
    compared = Compared(
        args.profile,
        settings,
        {name: settings.run(name) for name in settings.methods},
        [(method, seed) for method in asked.methods for seed in asked.seeds],
        asked.published if isinstance(asked, MainRun) else (),
        asked.comparisons if isinstance(asked, Study) else (),
    )
    title = {"title": "G²RPO and its baselines", "about": ""}
    if isinstance(asked, Study):
        title = {"title": asked.title, "about": asked.about}
    # Write the page, from evaluations or from the committed table
    paths.reports.mkdir(parents=True, exist_ok=True)
    if isinstance(asked, Study) and not paths.evaluations.exists():
        home = paths.reports.parent
        measured = read_measured(compared, home / "results.parquet", home / "runs.txt")
        page = render(build_context(compared, measured) | title)["report.html"]
        write_whole(paths.reports / "report.html", page)
    else:
        write_report(compared, paths, title)
    print(f"wrote {paths.reports / 'report.html'}")


def write_report(compared: Compared, paths: RunPaths, title: dict[str, str]) -> None:
    """Write every file of a report, from evaluations and runs on disk."""
    locks = (Path("dvc.lock"), paths.lock)
    prompts = Path("prompts", compared.profile)
    qualities = run_paths(compared.profile, None).reports / "models.json"
    sources = Sources(paths.runs, paths.evaluations, prompts, qualities, paths.reports, locks)
    measured = measure(compared, sources)
    context = build_context(compared, measured, sources)
    study = paths.lock != Path("dvc.lock")
    for name, text in render(context | title).items():
        # A study's are committed, for report.md alone
        text = small(text) if study and name.endswith(".svg") else text
        write_whole(paths.reports / name, text)
    write_json(paths.reports / "report.json", headline(context))
    if study:
        write_results(paths.reports.parent / "results.parquet", compared, measured)
    else:
        # No output of DVC, as it differs from machine to machine; committed, so that `make verify` can tell
        write_json(paths.reports / "machine.json", describe_machine())
    # In a file of their own, so that the page's hash is the same every time
    seconds = read_seconds(compared.runs, paths.timings, compared.labels)
    paths.timings.mkdir(exist_ok=True)
    write_whole(paths.timings / "seconds.js", f"const SECONDS = {in_script(seconds)};\n")


if __name__ == "__main__":
    main()
