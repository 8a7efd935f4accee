"""FLUX.1-dev's true shape with random weights on one GPU: what a forward evaluation costs, and what makes it cheaper.

    python -m benchmarks.flux [--batches 1 2 4 8 12] [--iteration] [--json]

Prints, all from one run:
- the bf16 matrix peak, milliseconds per forward evaluation for each batch size, and their share of that peak;
- what a call allocates, beside the estimate of `g2rpo plan`;
- what compiled blocks, attention backends and fp8 layers gain, and how far they move velocities, log-probabilities and latents;
- the seconds of a G2RPO iteration at the paper's setting (720x720, T = 16, 12 members), by the measured rate or (--iteration) by
  running its rollout.
`--size tiny --device cpu` runs the same code on any machine.
"""

import argparse
import contextlib
import copy
import json
import shutil
import time
from functools import partial

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.bases.flux import TRANSFORMER, VAE, Flux
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.estimate.tracing import Call, Measured, seconds_of, transformer_cost
from g2rpo_core.models.policy import Policy
from g2rpo_core.rollout.rollout import Velocity, rollout, sample
from g2rpo_core.sampling.schedule import shifted_sigmas, sigma_at

SIZES = {  # transformer, VAE, side of the images, text tokens
    "flux": (TRANSFORMER, VAE, 720, 512),
    "tiny": (
        TRANSFORMER | {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2, "axes_dims_rope": (8, 12, 12)},
        VAE | {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 2, "layers_per_block": 1},
        64,
        16,
    ),
}  # fmt: skip
STEPS, GROUP = 16, 12
PUBLISHED_FORWARD_EVALS = 2188  # of the published loop at this setting; each is a call of batch 1
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def matrix_peak(device: torch.device, side: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of a square matrix product on random data."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: a @ b, device)


def make_policy(size: str, device: torch.device) -> tuple[Policy, Conditioning]:
    """A policy of true shape with random bf16 weights made on the device, and the random encoding of one prompt."""
    transformer, vae, side, text_tokens = SIZES[size]
    with torch.device(device):
        model = FluxTransformer2DModel(**transformer).to(torch.bfloat16)
        policy = Policy(Flux(), model, AutoencoderKL(**vae), side, side, 3.5, torch.bfloat16, device)
    context = torch.randn(1, text_tokens, transformer["joint_attention_dim"], device=device)
    return policy, Conditioning(
        {"context": context, "pooled": torch.randn(1, transformer["pooled_projection_dim"], device=device)}
    )


class Fp8Linear(torch.nn.Module):
    """A linear layer whose product runs in float8 (e4m3), with one scale for each row of input and weight."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.bias = linear.bias
        self.weight, self.scale = self._quantized(linear.weight)

    @staticmethod
    def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return (x / scale).to(torch.float8_e4m3fn), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, scale = self._quantized(x.flatten(0, -2))
        out = torch._scaled_mm(rows, self.weight.t(), scale, self.scale.t(), out_dtype=torch.bfloat16)
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


def in_fp8(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a transformer with the linear layers of its blocks in float8."""
    model = copy.deepcopy(model)
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        for name, child in list(block.named_modules()):
            if isinstance(child, torch.nn.Linear) and "norm" not in name:  # modulation sees one row per sample: too few
                parent, _, last = name.rpartition(".")
                setattr(block.get_submodule(parent), last, Fp8Linear(child))
    return model


def inputs(policy: Policy, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    latents = policy.noise(torch.Generator().manual_seed(0), batch)
    return latents, latents.new_full((batch,), 0.7), torch.zeros(batch, dtype=torch.int64, device=policy.device)


def drift(policy: Policy, exact: Velocity, other: Velocity) -> dict[str, float]:
    """The distance of a velocity from the exact one: relative error, |ratio - 1| of a Flow-SDE step, and latents after an ODE."""
    x, sigma, prompt = inputs(policy, 2)
    sigmas = shifted_sigmas(STEPS, 3.0).to(policy.device)
    step = torch.full((2,), 4, device=policy.device)
    velocities = [field(x, sigma, prompt) for field in (exact, other)]
    transitions = [METHODS["g2rpo"].transition(sigmas)(x, v, step=step) for v in velocities]
    sampled = transitions[0].sample(policy.noise(torch.Generator().manual_seed(1), 2))
    log_probs = [transition.log_prob(sampled) for transition in transitions]
    ends = [sample(field, x[:1], sigmas.tolist(), 1) for field in (exact, other)]
    relative = lambda a, b: ((a - b).norm() / b.norm()).item()
    return {
        "velocity_relative": relative(velocities[1], velocities[0]),
        "ratio_drift": (log_probs[1] - log_probs[0]).exp().sub(1).abs().max().item(),
        "clean_latents_relative": relative(ends[1], ends[0]),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="flux")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 12])
    parser.add_argument("--iteration", action="store_true", help="run a whole rollout of the paper's setting (minutes)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "error: no CUDA device; run on one, or try `--size tiny --device cpu`\n")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    peak = matrix_peak(device, 8192 if device.type == "cuda" else 512)
    policy, conditioning = make_policy(args.size, device)
    velocity = policy.velocity(conditioning)
    with Measured() as measured:
        velocity(*inputs(policy, 1))
    flops = measured.flops
    result = {"device": name, "matrix_tflops": peak / 1e12, "tflop_per_evaluation": flops / 1e12, "variants": {}}
    print(
        f"{name}: {peak / 1e12:.0f} TFLOP/s bf16; {flops / 1e12:.2f} TFLOP a forward evaluation, {policy.image_tokens} + {conditioning.tensors['context'].shape[1]} tokens"
    )

    def measure(label: str, field: Velocity, batches: list[int], context=contextlib.nullcontext) -> None:
        rows = {}
        for batch in batches:
            arguments = inputs(policy, batch)
            with context():
                seconds = seconds_of(partial(field, *arguments), device) / batch
            rows[batch] = {"ms_per_evaluation": 1e3 * seconds, "share_of_peak": flops / seconds / peak}
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                with context():
                    field(*arguments)
                call = Call(batch, policy.image_tokens, conditioning.tensors["context"].shape[1], policy.dtype, training=False)
                traced = transformer_cost(policy.architecture, SIZES[args.size][0], call).bytes
                rows[batch] |= {
                    "allocated_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
                    "planned_gib": traced / 2**30,
                }
            print(
                f"{label:12} batch {batch:3}: {1e3 * seconds:8.2f} ms a forward evaluation, {100 * flops / seconds / peak:5.1f} % of the peak",
                flush=True,
            )
        with context():
            moved = drift(policy, velocity, field)
        print(f"{label:12} " + ", ".join(f"{key} {value:.1e}" for key, value in moved.items()), flush=True)
        result["variants"][label] = {"batches": rows, "drift": moved}

    largest = max(args.batches)
    measure("eager", velocity, args.batches)
    if device.type == "cuda":
        for name_of_backend, backend in BACKENDS.items():
            measure(name_of_backend, velocity, [largest], partial(sdpa_kernel, [backend]))
    weights = policy.transformer
    if device.type == "cuda" or shutil.which("c++"):
        policy.transformer = compiled = copy.deepcopy(weights)
        for block in [*compiled.transformer_blocks, *compiled.single_transformer_blocks]:
            block.compile()
        measure("compiled", policy.velocity(conditioning), args.batches)
        del compiled
    if device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        policy.transformer = in_fp8(weights)
        for block in [*policy.transformer.transformer_blocks, *policy.transformer.single_transformer_blocks]:
            block.compile()
        measure("fp8+compiled", policy.velocity(conditioning), args.batches)
    policy.transformer = weights

    best = {
        label: min(row["ms_per_evaluation"] for row in variant["batches"].values())
        for label, variant in result["variants"].items()
    }
    method = METHODS["g2rpo"]
    tree = method.tree(STEPS)
    num_forward_evals = tree.num_forward_evals(GROUP)
    alone = result["variants"]["eager"]["batches"].get(1)
    result["rollout_seconds"] = {
        "evaluations": {"ours": num_forward_evals, "published": PUBLISHED_FORWARD_EVALS},
        **{label: num_forward_evals * ms / 1e3 for label, ms in best.items()},
        **({"published, eager, batch 1": PUBLISHED_FORWARD_EVALS * alone["ms_per_evaluation"] / 1e3} if alone else {}),
    }
    if args.iteration:
        generator = torch.Generator().manual_seed(0)
        noises = [policy.noise(generator, GROUP)[None] for _ in tree.sde_steps]
        sigma_of = partial(sigma_at, steps=STEPS, shift=3.0)
        transition = method.transition(shifted_sigmas(STEPS, 3.0).to(device))
        work = partial(rollout, velocity, tree, sigma_of, transition, policy.noise(generator, 1)[None], noises, largest)
        start = time.perf_counter()
        sampled = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        result["rollout_seconds"]["measured, eager"] = time.perf_counter() - start
        start = time.perf_counter()
        policy.decode(sampled.clean.flatten(0, 3), 4)
        if device.type == "cuda":
            torch.cuda.synchronize()
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["decode_seconds"] = time.perf_counter() - start
    print(
        "rollout of one prompt at the paper's setting, seconds: "
        + ", ".join(f"{key} {value:.1f}" for key, value in result["rollout_seconds"].items() if key != "evaluations")
    )
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
