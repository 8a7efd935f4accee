"""The first tasks of a newcomer on a fresh clone, each by the command that its page names."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from dvc.cli.parser import get_main_parser
from dvc.utils.hydra import apply_overrides
from PIL import Image

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.config import load_profile
from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.config.costs import compute_of
from g2rpo_core.reporting.over_seeds import Gains, over_seeds
from g2rpo_core.reporting.tables import judged, lines_of
from g2rpo_core.reporting.verdict import verdict
from g2rpo_core.rewards import registry as rewards
from pipeline import compare, todo
from tests.conftest import ROOT
from tests.docs.commands import commands, snippets
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.projects import fresh_clone, git

TASKS = {  # of a newcomer, and their pages
    "read the report": "docs/howto/report.md",
    "draw your own prompts": "docs/howto/generate.md",
    "score a folder of images": "docs/howto/generate.md",
    "try one setting": "docs/howto/settings.md",
    "add a named variant": "docs/howto/settings.md",
    "train on your own prompts": "docs/howto/prompts.md",
    "watch live curves": "docs/howto/interrupt.md",
    "use a model elsewhere": "docs/howto/export.md",
    "train on a reward of your own": "docs/rewards.md",
    "plan FLUX.1-dev on your GPUs": "docs/howto/plan.md",
    "compare two commits, studies or profiles": "docs/howto/report.md",
    "verify your results": "docs/howto/dvc.md",
}


def test_make_help_and_the_index_name_every_task():
    helped = subprocess.check_output(["make", "help"], cwd=ROOT, text=True)
    rows = [
        line
        for line in (ROOT / "docs" / "index.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    for task, page in TASKS.items():
        (line,) = [line for line in helped.splitlines() if line.startswith(task)]
        assert len(line.partition(": ")[2]) > 10 and "](" not in line, line
        mine = task.replace("your", "my")
        assert any(mine in row and f"({page.removeprefix('docs/')})" in row for row in rows), mine


def test_every_how_to_page_begins_with_a_command():
    """In its first lines below the title; base_model.md begins with the table of what there is."""
    pages = [
        page for page in (ROOT / "docs" / "howto").glob("*.md") if page.name != "base_model.md"
    ]
    for page in [*pages, ROOT / "docs" / "rewards.md"]:
        first = "\n".join(page.read_text().split("\n")[1:8])
        assert re.search(r"(^|`)(g2rpo|dvc|make|python -m|tensorboard) ", first, re.MULTILINE), page


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return fresh_clone(tmp_path_factory.mktemp("clone"))


def of(page: str, start: str) -> list[str]:
    """Every command of a page that begins so, the longest first; at least one."""
    text = " ".join((ROOT / page).read_text().split())
    found = sorted(
        (command for command in commands() if command.startswith(start) and command in text),
        key=len,
        reverse=True,
    )
    assert found, f"{page} has no command {start!r}"
    return found


# Read the report


def committed_verdict() -> str:
    """The first lines of a report with the committed numbers, in the words of today's code."""
    report = json.loads((ROOT / "reports" / "report.json").read_text())
    profile = load_profile(ROOT / "profiles" / "tiny.yaml")
    lines = pd.DataFrame([line for line in report["comparisons"] if "on" not in line])
    lines[["method", "seed"]] = lines.of.str.rsplit("-", n=1, expand=True)
    lines["against"] = lines.against.str.rsplit("-", n=1).str[0]
    lines = judged(lines.assign(value=0.0))
    beside_base = lines[lines.against == "base"]
    gains = Gains(lines=beside_base, table=over_seeds(beside_base), groups=[], preregistered=[])
    pairs = lines_of(lines[(lines.against != "base") & (lines.reward == TRAINING)])
    held_out = [name for name in profile.evaluation.rewards if name not in profile.training.rewards]
    return verdict(gains, pairs, LABELS, rewards.labels({}), held_out)


def test_the_readme_and_its_picture_say_what_the_committed_report_says():
    """If not: `python -m tools.draw_report` takes the picture."""
    readme = " ".join((ROOT / "README.md").read_text().replace("\n> ", "\n").split())
    assert f"report](reports/report.md) begins: {committed_verdict()}" in readme
    assert Image.open(ROOT / "docs" / "report.png").text["verdict"] == committed_verdict()


def test_the_picture_of_words_says_what_the_report_of_its_study_says():
    """If not: `python -m tools.draw_report words` takes the picture."""
    report = (ROOT / "studies" / "words_baselines" / "reports" / "report.md").read_text()
    assert Image.open(ROOT / "docs" / "words.png").text["verdict"] in report


# Try one setting as an experiment


@pytest.mark.parametrize("page", ["README.md", "docs/howto/settings.md", "docs/howto/dvc.md"])
def test_an_experiment_changes_a_setting_and_no_other_line_and_may_be_repeated(page, tmp_path):
    """Written by DVC's own function; the same words again resume."""
    for command in of(page, "dvc exp run"):
        shutil.copytree(ROOT / "profiles", tmp_path / "profiles", dirs_exist_ok=True)
        (changed,) = get_main_parser().parse_args(shlex.split(command)[1:]).set_param
        file, _, override = changed.partition(":")
        before = (tmp_path / file).read_text()
        for _ in range(2):
            apply_overrides(tmp_path / file, [override])
        lines = [
            line
            for line in (tmp_path / file).read_text().splitlines()
            if line not in before.splitlines()
        ]
        assert lines and all(
            "learning_rate: 4e-05" in line or line.strip() == "training:" for line in lines
        ), lines
        runs = [load_profile(where / file).run("g2rpo").training for where in (ROOT, tmp_path)]
        assert runs[0].learning_rate != runs[1].learning_rate == 4e-5


# Add a variant, and see what would run


@pytest.mark.pipeline
def test_a_variant_is_listed_with_its_reason_before_any_stage_has_run(clone):
    entry = next(
        one.text
        for one in snippets()
        if one.document == "settings.md" and one.text.startswith("# an entry of `methods`")
    )
    profile, params = clone / "profiles" / "tiny.yaml", clone / "params.yaml"
    profile.write_text(
        profile.read_text().replace("methods: #", f"methods:\n  {entry.splitlines()[1]} #", 1)
    )
    params.write_text(re.sub("methods: .*", "methods: [g2rpo, g2rpo_two]", params.read_text()))
    before = git(clone, "status", "--porcelain")
    assert of("docs/howto/settings.md", "g2rpo todo") == ["g2rpo todo"]
    (clone / "reports" / "timings").mkdir()
    took = {
        "profile": "tiny",
        "compute": compute_of(load_profile(profile).run("g2rpo")),
        "seconds": {"0": 0.0, "1": 150.0},
    }
    (clone / "reports" / "timings" / "g2rpo-2.json").write_text(json.dumps(took))
    done = run_here(todo.main, folder=clone)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    assert lines["train@g2rpo_two-1"] == lines["evaluate@g2rpo_two-2"] == "time not known never run"
    assert lines["train@g2rpo-1"].startswith("about 2 min not here: runs/tiny/g2rpo-1")
    assert "modified" not in done.stdout
    # Nothing was written: the settings are not yet in reports/profile.yaml
    assert git(clone, "status", "--porcelain") == before
    git(clone, "checkout", "--quiet", ".")


# Compare what is here with the commit before


@pytest.mark.pipeline
def test_a_fresh_clone_compares_two_commits_by_what_is_committed(clone):
    (command,) = of("docs/howto/report.md", "g2rpo report --compare HEAD~1")
    words = shlex.split(command)
    assert words[:3] == ["g2rpo", "report", "--compare"]
    done = run_here(compare.main, *words[3:], folder=clone)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "| g2rpo | HPS-v2.1 | 0.8" in done.stdout
        and done.stdout.count("| not known | not known |") >= 12
    )
    assert "Of HEAD~1 and now only mean rewards are at hand, no scores by prompt" in done.stdout
    assert "No difference is" not in done.stdout and "paired" not in done.stdout


@pytest.mark.pipeline
def test_a_side_of_which_nothing_is_at_hand_is_said_in_one_line(clone):
    unknown = refusal(compare.main, "HEAD~9", "now", folder=clone)
    assert unknown.startswith("error: compare: HEAD~9: no commit")
    (clone / "reports" / "metrics" / "base-0.json").unlink()
    told = refusal(compare.main, "HEAD~1", "now", folder=clone)
    git(clone, "checkout", "--quiet", "reports")
    assert told.startswith(
        "error: compare: now: has no evaluations, nor means in reports/metrics ("
    )
    assert told.endswith("; to make them: dvc repro\n")
