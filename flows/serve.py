"""Serve the flows with their schedules from this machine; `python -m flows.serve`.

The Prefect server is the one that PREFECT_API_URL names, such as one of `prefect server start`.
"""

import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace

import httpx

from flows import deployed
from flows.server import answers, find_server
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from stages.entry import at_least_one

AWAY_WAIT = 5.0  # seconds between two looks for a server that is away


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
        "--gpus", type=at_least_one, default=1, help="how many stages with the tag gpu run at once"
    )
    parser.add_argument(
        "--side-by-side",
        type=at_least_one,
        default=2,
        help="how many stages run at once within one flow run",
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    try:
        api = find_server()
        made = deployed.deployments(args)
        deployed.limit_tag("gpu", args.gpus)
        deployed.crash_dead_runs()
        echo(f"serving {', '.join(one.flow_name for one in made)}; see {api.removesuffix('/api')}")
        while True:
            try:
                deployed.serve(made)
                return
            except* httpx.HTTPError:  # the runner gives up if its server is away for long
                echo("the runner lost its server: serving again when it answers", file=sys.stderr)
            while not answers(api):
                time.sleep(AWAY_WAIT)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
