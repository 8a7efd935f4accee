"""Z-Image: classifier-free guidance above 0, one stream of tokens, Qwen3's second-to-last layer.

Its transformer takes lists, of texts without their padding, and a time that rises from noise to
image, along which its velocity points. Z-Image-Turbo, distilled to a few steps, only generates,
with a guidance of 0.
"""

from collections.abc import Iterator, Sequence

import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from transformers import PreTrainedTokenizerBase

from g2rpo_core.architectures.architecture import (
    MASK,
    QWEN3_4B,
    VAE_16,
    Architecture,
    Arguments,
    Config,
    ModelShape,
    Tensors,
    chat,
    read,
    sides,
)
from g2rpo_core.architectures.original import Original, of_blocks

TRANSFORMER: Config = {  # of Tongyi-MAI/Z-Image
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "cap_feat_dim": 2560,
    "axes_dims": (32, 48, 48),
    "axes_lens": (1536, 512, 512),
}
VAE: Config = {**VAE_16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
SHAPE = ModelShape(
    TRANSFORMER,
    VAE,
    {"text_encoder": ("Qwen3Model", QWEN3_4B)},
    {"shift": 6.0, "use_dynamic_shifting": False},
)
# Original names (huggingface.co/Tongyi-MAI/Z-Image, as ComfyUI reads them)
ATTENTION = {
    "attention.qkv": ["attention.to_q", "attention.to_k", "attention.to_v"],
    "attention.out": ["attention.to_out.0"],
    "attention.q_norm": ["attention.norm_q"],
    "attention.k_norm": ["attention.norm_k"],
}


class ZImage(Architecture):
    """The base model of `ZImagePipeline`."""

    label, tag = "Z-Image", "z-image"
    licences = {"Tongyi-MAI/Z-Image": {"license": "apache-2.0"}}
    pipeline, transformer = ZImagePipeline, ZImageTransformer2DModel
    tokenizers = {"tokenizer": "qwen"}
    text_encoders = ("text_encoder",)
    encoding = padded = ("context", MASK)
    depths = ("n_layers", "n_refiner_layers")
    has_negative = True
    noise_dtype = torch.float32
    forms = ("diffusers", "original", "lora", "peft", "kohya")
    other_names_stay, unused = True, ("norm_final.weight",)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    published = {"Tongyi-MAI/Z-Image": SHAPE}
    distilled = {"Tongyi-MAI/Z-Image-Turbo": "Tongyi-MAI/Z-Image"}

    def encode(
        self, pipeline: ZImagePipeline, texts: Sequence[str], max_length: int
    ) -> dict[str, torch.Tensor]:
        """Encode as the pipeline does, but zero-padded to one length, so that shapes are equal."""
        return read(
            pipeline,
            [self.wrapped(pipeline.tokenizer, text) for text in texts],
            max_length,
            layer=-2,
        )

    def wrapped(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        return chat(tokenizer, text, thinking=True)

    def encoding_shapes(
        self, transformer: Config, max_length: int, clip_length: int
    ) -> dict[str, tuple[int, ...]]:
        return {"context": (max_length, transformer["cap_feat_dim"]), "mask": (max_length,)}

    def forward_evals(self, guidance: float) -> int:
        return 2 if guidance > 0 else 1

    def guided(
        self, without: torch.Tensor, with_prompt: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        return with_prompt + guidance * (with_prompt - without)

    def velocity(
        self,
        transformer: ZImageTransformer2DModel,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        encoded: Tensors,
        guidance: float,
        positions: Tensors,
    ) -> torch.Tensor:
        texts = list(encoded["context"])
        if MASK in encoded:  # a length of 0 is that of a rehearsal, which has no data
            texts = [
                text[: length or len(text)] for text, length in zip(texts, self.lengths(encoded))
            ]
        return -torch.stack(
            transformer(list(latents.unsqueeze(2)), 1 - sigma, texts, return_dict=False)[0]
        ).squeeze(2)

    def blocks(self, transformer: ZImageTransformer2DModel) -> list[torch.nn.Module]:
        return [*transformer.noise_refiner, *transformer.context_refiner, *transformer.layers]

    def inputs(
        self, config: Config, batch: int, image_tokens: int, text_tokens: int, device: str
    ) -> Arguments:
        rows, columns = (2 * side for side in sides(image_tokens))
        return {
            "x": list(torch.zeros(batch, config["in_channels"], 1, rows, columns, device=device)),
            "t": torch.zeros(batch, device=device),
            "cap_feats": list(
                torch.zeros(batch, text_tokens, config["cap_feat_dim"], device=device)
            ),
            "return_dict": False,
        }

    def original_modules(self, config: Config) -> Iterator[Original]:
        (size,), (frames,) = config["all_patch_size"], config["all_f_patch_size"]
        yield Original("x_embedder", (f"all_x_embedder.{size}-{frames}",))
        for name in ("linear", "adaLN_modulation.1"):
            yield Original(f"final_layer.{name}", (f"all_final_layer.{size}-{frames}.{name}",))
        for kind, count in (
            ("noise_refiner", "n_refiner_layers"),
            ("context_refiner", "n_refiner_layers"),
            ("layers", "n_layers"),
        ):
            yield from of_blocks(kind, kind, config[count], ATTENTION, norm="weight")


ARCHITECTURE = ZImage()
