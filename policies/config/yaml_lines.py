"""YAML text as plain data that knows its lines.

PyYAML keeps the last of two equal keys and forgets where anything stood; a configuration must say both. So the text
is composed into nodes, and the nodes are built into dicts and lists here, with the line of each path beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import Problem

Path = tuple[str | int, ...]
"""The place of a value: `("stores", 0, "journal", "sync")`."""

VALUES_MAX = 100_000
"""The most values that one file may hold once its aliases are expanded."""

_TAG = "tag:yaml.org,2002:"


@dataclass(slots=True)
class Document:
    """A file as data, the line (from 1) of each key and item, and what was wrong with the YAML itself."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: Path) -> int:
        """Return the line of the path, or of the nearest thing around it that the file has; 0 if there is none."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 0)


def parse(text: str) -> Document:
    """Parse the one document in the text. Syntax errors come as the document's only problem; nothing is raised."""
    document = Document()
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            builder = _Builder(loader, document)
            document.data = builder.build(node, ())
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.problems.append(Problem(f"not YAML: character U+{int(error.character):04X} is not allowed", line))
    except yaml.MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error, text))
    except RecursionError:
        document.problems.append(Problem("not usable: values are nested too deeply"))
    return document


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    number = mark.line if mark else 0
    words = ": ".join(part for part in (error.context, error.problem) if part)
    lines = text.split("\n")
    if "\\t" in words:
        words += "; a tab cannot indent, use spaces"
    if "block mapping" in words:
        words += "; keys that belong together have to be indented alike"
    elif number < len(lines) and re.search(r"[\[,:\s-][*>\[]", lines[number]):
        words += '; patterns that begin with * > or [ need quotes: ["*.eu", ">"]'
    return Problem(f"not YAML: {words}", number + 1)


class _Builder:
    """A builder of data from the nodes of one document, which notes lines and problems as it goes."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self._loader = loader
        self._document = document
        self._values = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        self._values += 1
        if id(node) in self._open or self._values > VALUES_MAX:
            raise yaml.MarkedYAMLError(problem="aliases expand without end", problem_mark=node.start_mark)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return [self.build(item, (*path, place)) for place, item in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            try:
                return self._loader.construct_object(node)
            except (yaml.YAMLError, ValueError):
                pass
        kind = node.tag.removeprefix(_TAG)
        self._problem(f"a value tagged {kind!r} that cannot be read; put it in quotes if it is text", node)
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = self._key(key_node)
            if key is None:
                continue
            line = key_node.start_mark.line + 1
            if key in first_line:
                self._problem(f"key {key!r} stands here twice, first in line {first_line[key]}; keep one", key_node)
                continue
            first_line[key] = self._document.lines[(*path, key)] = line
            result[key] = self.build(value_node, (*path, key))
        for merged in self._merged(node):
            for key, value in self._mapping(merged, path).items():
                result.setdefault(key, value)
        return result

    def _merged(self, node: yaml.MappingNode) -> Iterator[yaml.MappingNode]:
        """Yield the mappings that `<<: *other` takes in. A key of the mapping itself goes before theirs."""
        for key_node, value_node in node.value:
            if key_node.tag != _TAG + "merge":
                continue
            parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for part in parts:
                if isinstance(part, yaml.MappingNode):
                    yield part
                else:
                    self._problem("<< takes in a mapping or a list of mappings", part)

    def _key(self, node: yaml.Node) -> str | None:
        key = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, str):
            return key
        written = node.value if isinstance(node, yaml.ScalarNode) else "of several values"
        self._problem(f"key {written} is not text; put it in quotes", node)
        return None

    def _problem(self, message: str, node: yaml.Node) -> None:
        self._document.problems.append(Problem(message, node.start_mark.line + 1))
