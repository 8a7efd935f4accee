"""List the files to commit so that a colleague who pulls has the same results: `g2rpo share`.

These are the settings, the code and the reports that the stages of params.yaml read and write, and
dvc.lock. Reports of earlier profiles are not among them. `dvc push` sends the rest.
"""

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dvc.exceptions import DvcException
from dvc.repo import Repo, lock_repo

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo, reason, some
from g2rpo_core.tasks import TASK_NAMES
from pipeline.graph import explain
from pipeline.todo import due
from stages.entry import ends_in_one_line
from stages.paths import REPORTS

PROFILES = Path("profiles")
# Beside what stages declare: DVC's own files, and what stages keep from run to run
ALWAYS = (
    *map(Path, ("dvc.lock", "dvc.yaml", "params.yaml", ".dvc/config", ".dvcignore")),
    REPORTS / "machine.json",
    REPORTS / "revisions",
)


@ends_in_one_line
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="g2rpo share",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--add", action="store_true", help="also add them to git's index")
    add = parser.parse_args().add
    # Late, so that --help does not wait for torch
    from g2rpo_core.config import load_profile, load_run, profile_path

    run = load_run()
    prompts = load_profile(profile_path(run.profile)).prompts
    try:
        repo = Repo()
        with lock_repo(repo):
            stale = [stage.name for stage in due(repo)]
            needed = [*ALWAYS, *read_or_written(repo)]
    except DvcException as error:
        raise UserError(f"g2rpo share: {explain(error)}") from None
    if stale:
        raise UserError(
            f"profile {run.profile}: {some(stale)} would run for a colleague as well: dvc repro "
            "first; g2rpo todo says why"
        )
    needed += [
        Path(source)
        for source in (prompts.train, prompts.test)
        if isinstance(source, str) and source not in TASK_NAMES
    ]
    files = changed(needed)
    describe(run.profile, files, repo)
    if add and files:
        git("add", "--", *files)


def read_or_written(repo: Repo) -> Iterator[Path]:
    """Yield what stages read that no stage makes, and what they write outside DVC's cache."""
    stages = [stage for stage in repo.index.stages if stage.cmd]
    made = [path_of(out) for stage in stages for out in stage.outs]
    for stage in stages:
        yield from (path_of(out) for out in stage.outs if not out.use_cache)
        for path in map(path_of, stage.deps):
            if not any(path.is_relative_to(out) or out.is_relative_to(path) for out in made):
                yield path


def path_of(part: Any) -> Path:
    """Return the path of a dependency or output of DVC."""
    return Path(part.def_path)


def changed(paths: list[Path]) -> list[str]:
    """Return the files at these paths that differ from the last commit, new and removed ones too.

    Ignored files are left out. UserError if git cannot tell.
    """
    there = [str(path) for path in dict.fromkeys(paths)]
    tracked = git("diff", "--name-only", "--no-renames", "--relative", "-z", "HEAD", "--", *there)
    new = git("ls-files", "--others", "--exclude-standard", "-z", "--", *there)
    return sorted({*filter(None, (tracked + new).split("\0"))})


def git(*words: str) -> str:
    """Return what git prints; UserError in one line if it fails."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("g2rpo share: git is not installed") from None
    if done.returncode:
        raise UserError(f"g2rpo share: git {words[0]}: {reason(done.stderr)}")
    return done.stdout


def describe(profile: str, files: list[str], repo: Repo) -> None:
    """Print the files, what is wrong with leaving one out, and the commands that share the rest."""
    if not files:
        echo(f"profile {profile}: the last commit has every file that a colleague needs")
    else:
        echo(f"profile {profile}: commit these {len(files)} files (g2rpo share --add adds them)")
        echo(*(f"  {file}" for file in files))
    if others := [
        file for file in files if Path(file).parent == PROFILES and file not in chain_of(profile)
    ]:
        echo(
            f"{some(others)}: not used by profile {profile}, but the stage `profile` depends on "
            "the folder: without them it would run for a colleague; commit them, or move them away "
            "and run dvc repro profile"
        )
    remote = repo.config["core"].get("remote")
    first = "" if remote else "dvc remote add -d NAME URL, commit .dvc/config, then "
    echo(f"models, runs and evaluations: {first}dvc push; a colleague: git pull, then dvc pull")


def chain_of(profile: str) -> set[str]:
    """Return the files that a profile is read from: its own, and those that it extends."""
    from g2rpo_core.config import profile_path, resolve

    return {at.rpartition(":")[0] for at in resolve(profile_path(profile)).origin.values()}


if __name__ == "__main__":
    main()
