"""What `make verify` says of a small project of DVC and git: how far, whether the conclusions are the same, and why."""

import json
import shutil
import subprocess
import sys
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
from tests.conftest import ROOT
from tests.fixtures.commands import run_here

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
    """What a machine computes; shift: by how much other than the first; low: the lower end of the one interval."""
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


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "committed")


def reproduce(folder: Path) -> None:
    with chdir(folder), Repo() as repo:
        repo.reproduce(force=True)


def record_machine(folder: Path, **changes: object) -> None:
    (folder / MACHINE).parent.mkdir(exist_ok=True)
    (folder / MACHINE).write_text(json.dumps(describe_machine() | {"numerics": "native"} | changes))


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
    reproduce(folder)
    record_machine(folder)
    commit(folder)
    return folder


@pytest.fixture
def project(made_once, tmp_path) -> Path:
    """A checkout with all outputs of a pipeline whose lock is committed."""
    return shutil.copytree(made_once, tmp_path / "project")


def verified(folder: Path) -> tuple[int, list[str]]:
    done = run_here(verify.main, folder=folder)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def cause(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("Likely cause: "))
    return line.removeprefix("Likely cause: ")


def test_equal_outputs_are_one_line_and_status_0(project):
    assert verified(project) == (
        0,
        ["5 equal, 0 different, 0 missing: every output is the committed one"],
    )


def test_other_bits_with_the_same_conclusions_are_status_2_and_told_how_far(project):
    record_machine(project, processor=MILAN)
    commit(project)
    make(project, 0.5)
    reproduce(project)
    status, lines = verified(project)
    assert (
        status == 2
        and lines[-1] == "Result: only bits differ, the conclusions are the same (exit status 2)."
    )
    assert lines[:14] == [
        "different  models: folder: 2 of 3 files differ",
        (
            "             hps/hps.pt: weights: relative distance 0.25 over 1 tensors; "
            "at most 0.25, "
            "in weight"
        ),
        (
            "             pipeline/model.safetensors: weights: relative distance 0.5 over 1 "
            "tensors; "
            "at most 0.5, in weight"
        ),
        "different  evaluations: folder: 6 of 6 files differ",
        "             pictures/0.png: image: values differ by 50 of 255 at most, 50 on average",
        "             pictures/1.png: image: values differ by 50 of 255 at most, 50 on average",
        "             pictures/2.png: image: values differ by 50 of 255 at most, 50 on average",
        "             and 2 other .png files",
        "             results.parquet: table: " + MOVED,
        "different  reports/metrics.json: JSON: 1 of 1 numbers differ, most: hps: 0.2 -> 0.7",
        "different  reports/report.json: JSON: 2 of 4 numbers differ, most: " + GAINED,
        "different  reports/report.md: text: 1 of 5 words changed: '0.12' -> '0.62'",
        "0 equal, 5 different, 0 missing",
        "",
    ]
    name = describe_machine()["processor"]["name"]
    assert lines[14:-1] == [
        "Conclusions: the same in all 1 comparisons of the report (sign and significance).",
        "First to differ: models; the others that differ are made from it.",
        (
            f"Likely cause: this machine's processor ({name}) is another than the lock's (AMD EPYC "
            "7763)."
        ),
    ]


def test_a_changed_conclusion_is_told_in_numbers_and_is_status_1(project):
    make(project, -0.08, low=-0.05)
    reproduce(project)
    status, lines = verified(project)
    assert (
        status == 1
        and lines[-1] == "Result: not verified: 1 of 1 conclusions changed (exit status 1)."
    )
    assert (
        "  g2rpo-1 against the base in UnifiedReward: was significantly above (+0.12 [+0.03, "
        "+0.4]), "
        "now not significantly different (+0.04 [-0.05, +0.4])" in lines
    )


def test_without_a_cache_only_what_git_holds_is_measured(project):
    shutil.rmtree(project / ".dvc" / "cache")
    make(project, 0.5)
    reproduce(project)
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
    (project / "models" / "config.json").unlink()
    (project / "models" / "config.json").write_text('{"layers": 3}')
    _, lines = verified(project)
    assert lines[:2] == [
        "different  models: folder: 1 of 3 files differ",
        "             config.json: of the committed one only its hash is known here",
    ]


@pytest.mark.parametrize("committed", [False, True])
def test_an_edited_file_of_code_is_named_as_the_cause_and_others_are_not(project, committed):
    (project / "code" / "models.py").write_text("# models, edited\n")
    (project / "notes.txt").write_text("of no stage")
    if committed:
        commit(project)
    make(project, 0.5)
    reproduce(project)
    status, lines = verified(project)
    assert status == 2 and cause(lines) == "edited since the lock was made: code/models.py."


def test_an_edited_setting_is_named_as_the_cause(project):
    (project / "params.yaml").write_text("size: 5\n")
    make(project, 0.5)
    reproduce(project)
    assert cause(verified(project)[1]) == "edited since the lock was made: params.yaml."


def test_an_edit_of_a_later_stage_is_not_the_cause_of_an_earlier_one(project):
    record_machine(project, torch="2.0.0", threads=64)
    commit(project)
    record_machine(project)  # the report ran here, so its threads are known
    (project / "code" / "evaluate.py").write_text("# evaluate, edited\n")
    make(project, 0.5)
    reproduce(project)
    here = describe_machine()
    assert (
        cause(verified(project)[1])
        == f"threads {here['threads']} here, 64 there; torch {here['torch']} here, 2.0.0 there."
    )


def test_a_processor_of_the_same_name_is_told_by_its_numbers_and_instructions(project):
    here = describe_machine()["processor"]
    record_machine(
        project, processor=here | {"model": "1", "avx2": False, "fma": False, "avx512f": False}
    )
    commit(project)
    make(project, 0.5)
    reproduce(project)
    assert (
        f"({here['name']}, family {here.get('family')}, model 1, with none of avx2 fma avx512f)"
        in cause(verified(project)[1])
    )


def test_another_processor_is_no_cause_where_numerics_are_portable(project):
    record_machine(project, processor=MILAN, numerics="portable")
    commit(project)
    make(project, 0.5)
    reproduce(project)
    assert cause(verified(project)[1]).startswith("not known: ")


def test_no_cause_is_invented(project):
    make(project, 0.5)
    reproduce(project)
    assert (
        cause(verified(project)[1])
        == "not known: code, settings, processor, threads and versions are those of the lock."
    )
    git(project, "rm", "--quiet", "--cached", str(MACHINE))
    git(project, "commit", "--quiet", "--message", "an older commit")
    assert f"on what the lock was made is not known (no {MACHINE} in the commit)" in cause(
        verified(project)[1]
    )


def test_a_file_that_was_changed_by_hand_is_told_as_such(project):
    (project / "reports" / "report.md").write_text("G2RPO gains 0.99 in all")
    status, lines = verified(project)
    assert status == 2 and "4 equal, 1 different, 0 missing" in lines
    assert "Conclusions: the same, as reports/report.json is the committed one." in lines
    assert (
        cause(lines)
        == "changed after a stage made it (or dvc.lock was put back): reports/report.md."
    )


def test_missing_outputs_are_status_1(project):
    shutil.rmtree(project / "models")
    status, lines = verified(project)
    assert status == 1 and lines[:2] == ["missing    models", "4 equal, 0 different, 1 missing"]
    assert lines[-1] == (
        "Result: not verified: outputs are missing: 1, which make reproduce makes (exit status 1)."
    )


def test_a_damaged_output_is_status_1(project):
    file = project / "models" / "pipeline" / "model.safetensors"
    file.unlink()
    file.write_bytes(b"not whole")
    status, lines = verified(project)
    assert status == 1 and "files are damaged: 1" in lines[-1]
    assert (
        "pipeline/model.safetensors: damaged: models/pipeline/model.safetensors: cannot be read"
        in lines[1]
    )


def test_files_of_a_folder_that_only_one_side_has_are_named(project):
    (project / "models" / "config.json").unlink()
    (project / "models" / "notes.txt").write_text("mine")
    _, lines = verified(project)
    assert lines[:3] == [
        "different  models: folder: 0 of 3 files differ",
        "             missing here: config.json",
        "             only here: notes.txt",
    ]


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
        "Result: not verified: the committed reports/report.json has no comparisons (an older "
        "version made it), "
        "so no conclusions can be compared (exit status 1)."
    )


def test_comparisons_that_are_damaged_are_told_in_one_line(project):
    (project / "reports" / "report.json").write_text('{"comparisons": [{"of": "g2rpo-1"}]}')
    status, lines = verified(project)
    assert status == 1 and lines[-1].startswith(
        "Result: not verified: reports/report.json: cannot be read: it is damaged"
    )


def test_outside_of_a_git_checkout_one_line_says_so(tmp_path):
    done = run_here(verify.main, folder=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "no committed dvc.lock to compare with" in done.stderr


@pytest.mark.pipeline
def test_make_verify_ends_with_the_status_in_words(project):
    (project / "reports" / "report.md").write_text("other words")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    (project / "Makefile").write_text(f"verify:\n\t@{sys.executable} -P -m pipeline.verify\n")
    done = subprocess.run(
        ["make", "verify"], cwd=project, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2 and done.stdout.splitlines()[-1].endswith("(exit status 2).")
