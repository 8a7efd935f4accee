"""Runtime of a rehearsal: it simulates GPUs and processes, and reads no weights."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.process_group import Processes, ProcessGroup
from g2rpo_core.distributed.runtime import Runtime
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.models import loading
from g2rpo_core.rewards import image_reward, registry
from g2rpo_core.rewards.spec import ModelSize, Reward, Section
from g2rpo_core.weights import stored
from pipeline.rehearsal import inputs, simulate
from pipeline.rehearsal.meter import Meter

T = TypeVar("T")


class SimulatedGroup(ProcessGroup):
    """A group whose other processes answer as this one does."""

    def gather(self, value: Any) -> list:
        # Batches by number, of which every process has some
        if (
            self.size > 1
            and isinstance(value, dict)
            and value
            and all(isinstance(key, int) for key in value)
        ):
            return [{number: next(iter(value.values()))} for number in range(self.size)]
        return [value] * self.size


class Rehearsed(Runtime):
    """Process `rank` of `size` on GPU `local` of its node; lora: the adapter of a run's weights."""

    def __init__(self, meter: Meter, rank: int, size: int, local: int, lora: LoraConfig | None):
        self.meter, self.group, self.local = (
            meter,
            SimulatedGroup(rank if size > 1 else 0, size),
            local,
        )
        self.written: Counter = Counter()
        """Bytes that would be on disk, by what they are."""
        self.updates = 0
        """Forward and backward passes of all updates, including those that are left out."""
        self._stand_ins: dict[Callable, Callable] = {
            stored.read_weights: lambda *_: None,
            loading.load_lora: lambda _, transformer, *__: add_lora(transformer, lora),
            registry.build: build_reward,
        }

    def join(
        self, asked: Processes, items: int | None = None, grace: float = 0.0
    ) -> tuple[ProcessGroup, torch.device]:
        if self.group.size > 1:
            simulate.join_as(self.group.rank, self.group.size)
        return self.group, torch.device("cuda", self.local)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.meter.during(name)

    def read(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._stand_ins[function](*arguments)

    def call(
        self, model: torch.nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        if torch.is_grad_enabled():
            return function(*inputs)
        return self.meter.call(
            (self.meter.phase, id(model), tuple(inputs[0].shape)), lambda: function(*inputs)
        )

    def passes(self, batches: Sequence[Any]) -> Iterator[Any]:
        """Yield the first two and the last batches of a kind; the others count as the second."""
        kinds = [
            list(kind) for _, kind in groupby(batches, lambda batch: batch.advantages.shape[1])
        ]
        kept = [
            batch for kind in kinds for batch in (kind if len(kind) <= 3 else [*kind[:2], kind[-1]])
        ]
        self.updates += len(batches)
        starts = []
        for batch in kept:
            starts.append(self.meter.now())
            yield batch
        if left_out := len(batches) - len(kept):
            self.meter.repeat(starts[1], starts[2], left_out)

    def checkpoints(
        self, folder: Path, keep: int, processes: ProcessGroup
    ) -> checkpoint.Checkpoints:
        return Copies(folder, self.written)

    def scratch(self, stage: str, name: str, settings: Mapping[str, object], *_: Any) -> Path:
        return checkpoint.scratch(stage, name, settings, [])

    def start(self, *_: Any) -> None: ...  # values alone: shapes are those of the base model

    def attempt(self, *_: Any, **__: Any) -> None: ...  # there are no numbers

    def check_device(self, *_: Any) -> None: ...

    def claim(self, *_: Any) -> None: ...

    def check_room(self, *_: Any) -> None: ...

    def publish(self, *_: Any) -> None: ...

    def discard(self, *_: Any) -> None: ...

    def release(self, *_: Any) -> None: ...

    def count_weights(self, tensors: object) -> None:
        """Count a file of weights."""
        self.written["weights"] += sum(map(count_bytes, local_tensors(tensors)))


class Copies(checkpoint.Checkpoints):
    """Checkpoints that only take the memory of their copies, and keep records for resuming."""

    def __init__(self, folder: Path, written: Counter):
        self.folder, self.written = folder, written
        self.copies: list[torch.Tensor] = []

    def save(self, iteration: int, state: dict, records: list[dict]) -> None:
        tensors = local_tensors(state)
        self.written["checkpoint"] = sum(map(count_bytes, tensors))
        self.copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        (last := self.folder / f"iteration-{iteration:06}").mkdir(parents=True, exist_ok=True)
        (last / checkpoint.RECORDS).write_text(json.dumps(records))

    def publish(self) -> None: ...

    def finish(self) -> None:
        self.copies = []

    def load_records(self, path: Path) -> list[dict]:
        return json.loads((path / checkpoint.RECORDS).read_text())

    def load_state(self, path: Path, state: dict) -> None: ...


def local_tensors(tree: object) -> list[torch.Tensor]:
    """Return this process's part of every tensor."""
    return [
        leaf.to_local() if isinstance(leaf, DTensor) else leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    ]


def count_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def add_lora(transformer: ModelMixin, lora: LoraConfig | None) -> None:
    """Add an adapter without values, in float32."""
    transformer.add_adapter(lora)
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()


def build_reward(name: str, models: ModelStore, device: torch.device, section: Section) -> Reward:
    """Build a reward from configurations; a server's or the user's own costs nothing here."""
    spec = registry.REWARDS.get(name)
    if spec is None or spec.size is None or registry.settings_of(section, name).remote:
        return lambda images, prompts: torch.zeros(len(prompts))
    if name in ("unified_reward", "hpsv3", "geneval"):
        return build_by_size(spec.size, device)
    # The model of a package is as large as our own
    own = {key: value for key, value in section.get(name, {}).items() if key != "backend"}
    if name == "image_reward":
        return build_image_reward(models, device, registry.settings_of({name: own}, name))
    return registry.build(name, models, device, {name: own})


def build_by_size(size: ModelSize, device: torch.device) -> Reward:
    """Return a reward that only takes its model's memory: its work depends on its inputs."""
    weights = torch.empty(size.bytes, dtype=torch.uint8, device=device)

    def score(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        torch.empty(
            min(size.at_once, len(images)) * size.bytes_per_image,
            dtype=torch.uint8,
            device=weights.device,
        )
        return torch.zeros(len(prompts))

    return score


def build_image_reward(models: ModelStore, device: torch.device, settings: Any) -> Reward:
    """Build ImageReward in its published size, which the product reads off the weights."""
    from transformers import AutoTokenizer, BlipTextConfig, BlipVisionConfig

    text = BlipTextConfig(**inputs.IMAGE_REWARD_TEXT, encoder_hidden_size=1024, is_decoder=True)
    model = image_reward.ImageRewardModel(BlipVisionConfig(**inputs.IMAGE_REWARD_IMAGE), text)
    tokenizer = AutoTokenizer.from_pretrained(models.folder("image_reward_tokenizer"))
    return image_reward.ImageReward(model, tokenizer, device, settings)
