"""The section `training` of a profile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from g2rpo_core.algorithm.methods import Method
from g2rpo_core.distributed.process_group import Processes
from g2rpo_core.foundation.settings import Count, Different, Name, Rate, Scale, Settings
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.optimizers import (
    ADAM_EPSILON,
    ENDLESS,
    Argument,
    Schedule,
    check_optimizer,
    schedule,
)

# Kept by default up to this size: larger ones would fill a disk run by run
SMALL = 4 * 2**30  # bytes of a checkpoint that stays


class MonitorSettings(Settings):
    """Measurements on held-out prompts during training."""

    every: Count = Field(description="Iterations between two measurements.")
    prompts: Count = Field(description="How many of the first test prompts to use.")
    rewards: Annotated[tuple[str, ...], Different] = Field(
        description="Rewards to measure; they need not be training rewards."
    )


class CheckpointSettings(Settings):
    """When a run writes a checkpoint to resume from; it always does on SIGTERM."""

    every: Count = Field(10, description="Iterations between two checkpoints.")
    minutes: Scale | None = Field(
        None,
        description=(
            "Instead of `every`: minutes from the end of one checkpoint to the start of the next."
        ),
    )
    keep: Count = Field(1, description="Newest checkpoints that stay on disk while the run trains.")
    finished: bool | None = Field(
        None,
        description=(
            "Keep the last checkpoint of a finished run, from which it continues if only "
            "training.iterations changes and the learning rate does not depend on it; "
            f"null: if it takes less than {SMALL / 2**30:.0f} GiB."
        ),
    )
    grace: float = Field(
        25.0,
        gt=0,
        le=86_400,
        description=(
            "Seconds from SIGTERM until the process ends in any case; "
            "schedulers commonly wait for 30."
        ),
    )


class EmaSettings(Settings):
    """Exponential moving average (EMA) of the trained weights.

    The monitor, snapshots, evaluation and the saved run then use it. The defaults are flow_grpo's:
    an average over some 80 optimizer steps.
    """

    decay: float = Field(0.9, gt=0, lt=1, description="Weight of the average so far.")
    every: Count = Field(8, description="Optimizer steps between two updates of the average.")

    def decay_at(self, step: int) -> float | None:
        """Return the average's decay after optimizer step `step`, from 0; None between updates.

        min((1 + n) / (10 + n), `decay`) after every `every`, as in flow_grpo's ema.py: the first
        weights are soon forgotten.
        """
        return min((1 + step) / (10 + step), self.decay) if (step + 1) % self.every == 0 else None


class SampleSettings(Settings):
    """Images of fixed test prompts and noise, and of one group with its rewards."""

    every: Count = Field(25, description="Iterations between two sets of images.")
    prompts: Count = Field(4, description="How many of the first test prompts to use.")


class TrackingSettings(Settings):
    """Where to watch a run while it trains.

    With `tensorboard --logdir .cache/live`, or another tracker that is installed.
    """

    to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "dvclive"], ...], Different
    ] = Field(("tensorboard",), description="Trackers that a run writes to.")
    samples: SampleSettings | None = Field(
        SampleSettings(), description="Sample images; null: none."
    )

    def samples_due(self, iteration: int) -> bool:
        """Tell whether images are shown after this iteration; also before the first, to compare."""
        return self.samples is not None and bool(self.to) and iteration % self.samples.every == 0


class DriftSettings(Settings):
    """When a run warns of drift (`training/drift.py`), and whether that stops the run."""

    # At least 2: a single iteration or measurement shows no trend
    patience: Annotated[int, Field(ge=2, le=10**6)] = Field(
        20,
        description=(
            "Iterations in a row that must be clipped or without spread, "
            "and over which groups' spread is averaged."
        ),
    )
    measurements: Annotated[int, Field(ge=2, le=1000)] = Field(
        5, description="How many times in a row a held-out reward must fall."
    )
    max_reward_noise: Annotated[float, Field(gt=0)] | None = Field(
        0.7,
        description=(
            "End the run if a reward, asked twice about the same group before the first update, "
            "differs by more than this share of the group's spread; null: only warn, above 0.1."
        ),
    )
    stop: bool = Field(False, description="End the run, with a checkpoint, at the first warning.")


class TrainingSettings(Settings):
    """One run of online RL; names are those of published training scripts with the same meaning."""

    # None of these changes the result, so a resumed run may change them
    how = frozenset({"checkpoints", "drift", "processes", "tracking"})

    iterations: Count = Field(description="Iterations of rollout and update.")
    prompts_per_iteration: Count = Field(description="Prompts in an iteration, on all processes.")
    num_generations: int = Field(
        ge=2,
        le=10_000,
        description="G, the members of a group: samples of one SDE step for one prompt.",
    )
    batch_tokens: Count = Field(
        description="As sampling.batch_tokens, for a forward and backward pass."
    )
    rewards: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        min_length=1,
        description=(
            "Weight of each reward's advantage, by the reward's name; only their ratio matters: "
            "they are divided by the mean of their absolute values, without zeros."
        ),
    )
    learning_rate: Rate = Field(description="Learning rate at the start, or after the warm-up.")
    lr_scheduler: Schedule = Field(
        description="A schedule of transformers; the paper's is `constant`; `linear` falls to 0."
    )
    lr_warmup_steps: int = Field(
        0, ge=0, le=10**9, description="Iterations in which the learning rate rises from 0."
    )
    lr_scheduler_kwargs: dict[str, Argument] = Field(
        {}, description="Arguments of the schedule, such as num_cycles or min_lr_rate."
    )
    optimizer: str = Field("AdamW", description="A class of torch.optim.")
    optimizer_args: dict[str, Argument] = Field(
        {}, description="Its arguments, such as betas or momentum."
    )
    adam_epsilon: Scale = Field(
        ADAM_EPSILON,
        description="eps of AdamW and its kind; weights whose gradients are below hardly move.",
    )
    weight_decay: float = Field(
        ge=0,
        le=1,
        description=(
            "Weight decay of the optimizer; below 3e-8 / learning_rate float32 rounds it to none."
        ),
    )
    max_grad_norm: Scale = Field(description="Gradients are clipped to this norm.")
    clip_range: float = Field(
        gt=0,
        le=1,
        description=(
            "Clip range eps: ratios beyond 1 ± eps get no gradient. "
            "Used by methods that do not publish their own."
        ),
    )
    adv_clip_max: Scale = Field(description="Advantages are clamped to plus or minus this.")
    monitor: MonitorSettings = Field(description="Measurements on held-out prompts.")
    lora: LoraSettings | None = Field(
        None, description="Train a LoRA on frozen weights; null: train all weights."
    )
    start: Name | None = Field(
        None,
        description=(
            "Entry of section `published` whose weights, or whose LoRA, training starts from; "
            "null: the base model."
        ),
    )
    ema: EmaSettings | None = Field(
        None, description="Evaluate and keep the average of the weights; null: the last ones."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass instead of keeping them."
    )
    max_old_policy_ratio_error: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description=(
            "End the run if |ratio - 1| before an iteration's first update exceeds this, in clip "
            "ranges; null: only warn, above 1."
        ),
    )
    checkpoints: CheckpointSettings = Field(
        CheckpointSettings(), description="When a run writes a checkpoint."
    )
    drift: DriftSettings = Field(DriftSettings(), description="When a run warns of drift.")
    snapshots: Annotated[tuple[Count, ...], Different] = Field(
        (), description="Iterations whose weights are also kept, for evaluation."
    )
    # Not for checkpoints: steps of 1e-5 would be lost in masters of bfloat16
    save_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description=(
            "Dtype of the weights that a finished run and its snapshots keep; "
            "checkpoints to resume from are float32."
        ),
    )
    tracking: TrackingSettings = Field(
        TrackingSettings(), description="Where a run can be watched."
    )
    parallel: ParallelSettings = Field(
        ParallelSettings(), description="How the model is spread over GPUs."
    )
    processes: Processes = Field(
        1, description="Processes on all nodes together; `auto`: one per GPU."
    )

    @field_validator("rewards")
    @classmethod
    def _weighs_something(cls, value):
        # A single 0 is allowed: that reward is measured, and not trained on
        if not any(value.values()):
            raise ValueError("every weight is 0: nothing would be learned")
        return value

    @model_validator(mode="after")
    def _can_be_made(self) -> "TrainingSettings":
        check_optimizer(self.optimizer, **self.optimizer_settings)
        self.rate_schedule()
        return self

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """Return the settings of `make_optimizer` beside its name and parameters."""
        return {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "adam_epsilon": self.adam_epsilon,
            "arguments": self.optimizer_args,
        }

    def rate_schedule(self) -> Callable[[int], float]:
        """Return the learning rate as a function of the iteration, from 0."""
        return schedule(
            self.lr_scheduler,
            self.learning_rate,
            self.iterations,
            self.lr_warmup_steps,
            self.lr_scheduler_kwargs,
        )

    @property
    def reward_weights(self) -> dict[str, float]:
        """Return the weights of rewards with a mean absolute value of 1, zeros not counted.

        With one reward, or several of equal weights, each weighs 1, as in published recipes.
        """
        sizes = [abs(weight) for weight in self.rewards.values() if weight]
        return {name: weight * len(sizes) / sum(sizes) for name, weight in self.rewards.items()}

    @property
    def end(self) -> str | None:
        """Return the setting that only decides when a run ends; None if each step knows the end.

        A longer run goes on from the last checkpoint of a shorter one.
        """
        return "training.iterations" if self.lr_scheduler in ENDLESS else None


@dataclass(frozen=True)
class RunSettings:
    """What a run is trained with: its method, and two sections with the changes of its entry."""

    method: Method
    sampling: SamplingSettings
    training: TrainingSettings
