"""Prefect flows over DVC's graph, the only graph and cache; `dvc repro` works without them."""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# Known failures: (package, versions that work, what happens with others).
KNOWN = (
    ("prefect", ">=3.8,<4", "the flows are written for the interface of Prefect 3.8"),
    (
        "fastapi",
        "<0.151",
        "Prefect's server does not start: Body() got an unexpected keyword argument 'min_items'",
    ),
    ("sqlalchemy", "<2.1", "cron runs are silently never scheduled"),
)

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; dead_runs.yaml waits for four of them
    "PREFECT_CLIENT_MAX_RETRIES": "10",  # a server that restarts within minutes ends no run
    # with the default (in memory), a restarted server never frees the slots taken before
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}.items():
    os.environ.setdefault(_name, _value)


def version_problem(installed: Mapping[str, str]) -> str | None:
    """Describe the first package whose version is known to fail; None if all are good."""
    for package, good, consequence in KNOWN:
        if package not in installed:
            return f"{package} is not installed: pip install 'g2rpo[flows]'"
        if installed[package] not in SpecifierSet(good):
            return (
                f"{package} {installed[package]} is known to fail ({consequence}): "
                f"pip install '{package}{good}'"
            )
    return None


def _installed() -> dict[str, str]:
    found = {}
    for package, _, _ in KNOWN:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if _problem := version_problem(_installed()):
    sys.exit(f"error: {_problem}")
