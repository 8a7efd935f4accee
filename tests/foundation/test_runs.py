from g2rpo_core.foundation.runs import read_lock
from tests.conftest import ROOT


def test_the_committed_lock_has_the_outputs_of_every_stage():
    stages = read_lock(ROOT / "dvc.lock")
    assert {"models", "prompts", "embed", "report"} <= set(stages)
    assert all(out["md5"] for stage in stages.values() for out in stage.get("outs", []))
