"""Goes back to the committed results, and loses nothing: `g2rpo back`.

git's stash takes what is not committed, and DVC's cache has all outputs, so that both states can be
had again. Nothing is changed where that is not so.
"""

import argparse
import subprocess
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from g2rpo_core.foundation.errors import UserError
from pipeline.cached import is_stored
from pipeline.graph import explain
from stages.entry import ends_in_one_line

KEEP = "git add dvc.lock reports && git commit"


@ends_in_one_line
def main() -> None:
    argparse.ArgumentParser(
        prog="g2rpo back", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        go_back(Repo())
    except DvcException as error:
        raise UserError(f"g2rpo back: {explain(error)}") from None


def go_back(repo: Repo) -> None:
    """Restore what HEAD has; UserError, and nothing is changed, if it cannot be had or what is here could not be had again."""
    if missing := missing_of_commit(repo):
        raise UserError(
            "the cache has no "
            f"{missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''} as committed "
            "(another machine made "
            f"them): nothing was changed; to compare with your own results from now on: {KEEP}"
        )
    state = repo.data_status()
    unstored = [
        *state["uncommitted"].get("modified", []),
        *state["uncommitted"].get("added", []),
        *state["not_in_cache"],
    ]
    if unstored := [path for path in unstored if Path(path).exists()]:
        raise UserError(
            f"{unstored[0]} is not in DVC's cache as it is now, so it could not be had again: "
            "nothing was changed; keep it by `dvc commit`, or remove it"
        )
    changed = git("status", "--porcelain", "--untracked-files=no").strip()
    if changed:
        git("stash", "push", "--message", "before g2rpo back")
    subprocess.run(["dvc", "checkout", "--quiet"], check=True)
    print(f"back at {git('log', '-1', '--format=%h %s').strip()}")
    if changed:
        print("what was here is kept; to have it again: git stash pop && dvc checkout")


def missing_of_commit(repo: Repo) -> list[str]:
    """Return the outputs of HEAD's dvc.lock that neither git nor the local cache has."""
    tracked = git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    try:
        stages = YAML(typ="safe", pure=True).load(git("show", "HEAD:dvc.lock"))["stages"]
        outputs = [out for stage in stages.values() for out in stage.get("outs", [])]
        return [
            out["path"]
            for out in outputs
            if out["path"] not in tracked and not is_stored(Path(repo.cache.local.path), out["md5"])
        ]
    except (YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"g2rpo back: HEAD:dvc.lock is no lock of DVC ({type(error).__name__}: {error})"
        ) from None


def git(*words: str) -> str:
    """Run git and return what it prints; UserError with its last line if it fails."""
    done = subprocess.run(["git", *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"g2rpo back: git {words[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
