"""The broker's own note of which file's acks need which files: a serialised Java `HashMap<Integer, Set<Integer>>`.

KahaDB writes it at each checkpoint. We work the same out from the acks themselves; the map tells in addition which
files the broker still had when it wrote it, and so which are missing now. Only what this map needs of Java's
serialisation is understood.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

_STREAM_HEADER = b"\xac\xed\x00\x05"
_NULL, _REFERENCE, _CLASS, _OBJECT, _STRING, _BLOCK, _END_BLOCK = 0x70, 0x71, 0x72, 0x73, 0x74, 0x77, 0x78
_FIRST_HANDLE = 0x7E0000
_HAS_OWN_DATA = 1  # the class wrote more than its fields
_PRIMITIVES = {
    "B": struct.Struct(">b"),
    "C": struct.Struct(">H"),
    "D": struct.Struct(">d"),
    "F": struct.Struct(">f"),
    "I": struct.Struct(">i"),
    "J": struct.Struct(">q"),
    "S": struct.Struct(">h"),
    "Z": struct.Struct(">?"),
}


class AckMapError(ValueError):
    """The bytes are not such a map; says why."""


@dataclass(slots=True)
class _Class:
    flags: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)
    parent: _Class | None = None


@dataclass(slots=True)
class _Instance:
    fields: dict[str, object] = field(default_factory=dict)
    items: list[object] = field(default_factory=list)


def read_ack_map(data: bytes) -> dict[int, frozenset[int]]:
    """Return file -> files that hold messages which its acks end. Raises AckMapError."""
    if data[:4] != _STREAM_HEADER:
        raise AckMapError("no Java serialisation")
    try:
        root = _Parser(data).value()
    except (IndexError, struct.error, RecursionError) as error:
        raise AckMapError("the map is cut") from error
    items = _items(root)
    return {
        _number(key): frozenset(_number(item) for item in _items(value))
        for key, value in zip(items[::2], items[1::2], strict=False)
    }


def _items(value: object) -> list[object]:
    if not isinstance(value, _Instance):
        raise AckMapError("a map or a set was expected")
    return value.items


def _number(value: object) -> int:
    number = value.fields.get("value") if isinstance(value, _Instance) else None
    if not isinstance(number, int):
        raise AckMapError("a file number was expected")
    return number


class _Parser:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = len(_STREAM_HEADER)
        self._handles: list[object] = []

    def value(self) -> object:
        kind = self._byte()
        if kind == _NULL:
            return None
        if kind == _REFERENCE:
            return self._handles[self._unpack(_PRIMITIVES["I"]) - _FIRST_HANDLE]
        if kind == _STRING:
            text = self._text()
            self._handles.append(text)
            return text
        if kind == _OBJECT:
            return self._object()
        raise AckMapError(f"unexpected element {kind:#x} at byte {self._at - 1}")

    def _object(self) -> _Instance:
        described = self._class()
        if described is None:
            raise AckMapError("an object without a class")
        instance = _Instance()
        self._handles.append(instance)
        self._fill(instance, described)
        return instance

    def _fill(self, instance: _Instance, described: _Class) -> None:
        """Read what each class of an instance wrote, its ancestors first."""
        if described.parent is not None:
            self._fill(instance, described.parent)
        for name, kind in described.fields:
            codec = _PRIMITIVES.get(kind)
            instance.fields[name] = self._unpack(codec) if codec else self.value()
        if described.flags & _HAS_OWN_DATA:
            self._own_data(instance)

    def _own_data(self, instance: _Instance) -> None:
        while True:
            kind = self._data[self._at]
            if kind == _END_BLOCK:
                self._at += 1
                return
            if kind == _BLOCK:  # capacity and size
                self._at += 2 + self._data[self._at + 1]
            else:
                instance.items.append(self.value())

    def _class(self) -> _Class | None:
        kind = self._byte()
        if kind == _NULL:
            return None
        if kind == _REFERENCE:
            found = self._handles[self._unpack(_PRIMITIVES["I"]) - _FIRST_HANDLE]
            if not isinstance(found, _Class):
                raise AckMapError("a reference to a class leads elsewhere")
            return found
        if kind != _CLASS:
            raise AckMapError(f"unexpected class element {kind:#x} at byte {self._at - 1}")
        self._text()  # its name
        self._at += 8  # serial version
        described = _Class()
        self._handles.append(described)
        described.flags = self._byte()
        for _ in range(self._byte() << 8 | self._byte()):
            code = chr(self._byte())
            described.fields.append((self._text(), code))
            if code in "L[":
                self.value()  # the name of the field's class
        if self._byte() != _END_BLOCK:
            raise AckMapError("a class with annotations")
        described.parent = self._class()
        return described

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _unpack(self, codec: struct.Struct) -> int:
        value: int = codec.unpack_from(self._data, self._at)[0]
        self._at += codec.size
        return value

    def _text(self) -> str:
        length = self._byte() << 8 | self._byte()
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")
