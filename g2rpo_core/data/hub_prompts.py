"""Prompts from a data set on the Hugging Face hub, with their styles."""

from dataclasses import replace
from pathlib import Path

from g2rpo_core.data.prompts import Prompt, distinct, normalized, read_all, read_prompts, read_rows
from g2rpo_core.errors import UserError
from g2rpo_core.hub.download import download
from g2rpo_core.hub.revisions import Revisions
from g2rpo_core.hub.settings import HubFiles, HubPrompts, HubStyles


def fetch_prompts(where: str, settings: HubPrompts, revisions: Revisions) -> list[Prompt]:
    """The distinct prompts of the data set's files, in order.

    UserError as in `read_prompts` and `download`, or for another count. where: the setting's name, with which messages begin. The
    count is that of the published texts, before `normalized`.
    """
    what = f"{where}: {settings.repo}"
    folder, revision, files = download(what, settings, revisions, "dataset")
    paths = [folder / file for file in files]
    if len({path.stem for path in paths}) < len(paths):
        raise UserError(f"{what}: two of the files have the same name, {', '.join(files)}: prompts are named by their file")
    prompts = distinct([prompt for path in paths for prompt in read_all(path)])
    if settings.distinct is not None:
        texts = (row["prompt"] for path in paths for row in read_rows(path).values())
        found = len({text for text in texts if isinstance(text, str) and text.strip()})
        if found != settings.distinct:
            raise UserError(
                f"{what} has {found} different prompts at {revision}, but {where}.distinct says {settings.distinct}: "
                "another revision or another set of prompts; correct the number to use it"
            )
    return _with_styles(where, prompts, settings.styles, revisions) if settings.styles else prompts


def _with_styles(where: str, prompts: list[Prompt], settings: HubStyles, revisions: Revisions) -> list[Prompt]:
    wanted = HubFiles(repo=settings.repo, revision=settings.revision, files=tuple(settings.files.values()))
    folder, _, _ = download(f"{where}.styles: {settings.repo}", wanted, revisions, "dataset")
    styles = {
        normalized(prompt.text): style for style, file in settings.files.items() for prompt in read_prompts(Path(folder, file))
    }
    styled = [replace(prompt, style=styles.get(prompt.text, prompt.style)) for prompt in prompts]
    if unknown := sum(prompt.text not in styles for prompt in prompts):
        print(f"{where}: {unknown} of {len(prompts)} prompts are in none of the style lists; reports show them without a style")
    return styled
