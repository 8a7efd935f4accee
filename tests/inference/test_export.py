"""Exported weights: read by the program of each form, merged, uploaded and loaded again."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from huggingface_hub import constants, snapshot_download
from PIL import Image

from g2rpo_core.architectures.flux import Flux
from g2rpo_core.cli.main import main
from g2rpo_core.models.policy import Policy
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.projects import small_project
from tests.fixtures.rollouts import two_velocities
from tests.fixtures.small_hub import client_settings, small_hub

pytestmark = pytest.mark.pipeline
HOW = {"height": 32, "width": 32, "guidance": 3.5}
TOKEN = "hf_thisMustNeverBeShown"


@pytest.fixture(scope="module")
def project(models, tmp_path_factory):
    return small_project(tmp_path_factory.mktemp("export"), models)


def export(project, run, form, *words):
    out = f"out-{run}-{form}-{len(list(project.glob('out-*')))}"
    done = run_here(main, "export", run, "--form", form, "--out", out, *words, folder=project)
    assert done.returncode == 0, done.stderr
    assert (project / out / "README.md").read_text().startswith("---\n")
    return project / done.stdout.strip()


def test_the_original_names_are_those_that_diffusers_reads(tmp_path):
    """FLUX.1-dev's own width, which diffusers' reader assumes, with a block of each kind."""
    shape = {
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
    }
    with torch.device("meta"):
        shapes = FluxTransformer2DModel(**shape).state_dict()
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randint(-99, 99, value.shape, generator=generator, dtype=torch.int8)
        for name, value in shapes.items()
    }
    read = convert_flux_transformer_checkpoint_to_diffusers(Flux().original(weights, shape))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], value) for name, value in weights.items())


def test_the_diffusers_folder_has_the_run_and_bfloat16_rounds_it(project):
    run = project / "runs" / "tiny" / "g2rpo-1" / "transformer"
    trained = FluxTransformer2DModel.from_pretrained(run).state_dict()
    for words, kind in (([], torch.float32), (["--dtype", "bfloat16"], torch.bfloat16)):
        folder = export(project, "g2rpo-1", "diffusers", *words)
        loaded = FluxTransformer2DModel.from_pretrained(folder, dtype=kind).state_dict()
        assert all(torch.equal(loaded[name], value.to(kind)) for name, value in trained.items())


@pytest.mark.parametrize(
    "run, form", [("g2rpo-1", "diffusers"), ("g2rpo-2", "lora"), ("g2rpo-2", "peft")]
)
def test_the_cards_code_draws_the_runs_picture(project, run, form, monkeypatch):
    """As it stands, but for the place of the folder: plain diffusers and PEFT read the form."""
    monkeypatch.chdir(project)
    made = export(project, run, form)
    folder = made if form != "diffusers" and made.is_dir() else made.parent
    card = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    Path("card.py").write_text(code.replace("path/to/this/folder", str(folder)))
    runpy.run_path("card.py")
    theirs = np.asarray(Image.open("image.png")).astype(int)
    (prompt,) = re.findall(r"^    prompt='(.*)',$", code, re.MULTILINE)
    words = ("--run", run, "--run", "base", "--seeds", "1", "--out", f"drawn-{form}")
    assert run_here(main, "generate", prompt, *words, folder=project).returncode == 0
    picture = lambda name: np.asarray(Image.open(f"drawn-{form}/{name}-0000-1.png")).astype(int)
    differs = np.abs(picture(run) - theirs)
    assert differs.max() <= 1 and (differs > 0).mean() < 0.02
    assert np.abs(picture(run) - picture("base")).max() > 1


@pytest.mark.parametrize(
    "words, complaint",
    [
        (
            ["g2rpo-9", "--form", "original", "--out", "new"],
            "g2rpo-9: no trained weights; profile tiny has base, g2rpo-1, g2rpo-2",
        ),
        (
            ["g2rpo-1", "--form", "kohya", "--out", "new"],
            "export: g2rpo-1 was trained as whole weights: --form diffusers or original",
        ),
        (
            ["g2rpo-1", "--form", "original", "--out", "models"],
            "export: --out models already exists; name a new folder",
        ),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(project, words, complaint):
    assert refusal(main, "export", *words, folder=project) == f"error: {complaint}\n"
    assert not (project / "new").exists()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """One that takes uploads by HTTP alone, and a client that sends a token only where it must."""
    switches = {"HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_IMPLICIT_TOKEN": True}
    with small_hub() as hub:
        hub.writer = TOKEN
        for name, value in (client_settings(hub, tmp_path / "home") | switches).items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def push(project, *words):
    done = run_here(main, "export", *words, folder=project)
    assert TOKEN not in done.stdout + done.stderr
    return done


def test_what_was_uploaded_comes_back_with_its_card_and_gives_the_same_velocities(
    project, hub, models, embeddings, tmp_path
):
    words = ["g2rpo-1", "--form", "diffusers", "--push", "somebody/tuned", "--out"]
    done = push(project, *words, "out")
    assert done.returncode == 0, done.stderr
    assert hub.repos["somebody/tuned"].private
    folder = Path(snapshot_download("somebody/tuned", token=TOKEN, cache_dir=tmp_path))
    ours, theirs = (
        two_velocities(Policy.load(models / "pipeline", run, **HOW), embeddings)
        for run in (project / "runs" / "tiny" / "g2rpo-1", folder)
    )
    assert torch.equal(ours, theirs)
    card = (folder / "README.md").read_text()
    assert 'from_pretrained("somebody/tuned", subfolder="transformer")' in card


@pytest.mark.parametrize(
    "words, token, complaint",
    [
        (
            ["--push", "a/b"],
            "",
            "--push: you are not logged in to the hub: run `hf auth login`, or set HF_TOKEN",
        ),
        (["--push", "a/b"], TOKEN + "2", "refuses (403): the token needs write access to it"),
    ],
)
def test_what_cannot_be_uploaded_is_said_in_one_line(
    project, hub, words, token, complaint, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", token)
    done = push(project, "g2rpo-1", "--form", "diffusers", "--out", tmp_path / "new", *words)
    assert done.returncode == 1 and complaint in done.stderr and done.stderr.count("\n") == 1
    assert "a/b" not in hub.repos
