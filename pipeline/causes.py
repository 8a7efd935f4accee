"""Find why outputs differ, and in which stage it began.

Causes are facts: files changed by hand, edits, another processor, threads or versions.

Experimental: main works without it.
"""

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from g2rpo_core.foundation.files import read_json
from g2rpo_core.foundation.runs import read_lock
from g2rpo_core.numerics.processes import INSTRUCTIONS, PACKAGES, describe_machine
from pipeline.committed import Outputs, committed_json
from pipeline.graph import Stage
from stages.paths import REPORTS

MACHINE = REPORTS / "machine.json"
NAMED = 6  # files of one cause


def first_to_differ(graph: Mapping[str, Stage], stages: Iterable[str]) -> list[str]:
    """Return those of the stages that differ before which none differs, in the graph's order."""
    differing = set(stages)
    before: dict[str, set[str]] = {}  # all that a stage needs
    for name, stage in graph.items():
        before[name] = {above for need in stage.needs for above in (need, *before[need])}
    return [name for name in graph if name in differing and not before[name] & differing]


def causes(
    first: list[str], different: list[str], lock: Mapping[str, dict], outputs: Outputs
) -> list[str]:
    """Return the likely causes as phrases, the surest first.

    first: the stages of `first_to_differ`.
    """
    touched = by_hand(different, outputs)
    found = (
        [f"changed after a stage made it (or dvc.lock was put back): {_listed(touched)}"]
        if touched
        else []
    )
    untouched = {outputs.stages[path] for path in different if path not in touched}
    first = [name for name in first if name in untouched]
    if not first:
        return found
    if files := edited(first, lock, outputs):
        found.append(f"edited since the lock was made: {_listed(files)}")
    recorded = committed_json(str(MACHINE))
    if isinstance(recorded, dict):
        found += machine_differences(recorded, machine_here())
        return found or [
            "not known: code, settings, processor, threads and versions are those of the lock"
        ]
    if found:
        return found
    return [
        (
            "this machine or its packages: no code or setting was edited; "
            f"on what the lock was made is not known (no {MACHINE} in the commit)"
        )
    ]


def by_hand(different: Iterable[str], outputs: Outputs) -> list[str]:
    """Return the outputs that are not what their stage wrote, by the dvc.lock on disk."""
    file = Path("dvc.lock")
    stages = read_lock(file) if file.exists() else {}
    written = {
        out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", [])
    }
    return [path for path in different if path in written and written[path] != outputs.hashes[path]]


def edited(stages: Iterable[str], lock: Mapping[str, dict], outputs: Outputs) -> list[str]:
    """Return the code and settings of these stages that differ from the committed lock."""
    files: list[str] = []
    for stage in stages:
        known = lock.get(stage, {})
        was = {dep["path"]: dep["md5"] for dep in known.get("deps", [])} | known.get("params", {})
        for path, hashed in outputs.deps[stage].items():
            # What another stage writes is no edit
            if hashed != was.get(path) and not any(_overlap(path, out) for out in outputs.hashes):
                files += changed_files(path)
    return sorted(set(files))


def _overlap(one: str, other: str) -> bool:
    """Tell whether two paths are the same, or one is below the other."""
    return Path(one).is_relative_to(other) or Path(other).is_relative_to(one)


def changed_files(path: str) -> list[str]:
    """Return the paths below `path` changed since the lock's commit, or itself if git sees none."""
    since = _git("log", "-1", "--format=%H", "--", "dvc.lock") or ["HEAD"]
    tracked = _git("diff", "--name-only", "--relative", since[0], "--", path)
    return [*tracked, *_git("ls-files", "--others", "--exclude-standard", "--", path)] or [path]


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.splitlines()


def machine_here() -> dict[str, Any]:
    """Describe this machine, with threads and numerics of the stages that ran here."""
    written = read_json(MACHINE, dict) if MACHINE.exists() else {}
    return describe_machine() | {
        key: written[key] for key in ("threads", "numerics") if key in written
    }


def machine_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return a phrase for everything that computes otherwise here than where the lock was made."""
    found = []
    # Portable numerics compute the same on all processors that they accept
    portable = here.get("numerics") == there.get("numerics") == "portable"
    if here["processor"] != there.get("processor") and not portable:
        one, other = _processors(here["processor"], there.get("processor"))
        found.append(f"this machine's processor ({one}) is another than the lock's ({other})")
    devices = [str(each.get("device")) for each in (here, there)]
    if devices[0] != devices[1] and not all(device.endswith("CPUs") for device in devices):
        found.append(
            f"this machine's device ({devices[0]}) is another than the lock's ({devices[1]})"
        )
    for key in ("threads", "python", *PACKAGES, "numerics"):
        if here.get(key) != there.get(key):
            ours, theirs = (
                "unset" if each.get(key) is None else each[key] for each in (here, there)
            )
            found.append(f"{key} {ours} here, {theirs} there")
    return found


def _processors(*both: Any) -> tuple[str, ...]:
    """Return two processors' names, with numbers and instructions if the names are equal."""
    known: list[dict] = [one if isinstance(one, dict) else {} for one in both]
    names = [str(one.get("name", "not known")) for one in known]
    if names[0] != names[1]:
        return tuple(names)
    own = [[each for each in INSTRUCTIONS if one.get(each)] for one in known]
    return tuple(
        f"{name}, family {one.get('family')}, model {one.get('model')}, "
        f"with {' '.join(instructions or ['none of', *INSTRUCTIONS])}"
        for name, one, instructions in zip(names, known, own)
    )


def _listed(files: list[str]) -> str:
    return ", ".join(files[:NAMED]) + (
        f" and {len(files) - NAMED} others" if len(files) > NAMED else ""
    )
