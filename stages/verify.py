"""Which outputs of this checkout equal the committed dvc.lock; `python -m stages.verify`, or `make verify`.

On the machine that made the lock, all of them do. On others, sums may run in another order (threads, instructions); then weights
and scores differ in their last digits.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo, lock_repo

from g2rpo_core.common.dvc_lock import stages_in
from g2rpo_core.errors import UserError
from stages.common import ends_in_one_line
from stages.graph import of_dvc


@ends_in_one_line
def main() -> None:
    committed = committed_hashes()
    counts: Counter[str] = Counter()
    for path, found in current_hashes().items():
        state = "missing" if found is None else "equal" if found == committed.get(path) else "different"
        counts[state] += 1
        if state != "equal":
            print(f"{state:9} {path}")
    print(", ".join(f"{counts[state]} {state}" for state in ("equal", "different", "missing")))
    if counts["different"] or counts["missing"]:
        sys.exit(1)


def committed_hashes() -> dict[str, str]:
    """The hash of every output in the last commit's dvc.lock; UserError outside a git checkout."""
    done = subprocess.run(["git", "show", "HEAD:./dvc.lock"], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{Path.cwd()}: no committed dvc.lock to compare with: {done.stderr.strip()}")
    stages = stages_in(done.stdout, Path("HEAD:dvc.lock")).values()
    return {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", [])}


def current_hashes() -> dict[str, str | None]:
    """The hash of every output of the pipeline on disk; None if it is missing."""
    try:
        repo = Repo()
        with lock_repo(repo):
            outs = [out for stage in repo.index.stages if stage.cmd for out in stage.outs]
            return {str(out.def_path): out.get_hash().value if out.exists else None for out in outs}
    except DvcException as error:
        raise UserError(of_dvc(error)) from None


if __name__ == "__main__":
    main()
