"""The flows as they run for a user: a real server, a real runner, real processes."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime

import psutil
import pytest

from flows.server import RESTARTS, healthy
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.waiting import HUNG, until
from tests.flows.conftest import free_port, poll
from tests.flows.test_own_server import command
from tests.flows.tiny import environment, repository

pytestmark = pytest.mark.pipeline


def names(tasks: dict) -> dict[str, str]:
    return {name: task["state"]["name"] for name, task in tasks.items()}


def training(served) -> list[psutil.Process]:
    """Running processes of the repository's training stage."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        try:
            if (
                process.info["cmdline"]
                and "train.py" in process.info["cmdline"]
                and process.cwd() == str(served.folder)
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def fresh_training(served):
    for name in ("started", "checkpoint", "enough", "weights", "spoiled"):
        (served.folder / name).unlink(missing_ok=True)
    yield
    (served.folder / "enough").touch()  # whatever a failed test left running ends


def begun(served, flow: str = "train", **parameters) -> str:
    """The id of a run whose training has started."""
    run = served.start(flow, **parameters)
    until((served.folder / "started").exists)
    return run


def artifact(served, run: str, key: str) -> str | None:
    """The data of an artifact of the run's training, if there is one."""
    found = [one for one in served.of_run("artifacts", run) if one["key"] == f"{key}-train-g2rpo-1"]
    return found[0]["data"] if found else None


def test_stages_run_after_those_they_need_and_are_skipped_when_nothing_changed(served):
    run, state = served.run("reproduce", targets=["second"])
    assert state["type"] == "COMPLETED", state
    tasks = served.tasks(run)
    assert names(tasks) == {"first": "Completed", "second@a": "Completed", "second@b": "Completed"}
    one, other = sorted((tasks["second@a"], tasks["second@b"]), key=lambda task: task["start_time"])
    assert tasks["first"]["end_time"] <= one["start_time"]
    assert one["end_time"] <= other["start_time"]  # both have the tag gpu, and there is one
    poll(
        lambda: "> cat one > two_a" in served.log(run)
    )  # sent in batches: some arrive after the state
    assert (served.folder / "two_b").read_text() == "one\n"
    run, state = served.run("reproduce", targets=["second"])
    assert set(names(served.tasks(run)).values()) == {"Skipped"}
    assert state["message"] == "0 of 3 stages ran or were restored, 3 skipped"


def test_what_can_pass_is_tried_again_bad_input_and_a_time_limit_are_not(served):
    run, state = served.run("reproduce", targets=["flaky", "after_broken", "endless"])
    tasks = served.tasks(run)
    assert names(tasks) == {
        "flaky": "Completed",
        "broken": "Failed",
        "after_broken": "NotReady",
        "endless": "Failed",
    }
    assert {name: task["run_count"] for name, task in tasks.items()} == {
        "flaky": 3,
        "broken": 1,
        "after_broken": 0,
        "endless": 1,
    }
    assert (served.folder / "tries").read_text() == "3"
    assert state["type"] == "FAILED"
    assert "broken: exit status 1" in state["message"] and state["message"].endswith(
        "; not run after it: after_broken"
    )
    assert "endless: over its time limit of 2 s" in state["message"]
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "1000"]
    ]
    (failure,) = (one for one in served.of_run("artifacts", run) if one["key"] == "failure-broken")
    assert "no such prompt" in failure["data"]


@pytest.mark.slow
def test_cancelling_ends_training_and_leaves_its_checkpoint(served, fresh_training):
    run = begun(served)
    poll(lambda: artifact(served, run, "progress"))
    served.post(f"/flow_runs/{run}/set_state", state={"type": "CANCELLING"})
    assert served.ended(run)["type"] == "CANCELLED"
    assert not training(served), served.log(run)
    assert int((served.folder / "checkpoint").read_text()) > 0
    assert names(served.tasks(run)) == {"train@g2rpo-1": "Cancelled"}


def test_a_deployments_second_run_is_skipped_and_says_so_while_another_flow_runs(
    served, fresh_training
):
    run = begun(served)
    _, second = served.run("train")
    assert second["type"] == "CANCELLED" and "concurrency limit" in second["message"]
    # meanwhile, other flows in the same repository: one with a mistake, and one that wants the very
    # stage that is running
    _, mistaken = served.run("reproduce", targets=["second@c"])
    assert mistaken["type"] == "FAILED" and mistaken["message"].startswith(
        "dvc.yaml: no stage 'second@c'; there are "
    )
    same = served.start("reproduce", targets=["train"])
    poll(lambda: any("waiting for it" in line for line in served.log(same)))
    (served.folder / "enough").touch()
    assert served.ended(run)["type"] == "COMPLETED"
    assert served.ended(same)["type"] == "COMPLETED"
    assert names(served.tasks(same)) == {"train@g2rpo-1": "Skipped"}


def test_dvc_repro_and_a_flow_leave_each_others_training_alone(served, fresh_training):
    """DVC refuses the second in its own words; a flow waits, and then has nothing to do."""
    by_hand = [sys.executable, "-m", "dvc", "repro", "train@g2rpo-1"]
    start = lambda: subprocess.Popen(
        by_hand,
        cwd=served.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = begun(served)
    second = start()
    said = second.communicate(timeout=HUNG)[0]
    assert second.returncode != 0 and "is busy, it is being blocked by" in said, said
    (served.folder / "enough").touch()
    assert served.ended(run)["type"] == "COMPLETED"
    assert "didn't change, skipping" in start().communicate(timeout=HUNG)[0]

    for name in ("started", "enough", "weights"):
        (served.folder / name).unlink()
    first = start()
    until((served.folder / "started").exists)
    run = served.start("reproduce", targets=["train"])
    poll(lambda: any("waiting for it" in line for line in served.log(run)))
    (served.folder / "enough").touch()
    assert (
        "Running stage 'train@g2rpo-1'" in first.communicate(timeout=HUNG)[0]
        and first.returncode == 0
    )
    assert served.ended(run)["type"] == "COMPLETED"
    assert names(served.tasks(run)) == {"train@g2rpo-1": "Skipped"}
    assert (served.folder / "weights").read_text() == "w"


def test_a_training_shows_its_rewards_and_its_curve_while_it_runs(served, fresh_training):
    run = served.start("train")
    live = lambda key: artifact(served, run, key)
    rewards = lambda: json.loads(live("rewards"))
    poll(lambda: live("rewards"))
    first = rewards()
    newest = first[0]["iteration"]
    assert newest > 0 or len(first) == 1
    assert first[0]["reward_hps"] == newest / 100 and "kl" not in first[0]  # it was no number
    later = poll(lambda: (rows := rewards())[0]["iteration"] > newest and rows)
    end = later[0]["iteration"]
    assert [row["iteration"] for row in later] == list(range(end, max(-1, end - 12), -1))
    curve = live("curve")
    poll(lambda: live("curve") != curve)
    assert curve.startswith("data:image/png;base64,")
    folder = served.folder / ".cache" / "live" / "tiny" / "g2rpo-1"
    assert live("live") == f"[g2rpo-1]({folder.as_uri()})"
    (served.folder / "enough").touch()
    assert served.ended(run)["type"] == "COMPLETED"


def test_a_schedule_has_its_cron_and_time_zone_and_the_server_plans_its_runs(served):
    deployment = served.get("/deployments/name/evaluate/g2rpo")
    (schedule,) = deployment["schedules"]
    asked = {"cron": "7 * * * *", "timezone": "Europe/Berlin"}
    assert schedule["active"] and asked.items() <= schedule["schedule"].items()
    runs = {
        "deployment_id": {"any_": [deployment["id"]]},
        "state": {"type": {"any_": ["SCHEDULED"]}},
    }
    planned = poll(lambda: served.post("/flow_runs/filter", flow_runs=runs))
    times = [datetime.fromisoformat(run["expected_start_time"]) for run in planned]
    assert all(run["auto_scheduled"] for run in planned) and {time.minute for time in times} == {7}


def test_a_worker_of_the_work_pool_runs_what_prefect_yaml_deploys(served):
    own = environment(PREFECT_API_URL=served.api, G2RPO_CHECKOUT=str(served.folder))
    prefect = lambda *words, folder=ROOT: run_module(
        "prefect", "--no-prompt", *words, folder=folder, **own
    ).check_returncode()
    prefect("work-pool", "create", "g2rpo", "--type", "process")
    prefect("deploy", "--all")
    deployed = served.post("/deployments/filter", work_pools={"name": {"any_": ["g2rpo"]}})
    ids = {one["entrypoint"].removeprefix("flows.pipeline."): one["id"] for one in deployed}
    assert set(ids) == {"reproduce", "train", "evaluate", "report"}
    assert all(one["concurrency_options"]["collision_strategy"] == "CANCEL_NEW" for one in deployed)
    asked = f"/deployments/{ids['reproduce']}/create_flow_run"
    run = served.post(asked, parameters={"targets": ["evaluate_base"]})["id"]
    prefect("worker", "start", "--pool", "g2rpo", "--run-once", folder=served.folder)
    assert served.ended(run)["type"] == "COMPLETED"
    assert "evaluate_base" in served.tasks(run)
    (results,) = (one for one in served.of_run("artifacts", run) if one["key"] == "results")
    assert json.loads(results["data"]) == [{"model": "base-0", "hps": 0.25}]


@pytest.mark.slow
def test_a_runner_that_dies_loses_nothing(served, fresh_training):
    run = begun(served)
    os.kill(served.processes["serve"].pid, signal.SIGKILL)
    served.processes["serve"].wait()
    (served.folder / "enough").touch()
    state = served.ended(run)
    assert state["type"] == "COMPLETED", (state, served.log(run))
    assert (served.folder / "weights").exists()
    served.serve()  # for the tests that follow


def engine_of(run: str) -> psutil.Process:
    """The process of a flow run."""
    (found,) = (
        one
        for one in psutil.process_iter(["cmdline", "environ"])
        if run in str((one.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID"))
        and "prefect" in " ".join(one.info["cmdline"])
    )
    return found


@pytest.mark.slow
@pytest.mark.engines
def test_a_run_whose_process_is_killed_becomes_crashed_and_gives_its_slot_back(
    served, fresh_training
):
    run = begun(served)
    engine = engine_of(run)
    served.processes["serve"].kill()  # the runner, which sees its child's end, cannot tell of it
    served.processes["serve"].wait()
    for process in [*engine.children(recursive=True), engine]:
        process.kill()
    served.serve()
    assert served.ended(run)["type"] == "CRASHED"
    (served.folder / "enough").touch()
    _, state = served.run("train")
    assert state["type"] == "COMPLETED", state


@pytest.mark.slow
def test_a_live_view_that_fails_is_one_line_and_the_training_goes_on(served, fresh_training):
    (served.folder / "spoiled").touch()
    run = served.start("train")
    shown = lambda: artifact(served, run, "progress")
    first = poll(shown)
    second = poll(lambda: (now := shown()) != first and now)
    poll(lambda: shown() != second)
    (served.folder / "enough").touch()
    assert served.ended(run)["type"] == "COMPLETED"
    said = [line for line in served.log(run) if "no progress shown" in line]
    assert len(said) == 1 and "JSONDecodeError" in said[0]


@pytest.mark.slow
@pytest.mark.engines
def test_serve_restarts_its_server_and_ends_in_one_line_where_that_does_not_help(tmp_path):
    """Its own server, killed until it is given up."""
    port, log = free_port(), tmp_path / "serve.log"
    folder = repository(tmp_path / "project")
    with log.open("wb") as file:
        serve = subprocess.Popen(**command(port), cwd=folder, stdout=file, stderr=file)
    said = lambda text: text in log.read_text(errors="replace")
    answers = lambda: healthy(f"http://127.0.0.1:{port}/api")
    try:
        until(lambda: said("serving"))
        for turn in range(1, RESTARTS + 2):
            until(answers)
            children = psutil.Process(serve.pid).children()
            leader = next(one for one in children if "server" in one.cmdline())
            os.killpg(leader.pid, signal.SIGKILL)
            if turn <= RESTARTS:
                until(lambda turn=turn: said(f"restarting it ({turn} of {RESTARTS})"))
        assert serve.wait(HUNG) == 1
    finally:
        serve.kill()
    assert said(f"error: the Prefect server ended by signal 9 for the {RESTARTS + 1}th time")
    assert not answers()
