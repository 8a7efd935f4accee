"""The documents as a site: it builds without a complaint, loads nothing from the web, and its generated parts are up to date."""

import re
import subprocess
import sys

import pytest

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
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
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
    assert "Λ = {1}" in (site / "reference" / "papers.html").read_text()
    assert "<td>{1, 2}</td>" in (site / "findings_one_base.html").read_text()


def test_the_api_shows_the_shapes_of_the_docstrings(site):
    page = (site / "reference" / "api.html").read_text()
    assert "g2rpo_core.sampling.schedule.tail" in page
    assert "[R, J, K, G]" in page
    assert "leaves[branch][granularity]" in page


def test_a_file_outside_docs_is_a_page_of_the_site(site):
    assert "deterministic prefix" in (site / "repository" / "g2rpo_core" / "sampling" / "tree.py.html").read_text()
    assert (site / "repository" / "reports" / "forest.svg").exists()


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_of_the_reference_says_what_the_code_says(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = reference.PAGES[name]()
    assert (reference.FOLDER / name).read_text() == page, "run: python -m tools.reference"
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")], "each has a description"


@pytest.mark.parametrize("name", draw_explanations.FIGURES)
def test_a_picture_is_drawn_from_what_runs(name):
    drawn = draw_explanations.FIGURES[name]().svg()
    assert (draw_explanations.FOLDER / name).read_text() == drawn, "run: python -m tools.draw_explanations"


def test_the_costs_of_the_picture_are_those_of_the_paper_setting():
    assert sum(draw_explanations.costs("flux_hps_clip", "g2rpo")) == 1700


def test_a_link_out_of_docs_finds_its_place_in_the_site():
    assert resolve_link("docs/howto/plan.md", "../../benchmarks/README.md") == "benchmarks/README.md"
    assert site_uri("docs/howto/plan.md") == "howto/plan.md"
    assert site_uri("g2rpo_core/sampling/tree.py") == "repository/g2rpo_core/sampling/tree.py.md"
