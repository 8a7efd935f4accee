"""Stage `prompts`: writes the training and test prompts of a profile as Parquet."""

from pathlib import Path

from g2rpo_core.data.choice import chosen_prompts
from g2rpo_core.data.prompts import write_prompts
from g2rpo_core.foundation.claims import take
from g2rpo_core.foundation.texts import echo
from stages import allow_hub
from stages.entry import arguments, ends_in_one_line, sections

SECTIONS = ("prompts",)


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile")
    settings = sections(args, *SECTIONS).prompts
    take("prompts", args.profile)
    # Data sets are on the hub
    if not (isinstance(settings.train, str) and isinstance(settings.test, str)):
        allow_hub()
    chosen = chosen_prompts(settings)
    for name, prompts, as_test in (
        ("train", chosen.train, chosen.as_test),
        ("test", chosen.test, 0),
    ):
        counts = {"twice": chosen.repeated[name], "test prompts": as_test}
        left_out = {why: count for why, count in counts.items() if count}
        path = Path("prompts", args.profile, f"{name}.parquet")
        data_set = not isinstance(getattr(settings, name), str)
        write_prompts(path, prompts, left_out, data_set=data_set)
    repeated = sum(chosen.repeated.values())
    also = (
        f"; {chosen.as_test} more were left out of training because they are test prompts"
        if chosen.as_test
        else ""
    )
    also += f"; {repeated} repeats in the files were left out" if repeated else ""
    echo(f"{len(chosen.train)} train prompts, {len(chosen.test)} test prompts{also}")


if __name__ == "__main__":
    main()
