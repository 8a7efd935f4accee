"""G²RPO in one file: plain PyTorch on the small FLUX of profile `tiny`, one prompt at a time.

    make reproduce                         # once: builds models/tiny (or: dvc repro models)
    python examples/g2rpo_in_one_file.py   # some minutes on a CPU

Read it from `iterate` at the end. Equations are those of the paper (arXiv 2510.01982). A test holds
its gradient equal to that of the project's trainer, which does the same in full batches, without
repeating a model call, on many GPUs.

Shapes: R rewards, J granularities, K SDE steps, G members of a group; latents are [tokens,
channels].
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline as Flux
from transformers import CLIPModel, CLIPProcessor

PROMPTS = ("a large red circle", "a small blue cross", "a green triangle", "a yellow square")


@dataclass(frozen=True)
class Settings:
    """The paper's Table 3 at the size of profile `tiny`."""

    steps: int = 10
    """T, denoising steps of an image."""
    shift: float = 3.0
    """Shift of the sigmas towards noise."""
    sde_steps: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Steps that get noise, one at a time, counted from the noisy end (the paper's M)."""
    granularities: tuple[int, ...] = (1, 2, 3)
    """Lambda: step sizes of the tails."""
    group: int = 12
    """G, samples of one SDE step."""
    eta: float = 0.7
    """How much noise an SDE step adds."""
    clip_range: float = 1e-4
    """eps of the clipped objective; small, because log-probabilities are means over elements."""
    advantage_clip: float = 5.0
    """Largest advantage."""
    learning_rate: float = 2e-5
    """AdamW's."""
    guidance: float = 3.5
    """An input of FLUX.1-dev."""
    side: int = 32
    """Height and width of images, in pixels."""
    text_tokens: int = 12
    """Length of an encoded prompt."""
    rewards: dict[str, float] = field(default_factory=lambda: {"pickscore": 1.0})
    """Reward -> weight of its advantage."""


def sigma_at(settings: Settings, step: float) -> float:
    """Return sigma at a step index: 1 at step 0, and 0 at step T."""
    u = 1 - step / settings.steps
    return settings.shift * u / (1 + (settings.shift - 1) * u)


# --- The model: a velocity field under a prompt ---


class Model:
    """The small FLUX: encodes a prompt, predicts velocities, and decodes latents to images."""

    def __init__(self, pipeline: FluxPipeline, settings: Settings):
        self.pipeline, self.transformer, self.settings = pipeline, pipeline.transformer, settings
        pipeline.vae.requires_grad_(False)
        self.factor = 2 * pipeline.vae_scale_factor  # pixels of an image token's side
        self.tokens = settings.side // self.factor

    @torch.no_grad()
    def encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """Return what the transformer needs to know of a prompt."""
        context, pooled, text_ids = self.pipeline.encode_prompt(
            prompt, None, max_sequence_length=self.settings.text_tokens
        )
        image_ids = Flux._prepare_latent_image_ids(
            1, self.tokens, self.tokens, "cpu", torch.float32
        )
        return {
            "encoder_hidden_states": context,
            "pooled_projections": pooled,
            "txt_ids": text_ids,
            "img_ids": image_ids,
        }

    def velocity(
        self, latents: torch.Tensor, sigma: float, prompt: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the velocity of latents [N, tokens, channels]: from the image to the noise."""
        count = len(latents)
        texts = {
            name: value.expand(count, *value.shape[1:])
            for name, value in prompt.items()
            if not name.endswith("_ids")
        }
        ids = {name: value for name, value in prompt.items() if name.endswith("_ids")}
        same = lambda value: torch.full((count,), value)
        return self.transformer(
            latents,
            timestep=same(sigma),
            guidance=same(self.settings.guidance),
            **texts,
            **ids,
            return_dict=False,
        )[0]

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Return images [N, 3, side, side] in [0, 1] of clean latents [N, tokens, channels]."""
        side, config = self.settings.side, self.pipeline.vae.config
        unpacked = Flux._unpack_latents(latents, side, side, self.pipeline.vae_scale_factor)
        images = self.pipeline.vae.decode(
            unpacked / config.scaling_factor + config.shift_factor, return_dict=False
        )[0]
        return (images / 2 + 0.5).clamp(0, 1)

    def noise(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return standard normal latents [count, tokens, channels]."""
        return torch.randn(
            count, self.tokens**2, self.transformer.config.in_channels, generator=generator
        )


# --- The SDE step: the policy of reinforcement learning ---


def sde_step(
    settings: Settings, latents: torch.Tensor, velocity: torch.Tensor, step: int
) -> tuple[torch.Tensor, float]:
    """Return mean and standard deviation of the next latents (Eq. 2 and 3).

    The score corrects the mean of the ODE step for the noise that is added.
    """
    sigma, following = sigma_at(settings, step), sigma_at(settings, step + 1)
    delta = following - sigma
    # s is singular at sigma = 1, where the next sigma replaces it
    limited = sigma_at(settings, 1) if sigma == 1 else sigma
    s = settings.eta * math.sqrt(sigma / (1 - limited))
    mean = (
        latents * (1 + s**2 * delta / (2 * sigma))
        + velocity * (1 + s**2 * (1 - sigma) / (2 * sigma)) * delta
    )
    return mean, s * math.sqrt(-delta)


def log_prob(latents: torch.Tensor, mean: torch.Tensor, std: float) -> torch.Tensor:
    """Return the log-density [N] of next latents, a mean over elements whatever the resolution."""
    z = (latents - mean) / std
    return (-0.5 * z**2 - math.log(std) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)


# --- Sampling: an anchor, a branch for each SDE step, a tail for each granularity ---


def tail_steps(settings: Settings, sde_step: int, granularity: int) -> list[int]:
    """Return the steps at which a tail calls the model, until it jumps to sigma = 0 (Eq. 10)."""
    return [sde_step + 1, *range(sde_step + 2, settings.steps + 1, granularity)][:-1]


@torch.no_grad()
def sample(
    model: Model,
    settings: Settings,
    prompt: dict,
    initial: torch.Tensor,
    noises: list[torch.Tensor],
):
    """Sample every branch.

    initial: [1, tokens, channels], shared by all; noises: of every SDE step [G, tokens, channels].
    Returns clean latents [K, J, G, tokens, channels], and of every SDE step its number, the state
    before it, the G states after it and their log-probabilities.
    """
    # The anchor: one deterministic path, whose states all branches start from
    anchor = [initial]
    for step in range(max(settings.sde_steps)):
        delta = sigma_at(settings, step + 1) - sigma_at(settings, step)
        anchor.append(
            anchor[-1] + model.velocity(anchor[-1], sigma_at(settings, step), prompt) * delta
        )
    clean, transitions = [], []
    for step, noise in zip(settings.sde_steps, noises):
        # Singular stochastic sampling: noise at this step alone, so that the reward belongs to it
        state = anchor[step]
        mean, std = sde_step(
            settings, state, model.velocity(state, sigma_at(settings, step), prompt), step
        )
        following = mean + std * noise
        transitions.append((step, state, following, log_prob(following, mean, std)))
        # Every noisy direction is finished at each granularity, without noise
        ends = []
        for granularity in settings.granularities:
            x, steps = following, [*tail_steps(settings, step, granularity), settings.steps]
            for now, then in zip(steps, steps[1:]):
                x = x + model.velocity(x, sigma_at(settings, now), prompt) * (
                    sigma_at(settings, then) - sigma_at(settings, now)
                )
            ends.append(x)
        clean.append(torch.stack(ends))
    return torch.stack(clean), transitions


# --- Advantages and loss ---


def advantages_of(settings: Settings, scores: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Return the advantages [K, G] of scores [R, K, J, G].

    Standardized in each group, then summed over granularities and rewards.
    """
    scores = scores.double()
    away = scores - scores.mean(-1, keepdim=True)
    standardized = away / (scores.std(-1, keepdim=True) + 1e-8)  # Eq. 4 and 8
    spread = scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)
    # Equal but for a scorer's last bits
    largest = scores.abs().amax(-1, keepdim=True)
    equal = spread <= 8 * torch.finfo(torch.float32).eps * largest
    # Eq. 11: multi-granularity advantage integration
    summed = standardized.where(~equal, 0.0).float().sum(2)
    return torch.einsum("r,rkg->kg", torch.tensor(weights), summed).clamp(
        -settings.advantage_clip, settings.advantage_clip
    )


def loss_of(
    settings: Settings, log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Return the clipped loss of each member [G] (Eq. 7 and 9): no gradient beyond 1 ± eps."""
    ratio = (log_probs - old).exp()
    return -torch.minimum(
        ratio * advantages,
        ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range) * advantages,
    )


def iterate(
    model: Model,
    settings: Settings,
    rewards: dict[str, Callable[[torch.Tensor, str], torch.Tensor]],
    text: str,
    initial: torch.Tensor,
    noises: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> dict[str, float]:
    """Do one iteration for one prompt: sample, score, compare, learn.

    Returns means of the scores, and the gradient's norm.
    """
    prompt = model.encode(text)
    clean, transitions = sample(model, settings, prompt, initial, noises)
    images = model.decode(clean.flatten(0, 2))
    shape = clean.shape[:3]  # K, J, G
    scored = [reward(images, text).view(shape) for reward in rewards.values()]
    scores = torch.stack(scored)  # [R, K, J, G]
    advantages = advantages_of(settings, scores, [settings.rewards[name] for name in rewards])
    optimizer.zero_grad()
    for (step, state, following, old), own in zip(transitions, advantages):
        # The state that all members share goes through the model once, now with gradient
        mean, std = sde_step(
            settings, state, model.velocity(state, sigma_at(settings, step), prompt), step
        )
        loss = loss_of(settings, log_prob(following, mean, std), old, own)
        (loss.mean() / len(transitions)).backward()  # Eq. 12: a mean over members and SDE steps
    norm = torch.nn.utils.clip_grad_norm_(model.transformer.parameters(), 1.0)
    optimizer.step()
    return {
        **{name: score.mean().item() for name, score in zip(rewards, scores)},
        "gradient norm": norm.item(),
    }


def load_pickscore(models: Path) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """Load the small PickScore: how well an image fits the text, by CLIP's cosine, scaled."""
    clip = CLIPModel.from_pretrained(models / "pickscore").eval()
    processor = CLIPProcessor.from_pretrained(models / "pickscore_processor")

    @torch.no_grad()
    def score(images: torch.Tensor, text: str) -> torch.Tensor:
        inputs = processor(
            text=[text], images=list(images), do_rescale=False, return_tensors="pt", padding=True
        )
        return clip(**inputs).logits_per_image[:, 0] / 100

    return score


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=Path("models/tiny"),
        help="what the stage `models` of profile tiny made",
    )
    parser.add_argument("--iterations", type=int, default=20)
    args = parser.parse_args()
    settings, generator = Settings(), torch.Generator().manual_seed(1)
    model = Model(FluxPipeline.from_pretrained(args.models / "pipeline"), settings)
    rewards = {"pickscore": load_pickscore(args.models)}
    optimizer = torch.optim.AdamW(
        model.transformer.parameters(), settings.learning_rate, weight_decay=1e-4
    )
    for iteration in range(args.iterations):
        text = PROMPTS[iteration % len(PROMPTS)]
        initial = model.noise(1, generator)
        noises = [model.noise(settings.group, generator) for _ in settings.sde_steps]
        figures = iterate(model, settings, rewards, text, initial, noises, optimizer)
        print(
            f"{iteration + 1:3}  {text:22}"
            + "".join(f"  {name} {value:.4f}" for name, value in figures.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
