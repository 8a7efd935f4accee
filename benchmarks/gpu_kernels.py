"""Measure single kernels of a GPU with random weights: a part of `benchmarks.gpu_steps kernels`.

    python -m benchmarks.gpu_kernels attention BACKEND | others [--size tiny --device cpu]

attention: one block of each kind of FLUX.1-dev, forward and backward: milliseconds, and how far the
gradient is from that of the plain formula. others: frozen weights in 8 and 4 bits beside bfloat16;
images decoded and scored by the number in a call.
"""

import argparse
import copy
import json
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.drawn import drawn_transformer
from benchmarks.flux import BACKENDS as FUSED
from benchmarks.flux import SIZES, median_seconds
from benchmarks.gpu_first import make_scorer
from g2rpo_core.architectures.flux import Flux
from g2rpo_core.models.quantized import quantize
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.numerics.cuda import peak_bytes, prepare, reset_peak

BACKENDS = {"math": SDPBackend.MATH, **FUSED}
LORA = LoraSettings(rank=32, alpha=32.0)
ROWS = 4
GIB = 2**30


def make(size: str, device: torch.device) -> tuple[torch.nn.Module, dict]:
    """Make a transformer with one block of each kind and a LoRA, and the inputs of a call."""
    config, _, side, text_tokens = SIZES[size]
    config = {**config, "num_layers": 1, "num_single_layers": 1}
    base = Flux()
    torch.manual_seed(0)
    model = drawn_transformer(base, config, device, LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.02)
    inputs = base.inputs(config, ROWS, (side // 16) ** 2, text_tokens, str(device))
    generator = torch.Generator(device).manual_seed(1)
    for name in ("hidden_states", "encoder_hidden_states", "pooled_projections"):
        inputs[name] = torch.randn(inputs[name].shape, generator=generator, device=device)
    inputs["timestep"] = torch.full_like(inputs["timestep"], 0.7)
    return model, inputs


def trained(model: torch.nn.Module, inputs: dict, device: torch.device) -> torch.Tensor:
    """Return the gradient of a call, flat; the loss is the mean of squares."""
    model.zero_grad()
    with torch.autocast(device.type, torch.bfloat16):
        output = model(**inputs)[0]
    output.float().square().mean().backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def attention(size: str, device: torch.device, backend: str) -> dict:
    """Compare one backend with the plain formula."""
    model, inputs = make(size, device)
    with sdpa_kernel([SDPBackend.MATH]):
        exact = trained(model, inputs, device)
    if backend == "cudnn":
        torch.backends.cuda.enable_cudnn_sdp(True)
    with sdpa_kernel([BACKENDS[backend]]):
        found = trained(model, inputs, device)
        seconds = median_seconds(partial(trained, model, inputs, device), device)
    return {
        "gradient_relative": ((found - exact).norm() / exact.norm()).item(),
        "ms": 1e3 * seconds,
    }


def quantized(size: str, device: torch.device) -> dict:
    """Compare frozen weights in 8 and 4 bits with bfloat16: time, memory, output, gradient."""
    model, inputs = make(size, device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        exact = model(**inputs)[0].float()
    gradient, result = trained(model, inputs, device), {}
    for kind in (None, "int8", "nf4"):
        other = copy.deepcopy(model)
        if kind:
            quantize(other, Flux().blocks(other), kind, device)
        reset_peak(device)
        moved = trained(other, inputs, device)
        peak = peak_bytes(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            output = other(**inputs)[0].float()
        result[kind or "bfloat16"] = {
            "ms": 1e3 * median_seconds(partial(trained, other, inputs, device), device),
            "peak_gib": peak and peak[0] / GIB,
            "output_relative": ((output - exact).norm() / exact.norm()).item(),
            "gradient_relative": ((moved - gradient).norm() / gradient.norm()).item(),
        }
        del other
    return result


@torch.no_grad()
def images(size: str, device: torch.device) -> dict:
    """Measure images per second, decoded (float32) and scored (HPS-v2.1), by batch size."""
    _, config, side, _ = SIZES[size]
    base = Flux()
    with torch.device(device):
        vae = base.vae(**config).eval()
    result: dict = {"decoded": {}, "scored": {}}
    for count in (1, 4, 8):
        latents = torch.randn(
            count, *base.latent_shape(config, side // 8, side // 8), device=device
        )
        result["decoded"][count] = count / median_seconds(
            partial(base.decode, vae, base.unpack(base.pack(latents), side // 8, side // 8)),
            device,
            3,
        )
    del vae
    scorer = make_scorer(size, device)
    for count in (8, 32, 128):
        pictures = torch.rand(count, 3, side, side, device=device)
        score = partial(scorer, pictures, [f"a photo of {number} cats" for number in range(count)])
        result["scored"][count] = count / median_seconds(score, device, 3)
    return result


def main() -> None:
    """Parse the options, measure, and print a JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("attention", "others"))
    parser.add_argument("backend", nargs="?", choices=BACKENDS)
    parser.add_argument("--size", choices=SIZES, default="flux")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = prepare(torch.device(args.device))
    if args.what == "attention":
        print(json.dumps(attention(args.size, device, args.backend)))
    else:
        print(json.dumps({"quantized": quantized(args.size, device), **images(args.size, device)}))


if __name__ == "__main__":
    main()
