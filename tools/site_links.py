"""Hooks of mkdocs: generated pages, and links that serve on GitHub as well as in the built site.

- A file outside docs/ that a page links to becomes part of the site, under `repository/`: Markdown
  as a page, code as a page that shows it.
- Pages of tools/reference.py that are not committed are built into the site. Committed pages name
  the command that prints the same, such as `g2rpo plan --help` or `python -m tools.reference
  bases`; in the site that command is a link to the page.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.reference import BUILT_PAGES

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")
SHIM = "https://unpkg.com/iframe-worker/shim"
AS_IT_IS = {".html", ".png", ".svg"}
PRINTS = re.compile(r"(?<![\[`])`(?:g2rpo ?([a-z-]*?) --help|python -m tools\.reference (\w+))`")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


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
    for name, page in BUILT_PAGES.items():
        files.append(File.generated(config, f"reference/{name}", content=page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links between files of the repository into links between files of the site."""
    uri = page.file.src_uri
    origin = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    if uri.startswith("repository/") and not (ROOT / origin).is_file():  # a page that shows code
        return markdown
    if uri.startswith("repository/") and not uri.startswith("repository/studies/"):
        page.meta["search"] = {"exclude": True}

    def moved(found: re.Match) -> str:
        target = resolve_link(origin, found[2])
        if not (ROOT / target).is_file():
            return found[0]
        return found[1] + posixpath.relpath(site_uri(target), posixpath.dirname(uri) or ".")

    parts = FENCED.split(markdown)
    parts[::2] = [
        PRINTS.sub(lambda found: _linked(found, uri), LINK.sub(moved, part)) for part in parts[::2]
    ]
    return "".join(parts)


def _linked(command: re.Match, uri: str) -> str:
    """Return a command as a link from `uri` to the built page of what it prints."""
    page = f"reference/{command[2] or 'commands'}.md" + (
        f"#g2rpo-{command[1]}" if command[1] else ""
    )
    return f"[{command[0]}]({posixpath.relpath(page, posixpath.dirname(uri) or '.')})"


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
    text = (
        f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n"
        f"{(ROOT / path).read_text()}\n````\n"
    )
    return File.generated(config, site_uri(path), content=text)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Replace the script that the plugin `offline` loads from the web by ours.

    Without one, the search fails from the disk.
    """
    return output.replace(
        SHIM,
        posixpath.relpath(
            "javascripts/worker_from_disk.js", posixpath.dirname(page.file.dest_uri) or "."
        ),
    )


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Replace the script as `on_post_page` does, in pages such as 404.html."""
    return output.replace(SHIM, "javascripts/worker_from_disk.js")
