"""The plan's arithmetic against the true configuration and against what smaller models of the same classes really keep."""

import json
import subprocess
import sys

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel

from g2rpo_core.config import load_profile
from g2rpo_core.flux import TRANSFORMER, VAE
from g2rpo_core.plan import activation_bytes, adapter_parameters, parameters, plan

from .conftest import ROOT


def test_weights_of_the_published_configuration():
    assert parameters(FluxTransformer2DModel, TRANSFORMER) == 11_901_408_320  # as FLUX.1-dev's checkpoint holds
    assert parameters(AutoencoderKL, VAE) == 83_819_683


def test_an_adapter_is_counted_as_peft_makes_it():
    from peft import LoraConfig

    small = TRANSFORMER | {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2}
    targets = ("to_q", "to_out.0", "proj_mlp")
    with torch.device("meta"):
        model = FluxTransformer2DModel(**small)
        model.add_adapter(LoraConfig(r=4, target_modules=list(targets)))
    made = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert adapter_parameters(small, 4, targets) == made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double, single, heads, batch", [(1, 2, 3, 2), (3, 1, 2, 3)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_keeps(dtype, double, single, heads, batch, checkpointing):
    config = TRANSFORMER | {
        "num_layers": double, "num_single_layers": single, "num_attention_heads": heads, "joint_attention_dim": 64, "pooled_projection_dim": 32,
    }  # fmt: skip
    model = FluxTransformer2DModel(**config).to(dtype).train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        model(
            hidden_states=torch.randn(batch, 128, 64), timestep=torch.rand(batch), guidance=torch.ones(batch),
            pooled_projections=torch.randn(batch, 32), encoder_hidden_states=torch.randn(batch, 64, 64),
            txt_ids=torch.zeros(64, 3), img_ids=torch.zeros(128, 3),
        )  # fmt: skip
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    measured = sum(size for address, size in storages.items() if address not in weights)
    planned = activation_bytes(config, 192, batch, dtype.itemsize, checkpointing)
    if checkpointing:  # what a block keeps while it is computed again comes on top of what is kept between the passes
        planned -= activation_bytes(config | {"num_layers": 1, "num_single_layers": 0}, 192, batch, dtype.itemsize, False)
        planned += 3 * 192 * batch * 128 * heads * dtype.itemsize
    assert planned == pytest.approx(measured, rel=0.1)


def test_the_papers_setting():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    made = plan(profile, "g2rpo", gpus=16, memory=141)
    assert made.fits and made.evaluations_per_prompt == 1700 and made.evaluations_per_iteration == 27_200
    weights = 11_901_408_320 * 4 / 16 / 2**30
    assert made.memory_gib["weights"] == made.memory_gib["gradients"] == pytest.approx(weights, abs=0.01)
    assert made.memory_gib["optimizer"] == pytest.approx(2 * weights, abs=0.01)
    alone = plan(profile, "g2rpo", gpus=1, memory=80)
    assert alone.memory_gib["activations"] > made.memory_gib["activations"]  # the states of its 16 prompts fill a call
    assert not alone.fits and any("adapter" in line for line in alone.advice)


def test_the_profile_for_one_card_fits_it():
    profile = load_profile(ROOT / "profiles" / "flux_lora_1gpu.yaml")
    assert plan(profile, "g2rpo", gpus=1, memory=80).fits
    assert not plan(profile, "g2rpo", gpus=1, memory=24).fits


def test_the_command_speaks_to_machines_and_says_what_is_wrong():
    command = [sys.executable, "-m", "g2rpo_core.cli", "plan", "--profile", "flux_hps_clip", "--memory", "141", "--gpus"]
    done = subprocess.run([*command, "16", "--json"], cwd=ROOT, capture_output=True, text=True)
    made = json.loads(done.stdout)
    assert {"evaluations_per_prompt", "memory_gib", "fits", "seconds_per_iteration", "disk_gib"} <= made.keys()
    done = subprocess.run([*command, "5"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: --gpus 5: 16 prompts an iteration cannot be shared evenly")
