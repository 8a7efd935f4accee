"""Every command and snippet of the documents is run in a small checkout, or parsed."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ruamel.yaml import YAML

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tests.docs.commands import DOCUMENTS, FENCE, check, commands, snippets
from tests.fixtures.commands import run_here
from tests.fixtures.projects import git, small_project

# Commands that are run in the small checkout, and what their output has.
RUN = {
    'g2rpo generate "a large red circle above a small blue square" --run base --run g2rpo-1 '
    "--seeds 1-4 --grid": "base-g2rpo-1-grid.png",
    "g2rpo export g2rpo-1 --form original --out my_model": "my_model/g2rpo-1.safetensors",
    "g2rpo export g2rpo-1 --form diffusers --out my_diffusers": "my_diffusers",
    "g2rpo export my_lora-1 --form kohya --out my_kohya": "my_kohya",
    "g2rpo export my_lora-1 --form lora --out my_lora": "my_lora/pytorch_lora_weights.safetensors",
    "g2rpo export my_lora-1 --form peft --out my_peft": "my_peft/adapter_model.safetensors",
    "g2rpo score --reward hps --prompts prompts.txt DIR": "scores.csv: 2 images",
    "g2rpo score --reward hps,clip_score --worst 5 --prompts prompts.txt DIR": "lowest by hps:",
    "g2rpo report --study compare": "studies/compare/reports/report.html",
    "g2rpo profile show my_flux": "iterations: 600 # profiles/my_flux.yaml:4",
    "g2rpo profile list": "flux_lora_1gpu",
    "g2rpo doctor": "profile tiny: nothing is missing",
    "g2rpo --help": "Exit status",
    "make help": "make reproduce",
    "python -m studies list": "compare",
    "python -m studies new my_study": "studies/my_study/params.yaml",
    "dvc status": "evaluate_base",
    "dvc metrics show": "base-0.json",
    "dvc metrics diff HEAD": "",
    "dvc params diff": "",
    "dvc dag evaluate@g2rpo-1": "train@g2rpo-1",
    "dvc dag --collapse-foreach-matrix": "train",
    "dvc exp show": "",
}
# Why the others are only parsed: the first pattern that fits.
ONLY_PARSED = {
    r"^(make|dvc (repro|checkout|plots|commit))\b": "whole stages; tests/pipeline and CI run them",
    r"^python -m (studies run|stages\.(train|evaluate))\b": "as make",
    r"^g2rpo (\S+ )?--help$": "the reference of commands; tests/docs/test_site.py builds it",
    r"^g2rpo (rehearse|plan|launch|jobs)\b": (
        "FLUX or a cluster; tests/estimate, tests/pipeline/test_rehearsal.py and test_slurm.py run "
        "them"
    ),
    r"^g2rpo (demo|serve-reward)\b": "a server; tests/inference and tests/serving run them",
    r"^g2rpo todo\b": "says what would run; tests/docs/test_twelve_tasks.py runs it",
    r"^g2rpo (models|prompts)\b": "of FLUX; tests/hub and tests/cli run them",
    r"^g2rpo export .*--push": "a hub; tests/inference/test_export.py runs it",
    r"^g2rpo (generate|score|report|profile (show|diff))": "named with other words that are run",
    r"^g2rpo --install-completion": "writes into the home folder",
    r"^(hf|dvc (add|push|pull|remote|cache|config|gc))\b": "the reader's hub, remote or cache",
    r"^python -m tools\.": "tests/docs/test_site.py runs what they write",
    r"^g2rpo (doctor --profile|probe)": "an example of the help text; tests/cli runs them",
    r"^dvc exp\b": "a training; docs/howto/dvc.md says what it does",
    r"^python -m benchmarks": "minutes to hours; tests/benchmarks runs small ones",
    r"^python -m (flows|studies)": "a server, or named alone; tests/flows, tests/pipeline run them",
    r"^prefect\b": "a server; tests/flows run what needs no account",
    r"^python -m pipeline\.check$": "make reproduce begins with it; tests/pipeline run it",
    r"^python -m uvicorn\b": "the reader's own server; tests/serving run the document's",
    r"^tensorboard\b": "a server; tests/training/test_tracking.py runs it",
}
NAMED = (
    "python -m studies",
    "python -m studies run",
    "python -m studies verify",
    "dvc remote add -d",
    "python -m uvicorn my_server:app --port 8700",
)  # without what they need
COMMANDS = commands()
GENERATED = ("docs/reference/settings.md",)


def test_every_command_is_run_or_has_a_reason_and_no_entry_is_stale():
    reasons = {
        command: next((pattern for pattern in ONLY_PARSED if re.search(pattern, command)), None)
        for command in COMMANDS
    }
    assert [
        command for command, reason in reasons.items() if command not in RUN and not reason
    ] == []
    assert set(RUN) <= set(COMMANDS), f"no document has {set(RUN) - set(COMMANDS)}"
    used = {reason for command, reason in reasons.items() if command not in RUN}
    assert used == set(ONLY_PARSED), f"nothing needs {set(ONLY_PARSED) - used}"
    assert len(COMMANDS) > 70


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in RUN and command not in NAMED]
)
def test_a_command_is_one_that_its_program_takes(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    if command != "g2rpo --install-completion":  # which installs while it parses
        check(command)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "command",
    [
        "g2rpo plan --gpu 3",
        "g2rpo nope",
        "dvc reprod",
        "make reprodce",
        "make env TROCH=cpu",
        "python -m flows.serve --gpu x",
        "g2rpo rehearse --profil x",
    ],
)
def test_a_command_with_a_mistake_is_noticed(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(Exception):  # noqa: B017 - each parser has its own
        check(command)


@pytest.fixture(scope="module")
def checkout(models, tmp_path_factory) -> Path:
    """The committed files with small models and two runs, in a git repository of its own."""
    folder = tmp_path_factory.mktemp("checkout")
    for file in git(ROOT, "ls-files").splitlines():
        if (ROOT / file).exists() and not file.startswith(("tests/", "profiles/", "params.yaml")):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    small_project(folder, models)
    (folder / "profiles").unlink()
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    shutil.copy(ROOT / "params.yaml", folder)
    (folder / "runs" / "tiny" / "g2rpo-2").rename(folder / "runs" / "tiny" / "my_lora-1")
    (my_flux,) = (one.text for one in snippets() if one.text.startswith("# profiles/my_flux.yaml"))
    (folder / "profiles" / "my_flux.yaml").write_text(my_flux)
    (folder / "DIR").mkdir()
    for number in range(2):
        shutil.copy(ROOT / "docs" / "report.png", folder / "DIR" / f"{number}.png")
    (folder / "prompts.txt").write_text("a circle\na square\n")
    git(folder, "init")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "first")
    return folder


@pytest.mark.pipeline
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_documents_runs(command, checkout, monkeypatch):
    program, *words = shlex.split(command)
    if program == "g2rpo":
        done = run_here(main, *words, folder=checkout)
    else:
        start = {"python": [sys.executable], "dvc": [sys.executable, "-m", "dvc"]}.get(
            program, [program]
        )
        monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
        done = subprocess.run([*start, *words], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert RUN[command] in re.sub(r" +", " ", done.stdout)


@pytest.mark.pipeline
def test_the_python_snippets_run(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    found = {
        one.text.split("\n")[0].split("(")[0]: one.text
        for one in snippets()
        if one.language == "python"
    }
    of_a_server = "import base64"  # tests/serving runs it
    assert set(found) == {
        "class Redness:",
        "# my_rewards.py",  # test_the_readmes_reward_trains runs it
        "import torch",
        of_a_server,
    }
    own: dict = {}
    exec(found["class Redness:"], own)  # noqa: S102
    assert own["Redness"](2.0).strength == 2.0
    code = ast.parse(found["import torch"])
    code.body[-1] = ast.Assign([ast.Name("image", ast.Store())], code.body[-1].value)
    exec(compile(ast.fix_missing_locations(code), "README.md", "exec"), own)  # noqa: S102
    # The same image as the command's of that page, but for values between two levels
    words = ("--run", "g2rpo-1", "--seeds", "1", "--out", "beside")
    prompt = "a large red circle above a small blue square"
    assert run_here(main, "generate", prompt, *words, folder=checkout).returncode == 0
    ours = np.asarray(Image.open("beside/g2rpo-1-0000-1.png")).astype(int)
    differs = np.abs(ours - np.asarray(own["image"]).astype(int))
    assert differs.max() <= 1 and (differs > 0).mean() < 0.02 and ours.std() > 1


def test_every_published_entry_loads_in_a_profile(tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    entries = YAML(typ="safe", pure=True).load(ROOT / "examples" / "published_methods.yaml")
    assert len(entries) > 25
    file = tmp_path / "profiles" / "papers.yaml"
    YAML().dump({"extends": "flux_hps_clip", "methods": entries}, file)
    assert set(entries) <= set(load_profile(file).methods)


OF_ANOTHER_FILE = ("published: [", "meta:")  # params.yaml, dvc.yaml
WITHOUT_THE_VERIFIER = {  # for prompts other than captions of shapes
    "training": {"monitor": {"every": 10, "prompts": 8, "rewards": ["hps", "clip_score"]}},
    "methods": {"dance_grpo": {"training": None}},
    "evaluation": {"rewards": ["hps", "clip_score"]},
}


def test_every_profile_entry_and_section_of_the_documents_loads(tmp_path):
    """A block is a profile, sections of one, or an entry of `methods`."""
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    blocks = [one for one in snippets() if one.language == "yaml"]
    blocks = [one for one in blocks if not one.text.startswith(OF_ANOTHER_FILE)]
    assert len(blocks) >= 10
    for number, block in enumerate(blocks):
        read = YAML(typ="safe", pure=True).load(block.text)
        if block.text.startswith("# an entry of `methods`"):
            read = {"extends": "tiny", "methods": read}
        elif "prompts" in read:
            read = {"extends": "tiny", **deepcopy(WITHOUT_THE_VERIFIER), **read}
        elif "training" in read and "extends" not in read:
            read = {"extends": "tiny", **deepcopy(WITHOUT_THE_VERIFIER), **read}
            read["training"] |= WITHOUT_THE_VERIFIER["training"]
            read["evaluation"]["rewards"] = list(
                dict.fromkeys([*read["evaluation"]["rewards"], "clip_score"])
            )
        file = tmp_path / "profiles" / f"block_{number}.yaml"
        YAML().dump({"extends": "flux_hps_clip"} | read, file)
        load_profile(file)


def test_every_json_of_the_documents_is_one():
    assert len([json.loads(one.text) for one in snippets() if one.language == "json"]) >= 3


@pytest.mark.pipeline
def test_the_plan_prints_what_its_page_shows_and_a_profile_that_fits(tmp_path):
    shown, found, campaign = [
        one.text for one in snippets() if one.document == "plan.md" and one.language == "text"
    ]
    asked = [
        words.split()
        for words in COMMANDS
        if words.startswith("g2rpo plan") and COMMANDS[words] == "plan.md"
    ]
    of = lambda option: next(words[1:] for words in asked if option in words)
    plan = ["plan", "--profile", "flux_hps_clip", "--gpus", "8", "--memory", "79"]
    for text, words in ((shown, plan), (campaign, of("--campaign"))):
        printed = run_here(main, *words, folder=ROOT).stdout.split("\n")
        assert [
            line for line in text.splitlines() if line.strip() != "…" and line not in printed
        ] == []
    printed = run_here(main, *plan, "--hours", "72", folder=ROOT).stdout
    assert " ".join(found.split()) in printed
    # Its last lines, pasted, are what it says
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "profiles" / "mine.yaml").write_text(
        textwrap.dedent("\n".join(printed.splitlines()[-2:]))
    )
    again = run_here(main, *plan[:2], "mine", *plan[3:], folder=tmp_path).stdout
    assert "mine, g2rpo, 8 GPUs" in again and "\nmemory per GPU: 75.8 GiB: fits\n" in again


def test_links_to_files_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_links_to_headings_lead_somewhere_on_github():
    for document in DOCUMENTS:
        for target, anchor in re.findall(
            r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text()
        ):
            page = document.parent / target if target else document
            assert anchor in anchors(page.read_text()), f"{document.name}: {target}#{anchor}"


def anchors(markdown: str) -> set[str]:
    """As GitHub makes them of headings: lower case, without punctuation, a hyphen for a space."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_line_that_people_write_is_longer_than_160_characters():
    files = git(ROOT, "ls-files", "*.md").split()
    written = [file for file in files if "reports/" not in file and file not in GENERATED]
    assert len(written) > 30
    lines = [
        (file, number, line)
        for file in written
        for number, line in enumerate((ROOT / file).read_text().split("\n"), 1)
    ]
    assert [f"{file}:{number}" for file, number, line in lines if len(line) > 160] == []


def test_every_promise_of_reliability_names_tests_that_exist():
    promises = (
        (ROOT / "docs" / "reliability.md")
        .read_text()
        .partition("### The tests of the promises")[2]
        .partition("\n## ")[0]
    )
    named = set(re.findall(r"`(test_\w+)`", promises))
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text())
    }
    assert len(named) > 25 and named <= defined, named - defined
    assert all(
        "`test_" in row
        for row in promises.splitlines()
        if row.startswith("| ") and not row.startswith("| promise")
    )
