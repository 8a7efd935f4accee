"""Compare the outputs of this checkout with the committed ones: `make verify`.

It says of every output that differs how far it is from the committed one, whether the report's
conclusions are the same, and what the likely cause is. Exit status: 0 if all are equal, 2 if they
differ and the conclusions are the same, 1 otherwise.

Experimental: main works without it.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_json
from g2rpo_core.foundation.texts import echo, some
from pipeline.causes import causes, first_to_differ
from pipeline.committed import (
    committed_file,
    committed_json,
    committed_stages,
    content,
    files_in,
    md5_of,
    read_outputs,
)
from pipeline.conclusions import changed, comparisons_in
from pipeline.differences import bytes_apart, difference
from pipeline.graph import read_graph
from stages.entry import ends_in_one_line
from stages.paths import REPORTS

REPORT = REPORTS / "report.json"
NOT_AT_HAND = "of the committed one only its hash is known here"
PER_KIND = 3  # files of a folder that are measured
MOST = 12  # conclusions that are listed
ONLY_BITS = 2  # the exit status of the same conclusions


@ends_in_one_line
def main() -> None:
    lock, outputs, graph = committed_stages(), read_outputs(), read_graph()
    committed = {
        out["path"]: out["md5"] for stage in lock.values() for out in stage.get("outs", [])
    }
    # Compare hashes
    paths = sorted(outputs.hashes, key=lambda path: list(graph).index(outputs.stages[path]))
    states = {path: state_of(outputs.hashes[path], committed.get(path)) for path in paths}
    counts = Counter(states.values())
    if counts["equal"] == len(paths):
        echo(f"{len(paths)} equal, 0 different, 0 missing: every output is the committed one")
        return
    # Say how far each output is
    damaged = 0
    for path in paths:
        if states[path] == "missing":
            echo(f"missing    {path}")
        if states[path] == "different":
            said = list(how_far(Path(path), committed.get(path), outputs.cache))
            damaged += sum(is_damaged for _, is_damaged in said)
            echo(f"different  {path}: {said[0][0]}", *(f"{'':13}{text}" for text, _ in said[1:]))
    echo(", ".join(f"{counts[state]} {state}" for state in ("equal", "different", "missing")), "")
    # Say whether the conclusions are the same, and why outputs differ
    problem = conclusions_problem()
    different = [path for path in paths if states[path] == "different"]
    if different:
        differing = {outputs.stages[path] for path in different}
        first = first_to_differ(graph, differing)
        followed = "" if set(first) >= differing else "; the others that differ are made from it"
        echo(f"First to differ: {' and '.join(first)}{followed}.")
        echo(f"Likely cause: {'; '.join(causes(first, different, lock, outputs))}.")
    # End with the status in words, as make turns every status into 2
    problems = (
        [f"outputs are missing: {counts['missing']}, which make reproduce makes"]
        if counts["missing"]
        else []
    )
    problems += [f"files are damaged: {damaged}"] if damaged else []
    problems += [problem] if problem else []
    if problems:
        echo(f"Result: not verified: {'; '.join(problems)} (exit status 1).")
        sys.exit(1)
    echo(f"Result: only bits differ, the conclusions are the same (exit status {ONLY_BITS}).")
    sys.exit(ONLY_BITS)


def state_of(here: str | None, committed: str | None) -> str:
    return "missing" if here is None else "equal" if here == committed else "different"


def how_far(path: Path, md5: str | None, cache: Path) -> Iterator[tuple[str, bool]]:
    """Yield lines on how far an output is from the committed one, and whether it is damaged."""
    if md5 is None:
        yield "the committed dvc.lock has no such output", False
    elif md5.endswith(".dir") != path.is_dir():
        yield "a folder is now a file" if path.is_file() else "a file is now a folder", False
    elif path.is_dir():
        yield from folder_apart(path, md5, cache)
    else:
        yield file_apart(path, str(path), md5, cache)


def folder_apart(folder: Path, md5: str, cache: Path) -> Iterator[tuple[str, bool]]:
    """Yield a line for the first few differing files of every kind, and count the others."""
    before = files_in(md5, cache)
    if before is None:
        yield NOT_AT_HAND, False
        return
    # Compare hashes
    after = {
        str(path.relative_to(folder)): md5_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            kinds[Path(name).suffix].append(name)
    yield f"folder: {sum(map(len, kinds.values()))} of {len(before)} files differ", False
    # Measure a few of every kind
    for kind, names in kinds.items():
        for name in names[:PER_KIND]:
            text, is_damaged = file_apart(folder / name, name, before[name], cache)
            yield f"{name}: {text}", is_damaged
        if len(names) > PER_KIND:
            yield f"and {len(names) - PER_KIND} other {kind or 'plain'} files", False
    # Name what only one of both has
    for alone, said in (
        (before.keys() - after.keys(), "missing here"),
        (after.keys() - before.keys(), "only here"),
    ):
        if alone:
            yield f"{said}: {some(sorted(alone))}", False


def file_apart(path: Path, name: str, md5: str, cache: Path) -> tuple[str, bool]:
    """Return a phrase on how far a file is from the committed one, and whether it is damaged."""
    with content(str(path), md5, cache) as old:
        if old is None:
            return NOT_AT_HAND, False
        try:
            return difference(old, path, name), False
        except UserError as error:
            # The committed one is read first: if not even that is what its name says, this is no
            # damage
            if str(error).startswith(str(old)):
                return bytes_apart(old, path), False
            return f"damaged: {error}", True


def conclusions_problem() -> str | None:
    """Print how the conclusions compare; return what speaks against them, None if nothing does."""
    if not REPORT.exists():
        return f"{REPORT} is missing, so no conclusions can be compared"
    if REPORT.read_bytes() == committed_file(str(REPORT)):
        echo(f"Conclusions: the same, as {REPORT} is the committed one.")
        return None
    # Read both
    recorded = committed_json(str(REPORT))
    if recorded is None:
        return f"the commit has no {REPORT}, so no conclusions can be compared"
    try:
        before, after = (
            comparisons_in(recorded, Path(f"HEAD:{REPORT}")),
            comparisons_in(read_json(REPORT), REPORT),
        )
    except UserError as error:
        return str(error)
    if before is None or after is None:
        whose = "the committed" if before is None else "this"
        return (
            f"{whose} {REPORT} has no comparisons (an older version made it), "
            "so no conclusions can be compared"
        )
    # Compare
    sentences = changed(before, after)
    total = len(before.keys() | after.keys())
    if not sentences:
        echo(
            f"Conclusions: the same in all {total} comparisons of the report (sign and "
            "significance)."
        )
        return None
    echo(
        f"Conclusions: {len(sentences)} of {total} comparisons of the report changed (sign or "
        "significance):"
    )
    for sentence in sentences[:MOST]:
        echo(f"  {sentence}")
    if len(sentences) > MOST:
        echo(f"  and {len(sentences) - MOST} others")
    return f"{len(sentences)} of {total} conclusions changed"


if __name__ == "__main__":
    main()
