"""What mkdocs does not do by itself: links of a page that lead out of docs/ get a page of what is there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".service": "ini", ".json": "json"}


def outside(page: str, link: str) -> str | None:
    """Return the path below the root of what a page of docs/ links outside docs/, if it is there."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).exists() else path


def page_of(path: str) -> str:
    """Return the page of the site on which a file or a folder is shown."""
    return "changelog.md" if path == "CHANGELOG.md" else f"source/{path.lstrip('.')}.md"


def shown(path: str) -> str:
    """Return a page that shows a file, or the files of a folder."""
    found = ROOT / path
    if path == "CHANGELOG.md":
        return re.sub(r"(?<=\]\()docs/", "", found.read_text())
    files = sorted(file for file in found.iterdir() if file.is_file()) if found.is_dir() else [found]
    blocks = [f"# {path}"]
    for file in files:
        if found.is_dir():
            blocks.append(f"## {file.name}")
        blocks.append(f"``````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n``````")
    return "\n\n".join(blocks) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file and folder outside docs/ that a page links."""
    linked = {"CHANGELOG.md"}
    for file in files.documentation_pages():
        for link, _ in LINK.findall(file.content_string):
            if (path := outside(file.src_uri, link)) is not None:
                linked.add(path)
    for path in sorted(linked):
        files.append(File.generated(config, page_of(path), content=shown(path)))
    files.append(File.generated(config, "site.css", abs_src_path=str(Path(__file__).with_name("site.css"))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links lead to those pages, and indent a list below another by four blanks, as Python's Markdown wants."""
    here = page.file.src_uri

    def inside(match: re.Match[str]) -> str:
        path = outside(here, match[1])
        if path is None:
            return match[0]
        return posixpath.relpath(page_of(path), posixpath.dirname(here) or ".") + (match[2] or "")

    parts = re.split(r"(^```.*?^```)", LINK.sub(inside, markdown), flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"^  (?=- )", "    ", text, flags=re.MULTILINE) for text in parts[::2]]
    return "".join(parts)
