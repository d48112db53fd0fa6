"""The persistence adapter of a broker's configuration, spelled in XBean or in plain Spring beans, as one tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..errors import ConfigError, Problem
from .xml_reader import DEPTH_MAX, Element

CLASSES: Final = {
    "MultiKahaDBPersistenceAdapter": "mKahaDB",
    "KahaDBPersistenceAdapter": "kahaDB",
    "FilteredKahaDBPersistenceAdapter": "filteredKahaDB",
    "MemoryPersistenceAdapter": "memoryPersistenceAdapter",
    "JDBCPersistenceAdapter": "jdbcPersistenceAdapter",
    "LevelDBStore": "levelDB",
    "BrokerService": "broker",
    "XBeanBrokerService": "broker",
}
"""The name of each class in XBean."""
ADAPTERS: Final = (
    "mKahaDB", "kahaDB", "memoryPersistenceAdapter", "jdbcPersistenceAdapter", "journaledJDBC",
    "journalPersistenceAdapterFactory", "journalPersistenceAdapter", "levelDB", "replicatedLevelDB",
    "amqPersistenceAdapter", "kahaPersistenceAdapter",
)  # fmt: skip
ELEMENTS_MAX: Final = 10_000
"""The most elements of one persistence adapter, what it refers to included."""


def persistence_adapter(root: Element, path: Path) -> Element:
    """Return the broker's persistence adapter in a file, in XBean's words, with what it refers to in its place. Raises
    ConfigError."""
    normal = _Normal(root, path)
    found = list(_adapters(root, normal.referred))
    if len(found) > 1:
        lines = ", ".join(str(element.line) for element in found)
        raise ConfigError(
            [f"several persistence adapters, in lines {lines}; leave one in a copy of the file"], str(path)
        )
    if not found:
        raise ConfigError(
            ["no persistence adapter: neither <kahaDB> nor <mKahaDB> is in it; give the broker's activemq.xml"],
            str(path),
        )
    return normal.of(found[0], 0)


def _adapters(root: Element, referred: set[str]) -> Iterator[Element]:
    """Yield the adapters that belong to no filter."""
    waiting = [root]
    while waiting:
        element = waiting.pop()
        if _name(element) in ADAPTERS:
            if element.attributes.get("id") not in referred:
                yield element
        elif _name(element) != "filteredKahaDB":
            waiting += reversed(element.children)


def _name(element: Element) -> str:
    if element.name != "bean":
        return element.name
    name = element.attributes.get("class", "").rpartition(".")[2]
    return CLASSES.get(name, name)


class _Normal:
    """Elements in XBean's words."""

    def __init__(self, root: Element, path: Path) -> None:
        self._path = path
        self._by_id = {e.attributes["id"]: e for e in root.walk() if "id" in e.attributes}
        self.referred = set(self._referred(root))
        """Ids of adapters that filters refer to."""
        self._count = 0

    def _referred(self, root: Element) -> Iterator[str]:
        for element in root.walk():
            if _name(element) == "filteredKahaDB":
                for inner in element.walk():
                    yield from _references(inner)

    def of(self, element: Element, depth: int) -> Element:
        self._count += 1
        if depth > DEPTH_MAX or self._count > ELEMENTS_MAX:
            raise ConfigError([Problem("beans that refer to each other without end", element.line)], str(self._path))
        attributes = {
            key: value
            for key, value in element.attributes.items()
            if not _is_reference(value) and not (element.name == "bean" and key in ("class", "id", "name"))
        }
        plain = Element(_name(element), attributes, element.line, [], element.text)
        for key, value in element.attributes.items():
            if _is_reference(value):
                plain.children.append(Element(key, {}, element.line, [self._by_reference(value[1:], element, depth)]))
        for child in element.children:
            if child.name == "property":
                self._property(child, plain, depth)
            elif child.name in ("list", "set"):
                plain.children += [self.of(one, depth + 1) for one in child.children]
            elif child.name == "ref":
                plain.children.append(self._by_reference(child.attributes.get("bean", ""), child, depth))
            else:
                plain.children.append(self.of(child, depth + 1))
        return plain

    def _property(self, child: Element, plain: Element, depth: int) -> None:
        name = child.attributes.get("name", "")
        value = child.child("value")
        if "value" in child.attributes:
            plain.attributes[name] = child.attributes["value"]
        elif value is not None:
            plain.attributes[name] = value.text.strip()
        elif "ref" in child.attributes:
            inner = [self._by_reference(child.attributes["ref"], child, depth)]
            plain.children.append(Element(name, {}, child.line, inner))
        else:
            plain.children.append(Element(name, {}, child.line, self.of(child, depth + 1).children))

    def _by_reference(self, name: str, at: Element, depth: int) -> Element:
        element = self._by_id.get(name)
        if element is None:
            raise ConfigError(
                [Problem(f"refers to bean {name!r}, which is not in this file", at.line)], str(self._path)
            )
        return self.of(element, depth + 1)


def _is_reference(value: str) -> bool:
    """Return whether an attribute names a bean; `#{...}` is an expression."""
    return value.startswith("#") and not value.startswith("#{")


def _references(element: Element) -> Iterator[str]:
    yield from (value[1:] for value in element.attributes.values() if _is_reference(value))
    if element.name == "property" and "ref" in element.attributes:
        yield element.attributes["ref"]
    if element.name == "ref":
        yield element.attributes.get("bean", "")
