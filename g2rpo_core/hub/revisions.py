"""The commits of repositories that a profile does not pin: looked up once, and kept in a file under version control."""

import json
from collections.abc import Callable
from pathlib import Path

from g2rpo_core.files import read_json


class Revisions:
    """Repository -> full commit, from the committed JSON file `file` (empty if it does not exist).

    A repository that is not in it is looked up on the hub at its first use and written into the file at once, so that everyone
    who runs the same checkout later gets the same files. Delete its line to move to a newer commit.
    """

    def __init__(self, file: Path):
        self.file = file
        again = f"restore it with `git checkout {file}`, or delete it to look its commits up again"
        self.known: dict[str, str] = read_json(file, again, dict) if file.exists() else {}
        self._write()

    def of(self, repo: str, newest: Callable[[], str]) -> str:
        """The commit of a repository; newest: asks the hub for that of its main branch."""
        if repo not in self.known:
            self.known[repo] = newest()
            print(f"{repo}: no revision in the profile; {self.known[repo]} is now in {self.file}: commit that file")
            self._write()
        return self.known[repo]

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n")
