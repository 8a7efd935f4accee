"""Choose the prompts of a run: read the sources that the settings name, and draw from them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from g2rpo_core.data.prompts import (
    Prompt,
    captions,
    choose,
    distinct,
    held_out,
    read_all,
    read_prompts,
)
from g2rpo_core.data.rows import read_rows
from g2rpo_core.data.settings import PromptSettings
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import comparable, echo
from g2rpo_core.hub.download import REVISIONS, download
from g2rpo_core.hub.settings import HubFiles, HubPrompts, HubStyles
from g2rpo_core.tasks import TASK_NAMES


@dataclass(frozen=True)
class Chosen:
    """The prompts of a run, and how many were left out."""

    train: list[Prompt]
    test: list[Prompt]
    as_test: int
    """Training prompts left out because they are test prompts."""
    repeated: dict[str, int]
    """Prompts left out of each set because their text repeats."""


def all_prompts(settings: PromptSettings, *, testing: bool) -> list[Prompt]:
    """Read the prompts that the training or test set is chosen from, with a file's repeats.

    `test_skip` is ignored for files. UserError if they are missing, empty or malformed.
    """
    source, count = (
        (settings.test, settings.test_count) if testing else (settings.train, settings.train_count)
    )
    if not isinstance(source, str):
        return fetch_prompts(
            f"prompts.{'test' if testing else 'train'}",
            source,
            REVISIONS / "prompts.json",
        )
    if source not in TASK_NAMES:
        return read_all(Path(source))
    seen = captions(source, settings.test_skip, settings.seed, testing=True) if testing else []
    return captions(
        source, count, settings.seed, testing=testing, without={prompt.text for prompt in seen}
    )


def drop_skipped(prompts: list[Prompt], settings: PromptSettings) -> list[Prompt]:
    """Drop the draw of `test_skip` from a file's test prompts; UserError if none is left."""
    if settings.test in TASK_NAMES or not settings.test_skip:
        return prompts
    seen = {prompt.id for prompt in choose(prompts, settings.test_skip, settings.seed)}
    left = [prompt for prompt in prompts if prompt.id not in seen]
    if not left:
        raise UserError(
            f"prompts.test_skip: {settings.test_skip} leaves none of the {len(prompts)} test "
            "prompts"
        )
    return left


def chosen_prompts(
    settings: PromptSettings, read: Mapping[str, list[Prompt]] | None = None
) -> Chosen:
    """Choose the prompts by the settings' seeded draws; read: by `all_prompts`, if they were.

    Errors as there, and UserError if no training prompt is left.
    """
    read = read or {
        name: all_prompts(settings, testing=name == "test") for name in ("test", "train")
    }
    unique = {name: distinct(prompts) for name, prompts in read.items()}
    test = choose(drop_skipped(unique["test"], settings), settings.test_count, settings.seed)
    train, as_test = held_out(unique["train"], test)
    repeated = {name: len(read[name]) - len(unique[name]) for name in read}
    return Chosen(choose(train, settings.train_count, settings.seed), test, as_test, repeated)


def fetch_prompts(where: str, settings: HubPrompts, revisions: Path) -> list[Prompt]:
    """Download the distinct prompts of the data set's files, in order.

    Those that no encoder takes, with a control character or nothing that is seen, are left out, and
    a line says how many. UserError as in `read_prompts` and `download`, or for another count.
    where: the setting's name, with which messages begin. The count is that of the published texts,
    before `normalized`.
    """
    what = f"{where}: {settings.repo}"
    folder, revision, files = download(what, settings, revisions, "dataset")
    paths = [folder / file for file in files]
    if len({path.stem for path in paths}) < len(paths):
        raise UserError(
            f"{what}: two of the files have the same name, {', '.join(files)}: "
            "prompts are named by their file"
        )
    unusable: list[str] = []
    prompts = distinct([prompt for path in paths for prompt in read_all(path, unusable)])
    if unusable:
        echo(
            f"{where}: {len(unusable)} prompts were left out: with a control character, "
            "or no character that is seen"
        )
    if settings.distinct is not None:
        texts = [row["prompt"] for path in paths for row in read_rows(path, []).values()]
        count = len(
            {text for text in (*texts, *unusable) if isinstance(text, str) and text.strip()}
        )
        if count != settings.distinct:
            raise UserError(
                f"{what} has {count} different prompts at {revision}, "
                f"but {where}.distinct says {settings.distinct}: "
                "another revision or another set of prompts; correct the number to use it"
            )
    return _with_styles(where, prompts, settings.styles, revisions) if settings.styles else prompts


def _with_styles(
    where: str, prompts: list[Prompt], settings: HubStyles, revisions: Path
) -> list[Prompt]:
    folder, _, _ = download(
        f"{where}.styles: {settings.repo}",
        HubFiles(
            repo=settings.repo, revision=settings.revision, files=tuple(settings.files.values())
        ),
        revisions,
        "dataset",
    )
    styles = {
        comparable(prompt.text): style
        for style, file in settings.files.items()
        for prompt in read_prompts(Path(folder, file))
    }
    if unknown := sum(comparable(prompt.text) not in styles for prompt in prompts):
        echo(
            f"{where}: {unknown} of {len(prompts)} prompts are in none of the style lists; "
            "reports show them without a style"
        )
    return [
        replace(prompt, style=styles.get(comparable(prompt.text), prompt.style))
        for prompt in prompts
    ]
