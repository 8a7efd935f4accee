import shutil
import signal
from pathlib import Path

import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML

from g2rpo_core.foundation.files import LEFT
from g2rpo_core.foundation.runs import hash_of
from pipeline import reproduce, runner, todo
from pipeline.graph import read_graph
from pipeline.process import GRACE
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.errors import refused
from tests.fixtures.projects import git, init

RUN = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text())


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project's own graph: dvc.yaml, its parameters and profiles, and no data."""
    folder = tmp_path_factory.mktemp("graph")
    for name in ("dvc.yaml", "params.yaml", ".dvcignore"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    (folder / ".dvc").mkdir()
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc" / "config")
    git(folder, "init", "--quiet")
    return folder


@pytest.fixture(autouse=True)
def inside(project, monkeypatch):
    monkeypatch.chdir(project)


def test_the_projects_own_graph_makes_a_task_for_every_stage_and_run():
    stages = read_graph()
    runs = {f"{method}-{seed}" for method in RUN["methods"] for seed in RUN["seeds"]}
    assert {name for name in stages if "@" in name} == {
        f"{stage}@{run}" for stage in ("train", "evaluate") for run in runs
    }
    assert set(stages["embed"].needs) == {"profile", "models", "prompts"}
    run = min(runs)
    assert f"train@{run}" in stages[f"evaluate@{run}"].needs
    assert {f"evaluate@{run}" for run in runs} <= set(stages["report"].needs)
    assert all(
        "gpu" in stages[name].meta.tags
        for name in stages
        if name.startswith(("train@", "evaluate", "embed"))
    )
    assert stages["models"].meta.retries > 0 and not stages[f"train@{run}"].meta.retries


def test_an_unknown_key_of_a_stage_is_told_in_one_line(project):
    file = project / "dvc.yaml"
    text = file.read_text()
    file.write_text(text.replace("time_limit: ", "time_limitt: ", 1))
    try:
        with refused("meta.flow.time_limitt: unknown key; allowed are tags, "):
            read_graph()
    finally:
        file.write_text(text)


def test_a_stage_has_its_profiles_grace_before_it_is_killed(tmp_path):
    assert runner.grace_of(tmp_path) == GRACE
    (tmp_path / "reports").mkdir()
    of_method = "training: {}\nmethods: {first: {}, slow: {training: {checkpoints: {grace: 300}}}}"
    for text, seconds in (("training: {checkpoints: {every: 3}}", 25), (of_method, 300)):
        (tmp_path / "reports" / "profile.yaml").write_text(text)
        assert runner.grace_of(tmp_path) == seconds + runner.MARGIN


@pytest.mark.parametrize("gpu", [False, True])
def test_reproduce_runs_two_stages_at_a_time_where_there_is_no_gpu(here, monkeypatch, gpu):
    """Each of two real stages of DVC says whether it met the other."""
    (here / "meet.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nmine, other = sys.argv[1:]\n"
        "Path(f'{mine}.here').touch()\n"
        "end = time.monotonic() + float(os.environ['WAIT'])\n"
        "while not (met := Path(f'{other}.here').exists()) and time.monotonic() < end: "
        "time.sleep(0.05)\n"
        "Path(mine).write_text(str(met))\nPath(f'{mine}.here').unlink() if not met else None\n"
    )
    stage = "  {0}:\n    cmd: python meet.py {0} {1}\n    outs: [{0}]\n"
    (here / "dvc.yaml").write_text("stages:\n" + stage.format("a", "b") + stage.format("b", "a"))
    for name in ("params.yaml", "profiles"):
        (here / name).symlink_to(ROOT / name)
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    init(here)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(reproduce, "SIDE_BY_SIDE", 2)
    monkeypatch.setenv("WAIT", "0" if gpu else "60")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    done = run_here(reproduce.main, folder=here)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert done.returncode == 0, done.stderr
    assert {Path(name).read_text() for name in "ab"} == {str(not gpu)}
    assert {log.name for log in Path(".cache", "reproduce").iterdir()} == {"a.log", "b.log"}


def test_editors_files_are_no_content_and_a_link_to_nothing_is_one_line(project):
    folder = project / "profiles"
    before = hash_of(folder)
    for name in (".tiny.yaml.swp", ".tiny.yaml.swo", "tiny.yaml~", "#tiny.yaml#", ".DS_Store"):
        (folder / name).write_text("not yet saved")
    (folder / ".#tiny.yaml").symlink_to("me@host.1234:1764547200")  # Emacs' lock
    deps = [dep for stage in Repo().index.stages for dep in stage.deps]
    assert {before} == {dep.get_hash().value for dep in deps if str(dep) == "profiles"}
    assert hash_of(folder) == before
    assert set(LEFT) < set((ROOT / ".dvcignore").read_text().replace("\\", "").split("\n"))
    (folder / "gone.yaml").symlink_to("nowhere")
    with refused("profiles/gone.yaml: is a link to nothing: delete it"):
        read_graph()
    assert "profiles/gone.yaml: is a link to nothing" in refusal(todo.main, folder=project)
