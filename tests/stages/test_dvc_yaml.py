"""dvc.yaml against the code: a stage declares what it reads."""

import ast
import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from dvc.repo import Repo, lock_repo
from ruamel.yaml import YAML

from g2rpo_core.config import resolve
from g2rpo_core.foundation.errors import UserError
from stages import versions
from stages.profile import write_profile
from tests.conftest import ROOT
from tests.fixtures.commands import refusal
from tests.fixtures.projects import git

GRAPHS = ("dvc.yaml", "studies/study.yaml")
STAGES = {
    stage if graph == "dvc.yaml" else f"study: {stage}": entry
    for graph in GRAPHS
    for stage, entry in YAML(typ="safe", pure=True)
    .load((ROOT / graph).read_text())["stages"]
    .items()
}
PROFILE = "reports/profile.yaml"


def module_of(stage: str) -> str:
    return STAGES[stage]["cmd"].partition("python -m stages.")[2].split()[0]


@pytest.mark.parametrize(
    "stage", [stage for stage in STAGES if module_of(stage) not in ("code", "profile")]
)
def test_parameters_are_the_sections_that_the_module_loads(stage):
    (declared,) = (
        names
        for entry in STAGES[stage]["params"]
        for file, names in entry.items()
        if file == PROFILE
    )
    sections = importlib.import_module(f"stages.{module_of(stage)}").SECTIONS
    code = [name for name in declared if name.startswith("code.")]
    assert code == [f"code.{module_of(stage)}"]
    assert {name.split(".")[0] for name in declared if name not in code} == set(sections)
    assert ("methods.${item.method}" in declared) == (
        module_of(stage) == "train"
    )  # one more method trains no other again


def test_a_study_has_the_stages_of_the_main_graph_that_are_not_shared():
    shared = {"models", "prompts", "embed", "published", "evaluate_published"}
    main, study = (
        {stage.removeprefix("study: ") for stage in STAGES if stage.startswith("study: ") == own}
        for own in (False, True)
    )
    assert study == main - shared
    for stage in study:
        assert module_of(stage) == module_of(f"study: {stage}")
        read = [STAGES[each].get("params", [{}])[0] for each in (stage, f"study: {stage}")]
        assert read[0].get(PROFILE) == read[1].get(PROFILE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Iterator[Path]:
    """The code, graph and profiles as a DVC project without data, with profile `tiny_verdict`."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("dvc.yaml", "g2rpo_core", "stages", "profiles"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / "params.yaml").write_text(
        "profile: tiny_verdict\nmethods: [g2rpo, mix_grpo]\nseeds: [1]\npublished: []\n"
    )
    (folder / ".dvc").mkdir()
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc" / "config")
    shutil.copy(ROOT / ".dvcignore", folder / ".dvcignore")
    git(folder, "init", "--quiet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "ROOT", folder)
        yield folder


@pytest.fixture(scope="module")
def before(checkout) -> dict[str, dict[str, object]]:
    return dependencies(checkout)


def dependencies(project: Path) -> dict[str, dict[str, object]]:
    """What DVC compares of every stage: the hashes of profiles, and parameters, as versions are.

    The stage `profile`, which hands versions on in seconds, runs for all.
    """
    source = project / "profiles" / "tiny_verdict.yaml"
    write_profile(
        project / "reports" / "profile.yaml", resolve(source).data, source, ["g2rpo", "mix_grpo"]
    )
    repo = Repo(str(project))
    with lock_repo(repo):
        return {
            stage.name: {str(dep): dep.get_hash().value for dep in stage.deps if dep.exists}
            for stage in repo.index.stages
        }


TRAIN = {"train@g2rpo-1", "train@mix_grpo-1"}
EVALUATE = {"evaluate_base", "evaluate@g2rpo-1", "evaluate@mix_grpo-1"}
RUN, REPORT, EMBED = TRAIN | EVALUATE, {"report"}, {"embed"}
DRAWN = RUN | {"models", "published"}
MADE = RUN | REPORT | EMBED | {"models", "prompts"}
ALL = MADE | {"published"}


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "file, old, new, stages",
    [
        ("g2rpo_core/algorithm/loss.py", "1 - clip_range", "1 - 2 * clip_range", TRAIN | REPORT),
        ("g2rpo_core/architectures/flux.py", "1000 * sigma,)", "999 * sigma,)", DRAWN | EMBED),
        ("g2rpo_core/evaluation/results.py", "0.299, 0.587", "0.3, 0.586", EVALUATE | REPORT),
        ("g2rpo_core/numerics/portable.py", "alpha != 1", "alpha != 2", ALL),
        ("g2rpo_core/reporting/statistics.py", "RESAMPLES = 10_", "RESAMPLES = 11_", REPORT),
        ("g2rpo_core/tasks/drawing.py", "SUPERSAMPLING = 8", "SUPERSAMPLING = 4", MADE),
        ("g2rpo_core/weights/adapter.py", "alpha / self.rank", "alpha / 2", RUN | {"published"}),
        ("g2rpo_core/training/settings.py", "(0.9", "(0.8", TRAIN | REPORT),
        ("g2rpo_core/reporting/templates/report.md.j2", "## Prov", "## Provi", REPORT),
        ("g2rpo_core/rewards/templates/axes.v1.txt", "1", "2", {"models"} | RUN | REPORT),
        ("g2rpo_core/tracking/display.py", "step=step", "step=0", set()),
        ("profiles/tiny.yaml", "seed: 1223627", "seed: 5", {"profile", "report"} | EVALUATE),
        ("profiles/tiny.yaml", "shift: 3.0", "shift: 2.0", {"profile", "report"} | TRAIN),
        (
            "profiles/tiny.yaml",
            "mix_grpo: {}",
            "mix_grpo: {sampling: {guidance: 1.0}}",
            {
                "profile",
                "published",
                "report",
                "train@mix_grpo-1",
                "evaluate@mix_grpo-1",
                "evaluate_base",
            },
        ),
        (
            "profiles/tiny.yaml",
            "flow_grpo: {}",
            "flow_grpo: {sampling: {guidance: 1.0}}",
            {"profile", "published", "report"},
        ),
        (
            "profiles/tiny.yaml",
            "mix_grpo: {}",
            "mix_grpo: {sampling: {steps: 9}}",
            {"profile", "published", "report", "train@mix_grpo-1"},
        ),
        ("profiles/tiny.yaml", "images: 8192", "images: 64", {"profile", "models", "report"}),
        ("profiles/tiny.yaml", "dance_grpo: # ", "dance_grpo: # here, ", {"profile"}),
    ],
)
def test_a_change_runs_exactly_what_it_decides(checkout, before, file, old, new, stages):
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new, 1))
    try:
        after = dependencies(checkout)
    finally:
        (checkout / file).write_text(text)
    assert {stage for stage in before if before[stage] != after[stage]} == stages


COMMENTED = '"""Another docstring."""\n# a comment\n{}\n\n\n# and one more\n'
HINTED = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from torch import Tensor


def mean(values: "Tensor", weights: list[float] | None = None) -> "Tensor":
    '''Return a mean.'''
    total: float = sum(values, start())
    if not total:
        raise ValueError(f"{total} is nothing",)
    print("total", total)
    return (total
            / len(values))
"""
BARE = """
from typing import TYPE_CHECKING
def mean(values, weights=None):
    total = sum(values, start())
    if not total: raise ValueError(f"nothing: {total}")
    print("the sum:", total)
    return total / len(values)
"""


@pytest.mark.pipeline
def test_comments_in_all_files_change_nothing(checkout, before):
    """All at once: what one of them changed would change the whole."""
    files = [*checkout.rglob("*.py")]
    texts = {file: file.read_text() for file in files}
    for file, text in texts.items():
        file.write_text(COMMENTED.format(text))
    (checkout / "g2rpo_core" / "rewards" / "templates" / ".axes.v1.txt.swp").write_text("vim's")
    (checkout / "g2rpo_core" / "training" / ".#loop.py").symlink_to("of Emacs")
    try:
        assert len(files) > 100 and dependencies(checkout) == before
    finally:
        for file, text in texts.items():
            file.write_text(text)


def test_hints_docstrings_format_and_told_texts_are_no_code():
    told = lambda source: versions.told(versions.Deciding().visit(ast.parse(source)))
    assert told(HINTED) == told(BARE)
    edits = (
        ("weights=None", "weights=1"),
        ("not total", "total"),
        ("Value", "Key"),
        ("()", "('')"),
    )
    for edit in edits:
        assert told(BARE.replace(*edit, 1)) != told(BARE)


def test_the_code_of_this_commit_is_vouched_for():
    """`make vouch` compares the bits of each stage, and writes the table."""
    table = YAML(typ="safe").load(versions.VOUCHED.read_text())
    assert {stage: table[stage]["code"] for stage in versions.STAGES} == {
        stage: versions.hash_of(stage) for stage in versions.STAGES
    }, "run make vouch"


def test_a_stage_of_other_code_than_dvc_would_record_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "profile.yaml"
    monkeypatch.setenv("DVC_STAGE", "evaluate_base")
    file.write_text(f"code: {{evaluate: {versions.version_of('evaluate')}}}")
    versions.check_recorded(file)
    file.write_text("code: {evaluate: v0}")
    with pytest.raises(UserError, match="the code of evaluate_base has changed since .* dvc repro"):
        versions.check_recorded(file)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "command, message",
    [
        (["embed", "--profile", "tiny"], "the stage `prompts` makes it: dvc repro prompts"),
        (
            ["evaluate", "--profile", "tiny", "--method", "g2rpo", "--seed", "1"],
            "the stage `train@g2rpo-1` makes it: dvc repro train@g2rpo-1",
        ),
        (
            ["train", "--profile", "tiny", "--method", "ppo", "--seed", "1"],
            "profiles/tiny.yaml: methods: there is no 'ppo', only g2rpo, ",
        ),
    ],
)
def test_a_stage_without_its_inputs_says_which_stage_makes_them(command, message, tmp_path):
    for name in ("profiles", "params.yaml", "reports"):
        (tmp_path / name).symlink_to(ROOT / name)
    main = importlib.import_module(f"stages.{command[0]}").main
    told = refusal(main, *command[1:], folder=tmp_path)
    assert message in told and told.startswith("error: ")


def test_a_number_is_written_as_its_setting_has_it(tmp_path):
    """Else 1 in place of 1.0 is no change to DVC, and another key in its cache of runs."""
    (tmp_path / "tiny.yaml").symlink_to(ROOT / "profiles" / "tiny.yaml")
    source, written = tmp_path / "mine.yaml", set()
    for one in ("1", "1.0"):
        source.write_text(
            f"extends: tiny\ntraining: {{rewards: {{hps: {one}}}}}\nsampling: {{guidance: {one}}}\n"
            f"methods: {{g2rpo: {{training: {{learning_rate: {one}}}, "
            f"settings: {{tree: {{eta: {one}}}}}}}}}\n"
        )
        write_profile(tmp_path / "written.yaml", resolve(source).data, source)
        written.add((tmp_path / "written.yaml").read_text())
    assert len(written) == 1 and {"eta: 1.0", "learning_rate: 1.0"} <= set(
        re.findall(r"\w+: 1.0", *written)
    )
