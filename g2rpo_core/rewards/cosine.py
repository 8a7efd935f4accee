"""The cosine of image and prompt under a model of two towers: what HPS-v2.1, CLIP Score and PickScore are."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from g2rpo_core.rewards.preprocess import Images, Preprocess, check_pairs
from g2rpo_core.rewards.spec import ScorerSettings


class CosineScore:
    """scale * cosine, [N] float32. Texts are encoded once and kept; nothing has a gradient.

    encode_images: [n, 3, size, size] -> [n, D]; encode_texts: n texts -> [n, D]; both on `device` in the dtype of `settings`, of
    any length. Cosines are taken in float32.
    """

    def __init__(
        self,
        encode_images: Callable[[torch.Tensor], torch.Tensor],
        encode_texts: Callable[[list[str]], torch.Tensor],
        preprocess: Preprocess,
        device: torch.device,
        scale: float = 1.0,
        settings: ScorerSettings = ScorerSettings(),  # noqa: B008
    ):
        self.encode_images, self.encode_texts, self.preprocess = encode_images, encode_texts, preprocess
        self.device, self.scale, self.micro_batch = device, scale, settings.micro_batch
        self.dtype = getattr(torch, settings.dtype)
        self._texts: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        check_pairs(images, prompts)
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._texts]
        for start in range(0, len(new), self.micro_batch):
            part = new[start : start + self.micro_batch]
            self._texts.update(zip(part, F.normalize(self.encode_texts(part).float(), dim=-1)))
        texts = torch.stack([self._texts[prompt] for prompt in prompts])
        parts = (images[start : start + self.micro_batch] for start in range(0, len(images), self.micro_batch))
        encoded = (self.encode_images(self.preprocess(part, self.device).to(self.dtype)) for part in parts)
        features = torch.cat([F.normalize(part.float(), dim=-1) for part in encoded])
        return self.scale * (features * texts).sum(1)


def of_open_clip(
    model: torch.nn.Module, tokenize, preprocess: Preprocess, device: torch.device, settings: ScorerSettings
) -> CosineScore:
    """The cosine under an open_clip model, which is moved to its device and dtype."""
    model = model.eval().requires_grad_(False).to(device, getattr(torch, settings.dtype))
    encode_texts = lambda texts: model.encode_text(tokenize(texts).to(device))
    return CosineScore(model.encode_image, encode_texts, preprocess, device, settings=settings)
