"""Hooks of mkdocs: they make a file outside docs/ that a page links to part of the site, under `repository/`.

So one link serves on GitHub and in the built site. Markdown becomes a page, code a page that shows it, other files stay as they are.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")
SHIM = "https://unpkg.com/iframe-worker/shim"
AS_IT_IS = {".html", ".png", ".svg"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that a page links to, and those that such a file links to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        origin = waiting.pop()
        for _, link in LINK.findall((ROOT / origin).read_text()):
            target = resolve_link(origin, link)
            if target in known or target.startswith("docs/") or not (ROOT / target).is_file():
                continue
            known.add(target)
            files.append(_generated(config, target))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links between files of the repository into links between files of the site."""
    uri = page.file.src_uri
    origin = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    if not (ROOT / origin).is_file():  # a page that shows code
        return markdown
    if uri.startswith("repository/"):
        page.meta["search"] = {"exclude": True}

    def moved(found: re.Match) -> str:
        target = resolve_link(origin, found[2])
        if not (ROOT / target).is_file():
            return found[0]
        return found[1] + posixpath.relpath(site_uri(target), posixpath.dirname(uri) or ".")

    return LINK.sub(moved, markdown)


def resolve_link(origin: str, link: str) -> str:
    """Return the path from the repository's root of what the file `origin` links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def site_uri(path: str) -> str:
    """Return the path of a file of the repository among the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    as_page = Path(path).suffix not in {".md", *AS_IT_IS}
    return f"repository/{path}" + (".md" if as_page else "")


def _generated(config: MkDocsConfig, path: str) -> File:
    if Path(path).suffix in {".md", *AS_IT_IS}:
        return File.generated(config, site_uri(path), abs_src_path=str(ROOT / path))
    language = {".py": "python", ".yaml": "yaml"}.get(Path(path).suffix, "text")
    text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"
    return File.generated(config, site_uri(path), content=text)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Replace the script from the web that the plugin `offline` names by ours; without one, the search fails from the disk."""
    return output.replace(
        SHIM, posixpath.relpath("javascripts/worker_from_disk.js", posixpath.dirname(page.file.dest_uri) or ".")
    )


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Replace the script as `on_post_page` does, in pages that are no documents, such as 404.html."""
    return output.replace(SHIM, "javascripts/worker_from_disk.js")
