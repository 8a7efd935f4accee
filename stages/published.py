"""Stage `published`: the published or exported weights that params.yaml asks for, each with a lock file."""

from pathlib import Path

from g2rpo_core.config import load_run
from g2rpo_core.hub.published import fetch_published
from g2rpo_core.hub.revisions import Revisions
from stages import allow_hub
from stages.common import REVISIONS, arguments, ends_in_one_line, fresh, sections, write_json

SECTIONS = ("published",)


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).published
    root = fresh(Path("published", args.profile))
    revisions = Revisions(REVISIONS / "published.json")
    allow_hub()
    names = load_run().published
    for name in names:
        fetch_published(name, settings[name], root / name, revisions)
    write_json(root / "index.json", names)  # DVC warns of an empty folder


if __name__ == "__main__":
    main()
