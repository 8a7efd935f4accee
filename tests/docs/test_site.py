"""The site of the documents builds, loads nothing from the web, and is up to date."""

import re
from html import unescape
from typing import get_args

import pytest
from markdown import Markdown
from mkdocs.config import load_config

from g2rpo_core.algorithm.methods import LABELS, METHODS
from g2rpo_core.architectures.table import ARCHITECTURES
from g2rpo_core.cli.commands import app
from g2rpo_core.config import load_profile
from g2rpo_core.sampling.schedule import Grid, tail
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.projects import git
from tools import draw_explanations, reference
from tools.site_links import resolve_link, site_uri


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, with every link and anchor checked."""
    folder = tmp_path_factory.mktemp("site")
    done = run_module("mkdocs", "--quiet", "build", "--strict", "--site-dir", folder)
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
    """Links may lead to the web; scripts, styles, images, fonts and frames may not."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", page.read_text())
        loads = [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]
        assert [tag for tag in loads if 'rel="canonical"' not in tag] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", style.read_text()), style


LINK = '<a href="{}.html{}"><code>{}</code></a>'


@pytest.mark.parametrize(
    "page, text",
    [
        # Markdown with attributes would take `{1}` at the end of a cell for one
        ("reference/papers.html", "Λ = {7}"),
        ("repository/studies/granularities/index.html", "<td>{1, 2}</td>"),
        ("reference/api.html", "g2rpo_core.sampling.schedule.tail"),
        ("reference/api.html", "[R, J, K, G]"),
        ("reference/api.html", "leaves[branch][granularity]"),
        ("repository/g2rpo_core/sampling/tree.py.html", "deterministic prefix"),
        ("repository/reports/forest.svg", "<svg"),
        (
            "howto/generate.html",
            LINK.format("../reference/commands", "#g2rpo-generate", "g2rpo generate --help"),
        ),
        (
            "howto/base_model.html",
            LINK.format("../reference/bases", "", "python -m tools.reference bases"),
        ),
        ("index.html", LINK.format("reference/commands", "", "g2rpo --help")),
    ],
)
def test_a_page_of_the_site_shows_what_its_source_says(site, page, text):
    assert text in (site / page).read_text()


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
    return {
        "commands.md": {
            f"g2rpo {command.name or command.callback.__name__}"
            for command in app.registered_commands
        },
        "methods.md": {f"| `{method}` (" for method in METHODS},
        "bases.md": {
            repo for each in ARCHITECTURES.values() for repo in (*each.published, *each.distilled)
        },
        "api.md": {
            f"::: g2rpo_core.{module}"
            for module in (
                "algorithm.methods",
                "algorithm.objective",
                "sampling.transitions",
                "rewards.spec",
                "architectures.architecture",
                "models.policy",
            )
        },
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
    assert git(ROOT, "ls-files", f"docs/reference/{name}") == "", "it is built, not committed"


def rows_outside_of_tables(markdown: str) -> list[str]:
    """Return rows of tables that mkdocs renders in no table and no code."""
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
    files = git(ROOT, "ls-files", "*.md").split()
    texts = {file: (ROOT / file).read_text() for file in files if "reports/" not in file}
    return texts | {name: page() for name, page in reference.BUILT_PAGES.items()}


def test_every_row_of_every_table_is_rendered_in_a_table(written):
    assert len(written) > 50
    outside = {file: rows_outside_of_tables(text) for file, text in written.items()}
    assert {file: rows[:2] for file, rows in outside.items() if rows} == {}


@pytest.mark.parametrize("name", draw_explanations.FIGURES)
def test_a_chart_is_drawn_from_what_runs(name):
    committed = (draw_explanations.FOLDER / name).read_text()
    assert committed == draw_explanations.svg(name), "run: python -m tools.draw_explanations"


def test_the_costs_of_the_picture_are_those_of_the_paper_setting():
    assert sum(draw_explanations.costs(draw_explanations.paper_setting(), "g2rpo")) == 1700


def drawing(name: str) -> tuple[list[str], str]:
    """The texts of a diagram that is drawn by hand, and the whole."""
    svg = (draw_explanations.FOLDER / name).read_text()
    return [unescape(text) for text in re.findall(r"<text [^>]*>(.*?)</text>", svg)], svg


def test_the_trees_have_the_nodes_and_evaluations_of_those_that_train():
    tiny = load_profile(ROOT / "profiles" / "tiny.yaml")
    trees = {
        name: tiny.run(name).method.tree.build(tiny.sampling.steps)
        for name in tiny.methods
        if tiny.run(name).method.tree.branching != "none" and name != "g2rpo_no_mgai"
    }
    nfe = lambda name: (
        f"{trees[name].num_forward_evals(tiny.training.num_generations)} forward evaluations"
    )
    others, svg = drawing("trees.svg")
    for name in trees.keys() - {"g2rpo"}:
        assert f"{LABELS[name]}: {nfe(name)} a prompt" in others
    dots = sum(len(tree.nodes) for name, tree in trees.items() if name != "g2rpo")
    assert svg.count("<circle") == dots + 2  # and the legend's
    texts, svg = drawing("tree_g2rpo.svg")
    assert texts[0].endswith(f": {nfe('g2rpo')} a prompt")
    assert svg.count("<circle") == len(trees["g2rpo"].nodes) + 2
    leaves = sum(map(len, trees["g2rpo"].leaves))
    assert sum(text.startswith("λ = ") for text in texts) == leaves


def test_the_diagram_of_noise_has_every_method_and_its_sde_steps():
    methods = {name: each for name, each in METHODS.items() if each.tree.branching != "none"}
    texts, svg = drawing("noise_steps.svg")
    assert {LABELS[name] for name in methods} <= set(texts)
    noisy = [
        {step for branch in each.tree.branches(16) for step in branch} for each in methods.values()
    ]
    assert svg.count('r="6" fill="#d9660a"') == sum(map(len, noisy)) + 1  # and the legend's


def test_the_diagram_of_granularities_has_the_calls_of_the_tails():
    calls = [len(tail(16, 3, value, grid)) for grid in get_args(Grid) for value in (1, 2, 3)]
    texts, _ = drawing("granularities.svg")
    assert [text for text in texts if text.endswith(" calls")] == [f"{n} calls" for n in calls]


def test_the_diagram_of_the_architecture_has_the_shapes_of_the_paper_setting():
    profile = draw_explanations.paper_setting()
    run = profile.run("g2rpo")
    prompts, group = run.training.prompts_per_iteration, run.training.num_generations
    branches, tails = (
        len(run.method.tree.branches(run.sampling.steps)),
        len(run.method.tree.granularities),
    )
    images = prompts * branches * tails * group
    whole = " ".join(drawing("architecture.svg")[0])
    for shape in (
        f"{sum(draw_explanations.costs(profile, 'g2rpo')):,.0f} calls a prompt",
        f"{prompts}·{branches}·{tails}·{group} = {images:,} an iteration",
        f"[{len(run.training.rewards)}, {prompts}, {branches}, {tails}, {group}]",
        f"[{prompts}, {branches}, {group}], in ±{run.training.adv_clip_max:g}",
        f"[N, {run.sampling.height // 16 * (run.sampling.width // 16)}, 64]",
        f"[N, 3, {run.sampling.height}, {run.sampling.width}]",
        f"{profile.prompts.train_count:,} training texts, {profile.prompts.test_count} test texts",
        f"[{profile.embed.max_sequence_length}, 4096]",
    ):
        assert shape in whole


def test_a_link_out_of_docs_finds_its_place_in_the_site():
    assert (
        resolve_link("docs/howto/plan.md", "../../benchmarks/README.md") == "benchmarks/README.md"
    )
    assert site_uri("docs/howto/plan.md") == "howto/plan.md"
    assert site_uri("g2rpo_core/sampling/tree.py") == "repository/g2rpo_core/sampling/tree.py.md"
