"""Deploy the flows on Prefect's server, one run of each at a time, and serve them."""

import asyncio
import signal
import sys
from argparse import Namespace
from pathlib import Path

import httpx
import prefect.runner.server  # noqa: F401 - now, and not while SIGTERM may end the runner
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.flows import EntrypointType
from prefect.runner import Runner
from prefect.schedules import Cron, Schedule
from prefect.server.schemas.schedules import CronSchedule

from flows import pipeline
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_yaml
from g2rpo_core.foundation.texts import echo

NAME = "g2rpo"  # of each flow's deployment
DEAD_RUNS = Path(__file__).with_name("dead_runs.yaml")
PAUSE_LIMIT = 20.0  # seconds; pausing takes less than one


def deployments(args: Namespace) -> list:
    """Return one deployment per flow, each with one run at a time.

    A run that is due meanwhile is cancelled, and its state says why.
    """
    one_at_a_time = ConcurrencyLimitConfig(
        limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
    )
    made = []
    for flow in (pipeline.reproduce, pipeline.train, pipeline.evaluate, pipeline.report):
        cron = getattr(args, flow.name)
        made.append(
            flow.to_deployment(
                NAME,
                schedule=schedule(flow.name, cron, args.timezone) if cron else None,
                concurrency_limit=one_at_a_time,
                parameters={} if flow.name == "report" else {"side_by_side": args.side_by_side},
                entrypoint_type=EntrypointType.MODULE_PATH,
            )
        )
    return made


def schedule(name: str, cron: str, timezone: str) -> Schedule:
    """Return the schedule of an option; UserError for one that Prefect cannot run, or never would.

    Prefect 3.8 takes a sixth field, of seconds; it takes dates and zones, too, at which its
    scheduler then finds nothing.
    """
    try:
        if len(cron.split()) != 5 and not cron.startswith("@"):
            raise ValueError("needs five fields: minute, hour, day, month, day of the week")
        asyncio.run(CronSchedule(cron=cron, timezone=timezone).get_dates(1))
        return Cron(cron, timezone=timezone)
    except (ValueError, LookupError) as error:
        what = " ".join(str(error).split())
        raise UserError(
            f"--{name} {cron!r} in --timezone {timezone!r} cannot be scheduled: {what}"
        ) from None


class Served(Runner):
    """Prefect's runner, cancelled by SIGTERM: its own handler starts what nothing awaits.

    An exception from a handler would not do: it can hit the event loop between two callbacks, the
    second is lost, and what waits for it never ends.
    """

    def __init__(self) -> None:
        super().__init__(pause_on_shutdown=True)
        self.ended = False
        self.serving: asyncio.Task | None = None

    def handle_sigterm(self, *_: object, **__: object) -> None:
        self.ended = True
        if self.serving is not None and not (loop := self.serving.get_loop()).is_closed():
            loop.call_soon_threadsafe(self.serving.cancel)

    async def serve(self) -> None:
        self.serving = asyncio.current_task()
        if not self.ended:
            await self.start()

    async def _pause_schedules(self) -> None:
        """Try to, for PAUSE_LIMIT: Prefect's client asks a server that hangs for minutes."""
        try:
            # In a task that is cancelled, asyncio.timeout of Python 3.11.2 raises no TimeoutError
            await asyncio.wait_for(super()._pause_schedules(), PAUSE_LIMIT)
        except (TimeoutError, httpx.HTTPError):
            echo(
                "the schedules are not paused: the Prefect server does not answer", file=sys.stderr
            )


def serve(made: list) -> None:
    """Serve deployments until Ctrl-C or SIGTERM; then pause their schedules.

    SIGTERM goes on to the handler that was there before. An ExceptionGroup of httpx.HTTPError if
    the server is away for long.
    """
    runner = Served()
    for deployment in made:
        runner.add_deployment(deployment)
    outside = signal.signal(signal.SIGTERM, runner.handle_sigterm)
    try:
        asyncio.run(runner.serve())
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, outside)
        if runner.ended:
            signal.raise_signal(signal.SIGTERM)


def limit_tag(tag: str, slots: int) -> None:
    """Let at most `slots` tasks with `tag` run at once, over all runs of the server."""
    with get_client(sync_client=True) as client:
        # the name that Prefect gives a tag's limit
        client.upsert_global_concurrency_limit_by_name(f"tag:{tag}", slots)


def crash_dead_runs() -> None:
    """Have the server mark runs as Crashed that show no sign of life, which frees their slots.

    That is the automation of `dead_runs.yaml`, made once.
    """
    automation = Automation.model_validate(read_yaml(DEAD_RUNS))
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(automation.name):
            automation.create()
