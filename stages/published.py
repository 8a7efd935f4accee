"""Stage `published`: fetches the published or exported weights that params.yaml names, each with a lock file."""

from pathlib import Path

from g2rpo_core.config import load_run
from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.files import write_json
from g2rpo_core.hub.download import REVISIONS, Revisions, fetch_published
from stages import allow_hub
from stages.common import arguments, ends_in_one_line, renewed, sections

SECTIONS = ("published",)
INDEX = "index.json"  # DVC warns of an empty folder


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).published
    take("published", args.profile)
    revisions = Revisions(REVISIONS / "published.json")
    allow_hub()
    names = load_run().published
    with renewed(Path("published", args.profile), INDEX) as root:
        for name in names:
            fetch_published(name, settings[name], root / name, revisions)
        write_json(root / INDEX, names)


if __name__ == "__main__":
    main()
