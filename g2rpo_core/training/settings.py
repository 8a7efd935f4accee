"""The section `training` of a profile."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from g2rpo_core.algorithm.methods import Method
from g2rpo_core.distributed.process_group import Processes
from g2rpo_core.foundation.settings import Count, Different, Name, Rate, Scale, Settings
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.sampling.settings import SamplingSettings

SMALL = 4 * 2**30  # bytes of a checkpoint that stays


class MonitorSettings(Settings):
    """What is measured on held-out prompts during training: every how many iterations, on how many prompts, by which rewards."""

    every: Count = Field(description="iterations between two measurements")
    prompts: Count = Field(description="how many of the first test prompts")
    rewards: Annotated[tuple[str, ...], Different] = Field(
        description="that are measured, trained on or not"
    )


class CheckpointSettings(Settings):
    """When a run writes a checkpoint to resume from; it always does on SIGTERM."""

    every: Count = Field(10, description="iterations")
    minutes: Scale | None = Field(
        None, description="instead of `every`: minutes from the end of one to the start of the next"
    )
    keep: Count = Field(1, description="how many of the newest stay on disk while the run trains")
    finished: bool | None = Field(
        None,
        description="keep the last one of a finished run, from which it goes on if only "
        "training.iterations changes and the learning rate is"
        f" constant; null: if it takes less than {SMALL / 2**30:.0f} GiB",
    )
    grace: float = Field(
        25.0,
        gt=0,
        le=86_400,
        description=(
            "seconds from SIGTERM until the process ends in any case; "
            "schedulers commonly wait for 30"
        ),
    )


class EmaSettings(Settings):
    """The exponential moving average of the trained weights, which the monitor, snapshots, evaluation and the saved run then use.

    The defaults are flow_grpo's: an average over some 80 optimizer steps.
    """

    decay: float = Field(0.9, gt=0, lt=1, description="the weight of the average so far")
    every: Count = Field(8, description="optimizer steps")

    def decay_at(self, step: int) -> float | None:
        """Return the decay after optimizer step `step`, from 0: min((1 + n) / (10 + n), `decay`) after every `every`, as flow_grpo's ema.py.

        The first weights are soon forgotten.
        """
        return min((1 + step) / (10 + step), self.decay) if (step + 1) % self.every == 0 else None


class SampleSettings(Settings):
    """Images of fixed test prompts and noise, and of one group with its rewards."""

    every: Count = Field(25, description="iterations")
    prompts: Count = Field(4, description="how many of the first test prompts")


class TrackingSettings(Settings):
    """Where a run can be watched while it trains: `tensorboard --logdir .cache/live`, or another tracker that is installed."""

    to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "dvclive"], ...], Different
    ] = Field(("tensorboard",), description="the trackers that a run writes to")
    samples: SampleSettings | None = Field(
        SampleSettings(), description="sample images; null: none"
    )

    def samples_due(self, iteration: int) -> bool:
        """Tell whether images are shown after this iteration; also before the first one, for comparison."""
        return self.samples is not None and bool(self.to) and iteration % self.samples.every == 0


class DriftSettings(Settings):
    """When a run warns of drift (`training/drift.py`), and whether that stops the run."""

    patience: Annotated[int, Field(ge=2, le=10**6)] = Field(
        20,
        description=(
            "iterations in a row that are clipped or have no spread, "
            "or over which groups' spread is averaged"
        ),
    )
    measurements: Annotated[int, Field(ge=2, le=1000)] = Field(
        5, description="how many times in a row a held-out reward falls"
    )
    stop: bool = Field(False, description="end the run, with a checkpoint, at the first warning")


class TrainingSettings(Settings):
    """One run of online RL; names are those of the published training scripts where they mean the same."""

    how = frozenset({"checkpoints", "drift", "processes", "tracking"})

    iterations: Count = Field(description="of rollout and update")
    prompts_per_iteration: Count = Field(description="of all processes together")
    num_generations: int = Field(
        ge=2, le=10_000, description="G, members of a group: samples of one SDE step for one prompt"
    )
    batch_tokens: Count = Field(description="as sampling.batch_tokens, for a forward and backward")
    rewards: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        min_length=1, description="name: weight of its advantage"
    )
    learning_rate: Rate = Field(description="AdamW's, at the start")
    lr_scheduler: Literal["constant", "linear"] = Field(
        description="the paper's is constant; linear falls to 0"
    )
    weight_decay: float = Field(ge=0, le=1, description="AdamW's")
    max_grad_norm: Scale = Field(description="gradients are clipped to this norm")
    clip_range: float = Field(
        gt=0,
        le=1,
        description=(
            "eps of the clipped objective: ratios beyond 1 ± eps get no gradient; "
            "of methods that do not publish their own"
        ),
    )
    adv_clip_max: Scale = Field(description="advantages are clamped to plus or minus this")
    monitor: MonitorSettings = Field(description="measurements on held-out prompts")
    lora: LoraSettings | None = Field(
        None, description="train a LoRA on frozen weights; null: all weights"
    )
    start: Name | None = Field(
        None,
        description=(
            "the entry of section `published` whose weights, or whose LoRA, training goes on from; "
            "null: the base model"
        ),
    )
    ema: EmaSettings | None = Field(
        None, description="evaluate and keep the average of the weights; null: the last ones"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass instead of keeping them"
    )
    max_old_policy_ratio_error: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description=(
            "the |ratio - 1| before an iteration's first update that ends a run, in clip ranges; "
            "null: above 1 it only warns"
        ),
    )
    checkpoints: CheckpointSettings = Field(
        CheckpointSettings(), description="when a run writes one"
    )
    drift: DriftSettings = Field(DriftSettings(), description="when a run warns")
    snapshots: Annotated[tuple[Count, ...], Different] = Field(
        (), description="iterations whose weights are also kept, for evaluation"
    )
    save_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description=(
            "of the weights that a finished run and its snapshots keep; "
            "checkpoints to resume from are float32"
        ),
    )
    tracking: TrackingSettings = Field(TrackingSettings(), description="where a run can be watched")
    parallel: ParallelSettings = Field(
        ParallelSettings(), description="how the model is spread over GPUs"
    )
    processes: Processes = Field(1, description="on all nodes together; auto: one for each GPU")

    @field_validator("rewards")
    @classmethod
    def _weighs_something(cls, value):
        if not any(value.values()):
            raise ValueError("every weight is 0: nothing would be learned")
        return value


@dataclass(frozen=True)
class RunSettings:
    """What a run is trained with: its method, and the two sections with the changes of its entry."""

    method: Method
    sampling: SamplingSettings
    training: TrainingSettings
