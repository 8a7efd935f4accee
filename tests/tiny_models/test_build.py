"""A build that is killed: nothing of it runs on, and what was whole is used."""

import sys

import psutil
import pytest

from g2rpo_core.foundation.runs import hash_of
from tests.fixtures.waiting import HUNG, until

BUILD = """
import sys
from pathlib import Path
from g2rpo_core.tiny_models.build import build_models
from g2rpo_core.tiny_models.settings import BuiltModels
if __name__ == "__main__":
    how = dict(batch=1, learning_rate=1e-3)
    named = zip(("vae", "flux", "hps"), sys.argv[2:])
    fits = {name: how | {"steps": int(steps)} for name, steps in named}
    built = BuiltModels(source="shapes", seed=0, images=8, **fits)
    build_models(Path(sys.argv[1]), built, Path("parts"))
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's"
)
@pytest.mark.slow
def test_a_killed_build_leaves_no_process_and_goes_on_with_what_was_whole(tmp_path):
    (tmp_path / "build.py").write_text(BUILD)

    def build(name: str, *steps: int) -> psutil.Popen:
        return psutil.Popen([sys.executable, "build.py", name, *map(str, steps)], cwd=tmp_path)

    first = build("stopped", 10**6, 1, 2)
    started: list[psutil.Process] = []
    try:
        until((tmp_path / "parts" / "hps.json").exists, running=[first])
        started[:] = first.children(recursive=True)
        assert len(started) >= 2
        first.kill()
        assert psutil.wait_procs(started, timeout=HUNG)[1] == []
    finally:
        for process in [first, *started]:
            if process.is_running():
                process.kill()
    of_hps = lambda folder: {
        file.name: file.stat().st_mtime_ns for file in (tmp_path / folder / "hps").iterdir()
    }
    assert not (tmp_path / "stopped").exists()
    before = of_hps("parts/hps")
    for name in ("again", "at_once"):
        assert build(name, 1, 1, 2).wait(timeout=HUNG) == 0
    assert of_hps("again") == before != of_hps("at_once")
    assert (
        hash_of(tmp_path / "again") == hash_of(tmp_path / "at_once")
        and not (tmp_path / "parts").exists()
    )
