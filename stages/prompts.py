"""Stage `prompts`: the training and test prompts of a run, as Parquet."""

from pathlib import Path

from g2rpo_core.data.prompts import Prompt, choose, read_prompts, shape_prompts, write_prompts
from g2rpo_core.data.settings import PromptSettings
from stages.common import arguments, ends_in_one_line, sections

SECTIONS = ("prompts",)


def chosen_prompts(settings: PromptSettings, *, testing: bool) -> list[Prompt]:
    """The prompts of one of the two sets; UserError if its file is missing, empty or malformed."""
    source, count = (settings.test, settings.test_count) if testing else (settings.train, settings.train_count)
    if source == "shapes":
        return shape_prompts(count, settings.seed, testing=testing)
    return choose(read_prompts(Path(source)), count, settings.seed)


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).prompts
    counts = {}
    for name in ("train", "test"):
        prompts = chosen_prompts(settings, testing=name == "test")
        write_prompts(Path("prompts", args.profile, f"{name}.parquet"), prompts)
        counts[name] = len(prompts)
    print(", ".join(f"{count} {name} prompts" for name, count in counts.items()))


if __name__ == "__main__":
    main()
