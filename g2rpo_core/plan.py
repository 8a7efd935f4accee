"""What a run of FLUX.1-dev needs before anybody rents anything: evaluations, memory of a GPU by part, seconds, disk.

Parameters are counted on the meta device from the published configurations. Activations are counted from the layers' widths, what
autograd keeps of each block, and checked in the tests against what it really keeps of smaller models of the same classes.
"""

from dataclasses import asdict, dataclass, field

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel

from .config import Profile, method_of, sampling_of, training_of
from .flux import TRANSFORMER, VAE
from .tree import build

REWARD_PARAMETERS = 986_000_000  # open_clip's ViT-H-14, both towers: what HPS-v2.1 and DFN5B-CLIP are
GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
RESERVE = 0.08  # of a GPU's memory: the allocator's fragments, CUDA's context, kernels' workspaces
RATE = 2.0  # evaluations a second and GPU at 720x720, assumed: 37 TFLOP each, 75 TFLOP/s reached
TRAINED_COST = 3  # evaluations that a forward and backward cost; 4 where activations are computed again


@dataclass(frozen=True)
class Plan:
    """memory_gib: peak of one GPU by part; advice: what to change where it does not fit."""

    evaluations_per_prompt: int
    evaluations_per_iteration: int
    memory_gib: dict[str, float]
    total_gib: float
    fits: bool
    seconds_per_iteration: float
    disk_gib: dict[str, float]
    advice: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        return asdict(self)


def parameters(kind: type[torch.nn.Module], config: dict) -> int:
    """The number of weights of a model, made on the meta device."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(**config).parameters())


def adapter_parameters(config: dict, rank: int, targets: tuple[str, ...]) -> int:
    """The weights of a LoRA adapter: rank times the sum of both widths of every target."""
    with torch.device("meta"):
        modules = FluxTransformer2DModel(**config).named_modules()
        return sum(
            rank * (module.in_features + module.out_features)
            for name, module in modules
            if isinstance(module, torch.nn.Linear) and any(name == one or name.endswith(f".{one}") for one in targets)
        )


def activation_bytes(config: dict, tokens: int, batch: int, size: int, checkpointing: bool) -> int:
    """What autograd keeps of a forward of `batch` latents with `tokens` picture and text tokens each; size: bytes of a number.

    With checkpointing: the inputs of every block, and all of a double block while it is computed again.
    """
    row = tokens * batch * config["attention_head_dim"] * config["num_attention_heads"] * size
    double, single = KEPT[size]
    if checkpointing:
        return int(row * (config["num_layers"] + config["num_single_layers"] + double + KEPT_AROUND))
    return int(row * (config["num_layers"] * double + config["num_single_layers"] * single + KEPT_AROUND))


# Hidden widths a token that a double and a single block keep for the backward pass, by bytes of a number (2: under autocast, where
# norms stay in float32), and what is kept around the blocks: measured on blocks of other widths, tests/test_plan.py measures again
KEPT = {4: (25.1, 21.1), 2: (29.2, 25.1)}
KEPT_AROUND = 3.0


def plan(
    profile: Profile, method: str, gpus: int, memory: float, rate: float = RATE, transformer: dict = TRANSFORMER, vae: dict = VAE
) -> Plan:
    """The plan of one method on `gpus` GPUs of `memory` GiB; rate: evaluations a second and GPU at the profile's size.

    ValueError where the profile's prompts cannot be shared evenly by the GPUs.
    """
    training, sampling = (
        training_of(profile.training, profile.methods, method),
        sampling_of(profile.sampling, profile.methods, method),
    )
    settings = method_of(profile.methods, method)
    if training.prompts_per_iteration % gpus:
        raise ValueError(f"{training.prompts_per_iteration} prompts an iteration cannot be shared evenly by {gpus} GPUs")
    branches = settings.branches(sampling.steps)
    evaluations = build(branches, settings.granularities, sampling.steps, settings.grid).evaluations(training.group_size)
    states = (
        sum(len(branch) for branch in branches)
        * settings.trained_share
        * (1 if settings.branching == "each" else training.group_size)
    )

    compute, shards = BYTES[sampling.dtype], min(training.parallel.shard_size or gpus, gpus)
    count = parameters(FluxTransformer2DModel, transformer)
    adapter = adapter_parameters(transformer, training.adapter.rank, training.adapter.targets) if training.adapter else 0
    trained, frozen = (adapter, count) if adapter else (count, 0)
    vae_count = parameters(AutoencoderKL, vae)
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    text = profile.embed.max_sequence_length
    tokens = sampling.height // factor * (sampling.width // factor) // 4 + text
    fit = max(1, training.batch_tokens // tokens)
    sampled = max(1, sampling.batch_tokens // tokens)
    width = transformer["attention_head_dim"] * transformer["num_attention_heads"]
    kl_base = bool(settings.kl) and not adapter
    prompts = training.prompts_per_iteration // gpus
    pictures = len(branches) * len(settings.granularities) * training.group_size * training.prompts_per_iteration // gpus
    memory_gib = {
        "weights": (4 * trained + compute * frozen) / shards,
        "gradients": 4 * trained / shards,
        "optimizer": 8 * trained / shards,
        "base": 4 * count / shards if kl_base else 0,
        "replica": compute * count if training.parallel.replica and gpus > 1 else 0,
        # two blocks' weights gathered at a time, or autocast's copies of all weights where they are not sharded and not frozen
        "gathered": 2 * compute * largest_block(transformer) if gpus > 1 else (0 if adapter or compute == 4 else compute * count),
        "activations": activation_bytes(transformer, tokens, min(fit, round(states * prompts)), compute, training.checkpointing),
        "rollout": sampled * tokens * width * compute * 12 + 3 * 4 * pictures * tokens * transformer["in_channels"],
        "rewards": 4 * REWARD_PARAMETERS * len(set(training.rewards) & {"hps", "clip_score", "pickscore"}),
        "vae": 4 * vae_count + decode_bytes(vae, sampling.height, sampling.width, sampling.decode_batch),
        "pictures": pictures * 3 * sampling.height * sampling.width * 4,
    }
    memory_gib = {name: round(value / GIB, 2) for name, value in memory_gib.items()}
    total = sum(memory_gib.values())
    fits = total <= memory * (1 - RESERVE)
    per_state = TRAINED_COST + training.checkpointing
    bytes_a_prompt = BYTES[profile.embed.dtype] * (
        text * transformer["joint_attention_dim"] + transformer["pooled_projection_dim"]
    )
    disk = {
        "embeddings": bytes_a_prompt * (profile.prompts.train_count + profile.prompts.test_count),
        "models": 34e9,  # FLUX.1-dev with both text encoders, by its files
        "reward_models": 4 * REWARD_PARAMETERS * len(training.rewards),
        "trained": 4 * trained,
        "checkpoints": 12 * trained * (training.checkpoints.keep + 1),  # one more while it is written
    }
    return Plan(
        evaluations_per_prompt=evaluations,
        evaluations_per_iteration=evaluations * training.prompts_per_iteration,
        memory_gib=memory_gib,
        total_gib=round(total, 1),
        fits=fits,
        seconds_per_iteration=round(prompts * (evaluations + states * per_state) / rate, 1),
        disk_gib={name: round(value / GIB, 1) for name, value in disk.items()},
        advice=[] if fits else _advice(profile, method, memory_gib, gpus, fit),
    )


def largest_block(config: dict) -> int:
    """The weights of a double block, the largest part that is gathered at once."""
    with torch.device("meta"):
        return sum(one.numel() for one in FluxTransformer2DModel(**config).transformer_blocks[0].parameters())


def decode_bytes(vae: dict, height: int, width: int, batch: int) -> int:
    """The VAE's peak while it decodes: three full-size float32 maps of its widest layer at full resolution."""
    return 3 * 4 * batch * height * width * vae["block_out_channels"][1]


def _advice(profile: Profile, method: str, memory_gib: dict[str, float], gpus: int, batch: int) -> list[str]:
    training = training_of(profile.training, profile.methods, method)
    advice = []
    if not training.checkpointing:
        advice.append(f"training.checkpointing: true ({memory_gib['activations']} GiB of activations become a few)")
    if batch > 1:
        advice.append(f"a smaller training.batch_tokens ({batch} latents in a call now)")
    if memory_gib["replica"]:
        advice.append(f"training.parallel.replica: false ({memory_gib['replica']} GiB)")
    if training.parallel.shard_size and training.parallel.shard_size < gpus:
        advice.append("a larger training.parallel.shard_size, or null: weights over all GPUs")
    if not training.adapter:
        advice.append("training.adapter: {rank: 32, alpha: 64.0}: LoRA, no gradients and moments of the whole model")
        advice.append("more GPUs: weights, gradients and optimizer are shared by all of them")
    if profile.sampling.decode_batch > 1:
        advice.append("a smaller sampling.decode_batch")
    return advice
