"""LoRAs in any form that others write: reads one, adds it to a transformer, and writes it.

A file's names are undone from the outside in: the wrapper that a trainer left (`_orig_mod.`), the
prefix of a form (`transformer.`, `base_model.model.`, `diffusion_model.`, `lora_unet_`), and the
module, under diffusers' name or its first publisher's (`architectures/original.py`). What is then
left over, or lacks its other half, is an error that names it: nothing is left out.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from g2rpo_core.architectures.architecture import Architecture, Config
from g2rpo_core.architectures.original import Original, Rows, swapped
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import LONGEST, complaint, in_one_line, read_json, reading, whole
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.pretrained import read_header

LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's
METADATA = "lora_adapter_metadata"  # diffusers' key in a file's header, with PEFT's configuration
Shapes = Mapping[str, torch.Size]  # of diffusers' weights, by name

WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\."
)
PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "model.",
)
UNDERSCORED = ("lora_unet_", "lora_transformer_", "lycoris_")
TEXT_ENCODERS = ("text_encoder", "lora_te", "te1.", "te2.", "te3.")
ENDS = re.compile(
    r"(?P<module>.+?)\.(?:(?P<down>lora_A|lora_down|lora\.down)|(?P<up>lora_B|lora_up|lora\.up)"
    r"|(?P<magnitude>lora_magnitude_vector|dora_scale)"
    r"|(?P<alpha>alpha))(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<end>weight|bias))?"
)
FORMS = {  # what a name has in it -> its form, the most telling first
    "lokr_": "a LoKr of LyCORIS",
    "hada_": "a LoHa of LyCORIS",
    "oft_": "an OFT",
    ".processor.": "a LoRA of XLabs",
    "base_model.model.": "a LoRA of PEFT",
    "lora_transformer_": "a LoRA of OneTrainer",
    "lycoris_": "a LoRA of LyCORIS",
    "lora_unet_": "a LoRA of kohya's sd-scripts",
    "lora_te": "a LoRA of kohya's sd-scripts",
    "diffusion_model.": "a LoRA in ComfyUI's names",
    "double_blocks.": "a LoRA in Black Forest Labs' names",
    "joint_blocks.": "a LoRA in Stability AI's names",
    "transformer.": "a LoRA of diffusers",
    "unet.": "a LoRA of a U-Net",
}


@dataclass(frozen=True)
class Matrices:
    """The LoRA of one module, in float32: its weight gains alpha / rank · up · down."""

    down: torch.Tensor
    """[rank, inputs], or [rank, inputs, height, width] of a convolution."""
    up: torch.Tensor
    """[outputs, rank]"""
    alpha: float
    magnitude: torch.Tensor | None = None
    """[outputs], the norms of DoRA."""
    bias: torch.Tensor | None = None
    """[outputs], added to the outputs of `up`."""

    @property
    def rank(self) -> int:
        return len(self.down)

    def merged(self) -> "Matrices":
        """Multiply alpha / rank into `up`, for readers that know no alpha."""
        scale = self.alpha / self.rank
        return replace(
            self,
            up=self.up * scale,
            bias=None if self.bias is None else self.bias * scale,
            alpha=float(self.rank),
        )


Adapter = Mapping[str, Matrices]  # diffusers' name of a module -> its matrices


def is_adapter(names: Iterable[str]) -> bool:
    """Tell whether a file with tensors of these names holds an adapter, of any form."""
    return any(
        re.search(r"[._](lora|lokr|hada|oft)[._]|lora_magnitude|_lora\.", name) for name in names
    )


def read_adapter(
    architecture: Architecture, config: Config, shapes: Shapes, file: Path
) -> dict[str, Matrices]:
    """Read the LoRA in a file in float32, with its configuration if there is one.

    That is PEFT's adapter_config.json beside the file, or diffusers' in its header. config, shapes:
    of the transformer that it is for. UserError if a tensor has no place in it, lacks its other
    half or has another shape, or if a configuration says what is not computed here.
    """
    known, header = read_header(file, floating="")
    form = next(
        (form for part, form in FORMS.items() if part in "\n".join(known)),
        "a LoRA without a prefix to its names",
    )
    said = _configuration(file, header, form)
    with reading(file), safe_open(file, "pt") as opened:
        tensors = {
            # Scaled and merged in float32, whatever the file's dtype, and rounded once
            name: opened.get_tensor(name).float()
            for name in known
            if ".lora_velora_embed" not in name  # VeLoRA's, for the backward pass alone
        }
        kinds, left = sorted_out(architecture, config, shapes, tensors)
        if left:
            raise UserError(
                complaint(file, _left_over(architecture, form, left, len(tensors)), hint="")
            )
        # `reading`: whatever a configuration has for numbers and expressions
        adapter = {module: _matrices(file, module, parts, said) for module, parts in kinds.items()}
        check(architecture, shapes, adapter, file)
        _note_missing(said or {}, shapes, adapter, tensors, file)
    return adapter


def _note_missing(
    said: Mapping[str, object], shapes: Shapes, adapter: Adapter, tensors: Iterable[str], file: Path
) -> None:
    """Print the modules of the base model that PEFT's configuration targets and a file lacks.

    Nothing under others' names. An expression may be meant for a larger model: it counts only if it
    fits no module of the file.
    """
    modules = {stripped(WRAPPERS.sub("", name)).partition(".lora_")[0] for name in tensors}
    aimed = lambda names: [
        name for name in names if check_target_module_exists(SimpleNamespace(**said), name)
    ]
    matrices = {name.removesuffix(".weight") for name in shapes if len(shapes[name]) > 1}
    missing = sorted(aimed(matrices - modules)) if said.get("target_modules") else []
    fits = isinstance(said.get("target_modules"), str) and aimed(modules)
    if missing and not fits and modules >= adapter.keys():
        echo(
            f"warning: {file}: lacks {len(missing)} modules that its target_modules name: "
            f"{in_one_line(missing)}",
            file=sys.stderr,
        )


def sorted_out(
    architecture: Architecture, config: Config, shapes: Shapes, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """Sort a file's tensors by diffusers' module and by kind; return the misfits' names, too.

    A module that stacks several of diffusers' has one `down` for all of them, and in `up` the rows
    of each.
    """
    spelled = spellings(architecture, config, shapes)
    found: dict[str, dict[str, torch.Tensor]] = {}
    left, origin = [], dict[tuple[str, str], str]()
    for name, value in tensors.items():
        match = ENDS.fullmatch(WRAPPERS.sub("", name))
        kind = match and next(kind for kind in ("down", "up", "magnitude", "alpha") if match[kind])
        if match and match["end"] == "bias":
            kind = "bias" if kind == "up" else None
        places = spelled.get(stripped(match["module"])) if match and kind else None
        if places is None or kind is None:
            left.append(name)
            continue
        # As in a file with two adapters
        if twice := [origin[module, kind] for module in places if (module, kind) in origin]:
            left.append(f"{name} beside {twice[0]}")
            continue
        if match and match["magnitude"] == "dora_scale":  # [outputs, 1], or [outputs, 1, 1, 1]
            value = value.squeeze(1) if value.dim() == 2 else value.transpose(0, 1)
        for module, rows in places.items():
            origin[module, kind] = name
            # A copy: safetensors write no two parts of one tensor
            found.setdefault(module, {})[kind] = (
                value if kind in ("down", "alpha") else rows.of(value)
            ).clone()
    return found, sorted(left)


def stripped(module: str) -> str:
    """Return a module's name without the prefix of its form."""
    while start := next(
        (prefix for prefix in (*PREFIXES, *UNDERSCORED) if module.startswith(prefix)), None
    ):
        module = module.removeprefix(start)
    return module


def spellings(
    architecture: Architecture, config: Config, shapes: Shapes
) -> dict[str, dict[str, Rows]]:
    """Map every name of a module in LoRA files to diffusers' modules, with their rows of `up`."""
    outputs = {
        name.removesuffix(".weight"): shape[0]
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) > 1
    }
    found = {module: {module: Rows(module)} for module in outputs}
    for stacked in architecture.original_modules(config):
        if not all(part in outputs for part in stacked.parts):
            continue
        top = 0
        found[stacked.name] = {}
        for part in stacked.parts:
            count = outputs[part] if len(stacked.parts) > 1 else None
            found[stacked.name][part] = Rows(stacked.name, top, count, stacked.shift_first)
            top += outputs[part]
    return {name.replace(".", "_"): places for name, places in found.items()} | found


def fused(names: Iterable[str]) -> str | None:
    """Say what to do if a name is of attention that diffusers fused."""
    return next(
        (
            f"is of fused attention ({name}): save it after diffusers' `unfuse_qkv_projections()`"
            for name in names
            if re.search(r"\.to_(added_)?(qkv|kv)\.", name)
        ),
        None,
    )


def _left_over(architecture: Architecture, form: str, left: Sequence[str], total: int) -> str:
    """Say what a file holds beside a LoRA of this base model, and what to do."""
    if (texts := [name for name in left if name.startswith(TEXT_ENCODERS)]) == list(left):
        return (
            f"is {form}, and {len(texts)} of its {total} tensors are for a text encoder "
            f"({texts[0]}): prompts are encoded by the base "
            "model's own, so it cannot be applied as it was trained; "
            "take one of the transformer alone"
        )
    return fused(left) or (
        f"is {form}, and {len(left)} of its {total} tensors have no place in this "
        f"{architecture.label}'s transformer ({in_one_line(left)}): it was made for another model, "
        "or in a form that is not read here (docs/howto/export.md lists those that are)"
    )


# What PEFT's configuration may say: what is used; what only says how an adapter was made, or
# trained; and what changes the base's own weights
USED = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "lora_bias",
    "peft_type",
    "init_lora_weights",
)
OF_TRAINING = (
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "peft_version",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "fan_in_fan_out",
    "runtime_config",
    "eva_config",
    "megatron_core",
    "qalora_group_size",
    "velora_config",
    "ensure_weight_tying",
)
# Initial values of a LoRA that leave the base's weights as they are
KEEPS_THE_BASE = ("true", "false", "gaussian", "orthogonal", "eva", "mica")


def _configuration(file: Path, header: Mapping[str, str], form: str) -> dict[str, Any] | None:
    """Return PEFT's configuration of a file; None if it has none and its form needs none.

    UserError if it asks for what is not computed here.
    """
    beside = file.with_name(PEFT_CONFIG)
    if beside.exists():
        place, said = beside, read_json(whole(beside), dict)
    elif METADATA in header:
        with reading(file):
            place, said = file, json.loads(header[METADATA])
            said = {
                key.removeprefix("transformer."): value
                for key, value in said.items()
                if not key.startswith(TEXT_ENCODERS)
            }
    elif form == FORMS["base_model.model."]:
        raise UserError(
            complaint(
                beside,
                f"does not exist: {file.name} is a LoRA of PEFT, whose alpha stands there",
                hint="",
            )
        )
    else:
        return None
    usual = LoraConfig().to_dict()
    if said.get("peft_type", "LORA") != "LORA":
        raise UserError(
            complaint(
                place,
                f"is an adapter of kind {said['peft_type']}, and only LORA is computed here",
                hint="",
            )
        )
    unlike = {
        key: value
        for key, value in said.items()
        if key not in (*USED, *OF_TRAINING) and value and value != usual.get(key)
    }
    if str(said.get("init_lora_weights", True)).lower() not in KEEPS_THE_BASE:
        unlike["init_lora_weights"] = said["init_lora_weights"]
    if unlike:
        what = in_one_line([f"{key}: {value}"[:LONGEST] for key, value in sorted(unlike.items())])
        raise UserError(
            complaint(
                place,
                f"asks for what is not computed here ({what}): merge the LoRA into its base model",
                hint="",
            )
        )
    return said


def _matrices(
    file: Path, module: str, parts: Mapping[str, torch.Tensor], said: Mapping[str, Any] | None
) -> Matrices:
    """Put a module's matrices together; UserError if one is missing, or rank or alpha conflict."""
    if lacking := [kind for kind in ("down", "up") if kind not in parts]:
        name = {"down": "first (lora_A, lora_down)", "up": "second (lora_B, lora_up)"}[lacking[0]]
        raise UserError(complaint(file, f"lacks the {name} matrix of {module}", hint=""))
    rank = len(parts["down"])
    if not rank:
        raise UserError(complaint(file, f"{module} has rank 0: it is no LoRA", hint=""))
    own = parts.get("alpha", torch.tensor(float(rank)))
    if own.numel() != 1 or not own.isfinite():
        raise UserError(
            complaint(file, f"{module} has alpha {own.tolist()}, which is no number", hint="")
        )
    if said is None:
        alpha = own.item()
    else:
        of_module = lambda pattern, usual: pattern.get(
            get_pattern_key(list(pattern), module), usual
        )
        alpha = float(
            of_module(
                said.get("alpha_pattern") or {}, said.get("lora_alpha", LoraConfig().lora_alpha)
            )
        )
        wanted = of_module(said.get("rank_pattern") or {}, said.get("r", LoraConfig().r))
        if wanted != rank:
            raise UserError(
                complaint(
                    file, f"{module} has rank {rank}, and its configuration says {wanted}", hint=""
                )
            )
        # The file's may be rounded
        if "alpha" in parts and not isclose(own, alpha, rel_tol=0.01):
            raise UserError(
                complaint(
                    file,
                    f"{module} has alpha {own:g}, and its configuration says {alpha:g}",
                    hint="",
                )
            )
        if bool(said.get("use_dora")) != ("magnitude" in parts):
            which = "lacks" if said.get("use_dora") else "has, against its configuration,"
            raise UserError(complaint(file, f"{module} {which} the magnitudes of DoRA", hint=""))
        if said.get("use_rslora"):  # alpha / √rank
            alpha *= sqrt(rank)
    return Matrices(parts["down"], parts["up"], alpha, parts.get("magnitude"), parts.get("bias"))


def check(architecture: Architecture, shapes: Shapes, adapter: Adapter, file: Path) -> None:
    """Check every shape against the model's; UserError if one differs or the adapter is empty.

    Print a warning if all second matrices are zero.
    """
    if not adapter:
        raise UserError(
            complaint(file, f"holds no LoRA of {architecture.label}'s transformer", hint="")
        )
    for module, one in adapter.items():
        outputs, inputs, *window = shapes[f"{module}.weight"]
        ones = [1] * len(window)
        wanted = {
            "down": [one.rank, inputs, *window],
            "up": [outputs, one.rank, *ones],
            "bias": [outputs],
            "magnitude": [1, outputs, *ones] if window else [outputs],
        }
        for kind, shape in wanted.items():
            if (value := getattr(one, kind)) is not None and list(value.shape) != shape:
                raise UserError(
                    complaint(
                        file,
                        f"the {kind} matrix of {module} is {list(value.shape)}, "
                        f"this model's {shape}",
                        hint="",
                    )
                )
    for kind in ("magnitude", "bias"):
        if len({getattr(one, kind) is None for one in adapter.values()}) > 1:
            raise UserError(
                complaint(
                    file, f"has a {kind} for some modules only, which PEFT cannot compute", hint=""
                )
            )
    if any(one.magnitude is not None and one.bias is not None for one in adapter.values()):
        raise UserError(
            complaint(
                file,
                "has DoRA's magnitudes and biases, which PEFT cannot compute together",
                hint="",
            )
        )
    if not any(one.up.any() for one in adapter.values()):
        echo(
            f"warning: {file}: all its second matrices are zero: it changes nothing",
            file=sys.stderr,
        )


def peft_config(adapter: Adapter) -> LoraConfig:
    """Return PEFT's configuration of exactly these modules, each with its rank and alpha."""
    first = next(iter(adapter.values()))
    exact = lambda module: f"^{re.escape(module)}"  # PEFT also takes the end of a name
    return LoraConfig(
        r=first.rank,
        lora_alpha=first.alpha,  # type: ignore[arg-type] # a float is divided as well
        rank_pattern={
            exact(module): one.rank for module, one in adapter.items() if one.rank != first.rank
        },
        alpha_pattern={
            exact(module): one.alpha for module, one in adapter.items() if one.alpha != first.alpha
        },
        target_modules="|".join(map(re.escape, adapter)),
        use_dora=first.magnitude is not None,
        lora_bias=first.bias is not None,
        init_lora_weights=False,
    )


@torch.no_grad()
def add(transformer: ModelMixin, adapter: Adapter) -> None:
    """Add an adapter to a transformer, in float32; ValueError if PEFT makes other matrices."""
    transformer.add_adapter(peft_config(adapter))
    values = _named(adapter, "")
    made = {
        name.replace(".default", "").replace("vector.weight", "vector"): parameter
        for name, parameter in transformer.named_parameters()
        if ".lora_" in name
    }
    if unlike := made.keys() ^ values.keys():
        raise ValueError(
            f"PEFT made other matrices than the adapter has: {in_one_line(sorted(unlike))}"
        )
    for name, parameter in made.items():
        parameter.data = values[name].to(parameter.device, torch.float32)


@torch.no_grad()
def set_values(transformer: ModelMixin, adapter: Adapter, made: LoraConfig) -> None:
    """Give a new adapter the values of another, whatever its alpha.

    transformer: with the adapter that `made` describes, whole or sharded. UserError unless both are
    of the same modules and ranks.
    """
    if any(one.magnitude is not None or one.bias is not None for one in adapter.values()):
        raise UserError(
            "training.start: a LoRA with DoRA or biases is not trained on: "
            "merge it into its base model"
        )
    parameters = {
        name: parameter for name, parameter in transformer.named_parameters() if ".lora_" in name
    }
    modules = {name.partition(".lora_")[0] for name in parameters}
    if unlike := sorted(modules ^ adapter.keys()):
        which = "lacks" if unlike[0] in modules else "has"
        raise UserError(
            f"training.start: its LoRA {which} {unlike[0]} ({len(unlike)} such differences): "
            "set training.lora.target_modules to its own"
        )
    if wrong := {one.rank for one in adapter.values()} - {made.r}:
        raise UserError(
            f"training.start: its LoRA has rank {min(wrong)}: set training.lora.rank to that"
        )
    for module, one in adapter.items():
        scale = one.alpha / one.rank * made.r / made.lora_alpha
        fill(parameters[f"{module}.lora_A.default.weight"], one.down)
        fill(parameters[f"{module}.lora_B.default.weight"], one.up * scale)


@torch.no_grad()
def merge(transformer: ModelMixin, adapter: Adapter) -> None:
    """Add a LoRA to the weights of a transformer, whole or sharded; UserError for DoRA, biases."""
    if any(one.magnitude is not None or one.bias is not None for one in adapter.values()):
        raise UserError(
            "training.start: a LoRA with DoRA or biases is not merged here: "
            "merge it into its base model by PEFT"
        )
    parameters = dict(transformer.named_parameters())
    for module, one in adapter.items():
        weight = parameters[f"{module}.weight"]
        gain = one.alpha / one.rank * one.up.flatten(1) @ one.down.flatten(1)
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        fill(weight, whole + gain.view(weight.shape).to(whole))


def fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy values into a parameter; of a sharded one, each process copies its part.

    Nothing is sent: every process has all values.
    """
    whole = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(whole)


def in_diffusers_names(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Return a LoRA's tensors as diffusers and ComfyUI read them.

    alpha is multiplied in: not every reader looks for one.
    """
    return _named({module: one.merged() for module, one in adapter.items()}, "transformer.")


def in_peft_names(
    adapter: Adapter, shapes: Shapes
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a LoRA's tensors and configuration as `PeftModel.save_pretrained` writes them."""
    about = peft_config(adapter).to_dict() | {"inference_mode": True}
    others = {name.removesuffix(".weight") for name in shapes} - adapter.keys()
    # A list is what readers know, but PEFT takes its names as ends of others, too; then it stays
    # one expression
    if not any(other.endswith(f".{module}") for module in adapter for other in others):
        about["target_modules"] = sorted(adapter)
    return _named(adapter, "base_model.model."), about


def _named(adapter: Adapter, prefix: str) -> dict[str, torch.Tensor]:
    ends = {
        "down": "lora_A.weight",
        "up": "lora_B.weight",
        "magnitude": "lora_magnitude_vector",
        "bias": "lora_B.bias",
    }
    return {
        f"{prefix}{module}.{end}": value
        for module, one in adapter.items()
        for kind, end in ends.items()
        if (value := getattr(one, kind)) is not None
    }


def in_kohyas_names(
    architecture: Architecture, config: Config, shapes: Shapes, adapter: Adapter
) -> dict[str, torch.Tensor]:
    """Return a LoRA's tensors as kohya's sd-scripts write them.

    Named `lora_unet_<module>.lora_down.weight`, `.lora_up.weight` and `.alpha`, by the original
    module. One that stacks several of diffusers' gets their ranks one after the other and a block
    diagonal up matrix, whose rows of a part without an adapter are zero. alpha is the rank: the
    strength is in the matrices. UserError for DoRA and biases, which have no name there.
    """
    if any(one.magnitude is not None or one.bias is not None for one in adapter.values()):
        raise UserError(
            "export: kohya's names have none for DoRA or a bias: take --form lora or peft"
        )
    renamed: dict[str, torch.Tensor] = {}
    stacked = {
        part: module for module in architecture.original_modules(config) for part in module.parts
    }
    for module in dict.fromkeys(stacked.get(name, Original(name, (name,))) for name in adapter):
        present = {part: adapter[part].merged() for part in module.parts if part in adapter}
        rank = sum(one.rank for one in present.values())
        # Each part's up matrix has its own rows and its own ranks; a convolution is one part
        up = next(iter(present.values())).up
        if len(module.parts) > 1:
            rows = {part: torch.zeros(shapes[f"{part}.weight"][0], 0) for part in module.parts}
            up = torch.block_diag(
                *(rows | {part: one.up for part, one in present.items()}).values()
            )
        key = "lora_unet_" + module.name.replace(".", "_")
        renamed |= {
            f"{key}.lora_down.weight": torch.cat([one.down for one in present.values()]),
            f"{key}.lora_up.weight": swapped(up) if module.shift_first else up,
            f"{key}.alpha": torch.tensor(float(rank)),
        }
    return renamed
