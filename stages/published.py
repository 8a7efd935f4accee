"""Stage `published`: fetches the weights that params.yaml names, checks them, writes their locks.

These are published or exported weights. Also of those that a method starts from (`training.start`),
in `start`: empty for the others, so that nothing of theirs changes.
"""

from pathlib import Path

from g2rpo_core.config import load_run
from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.files import write_json
from g2rpo_core.foundation.runs import start_of
from g2rpo_core.hub.download import REVISIONS, fetch
from g2rpo_core.hub.model_store import ModelStore, write_lock
from stages import allow_hub
from stages.entry import arguments, ends_in_one_line, sections
from stages.paths import renewed

SECTIONS = ("published", "training", "methods")
INDEX = "index.json"  # DVC warns of an empty folder


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings, run = sections(args, *SECTIONS), load_run()
    take("published", args.profile)
    allow_hub()
    pipeline = ModelStore(Path("models", args.profile)).folder("pipeline")
    starts = {method: settings.run(method).training.start for method in run.methods}
    with renewed(Path("published", args.profile), INDEX) as root:
        wanted = [(name, root / name) for name in run.published]
        wanted += [
            (name, start_of(root, method)) for method, name in starts.items() if name is not None
        ]
        for name, place in wanted:
            # Late: its packages take seconds to import, and mostly nothing is wanted
            from g2rpo_core.weights.stored import check_fits, choose

            model = settings.published[name]
            folder, entry = fetch(f"published.{name}", model, REVISIONS / "published.json", place)
            weights = choose(folder, [folder / file for file in entry["files"]], model.variant)
            check_fits(pipeline, weights)
            write_lock(place, {name: entry | {"weights": str(weights.relative_to(folder))}})
        for method, name in starts.items():
            if name is None:
                write_lock(start_of(root, method), {})
        write_json(root / INDEX, run.published)


if __name__ == "__main__":
    main()
