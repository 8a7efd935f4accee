"""Stage `prompts`: the training and test prompts of a run, as Parquet."""

from dataclasses import dataclass
from pathlib import Path

from g2rpo_core.data.hub_prompts import fetch_prompts
from g2rpo_core.data.prompts import Prompt, captions, choose, distinct, held_out, read_all, write_prompts
from g2rpo_core.data.settings import PromptSettings
from g2rpo_core.errors import UserError
from g2rpo_core.hub.revisions import Revisions
from g2rpo_core.worlds.names import WORLD_NAMES
from stages import allow_hub
from stages.common import REVISIONS, arguments, ends_in_one_line, sections

SECTIONS = ("prompts",)


@dataclass(frozen=True)
class Chosen:
    """The prompts of a run, and how many were left out.

    as_test: training prompts left out because they are test prompts; repeated: prompts left out of each set because their text
    repeats.
    """

    train: list[Prompt]
    test: list[Prompt]
    as_test: int
    repeated: dict[str, int]


def all_prompts(settings: PromptSettings, *, testing: bool) -> list[Prompt]:
    """The prompts that one of the two sets is chosen from, with a file's repeats; `test_skip` is not looked at in files.

    UserError if they are missing, empty or malformed.
    """
    source, count = (settings.test, settings.test_count) if testing else (settings.train, settings.train_count)
    if not isinstance(source, str):
        allow_hub()
        return fetch_prompts(f"prompts.{'test' if testing else 'train'}", source, Revisions(REVISIONS / "prompts.json"))
    if source not in WORLD_NAMES:
        return read_all(Path(source))
    seen = captions(source, settings.test_skip, settings.seed, testing=True) if testing else []
    return captions(source, count, settings.seed, testing=testing, without={prompt.text for prompt in seen})


def unseen(prompts: list[Prompt], settings: PromptSettings) -> list[Prompt]:
    """A file's test prompts without the draw of `test_skip` of them; UserError if none is left."""
    if settings.test in WORLD_NAMES or not settings.test_skip:
        return prompts
    seen = {prompt.id for prompt in choose(prompts, settings.test_skip, settings.seed)}
    left = [prompt for prompt in prompts if prompt.id not in seen]
    if not left:
        raise UserError(f"prompts.test_skip: {settings.test_skip} leaves none of the {len(prompts)} test prompts")
    return left


def chosen_prompts(settings: PromptSettings) -> Chosen:
    """The prompts by the settings' seeded draws; errors as in `all_prompts`, and UserError if no training prompt is left."""
    found = {name: all_prompts(settings, testing=name == "test") for name in ("test", "train")}
    once = {name: distinct(prompts) for name, prompts in found.items()}
    test = choose(unseen(once["test"], settings), settings.test_count, settings.seed)
    train, as_test = held_out(once["train"], test)
    repeated = {name: len(found[name]) - len(once[name]) for name in found}
    return Chosen(choose(train, settings.train_count, settings.seed), test, as_test, repeated)


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).prompts
    Revisions(REVISIONS / "prompts.json")  # DVC expects the file, even for a profile without data sets
    chosen = chosen_prompts(settings)
    for name, prompts, as_test in (("train", chosen.train, chosen.as_test), ("test", chosen.test, 0)):
        counts = {"twice": chosen.repeated[name], "test prompts": as_test}
        write_prompts(
            Path("prompts", args.profile, f"{name}.parquet"), prompts, {why: count for why, count in counts.items() if count}
        )
    repeated = sum(chosen.repeated.values())
    also = f"; {chosen.as_test} more were left out of training because they are test prompts" if chosen.as_test else ""
    also += f"; {repeated} repeats in the files were left out" if repeated else ""
    print(f"{len(chosen.train)} train prompts, {len(chosen.test)} test prompts{also}")


if __name__ == "__main__":
    main()
