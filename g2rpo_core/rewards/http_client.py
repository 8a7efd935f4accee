"""Requests to a server that computes rewards: several at once, and repeated if a failure may pass."""

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx
from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from g2rpo_core.errors import UserError
from g2rpo_core.rewards.server_settings import ServerSettings

LONGEST_WAIT = 60.0  # seconds between two tries
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # HTTP statuses after which the same request may succeed
MOST_BYTES = 2**26  # largest answer; scores and reasons are short
REFUSED = {401, 403, 404}  # wrong key, model or address: every request would fail

T = TypeVar("T")


class Unanswered(Exception):
    """There is no answer; the text says why. passing: whether the same request may succeed later."""

    passing = False


class Passing(Unanswered):
    """retry_after: seconds that the server asks to wait."""

    passing = True

    def __init__(self, text: str, retry_after: float = 0.0):
        super().__init__(text)
        self.retry_after = retry_after


def check_key(settings: ServerSettings, where: str) -> None:
    """Checks the key that the server needs; UserError if it is not in the environment, or cannot be sent.

    where: the setting of the server.
    """
    variable = settings.key_variable
    if not variable:
        return
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or not key.isprintable():
        problem = "holds characters that a key cannot have" if key else "is not set in the environment"
        raise UserError(f"{where}.key_variable: {variable} {problem}")


class HttpClient:
    """request(path) -> the body of an answer of status 200; Unanswered if every try failed.

    Failures that may pass (busy, failing, silent, cut off) are retried, each time after twice the wait, or after as long as the
    server asks for. UserError if the server refuses every request; its text has `where` (a setting) and `hint`.
    """

    def __init__(self, settings: ServerSettings, where: str, hint: str = ""):
        self.settings, self.where, self.hint = settings, where, hint
        self.url = settings.url.rstrip("/")
        headers = {"Content-Type": "application/json"}
        if settings.key_variable:
            check_key(settings, where)
            headers["Authorization"] = f"Bearer {os.environ[settings.key_variable]}"
        limits = httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
        self.client = httpx.Client(headers=headers, timeout=settings.timeout, limits=limits, trust_env=False)
        # at random, so that requests are not repeated all at once
        longer = wait_exponential_jitter(initial=settings.backoff, max=LONGEST_WAIT, jitter=settings.backoff)
        self.retrying = Retrying(
            stop=stop_after_attempt(settings.tries),
            wait=lambda state: min(max(longer(state), _asked_to_wait(state)), LONGEST_WAIT),
            retry=retry_if_exception_type(Passing),
        )

    def together(self, ask: Callable[..., T], *items: Sequence) -> list[T]:
        """Calls `ask` on the first of all items, the second of all, and so on, at most `concurrency` at once.

        Returns the answers in order.
        """
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            return list(pool.map(ask, *items))

    def request(self, path: str, body: object = None) -> bytes:
        """The answer to a POST of `body` as JSON, or to a GET if it is None."""
        data = None if body is None else json.dumps(body).encode()
        try:
            return self.retrying(self._once, path, data)
        except RetryError as failed:
            last = failed.last_attempt.exception()
            error = Unanswered(f"{last} ({self.settings.tries} tries)")
            error.passing = True
            raise error from None

    def _once(self, path: str, body: bytes | None) -> bytes:
        """One try, within `timeout` seconds in all, however slowly the server sends."""
        address, end = self.url + path, time.monotonic() + self.settings.timeout
        try:
            with self.client.stream("GET" if body is None else "POST", address, content=body) as response:
                data = bytearray()
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise Unanswered(f"an answer of over {MOST_BYTES >> 20} MiB")
                    if time.monotonic() > end:
                        raise Passing(f"no complete answer within {self.settings.timeout:g} s")
        except httpx.TimeoutException:
            raise Passing(f"no answer within {self.settings.timeout:g} s") from None
        except httpx.TransportError as error:
            raise Passing(f"{type(error).__name__}: {error}") from None
        except (httpx.DecodingError, httpx.InvalidURL) as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from None
        said = f"status {response.status_code}: {self.without_key(data)[:200]!r}"
        if response.status_code in PASSING:
            raise Passing(said, seconds(response.headers.get("retry-after")))
        if response.status_code in REFUSED:
            raise UserError(f"{self.where}: {address}{self.hint} answers with {said}")
        if response.status_code != 200:
            raise Unanswered(said)
        return bytes(data)

    def without_key(self, data: bytes | bytearray) -> str:
        """A server's message without the key, because it may repeat what it was sent."""
        text, variable = data.decode(errors="replace"), self.settings.key_variable
        return text.replace(os.environ.get(variable, ""), f"(the key of {variable})") if variable else text


def _asked_to_wait(state: RetryCallState) -> float:
    failed = state.outcome.exception() if state.outcome else None
    return failed.retry_after if isinstance(failed, Passing) else 0.0


def seconds(retry_after: str | None) -> float:
    """The seconds in the header Retry-After; 0 if there is none or it names a date."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0
