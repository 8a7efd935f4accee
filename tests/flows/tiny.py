"""A repository with a small graph of cheap real stages, for what the flows do with any graph."""

import os
from pathlib import Path

from tests.conftest import ROOT
from tests.fixtures.projects import init

# a training as the flows see one: a progress bar, and on SIGTERM a checkpoint and exit status 143
TRAIN = """
import signal, sys, time
from pathlib import Path
from tqdm import tqdm

def end(number, frame):
    time.sleep(1)
    Path("checkpoint").write_text(str(done))
    sys.exit(143)

done = 0
signal.signal(signal.SIGTERM, end)
Path("started").touch()
for done in tqdm(range(3000), desc="g2rpo-1", mininterval=0):
    time.sleep(0.1)
    if Path("enough").exists():
        break
Path("weights").write_text("w")
"""
# fails with the status of what can pass, twice
FLAKY = """
import sys
from pathlib import Path

tries = Path("tries")
count = int(tries.read_text()) + 1 if tries.exists() else 1
tries.write_text(str(count))
print(f"try {count}")
if count < 3:
    sys.exit(75)
Path("flaky_out").write_text("o")
"""
STAGES = """
stages:
  first:
    cmd: echo one > one
    outs: [one]
  second:
    matrix: {name: [a, b]}
    cmd: cat one > two_${item.name}
    deps: [one]
    outs: ["two_${item.name}"]
    meta: {flow: {tags: [gpu]}}
  train:
    matrix: {name: [g2rpo-1]}
    cmd: python train.py
    outs: [weights]
  evaluate:
    matrix: {name: [g2rpo-1]}
    cmd: cat weights > scores
    deps: [weights]
    outs: [scores]
  evaluate_base:
    cmd: mkdir -p reports/metrics && echo '{"hps":0.25}' > reports/metrics/base-0.json
    outs: [reports/metrics/base-0.json]
  flaky:
    cmd: python flaky.py
    outs: [flaky_out]
    meta: {flow: {retries: 3, retry_delay: 0.1}}
  broken:
    cmd: echo no such prompt && exit 1
    outs: [broken_out]
    meta: {flow: {retries: 3, retry_delay: 0.1}}
  after_broken:
    cmd: cat broken_out > never
    deps: [broken_out]
    outs: [never]
  endless:
    cmd: sleep 1000 & sleep 1000
    outs: [endless_out]
    meta: {flow: {time_limit: 2}}
"""


def repository(folder: Path) -> Path:
    """A git and DVC repository in `folder` with that graph."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"dvc.yaml": STAGES, "train.py": TRAIN, "flaky.py": FLAKY}.items():
        (folder / name).write_text(text)
    init(folder)
    return folder


def environment(**more: str) -> dict[str, str]:
    """Of every process that a test starts: the project's packages."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DVC_NO_ANALYTICS": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }
