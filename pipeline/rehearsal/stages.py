"""Run the stages embed, train and evaluate in this process, each under a meter of its own.

What is replaced of this project's code and of other packages, all of it here:

- processes: a group whose others answer as this one does;
- weights: models are made from their configuration, and written files stay empty;
- work that repeats: calls and passes of equal shape are counted at the cost of the second;
- what is on the disk: there are no checkpoints, and any disk has room for them.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, chdir
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from g2rpo_core.config import Profile
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.tracing import shape_of
from g2rpo_core.models.loading import add_adapter, lora_config, reduce_gradients
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards import registry
from g2rpo_core.training import trainer
from pipeline.rehearsal import inputs, simulate
from pipeline.rehearsal.meter import UNSEEN, Meter

STAGES = {"embed": False, "train": True, "evaluate": True}  # whether it is one of a method
ADAM = "torch.optim.adam._multi_tensor_adam"
DTENSOR = "torch.distributed.tensor._sharding_prop"
# Phases of a training -> what runs in them
PHASES = {
    "load": (
        "stages.train.Policy.load_to_train",
        "stages.train.EmbeddingStore.load_encoders",
        "stages.train.registry.load",
    ),
    "iteration": ("g2rpo_core.training.trainer.Trainer.iterate",),
    "rollout": ("g2rpo_core.training.experience.RolloutSampler.__call__",),
    "decode": ("g2rpo_core.models.policy.Policy.decode",),
    "score": ("g2rpo_core.training.experience.score_all",),
    "monitor": ("g2rpo_core.training.metrics.HeldOut.__call__",),
    "optimizer": ("torch.optim.AdamW.step",),
    "save": ("g2rpo_core.models.policy.Policy.save",),
    # DTensor tries shapes
    UNSEEN: (f"{DTENSOR}.ShardingPropagator._propagate_tensor_meta_non_cached",),
}


def rehearse(
    profile: Profile, name: str, method: str, machines: Machines, folder: Path
) -> dict[str, Meter]:
    """Run the stages in a new folder, as for the first process on these machines.

    Return a meter of each, by name.
    """
    inputs.write_profile(folder / "profiles", name, method, machines.gpus)
    inputs.make_models(folder / "models" / name, profile)
    inputs.make_prompts(folder / "prompts" / name, profile)
    simulate.gpus(machines.per_node, machines.memory)
    lora = profile.run(method).training.lora
    adapter = lora_config(shape_of(profile)[0], lora) if lora else None
    with chdir(folder):
        return {
            stage: run_stage(
                stage,
                ["--profile", name, *(["--method", method, "--seed", "0"] if own else [])],
                machines,
                adapter,
            )
            for stage, own in STAGES.items()
        }


def run_stage(stage: str, words: list[str], machines: Machines, lora: LoraConfig | None) -> Meter:
    """Run a stage of the project in this folder, as the first process on these machines.

    lora: the adapter in the run's weights, if they are a LoRA's.
    """
    meter = Meter(machines)
    main = importlib.import_module(f"stages.{stage}").main.__wrapped__
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", [stage, *words]))
        for each in (*replaced(lora), *counted(meter)):
            stack.enter_context(each)
        stack.enter_context(simulate.WithoutData())
        stack.enter_context(meter)
        main()
    return meter


def replaced(lora: LoraConfig | None) -> Iterator[AbstractContextManager]:
    """Yield the patches for what a rehearsal does not have: other processes, weights, a disk."""
    build, alone = registry.build, (ProcessGroup(), simulate.CUDA)
    new = {
        "stages.train.join_processes": join_all,
        "stages.evaluate.join_processes": lambda *_: alone,
        "g2rpo_core.distributed.process_group.ProcessGroup.gather": answers,
        **{f"stages.{stage}.check_room": lambda *_: None for stage in STAGES},
        "g2rpo_core.distributed.checkpoint.Checkpoints": MagicMock(),
        "g2rpo_core.architectures.table.load_whole": from_configuration,
        "g2rpo_core.models.policy.load_whole": from_configuration,
        "g2rpo_core.models.policy.check_attention": lambda *_, **__: None,
        "g2rpo_core.models.policy.load_lora": lambda _, model, __: add_adapter(model, lora),
        "g2rpo_core.models.loading.read_weights": lambda *_: None,
        # what is measured of learning chooses elements by their values, which there are none of
        "g2rpo_core.training.trainer.judge_noise": lambda *_: {},
        "g2rpo_core.training.trainer.Movement": lambda _: MagicMock(sums=lambda: [0.0] * 3),
        "g2rpo_core.rewards.registry.build": partial(build_reward, build),
        "open_clip.factory.load_checkpoint": lambda *_, **__: {},
        "g2rpo_core.rewards.similarity.read_weights": lambda _: {},
        ADAM: partial(on_shards, resolve_name(ADAM)),
        "safetensors.torch.save_file": lambda _, path, **__: Path(path).touch(),
        # it draws until the values are within bounds
        "transformers.PreTrainedModel.initialize_weights": lambda _: None,
    }
    for name, function in new.items():
        yield patch(name, function)


def join_all(processes: int, *_: object) -> tuple[ProcessGroup, torch.device]:
    """Join as the first of all processes."""
    if processes > 1:
        simulate.join(processes)
    return ProcessGroup(0, processes), simulate.CUDA


def on_shards(step: Callable, *lists: Any, **how: Any) -> None:
    """Let an optimizer see this process's shards: DTensor's rules for lists take minutes."""
    step(*tree_map_only(DTensor, DTensor.to_local, lists), **how)


def answers(group: ProcessGroup, value: object) -> list:
    """Answer for all processes as the first does."""
    if group.size > 1 and isinstance(value, dict) and 0 in value:
        # Batches by number, of which every process has one
        return [{number: value[0]} for number in range(group.size)]
    return [value] * group.size


def from_configuration(kind: Any, folder: Path, dtype: torch.dtype, **_: object) -> Any:
    model = (
        kind.from_config(kind.load_config(folder))
        if issubclass(kind, ModelMixin)
        else kind(kind.config_class.from_pretrained(folder))
    )
    return model.to(dtype).eval()


def build_reward(
    build: Callable, name: str, models: Any, device: torch.device, section: Any
) -> Callable:
    """Build a reward of open_clip from its configuration; another takes its model's memory."""
    spec = registry.REWARDS.get(name)
    if name in ("hps", "clip_score"):
        return build(name, models, device, section)
    if spec is None or spec.size is None or registry.settings_of(section, name).remote:
        return lambda images, prompts: torch.zeros(len(prompts))  # nothing on the GPU
    size, take = spec.size, partial(torch.empty, dtype=torch.uint8, device=device)
    weights = take(size.bytes)

    def score(images: torch.Tensor, prompts: Sequence[str], weights=weights) -> torch.Tensor:
        take(min(size.at_once, len(images)) * size.bytes_per_image)
        return torch.zeros(len(prompts))

    return score


def counted(meter: Meter) -> Iterator[AbstractContextManager]:
    """Yield the patches that tell the meter of phases, and leave out what repeats."""
    for phase, names in PHASES.items():
        for name in names:
            yield patch(name, meter.during(phase)(resolve_name(name)))
    velocity, update = Policy._velocity, trainer.Trainer.update
    resize = torch.UntypedStorage.resize_
    starts, figures = list[Counter](), list[dict]()

    def sampled(policy: Policy, transformer: ModelMixin, conditioning: Any) -> Callable:
        field = velocity(policy, transformer, conditioning)

        def call(latents: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                return field(latents, *more)
            return meter.repeated(
                (id(transformer), latents.shape),
                partial(field, latents, *more),
                partial(torch.empty_like, latents),
            )

        return call

    def updated(of: trainer.Trainer, conditioning: Any, whole: Any) -> dict:
        size = of.policy.batch_size(of.training.batch_tokens, conditioning)
        parts = [part for batch in whole.batches for part in batch.split(size)]
        kinds = [list(kind) for _, kind in groupby(parts, lambda part: part.advantages.shape)]
        # The first two and the last passes of a kind; the others count as the second
        kept = [part for kind in kinds for part in (*kind[:2], *kind[2:][-1:])]

        def step() -> dict:
            starts.clear()
            figures.append(update(of, conditioning, replace(whole, batches=kept)))
            for _ in parts[len(kept) :]:
                meter.costs += starts[2] - starts[1]
            return figures[-1]

        with meter.during("update"):
            return meter.repeated(tuple(map(len, kinds)), step, lambda: figures[-1])

    def reduced(*how: Any) -> None:
        starts.append(meter.costs.copy())
        reduce_gradients(*how)

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        meter.resized(storage)
        return storage

    yield patch.object(torch.UntypedStorage, "resize_", resized)  # it is no operation
    yield patch.object(Policy, "_velocity", sampled)
    yield patch.object(trainer.Trainer, "update", updated)
    yield patch.object(trainer, "reduce_gradients", reduced)
