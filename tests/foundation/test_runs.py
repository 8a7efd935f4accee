from pathlib import Path

import pytest

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.runs import read_lock
from tests.conftest import ROOT


def test_the_committed_lock_has_the_outputs_of_every_stage():
    stages = read_lock(ROOT / "dvc.lock")
    assert {"models", "prompts", "embed", "report"} <= set(stages)
    assert all(out["md5"] for stage in stages.values() for out in stage.get("outs", []))


@pytest.mark.parametrize(
    "text", ["stages: [a]", "stages: {a: {outs: [{path: x}]}}", "{}", "stages: {a: ["]
)
def test_a_file_that_is_no_lock_is_named_with_what_to_do(here, text):
    Path("dvc.lock").write_text(text)
    with pytest.raises(UserError, match=r"dvc.lock: .*git checkout"):
        read_lock(Path("dvc.lock"))
