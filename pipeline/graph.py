"""Reads DVC's own graph: which stages there are, what each needs, and which have changed."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo, lock_repo
from pydantic import Field, ValidationError

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import in_one_line, read_text, what_lacks
from g2rpo_core.foundation.layout import hint_for
from g2rpo_core.foundation.settings import Settings, problems_of
from stages.code import text_of
from stages.versions import versions


class FlowMeta(Settings):
    """How a flow runs a stage: the key `flow` of its `meta:` in dvc.yaml."""

    tags: tuple[str, ...] = Field(
        (), description="concurrency limits of which the stage takes a slot, such as `gpu`"
    )
    retries: int = Field(
        0,
        ge=0,
        description=(
            "how often it is retried after a temporary failure (exit status 75), "
            "never after another one"
        ),
    )
    retry_delay: float = Field(
        30, gt=0, description="seconds before the first retry; each further one waits twice as long"
    )
    time_limit: float | None = Field(
        None, gt=0, description="seconds after which its whole process group is ended"
    )


@dataclass(frozen=True)
class Stage:
    """A stage of DVC's graph that has a command."""

    name: str
    """With its matrix entry: `train@g2rpo-1`."""
    needs: tuple[str, ...]
    """Names of the stages whose outputs it reads."""
    meta: FlowMeta
    changed: bool
    """Itself; a stage before it may have changed although this one has not."""
    project: Path
    """The folder of its DVC project, in which it is run."""
    command: str
    """As DVC runs it."""

    @property
    def group(self) -> str:
        """Return the name without its matrix entry."""
        return self.name.split("@")[0]


@contextmanager
def asking_dvc(project: Path = Path(".")) -> Iterator[None]:
    """Turn DVC's errors in the block, and the system's, into a UserError about the project."""
    try:
        yield
    except DvcException as error:
        reason = f"{error} {error.__cause__ or ''}"  # a YAML error has its line only in its cause
        raise UserError(f"{project.resolve()}: {' '.join(reason.split())}") from None
    except OSError as error:  # nothing is wrong with the files
        file = Path(error.filename or project.resolve())
        broken = file.is_symlink() and not file.exists()
        told = f"DVC cannot work here ({error.strerror or error})"
        raise UserError(
            what_lacks(error) or f"{file}: {'is a link to nothing: delete it' if broken else told}"
        ) from None


def read_graph(project: Path = Path(".")) -> dict[str, Stage]:
    """Return every stage of a DVC project, each after the stages it needs.

    UserError if DVC cannot read the project.
    """
    try:
        with asking_dvc(project), lock_repo(repo := Repo(str(project), _wait_for_lock=True)):
            graph = repo.index.graph
            changed = {node.addressing for node in graph.nodes if _changed(node, project)}
    except UserError:
        raise
    except Exception as error:  # from a file that is YAML but not a lock: DVC looks up keys in it
        raise UserError(
            f"{project.resolve()}: DVC cannot read dvc.yaml or dvc.lock ({type(error).__name__}: "
            f"{error}): {hint_for(project / 'dvc.lock')}"
        ) from error
    # Each after all that it needs; what `dvc add` put under version control has no command to run
    by_name = lambda nodes: sorted(nodes, key=lambda node: node.addressing)
    needs = {node: by_name(graph.successors(node)) for node in by_name(graph.nodes)}
    return {
        node.name: Stage(
            node.name,
            tuple(need.name for need in needs[node] if need.cmd),
            _meta(node),
            node.addressing in changed,
            project,
            str(node.cmd),
        )
        for node in TopologicalSorter(needs).static_order()
        if node.cmd
    }


def _changed(node, project: Path) -> bool:
    """Tell whether a stage has changed, as in `dvc status`, or another run uses its files.

    The stage `code`, which always has for DVC, has if another version of code is on disk.
    """
    try:
        found = node.status().get(node.addressing, [])
    except LockError:
        return True
    if node.name != "code" or found != ["always changed"]:
        return bool(found)
    return read_text(project / "reports" / "code.yaml") != text_of(versions())


def _meta(node) -> FlowMeta:
    try:
        return FlowMeta.model_validate_json(json.dumps((node.meta or {}).get("flow", {})))
    except ValidationError as error:
        raise UserError(
            f"{node.relpath}: {node.addressing}: "
            f"meta.flow.{in_one_line(problems_of(error, FlowMeta))}"
        ) from None


def chosen(stages: dict[str, Stage], targets: Iterable[str]) -> dict[str, Stage]:
    """Return the targets and all that they need, in order; without a target every stage.

    targets: names, or those of a whole matrix.
    """
    targets = list(targets)
    if not targets:
        return stages
    # Match the targets
    wanted: set[str] = set()
    todo = []
    for target in targets:
        matching = [name for name, stage in stages.items() if target in (name, stage.group)]
        if not matching:
            raise UserError(
                f"dvc.yaml: no stage {target!r}; there are "
                f"{', '.join(dict.fromkeys(s.group for s in stages.values()))}"
            )
        todo += matching
    # Add what they need
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += stages[name].needs
    return {name: stage for name, stage in stages.items() if name in wanted}
