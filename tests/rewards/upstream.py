"""The published packages hpsv2 1.2.0 and image-reward 1.5, made to import beside today's torch, timm and transformers.

Nothing here touches what computes a score: missing are packages that only their training or other scorers import, names that
transformers 5 has moved, and the files that hpsv2's wheel lacks. Their hubs are never asked: models are built by their own
classes and given our weights.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import open_clip
import torch
from transformers import modeling_utils, pytorch_utils

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"


def hpsv2_model(architecture: dict, weights: Path):
    """(model, preprocess, tokenize) of hpsv2 with an architecture of its own and the weights of `HPS_v2.1_compressed.pt`."""
    _stand_in("clint", "clint.textui", progress=None)
    _place_vocabulary()
    from hpsv2.src.open_clip import create_model_and_transforms, factory, get_tokenizer

    published, factory._MODEL_CONFIGS["ViT-H-14"] = factory._MODEL_CONFIGS["ViT-H-14"], architecture
    try:  # the arguments of hpsv2.img_score, in full precision
        model, _, preprocess = create_model_and_transforms(
            "ViT-H-14", None, precision="fp32", device="cpu", jit=False, force_quick_gelu=False, force_custom_text=False,
            force_patch_dropout=False, force_image_size=None, pretrained_image=False, image_mean=None, image_std=None,
            light_augmentation=True, aug_cfg={}, output_dict=True, with_score_predictor=False, with_region_predictor=False,
        )  # fmt: skip
        tokenize = get_tokenizer("ViT-H-14")
    finally:
        factory._MODEL_CONFIGS["ViT-H-14"] = published
    model.load_state_dict(torch.load(weights, weights_only=True)["state_dict"])
    return model.eval(), preprocess, lambda texts: tokenize(texts)[:, : architecture["text_cfg"]["context_length"]]


def image_reward_model(med_config: Path, tokenizer, vision: dict, hidden: int):
    """ImageReward's own model, its picture tower of the sizes `vision` (VisionTransformer's) and its text of `hidden`."""
    _stand_in("clip")
    _stand_in("datasets", load_dataset=None)
    _stand_in("fairscale", "fairscale.nn", "fairscale.nn.checkpoint")
    _stand_in("fairscale.nn.checkpoint.checkpoint_activations", checkpoint_wrapper=None)
    for name in ("apply_chunking_to_forward", "prune_linear_layer"):
        setattr(modeling_utils, name, getattr(pytorch_utils, name))
    modeling_utils.find_pruneable_heads_and_indices = None
    import ImageReward  # noqa: F401, its modules are reached by name, as its classes hide them
    from ImageReward.models.BLIP import blip_pretrain, med
    from ImageReward.models.BLIP.vit import VisionTransformer

    base = med.BertPreTrainedModel
    base.all_tied_weights_keys = {}
    base.get_head_mask = lambda self, mask, layers, *rest: [None] * layers
    base.invert_attention_mask = lambda self, mask: (1 - mask[:, None, None].float()) * torch.finfo(torch.float32).min
    blip_pretrain.init_tokenizer = lambda: tokenizer
    blip_pretrain.create_vit = lambda *published_sizes: (VisionTransformer(**vision), vision["embed_dim"])
    module = sys.modules["ImageReward.ImageReward"]
    head = module.MLP
    module.MLP = lambda published_width: head(hidden)
    try:
        model = module.ImageReward(str(med_config))
    finally:
        module.MLP = head
    model.preprocess = module._transform(vision["img_size"])
    return model.eval()


def _stand_in(*names: str, **attributes) -> None:
    """Empty modules for packages that are not installed, and never used where scores are made."""
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []
    for key, value in attributes.items():
        if not hasattr(sys.modules[names[-1]], key):
            setattr(sys.modules[names[-1]], key, value)


def _place_vocabulary() -> None:
    folder = Path(importlib.util.find_spec("hpsv2").origin).parent / "src" / "open_clip"
    if not (folder / VOCABULARY).exists():
        shutil.copy(Path(open_clip.__file__).parent / VOCABULARY, folder)
