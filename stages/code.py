"""Stage `code`: writes the version of each stage's code, which the stage `profile` hands on.

DVC knows bytes of files alone. So it runs this stage each time, and no other one looks at code.
"""

import hashlib
import io
import json
from pathlib import Path

from ruamel.yaml import YAML

from g2rpo_core.foundation.errors import TransientError
from g2rpo_core.foundation.files import read_yaml, write_whole
from g2rpo_core.foundation.texts import echo, some
from stages.entry import arguments, ends_in_one_line
from stages.paths import run_paths
from stages.versions import VOUCHED, module_of, versions

SETTINGS = "reports/profile.yaml"


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    paths = run_paths(args.profile, args.study)
    paths.reports.mkdir(parents=True, exist_ok=True)
    write_whole(paths.reports / "code.yaml", text_of(versions()))
    take_over(paths.lock)


def text_of(known: dict[str, str]) -> str:
    """Return what this stage writes."""
    lines = [f"{stage}: {version}\n" for stage, version in known.items()]
    return "".join(["# Written by the stage `code`: the version of each stage's code\n", *lines])


def take_over(lock: Path) -> None:
    """Give the stages of a lock that names folders of code their version, if that is known.

    Such a lock is of before code had versions. TransientError if there was one: DVC has read the
    lock before. Others run again, and are named.
    """
    data = read_yaml(lock) if lock.exists() else {}
    known, left, table = [], [], read_yaml(VOUCHED)
    for name, stage in ((data or {}).get("stages") or {}).items():
        group = module_of(name)
        files = {dep["path"].replace("../", ""): dep["md5"] for dep in stage.get("deps", [])}
        code = {
            path: md5 for path, md5 in files.items() if path.startswith(("g2rpo_core/", "stages/"))
        }
        if not code or group in ("profile", "report"):  # which take seconds
            continue
        vouched = table.get(group, {})
        hashed = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:10]
        if hashed != vouched.get("lock"):
            left.append(name)
            continue
        stage["deps"] = [dep for dep in stage["deps"] if dep["path"].replace("../", "") not in code]
        read = stage["params"][SETTINGS] | {f"code.{group}": vouched["version"]}
        stage["params"][SETTINGS] = dict(sorted(read.items()))  # as DVC writes it
        data["stages"][name] = {key: value for key, value in stage.items() if value}
        known.append(name)
    if left:
        echo(f"{lock}: {some(left)} will run again: other code made them, before it had versions")
    if known:
        text = io.StringIO()
        YAML().dump(data, text)
        write_whole(lock, text.getvalue())
        raise TransientError(
            f"{lock}: {len(known)} stages keep their place, as code of before it had versions that "
            "computes the same made them: run the same command again"
        )


if __name__ == "__main__":
    main()
