"""dvc.yaml against the code: a stage declares what it reads."""

import importlib
import re
import shutil
from pathlib import Path

import pytest
from dvc.repo import Repo, lock_repo
from ruamel.yaml import YAML

from g2rpo_core.config import resolve
from stages.profile import write_profile
from tests.fixtures.commands import refusal
from tests.fixtures.projects import git
from tests.stages.closure import ROOT, closure

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


@pytest.mark.parametrize("stage", STAGES)
def test_code_dependencies_are_what_the_module_imports(stage):
    paths = (path.removeprefix("../../") for path in STAGES[stage]["deps"])
    assert sorted(path for path in paths if path.startswith(("g2rpo_core/", "stages/"))) == closure(
        module_of(stage)
    )


@pytest.mark.parametrize("stage", STAGES)
def test_no_package_outside_the_core_and_the_stages_is_imported_by_a_stage(stage):
    """Templates and data files are inside packages."""
    files = [
        file
        for path in closure(module_of(stage))
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    ]
    for file in files:
        assert not re.search(
            r"^\s*(from|import) (flows|studies|reference|benchmarks)\b",
            file.read_text(),
            re.MULTILINE,
        )


@pytest.mark.parametrize("stage", [stage for stage in STAGES if module_of(stage) != "profile"])
def test_parameters_are_the_sections_that_the_module_loads(stage):
    (declared,) = (
        names
        for entry in STAGES[stage]["params"]
        for file, names in entry.items()
        if file == PROFILE
    )
    sections = importlib.import_module(f"stages.{module_of(stage)}").SECTIONS
    assert {name.split(".")[0] for name in declared} == set(sections)
    assert ("methods.${item.method}" in declared) == (
        module_of(stage) == "train"
    )  # one more method trains no other again


@pytest.mark.parametrize("stage", [stage for stage in STAGES if module_of(stage) != "profile"])
def test_a_stage_sees_no_section_but_its_own(stage):
    source = (ROOT / "stages" / f"{module_of(stage)}.py").read_text()
    assert source.count("sections(args, *SECTIONS)") == 1 and "load_profile" not in source


def test_a_study_has_the_stages_of_the_main_graph_that_are_not_shared():
    shared = {"models", "prompts", "embed", "published", "evaluate_published"}
    main, study = (
        {stage.removeprefix("study: ") for stage in STAGES if stage.startswith("study: ") == own}
        for own in (False, True)
    )
    assert study == main - shared
    for stage in study:
        assert closure(module_of(stage)) == closure(module_of(f"study: {stage}"))
        assert STAGES[stage]["params"][0].get(PROFILE) == STAGES[f"study: {stage}"]["params"][
            0
        ].get(PROFILE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
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
    return folder


def dependencies(project: Path) -> dict[str, dict[str, object]]:
    """What DVC compares of every stage: the hashes of code and profiles, and parameters."""
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


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "file, old, new, stages",
    [
        # defaults, where they stand
        (
            "g2rpo_core/training/settings.py",
            "decay: float = Field(0.9",
            "decay: float = Field(0.8",
            TRAIN | {"report"},
        ),
        (
            "g2rpo_core/models/settings.py",
            "replica: bool = Field(\n        False",
            "replica: bool = Field(\n        True",
            TRAIN | EVALUATE | {"report"},
        ),
        (
            "g2rpo_core/algorithm/methods.py",
            "timestep_fraction=0.6",
            "timestep_fraction=0.5",
            TRAIN | {"report"},
        ),
        (
            "g2rpo_core/evaluation/settings.py",
            "1.0,\n        ge=0",
            "0.9,\n        ge=0",
            EVALUATE | {"report"},
        ),
        # a reworded message, and the text of the report
        ("g2rpo_core/foundation/files.py", '"does not exist"', '"is not there"', set()),
        (
            "g2rpo_core/reporting/templates/report.md.j2",
            "## Provenance",
            "## Where it comes from",
            {"report"},
        ),
        # values in the profile that is extended, in the one that extends it, and one that is
        # overridden
        ("profiles/tiny.yaml", "seed: 1223627", "seed: 5", {"profile", "report"} | EVALUATE),
        ("profiles/tiny.yaml", "shift: 3.0", "shift: 2.0", {"profile", "report"} | TRAIN),
        (
            "profiles/tiny.yaml",
            "guidance: 3.5",
            "guidance: 2.5",
            {"profile", "report"} | TRAIN | EVALUATE,
        ),
        # an entry's own guidance: the base is also drawn with it; that of an entry without runs is
        # nobody's
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
        (
            "profiles/tiny_verdict.yaml",
            "test_count: 512",
            "test_count: 7",
            {"profile", "prompts", "report"},
        ),
        ("profiles/tiny.yaml", "dance_grpo: # ", "dance_grpo: # here, ", {"profile"}),
        ("profiles/flux_hps_clip.yaml", "iterations: 1800", "iterations: 9", {"profile"}),
    ],
)
def test_a_change_runs_exactly_what_it_decides(checkout, file, old, new, stages):
    before, text = dependencies(checkout), (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new, 1))
    try:
        after = dependencies(checkout)
    finally:
        (checkout / file).write_text(text)
    assert {stage for stage in before if before[stage] != after[stage]} == stages


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "command, message",
    [
        (["embed", "--profile", "tiny"], "the stage `prompts` makes it: dvc repro prompts"),
        (
            ["train", "--profile", "tiny", "--method", "g2rpo", "--seed", "1"],
            "the stage `models` makes it: dvc repro models",
        ),
        (
            ["evaluate", "--profile", "tiny", "--method", "g2rpo", "--seed", "1"],
            "the stage `train@g2rpo-1` makes it: dvc repro train@g2rpo-1",
        ),
        (
            ["report", "--profile", "tiny"],
            "the stage `evaluate_base` makes it: dvc repro evaluate_base",
        ),
        (
            ["train", "--profile", "tiny", "--method", "ppo", "--seed", "1"],
            "profiles/tiny.yaml: methods: there is no 'ppo', only g2rpo, ",
        ),
        (["models", "--profile", "tinny"], "profiles/tinny.yaml: no such profile; there are"),
    ],
)
def test_a_stage_without_its_inputs_says_which_stage_makes_them(command, message, tmp_path):
    for name in ("profiles", "params.yaml", "reports"):
        (tmp_path / name).symlink_to(ROOT / name)
    main = importlib.import_module(f"stages.{command[0]}").main
    told = refusal(main, *command[1:], folder=tmp_path)
    assert message in told and told.startswith("error: ")
