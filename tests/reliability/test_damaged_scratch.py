"""What an interrupted or finished stage left in .cache/resume is used only if nothing changed it.

Bytes are flipped, files cut, removed and added; the same command then ends with the same outputs.
"""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from g2rpo_core.foundation.manifest import describe_files
from tests.reliability.conftest import stage

SCRATCH = Path(".cache", "resume")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def add(file: Path) -> None:
    (file.parent / "more.safetensors").write_bytes(b"0")


@pytest.fixture(autouse=True)
def by_dvc(monkeypatch):
    """As DVC starts a stage: it takes the outputs later, if nothing comes between."""
    monkeypatch.setenv("DVC_STAGE", "train@g2rpo-1")


@pytest.fixture
def finished_run(project):
    """The scratch folder of the project's training, which DVC has not taken."""
    assert stage("train", project).returncode == 0
    (mark,) = (project / SCRATCH / "train").rglob("finished.json")
    return mark.parent


@pytest.mark.parametrize(
    "harm, name",
    [
        (flip, "out/transformer/diffusion_pytorch_model.safetensors"),
        (Path.unlink, "out/transformer/config.json"),
        (add, "out/transformer/config.json"),
    ],
)
@pytest.mark.pipeline
def test_a_damaged_finished_training_is_not_published(project, finished_run, harm, name):
    """Its weights are made again from the last checkpoint, which stays until DVC has the run."""
    run = project / "runs" / "small" / "g2rpo-1"
    whole = describe_files(run)
    harm(finished_run / name)  # and with it the published file, a hard link
    done = stage("train", project)
    assert done.returncode == 0 and "it is not used, but made again" in done.stderr, done.stderr
    assert describe_files(run) == whole
    assert "made again" not in stage("train", project).stderr


@pytest.mark.pipeline
def test_without_a_whole_checkpoint_a_damaged_training_says_what_to_delete(project, finished_run):
    flip(finished_run / "out/transformer/diffusion_pytorch_model.safetensors")
    (last,) = finished_run.glob("iteration-*")
    flip(next(last.glob("__0_*")))
    before = describe_files(project / "runs")
    done = stage("train", project)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ") and f"delete {last.relative_to(project)}" in line
    assert describe_files(project / "runs") == before


@pytest.mark.pipeline
def test_a_damaged_snapshot_is_not_published(project):
    """It was written hours before the end; no checkpoint before it is left."""
    profile = project / "profiles" / "small.yaml"
    data = YAML().load(profile.read_text())
    data["training"] |= {"snapshots": [1]}
    with profile.open("w") as file:
        YAML().dump(data, file)
    assert stage("train", project).returncode == 0
    (scratch,) = [path.parent for path in (project / SCRATCH).rglob("snapshots-000001.json")]
    cut(scratch / "snapshots/000001/transformer/diffusion_pytorch_model.safetensors")
    (scratch / "finished.json").unlink()  # as if it was stopped before its end
    done = stage("train", project)
    assert done.returncode == 1 and f"delete {scratch.relative_to(project)}" in done.stderr


@pytest.mark.pipeline
def test_damaged_embeddings_of_a_stopped_stage_are_encoded_again(project, monkeypatch):
    whole = describe_files(project / "embeddings")
    monkeypatch.setattr("stages.embed.write_negative", stopping := Stopping())
    for made in (project / ".cache" / "made").glob("*.json"):
        made.unlink()
    with pytest.raises(RuntimeError, match="stopped"):
        stage("embed", project)
    monkeypatch.setattr("stages.embed.write_negative", stopping.real)
    (part,) = (project / SCRATCH / "embed").rglob("train/part-00001.parquet")
    flip(part)
    done = stage("embed", project)
    assert done.returncode == 0 and "it is not used, but made again" in done.stderr
    assert describe_files(project / "embeddings") == whole


class Stopping:
    """A function of the stage that stops it, in place of a kill."""

    def __init__(self) -> None:
        from stages.embed import write_negative

        self.real = write_negative

    def __call__(self, *_: object) -> None:
        raise RuntimeError("stopped")
