"""Frozen weights in 8 and 4 bits: what they stand for, and a LoRA that is trained on them."""

import shutil

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file

from g2rpo_core.config import load_profile
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.quantized import BITS, QuantizedLinear
from g2rpo_core.models.settings import LoraSettings
from tests.conftest import ROOT
from tests.fixtures.errors import refused
from tests.fixtures.rollouts import two_velocities

KINDS = pytest.mark.parametrize("kind", BITS)
CPU = torch.device("cpu")
HOW = {"height": 32, "width": 32, "guidance": 3.5}
LORA = LoraSettings(rank=4, alpha=8.0)
# QLoRA's appendix E
PUBLISHED = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def drawn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers(
    kind: str, inputs: int = 96, outputs: int = 40
) -> tuple[torch.nn.Linear, QuantizedLinear]:
    """A plain layer, and its quantized form."""
    plain = torch.nn.Linear(inputs, outputs).requires_grad_(False)
    plain.weight.copy_(drawn((outputs, inputs)))
    return plain, QuantizedLinear(plain, kind, CPU)


def test_a_weight_in_8_bits_is_off_by_half_a_step_of_its_output_at_most():
    plain, small = layers("int8")
    steps = plain.weight.abs().amax(1, keepdim=True) / 127
    assert ((small.dequantize() - plain.weight).abs() <= steps * 0.5001).all()
    assert small.weight.dtype == torch.int8


@pytest.mark.parametrize("inputs, outputs", [(96, 40), (7, 5)])
def test_a_weight_in_4_bits_is_the_nearest_level_of_its_block(inputs, outputs):
    plain, small = layers("nf4", inputs, outputs)
    assert small.weight.nbytes == 32 * len(plain.weight.flatten().split(64))
    for block, restored in zip(
        plain.weight.flatten().split(64), small.dequantize().flatten().split(64)
    ):
        levels = torch.tensor(PUBLISHED) * block.abs().max()
        nearest = levels[(block[:, None] - levels).abs().argmin(1)]
        torch.testing.assert_close(restored, nearest, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dora", [False, True])
@KINDS
def test_outputs_and_gradients_are_those_of_a_layer_with_the_restored_weights(kind, dora):
    """Also under PEFT's DoRA, which takes the norms of a layer's weights."""
    plain, small = map(torch.nn.Sequential, layers(kind))
    plain[0].weight.copy_(small[0].dequantize())
    adapter = LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False)
    for model in (plain, small) * dora:
        torch.manual_seed(0)
        inject_adapter_in_model(adapter, model)
    inputs = [drawn((6, 96), seed=1).requires_grad_() for _ in range(2)]
    outputs = [layer(each) for layer, each in zip((plain, small), inputs)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs) and torch.equal(inputs[0].grad, inputs[1].grad)


@KINDS
def test_only_the_lora_is_trained_and_its_run_samples_as_it_trained(
    pipeline, embeddings, kind, tmp_path
):
    policy = Policy.load_to_train(pipeline, LORA, quantize=kind, **HOW)
    field = policy.velocity(embeddings.conditioning([0]))
    latents = policy.noise(torch.Generator().manual_seed(0), 1)
    optimizer = torch.optim.AdamW(policy.trained_parameters().values(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        field(latents, torch.tensor([0.8]), torch.tensor([0])).square().mean().backward()
        optimizer.step()
    assert all(".lora_" in name for name in policy.trained_parameters())
    policy.save(tmp_path)
    loaded = Policy.load(pipeline, tmp_path, quantize=kind, **HOW)
    fields = policy.velocity, policy.sampling_velocity, loaded.velocity, policy.base_velocity
    trained, sampled, again, base = (two_velocities(policy, embeddings, each) for each in fields)
    assert torch.equal(sampled, trained) and not torch.allclose(trained, base, atol=1e-3)
    torch.testing.assert_close(again, trained, rtol=0, atol=1e-6)


@KINDS
def test_a_dora_of_others_leaves_its_base_as_it_is(pipeline, embeddings, kind, tmp_path):
    """Its magnitudes too, which a LoRA scaled to zero keeps."""
    plain = Policy.load(pipeline, quantize=kind, **HOW)
    name = "transformer.transformer_blocks.0.attn.to_q.lora_"
    ends = {"A.weight": (2, 128), "B.weight": (128, 2), "magnitude_vector": (128,)}
    save_file(
        {name + end: drawn(shape).abs() for end, shape in ends.items()},
        tmp_path / "any.safetensors",
    )
    loaded = Policy.load(pipeline, tmp_path, quantize=kind, **HOW)
    base, below, adapted = (
        two_velocities(loaded, embeddings, field)
        for field in (plain.velocity, loaded.base_velocity, loaded.velocity)
    )
    assert torch.equal(below, base) and not torch.allclose(adapted, base, atol=1e-3)
    assert torch.equal(two_velocities(loaded, embeddings), adapted)


@pytest.mark.parametrize("training", ["{lora: null}", "{processes: auto}"])
def test_a_profile_that_trains_all_weights_or_with_many_processes_is_refused(training, tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path, dirs_exist_ok=True)
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: flux_lora_24gb\ntraining: {training}\n")
    with refused("quantize: is for a LoRA on one GPU: set training.lora and training.processes: 1"):
        load_profile(own)
