"""Prefect flows over DVC's graph, the only graph and cache; `dvc repro` works without them."""

import os
import sys
from importlib.util import find_spec

if not find_spec("prefect"):
    sys.exit("error: prefect is not installed: pip install 'g2rpo[flows]'")
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
