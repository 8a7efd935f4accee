"""Each reward as it is published: the packages hpsv2 1.2.0 and image-reward 1.5, open_clip and transformers used directly.

`load` gives them our weights. The two packages are made to import beside today's torch, timm and transformers, and nothing here
touches what computes a score: missing are packages that only their training or other scorers import, names that transformers 5
has moved, and the files that hpsv2's wheel lacks. Their hubs are never asked: models are built by their own classes.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import open_clip
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.v2 import functional as TF
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    modeling_utils,
    pytorch_utils,
)

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards.image_reward import from_checkpoint
from g2rpo_core.rewards.unified_reward import UnifiedReward, UnifiedRewardSettings, conversation

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
Score = Callable[[str, Sequence[Image.Image]], Sequence[float]]  # of images that were made for one prompt


def load(name: str, store: ModelStore, device: torch.device, settings: UnifiedRewardSettings | None = None) -> Score:
    """The published way to score images with a reward of ours, on the same weights; settings: of UnifiedReward."""
    if name == "hps":
        return hps(store.folder("hps"), store.entry("hps")["architecture"], device)
    if name == "clip_score":
        return clip_score(store.folder("clip_score"), device)
    if name == "pickscore":
        return pickscore(store.folder("pickscore"), store.folder("pickscore_processor"), device)
    if name == "image_reward":
        return image_reward(store.folder("image_reward"), store.folder("image_reward_tokenizer"), device)
    return unified_reward(store.folder("unified_reward"), device, settings or UnifiedRewardSettings())


def hps(folder: Path, architecture: str, device: torch.device) -> Score:
    """The loop of hpsv2.img_score.score, in full precision and without its reading the weights anew at every call."""
    model, preprocess, tokenize = hpsv2_model(folder, architecture)
    model.to(device)

    @torch.no_grad()
    def score(prompt, images):
        scores = []
        for image in images:
            outputs = model(preprocess(image)[None].to(device), tokenize([prompt]).to(device))
            scores.append(torch.diagonal(outputs["image_features"] @ outputs["text_features"].T).item())
        return scores

    return score


def clip_score(folder: Path, device: torch.device) -> Score:
    """open_clip as its README uses it, the images of a prompt in one batch."""
    name = f"local-dir:{folder}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    model, tokenize = model.eval().to(device), open_clip.get_tokenizer(name)

    @torch.no_grad()
    def score(prompt, images):
        features = model.encode_image(torch.stack([preprocess(image) for image in images]).to(device))
        return torch.cosine_similarity(features, model.encode_text(tokenize([prompt]).to(device))).tolist()

    return score


def pickscore(folder: Path, processor: Path, device: torch.device) -> Score:
    """transformers as the model card uses it, the images of a prompt in one batch; over 100, as the paper's tables are."""
    model = CLIPModel.from_pretrained(folder).eval().to(device)
    tokenizer, preprocess = AutoTokenizer.from_pretrained(processor), CLIPImageProcessorPil.from_pretrained(processor)
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def score(prompt, images):
        inputs = preprocess(list(images), return_tensors="pt").to(device)
        text = tokenizer(prompt, truncation=True, max_length=length, return_tensors="pt").to(device)
        return (model(**text, **inputs).logits_per_image[:, 0] / 100).tolist()

    return score


def image_reward(folder: Path, tokenizer: Path, device: torch.device) -> Score:
    """ImageReward.score, which takes the images of a prompt one at a time and tokenizes the prompt once."""
    (file,) = folder.glob("ImageReward.*")
    weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    sizes = from_checkpoint(weights, json.loads((folder / "med_config.json").read_text()))
    vision = sizes.vision.config
    model = image_reward_model(
        folder / "med_config.json",
        AutoTokenizer.from_pretrained(tokenizer),
        {
            "img_size": vision.image_size, "patch_size": vision.patch_size, "embed_dim": vision.hidden_size,
            "depth": vision.num_hidden_layers, "num_heads": vision.num_attention_heads,
        },
        sizes.text.config.hidden_size,
    )  # fmt: skip
    model.load_state_dict(weights)
    model.to(device).device = device

    @torch.no_grad()
    def score(prompt, images):
        scores = model.score(prompt, list(images))
        return scores if isinstance(scores, list) else [scores]  # one image's is no list

    return score


def unified_reward(folder: Path, device: torch.device, settings: UnifiedRewardSettings) -> Score:
    """transformers as the published scripts use it, an image at a time; the answers are read as ours are."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval().to(device)
    processor = AutoProcessor.from_pretrained(folder)

    @torch.no_grad()
    def ask(images, questions):
        answers = []
        for image, text in zip(images, questions):
            chat = processor.apply_chat_template(conversation(text), add_generation_prompt=True, tokenize=False)
            inputs = processor(text=[chat], images=[TF.to_pil_image(image)], return_tensors="pt").to(device)
            made = model.generate(**inputs, max_new_tokens=settings.max_new_tokens, do_sample=False)
            answers.append(processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        return answers

    reward = UnifiedReward(ask, settings.template)
    return lambda prompt, images: reward.score_with_reasons(images, [prompt] * len(images))


def hpsv2_model(folder: Path, architecture: str):
    """(model, preprocess, tokenize) of hpsv2 with the weights of `HPS_v2.1_compressed`; architecture: a name, or a file there."""
    _stand_in("clint", "clint.textui", progress=None)
    _place_vocabulary()
    from hpsv2.src.open_clip import create_model_and_transforms, factory, get_tokenizer

    published = factory._MODEL_CONFIGS["ViT-H-14"]
    if architecture.endswith(".json"):
        factory._MODEL_CONFIGS["ViT-H-14"] = json.loads((folder / architecture).read_text())
    length = factory._MODEL_CONFIGS["ViT-H-14"]["text_cfg"]["context_length"]
    try:  # the arguments of hpsv2.img_score, in full precision
        model, _, preprocess = create_model_and_transforms(
            "ViT-H-14", None, precision="fp32", device="cpu", jit=False, force_quick_gelu=False, force_custom_text=False,
            force_patch_dropout=False, force_image_size=None, pretrained_image=False, image_mean=None, image_std=None,
            light_augmentation=True, aug_cfg={}, output_dict=True, with_score_predictor=False, with_region_predictor=False,
        )  # fmt: skip
        tokenize = get_tokenizer("ViT-H-14")
    finally:
        factory._MODEL_CONFIGS["ViT-H-14"] = published
    (file,) = folder.glob("HPS_v2.1_compressed.*")
    weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)["state_dict"]
    model.load_state_dict(weights)
    return model.eval(), preprocess, lambda texts: tokenize(texts)[:, :length]


def image_reward_model(med_config: Path, tokenizer, vision: dict, hidden: int):
    """ImageReward's own model, its image tower of the sizes `vision` (VisionTransformer's) and its text of `hidden`."""
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
