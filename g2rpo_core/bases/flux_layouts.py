"""The weights of a FLUX transformer or of its LoRA, with the names and shapes that other programs read.

The original names are those of Black Forest Labs' checkpoints (github.com/black-forest-labs/flux, `src/flux/model.py`). If an
original module stacks several of diffusers' modules, the tables below list them in that order.
"""

from collections.abc import Iterator, Mapping

import torch

Weights = dict[str, torch.Tensor]
_TIME = "time_text_embed"
AROUND = {
    "img_in": ["x_embedder"],
    "txt_in": ["context_embedder"],
    "time_in.in_layer": [f"{_TIME}.timestep_embedder.linear_1"],
    "time_in.out_layer": [f"{_TIME}.timestep_embedder.linear_2"],
    "vector_in.in_layer": [f"{_TIME}.text_embedder.linear_1"],
    "vector_in.out_layer": [f"{_TIME}.text_embedder.linear_2"],
    "guidance_in.in_layer": [f"{_TIME}.guidance_embedder.linear_1"],
    "guidance_in.out_layer": [f"{_TIME}.guidance_embedder.linear_2"],
    "final_layer.linear": ["proj_out"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear"],
}
DOUBLE = {
    "img_mod.lin": ["norm1.linear"],
    "txt_mod.lin": ["norm1_context.linear"],
    "img_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "txt_attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "img_attn.norm.query_norm": ["attn.norm_q"],
    "img_attn.norm.key_norm": ["attn.norm_k"],
    "txt_attn.norm.query_norm": ["attn.norm_added_q"],
    "txt_attn.norm.key_norm": ["attn.norm_added_k"],
    "img_attn.proj": ["attn.to_out.0"],
    "txt_attn.proj": ["attn.to_add_out"],
    "img_mlp.0": ["ff.net.0.proj"],
    "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"],
    "txt_mlp.2": ["ff_context.net.2"],
}
SINGLE = {
    "modulation.lin": ["norm.linear"],
    "linear1": ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"],
    "linear2": ["proj_out"],
    "norm.query_norm": ["attn.norm_q"],
    "norm.key_norm": ["attn.norm_k"],
}
SHIFT_FIRST = "final_layer.adaLN_modulation.1"  # diffusers has the scale first


def modules(double: int, single: int) -> Iterator[tuple[str, list[str]]]:
    """The original name of every module of a model with this many blocks, and the diffusers modules that make it up."""
    yield from AROUND.items()
    for kind, ours, table, count in (
        ("double_blocks", "transformer_blocks", DOUBLE, double),
        ("single_blocks", "single_transformer_blocks", SINGLE, single),
    ):
        for index in range(count):
            for name, parts in table.items():
                yield f"{kind}.{index}.{name}", [f"{ours}.{index}.{part}" for part in parts]


def original(weights: Mapping[str, torch.Tensor], double: int, single: int) -> Weights:
    """diffusers' weights under the original names; ValueError if one has no original name."""
    found: Weights = {}
    used = set()
    for name, parts in modules(double, single):
        for ours, theirs in (("weight", "scale" if name.endswith("_norm") else "weight"), ("bias", "bias")):
            keys = [f"{part}.{ours}" for part in parts]
            if keys[0] not in weights:  # a norm has no bias, and FLUX.1-schnell no guidance
                continue
            value = torch.cat([weights[key] for key in keys])
            if name == SHIFT_FIRST:
                value = torch.cat(value.chunk(2)[::-1])
            found[f"{name}.{theirs}"] = value
            used |= set(keys)
    if left := set(weights) - used:
        raise ValueError(f"{min(left)} has no name in the original layout")
    return found


def kohya(lora: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], alpha: float, double: int, single: int) -> Weights:
    """diffusers' LoRA as kohya's sd-scripts name it: `lora_unet_<original module>.lora_down.weight`, `.lora_up.weight`, `.alpha`.

    shapes: of diffusers' weights. An original module that stacks several of diffusers' gets their ranks one after the other and a
    block diagonal up matrix. Its alpha is multiplied by their number, so that alpha / rank stays the same. Rows of a part without
    an adapter are zero.
    """
    found: Weights = {}
    of = lambda part, side: lora[f"transformer.{part}.lora_{side}.weight"]
    for name, parts in modules(double, single):
        present = [part for part in parts if f"transformer.{part}.lora_A.weight" in lora]
        if not present:
            continue
        downs = [of(part, "A") for part in present]
        rank = len(downs[0])
        up = torch.zeros(sum(shapes[f"{part}.weight"][0] for part in parts), rank * len(present), dtype=downs[0].dtype)
        top = 0
        for part in parts:
            height = shapes[f"{part}.weight"][0]
            if part in present:
                left = rank * present.index(part)
                up[top : top + height, left : left + rank] = of(part, "B")
            top += height
        key = "lora_unet_" + name.replace(".", "_")
        found |= {
            f"{key}.lora_down.weight": torch.cat(downs),
            f"{key}.lora_up.weight": up,
            f"{key}.alpha": torch.tensor(alpha * len(present)),
        }
    return found
