"""Documents as programs: commands, snippets, links, the site, and what README quotes."""

import json
import re
import shutil
from copy import deepcopy

import pytest
from ruamel.yaml import YAML

from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tests.docs.commands import DOCUMENTS, FENCE, check, commands, snippets
from tests.fixtures.commands import run_module
from tools import reference

# Named without what they need, or acting while they parse
NAMED = (
    "g2rpo --install-completion",
    "python -m studies",
    "python -m studies run",
    "python -m studies verify",
    "dvc remote add -d",
    "python -m uvicorn my_server:app --port 8700",
)


@pytest.mark.pipeline
def test_every_command_is_one_that_its_program_takes(monkeypatch):
    monkeypatch.chdir(ROOT)
    found, refused = commands(), {}
    for command in found.keys() - set(NAMED):
        try:
            check(command)
        except Exception as error:  # noqa: BLE001 - each parser has its own
            refused[command] = f"{found[command]}: {error}"
    assert len(found) > 70 and refused == {}


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "command",
    ["g2rpo plan --gpu 3", "dvc reprod", "make env TROCH=cpu"],
)
def test_a_command_with_a_mistake_is_noticed(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(Exception):  # noqa: B017 - each parser has its own
        check(command)


OF_ANOTHER_FILE = ("published: [", "meta:")  # params.yaml, dvc.yaml
WITHOUT_THE_VERIFIER = {  # for prompts other than captions of shapes
    "training": {"monitor": {"every": 10, "prompts": 8, "rewards": ["hps", "clip_score"]}},
    "methods": {"dance_grpo": {"training": None}},
    "evaluation": {"rewards": ["hps", "clip_score"]},
}


def test_every_snippet_loads(tmp_path):
    """A block of YAML is a profile, sections of one, or an entry of `methods`."""
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    yaml, of = YAML(typ="safe", pure=True), {"yaml": [], "json": [], "python": []}
    for one in snippets():
        if one.language in of and not one.text.startswith(OF_ANOTHER_FILE):
            of[one.language].append(one.text)
    assert min(map(len, of.values())) >= 3
    for text in of["json"]:
        json.loads(text)
    for text in of["python"]:
        compile(text, "a document", "exec")
    for number, text in enumerate(of["yaml"]):
        read = yaml.load(text)
        if text.startswith("# an entry of `methods`"):
            read = {"extends": "tiny", "methods": read}
        elif "prompts" in read or ("training" in read and "extends" not in read):
            section = WITHOUT_THE_VERIFIER["training"] | read.get("training", {})
            read = {"extends": "tiny", **deepcopy(WITHOUT_THE_VERIFIER), **read}
            read["training"] = section | WITHOUT_THE_VERIFIER["training"]
            rewards = dict.fromkeys([*read["evaluation"]["rewards"], "clip_score"])
            read["evaluation"]["rewards"] = list(rewards)
        file = tmp_path / "profiles" / f"block_{number}.yaml"
        yaml.dump({"extends": "flux_hps_clip"} | read, file)
        load_profile(file)


def test_links_lead_somewhere_on_github():
    for document in DOCUMENTS:
        for target, anchor in re.findall(
            r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", document.read_text()
        ):
            page = document.parent / target if target else document
            assert page.exists(), f"{document.name}: {target}"
            if anchor:
                assert anchor in anchors(page.read_text()), f"{document.name}: {target}#{anchor}"


def anchors(markdown: str) -> set[str]:
    """As GitHub makes them of headings: lower case, without punctuation, a hyphen for a space."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_of_settings_says_what_the_code_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = reference.settings_page()
    written = (reference.FOLDER / "settings.md").read_text()
    assert written == page, "run: python -m tools.reference"
    assert not re.findall(r"^- `.*\): $", page, re.MULTILINE), "each has a description"


@pytest.mark.pipeline
def test_the_site_builds_with_every_document_and_loads_nothing_from_the_web(tmp_path):
    """Links may lead to the web; scripts, styles, images, fonts and frames may not."""
    done = run_module("mkdocs", "--quiet", "build", "--strict", "--site-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    of_docs = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    pages = [path.with_suffix(".html") for path in of_docs]
    pages += [f"reference/{name.replace('.md', '.html')}" for name in reference.BUILT_PAGES]
    assert [page for page in pages if not (tmp_path / page).exists()] == []
    for page in tmp_path.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", page.read_text())
        loads = [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]
        assert [tag for tag in loads if 'rel="canonical"' not in tag] == [], page
