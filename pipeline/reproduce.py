"""Does what `dvc repro` does, with up to four stages at a time where there is no GPU.

On small models, processes of one thread each are faster than one process of many.

Every stage's output is in .cache/reproduce/<stage>.log.
"""

from pathlib import Path

from g2rpo_core.foundation.claims import take
from pipeline.graph import read_graph
from pipeline.runner import SIDE_BY_SIDE, run_with_bar, stop_on_signals
from stages.entry import arguments, ends_in_one_line


@ends_in_one_line
def main() -> None:
    arguments(__doc__)
    # Late, so that --help does not wait for torch
    import torch

    take("reproduce", Path.cwd().name)
    side_by_side = 1 if torch.cuda.is_available() else SIDE_BY_SIDE
    run_with_bar(read_graph(), side_by_side, Path(".cache", "reproduce"), stop_on_signals())


if __name__ == "__main__":
    main()
