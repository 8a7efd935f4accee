import os
import subprocess
import sys
import threading

import psutil
import pytest

from pipeline.process import Lines, Text, run_group
from pipeline.runner import check_blockers
from tests.fixtures.errors import refused
from tests.fixtures.waiting import HUNG, until


def texts(*parts: bytes) -> list[Text]:
    lines = Lines()
    return [
        text
        for index, part in enumerate(parts)
        for text in lines.feed(part, final=index == len(parts) - 1)
    ]


@pytest.mark.parametrize("cut", (7, 23))
def test_lines_and_redrawn_bars_are_told_apart_wherever_the_bytes_are_cut(cut):
    data = "eins\r\n 1%|ü\r 2%|\r 3%|\nend".encode()
    assert texts(data[:cut], data[cut:], b"") == [
        Text("eins", False),
        Text(" 1%|ü", True),
        Text(" 2%|", True),
        Text(" 3%|", False),
        Text("end", False),
    ]


@pytest.mark.pipeline
def test_a_group_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path):
    stop, seen, ends = threading.Event(), [], []
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', "
        "flush=True); time.sleep(1000)"
    )

    def run() -> None:
        ends.append(run_group([sys.executable, "-c", code], seen.append, stop=stop, grace=0.5))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: seen)
    stop.set()
    thread.join()
    assert (ends[0].status, ends[0].by) == (-9, "stop")


@pytest.mark.pipeline
def test_a_stop_ends_a_group_whose_output_is_stuck_on_its_way(tmp_path):
    """As when the server that shows the output does not answer."""
    stop, stuck, go_on, ends = threading.Event(), threading.Event(), threading.Event(), []
    last_words = tmp_path / "checkpoint"
    script = f"trap 'echo done > {last_words}; exit 143' TERM; echo 1; while :; do sleep 0.1; done"

    def show(text: Text) -> None:
        stuck.set()
        assert go_on.wait(HUNG)

    thread = threading.Thread(
        target=lambda: ends.append(run_group(["sh", "-c", script], show, stop=stop))
    )
    thread.start()
    assert stuck.wait(HUNG)
    stop.set()
    try:
        until(last_words.exists)
    finally:
        go_on.set()
        thread.join()
    assert (ends[0].status, ends[0].by) == (143, "stop")


@pytest.mark.pipeline
def test_a_time_limit_ends_every_process_and_waits_for_the_one_that_still_writes(tmp_path):
    last_words = tmp_path / "checkpoint"
    script = f"trap 'sleep 0.5; echo done > {last_words}; exit 143' TERM; sleep 1000 & wait"
    seen = []
    # the leader dies at once, as dvc does; its child takes its time
    ended = run_group(
        ["sh", "-c", f'sh -c "{script}" & wait'],
        seen.append,
        stop=threading.Event(),
        time_limit=0.5,
    )
    assert ended.by == "time limit"
    assert last_words.read_text() == "done\n"


def test_a_lock_of_what_is_no_dvc_is_not_waited_for(tmp_path):
    said = "  (PID {}): /lib/dvc/__main__.py repro --single-item train"
    with subprocess.Popen(["sleep", "1000"]) as other:
        waits = f"rwlock: DVC waits for process {other.pid} .*`/lib/dvc.*, but that "
        with refused(f"{waits}is `sleep 1000` by now: if no other machine .* delete this file"):
            check_blockers([said.format(other.pid)], tmp_path)
        other.kill()
        until(lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE)
        with refused(f"{waits}has ended"):
            check_blockers([said.format(other.pid)], tmp_path)
    check_blockers([said.format(other.pid)], tmp_path)  # DVC sees that itself
    own = " ".join(psutil.Process().cmdline()[2:])
    check_blockers([f"  (PID {os.getpid()}): /lib/dvc/__main__.py {own}"], tmp_path)
