"""Does what `dvc repro` does, with up to four stages at a time where there is no GPU.

On small models, processes of one thread each are faster than one process of many.

Every stage's output is in .cache/reproduce/<stage>.log.
"""

import sys
from pathlib import Path

from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.texts import echo
from pipeline.graph import read_graph
from pipeline.runner import SIDE_BY_SIDE, run_with_bar, stop_on_signals
from stages.entry import arguments, ends_in_one_line


@ends_in_one_line
def main() -> None:
    arguments(__doc__)
    # Late, so that --help does not wait for torch
    import torch

    from g2rpo_core.config import load_profile, load_run, profile_path
    from g2rpo_core.numerics.probe import check_machine

    if load_profile(profile_path(load_run().profile)).numerics == "portable":
        echo(check_machine(), file=sys.stderr)

    take("reproduce", Path.cwd().name)
    side_by_side = 1 if torch.cuda.is_available() else SIDE_BY_SIDE
    run_with_bar(read_graph(), side_by_side, Path(".cache", "reproduce"), stop_on_signals())


if __name__ == "__main__":
    main()
