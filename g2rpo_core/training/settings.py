"""The section `training` of a profile."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from g2rpo_core.distributed.process_group import Processes
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.settings import Settings


class MonitorSettings(Settings):
    """What is measured on held-out prompts while training: every so many iterations, on so many prompts, by which rewards."""

    every: PositiveInt
    prompts: PositiveInt
    rewards: tuple[str, ...]


class CheckpointSettings(Settings):
    """When a run writes where it is, so that it can resume from there; it always does on SIGTERM."""

    every: PositiveInt = Field(10, description="iterations")
    keep: PositiveInt = Field(1, description="how many of the newest stay on disk; all go when the run is finished")
    grace: PositiveFloat = Field(
        25.0, description="seconds from SIGTERM until the process ends in any case; whoever asks commonly waits for 30"
    )


class EmaSettings(Settings):
    """The exponential moving average of the trained weights: with it the monitor, snapshots, evaluation and the saved run are its.

    The defaults are flow_grpo's: an average over some 80 optimizer steps.
    """

    decay: float = Field(0.9, gt=0, lt=1, description="the weight of the average so far")
    every: PositiveInt = Field(8, description="optimizer steps")


class SampleSettings(Settings):
    """Pictures of fixed test prompts and noise, and of one group with its rewards."""

    every: PositiveInt = Field(25, description="iterations")
    prompts: PositiveInt = Field(4, description="of the test prompts, the first ones")


class TrackingSettings(Settings):
    """Where a run can be watched while it trains: `tensorboard --logdir .cache/live`, or another tracker that is installed."""

    to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "dvclive"], ...] = ("tensorboard",)
    samples: SampleSettings | None = SampleSettings()

    def samples_due(self, iteration: int) -> bool:
        """Whether pictures are shown after this iteration; before the first one, too, to compare with."""
        return self.samples is not None and bool(self.to) and iteration % self.samples.every == 0


class TrainingSettings(Settings):
    """One run of online RL; names are those of the published training scripts where they mean the same."""

    how = frozenset({"checkpoints", "processes", "tracking"})

    iterations: PositiveInt
    prompts_per_iteration: PositiveInt
    num_generations: int = Field(ge=2, description="G, members of a group: samples of one SDE step for one prompt")
    batch_tokens: PositiveInt = Field(description="as sampling.batch_tokens, for a forward and backward")
    rewards: dict[str, float] = Field(min_length=1, description="name: weight of its advantage")
    learning_rate: PositiveFloat
    lr_scheduler: Literal["constant", "linear"] = Field(description="the paper's is constant; linear falls to 0")
    weight_decay: float = Field(ge=0)
    max_grad_norm: PositiveFloat
    clip_range: PositiveFloat
    adv_clip_max: PositiveFloat = Field(description="advantages are clamped to plus or minus this")
    monitor: MonitorSettings
    lora: LoraSettings | None = Field(None, description="train a LoRA beside frozen weights; null: all weights")
    ema: EmaSettings | None = Field(None, description="evaluate and keep the average of the weights; null: the last ones")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass instead of keeping them")
    max_old_policy_ratio_error: PositiveFloat = Field(
        1.0,
        description="largest |ratio - 1| before an iteration's first update that is no error, in clip ranges: by 1, nothing may be clipped"
        " before anything was learned",
    )
    checkpoints: CheckpointSettings = CheckpointSettings()
    snapshots: tuple[PositiveInt, ...] = Field(
        (), description="iterations whose weights are kept beside the last, for evaluation"
    )
    tracking: TrackingSettings = TrackingSettings()
    parallel: ParallelSettings = ParallelSettings()
    processes: Processes = Field(1, description="on all nodes together; auto: one for each GPU")
