"""Score images by HPSv3 (arXiv 2508.03789): Qwen2-VL, and a head on the state of one token.

The model reads an image and an instruction, that of the package hpsv3 1.0.0
(https://github.com/MizzenAI/HPSv3), word for word in templates/hpsv3.v1.txt; all facts are the
package's. The model is transformers' own. `HPSv3.safetensors` names its weights as transformers
4.45 did, so the keys are renamed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import transformers
from pydantic import Field
from torch import nn

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.settings import Count
from g2rpo_core.hub.pretrained import read_weights, renamed, with_vocabulary
from g2rpo_core.rewards.plain_text import plain
from g2rpo_core.rewards.preprocess import Images, check_pairs, eight_bit, transforms
from g2rpo_core.rewards.spec import ModelSize, RewardSettings, RewardSpec
from g2rpo_core.rewards.unified_reward import control_words_of, conversation, question

TEMPLATE = "hpsv3.v1"
TOKEN = "<|Reward|>"  # the head reads its state; text after it changes nothing
RENAMED = [  # in this order: the published names in those of `HPSv3Model`
    (r"^visual\.", "trunk.visual."),
    (r"^model\.", "trunk.language_model."),
    (r"^rm_head\.", "head."),
]
UNUSED = ("lm_head.",)  # the words of an answer, which nobody asks for
EMBEDDING = "trunk.language_model.embed_tokens.weight"


class HPSv3Settings(RewardSettings):
    """How HPSv3 scores."""

    micro_batch: Count = Field(16, description="Images per call of the model.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of weights and computation; `auto`: that of the files."
    )
    pixels: Count = Field(
        256 * 28 * 28,
        description=(
            "Approximate area that images are resized to; scores differ from the published ones at "
            "another area."
        ),
    )


DEFAULT = HPSv3Settings()


class HPSv3Model(nn.Module):
    """tokens [N, L], their mask, patches and grids of N images -> [N, 2] float32.

    The score's mean and log deviation. The head stays float32 whatever the dtype of the trunk.
    """

    def __init__(self, trunk: nn.Module, token: int):
        super().__init__()
        self.trunk, self.token = trunk, token
        width = trunk.config.text_config.hidden_size
        self.head = nn.Sequential(
            nn.Linear(width, 1024),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(1024, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, patches: torch.Tensor, grids: torch.Tensor
    ) -> torch.Tensor:
        # Plain positions 0, 1, 2, ... also for patches: so the published model was trained, without
        # Qwen2-VL's rotary grid
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape)
        states = self.trunk(
            input_ids=tokens,
            attention_mask=mask,
            pixel_values=patches,
            image_grid_thw=grids,
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        # The last such token
        last = (tokens == self.token).long().cumsum(1).argmax(1)
        return self.head(states[torch.arange(len(tokens), device=tokens.device), last].float())


def from_checkpoint(
    weights: dict[str, torch.Tensor],
    config: transformers.PretrainedConfig,
    token: int,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
) -> HPSv3Model:
    """Build the model of `HPSv3.safetensors` on a device.

    config: Qwen2-VL's; token: the id of TOKEN. Raise RuntimeError, naming the weights, if they are
    not exactly those of the model, and ValueError if `token` is not their last.
    """
    named = renamed(weights, RENAMED, UNUSED)
    rows = named[EMBEDDING].shape[0] if EMBEDDING in named else token + 1
    if token != rows - 1:
        raise ValueError(
            f"{TOKEN} has the id {token}, but the weights have {rows} tokens: "
            "the tokenizer is not that of the weights"
        )
    # The trunk, in the dtype of its weights, straight onto the device
    config.text_config.vocab_size = rows
    trunk = {
        name.removeprefix("trunk."): value
        for name, value in named.items()
        if name.startswith("trunk.")
    }
    kept = named[EMBEDDING].dtype if EMBEDDING in named else torch.float32
    model, info = transformers.Qwen2VLModel.from_pretrained(
        None,
        config=config,
        state_dict=trunk,
        output_loading_info=True,
        device_map=device,
        dtype=kept if dtype == "auto" else getattr(torch, dtype),
    )
    if wrong := sorted(
        {*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])}
    ):
        raise RuntimeError(f"not the weights of HPSv3: {', '.join(wrong[:5])}")
    built = HPSv3Model(model, token)
    head = {
        name.removeprefix("head."): value.float()
        for name, value in named.items()
        if not name.startswith("trunk.")
    }
    built.head.load_state_dict(head)
    return built.to(device)


class HPSv3:
    """mean scores [N] float32, unbounded and without a gradient.

    Images are rounded to 8 bits, as in files. An image is resized by PIL to about `pixels`, both
    sides whole patches; a narrow side is stretched by a patch, not cropped.
    """

    def __init__(self, model: HPSv3Model, processor, settings: HPSv3Settings = DEFAULT):
        self.model = model.eval().requires_grad_(False)
        self.processor = processor
        self.pixels = settings.pixels
        self.micro_batch = settings.micro_batch
        self.processor.tokenizer.padding_side = "right"

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        check_pairs(images, prompts)
        scores = []
        for start in range(0, len(prompts), self.micro_batch):
            part = slice(start, start + self.micro_batch)
            inputs = encode(self.processor, images[part], prompts[part], self.pixels).to(
                self.model.trunk.device
            )
            patches = inputs["pixel_values"].to(self.model.trunk.dtype)
            scores.append(
                self.model(
                    inputs["input_ids"], inputs["attention_mask"], patches, inputs["image_grid_thw"]
                )[:, 0]
            )
        return torch.cat(scores)


def encode(processor, images: Images, prompts: Sequence[str], pixels: int):
    """Return the model's inputs, padded on the right.

    They are input_ids, attention_mask, pixel_values and image_grid_thw.
    """
    from PIL.Image import Resampling
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    words = control_words_of(processor)
    side = processor.image_processor.patch_size * processor.image_processor.merge_size
    shown = []
    for image in map(transforms().to_pil_image, eight_bit(images)):
        height, width = smart_resize(image.height, image.width, side, pixels, pixels)
        shown.append(image.resize((width, height), Resampling.BICUBIC))
    texts = [
        processor.apply_chat_template(
            conversation(question(TEMPLATE, plain(prompt, words))),
            add_generation_prompt=True,
            tokenize=False,
        )
        for prompt in prompts
    ]
    return processor(
        text=texts,
        images=shown,
        padding=True,
        return_tensors="pt",
        images_kwargs={"do_resize": False},
    )


def read_processor(folder: Path):
    """Read the processor of `Qwen/Qwen2-VL-7B-Instruct` and add TOKEN; return it and TOKEN's id."""
    processor = with_vocabulary(
        transformers.AutoProcessor.from_pretrained(folder, local_files_only=True), folder
    )
    processor.tokenizer.add_tokens([TOKEN], special_tokens=True)
    return processor, processor.tokenizer.convert_tokens_to_ids(TOKEN)


def hpsv3(
    folder: Path, base: Path, device: torch.device, settings: HPSv3Settings = DEFAULT
) -> HPSv3:
    """Load HPSv3 from the folder with `HPSv3.safetensors`, as in `MizzenAI/HPSv3`.

    base: the folder with config and processor of `Qwen/Qwen2-VL-7B-Instruct`. UserError if the two
    do not fit.
    """
    config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
    if config.model_type != "qwen2_vl":
        raise UserError(
            f"{base}: is a model of type {config.model_type!r}, but HPSv3 is a qwen2_vl: "
            "take Qwen/Qwen2-VL-7B-Instruct"
        )
    processor, token = read_processor(base)
    try:
        model = from_checkpoint(
            read_weights(folder / "HPSv3.safetensors"),
            config,
            token,
            settings.dtype,
            device,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: {error}") from None
    return HPSv3(model, processor, settings)


# Qwen2-VL-7B without its output layer, in bfloat16. An image has 1,024 patches, merged to 256
# tokens, and the text some 600: two operations per token and parameter of its tower (0.68 and 6.53
# billion), and at the peak two states of the language model's MLP.
SPEC = RewardSpec(
    "hpsv3",
    "HPSv3",
    lambda models, device, settings: hpsv3(
        models.folder("hpsv3"), models.folder("hpsv3_processor"), device, settings
    ),
    settings=HPSv3Settings,
    models=("hpsv3", "hpsv3_processor"),
    size=ModelSize(
        7_748_610_610,
        856 * 75_776,
        2 * (0.68e9 * 1_024 + 6.53e9 * 856),
        width=2,
        at_once=DEFAULT.micro_batch,
    ),
)
