"""Stage `report`: writes a self-contained report.html, report.md, their numbers as JSON, charts as images, and seconds.

A study also gets its results.parquet. If it has no evaluations, as in a clone, its page is made from that table.
"""

from pathlib import Path

from g2rpo_core.config import COSTS, MainRun, Run, Study, load_run, load_study
from g2rpo_core.foundation.files import write_json, write_whole
from g2rpo_core.foundation.profiles import folders_of
from g2rpo_core.hub.model_store import QUALITY
from g2rpo_core.numerics.processes import describe_machine
from g2rpo_core.reporting.context import build_context, headline
from g2rpo_core.reporting.measured import Compared, Sources, measure, measure_bases, read_seconds
from g2rpo_core.reporting.recorded import read_measured, write_results
from g2rpo_core.reporting.render import in_script, render, small
from stages.entry import arguments, ends_in_one_line, sections
from stages.paths import RunPaths, run_paths

SECTIONS = ("numerics", "models", "prompts", "sampling", "rewards", "training", "methods", "evaluation", "published")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    paths, settings = run_paths(args.profile, args.study), sections(args, *SECTIONS)
    # Name what is reported
    asked: Run = load_study(args.study) if args.study else load_run()
    bases = asked.bases if isinstance(asked, Study) else ()
    compared = Compared(
        args.profile,
        settings,
        {name: settings.run(name) for name in settings.methods},
        [(method, number) for method in asked.methods for number in bases or asked.seeds],
        asked.published if isinstance(asked, MainRun) else (),
        asked.comparisons if isinstance(asked, Study) else (),
        "base" if bases else "seed",
        asked.seeds,
    )
    title = {"title": "G²RPO and its baselines", "about": ""}
    if isinstance(asked, Study):
        equal = ", or ".join(COSTS[cost] for cost in asked.equal)
        title = {"title": asked.title, "about": asked.about, "equal": equal, "hashes_in": "../runs.txt"}
    # Write the page, from evaluations or from the committed table
    paths.reports.mkdir(parents=True, exist_ok=True)
    ran = run_paths(args.profile, f"{args.study}/base-{bases[0]}") if bases else paths
    if isinstance(asked, Study) and not ran.evaluations.exists():
        home = paths.reports.parent
        measured = read_measured(compared, home / "results.parquet", home / "runs.txt")
        page = render(build_context(compared, measured) | title)["report.html"]
        write_whole(paths.reports / "report.html", page)
    else:
        write_report(compared, paths, title, args.study)
    print(f"wrote {paths.reports / 'report.html'}")


def sources_of(compared: Compared, own: RunPaths, models: Path, page: Path) -> Sources:
    """Return where the numbers of runs are; models: the folder of the stage `models`."""
    locks = (Path("dvc.lock"), own.lock)
    return Sources(own.runs, own.evaluations, Path("prompts", compared.profile), models / QUALITY, page, locks)


def write_report(compared: Compared, paths: RunPaths, title: dict[str, str], study: str | None) -> None:
    """Write every file of a report, from evaluations and runs on disk."""
    if bases := compared.bases:
        homes = {base: run_paths(compared.profile, f"{study}/base-{base}") for base in bases}
        models = {base: folders_of(compared.profile, f"{study}/base-{base}")[0] for base in bases}
        found = {base: sources_of(compared, own, models[base], paths.reports) for base, own in homes.items()}
        measured, sources, ran = measure_bases(compared, found), None, list(homes.values())
    else:
        sources = sources_of(compared, paths, folders_of(compared.profile, None)[0], paths.reports)
        measured, ran = measure(compared, sources), [paths]
    context = build_context(compared, measured, sources)
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
    seconds = read_seconds(compared.names, compared.seeds, [own.timings for own in ran], compared.labels)
    paths.timings.mkdir(exist_ok=True)
    write_whole(paths.timings / "seconds.js", f"const SECONDS = {in_script(seconds)};\n")


if __name__ == "__main__":
    main()
