"""A run on a hub: uploaded by the command, downloaded again by the hub's own client, and loaded: the same velocities."""

import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard, constants, snapshot_download

from g2rpo_core.models.flux import Policy
from tests.conftest import ROOT
from tests.fixtures.projects import small_project
from tests.fixtures.small_hub import small_hub

pytestmark = pytest.mark.pipeline
TOKEN = "hf_thisMustNeverBeShown"


@pytest.fixture(scope="module")
def project(models, tmp_path_factory):
    return small_project(tmp_path_factory.mktemp("push"), models)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with small_hub() as hub:
        hub.writer = TOKEN
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield hub


def push(project, hub, *words, token=TOKEN):
    """The command in a process of its own: the hub's client reads its address and token once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment |= {"HF_HOME": str(project / "home"), **({"HF_TOKEN": token} if token else {})}
    command = [sys.executable, "-m", "g2rpo_core.cli", "export", *words]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr
    return done


def velocity(policy, embeddings):
    x = policy.noise(torch.Generator().manual_seed(0), 2)
    with torch.no_grad():
        return policy.velocity(embeddings.conditioning([0, 1]))(x, torch.tensor([0.9, 0.3]), torch.tensor([0, 1]))


def test_what_was_uploaded_comes_back_with_its_card_and_gives_the_same_velocities(project, hub, models, embeddings, tmp_path):
    done = push(project, hub, "g2rpo-1", "--form", "diffusers", "--out", "out", "--push", "somebody/tuned")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{hub.url}/somebody/tuned/commit/")
    assert hub.repos["somebody/tuned"].private
    folder = snapshot_download("somebody/tuned", token=TOKEN, cache_dir=tmp_path)
    how = {"height": 32, "width": 32, "guidance": 3.5}
    ours = Policy.load(models / "pipeline", project / "runs" / "tiny" / "g2rpo-1", **how)
    theirs = Policy.load(models / "pipeline", type(project)(folder), **how)
    assert torch.equal(velocity(ours, embeddings), velocity(theirs, embeddings))
    card = ModelCard.load(f"{folder}/README.md")
    assert card.data.library_name == "diffusers" and card.data.pipeline_tag == "text-to-image"
    assert 'from_pretrained("somebody/tuned", subfolder="transformer")' in card.text and TOKEN not in card.content
    public = push(project, hub, "g2rpo-2", "--form", "lora", "--out", "lora", "--push", "somebody/lora", "--public")
    assert public.returncode == 0 and not hub.repos["somebody/lora"].private
    again = push(project, hub, "g2rpo-2", "--form", "lora", "--out", "again", "--push", "somebody/lora")
    assert again.returncode == 1
    assert "--push somebody/lora: it is there already and everybody can see it: give --public, or another name" in again.stderr


@pytest.mark.parametrize(
    "words, token, complaint, status",
    [
        (["--push", "a/b/c"], TOKEN, "--push a/b/c: no name of a repository; give it as `user/name`", 1),
        (["--push", "a/b"], None, "--push: you are not logged in to the hub: `hf auth login`, or set HF_TOKEN", 1),
        (["--push", "a/b"], TOKEN + "2", "refuses (403): the token must be one that may write to it", 1),
        (["--public"], TOKEN, "export: --public is about --push", 1),
    ],
)
def test_what_cannot_be_uploaded_is_said_in_one_line(project, hub, words, token, complaint, status, tmp_path):
    done = push(project, hub, "g2rpo-1", "--form", "diffusers", "--out", str(tmp_path / "new"), *words, token=token)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == status and len(errors) == 1 and complaint in errors[0], done.stderr
