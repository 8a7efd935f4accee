"""Measure a forward evaluation of FLUX.1-dev's true shape with random weights on one GPU.

    python -m benchmarks.flux [--batches 1 2 4 8 12] [--json]

Prints, all from one run:
- the bf16 matrix peak, milliseconds per forward evaluation by batch size, and their share of the
  peak;
- what a call allocates, and what `g2rpo plan` expects;
- what compiled blocks and attention backends gain, and how far they move velocities,
  log-probabilities and latents;
- the seconds of a G2RPO rollout at the paper's setting (720x720, T = 16, 12 members), by the
  measured rate.

`--size tiny --device cpu` runs the same code on any machine.
"""

import argparse
import contextlib
import copy
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.drawn import drawn_transformer
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.architectures.flux import TRANSFORMER, VAE, Flux
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.models.cost import Call, Measured, transformer_cost
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.quantized import Kind
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.numerics.cuda import describe, prepare, reset_peak, wait, why_none
from g2rpo_core.sampling.rollout import Velocity, sample
from g2rpo_core.sampling.schedule import shifted_sigmas

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
STEPS, GROUP = 16, 12
T = TypeVar("T")
PUBLISHED_FORWARD_EVALS = 2188  # of the published loop at this setting; each is a call of batch 1
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


def drift(
    policy: Policy, exact: Velocity, other: Velocity, context: Callable = contextlib.nullcontext
) -> dict[str, float]:
    """Compare a velocity with the exact one.

    Returns its relative error, |ratio - 1| of a Flow-SDE step, and the relative error of
    latents after an ODE.

    context: of the calls of the other velocity alone.
    """
    x, sigma, prompt = inputs(policy, 2)
    sigmas = shifted_sigmas(STEPS, 3.0).to(policy.device)
    step = torch.full((2,), 4, device=policy.device)

    def within(*arguments: torch.Tensor) -> torch.Tensor:
        with context():
            return other(*arguments)

    velocities = [field(x, sigma, prompt) for field in (exact, within)]
    transitions = [METHODS["g2rpo"].tree.transition(sigmas)(x, v, step=step) for v in velocities]
    sampled = transitions[0].sample(policy.noise(torch.Generator().manual_seed(1), 2))
    log_probs = [transition.log_prob(sampled) for transition in transitions]
    ends = [sample(field, x[:1], sigmas.tolist(), 1) for field in (exact, within)]
    relative = lambda a, b: ((a - b).norm() / b.norm()).item()
    return {
        "velocity_relative": relative(velocities[1], velocities[0]),
        "ratio_drift": (log_probs[1] - log_probs[0]).exp().sub(1).abs().max().item(),
        "clean_latents_relative": relative(ends[1], ends[0]),
    }


class Bench:
    """One model on one device; `results` is what was measured so far."""

    def __init__(self, size: str, device: torch.device):
        self.config, self.device = SIZES[size][0], device
        self.peak = matrix_peak(device, 8192 if device.type == "cuda" else 512)
        self.policy, self.conditioning = make_policy(size, device)
        self.text_tokens = self.conditioning.tensors["context"].shape[1]
        self.exact = self.policy.velocity(self.conditioning)
        with Measured() as measured:
            self.exact(*inputs(self.policy, 1))
        self.flops = measured.flops
        name = describe(device)
        self.results = {
            "device": name,
            "matrix_tflops": self.peak / 1e12,
            "tflop_per_evaluation": self.flops / 1e12,
            "variants": {},
        }
        print(
            f"{name}: {self.peak / 1e12:.0f} TFLOP/s bf16; {self.flops / 1e12:.2f} TFLOP per "
            "forward evaluation, "
            f"{self.policy.image_tokens} + {self.text_tokens} tokens"
        )

    def measure_variants(self, batches: list[int]) -> None:
        """Measure eager, attention backends and compiled blocks, where the device has them."""
        cuda, largest, weights = self.device.type == "cuda", max(batches), self.policy.transformer
        self.measure("eager", self.exact, batches)
        for name, backend in BACKENDS.items() if cuda else ():
            self.measure(name, self.exact, [largest], partial(sdpa_kernel, [backend]))
        if cuda or shutil.which("c++"):
            self.measure_compiled("compiled", copy.deepcopy(weights), batches)
        self.policy.transformer = weights

    def measure_compiled(
        self, label: str, transformer: torch.nn.Module, batches: list[int]
    ) -> None:
        """Compile the blocks of another transformer and measure it in place of the policy's."""
        self.policy.transformer = transformer
        for block in self.policy.architecture.blocks(transformer):
            block.compile()
        self.measure(label, self.policy.velocity(self.conditioning), batches)

    def measure(
        self, label: str, field: Velocity, batches: list[int], context=contextlib.nullcontext
    ) -> None:
        """Measure time and memory by batch size, and the distance from the exact velocity."""
        rows = {}
        for batch in batches:
            with context():
                seconds = (
                    median_seconds(partial(field, *inputs(self.policy, batch)), self.device) / batch
                )
            rows[batch] = {
                "ms_per_evaluation": 1e3 * seconds,
                "share_of_peak": self.flops / seconds / self.peak,
            }
            if self.device.type == "cuda":
                with context():
                    rows[batch] |= self.measure_memory(field, batch)
            print(
                f"{label:12} batch {batch:3}: {1e3 * seconds:8.2f} ms per forward evaluation, "
                f"{100 * rows[batch]['share_of_peak']:5.1f} % of the peak",
                flush=True,
            )
        moved = drift(self.policy, self.exact, field, context)
        print(
            f"{label:12} " + ", ".join(f"{key} {value:.1e}" for key, value in moved.items()),
            flush=True,
        )
        self.results["variants"][label] = {"batches": rows, "drift": moved}

    def measure_memory(self, field: Velocity, batch: int) -> dict[str, float]:
        """Return the GiB that a call allocates, and those that `g2rpo plan` expects."""
        arguments = inputs(self.policy, batch)
        reset_peak(self.device)
        before = torch.cuda.memory_allocated()
        field(*arguments)
        allocated = torch.cuda.max_memory_allocated() - before
        call = Call(
            batch, self.policy.image_tokens, self.text_tokens, self.policy.dtype, training=False
        )
        planned = transformer_cost(self.policy.architecture, self.config, call).bytes
        return {"allocated_gib": allocated / 2**30, "planned_gib": planned / 2**30}

    def project_rollout(self) -> None:
        """Multiply the best rate of each variant by the forward evaluations of a rollout."""
        variants = self.results["variants"]
        count = METHODS["g2rpo"].tree.build(STEPS).num_forward_evals(GROUP)
        seconds: dict = {"evaluations": {"ours": count, "published": PUBLISHED_FORWARD_EVALS}}
        for label, variant in variants.items():
            seconds[label] = (
                count * min(row["ms_per_evaluation"] for row in variant["batches"].values()) / 1e3
            )
        if alone := variants["eager"]["batches"].get(1):
            seconds["published, eager, batch 1"] = (
                PUBLISHED_FORWARD_EVALS * alone["ms_per_evaluation"] / 1e3
            )
        self.results["rollout_seconds"] = seconds


@torch.no_grad()
def main() -> None:
    """Parse the options, measure, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="flux")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 12])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = found_device(parser, args.device)
    bench = Bench(args.size, device)
    bench.measure_variants(args.batches)
    bench.project_rollout()
    seconds = {
        key: value
        for key, value in bench.results["rollout_seconds"].items()
        if key != "evaluations"
    }
    shown = ", ".join(f"{key} {value:.1f}" for key, value in seconds.items())
    print(f"rollout of one prompt at the paper's setting, seconds: {shown}")
    if args.json:
        print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
