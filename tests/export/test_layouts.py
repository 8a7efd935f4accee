"""Each form by the program that reads it, or by what it comes to when it is merged: the same weights."""

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file

from g2rpo_core.bases import flux_layouts as layouts
from g2rpo_core.bases.flux import Flux
from g2rpo_core.cli.main import main
from g2rpo_core.models.policy import Policy
from tests.fixtures.commands import run_here
from tests.fixtures.projects import ALPHA, RANK, small_project
from tests.fixtures.weights import randomize

pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module")
def project(models, tmp_path_factory):
    return small_project(tmp_path_factory.mktemp("export"), models)


def export(project, run, form, *words):
    out = f"out-{run}-{form}-{len(words)}"
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
    weights = {name: torch.randn(value.shape, generator=generator, dtype=torch.bfloat16) for name, value in shapes.items()}
    read = convert_flux_transformer_checkpoint_to_diffusers(layouts.original(weights, 1, 1))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], value) for name, value in weights.items())


def test_every_weight_of_a_run_is_in_the_original_file_once(project):
    file = export(project, "g2rpo-1", "original")
    trained = FluxTransformer2DModel.from_pretrained(project / "runs" / "tiny" / "g2rpo-1" / "transformer").state_dict()
    written = load_file(file)
    assert sum(value.numel() for value in written.values()) == sum(value.numel() for value in trained.values())
    qkv = torch.cat([trained[f"transformer_blocks.1.attn.to_{one}.weight"] for one in "qkv"])
    assert torch.equal(written["double_blocks.1.img_attn.qkv.weight"], qkv)
    with pytest.raises(ValueError, match=r"new\.weight has no name in the original layout"):
        layouts.original({**trained, "new.weight": torch.zeros(1)}, 2, 2)


def test_the_diffusers_folder_has_the_run_and_bfloat16_rounds_it(project):
    trained = FluxTransformer2DModel.from_pretrained(project / "runs" / "tiny" / "g2rpo-1" / "transformer").state_dict()
    for words, kind in (([], torch.float32), (["--dtype", "bfloat16"], torch.bfloat16)):
        folder = export(project, "g2rpo-1", "diffusers", *words)
        loaded = FluxTransformer2DModel.from_pretrained(folder, dtype=kind).state_dict()
        assert all(torch.equal(loaded[name], value.to(kind)) for name, value in trained.items())


def test_a_lora_has_its_alpha_where_loaders_look_for_it(project, models, embeddings):
    """Loaded by plain diffusers from tensors alone, without metadata: the same velocities as ours."""
    file = export(project, "g2rpo-2", "lora")
    with safe_open(file, "pt") as opened:
        assert "lora_adapter_metadata" not in opened.metadata()
    pipeline = FluxPipeline.from_pretrained(models / "pipeline")
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    how = {"height": 32, "width": 32, "guidance": 3.5}
    ours = Policy.load(models / "pipeline", project / "runs" / "tiny" / "g2rpo-2", **how)
    theirs = Policy(Flux(), pipeline.transformer, pipeline.vae, **how)
    base = Policy.load(models / "pipeline", **how)
    for policy in (ours, theirs, base):
        randomize(policy.transformer)  # of the base, alike: hardly trained, it would hide what an adapter does
    x = ours.noise(torch.Generator().manual_seed(0), 2)
    arguments = (x, torch.tensor([0.9, 0.3]), torch.tensor([0, 1]))
    conditioning = embeddings.conditioning([0, 1])
    with torch.no_grad():
        velocities = [one.velocity(conditioning)(*arguments) for one in (ours, theirs, base)]
    torch.testing.assert_close(velocities[1], velocities[0], rtol=1e-5, atol=1e-6)
    assert (velocities[0] - velocities[2]).abs().max() > 0.01


def test_kohyas_form_merges_to_the_same_weights(project, models):
    """up @ down * alpha / rank of each original module is what our adapters add to its parts; nothing else is in the file."""
    file = export(project, "g2rpo-2", "kohya")
    lora = load_file(project / "runs" / "tiny" / "g2rpo-2" / "lora" / "pytorch_lora_weights.safetensors")
    base = FluxTransformer2DModel.from_pretrained(models / "pipeline" / "transformer").state_dict()
    written = load_file(file)
    seen = set()
    for name, parts in layouts.modules(2, 2):
        ours = [
            ALPHA / RANK * lora[f"transformer.{part}.lora_B.weight"] @ lora[f"transformer.{part}.lora_A.weight"]
            if f"transformer.{part}.lora_A.weight" in lora
            else torch.zeros_like(base[f"{part}.weight"])
            for part in parts
        ]
        key = "lora_unet_" + name.replace(".", "_")
        if not any(delta.any() for delta in ours):
            assert f"{key}.alpha" not in written
            continue
        up, down, alpha = (written[f"{key}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha"))
        torch.testing.assert_close(up @ down * alpha / len(down), torch.cat(ours))
        seen |= {f"{key}.{part}" for part in ("lora_up.weight", "lora_down.weight", "alpha")}
    assert seen == set(written) and len(seen) >= 3 * 8


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["g2rpo-9", "--form", "original", "--out", "new"], "g2rpo-9: no trained weights; profile tiny has base, g2rpo-1, g2rpo-2"),
        (["g2rpo-1", "--form", "kohya", "--out", "new"], "export: g2rpo-1 was trained as whole weights: --form diffusers or original"),
        (["g2rpo-2", "--form", "original", "--out", "new"], "export: g2rpo-2 was trained as a LoRA: --form lora or kohya"),
        (["g2rpo-1", "--form", "original", "--out", "models"], "export: --out models already exists; name a new folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_said_in_one_line(project, words, complaint):
    done = run_here(main, "export", *words, folder=project)
    assert done.returncode == 1 and done.stderr == f"error: {complaint}\n"
    assert not (project / "new").exists()
