"""The first block of every page works as printed on a fresh clone, after `make reproduce`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT
from tests.docs.commands import FENCE
from tests.fixtures.projects import FIT, fresh_clone, git

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
    *(ROOT / "docs" / name for name in ("rewards.md", "reward_servers.md", "flows.md")),
]
# Servers, a cluster, published weights, and what takes an hour: other tests run them
NOT_RUN = re.compile(
    r"^(make (reproduce|test|clean)|g2rpo (launch|serve-reward)|sbatch|tensorboard|prefect"
    r"|python -m (flows|studies run))\b|^\. \.cache/prefect|flux_hps_clip in params"
)


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line as a shell does whose environment is active; no browser opens."""
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "BROWSER": "true",
    }
    return subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=os.environ | own, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone with the report of profile `tiny`, which takes seconds here, committed."""
    folder = fresh_clone(tmp_path_factory.mktemp("clone"))
    (folder / ".venv").symlink_to(ROOT / ".venv")
    yaml, file = YAML(typ="safe", pure=True), folder / "profiles" / "tiny.yaml"
    profile = yaml.load(file)
    fits = [name for name, value in profile["models"].items() if isinstance(value, dict)]
    profile["models"] |= {"images": 64} | dict.fromkeys(fits, FIT)
    # Four steps teach nobody to answer in the words of a template
    del profile["models"]["unified_reward"], profile["rewards"]["unified_reward"]
    profile["evaluation"]["rewards"].remove("unified_reward")
    profile["evaluation"] |= {"steps": [2], "diversity": None}
    profile["prompts"] |= {"train_count": 8, "test_count": 6}
    profile["training"] |= {"iterations": 2, "num_generations": 2}
    profile["training"]["monitor"] |= {"every": 1, "prompts": 2}
    profile["methods"]["dance_grpo"]["training"] = {"iterations": 2}
    yaml.dump(profile, file)
    (folder / "dvc.lock").unlink()
    done = run("python -m pipeline.reproduce", folder)
    assert done.returncode == 0, done.stderr[-2000:]
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "made")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_first_block_of_a_page_works_as_printed(page, clone):
    block = next((text for language, text in FENCE.findall(page.read_text()) if not language), "")
    for line in block.splitlines():
        if not NOT_RUN.search(line):
            done = run(line, clone)
            assert done.returncode == 0, (line, done.stdout[-1000:], done.stderr[-2000:])
    git(clone, "checkout", "--quiet", ".")
