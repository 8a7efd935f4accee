"""The whole pipeline by `dvc repro`, in a git checkout of its own, at a size of seconds."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML

from g2rpo_core.cli.main import main
from g2rpo_core.foundation.runs import hash_of
from tests.fixtures.commands import run_here
from tests.fixtures.projects import git, seconds_checkout, todo

WITHOUT_ENVIRONMENT = "/usr/bin:/bin"  # a PATH on which `python` is not the environment's, or none
RUNNING = r"Running stage '(.*)'"
LOOKED_AT = ["code:", "always", "changed"]  # of dvc status where nothing has changed
MINI = """\
extends: seconds
training: {iterations: 1, snapshots: []}
evaluation: {checkpoints: [final]}
"""
pytestmark = pytest.mark.pipeline


def run(command: list[str], folder: Path, **changes: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", **changes}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def dvc(folder: Path, *words: str, **changes: str) -> str:
    done = run([str(Path(sys.executable).parent / "dvc"), *words], folder, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A checkout whose profile `seconds` went through `dvc repro` and was committed."""
    folder = tmp_path_factory.mktemp("project")
    seconds_checkout(folder)
    (folder / "profiles" / "mini.yaml").write_text(MINI)
    checked = run([sys.executable, "-m", "pipeline.check"], folder)
    assert checked.returncode == 0, checked.stderr
    dvc(folder, "repro", PATH=WITHOUT_ENVIRONMENT)
    commit(folder, "made")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)


def test_results_are_tidy_and_complete(project):
    table = pd.concat(
        pd.read_parquet(project / "evaluations" / "seconds" / run / "results.parquet")
        for run in ("base-0", "g2rpo-7")
    )
    assert list(table.columns) == [
        "method",
        "seed",
        "checkpoint",
        "steps",
        "prompt_id",
        "style",
        "reward",
        "score",
        "reason",
    ]
    # 6 prompts, 5 rewards, 2 statistics of every image, 4 prompts' diversity; the base at 2 numbers
    # of steps, the run's 2 checkpoints too
    assert (
        len(table) == (2 + 4) * (6 * (5 + 2) + 4)
        and table.score.notna().all()
        and table.reason.isna().all()
    )
    variants = table[["method", "checkpoint", "steps"]].drop_duplicates()
    assert set(variants.itertuples(index=False, name=None)) == {
        ("base", "final", 4),
        ("base", "final", 2),
    } | {("g2rpo", checkpoint, steps) for checkpoint in ("final", "1") for steps in (4, 2)}
    # The weights on the way are neither the first nor the last ones
    same_steps = table[(table.steps == 4) & (table.reward == "hps")]
    assert same_steps.groupby(["method", "checkpoint"]).score.mean().nunique() == 3
    pictures = project / "evaluations" / "seconds" / "g2rpo-7" / "pictures"
    assert {
        folder.name: len(list(folder.glob("*.png"))) for folder in pictures.iterdir()
    } == dict.fromkeys(["final-4", "final-2", "1-4", "1-2"], 6)


def test_the_same_stages_again_leave_a_clean_checkout(project):
    """Trained and evaluated anew: every hash in the lock is as before, and git sees no change."""
    dvc(project, "repro", "--force", "--single-item", "train@g2rpo-7")
    dvc(project, "repro", "--force", "--single-item", "evaluate@g2rpo-7")
    dvc(project, "repro", "--force", "--single-item", "report")
    assert git(project, "status", "--porcelain") == ""
    assert re.findall(RUNNING, dvc(project, "repro")) == ["code"]
    assert dvc(project, "status").split() == LOOKED_AT
    verified = run([sys.executable, "-m", "pipeline.verify"], project)
    assert verified.returncode == 0 and ", 0 different, 0 missing" in verified.stdout, (
        verified.stdout + verified.stderr
    )


def test_another_profile_or_setting_and_back_runs_nothing_again(project):
    """No weights are lost either: DVC keeps what each profile made with each setting."""
    train, cheap = "train@g2rpo-7", {"code", "profile", "report"}  # whose files are in git
    ran = lambda *targets: set(re.findall(RUNNING, dvc(project, "repro", *targets)))
    made = lambda profile: [hash_of(folder) for folder in sorted(project.glob(f"*/{profile}"))]
    params, profile = project / "params.yaml", project / "profiles" / "mini.yaml"
    seconds, before = params.read_text(), made("seconds")
    # Another profile
    shutil.copytree(project / "models" / "seconds", project / "models" / "mini")
    params.write_text(seconds.replace("profile: seconds", "profile: mini"))
    dvc(project, "repro", "--quiet", "profile")
    dvc(project, "commit", "--force", "models")  # half a minute to build
    assert train in ran(train)
    # Another setting of it, tried and taken back
    profile.write_text(f"{MINI}sampling: {{guidance: 2.0}}\n")
    due = todo(project)
    assert "settings: sampling" in due[train] and "cache" not in due[train]
    assert "evaluate@g2rpo-7" in due
    mini = made("mini")
    assert train in ran(train) and made("mini") != mini
    profile.write_text(MINI)
    assert ran(train) <= cheap and made("mini") == mini
    # Back to the first profile
    params.write_text(seconds)
    due = todo(project)
    restored = [line for name, line in due.items() if name not in cheap]
    assert train in due and all("from DVC's cache" in line for line in restored)
    assert "by hand" not in " ".join(due.values())
    assert ran() <= cheap and made("seconds") == before and before
    assert git(project, "status", "--porcelain") == ""


def test_the_report_is_one_file_with_everything_in_it(project):
    page = (project / "reports" / "report.html").read_text()
    first = re.sub(r"<[^>]+>", "", page[page.index("<body>") :]).strip().split("\n")[0]
    assert "synthetic" in first and "Nothing on this page is a result of the paper" in first
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(
        r'(?:src|href)="(?!data:|#)[^"]*"', markup.replace('src="timings/seconds.js"', "")
    )  # it does without
    assert "@import" not in markup and page.count("<script src") == 1
    # Two models: six prompts drawn at random, and those that changed; on the first screen three
    # prompts drawn and those that changed
    changed, rest = divmod(page.count("data:image/png;base64,") - 2 * 6 - 2 * 3, 2 + 2)
    assert rest == 0 and 0 < changed <= 6
    assert first in (project / "reports" / "report.md").read_text()


BROWSER = [
    "chromium",
    *("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
    *("--window-size=390,900", "--virtual-time-budget=20000"),
]
# Uses the page once its charts are drawn, and says what it found as the title
USE = """<script>setTimeout(() => {
    const table = document.querySelector("table.sortable");
    table.tHead.rows[0].cells[2].click();
    dispatchEvent(new Event("beforeprint"));
    const all = (query, good) => [...document.querySelectorAll(query)].every(good);
    document.title = JSON.stringify({
        falling: [...table.tBodies[0].rows].map(row => parseFloat(row.cells[2].textContent)),
        images: all("img", one => one.naturalWidth === 32 && one.alt.length > 10),
        open: all("details", part => part.open),
        fits: document.documentElement.scrollWidth <= innerWidth,
        charts: ["#forest svg", "#curves svg"].every(one => document.querySelector(one)),
    });
}, 9000)</script>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium looks at the page")
def test_the_report_works_in_a_browser(project, tmp_path):
    shutil.copytree(project / "reports", tmp_path / "reports")
    page = tmp_path / "reports" / "report.html"
    page.write_text(page.read_text() + USE)
    done = run([*BROWSER, f"--user-data-dir={tmp_path / 'chromium'}", page.as_uri()], tmp_path)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(re.search("<title>(.*?)</title>", done.stdout)[1])
    falling = found.pop("falling")
    assert falling == sorted(falling, reverse=True) and all(found.values()), found


STUDY = """
study: small
profile: seconds
seeds: [3]
title: Two & two
about: A <b>bold</b> claim.
equal: [nothing]
methods: [first, second]
entries:
  first:
    method: g2rpo
    label: The first
    settings: {tree: {sde_steps: [0, 1], granularities: [1]}}
    training: {iterations: 1, snapshots: []}
  second: {method: mix_grpo, label: The second, training: {rewards: {hps: 1.0}}}
changes:
  evaluation: {steps: [2], checkpoints: [final], rewards: [hps, clip_score, verifier]}
  training: {snapshots: []}
comparisons: []
"""


@pytest.fixture
def study(project) -> Path:
    """The folder of a study of two methods; gone after the test, however it ends."""
    folder = project / "studies" / "small"
    made = run([sys.executable, "-m", "studies", "new", "small"], project)
    assert made.returncode == 0 and "studies/small/params.yaml" in made.stdout, made.stderr
    (folder / "params.yaml").write_text(STUDY)
    yield folder
    shutil.rmtree(folder)
    commit(project, "gone")


def test_a_study_runs_beside_by_its_name(project, study):
    """Nothing of the main project is made again; the report compares the study's own runs."""
    before = (project / "dvc.lock").read_bytes()
    done = run([sys.executable, "-m", "studies", "run", "small"], project)
    assert done.returncode == 0, done.stderr
    assert "8/8" in done.stderr
    assert (project / "dvc.lock").read_bytes() == before
    page = (study / "reports" / "report.html").read_text()
    assert "Two &amp; two, profile" in page and "A &lt;b&gt;bold&lt;/b&gt; claim." in page
    assert "The first" in page and "The second" in page and "trained on by some" in page
    assert set(YAML(typ="safe").load(study / "dvc.lock")["stages"]) == {
        "code",
        "profile",
        "train@first-3",
        "train@second-3",
        "evaluate_base",
        "evaluate@first-3",
        "evaluate@second-3",
        "report",
    }
    assert dvc(study, "status").split() == LOOKED_AT
    assert "small" not in dvc(project, "status") + dvc(project, "dag")
    found = run(
        ["git", "status", "--porcelain", "--untracked-files=all", "studies"], project
    ).stdout.split("\n")
    kept = {
        "params.yaml",
        "results.parquet",
        "runs.txt",
        "seconds.json",
        "reports/report.md",
        "reports/forest.svg",
    }
    assert {line.split("studies/small/")[1] for line in filter(None, found)} == kept
    commit(project, "study")
    verified = run([sys.executable, "-m", "studies", "verify", "small"], project)
    assert (verified.returncode, verified.stdout) == (0, "3 equal, 0 different, 0 missing\n"), (
        verified.stderr
    )
    (study / "evaluations").rename(project / "aside")  # as in a clone
    rendered = run_here(main, "report", "--study", "small", folder=project)
    (project / "aside").rename(study / "evaluations")
    assert rendered.stdout == f"{study / 'reports' / 'report.html'}\n", rendered.stderr
    of_table = (study / "reports" / "report.html").read_text()
    told = page.split('<table class="sortable">')[1:3]
    assert told == of_table.split('<table class="sortable">')[1:3] and "data:image" not in of_table
