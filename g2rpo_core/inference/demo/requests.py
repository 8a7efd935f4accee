"""Refuse requests of the page that are larger than any that it sends, before Gradio parses them."""

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from g2rpo_core.rewards.limits import has_few_values

MOST_BYTES = 2**22  # a history of 30 long prompts takes half of it
MOST_VALUES = 10_000  # of its JSON; each takes Gradio some hundred bytes


class SmallRequests:
    """ASGI middleware that reads a request's whole body before it hands it on.

    It answers 413 to one of over MOST_BYTES bytes or MOST_VALUES values.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        data, more = bytearray(), True
        while more and len(data) <= MOST_BYTES:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            data += part.get("body", b"")
            more = part.get("more_body", False)
        if len(data) > MOST_BYTES or not has_few_values(data, MOST_VALUES):
            await PlainTextResponse("the request is too large", 413)(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(data), "more_body": False}]
        await self.app(scope, lambda: _next(whole, receive), send)


async def _next(whole: list[Message], receive: Receive) -> Message:
    """Return the body once, then what else the client does."""
    return whole.pop() if whole else await receive()
