#!/usr/bin/env bash
# huggingface_hub 1.31.0 and 2.4.0, hf-xet 1.8.0: what the link of a downloaded snapshot leads to.
# Up to 1.31.0 a large file's link leads to a file that is named by the file's SHA-256, and code in the wild takes that name for
# its published hash. From 1.32.0 on, a file in Xet storage leads on to a store that all repositories of the cache share, whose
# names are Xet hashes: as long, as hexadecimal, and not the SHA-256. What is published stands in the cached list of the commit.
# Seen: 1.31.0 -> sha256; 2.4.0 -> xet; by both, lfs_sha256 in trees/COMMIT.json -> sha256.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Download one Xet file from a hub on loopback, and say what its link is named by."""
import hashlib, http.server, json, os, sys, threading, time
from pathlib import Path

CONTENT, COMMIT, XET = bytes(range(256)) * 200, "0" * 40, "ab" * 32
SHA256 = hashlib.sha256(CONTENT).hexdigest()
size = len(CONTENT).to_bytes(3, "little")
CHUNKS = b"\0" + size + b"\0" + size + CONTENT  # one chunk: version, size, uncompressed, size again
FILE = {"type": "file", "path": "model.safetensors", "size": len(CONTENT), "oid": "1" * 40, "xetHash": XET}
FILE["lfs"] = {"oid": SHA256, "size": len(CONTENT), "pointerSize": 130}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = os.environ["HF_ENDPOINT"]
        if "/tree/" in self.path:
            return self.answer(json.dumps([FILE]).encode())
        if "/xet-read-token/" in self.path:
            about = {"Cas-Url": url, "Access-Token": "t", "Token-Expiration": str(int(time.time()) + 999)}
            return self.answer(b"{}", {f"X-Xet-{name}": value for name, value in about.items()})
        if "/v1/reconstructions/" in self.path:
            whole = {"start": 0, "end": 1}
            part = {"range": whole, "url": f"{url}/chunks", "url_range": {"start": 0, "end": len(CHUNKS) - 1}}
            term = {"hash": XET, "unpacked_length": len(CONTENT), "range": whole}
            return self.answer(json.dumps({"offset_into_first_range": 0, "terms": [term], "fetch_info": {XET: [part]}}).encode())
        if self.path == "/chunks":
            return self.answer(CHUNKS, {"Content-Range": f"bytes 0-{len(CHUNKS) - 1}/{len(CHUNKS)}"}, 206)
        return self.answer(b"{}", status=404)

    def answer(self, body, headers={}, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": sys.argv[1], "HF_HUB_DISABLE_TELEMETRY": "1"}
import huggingface_hub

folder = Path(huggingface_hub.snapshot_download("somebody/model", revision=COMMIT))
assert (folder / "model.safetensors").read_bytes() == CONTENT
name = {SHA256: "sha256", XET: "xet"}.get((folder / "model.safetensors").resolve().name, "another")
listed = json.loads(Path(folder.parents[1], "trees", f"{COMMIT}.json").read_text())["files"]["model.safetensors"]["lfs_sha256"]
print(f"huggingface_hub {huggingface_hub.__version__}: the link leads to a file named by {name}, the list has {'sha256' if listed == SHA256 else 'another'}")
PYTHON
for version in 1.31.0 2.4.0; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install --quiet --disable-pip-version-check "huggingface_hub==$version" hf-xet==1.8.0
  HF_HUB_DISABLE_PROGRESS_BARS=1 "$work/$version/bin/python" "$work/look.py" "$work/home-$version" | tee -a "$work/seen"
done
diff "$work/seen" - <<'EXPECTED'
huggingface_hub 1.31.0: the link leads to a file named by sha256, the list has sha256
huggingface_hub 2.4.0: the link leads to a file named by xet, the list has sha256
EXPECTED
