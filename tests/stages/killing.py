"""Run by test_resume: trains in forked processes of one that has everything imported, and ends them at seeded moments.

python -m tests.stages.killing SEED    (in a project's folder; prints what was done as JSON)
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import stages.train
from g2rpo_core import checkpoint

RUN, SCRATCH = Path("runs/small/g2rpo-1"), checkpoint.SCRATCH / "train" / "small" / "g2rpo-1"


def start(prepare=lambda: None) -> int:
    """A process that runs the stage; `prepare` is called in it first."""
    child = os.fork()
    if child:
        return child
    sys.argv = ["train", "--profile", "small", "--method", "g2rpo", "--seed", "1"]
    code = 99
    try:
        prepare()
        stages.train.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        if code == 99:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def end(child: int) -> int:
    """Exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_in_write(count: int) -> None:
    """SIGKILL inside the `count`-th write of a checkpoint: its content is there, its name is not yet."""
    fsync, left = os.fsync, [count]

    def dying(file):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)

    checkpoint.os.fsync = dying


def main() -> None:
    rng, kills, in_write = random.Random(int(sys.argv[1])), 0, 0
    begun = time.monotonic()
    assert end(start()) == 0
    duration = time.monotonic() - begun
    assert not SCRATCH.exists()
    RUN.rename("whole")
    rounds = []
    while kills < 10 or not in_write:
        shutil.rmtree(RUN, ignore_errors=True)  # as DVC does before a stage
        if not in_write:
            assert end(start(lambda: die_in_write(2))) == -signal.SIGKILL
            assert list(SCRATCH.glob("*.part")) and list(SCRATCH.glob("*.pt"))
            in_write = 1
            continue
        child = start()
        deadline = time.monotonic() + rng.uniform(0.2, 1.1) * duration
        while time.monotonic() < deadline and (done := os.waitpid(child, os.WNOHANG))[0] == 0:
            time.sleep(0.01)
        if done[0] == 0:
            os.kill(child, signal.SIGKILL)
            if end(child) == -signal.SIGKILL:
                kills += 1
                continue
        rounds.append(os.waitstatus_to_exitcode(done[1]) if done[0] else 0)
        RUN.rename(f"resumed-{len(rounds)}")
    while True:  # what is left unfinished is finished, once ended politely
        child = start()
        time.sleep(0.7 * duration)
        os.kill(child, signal.SIGTERM)
        code = end(child)
        polite = code == 128 + signal.SIGTERM
        if polite:
            assert list(SCRATCH.glob("*.pt"))
            assert end(start()) == 0
        RUN.rename(f"resumed-{len(rounds) + 1}")
        break
    print(json.dumps({"kills": kills, "in_write": in_write, "rounds": rounds, "term": code, "left": SCRATCH.exists()}))


if __name__ == "__main__":
    main()
