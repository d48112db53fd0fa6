"""XML as a tree whose elements know their lines. Document types are refused, and with them every entity of the file's
own, which could name other files or grow without end; so are files beyond any real configuration's size and depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.parsers import expat

from ..errors import ConfigError, Problem

FILE_BYTES_MAX: Final = 8 << 20
ELEMENTS_MAX: Final = 100_000
DEPTH_MAX: Final = 64


@dataclass(slots=True)
class Element:
    """One element. Namespaces are left out: `name` is the local name."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)
    text: str = ""
    """All text of the element, without that of its children."""

    def walk(self) -> Iterator[Element]:
        """Yield the element, and all below it, in the order of the file."""
        waiting = [self]
        while waiting:
            element = waiting.pop()
            yield element
            waiting += reversed(element.children)

    def child(self, *names: str) -> Element | None:
        """Return the first child with one of these names."""
        return next((child for child in self.children if child.name in names), None)


class _RefusedError(Exception):
    """An error that says what is wrong where the parser stands."""


def read_xml(path: Path) -> Element:
    """Return the root of a file. Raises ConfigError, with the line, for what is no XML or is refused."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(["no such file"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"the file cannot be read: {error.strerror}"], str(path)) from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError([f"larger than {FILE_BYTES_MAX >> 20} MiB: that is no broker's configuration"], str(path))
    return _Tree(path).parse(data)


class _Tree:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._parser = parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._doctype
        parser.EntityDeclHandler = self._doctype
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        self._open: list[Element] = []
        self._root: Element | None = None
        self._count = 0

    def parse(self, data: bytes) -> Element:
        try:
            self._parser.Parse(data, True)
        except expat.ExpatError as error:
            text = f"not well-formed XML: {expat.ErrorString(error.code)} (column {error.offset + 1})"
            raise ConfigError([Problem(text, error.lineno)], str(self._path)) from None
        except _RefusedError as error:
            raise ConfigError([Problem(str(error), self._parser.CurrentLineNumber)], str(self._path)) from None
        except (ValueError, LookupError) as error:  # an encoding that Python does not have
            raise ConfigError([f"cannot be decoded: {error}"], str(self._path)) from None
        assert self._root is not None  # else it is not well-formed
        return self._root

    def _doctype(self, *_: object) -> None:
        raise _RefusedError("document types (<!DOCTYPE ...>) and entities are not read; take them out of a copy")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > ELEMENTS_MAX:
            raise _RefusedError(f"more than {ELEMENTS_MAX:,} elements: that is no broker's configuration")
        if len(self._open) >= DEPTH_MAX:
            raise _RefusedError(f"elements nest more than {DEPTH_MAX} deep: that is no broker's configuration")
        plain = {key.rpartition(" ")[2]: value for key, value in attributes.items()}
        element = Element(name.rpartition(" ")[2], plain, self._parser.CurrentLineNumber)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, name: str) -> None:
        self._open.pop()

    def _characters(self, text: str) -> None:
        self._open[-1].text += text
