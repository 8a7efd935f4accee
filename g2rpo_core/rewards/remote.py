"""Score images with a reward that a server computes over HTTP (docs/reward_servers.md).

Requests are sent several at once, and repeated if a failure may pass.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import httpx
import torch
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_exponential_jitter,
)

from g2rpo_core.foundation.errors import TransientError, UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.rewards.addresses import on_loopback
from g2rpo_core.rewards.preprocess import Images, check_pairs
from g2rpo_core.rewards.reward_protocol import NPY, PNG, Health, Scored, encode, parse, read_answer
from g2rpo_core.rewards.spec import RewardServerSettings, RewardWithReasons, ServerSettings

LONGEST_WAIT = 60.0  # seconds between two tries
MOST_BYTES = 2**26  # of an answer
# HTTP statuses after which the same request may succeed
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
REFUSED = {401, 403, 404}  # wrong key, model or address: every request would fail

T = TypeVar("T")


class Unanswered(Exception):
    """No answer came; the text says why."""


class Passing(Unanswered):
    """A failure after which the same request may succeed."""


def check_key(settings: ServerSettings, where: str) -> str:
    """Return the server's key, empty if it needs none; UserError if it is not set or cannot be one.

    where: the setting of the server.
    """
    key = os.environ.get(settings.key_variable or "", "")
    if settings.key_variable and not (key and key.isascii() and key.isprintable()):
        raise UserError(
            f"{where}.key_variable: {settings.key_variable} is not set in the environment, or "
            "holds characters that a key cannot have"
        )
    return key


class HttpClient:
    """request(path) -> the text of an answer of status 200; Unanswered if every try failed.

    Failures that may pass (busy, failing, silent, cut off) are retried, each time after twice the
    wait, or after as long as the server asks for. UserError if the server refuses every request;
    its text has `where` (a setting) and `hint`.
    """

    def __init__(self, settings: ServerSettings, where: str, hint: str = ""):
        self.settings, self.where, self.hint = settings, where, hint
        self.key = check_key(settings, where)
        self.client = httpx.Client(
            base_url=settings.url,
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=settings.timeout,
            limits=httpx.Limits(max_connections=settings.concurrency),
            trust_env=False,
        )
        address = self.client.base_url
        if self.key and address.scheme == "http" and not on_loopback(address.host):
            echo(
                f"warning: {where}: the key of {settings.key_variable} is sent unencrypted to "
                f"{settings.url}",
                file=sys.stderr,
            )
        # at random, so that requests are not repeated all at once
        longer = wait_exponential_jitter(
            initial=settings.backoff, max=LONGEST_WAIT, jitter=settings.backoff
        )
        self.retrying = Retrying(
            stop=stop_after_attempt(settings.tries),
            wait=lambda state: min(max(longer(state), _asked_wait(state)), LONGEST_WAIT),
            retry=retry_if_exception_type(httpx.RequestError)
            | retry_if_result(lambda answer: answer[0].status_code in PASSING),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )

    def together(self, ask: Callable[..., T], *items: Sequence) -> list[T]:
        """Map `ask` over the items, at most `concurrency` calls at once; answers are in order."""
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            return list(pool.map(ask, *items))

    def request(self, path: str, body: object = None) -> str:
        """POST `body` as JSON, or GET if it is None, and return the answer's text.

        No text from here has the key in it, because answers are printed and kept in files.
        """
        known = f"(the key of {self.settings.key_variable})"
        without_key = lambda text: text.replace(self.key, known) if self.key else text
        method = "GET" if body is None else "POST"
        try:
            response, data = self.retrying(self._once, method, path, body)
        except (httpx.RequestError, ValueError) as error:  # ValueError: of the system's resolver
            raise Passing(without_key(f"{type(error).__name__}: {error}")) from None
        text = without_key(data.decode(errors="replace"))
        said = f"status {response.status_code}: {text[:200]!r}"
        if response.status_code in REFUSED:
            raise UserError(f"{self.where}: {response.url}{self.hint} answers with {said}")
        if response.status_code != 200:
            raise (Passing if response.status_code in PASSING else Unanswered)(said)
        return text

    def _once(self, method: str, path: str, body: object) -> tuple[httpx.Response, bytearray]:
        """Try once, for `timeout` seconds in all: httpx's own timeout is one of silence."""
        data, end = bytearray(), time.monotonic() + self.settings.timeout
        with self.client.stream(method, path, json=body) as response:
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > MOST_BYTES or time.monotonic() > end:
                    raise httpx.ReadTimeout(
                        f"no whole answer within {self.settings.timeout:g} s and "
                        f"{MOST_BYTES >> 20} MiB"
                    )
        return response, data


def _asked_wait(state: RetryCallState) -> float:
    """Return the seconds that the server asked to wait; its header may also name a date."""
    answer = state.outcome.result() if state.outcome and not state.outcome.failed else None
    asked = answer[0].headers.get("retry-after", "") if answer else ""
    return float(asked) if asked.isdecimal() else 0.0


class RemoteReward(RewardWithReasons):
    """score(images, prompts) -> [N] float32, NaN where a score is missing.

    `score_with_reasons` also says why. The constructor asks the server which reward it serves:
    UserError if it serves another one, TransientError if it cannot be reached now.
    """

    def __init__(self, name: str, settings: RewardServerSettings):
        self.settings, where, url = settings, f"rewards.{name}.server", settings.url
        self.client = HttpClient(settings, where, " (a score server, see docs/reward_servers.md)")
        try:
            self.health = health = parse(Health, self.client.request("/health"))
        except ValueError as error:
            raise UserError(f"{where}: {url}/health is not a score server: {error}") from None
        except Unanswered as error:
            kind = TransientError if isinstance(error, Passing) else UserError
            raise kind(f"{where}: {url} did not say which reward it serves: {error}") from None
        wanted, version = settings.reward or name, settings.version
        for fits, problem in (
            (health.reward == wanted, f": {url} serves {health.reward!r}, not {wanted!r}"),
            (
                version in (None, health.version),
                f".version: {url} serves version {health.version}, not {version}",
            ),
            (PNG in health.images, f": {url} does not read {PNG}"),
            (
                settings.images == "png" or NPY in health.images,
                f".images: {url} reads {', '.join(health.images)} only: set images: png",
            ),
        ):
            if not fits:
                raise UserError(where + problem)
        most = settings.max_images_per_request
        self.size = min(most, health.max_images or most)

    def score_with_reasons(
        self, images: Images, prompts: Sequence[str]
    ) -> tuple[torch.Tensor, list[str | None]]:
        """Return scores [N], and the reason for each that is NaN."""
        check_pairs(images, prompts)
        parts = [slice(start, start + self.size) for start in range(0, len(images), self.size)]
        ask = lambda part: self._ask(images[part], list(prompts[part]))
        pairs = list(chain.from_iterable(self.client.together(ask, parts)))
        scores = torch.tensor([score for score, _ in pairs], dtype=torch.float32)
        return scores, [why for _, why in pairs]

    def _ask(self, images: Images, prompts: list[str]) -> list[Scored]:
        body = {"prompts": prompts, "images": encode(images, self.settings.images)}
        try:
            return read_answer(self.client.request("/score", body), len(prompts))
        except (Unanswered, ValueError) as error:
            return [(math.nan, f"no answer: {error}")] * len(prompts)
