"""Serves the flows with their schedules from this machine; `python -m flows.serve`.

Without PREFECT_API_URL it starts its own server (SQLite in PREFECT_HOME, .cache/prefect) and stops
it at the end.
"""

import os
import signal
import sys
import threading
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from contextlib import nullcontext

import httpx

from flows.server import ACCESS, claim_home, failed, local_server, wait_until_healthy
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo

SERVED_AT_START = 30.0  # seconds in which a server named by PREFECT_API_URL must answer


def arguments(given: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--reproduce",
        metavar="CRON",
        help="when to bring the whole graph up to date (default: only by hand)",
    )
    parser.add_argument(
        "--train", metavar="CRON", default="0 22 * * *", help="when to train; '' means only by hand"
    )
    parser.add_argument(
        "--evaluate",
        metavar="CRON",
        default="0 6 * * *",
        help="when to score new runs; '' means only by hand",
    )
    parser.add_argument(
        "--report", metavar="CRON", help="when to write the report (default: only by hand)"
    )
    parser.add_argument(
        "--timezone", default="UTC", help="timezone of all schedules, such as Europe/Berlin"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="how many stages with the tag gpu run at once"
    )
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=2,
        help="how many stages run at once within one flow run",
    )
    parser.add_argument(
        "--port", type=int, default=4200, help="port of the server that is started here"
    )
    args = parser.parse_args(given)
    if not 1 <= args.port <= 65535:
        parser.error(f"--port {args.port}: must be from 1 to 65535")
    return args


def end(*_: object) -> None:
    """Exit on SIGTERM, with the reason if it is the server's."""
    sys.exit(f"error: {failed[0]}" if failed else 128 + signal.SIGTERM)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    # Without this handler, the server would outlive this process
    signal.signal(signal.SIGTERM, end)
    existing = os.environ.get("PREFECT_API_URL")
    try:
        with (
            claim_home() as home,
            nullcontext(existing) if existing else local_server(args.port, home) as api,
        ):
            # read when prefect is imported, by this process and by every run
            os.environ["PREFECT_API_URL"] = api
            wait_until_healthy(api, limit=SERVED_AT_START)
            from flows import deployed

            made = deployed.deployments(args)
            deployed.limit_tag("gpu", args.gpus)
            threading.Thread(target=deployed.crash_dead_runs, daemon=True).start()
            key = "" if existing else f" (its key: {home / ACCESS})"
            echo(
                f"serving {', '.join(one.flow_name for one in made)}; "
                f"see {api.removesuffix('/api')}{key}",
            )
            while True:
                try:
                    deployed.serve(made)
                    return
                except* httpx.HTTPError:  # the runner gives up if its server is away for long
                    echo(
                        "the runner lost its server: serving again when it answers",
                        file=sys.stderr,
                    )
                wait_until_healthy(api)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
