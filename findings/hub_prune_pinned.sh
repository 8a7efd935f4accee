#!/usr/bin/env bash
# huggingface_hub 2.4.0, `hf cache prune`: "remove detached revisions and incomplete downloads".
# Detached is what no branch or tag in the cache leads to, and a download by commit writes none: whoever pins a revision by its
# full commit, as one should, has a cache that is garbage to `prune`, in use or not. The same files by branch are kept.
# Seen: downloaded by commit -> gone after prune; by branch -> there.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/hub.py" <<'PYTHON'
"""Download a file of a hub on loopback by the revision that is given."""
import hashlib, http.server, json, os, sys, threading

CONTENT, COMMIT = b'{"layers": 2}', "0" * 40
OID = hashlib.sha1(f"blob {len(CONTENT)}\0".encode() + CONTENT).hexdigest()
FILE = {"type": "file", "path": "config.json", "size": len(CONTENT), "oid": OID}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "/tree/" in self.path:
            return self.answer(json.dumps([FILE]).encode())
        if "/resolve/" in self.path:
            return self.answer(CONTENT)
        return self.answer(json.dumps({"id": "somebody/model", "sha": COMMIT, "siblings": [], "tags": []}).encode())

    do_HEAD = do_GET

    def answer(self, body):
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), "ETag": f'"{OID}"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
from huggingface_hub import snapshot_download

snapshot_download("somebody/model", revision={"commit": COMMIT, "branch": "main"}[sys.argv[1]])
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check huggingface_hub==2.4.0
export HF_HUB_DISABLE_PROGRESS_BARS=1 HF_HUB_DISABLE_UPDATE_CHECK=1 HF_HUB_DISABLE_TELEMETRY=1
for by in commit branch; do
  export HF_HOME="$work/home-$by"
  "$work/venv/bin/python" "$work/hub.py" "$by"
  "$work/venv/bin/hf" cache prune --yes >/dev/null 2>&1
  echo "downloaded by $by: after prune $(find "$HF_HOME/hub" -path '*/snapshots/*' -name config.json | wc -l) of 1 file is there" | tee -a "$work/seen"
done
diff "$work/seen" - <<'EXPECTED'
downloaded by commit: after prune 0 of 1 file is there
downloaded by branch: after prune 1 of 1 file is there
EXPECTED
