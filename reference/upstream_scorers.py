"""Each reward as it is published: the packages hpsv2 and image-reward, open_clip and transformers used directly.

`load` gives them our weights. How the two packages are made to run beside today's libraries stands in `g2rpo_core.rewards.packages`.
"""

from pathlib import Path

import open_clip
import torch
from torchvision.transforms.v2 import functional as TF
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards import packages
from g2rpo_core.rewards.packages import Score
from g2rpo_core.rewards.unified_reward import UnifiedReward, UnifiedRewardSettings, conversation


def load(name: str, store: ModelStore, device: torch.device, settings: UnifiedRewardSettings | None = None) -> Score:
    """The published way to score images with a reward of ours, on the same weights; settings: of UnifiedReward."""
    if name == "hps":
        return packages.hpsv2(store.folder("hps"), store.entry("hps")["architecture"], device)
    if name == "clip_score":
        return clip_score(store.folder("clip_score"), device)
    if name == "pickscore":
        return pickscore(store.folder("pickscore"), store.folder("pickscore_processor"), device)
    if name == "image_reward":
        return packages.image_reward(store.folder("image_reward"), store.folder("image_reward_tokenizer"), device)
    return unified_reward(store.folder("unified_reward"), device, settings or UnifiedRewardSettings())


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
