"""Stage `prompts`: the training and test prompts of a run, as Parquet."""

from pathlib import Path

from g2rpo_core.data.hub_prompts import fetch_prompts
from g2rpo_core.data.prompts import Prompt, choose, duplicates, held_out, read_prompts, shape_prompts, write_prompts
from g2rpo_core.data.settings import PromptSettings
from g2rpo_core.hub.revisions import Revisions
from stages import allow_hub
from stages.common import REVISIONS, arguments, ends_in_one_line, sections

SECTIONS = ("prompts",)


def all_prompts(settings: PromptSettings, *, testing: bool) -> list[Prompt]:
    """What one of the two sets is chosen from; UserError if its file is missing, empty or malformed."""
    source, count = (settings.test, settings.test_count) if testing else (settings.train, settings.train_count)
    if not isinstance(source, str):
        allow_hub()
        return fetch_prompts(f"prompts.{'test' if testing else 'train'}", source, Revisions(REVISIONS / "prompts.json"))
    return shape_prompts(count, settings.seed, testing=testing) if source == "shapes" else read_prompts(Path(source))


def chosen_prompts(settings: PromptSettings) -> tuple[list[Prompt], list[Prompt], int]:
    """The training prompts, the test prompts, and how many were left out of training as they are test prompts."""
    test = choose(all_prompts(settings, testing=True), settings.test_count, settings.seed)
    train, left_out = held_out(all_prompts(settings, testing=False), test)
    return choose(train, settings.train_count, settings.seed), test, left_out


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).prompts
    Revisions(REVISIONS / "prompts.json")  # DVC expects the file, also of a profile without data sets
    train, test, tested = chosen_prompts(settings)
    twice = {
        name: duplicates(Path(source))
        for name, source in (("train", settings.train), ("test", settings.test))
        if isinstance(source, str) and source != "shapes"
    }
    for name, prompts in (("train", train), ("test", test)):
        counts = {"twice": twice.get(name, 0), "test prompts": tested if name == "train" else 0}
        write_prompts(
            Path("prompts", args.profile, f"{name}.parquet"), prompts, {why: count for why, count in counts.items() if count}
        )
    also = f"; {tested} more were left out of training, as they are test prompts" if tested else ""
    also += f"; {sum(twice.values())} stood in the files twice" if sum(twice.values()) else ""
    print(f"{len(train)} train prompts, {len(test)} test prompts{also}")


if __name__ == "__main__":
    main()
