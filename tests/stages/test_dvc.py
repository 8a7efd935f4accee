"""What stages ask DVC while others of its commands run on the same project."""

from threading import Timer

from dvc.repo import Repo

from stages.dvc import options_of

GRAPH = """
stages:
  train:
    matrix: {method: [first], seed: [1]}
    cmd: python -m stages.train --method ${item.method} --seed ${item.seed}
"""


def test_a_stage_is_read_only_when_no_other_command_writes_the_lock(tmp_path):
    """DVC empties dvc.lock before it writes it, and a run beside must not take that as unknown."""
    writer = Repo.init(str(tmp_path), no_scm=True)
    (tmp_path / "dvc.yaml").write_text(GRAPH)
    lock = tmp_path / "dvc.lock"

    def finish() -> None:
        lock.unlink()
        writer.lock.unlock()

    writer.lock.lock()
    lock.write_text("schema: '2.0'\nstages:\n  train@first-1:\n    cmd: [")
    timer = Timer(1.0, finish)
    timer.start()
    assert options_of("train@first-1", tmp_path) == {"method": "first", "seed": "1"}
    timer.join()
    assert options_of("train@first-2", tmp_path) == {}
