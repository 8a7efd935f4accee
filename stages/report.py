"""Stage `report`: writes a self-contained report.html, report.md, their numbers, and charts.

Numbers are JSON, charts images; seconds have a file of their own. A study also gets its
results.parquet. If it has no evaluations, as in a clone, its page is made from that table.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from g2rpo_core.config import COSTS, MainRun, Run, Study, load_run, load_study
from g2rpo_core.foundation.files import write_json, write_whole
from g2rpo_core.foundation.profiles import folders_of
from g2rpo_core.foundation.runs import BASE
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import QUALITY
from g2rpo_core.numerics.processes import describe_machine
from g2rpo_core.reporting.conclusions import headline
from g2rpo_core.reporting.measured import Compared, Sources, measure, read_seconds
from g2rpo_core.reporting.page import Title, build_page
from g2rpo_core.reporting.recorded import read_measured, write_results
from g2rpo_core.reporting.render import in_script, render, small
from stages.entry import arguments, ends_in_one_line, sections
from stages.paths import RunPaths, run_paths

SECTIONS = (
    "numerics",
    "models",
    "prompts",
    "sampling",
    "rewards",
    "training",
    "methods",
    "evaluation",
    "published",
)


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    paths, settings = run_paths(args.profile, args.study), sections(args, *SECTIONS)
    # Name what is reported
    run: Run = load_study(args.study) if args.study else load_run()
    compared, title = compared_in(args.profile, settings, run), title_of(run)
    # Write the page, from evaluations or from the committed table
    paths.reports.mkdir(parents=True, exist_ok=True)
    names = {base: f"{args.study}/base-{base}" for base in compared.bases}
    sources = {
        base: sources_of(args.profile, name, paths.reports)
        for base, name in (names or {BASE[1]: args.study}).items()
    }
    if isinstance(run, Study) and not next(iter(sources.values())).evaluations.exists():
        home = paths.reports.parent
        measured = read_measured(compared, home / "results.parquet", home / "runs.txt")
        page = render(build_page(compared, measured, title))["report.html"]
        write_whole(paths.reports / "report.html", page)
    else:
        write_report(compared, sources, paths, title)
    echo(f"wrote {paths.reports / 'report.html'}")


def compared_in(profile: str, settings: SimpleNamespace, run: Run) -> Compared:
    """Return what a study, or params.yaml, compares; settings: the profile's `SECTIONS`."""
    bases = run.bases if isinstance(run, Study) else ()
    return Compared(
        profile=profile,
        settings=settings,
        entries={name: settings.run(name) for name in settings.methods},
        runs=[(method, number) for method in run.methods for number in bases or run.seeds],
        published=run.published if isinstance(run, MainRun) else (),
        comparisons=run.comparisons if isinstance(run, Study) else (),
        bases=bases,
        seeds=run.seeds,
    )


def title_of(run: Run) -> Title:
    """Return what a page says of a study, or of the runs of params.yaml."""
    if not isinstance(run, Study):
        return Title("G²RPO and its baselines")
    equal = ", or ".join(COSTS[cost] for cost in run.equal)
    return Title(run.title, run.about, equal, hashes_in="../runs.txt")


def sources_of(profile: str, study: str | None, page: Path) -> Sources:
    """Return where the numbers of runs are: of params.yaml, a study, or one of its bases."""
    own = run_paths(profile, study)
    return Sources(
        runs=own.runs,
        evaluations=own.evaluations,
        prompts=Path("prompts", profile),
        quality=folders_of(profile, study)[0] / QUALITY,
        timings=own.timings,
        page=page,
        locks=(Path("dvc.lock"), own.lock),
    )


def write_report(
    compared: Compared, sources: Mapping[int, Sources], paths: RunPaths, title: Title
) -> None:
    """Write every file of a report, from evaluations and runs on disk; sources: as `measure`."""
    measured, study = measure(compared, sources), bool(title.hashes_in)
    # Bases have images of their own, which nobody could compare
    page = build_page(compared, measured, title, None if compared.bases else sources[BASE[1]])
    for name, text in render(page).items():
        # A study's are committed, for report.md alone
        text = small(text) if study and name.endswith(".svg") else text
        write_whole(paths.reports / name, text)
    write_json(paths.reports / "report.json", headline(page))
    if study:
        write_results(paths.reports.parent / "results.parquet", measured)
    else:
        # No output of DVC: machines differ. It is committed with the results
        write_json(paths.reports / "machine.json", describe_machine())
    # In a file of their own, so that the page's hash is the same every time
    timings = [own.timings for own in sources.values()]
    seconds = read_seconds(compared.names, compared.seeds, timings, compared.labels)
    paths.timings.mkdir(exist_ok=True)
    write_whole(paths.timings / "seconds.js", f"const SECONDS = {in_script(seconds)};\n")


if __name__ == "__main__":
    main()
