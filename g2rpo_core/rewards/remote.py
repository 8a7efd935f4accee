"""Score images with a reward that a server computes over HTTP (docs/reward_servers.md).

Requests are sent several at once, and repeated if a failure may pass.
"""

import base64
import html.entities
import json
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, Self, TypeVar

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
MOST_BYTES = 2**26  # largest answer; scores and reasons are short
SHORTEST_KEY = 6  # bytes of a key that is also searched for in base64 and hexadecimal
REFUSED = {401, 403, 404}  # wrong key, model or address: every request would fail

T = TypeVar("T")


class Unanswered(Exception):
    """No answer came; the text says why."""


class Passing(Unanswered):
    """A failure after which the same request may succeed."""

    def __init__(self, text: str, retry_after: float = 0.0):
        super().__init__(text)
        self.retry_after = retry_after


def check_key(settings: ServerSettings, where: str) -> None:
    """Check that the server's key is in the environment and can be sent; UserError otherwise.

    where: the setting of the server.
    """
    variable = settings.key_variable
    if not variable:
        return
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or not key.isprintable():
        problem = (
            "holds characters that a key cannot have" if key else "is not set in the environment"
        )
        raise UserError(f"{where}.key_variable: {variable} {problem}")


class HttpClient:
    """request(path) -> the body of an answer of status 200; Unanswered if every try failed.

    Failures that may pass (busy, failing, silent, cut off) are retried, each time after twice the
    wait, or after as long as the server asks for. UserError if the server refuses every request;
    its text has `where` (a setting) and `hint`.
    """

    def __init__(self, settings: ServerSettings, where: str, hint: str = ""):
        self.settings, self.where, self.hint = settings, where, hint
        self.url = settings.url.rstrip("/")
        # Never compressed: a small answer could become one of gigabytes
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if settings.key_variable:
            check_key(settings, where)
            headers["Authorization"] = f"Bearer {os.environ[settings.key_variable]}"
            if (address := httpx.URL(self.url)).scheme == "http" and not on_loopback(address.host):
                echo(
                    f"warning: {where}: the key of {settings.key_variable} is sent unencrypted to "
                    f"{self.url}",
                    file=sys.stderr,
                )
        # A new connection for each request, so that `Watch` sees it
        limits = httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=0)
        self.client = httpx.Client(
            headers=headers, timeout=settings.timeout, limits=limits, trust_env=False
        )
        # at random, so that requests are not repeated all at once
        longer = wait_exponential_jitter(
            initial=settings.backoff, max=LONGEST_WAIT, jitter=settings.backoff
        )
        self.retrying = Retrying(
            stop=stop_after_attempt(settings.tries),
            wait=lambda state: min(max(longer(state), _read_wait(state)), LONGEST_WAIT),
            retry=retry_if_exception_type(Passing),
        )

    def together(self, ask: Callable[..., T], *items: Sequence) -> list[T]:
        """Map `ask` over the items, at most `concurrency` calls at once; answers are in order."""
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            return list(pool.map(ask, *items))

    def request(self, path: str, body: object = None) -> bytes:
        """POST `body` as JSON, or GET if it is None, and return the answer's body."""
        data = None if body is None else json.dumps(body).encode()
        try:
            return self.retrying(self._once, path, data)
        except RetryError as failed:
            raise Passing(
                f"{failed.last_attempt.exception()} ({self.settings.tries} tries)"
            ) from None

    def _once(self, path: str, body: bytes | None) -> bytes:
        """Try once, within `timeout` seconds in all, however slowly the server sends."""
        address, data, method = self.url + path, bytearray(), "GET" if body is None else "POST"
        with Watch(self.settings.timeout) as watch:
            try:
                with self.client.stream(
                    method, address, content=body, extensions={"trace": watch.see}
                ) as response:
                    for chunk in response.iter_raw():
                        data += chunk
                        if len(data) > MOST_BYTES:
                            raise Unanswered(f"an answer of over {MOST_BYTES >> 20} MiB")
            except httpx.TransportError as error:
                if not watch.late and not isinstance(error, httpx.TimeoutException):
                    raise Passing(self.without_key(f"{type(error).__name__}: {error}")) from None
                watch.late = True
            # Also what the system's resolver says of a name
            except (httpx.InvalidURL, ValueError, OverflowError) as error:
                raise Unanswered(f"{type(error).__name__}: {error}") from None
        if watch.late:
            raise Passing(f"no whole answer within {self.settings.timeout:g} s")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise Unanswered("a compressed answer, which was not asked for")
        # Every status says whether a further try may help
        sent = data.decode(errors="replace")
        text = self.without_key(sent)
        said = f"status {response.status_code}: {text[:200]!r}"
        if response.status_code in PASSING:
            raise Passing(said, seconds(response.headers.get("retry-after")))
        if response.status_code in REFUSED:
            raise UserError(f"{self.where}: {address}{self.hint} answers with {said}")
        if response.status_code != 200:
            raise Unanswered(said)
        return bytes(data) if text == sent else text.encode(errors="replace")

    def without_key(self, text: str) -> str:
        """Return a server's answer without the key, because answers are printed and kept in files.

        The key is found in the forms of `forms_of`, too.
        """
        variable = self.settings.key_variable
        if key := os.environ.get(variable or "", ""):
            for form in forms_of(key):
                text = form.sub(f"(the key of {variable})", text)
        return text


def forms_of(key: str) -> list[re.Pattern[str]]:
    """Return what finds a key in an answer, however it is written.

    As it is, in base64 behind any other bytes, or in hexadecimal; each character of these may be
    escaped as in JSON, Python, an address or HTML, once or several times.
    """
    data, texts = key.encode(), [key]
    if len(data) >= SHORTEST_KEY:  # the codes of a shorter one are in any text
        texts += [data.hex(), data.hex().upper()]
        for place in range(3):
            # Without the characters that depend on what stands before and behind
            code = base64.b64encode(bytes(place) + data).decode()
            code = code[-(-place * 8 // 6) : (place + len(data)) * 8 // 6]
            texts += [code, code.replace("+", "-").replace("/", "_")]
    return [re.compile("".join(map(_character, text))) for text in dict.fromkeys(texts)]


@cache
def _character(char: str) -> str:
    """Return the pattern of a character in all its forms; each begins with a letter of its own."""
    code, plain = f"(?i:{ord(char):02x})", re.escape(char)
    named = [name for name, value in html.entities.html5.items() if value == char]
    words = "|".join([f"#0{{0,6}}{ord(char)}", f"#[xX]0{{0,6}}{code}", *map(re.escape, named)])
    return (
        rf"(?:{plain}|\\\\{{0,3}}(?:{plain}|u00{code}|x{code})"
        rf"|%(?:25){{0,3}}{code}|&(?:amp;){{0,3}}(?:{words});?)"
    )


class Watch:
    """Context manager that ends a request's connection after `seconds`; `late` says that it did."""

    def __init__(self, seconds: float):
        self.late, self.streams = False, list[Any]()
        self.timer = threading.Timer(seconds, self.cut)
        self.timer.daemon = True

    def see(self, event: str, info: dict) -> None:
        """Take note of a connection: httpx calls this with each step of a request."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self.streams.append(info["return_value"])
            if self.late:
                self.cut()

    def cut(self) -> None:
        self.late = True
        for stream in self.streams:
            with suppress(OSError):
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()


def _read_wait(state: RetryCallState) -> float:
    failed = state.outcome.exception() if state.outcome else None
    return failed.retry_after if isinstance(failed, Passing) else 0.0


def seconds(retry_after: str | None) -> float:
    """Return the seconds in the header Retry-After; 0 if there is none or it names a date."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0


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
        self._check(settings.reward or name)
        self.size = min(
            settings.max_images_per_request,
            self.health.max_images or settings.max_images_per_request,
        )

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

    def _check(self, reward: str) -> None:
        health, settings = self.health, self.settings
        if health.reward != reward:
            raise UserError(
                f"{self.where}: {self.client.url} serves {health.reward!r} ({health.label}), "
                f"not {reward!r}"
            )
        if settings.version not in (None, health.version):
            raise UserError(
                f"{self.where}.version: {self.client.url} serves version {health.version}, "
                f"not {settings.version}"
            )
        if PNG not in health.images:
            raise UserError(
                f"{self.where}: {self.client.url} reads {', '.join(health.images) or 'no images'}, "
                f"not {PNG}"
            )
        if settings.images == "float32" and NPY not in health.images:
            raise UserError(
                f"{self.where}.images: {self.client.url} reads {', '.join(health.images)} only: "
                "set images: png"
            )

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
        return torch.tensor([score for score, _ in pairs], dtype=torch.float32), [
            why for _, why in pairs
        ]

    def _ask(self, images: Images, prompts: list[str]) -> list[Scored]:
        body = {"prompts": prompts, "images": encode(images, self.settings.images)}
        try:
            return read_answer(self.client.request("/score", body), len(prompts))
        except Unanswered as error:
            return [(math.nan, f"no answer: {error}")] * len(prompts)
        except ValueError as error:
            return [(math.nan, f"not scores: {error}")] * len(prompts)
