"""Which servers `python -m flows.serve` takes."""

import os
from unittest.mock import patch

import pytest

from tests.fixtures.commands import run_module
from tests.flows.conftest import Served, running
from tests.flows.tiny import environment

pytestmark = pytest.mark.pipeline


def refused(**settings: str) -> str:
    """The line with which `flows.serve` ends at once."""
    done = run_module("flows.serve", **environment(**settings))
    assert done.returncode == 1 and done.stdout == "", done.stdout
    return done.stderr


def test_without_a_server_it_says_how_to_start_one():
    assert refused(PREFECT_API_URL="").startswith("error: flows.serve needs a Prefect server: ")
    told = refused(PREFECT_API_URL="http://127.0.0.1:9/api")
    assert told.startswith("error: http://127.0.0.1:9/api: no Prefect server answers")


def test_a_server_without_a_key_that_others_reach_is_refused(tmp_path):
    """Whoever reaches it could run commands as this user."""
    with patch.dict(os.environ, PREFECT_HOME=str(tmp_path)), running(Served(tmp_path)) as served:
        served.start_server("0.0.0.0")
        told = refused(PREFECT_API_URL=served.api)
    assert "this server asks for no key, and other machines can reach it" in told
    assert "PREFECT_API_AUTH_STRING" in told and told.count("\n") == 1
