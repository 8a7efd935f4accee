"""Measure a forward evaluation of FLUX.1-dev's true shape with random weights on one GPU.

    python -m benchmarks.flux [--batches 1 2 4 8 12]

Prints, all from one run:
- the bf16 matrix peak, milliseconds per forward evaluation by batch size, and their share of the
  peak;
- what compiled blocks and attention backends gain, and how far they move a velocity.

`--size tiny --device cpu` runs the same code on any machine.
"""

import argparse
import copy
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.drawn import drawn_transformer
from g2rpo_core.architectures.flux import TRANSFORMER, VAE, Flux
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.models.cost import Measured
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.quantized import Kind
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.numerics.cuda import describe, prepare, wait, why_none
from g2rpo_core.sampling.rollout import Velocity

SIZES = {  # transformer, VAE, side of the images, text tokens
    "flux": (TRANSFORMER, VAE, 720, 512),
    "tiny": (
        TRANSFORMER
        | {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "axes_dims_rope": (8, 12, 12),
        },
        VAE | {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 2, "layers_per_block": 1},
        64,
        16,
    ),
}
T = TypeVar("T")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def found_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """Return a prepared device; exit in one line if torch finds no such GPU."""
    device = prepare(torch.device(name))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(
            1, f"error: torch finds no GPU here: {why_none()}; or try `--size tiny --device cpu`\n"
        )
    return device


def matrix_peak(device: torch.device, side: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure the FLOP/s of a square matrix product on random data."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b, device)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of `work` after a warm-up."""
    work()
    return statistics.median(timed(device, work)[1] for _ in range(repeats))


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and its seconds."""
    wait(device)
    start = time.perf_counter()
    result = work()
    wait(device)
    return result, time.perf_counter() - start


def make_policy(
    size: str, device: torch.device, lora: LoraSettings | None = None, quantized: Kind | None = None
) -> tuple[Policy, Conditioning]:
    """Make a policy of true shape with random bf16 weights, and one random encoding.

    lora: an adapter that trains; quantized: how the frozen weights are kept.
    """
    transformer, vae, side, text_tokens = SIZES[size]
    base = Flux()
    model = drawn_transformer(base, transformer, device, lora, quantized)
    with torch.device(device):
        policy = Policy(base, model, base.vae(**vae), side, side, 3.5, torch.bfloat16, device)
    context = torch.randn(1, text_tokens, transformer["joint_attention_dim"], device=device)
    return policy, Conditioning(
        {
            "context": context,
            "pooled": torch.randn(1, transformer["pooled_projection_dim"], device=device),
        }
    )


def inputs(policy: Policy, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the arguments of a velocity: latents, sigma 0.7, and the index of the only prompt."""
    latents = policy.noise(torch.Generator().manual_seed(0), batch)
    return (
        latents,
        latents.new_full((batch,), 0.7),
        torch.zeros(batch, dtype=torch.int64, device=policy.device),
    )


def bench(size: str, device: torch.device, batches: list[int]) -> None:
    """Print the peak, then what eager, attention backends and compiled blocks reach of it."""
    cuda = device.type == "cuda"
    peak = matrix_peak(device, 8192 if cuda else 512)
    policy, conditioning = make_policy(size, device)
    exact = policy.velocity(conditioning)
    with Measured() as measured:
        exact(*inputs(policy, 1))
    print(
        f"{describe(device)}: {peak / 1e12:.0f} TFLOP/s bf16; {measured.flops / 1e12:.2f} TFLOP "
        f"per forward evaluation, {policy.image_tokens} + {SIZES[size][3]} tokens"
    )

    def measure(label: str, field: Velocity, batches: list[int]) -> None:
        for batch in batches:
            seconds = median_seconds(partial(field, *inputs(policy, batch)), device) / batch
            print(
                f"{label:12} batch {batch:3}: {1e3 * seconds:8.2f} ms per forward evaluation, "
                f"{measured.flops / seconds / peak:6.1%} of the peak",
                flush=True,
            )
        arguments = inputs(policy, 2)
        plain = exact(*arguments)
        moved = (field(*arguments) - plain).norm() / plain.norm()
        print(f"{label:12} moves a velocity by {moved.item():.1e} of it", flush=True)

    measure("eager", exact, batches)
    for name, backend in BACKENDS.items() if cuda else ():
        measure(name, sdpa_kernel(backend)(exact), [max(batches)])
    if cuda or shutil.which("c++"):
        policy.transformer = copy.deepcopy(policy.transformer)
        for block in policy.architecture.blocks(policy.transformer):
            block.compile()
        measure("compiled", policy.velocity(conditioning), batches)


@torch.no_grad()
def main() -> None:
    """Parse the options, measure, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="flux")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 12])
    args = parser.parse_args()
    bench(args.size, found_device(parser, args.device), args.batches)


if __name__ == "__main__":
    main()
