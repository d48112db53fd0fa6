"""The blocks of the pages (README.md, docs/), which tests run as a reader does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FENCED: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED: Final = re.compile(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+")


class Block(NamedTuple):
    """A block of a page."""

    page: str
    line: int
    """Of its first line of text."""
    heading: str
    """The second-level heading that it stands under."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """Run it as Python, with and into these names."""
        exec(compile("\n" * (self.line - 1) + self.text, self.page, "exec"), names)

    @property
    def file(self) -> str | None:
        """Return the name of the file that it is, if its first line says one."""
        named = re.match(r"# (\w+\.\w+)\n", self.text)
        return named and named[1]


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text()


def blocks(page: str, *languages: str, heading: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page in these languages, or in all, below a heading or any."""
    text = read(page)
    found = []
    for match in FENCED.finditer(text):
        before = text[: match.start(2)]
        headings = re.findall(r"^## (.*)$", FENCED.sub("", before), re.M)
        found.append(Block(page, before.count("\n") + 1, headings[-1] if headings else "", match[1], match[2]))
    return [
        block
        for block in found
        if (not languages or block.language in languages) and (heading is None or block.heading == heading)
    ]


def of_host(name: str, changes: dict[str, str] | None = None) -> str:
    """Return the programs of docs/hosts.md for a host, in which these words stand for those."""
    text = "".join(block.text for block in blocks("docs/hosts.md", "python") if f"anabranch.hosts.{name}" in block.text)
    for word, instead in (changes or {}).items():
        assert word in text
        text = text.replace(word, instead)
    return text


def indented(page: str) -> list[str]:
    """Return the blocks of a page that are indented: commands, drawings, and what a command prints."""
    return [re.sub("^    ", "", block, flags=re.M) for block in INDENTED.findall(FENCED.sub("", read(page)))]
