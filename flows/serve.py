"""Serves the flows with their schedules from this machine; `python -m flows.serve`.

Without PREFECT_API_URL it starts its own server (SQLite in PREFECT_HOME, .cache/prefect) and stops it at the end.
"""

import os
import signal
import sys
import threading
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from contextlib import nullcontext

import httpx
import psutil

from flows.server import ACCESS, claim_home, failed, local_server, wait_until_healthy
from g2rpo_core.foundation.errors import UserError

NAME = "g2rpo"  # of each flow's deployment
LOOK_EVERY = 15.0  # seconds between two looks at the runs' processes
SERVED_AT_START = 30.0  # seconds in which a server named by PREFECT_API_URL must answer


def arguments(given: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--reproduce", metavar="CRON", help="when to bring the whole graph up to date (default: only by hand)")
    parser.add_argument("--train", metavar="CRON", default="0 22 * * *", help="when to train; '' means only by hand")
    parser.add_argument("--evaluate", metavar="CRON", default="0 6 * * *", help="when to score new runs; '' means only by hand")
    parser.add_argument("--report", metavar="CRON", help="when to write the report (default: only by hand)")
    parser.add_argument("--timezone", default="UTC", help="timezone of all schedules, such as Europe/Berlin")
    parser.add_argument("--gpus", type=int, default=1, help="how many stages with the tag gpu run at once")
    parser.add_argument("--side-by-side", type=int, default=2, help="how many stages run at once within one flow run")
    parser.add_argument("--port", type=int, default=4200, help="port of the server that is started here")
    args = parser.parse_args(given)
    if not 1 <= args.port <= 65535:
        parser.error(f"--port {args.port}: must be from 1 to 65535")
    return args


def deployments(args: Namespace) -> list:
    """Return one deployment per flow, with one run at a time; a run that is due meanwhile is cancelled, and its state says why."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.flows import EntrypointType
    from prefect.schedules import Cron

    from flows import pipeline

    one_at_a_time = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    made = []
    for flow in (pipeline.reproduce, pipeline.train, pipeline.evaluate, pipeline.report):
        cron = getattr(args, flow.name)
        try:
            schedule = Cron(cron, timezone=args.timezone) if cron else None
            made.append(
                flow.to_deployment(
                    NAME,
                    schedule=schedule,
                    concurrency_limit=one_at_a_time,
                    parameters={} if flow.name == "report" else {"side_by_side": args.side_by_side},
                    entrypoint_type=EntrypointType.MODULE_PATH,
                )
            )
        except ValueError as error:
            raise UserError(f"--{flow.name} {cron!r} in --timezone {args.timezone}: {' '.join(str(error).split())}") from None
    return made


def limit_tag(tag: str, slots: int) -> None:
    """Let at most `slots` tasks with `tag` run at once, over all runs of the server."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        # the name that Prefect gives a tag's limit
        client.upsert_global_concurrency_limit_by_name(f"tag:{tag}", slots)


def crash_dead_runs() -> None:
    """Mark a run as Crashed once its process is gone in two looks in a row, so that its deployment's slot is free again.

    Silence proves nothing: a machine that slept has runs that go on. Runs until this process ends.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
    from prefect.exceptions import PrefectException
    from prefect.states import Crashed

    ours = DeploymentFilter.model_validate({"name": {"any_": [NAME]}})
    running = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}})
    dead = Crashed(message="its process has ended without notice; the next run resumes from its checkpoint")
    missing: set[str] = set()
    while True:
        time.sleep(LOOK_EVERY)
        try:
            with get_client(sync_client=True) as client:
                runs = {str(run.id) for run in client.read_flow_runs(deployment_filter=ours, flow_run_filter=running)}
                gone = runs - runs_here()
                for run in gone & missing:
                    client.set_flow_run_state(run, dead)
                missing = gone
        except (httpx.HTTPError, PrefectException):  # the server is away, or somebody deleted the run
            missing = set()


def runs_here() -> set[str]:
    """Return the ids of the runs whose process lives on this machine."""
    found = set()
    for process in psutil.process_iter(["environ", "cmdline"]):
        if "prefect.engine" in (process.info["cmdline"] or ()):
            found.add((process.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID", ""))
    return found


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    # Without this handler, the server would outlive this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"error: {failed[0]}" if failed else 128 + signal.SIGTERM))
    existing = os.environ.get("PREFECT_API_URL")
    try:
        with claim_home() as home, nullcontext(existing) if existing else local_server(args.port, home) as api:
            # read when prefect is imported, by this process and by every run
            os.environ["PREFECT_API_URL"] = api
            wait_until_healthy(api, limit=SERVED_AT_START)
            from prefect import serve

            made = deployments(args)
            limit_tag("gpu", args.gpus)
            threading.Thread(target=crash_dead_runs, daemon=True).start()
            key = "" if existing else f" (its key: {home / ACCESS})"
            print(f"serving {', '.join(one.flow_name for one in made)}; see {api.removesuffix('/api')}{key}", flush=True)
            while True:
                try:
                    serve(*made, print_starting_message=False)
                    return
                except* httpx.HTTPError:  # the runner gives up if its server is away for long
                    print("the runner lost its server: serving again when it answers", file=sys.stderr, flush=True)
                wait_until_healthy(api)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
