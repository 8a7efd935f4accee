"""The section `training` of a profile."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from g2rpo_core.algorithm.methods import Method
from g2rpo_core.distributed.process_group import Processes
from g2rpo_core.foundation.settings import Count, Different, Name, Rate, Scale, Settings
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.sampling.settings import SamplingSettings

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
            "training.iterations changes and the learning rate is constant; "
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
        min_length=1, description="Weight of each reward's advantage, by the reward's name."
    )
    learning_rate: Rate = Field(description="AdamW's learning rate at the start.")
    lr_scheduler: Literal["constant", "linear"] = Field(
        description="The paper's is `constant`; `linear` falls to 0."
    )
    weight_decay: float = Field(ge=0, le=1, description="AdamW's weight decay.")
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

    @property
    def end(self) -> str | None:
        """Return the setting that only decides when a run ends; None if each step knows the end.

        A longer run goes on from the last checkpoint of a shorter one.
        """
        return "training.iterations" if self.lr_scheduler == "constant" else None


@dataclass(frozen=True)
class RunSettings:
    """What a run is trained with: its method, and two sections with the changes of its entry."""

    method: Method
    sampling: SamplingSettings
    training: TrainingSettings
