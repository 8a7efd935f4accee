"""Stage `models`: builds the models of a profile (tiny) or downloads them, and locks them."""

from pathlib import Path

from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.files import write_json
from g2rpo_core.hub import made
from g2rpo_core.hub.download import REVISIONS, download_models
from g2rpo_core.hub.model_store import LOCK, QUALITY, write_lock
from stages import allow_hub
from stages.entry import arguments, ends_in_one_line, sections
from stages.paths import model_folders, renewed, run_paths
from stages.versions import version_of

SECTIONS = ("numerics", "models")


@ends_in_one_line
def main() -> None:
    from g2rpo_core.numerics.portable import in_use  # late, so that --help does not wait for torch

    args = arguments(__doc__, "profile", "study")
    settings, paths = sections(args, *SECTIONS).models, run_paths(args.profile, args.study)
    take("models", paths.name)
    folder, key = model_folders(args)[0], made.key_of(settings, [], in_use(), version_of("models"))
    with renewed(folder, LOCK) as root:
        if settings.source == "hub":
            allow_hub()
            entries = download_models(settings.repos, REVISIONS / "models.json", root)
            write_json(root / QUALITY, {})
            write_lock(root, entries)
        elif not made.reuse(key, root):
            from g2rpo_core.tiny_models.build import build_models

            entries, quality = build_models(
                root, settings, Path(".cache", "resume", "models", paths.name, key)
            )
            write_json(root / QUALITY, quality)
            write_lock(root, entries)
    if settings.source != "hub":
        made.note(key, folder)


if __name__ == "__main__":
    main()
