import shutil
from pathlib import Path

import pytest

from g2rpo_core.models.policy import Policy
from tests.fixtures.weights import randomize


@pytest.fixture(scope="module")
def pipeline(models, tmp_path_factory) -> Path:
    """A base whose velocity and gates are not almost zero, so that all its blocks have a say."""
    folder = tmp_path_factory.mktemp("lively") / "pipeline"
    base = Policy.load_to_train(models / "pipeline", height=32, width=32, guidance=3.5)
    randomize(base.transformer)
    shutil.copytree(models / "pipeline", folder)
    base.save(folder)
    return folder
