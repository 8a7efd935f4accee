"""Stage `code`: writes the version of each stage's code, which the stage `profile` hands on.

DVC knows bytes of files alone. So it runs this stage each time, and no other one looks at code.
"""

from g2rpo_core.foundation.files import write_whole
from stages.entry import arguments, ends_in_one_line
from stages.paths import run_paths
from stages.versions import versions


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    reports = run_paths(args.profile, args.study).reports
    reports.mkdir(parents=True, exist_ok=True)
    write_whole(reports / "code.yaml", text_of(versions()))


def text_of(known: dict[str, str]) -> str:
    """Return what this stage writes."""
    lines = [f"{stage}: {version}\n" for stage, version in known.items()]
    return "".join(["# Written by the stage `code`: the version of each stage's code\n", *lines])


if __name__ == "__main__":
    main()
