"""Which servers `python -m flows.serve` takes."""

import os
from unittest.mock import patch

import pytest
from prefect.exceptions import ParameterTypeError

from flows import pipeline
from flows.deployed import schedule
from flows.serve import arguments
from g2rpo_core.foundation.errors import UserError
from tests.fixtures.commands import run_module
from tests.flows.conftest import Served, running
from tests.flows.tiny import environment

pytestmark = pytest.mark.pipeline


@pytest.mark.parametrize(
    "cron, timezone, why",
    [
        ("0 0 22 * * *", "UTC", "needs five fields: minute, hour, day, month, day of the week"),
        ("0 0 31 2 *", "UTC", "failed to find next date"),
        ("0 22 * * *", "Factory", "Factory"),
    ],
)
def test_a_schedule_that_prefect_takes_and_never_runs_is_refused(cron, timezone, why):
    assert schedule("train", "0 0 29 2 *", "Europe/Berlin").timezone == "Europe/Berlin"
    with pytest.raises(UserError, match=f"^--train .*{timezone}.* cannot be scheduled: .*{why}"):
        schedule("train", cron, timezone)


@pytest.mark.parametrize("option", ["--side-by-side", "--gpus"])
def test_counts_begin_at_one(option, capsys):
    """A flow without a place for a stage would wait for ever, and cancel later runs."""
    with pytest.raises(SystemExit):
        arguments([option, "0"])
    assert f"argument {option}: must be a whole number from 1 (got '0')" in capsys.readouterr().err
    with pytest.raises(ParameterTypeError, match="greater than or equal to 1"):
        pipeline.evaluate.validate_parameters({"side_by_side": 0})


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
