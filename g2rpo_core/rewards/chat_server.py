"""Questions about images to a server that speaks OpenAI's chat completions, such as vLLM or SGLang."""

import base64
import io
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import torch
from pydantic import Field

from g2rpo_core.errors import UserError
from g2rpo_core.settings import Settings

LONGEST_WAIT = 60.0  # seconds between two tries
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # HTTP statuses after which the same request may succeed


class ServerSettings(Settings):
    """A server that speaks OpenAI's chat completions.

    url: up to and with its version, such as http://localhost:8000/v1; timeout: seconds for one try; tries: of each image;
    backoff: seconds before the second try, doubled before each further one; key_variable: the environment variable that
    holds the server's key.
    """

    url: str = Field(pattern=r"^https?://\S+$")
    model: str
    timeout: float = Field(120, gt=0, le=86_400)
    tries: int = Field(5, gt=0, le=1000)
    backoff: float = Field(1.0, ge=0, le=3600)
    concurrency: int = Field(16, gt=0, le=10_000)
    key_variable: str | None = None


def check_key(settings: ServerSettings) -> None:
    """UserError where the key that the server wants is not in the environment, or cannot be sent."""
    variable = settings.key_variable
    if not variable:
        return
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or not key.isprintable():
        problem = "holds characters that no key has" if key else "is not set in the environment"
        raise UserError(f"rewards.unified_reward.server.key_variable: {variable} {problem}")


class Unanswered(Exception):
    """No answer was had; the text says why."""


class ChatServer:
    """ask(N images [3, H, W] uint8, N questions) -> N answers, or Unanswered where every try failed; never another's answer.

    At most `concurrency` requests are under way; what may pass (busy, failing, silent, cut off) is tried again after twice
    the wait each time, or after as long as the server asks for. UserError where the server refuses every request alike:
    wrong key, model or address.
    """

    def __init__(self, settings: ServerSettings, max_new_tokens: int):
        self.settings, self.max_new_tokens = settings, max_new_tokens
        headers = {}
        if settings.key_variable:
            check_key(settings)
            headers["Authorization"] = f"Bearer {os.environ[settings.key_variable]}"
        limits = httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
        self.client = httpx.Client(headers=headers, timeout=settings.timeout, limits=limits, trust_env=False)
        self.address = settings.url.rstrip("/") + "/chat/completions"

    def __call__(self, images: Sequence[torch.Tensor], questions: Sequence[str]) -> list[str | Exception]:
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            return list(pool.map(self._ask, images, questions))

    def _ask(self, image: torch.Tensor, question: str) -> str | Exception:
        content = [{"type": "image_url", "image_url": {"url": png_url(image)}}, {"type": "text", "text": question}]
        body = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
        }
        for attempt in range(self.settings.tries):
            try:
                return self._request(body)
            except Passing as error:
                reason = error
                if attempt + 1 < self.settings.tries:
                    wait = (
                        self.settings.backoff * 2**attempt * random.uniform(0.5, 1.0)
                    )  # so that requests do not return together
                    time.sleep(min(max(wait, error.retry_after), LONGEST_WAIT))
            except Unanswered as error:
                return error
        return Unanswered(f"{reason} ({self.settings.tries} tries)")

    def _request(self, body: dict) -> str:
        """One try, within `timeout` seconds as a whole however slowly the server sends."""
        end = time.monotonic() + self.settings.timeout
        try:
            with self.client.stream("POST", self.address, json=body) as response:
                data = b""
                for chunk in response.iter_bytes():
                    data += chunk
                    if time.monotonic() > end:
                        raise Passing(f"no whole answer within {self.settings.timeout:g} s")
        except httpx.TimeoutException:
            raise Passing(f"no answer within {self.settings.timeout:g} s") from None
        except httpx.TransportError as error:
            raise Passing(f"{type(error).__name__}: {error}") from None
        words = self._without_key(data.decode(errors="replace"))
        said = f"status {response.status_code}: {words[:200]!r}"
        if response.status_code in PASSING:
            raise Passing(said, seconds(response.headers.get("retry-after")))
        if response.status_code in (401, 403, 404):
            raise UserError(
                f"rewards.unified_reward.server: {self.address} with model {self.settings.model!r} answers with {said}"
            )
        if response.status_code != 200:
            raise Unanswered(said)
        try:
            choice = httpx.Response(200, content=data).json()["choices"][0]
            text, finished = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError):
            raise Unanswered(f"not a chat completion: {words[:200]!r}") from None
        if not isinstance(text, str):
            raise Unanswered("an answer without text")
        if finished == "length":
            raise Unanswered(f"cut at max_new_tokens {self.max_new_tokens}: {text[-200:]!r}")
        return text

    def _without_key(self, text: str) -> str:
        """A server's words, which may repeat what it was sent."""
        variable = self.settings.key_variable
        return text.replace(os.environ.get(variable, ""), f"(the key of {variable})") if variable else text


class Passing(Exception):
    """A failure that may pass. retry_after: seconds that the server asks to wait."""

    def __init__(self, text: str, retry_after: float = 0.0):
        super().__init__(text)
        self.retry_after = retry_after


def seconds(retry_after: str | None) -> float:
    """Of the header Retry-After; 0 where there is none or it names a date."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0


def png_url(image: torch.Tensor) -> str:
    """An image [3, H, W] uint8 as a data URL, lossless."""
    from torchvision.transforms.v2 import functional as TF

    buffer = io.BytesIO()
    TF.to_pil_image(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
