"""A small Hugging Face hub on loopback: trees, files with ranges, gates, and connections that break."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".pt", ".bin", ".model")  # files that the real hub keeps in large-file storage, named by SHA-256


@dataclass
class Repo:
    """One model repository at one revision. licensed: the token whose account has accepted its licence, where it is gated."""

    revision: str
    files: dict[str, Path]
    licensed: str | None = None


@dataclass
class SmallHub:
    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file: after how many bytes its next answers break off
    ranges: list[tuple[str, str | None]] = field(default_factory=list)  # of every file that was asked for

    def add(self, repo: str, revision: str, folder: Path, licensed: str | None = None) -> None:
        """Serves everything below `folder`."""
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        self.repos[repo] = Repo(revision, files, licensed)


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = SmallHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    @property
    def hub(self) -> SmallHub:
        return self.server.hub

    def answer(self, *, body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if len(parts) < 4:
            return self.refuse(404, "NotFound", "not a part of this hub")
        if parts[:2] == ["api", "models"]:
            name, action, revision = "/".join(parts[2:4]), parts[4], parts[5]
        else:
            name, action, revision = "/".join(parts[:2]), parts[2], parts[3]
        repo = self.hub.repos.get(name)
        if repo is None:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        if revision != repo.revision:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if action == "tree":
            return self.send(200, json.dumps([self.entry(path, file) for path, file in repo.files.items()]).encode(), body=body)
        path = "/".join(parts[4:])
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo.licensed and token != repo.licensed:
            return self.refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted")
        if path not in repo.files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        return self.send_file(repo, path, body=body)

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.send(status, json.dumps({"error": message}).encode(), body=self.command == "GET", **headers)

    def send(self, status: int, content: bytes, *, body: bool, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def send_file(self, repo: Repo, path: str, *, body: bool) -> None:
        content, asked = repo.files[path].read_bytes(), self.headers.get("Range")
        entry = self.entry(path, repo.files[path])
        headers = {"X-Repo-Commit": repo.revision, "ETag": f'"{entry.get("lfs", entry)["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
        if not body:
            return self.send(200, content, body=False, **headers)
        self.hub.ranges.append((path, asked))
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cuts = self.hub.cuts.get(path)
        if not cuts:
            return self.send(206 if asked else 200, content[start:], body=True, **headers)
        self.send(206 if asked else 200, content[start:], body=False, **headers)
        self.wfile.write(content[start : start + cuts.pop(0)])
        self.wfile.flush()
        self.close_connection = True

    @staticmethod
    def entry(path: str, file: Path) -> dict:
        content = file.read_bytes()
        oid = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry = {"type": "file", "path": path, "size": len(content), "oid": oid}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry
