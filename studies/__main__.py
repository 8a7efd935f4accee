"""Runs a study: `python -m studies compare`. What is done already is not done again; what was interrupted goes on where it was.

Several stages run side by side, each with its share of the CPUs; every stage's output is in .cache/studies/<study>/.
"""

import os
import signal
import sys
import threading
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from tqdm import tqdm

from flows.graph import Stage, chosen, read_graph
from flows.process import Text, run_group
from g2rpo_core.config import load_study
from g2rpo_core.errors import UserError
from stages.common import stage as ends_in_one_line

CPUS = os.cpu_count() or 1


@ends_in_one_line
def main() -> None:
    parser = ArgumentParser(prog="python -m studies", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("study", help="a folder of studies/")
    parser.add_argument("--side-by-side", type=int, default=min(2, CPUS), help="stages at once (default: %(default)s)")
    args = parser.parse_args()
    study = load_study(args.study)
    stages = chosen(read_graph(), [f"studies/{study.study}/dvc.yaml:report"])
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    run_all(stages, max(1, args.side_by_side), Path(".cache", "studies", study.study), stop)
    print(f"report: {Path('studies', study.study, 'reports', 'report.html').resolve()}")


def run_all(stages: dict[str, Stage], side_by_side: int, logs: Path, stop: threading.Event) -> None:
    """Every stage that has changed or comes after one, after those it needs; UserError for the first that fails, or for `stop`."""
    todo: dict[str, Stage] = {}
    for name, stage in stages.items():
        if stage.changed or any(need in todo for need in stage.needs):
            todo[name] = stage
    running: dict[Future, str] = {}
    logs.mkdir(parents=True, exist_ok=True)
    with (
        ThreadPoolExecutor(side_by_side) as pool,
        tqdm(total=len(stages), initial=len(stages) - len(todo), unit="stage", desc=logs.name) as bar,
    ):
        try:
            while todo or running:
                for name, stage in list(todo.items()):
                    waiting = any(need in todo or need in running.values() for need in stage.needs)
                    if not waiting and len(running) < side_by_side:
                        del todo[name]
                        running[pool.submit(run_stage, name, CPUS // side_by_side or 1, logs, stop)] = name
                bar.set_postfix_str(", ".join(name.split(":")[-1] for name in running.values()))
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    future.result()
                    bar.update()
        except BaseException:
            stop.set()  # ends the others, which leave their checkpoints
            raise


def run_stage(name: str, threads: int, logs: Path, stop: threading.Event) -> None:
    """`dvc repro` of one stage; UserError with its last line where it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # a stage's `python` is this one
    log = logs / f"{name.split(':')[-1]}.log"
    last = []
    with log.open("w") as file:

        def write(text: Text) -> None:
            file.write(f"{text.text}\n")
            file.flush()
            if text.text.startswith("error: "):
                last.append(text.text.removeprefix("error: "))

        ended = run_group(
            [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", name],
            write, stop=stop, environment={**os.environ, "PATH": path, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
    if ended.by == "stop":
        raise UserError(f"{name}: stopped; the same command goes on where it was")
    if ended.status:
        raise UserError(f"{name}: {last[-1] if last else f'exit status {ended.status}'}; its output is in {log}")


if __name__ == "__main__":
    main()
