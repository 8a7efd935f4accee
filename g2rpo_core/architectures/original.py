"""Rename weights between diffusers and a base model's first publisher, and LoRAs as in kohya's.

kohya's sd-scripts derive their names from the original ones. An original module may stack several
of diffusers' modules along its outputs, as `qkv` does.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]  # of a model, as in its config.json
SHIFT_FIRST = "final_layer.adaLN_modulation.1"  # of Black Forest Labs' models
ATTENTION = {  # of their blocks with two streams
    "img_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "txt_attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "img_attn.norm.query_norm": ["attn.norm_q"],
    "img_attn.norm.key_norm": ["attn.norm_k"],
    "txt_attn.norm.query_norm": ["attn.norm_added_q"],
    "txt_attn.norm.key_norm": ["attn.norm_added_k"],
    "img_attn.proj": ["attn.to_out.0"],
    "txt_attn.proj": ["attn.to_add_out"],
}


@dataclass(frozen=True)
class Original:
    """An original module, and the modules of diffusers that it stacks, in that order."""

    name: str
    parts: tuple[str, ...]
    shift_first: bool = False
    """Whether its outputs are a norm's (shift, scale); diffusers has (scale, shift)."""
    weight: str = "weight"
    """The original name of its `weight`."""


def of_blocks(
    kind: str, ours: str, count: int, table: Mapping[str, Iterable[str]], norm: str
) -> Iterator[Original]:
    """Yield the original modules {kind}.N.{name} of `count` blocks, made of {ours}.N.{part}.

    norm: the name of a norm's weight.
    """
    for index in range(count):
        for name, parts in table.items():
            weight = norm if name.endswith("_norm") else "weight"
            yield Original(
                f"{kind}.{index}.{name}",
                tuple(f"{ours}.{index}.{part}" for part in parts),
                weight=weight,
            )


def of_two_kinds(
    outside: Mapping[str, str],
    double: Mapping[str, Iterable[str]],
    single: Mapping[str, Iterable[str]],
    config: Config,
) -> Iterator[Original]:
    """Yield the original modules of Black Forest Labs' models.

    First those outside the blocks, then blocks with two streams, then blocks with one.
    """
    for name, part in outside.items():
        yield Original(name, (part,), shift_first=name == SHIFT_FIRST)
    yield from of_blocks(
        "double_blocks", "transformer_blocks", config["num_layers"], double, norm="scale"
    )
    yield from of_blocks(
        "single_blocks",
        "single_transformer_blocks",
        config["num_single_layers"],
        single,
        norm="scale",
    )


def swapped(value: torch.Tensor) -> torch.Tensor:
    """Exchange the halves of a tensor's first dimension."""
    return torch.cat(value.chunk(2)[::-1])


def original(
    weights: Tensors, modules: Iterable[Original]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Rename diffusers' weights to the original names; also return names that no module holds."""
    renamed: dict[str, torch.Tensor] = {}
    left = set(weights)
    for module in modules:
        for ours, theirs in (("weight", module.weight), ("bias", "bias")):
            keys = [f"{part}.{ours}" for part in module.parts]
            if keys[0] not in weights:  # a norm has no bias, and FLUX.1-schnell no guidance
                continue
            value = torch.cat([weights[key] for key in keys])
            renamed[f"{module.name}.{theirs}"] = swapped(value) if module.shift_first else value
            left -= set(keys)
    return renamed, left


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor in a file that hold a diffusers weight; count None: all from `start`."""

    name: str
    start: int = 0
    count: int | None = None
    shift_first: bool = False

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Take them; value: a tensor, or another thing with rows."""
        value = value[:] if self.count is None else value[self.start : self.start + self.count]
        return swapped(value) if self.shift_first else value


def places(shapes: Mapping[str, torch.Size], modules: Iterable[Original]) -> dict[str, Rows]:
    """Locate each weight of diffusers under the original names.

    A weight that no module holds keeps its own name. shapes: of diffusers' weights.
    """
    found = {name: Rows(name) for name in shapes}
    for module in modules:
        for ours, theirs in (("weight", module.weight), ("bias", "bias")):
            top = 0
            for part in module.parts:
                if (key := f"{part}.{ours}") not in shapes:
                    continue
                count = shapes[key][0] if len(module.parts) > 1 else None
                found[key] = Rows(f"{module.name}.{theirs}", top, count, module.shift_first)
                top += shapes[key][0]
    return found
