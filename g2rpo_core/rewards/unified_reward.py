"""UnifiedReward: a vision-language model is asked about each picture, and its answer in words is read as a score from 1 to 5."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torchvision.transforms.v2 import functional as TF

from ..errors import UserError
from .pictures import Pictures, check_pairs
from .settings import UnifiedRewardSettings
from .templates import parse, question

FAMILIES = ("qwen2_5_vl", "llava_onevision")
Answers = list[str | Exception]  # an answer, or why there is none


def conversation(text: str) -> list[dict]:
    """One picture and a question about it, in the form of chat templates."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


class UnifiedReward:
    """score(images, prompts) -> [N] float32 in [1, 5], NaN where no score could be had; `judge` says why as well.

    ask: N pictures [3, H, W] uint8 and N questions -> their answers. Pictures come as 8 bits, as files would hold them.
    """

    def __init__(self, ask: Callable[[list[torch.Tensor], Sequence[str]], Answers], template: str):
        self.ask, self.template = ask, template

    def __call__(self, images: Pictures, prompts: Sequence[str]) -> torch.Tensor:
        return self.judge(images, prompts)[0]

    def judge(self, images: Pictures, prompts: Sequence[str]) -> tuple[torch.Tensor, list[str | None]]:
        """Scores [N], and for each that is NaN the reason: what is wrong with the answer and its text, or the failure."""
        check_pairs(images, prompts)
        answers = self.ask(eight_bit(images), [question(self.template, prompt) for prompt in prompts])
        scores, reasons = zip(*(self._read(answer) for answer in answers))
        return torch.tensor(scores), list(reasons)

    def _read(self, answer: str | Exception) -> tuple[float, str | None]:
        if isinstance(answer, Exception):
            return float("nan"), f"no answer: {answer}"
        try:
            return parse(self.template, answer), None
        except ValueError as error:
            return float("nan"), f"not a score: {error}; the answer was {answer!r}"


def eight_bit(images: Pictures) -> list[torch.Tensor]:
    """Each picture [3, H, W] uint8 on the CPU; transparency is dropped, as by the published client's `convert("RGB")`."""
    if isinstance(images, torch.Tensor):
        # one at a time, so that each stays in the processor's cache
        return [image.float().clamp(0, 1).mul_(255).round_().byte().cpu() for image in images]
    return [TF.pil_to_tensor(image.convert("RGB")) for image in images]


class InProcess:
    """Asks a model in this process: a transformers folder of one of FAMILIES, greedily. dtype: a name, or `auto` for its files'."""

    def __init__(self, folder: Path, device: torch.device, micro_batch: int, max_new_tokens: int, dtype: str = "auto"):
        from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

        kind = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
        if kind not in FAMILIES:
            raise UserError(
                f"{folder}: is a model of type {kind!r}, and in this process only {', '.join(FAMILIES)} can be asked; "
                "serve it and set rewards.unified_reward.server"
            )
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model.eval().requires_grad_(False).to(device)
        self.processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        self.processor.tokenizer.padding_side = "left"
        self.micro_batch, self.max_new_tokens = micro_batch, max_new_tokens

    @torch.no_grad()
    def __call__(self, images: list[torch.Tensor], questions: Sequence[str]) -> Answers:
        answers = []
        for start in range(0, len(images), self.micro_batch):
            part = slice(start, start + self.micro_batch)
            texts = [
                self.processor.apply_chat_template(conversation(text), add_generation_prompt=True, tokenize=False)
                for text in questions[part]
            ]
            inputs = self.processor(text=texts, images=images[part], padding=True, return_tensors="pt")
            inputs = inputs.to(self.model.device, self.model.dtype)
            made = self.model.generate(
                **inputs, max_new_tokens=self.max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
            )
            answers += self.processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answers


def unified_reward(folder: Callable[[], Path], device: torch.device, settings: UnifiedRewardSettings) -> UnifiedReward:
    """UnifiedReward from the folder of its model, or from the server of the settings (then no folder is asked for)."""
    if settings.server is None:
        ask = InProcess(folder(), device, settings.micro_batch, settings.max_new_tokens, settings.dtype)
    else:
        from .chat_server import ChatServer

        ask = ChatServer(settings.server, settings.max_new_tokens)
    return UnifiedReward(ask, settings.template)
