"""The flows as they run for a user: a real server, a real runner, real processes."""

import json

import psutil
import pytest

from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.waiting import until
from tests.flows.conftest import poll
from tests.flows.tiny import environment

pytestmark = pytest.mark.pipeline


def names(tasks: dict) -> dict[str, str]:
    return {name: task["state"]["name"] for name, task in tasks.items()}


def running(*command: str) -> list[psutil.Process]:
    """Processes whose command ends with these words."""
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if (one.info["cmdline"] or [])[-len(command) :] == [*command]]


@pytest.fixture
def fresh_training(served):
    for name in ("started", "checkpoint", "enough", "weights"):
        (served.folder / name).unlink(missing_ok=True)
    yield
    (served.folder / "enough").touch()  # whatever a failed test left running ends


def begun(served, flow: str = "train", **parameters) -> str:
    """The id of a run whose training has started."""
    run = served.start(flow, **parameters)
    until((served.folder / "started").exists)
    return run


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
    assert not running("sleep", "1000")
    (failure,) = (one for one in served.of_run("artifacts", run) if one["key"] == "failure-broken")
    assert "no such prompt" in failure["data"]


@pytest.mark.slow
def test_cancelling_ends_training_and_leaves_its_checkpoint(served, fresh_training):
    run = begun(served)
    made = lambda: {one["key"] for one in served.of_run("artifacts", run)}
    poll(lambda: "progress-train-g2rpo-1" in made())
    served.post(f"/flow_runs/{run}/set_state", state={"type": "CANCELLING"})
    assert served.ended(run)["type"] == "CANCELLED"
    assert not running("train.py"), served.log(run)
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
    poll(lambda: any("is busy" in line for line in served.log(same)))
    (served.folder / "enough").touch()
    assert served.ended(run)["type"] == "COMPLETED"
    assert served.ended(same)["type"] == "COMPLETED"
    assert names(served.tasks(same)) == {"train@g2rpo-1": "Skipped"}


def test_a_schedule_has_its_cron_and_time_zone(served):
    (schedule,) = served.get("/deployments/name/evaluate/g2rpo")["schedules"]
    asked = {"cron": "7 * * * *", "timezone": "Europe/Berlin"}
    assert schedule["active"] and asked.items() <= schedule["schedule"].items()


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
def test_a_run_whose_machine_died_becomes_crashed_and_gives_its_slot_back(served, fresh_training):
    """Nobody who is left could tell of it but the server, which hears no more of the run."""
    run = begun(served)
    heard = {"event": {"name": ["prefect.flow-run.heartbeat"]}}
    poll(lambda: served.post("/events/filter", filter=heard)["events"])
    engine = engine_of(run)
    for process in [*engine.children(recursive=True), engine]:
        process.suspend()  # the runner would see it end
    state = served.ended(run)
    for process in [*engine.children(recursive=True), engine]:
        process.kill()
    assert state["type"] == "CRASHED" and "resumes from its checkpoint" in state["message"]
    (served.folder / "enough").touch()
    _, state = served.run("train")
    assert state["type"] == "COMPLETED", state
