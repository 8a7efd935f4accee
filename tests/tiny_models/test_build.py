import sys
import time

import psutil
import pytest

from tests.fixtures.waiting import HUNG

BUILD = """
from pathlib import Path
from g2rpo_core.tiny_models.build import build_models
from g2rpo_core.tiny_models.settings import BuiltModels
if __name__ == "__main__":
    how = dict(steps=10**6, batch=1, learning_rate=1e-3)
    build_models(Path("built"), BuiltModels(source="shapes", seed=0, images=8, vae=how, flux=how, hps=how))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
@pytest.mark.slow
def test_a_build_that_is_killed_leaves_no_process_behind(tmp_path):
    (tmp_path / "build.py").write_text(BUILD)
    with open(tmp_path / "said", "wb") as said:
        build = psutil.Popen([sys.executable, "build.py"], cwd=tmp_path, stderr=said)
    started: list[psutil.Process] = []
    try:
        while b"vae:" not in (tmp_path / "said").read_bytes():
            assert build.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        started[:] = build.children(recursive=True)
        assert len(started) >= 2
        build.kill()
        assert psutil.wait_procs(started, timeout=HUNG)[1] == []
    finally:
        for process in [build, *started]:
            if process.is_running():
                process.kill()
