"""What `dvc repro` does, with two stages at a time where there is no GPU: on small models two processes of one thread beat one of two.

Every stage's output is in .cache/reproduce/<stage>.log.
"""

from pathlib import Path

from stages.common import arguments, ends_in_one_line
from stages.graph import read_graph
from stages.runner import CPUS, run_with_bar, stop_on_signals


@ends_in_one_line
def main() -> None:
    arguments(__doc__)
    import torch  # after --help, which need not wait for it

    side_by_side = 1 if torch.cuda.is_available() else min(2, CPUS)
    run_with_bar(read_graph(), side_by_side, Path(".cache", "reproduce"), stop_on_signals())


if __name__ == "__main__":
    main()
