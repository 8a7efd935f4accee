"""The documents as a site: it builds without a complaint, loads nothing from the web, and its generated parts are up to date."""

import re
import subprocess
import sys

import pytest
from markdown import Markdown
from mkdocs.config import load_config

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.architectures.table import ARCHITECTURES
from g2rpo_core.cli.commands import app
from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tools import draw_explanations, reference
from tools.site_links import resolve_link, site_uri


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, with every link and anchor checked."""
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_document_is_a_page_of_the_site(site):
    pages = [
        path.relative_to(ROOT / "docs").with_suffix(".html")
        for path in (ROOT / "docs").rglob("*.md")
    ]
    pages += [f"reference/{name.replace('.md', '.html')}" for name in reference.BUILT_PAGES]
    pages += [
        f"repository/studies/{path.parent.name}/index.html"
        for path in (ROOT / "studies").glob("*/README.md")
    ]
    assert [page for page in pages if not (site / page).exists()] == []


def test_no_page_loads_anything_from_the_web(site):
    """Links that a reader may follow are no loads; scripts, styles, images, fonts and frames are."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", page.read_text())
        loads = [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]
        assert [tag for tag in loads if 'rel="canonical"' not in tag] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", style.read_text()), style


def test_sets_in_braces_stay_text(site):
    """An extension of Markdown would take `{1}` at the end of a cell for attributes."""
    assert "Λ = {7}" in (site / "reference" / "papers.html").read_text()
    assert (
        "<td>{1, 2}</td>"
        in (site / "repository" / "studies" / "granularities" / "index.html").read_text()
    )


def test_the_api_shows_the_shapes_of_the_docstrings(site):
    page = (site / "reference" / "api.html").read_text()
    assert "g2rpo_core.sampling.schedule.tail" in page
    assert "[R, J, K, G]" in page
    assert "leaves[branch][granularity]" in page


def test_a_file_outside_docs_is_a_page_of_the_site(site):
    assert (
        "deterministic prefix"
        in (site / "repository" / "g2rpo_core" / "sampling" / "tree.py.html").read_text()
    )
    assert (site / "repository" / "reports" / "forest.svg").exists()


@pytest.mark.parametrize("name", reference.WRITTEN_PAGES)
def test_a_committed_page_of_the_reference_says_what_the_code_says(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = reference.WRITTEN_PAGES[name]()
    assert (reference.FOLDER / name).read_text() == page, "run: python -m tools.reference"
    assert not [
        line for line in page.splitlines() if line.startswith("- `") and line.endswith("): ")
    ], "each has a description"


def named_by(name: str) -> set[str]:
    """What a page that is built with the site has to name."""
    profiles = {path.stem: load_profile(path) for path in (ROOT / "profiles").glob("*.yaml")}
    hub = {name: profile for name, profile in profiles.items() if profile.models.source == "hub"}
    return {
        "commands.md": {
            f"g2rpo {command.name or command.callback.__name__}"
            for command in app.registered_commands
        },
        "methods.md": {f"| `{method}` (" for method in METHODS},
        "bases.md": {
            repo for each in ARCHITECTURES.values() for repo in (*each.published, *each.distilled)
        },
        "calls.md": {f"## {profile}" for profile in hub},
        "api.md": {f"::: g2rpo_core.{name}" for names in reference.API.values() for name in names},
        "published_settings.md": {
            f"`{method}`" for row in reference.PUBLISHED["rows"] for method in row["methods"]
        },
    }[name]


@pytest.mark.parametrize("name", reference.BUILT_PAGES)
def test_a_page_that_is_built_with_the_site_names_everything(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / name).write_text(reference.BUILT_PAGES[name]())
    page, names = (tmp_path / name).read_text(), named_by(name)
    assert len(names) > 5 and [each for each in names if each not in page] == []
    assert not [
        line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")
    ], "each has a description"
    tracked = subprocess.run(
        ["git", "ls-files", f"docs/reference/{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert tracked.stdout == "", "it is built, not committed"


def test_a_command_that_prints_a_reference_page_is_a_link_to_it_in_the_site(site):
    shown = (site / "howto" / "generate.html").read_text()
    assert (
        '<a href="../reference/commands.html#g2rpo-generate"><code>g2rpo generate --help</code></a>'
        in shown
    )
    assert (
        '<a href="../reference/bases.html"><code>python -m tools.reference bases</code></a>'
        in (site / "howto" / "base_model.html").read_text()
    )
    assert (
        '<a href="reference/commands.html"><code>g2rpo --help</code></a>'
        in (site / "index.html").read_text()
    )


def rows_outside_of_tables(markdown: str) -> list[str]:
    """Lines that begin with | in the HTML that mkdocs makes of a page, and are in no table and no code."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    html = Markdown(
        extensions=config.markdown_extensions, extension_configs=config.mdx_configs
    ).convert(markdown)
    rest = re.sub(r"<(table|pre)\b.*?</\1>", "", html, flags=re.DOTALL)
    return re.findall(r"(?:^|<p>|<li>)\s*(\|.*)", rest, re.MULTILINE)


@pytest.mark.parametrize(
    "before, between, lost",
    [("", "", 0), ("a sentence\n", "", 4), ("", "a sentence\n\n", 1), ("- a list\n\n", "", 0)],
)
def test_a_row_outside_of_its_table_is_noticed(before, between, lost):
    table = f"{before}| a | b |\n|---|---|\n| 1 | 2 |\n{between}| 3 | 4 |\n"
    assert len(rows_outside_of_tables(table)) == lost


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """Every Markdown file that people write, and the pages that are built with the site."""
    files = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = {file: (ROOT / file).read_text() for file in files if "reports/" not in file}
    return texts | {name: page() for name, page in reference.BUILT_PAGES.items()}


def test_every_row_of_every_table_is_rendered_in_a_table(written):
    assert len(written) > 50
    outside = {file: rows_outside_of_tables(text) for file, text in written.items()}
    assert {file: rows[:2] for file, rows in outside.items() if rows} == {}


@pytest.mark.parametrize("name", draw_explanations.FIGURES)
def test_a_picture_is_drawn_from_what_runs(name):
    drawn = draw_explanations.FIGURES[name]().svg()
    assert (draw_explanations.FOLDER / name).read_text() == drawn, (
        "run: python -m tools.draw_explanations"
    )


def test_the_costs_of_the_picture_are_those_of_the_paper_setting():
    assert sum(draw_explanations.costs("flux_hps_clip", "g2rpo")) == 1700


def test_a_link_out_of_docs_finds_its_place_in_the_site():
    assert (
        resolve_link("docs/howto/plan.md", "../../benchmarks/README.md") == "benchmarks/README.md"
    )
    assert site_uri("docs/howto/plan.md") == "howto/plan.md"
    assert site_uri("g2rpo_core/sampling/tree.py") == "repository/g2rpo_core/sampling/tree.py.md"
