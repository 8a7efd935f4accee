"""A server of chat completions on loopback that answers as a test tells it to, and keeps what it was asked."""

import base64
import io
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image


@dataclass
class Request:
    body: dict
    headers: dict
    number: int  # how many requests with this question came before

    @property
    def question(self) -> str:
        return self.body["messages"][0]["content"][1]["text"]

    @property
    def picture(self) -> Image.Image:
        url = self.body["messages"][0]["content"][0]["image_url"]["url"]
        return Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))


@dataclass
class Served:
    url: str
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


Reply = tuple[int, dict, bytes] | None  # status, headers and body; None cuts the connection


def completion(text: object, finish_reason: str = "stop") -> Reply:
    body = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}
    return 200, {}, json.dumps(body).encode()


@contextmanager
def serve(reply: Callable[[Request], Reply]):
    """A server whose every answer is `reply(request)`."""
    served = Served("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                question = body["messages"][0]["content"][1]["text"]
                request = Request(body, dict(self.headers), sum(one.question == question for one in served.requests))
                served.requests.append(request)
                served.now += 1
                served.most_at_once = max(served.most_at_once, served.now)
            try:
                answer = reply(request) if self.path == "/v1/chat/completions" else (404, {}, b"no such path")
            finally:
                with served.lock:
                    served.now -= 1
            if answer is None:
                self.connection.close()
                return
            status, headers, data = answer
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # a client that has stopped waiting is what some tests are about

    with Server(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
