"""Stage `models`: every model of a profile, built here (tiny) or downloaded from the hub, and their lock file."""

import os
from pathlib import Path

from g2rpo_core.config import load_run
from g2rpo_core.model_store import write_lock
from stages import HUB_OFFLINE_BY_USER
from stages.common import REPORTS, arguments, fresh, sections, stage, write_json

SECTIONS = ("models",)


@stage
def main() -> None:
    args = arguments(__doc__, "profile")
    load_run()  # the first stage of all: a mistake in params.yaml ends here, before any work
    settings = sections(args, *SECTIONS).models
    root = fresh(Path("models", args.profile))
    if settings.source == "shapes":
        from g2rpo_core.shapes.build import build_models

        entries, quality = build_models(root, settings)
    else:
        if HUB_OFFLINE_BY_USER is None:
            os.environ["HF_HUB_OFFLINE"] = "0"
        from g2rpo_core.hub import download_models

        entries, quality = download_models(settings), {}
    write_lock(root, entries)
    write_json(REPORTS / "metrics" / "models.json", quality)


if __name__ == "__main__":
    main()
