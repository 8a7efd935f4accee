"""Stage `models`: builds every model of a profile (tiny) or downloads it from the hub, and writes their lock file."""

from pathlib import Path

from g2rpo_core.common.model_store import LOCK, write_lock
from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.files import write_json
from g2rpo_core.hub.download import REVISIONS, Revisions
from stages import allow_hub
from stages.common import arguments, ends_in_one_line, renewed, run_paths, sections

SECTIONS = ("numerics", "models")


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).models
    take("models", args.profile)
    revisions = Revisions(REVISIONS / "models.json")
    with renewed(Path("models", args.profile), LOCK) as root:
        if settings.source != "hub":
            from g2rpo_core.tiny_models.build import build_models

            entries, quality = build_models(root, settings)
        else:
            allow_hub()
            from g2rpo_core.hub.download import download_models

            entries, quality = download_models(settings, revisions), {}
        write_lock(root, entries)
    write_json(run_paths(args.profile, None).reports / "models.json", quality)


if __name__ == "__main__":
    main()
