"""Score images with a reward that a server computes over HTTP (docs/reward_servers.md).

Requests are sent several at once, and repeated if a failure may pass.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx
import torch
from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)

from g2rpo_core.foundation.errors import TransientError, UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.rewards.addresses import on_loopback
from g2rpo_core.rewards.preprocess import Images, check_pairs
from g2rpo_core.rewards.reward_protocol import (
    NPY,
    PNG,
    Health,
    Scored,
    encode,
    read_answer,
    read_health,
)
from g2rpo_core.rewards.spec import RewardServerSettings, ServerSettings

LONGEST_WAIT = 60.0  # seconds between two tries
# HTTP statuses after which the same request may succeed
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
REFUSED = {401, 403, 404}  # wrong key, model or address: every request would fail
MOST_BYTES = 2**26  # largest answer; scores and reasons are short

T = TypeVar("T")


class Unanswered(Exception):
    """No answer came; the text says why."""


class Passing(Unanswered):
    """A failure after which the same request may succeed."""

    def __init__(self, text: str, retry_after: str | None = None):
        super().__init__(text)
        # Seconds; the header may also name a date
        self.retry_after = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0


def check_key(settings: ServerSettings, where: str) -> str:
    """Return the server's key, empty if it needs none; UserError if it is not set or cannot be one.

    where: the setting of the server.
    """
    variable = settings.key_variable
    key = os.environ.get(variable or "", "")
    if variable and not (key and key.isascii() and key.isprintable()):
        problem = (
            "holds characters that a key cannot have" if key else "is not set in the environment"
        )
        raise UserError(f"{where}.key_variable: {variable} {problem}")
    return key


class HttpClient:
    """request(path) -> the text of an answer of status 200; Unanswered if every try failed.

    Failures that may pass (busy, failing, silent, cut off) are retried, each time after twice the
    wait, or after as long as the server asks for. UserError if the server refuses every request;
    its text has `where` (a setting) and `hint`.
    """

    def __init__(self, settings: ServerSettings, where: str, hint: str = ""):
        self.settings, self.where, self.hint = settings, where, hint
        self.url, self.key = settings.url.rstrip("/"), check_key(settings, where)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
            if (address := httpx.URL(self.url)).scheme == "http" and not on_loopback(address.host):
                echo(
                    f"warning: {where}: the key of {settings.key_variable} is sent unencrypted to "
                    f"{self.url}",
                    file=sys.stderr,
                )
        limits = httpx.Limits(max_connections=settings.concurrency)
        self.client = httpx.Client(
            headers=headers, timeout=settings.timeout, limits=limits, trust_env=False
        )
        # at random, so that requests are not repeated all at once
        longer = wait_exponential_jitter(
            initial=settings.backoff, max=LONGEST_WAIT, jitter=settings.backoff
        )
        self.retrying = Retrying(
            stop=stop_after_attempt(settings.tries),
            wait=lambda state: min(max(longer(state), _asked_wait(state)), LONGEST_WAIT),
            retry=retry_if_exception_type(Passing),
        )

    def together(self, ask: Callable[..., T], *items: Sequence) -> list[T]:
        """Map `ask` over the items, at most `concurrency` calls at once; answers are in order."""
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            return list(pool.map(ask, *items))

    def request(self, path: str, body: object = None) -> str:
        """POST `body` as JSON, or GET if it is None, and return the answer's text."""
        data = None if body is None else json.dumps(body).encode()
        try:
            return self.retrying(self._once, path, data)
        except RetryError as failed:
            raise Passing(
                f"{failed.last_attempt.exception()} ({self.settings.tries} tries)"
            ) from None

    def _once(self, path: str, body: bytes | None) -> str:
        """Try once. The answer has no key in it, because answers are printed and kept in files."""
        address, method = self.url + path, "GET" if body is None else "POST"
        data, end = bytearray(), time.monotonic() + self.settings.timeout
        late = f"no whole answer within {self.settings.timeout:g} s"
        try:
            with self.client.stream(method, address, content=body) as response:
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise Unanswered(f"an answer of over {MOST_BYTES >> 20} MiB")
                    if time.monotonic() > end:
                        raise Passing(late)
        except httpx.TimeoutException:
            raise Passing(late) from None
        except httpx.TransportError as error:
            raise Passing(self._without_key(f"{type(error).__name__}: {error}")) from None
        # Also what the system's resolver says of a name
        except (httpx.DecodingError, httpx.InvalidURL, ValueError, OverflowError) as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from None
        # Every status says whether a further try may help
        text = self._without_key(data.decode(errors="replace"))
        said = f"status {response.status_code}: {text[:200]!r}"
        if response.status_code in PASSING:
            raise Passing(said, response.headers.get("retry-after"))
        if response.status_code in REFUSED:
            raise UserError(f"{self.where}: {address}{self.hint} answers with {said}")
        if response.status_code != 200:
            raise Unanswered(said)
        return text

    def _without_key(self, text: str) -> str:
        known = f"(the key of {self.settings.key_variable})"
        return text.replace(self.key, known) if self.key else text


def _asked_wait(state: RetryCallState) -> float:
    """Return the seconds that the server asked to wait."""
    failed = state.outcome.exception() if state.outcome else None
    return failed.retry_after if isinstance(failed, Passing) else 0.0


class RemoteReward:
    """score(images, prompts) -> [N] float32, NaN where a score is missing.

    `score_with_reasons` also says why. The constructor asks the server which reward it serves:
    UserError if it serves another one, TransientError if it cannot be reached now.
    """

    def __init__(self, name: str, settings: RewardServerSettings):
        self.settings, self.where = settings, f"rewards.{name}.server"
        self.client = HttpClient(
            settings, self.where, " (a score server, see docs/reward_servers.md)"
        )
        self.health = self._health()
        if problem := self._problem(settings.reward or name):
            raise UserError(f"{self.where}{problem}")
        most = settings.max_images_per_request
        self.size = min(most, self.health.max_images or most)

    def _health(self) -> Health:
        try:
            return read_health(self.client.request("/health"))
        except Unanswered as error:
            kind = TransientError if isinstance(error, Passing) else UserError
            raise kind(
                f"{self.where}: {self.client.url} did not say which reward it serves: {error}"
            ) from None
        except ValueError as error:
            raise UserError(
                f"{self.where}: {self.client.url}/health is not a score server: {error}"
            ) from None

    def _problem(self, reward: str) -> str | None:
        """Return how the server does not fit the settings."""
        health, settings, url = self.health, self.settings, self.client.url
        if health.reward != reward:
            return f": {url} serves {health.reward!r} ({health.label}), not {reward!r}"
        if settings.version not in (None, health.version):
            return f".version: {url} serves version {health.version}, not {settings.version}"
        if PNG not in health.images:
            return f": {url} reads {', '.join(health.images) or 'no images'}, not {PNG}"
        if settings.images == "float32" and NPY not in health.images:
            return f".images: {url} reads {', '.join(health.images)} only: set images: png"
        return None

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        return self.score_with_reasons(images, prompts)[0]

    def score_with_reasons(
        self, images: Images, prompts: Sequence[str]
    ) -> tuple[torch.Tensor, list[str | None]]:
        """Return scores [N], and the reason for each that is NaN."""
        check_pairs(images, prompts)
        parts = [slice(start, start + self.size) for start in range(0, len(images), self.size)]
        scored = self.client.together(
            self._ask, [images[part] for part in parts], [list(prompts[part]) for part in parts]
        )
        pairs = [pair for part in scored for pair in part]
        scores = torch.tensor([score for score, _ in pairs], dtype=torch.float32)
        return scores, [why for _, why in pairs]

    def _ask(self, images: Images, prompts: list[str]) -> list[Scored]:
        body = {"prompts": prompts, "images": encode(images, self.settings.images)}
        try:
            return read_answer(self.client.request("/score", body), len(prompts))
        except Unanswered as error:
            reason = f"no answer: {error}"
        except ValueError as error:
            reason = f"not scores: {error}"
        return [(math.nan, reason)] * len(prompts)
