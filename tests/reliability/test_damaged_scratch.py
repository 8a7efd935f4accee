"""What an interrupted or finished stage left in .cache/resume is used only if nothing changed it.

Bytes are flipped and files removed; the same command then ends with the same outputs.
"""

from pathlib import Path

import pytest

from g2rpo_core.foundation.manifest import describe_files
from tests.reliability.conftest import stage

pytestmark = pytest.mark.pipeline
SCRATCH = Path(".cache", "resume")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(autouse=True)
def by_dvc(monkeypatch):
    """As DVC starts a stage: it takes the outputs later, if nothing comes between."""
    monkeypatch.setenv("DVC_STAGE", "train@g2rpo-1")


@pytest.mark.parametrize(
    "harm, name",
    [
        (flip, "out/transformer/diffusion_pytorch_model.safetensors"),
        (Path.unlink, "out/transformer/config.json"),
    ],
)
def test_a_damaged_finished_training_is_not_published(project, harm, name):
    """Its weights are made again from the last checkpoint, which stays until DVC has the run."""
    run = project / "runs" / "small" / "g2rpo-1"
    whole = describe_files(run)
    assert stage("train", project).returncode == 0
    (mark,) = (project / SCRATCH / "train").rglob("finished.json")
    harm(mark.parent / name)  # and with it the published file, a hard link
    done = stage("train", project)
    assert done.returncode == 0 and "it is not used, but made again" in done.stderr, done.stderr
    assert describe_files(run) == whole
    assert "made again" not in stage("train", project).stderr


def test_damaged_embeddings_of_a_stopped_stage_are_encoded_again(project, monkeypatch):
    def stop(*_: object) -> None:
        raise RuntimeError("stopped")

    whole = describe_files(project / "embeddings")
    for made in (project / ".cache" / "made").glob("*.json"):
        made.unlink()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr("stages.embed.write_negative", stop)
        stage("embed", project)
    (part,) = (project / SCRATCH / "embed").rglob("train/part-00001.parquet")
    flip(part)
    done = stage("embed", project)
    assert done.returncode == 0 and "it is not used, but made again" in done.stderr
    assert describe_files(project / "embeddings") == whole
