"""What `make verify` says: how far off, whether the conclusions are the same, and why."""

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from dvc.repo import Repo
from PIL import Image
from safetensors.torch import save_file

from g2rpo_core.numerics.processes import describe_machine
from pipeline import verify
from pipeline.causes import MACHINE
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.projects import git

# Each stage copies what it "makes" from made/, of which DVC knows nothing: as from another machine,
# its outputs differ with no edit
PIPELINE = """\
stages:
  models:
    cmd: cp -r made/models models
    deps: [code/models.py]
    params: [params.yaml: [size]]
    outs: [models]
  evaluate:
    cmd: mkdir -p reports && cp -r made/evaluations evaluations && cp made/metrics.json reports/
    deps: [models, code/evaluate.py]
    outs: [evaluations, reports/metrics.json: {cache: false}]
  report:
    cmd: cp made/report.json made/report.md reports/
    deps: [evaluations]
    outs: [reports/report.json: {cache: false}, reports/report.md: {cache: false}]
"""
MILAN = {
    "name": "AMD EPYC 7763",
    "vendor": "AuthenticAMD",
    "family": "25",
    "model": "1",
    "avx2": True,
    "fma": True,
    "avx512f": False,
}

MOVED = (
    "score of hps: 1 of 2 values differ, by 0.5 at most and 0.25 on average; "
    "the mean moves by 2.5 of its standard errors"
)
GAINED = "comparisons.0.difference: 0.12 -> 0.62, g2rpo-1.hps: 0.2 -> 0.7"


def make(folder: Path, shift: float, low: float = 0.03) -> None:
    """Write what a machine computes, off by `shift`; low: the lower end of the one interval."""
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    for name in ("models/hps", "models/pipeline", "evaluations/pictures"):
        (made / name).mkdir(parents=True)
    save_file(
        {"weight": torch.full((4,), 1 + shift)}, made / "models" / "pipeline" / "model.safetensors"
    )
    torch.save({"weight": torch.full((4,), 2 + shift)}, made / "models" / "hps" / "hps.pt")
    (made / "models" / "config.json").write_text('{"layers": 2}')
    for number in range(5):
        Image.fromarray(np.full((4, 4, 3), int(100 * abs(shift)), np.uint8)).save(
            made / "evaluations" / "pictures" / f"{number}.png"
        )
    scores = pd.DataFrame({"reward": "hps", "score": [0.1, 0.3 + shift]})
    scores.to_parquet(made / "evaluations" / "results.parquet")
    (made / "metrics.json").write_text(json.dumps({"hps": 0.2 + shift}))
    one = {
        "of": "g2rpo-1",
        "against": "base-0",
        "reward": "unified_reward",
        "difference": 0.12 + shift,
        "low": low,
        "high": 0.4,
    }
    (made / "report.json").write_text(
        json.dumps({"g2rpo-1": {"hps": 0.2 + shift}, "comparisons": [one]})
    )
    (made / "report.md").write_text(f"G2RPO gains {0.12 + shift:.2f} in all")
    with chdir(folder), Repo() as repo:
        repo.reproduce(force=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "committed")


def record_machine(folder: Path, **changes: object) -> None:
    """Commit that the lock was made on such a machine."""
    (folder / MACHINE).parent.mkdir(exist_ok=True)
    (folder / MACHINE).write_text(json.dumps(describe_machine() | {"numerics": "native"} | changes))
    commit(folder)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "project"
    (folder / "code").mkdir(parents=True)
    for name in ("models", "evaluate"):
        (folder / "code" / f"{name}.py").write_text(f"# {name}\n")
    (folder / "dvc.yaml").write_text(PIPELINE)
    (folder / "params.yaml").write_text("size: 4\n")
    (folder / ".gitignore").write_text("/made\n/models\n/evaluations\n")
    git(folder.parent, "init", "--quiet", "project")
    Repo.init(str(folder)).close()
    make(folder, 0.0)
    record_machine(folder)
    return folder


@pytest.fixture
def project(made_once, tmp_path) -> Path:
    """A checkout with all outputs of a pipeline whose lock is committed."""
    return shutil.copytree(made_once, tmp_path / "project")


def remove(path: Path) -> None:
    """What is linked into DVC's cache is never written over."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def verified(folder: Path) -> tuple[int, list[str]]:
    done = run_here(verify.main, folder=folder)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def cause(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("Likely cause: "))
    return line.removeprefix("Likely cause: ")


def test_equal_outputs_are_one_line_and_status_0(project):
    said = "5 equal, 0 different, 0 missing: every output is the committed one"
    assert verified(project) == (0, [said])


def test_other_bits_with_the_same_conclusions_are_status_2_and_told_how_far(project):
    record_machine(project, processor=MILAN)
    make(project, 0.5)
    status, lines = verified(project)
    assert status == 2
    assert lines[-1] == "Result: only bits differ, the conclusions are the same (exit status 2)."
    shown = [re.sub(r"\([\d,]+ -> [\d,]+ bytes\)", "(bytes)", line) for line in lines[:14]]
    moved = (
        "             pipeline/model.safetensors: weights: relative distance 0.5 over 1 tensors; "
    )
    assert shown == [
        "different  models: folder: 2 of 3 files differ",
        "             hps/hps.pt: differs (bytes)",
        moved + "at most 0.5, in weight",
        "different  evaluations: folder: 6 of 6 files differ",
        "             pictures/0.png: differs (bytes)",
        "             pictures/1.png: differs (bytes)",
        "             pictures/2.png: differs (bytes)",
        "             and 2 other .png files",
        "             results.parquet: table: " + MOVED,
        "different  reports/metrics.json: JSON: 1 of 1 numbers differ, most: hps: 0.2 -> 0.7",
        "different  reports/report.json: JSON: 2 of 4 numbers differ, most: " + GAINED,
        "different  reports/report.md: differs (bytes)",
        "0 equal, 5 different, 0 missing",
        "",
    ]
    name = describe_machine()["processor"]["name"]
    assert lines[14:-1] == [
        "Conclusions: the same in all 1 comparisons of the report (sign and significance).",
        "First to differ: models; the others that differ are made from it.",
        (
            f"Likely cause: this machine's processor ({name}) is another than the lock's "
            "(AMD EPYC 7763)."
        ),
    ]


def test_a_changed_conclusion_is_told_in_numbers_and_is_status_1(project):
    make(project, -0.08, low=-0.05)
    status, lines = verified(project)
    assert status == 1
    assert lines[-1] == "Result: not verified: 1 of 1 conclusions changed (exit status 1)."
    assert (
        "  g2rpo-1 against the base in UnifiedReward: "
        "was significantly above (+0.12 [+0.03, +0.4]), "
        "now not significantly different (+0.04 [-0.05, +0.4])"
    ) in lines


def test_without_a_cache_only_what_git_holds_is_measured(project):
    shutil.rmtree(project / ".dvc" / "cache")
    make(project, 0.5)
    status, lines = verified(project)
    assert status == 2
    assert lines[:3] == [
        "different  models: of the committed one only its hash is known here",
        "different  evaluations: of the committed one only its hash is known here",
        "different  reports/metrics.json: JSON: 1 of 1 numbers differ, most: hps: 0.2 -> 0.7",
    ]


def test_a_damaged_copy_in_the_cache_is_not_compared_with(project):
    cache = project / ".dvc" / "cache" / "files" / "md5"
    for file in cache.rglob("*"):
        if file.is_file() and not file.name.endswith(".dir"):
            file.chmod(0o644)
            file.write_text("damaged")
    remove(project / "models" / "config.json")
    (project / "models" / "config.json").write_text('{"layers": 3}')
    _, lines = verified(project)
    assert lines[:2] == [
        "different  models: folder: 1 of 3 files differ",
        "             config.json: of the committed one only its hash is known here",
    ]


@pytest.mark.parametrize(
    "file, committed",
    [("code/models.py", False), ("code/models.py", True), ("params.yaml", False)],
)
def test_an_edited_file_is_named_as_the_cause_and_others_are_not(project, file, committed):
    (project / file).write_text("size: 5\n")
    (project / "notes.txt").write_text("of no stage")
    if committed:
        commit(project)
    make(project, 0.5)
    status, lines = verified(project)
    assert status == 2 and cause(lines) == f"edited since the lock was made: {file}."


def test_an_edit_of_a_later_stage_is_not_the_cause_of_an_earlier_one(project):
    record_machine(project, torch="2.0.0", threads=64)
    (project / MACHINE).write_text(json.dumps(HERE))  # the report ran here: its threads are known
    (project / "code" / "evaluate.py").write_text("# evaluate, edited\n")
    make(project, 0.5)
    there = f"threads {HERE['threads']} here, 64 there; torch {HERE['torch']} here, 2.0.0 there."
    assert cause(verified(project)[1]) == there


HERE = describe_machine() | {"numerics": "native"}
NAMESAKE = HERE["processor"] | {"model": "1", "avx2": False, "fma": False, "avx512f": False}


@pytest.mark.parametrize(
    "there, said",
    [
        (
            {"processor": NAMESAKE},
            f"family {NAMESAKE.get('family')}, model 1, with none of avx2 fma avx512f)",
        ),
        ({"processor": MILAN, "numerics": "portable"}, "not known: "),
        ({}, "not known: code, settings, processor, threads and versions are those of the lock."),
    ],
)
def test_the_machine_of_the_lock_is_the_cause_where_it_can_be(project, there, said):
    record_machine(project, **there)
    make(project, 0.5)
    assert said in cause(verified(project)[1])


def test_no_cause_is_invented(project):
    make(project, 0.5)
    git(project, "rm", "--quiet", "--cached", str(MACHINE))
    git(project, "commit", "--quiet", "--message", "an older commit")
    unknown = f"on what the lock was made is not known (no {MACHINE} in the commit)"
    assert unknown in cause(verified(project)[1])


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        (
            {"reports/report.md": "G2RPO gains 0.99 in all"},
            2,
            [
                "4 equal, 1 different, 0 missing",
                "Conclusions: the same, as reports/report.json is the committed one.",
                (
                    "Likely cause: changed after a stage made it (or dvc.lock was put back): "
                    "reports/report.md."
                ),
            ],
        ),
        (
            {"models": None},
            1,
            [
                "missing    models",
                "4 equal, 0 different, 1 missing",
                (
                    "Result: not verified: outputs are missing: 1, which make reproduce makes "
                    "(exit status 1)."
                ),
            ],
        ),
        (
            {"models/pipeline/model.safetensors": "not whole"},
            1,
            [
                (
                    "             pipeline/model.safetensors: damaged: "
                    "models/pipeline/model.safetensors: cannot be read"
                ),
                "Result: not verified: files are damaged: 1",
            ],
        ),
        (
            {"models/config.json": None, "models/notes.txt": "mine"},
            2,
            [
                "different  models: folder: 0 of 3 files differ",
                "             missing here: config.json",
                "             only here: notes.txt",
            ],
        ),
        (
            {"reports/report.json": '{"comparisons": [{"of": "g2rpo-1"}]}'},
            1,
            ["Result: not verified: reports/report.json: cannot be read: it is damaged"],
        ),
    ],
)
def test_what_was_changed_by_hand_is_told_as_such(project, changes, status, said):
    for name, content in changes.items():
        remove(project / name)
        if content is not None:
            (project / name).write_text(content)
    found, lines = verified(project)
    told = "\n".join(lines)
    assert found == status and [text for text in said if text not in told] == []


def test_a_report_without_comparisons_is_told_in_one_line(project):
    file = project / "reports" / "report.json"
    whole = file.read_text()
    file.write_text("{}")
    with chdir(project), Repo() as repo:
        repo.commit("report", force=True)
    commit(project)
    file.write_text(whole)
    status, lines = verified(project)
    assert status == 1 and lines[-1] == (
        "Result: not verified: the committed reports/report.json has no comparisons "
        "(an older version made it), so no conclusions can be compared (exit status 1)."
    )


def test_outside_of_a_git_checkout_one_line_says_so(tmp_path):
    assert "no committed dvc.lock to compare with" in refusal(verify.main, folder=tmp_path)
