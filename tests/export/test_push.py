"""A run on a hub: uploaded by the command, downloaded again by the hub's own client, and loaded: the same velocities."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants, snapshot_download

from g2rpo_core.cli.main import main
from g2rpo_core.errors import TRANSIENT_STATUS
from g2rpo_core.models.policy import Policy
from tests.fixtures.commands import run_here
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
            "ENDPOINT": hub.url,  # what HF_ENDPOINT sets
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def push(project, *words):
    done = run_here(main, "export", *words, folder=project)
    assert TOKEN not in done.stdout + done.stderr
    return done


def velocity(policy, embeddings):
    x = policy.noise(torch.Generator().manual_seed(0), 2)
    with torch.no_grad():
        return policy.velocity(embeddings.conditioning([0, 1]))(x, torch.tensor([0.9, 0.3]), torch.tensor([0, 1]))


def test_what_was_uploaded_comes_back_with_its_card_and_gives_the_same_velocities(project, hub, models, embeddings, tmp_path):
    done = push(project, "g2rpo-1", "--form", "diffusers", "--out", "out", "--push", "somebody/tuned")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{hub.url}/somebody/tuned/commit/")
    assert hub.repos["somebody/tuned"].private
    folder = snapshot_download("somebody/tuned", token=TOKEN, cache_dir=tmp_path)
    how = {"height": 32, "width": 32, "guidance": 3.5}
    ours = Policy.load(models / "pipeline", project / "runs" / "tiny" / "g2rpo-1", **how)
    theirs = Policy.load(models / "pipeline", Path(folder), **how)
    assert torch.equal(velocity(ours, embeddings), velocity(theirs, embeddings))
    card = ModelCard.load(f"{folder}/README.md")
    assert card.data.library_name == "diffusers" and card.data.pipeline_tag == "text-to-image"
    assert 'from_pretrained("somebody/tuned", subfolder="transformer")' in card.text and TOKEN not in card.content
    public = push(project, "g2rpo-2", "--form", "lora", "--out", "lora", "--push", "somebody/lora", "--public")
    assert public.returncode == 0 and not hub.repos["somebody/lora"].private
    again = push(project, "g2rpo-2", "--form", "lora", "--out", "again", "--push", "somebody/lora")
    assert again.returncode == 1
    assert "--push somebody/lora: it already exists and everyone can see it: give --public, or another name" in again.stderr


@pytest.mark.parametrize(
    "words, token, complaint",
    [
        (["--push", "a/b/c"], TOKEN, "--push a/b/c: not a repository name; give it as `user/name`"),
        (["--push", "a/b"], "", "--push: you are not logged in to the hub: run `hf auth login`, or set HF_TOKEN"),
        (["--push", "a/b"], TOKEN + "2", "refuses (403): the token needs write access to it"),
        (["--public"], TOKEN, "export: --public needs --push"),
    ],
)
def test_what_cannot_be_uploaded_is_said_in_one_line(project, hub, words, token, complaint, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    done = push(project, "g2rpo-1", "--form", "diffusers", "--out", tmp_path / "new", *words)
    assert done.returncode == 1 and complaint in done.stderr and done.stderr.count("\n") == 1
    assert "a/b" not in hub.repos


def test_a_hub_that_is_away_may_answer_later(project, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = push(project, "g2rpo-1", "--form", "diffusers", "--out", tmp_path / "new", "--push", "a/b")
    assert done.returncode == TRANSIENT_STATUS and "http://127.0.0.1:9 cannot be reached" in done.stderr
