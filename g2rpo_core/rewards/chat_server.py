"""Sends questions about images to a server with OpenAI's chat completions, such as vLLM or SGLang."""

import json
from collections.abc import Sequence

import torch

from g2rpo_core.rewards.http_client import HttpClient, Unanswered
from g2rpo_core.rewards.reward_protocol import as_png
from g2rpo_core.rewards.server_settings import ServerSettings


class ChatServer:
    """ask(N images [3, H, W] uint8, N questions) -> N answers in order, with Unanswered where every try failed.

    UserError if the server refuses every request: wrong key, model or address.
    """

    def __init__(self, settings: ServerSettings, model: str, max_new_tokens: int):
        self.model, self.max_new_tokens = model, max_new_tokens
        self.client = HttpClient(settings, "rewards.unified_reward.server", f" with model {model!r}")

    def __call__(self, images: Sequence[torch.Tensor], questions: Sequence[str]) -> list[str | Exception]:
        return self.client.together(self._ask, images, questions)

    def _ask(self, image: torch.Tensor, question: str) -> str | Exception:
        from torchvision.transforms.v2 import functional as TF

        content = [
            {"type": "image_url", "image_url": {"url": as_png(TF.to_pil_image(image))}},
            {"type": "text", "text": question},
        ]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
        }
        try:
            return self._read(self.client.request("/chat/completions", body))
        except Unanswered as error:
            return error

    def _read(self, data: bytes) -> str:
        try:
            choice = json.loads(data)["choices"][0]
            text, finished = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Unanswered(f"not a chat completion: {self.client.without_key(data)[:200]!r}") from None
        if not isinstance(text, str):
            raise Unanswered("an answer without text")
        if finished == "length":
            raise Unanswered(f"cut at max_new_tokens {self.max_new_tokens}: {text[-200:]!r}")
        return text
