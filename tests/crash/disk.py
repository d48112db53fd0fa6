"""What a power failure may leave: a run's calls in order, and the directories that a disk could hold at each point.

Strict rules. Data is durable by a sync of its file, a name by a sync of its directory; what is not synced may be there
or not, each call on its own, and a write may be torn at 512-byte sectors. A rename is atomic. LMDB, which makes its
writes itself, is taken at its word: a commit is on disk when it returns, or not there at all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = "/data"
SECTOR: Final = 512


class Call(NamedTuple):
    """One that changes what the disk holds, or makes durable what it was told."""

    kind: str
    """link, mkdir, unlink, rename; write, size, grow, whole; sync."""
    node: int
    """The file, or for names the directory that has to be synced."""
    path: str
    """The file's, as it was then."""
    arguments: tuple[Any, ...] = ()
    """link, mkdir: name, node; unlink: name; rename: directory, name, node, new name; write: offset, bytes; size:
    bytes; grow: bytes at least; whole: bytes (all of the file, durable at once)."""


class Recorder:
    """Watches a run (calls.Faults.watch) whose directory is `base`/data."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self.calls: list[Call] = []
        self._nodes: dict[str, int] = {ROOT: 0}
        self._numbers = itertools.count(1)

    def now(self) -> int:
        """How many calls there were."""
        return len(self.calls)

    def watch(self, name: str, target: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open" and arguments[1] & os.O_CREAT:
            self._made(target)
            if arguments[1] & os.O_TRUNC:
                self._add("size", target, 0)
        elif name == "mkdir" and target != ROOT:
            self._made(target, "mkdir")
        elif name == "pwrite":
            _, data, offset = arguments
            self._add("write", target, offset, bytes(data[:result]))
        elif name in ("fsync", "fdatasync"):
            if target not in self._nodes:  # written by other calls than those that are watched
                self._made(target)
                self._add("write", target, 0, self._content(target))
            self._add("sync", target)
        elif name == "truncate":
            self._add("size", target, arguments[1])
        elif name == "posix_fallocate":
            self._add("grow", target, arguments[1] + arguments[2])
        elif name == "unlink":
            self._name("unlink", target, Path(target).name)
            self._nodes.pop(target)
        elif name == "rename":
            self._renamed(target, os.fspath(arguments[1]).removeprefix(str(self._base)))
        elif name == "mdb_env_open" and target not in self._nodes:
            self._made(target)
            self._add("write", target, 0, self._content(target))
        elif name in ("mdb_env_sync", "mdb_txn_commit"):
            self._add("whole", target, self._content(target))

    def _content(self, target: str) -> bytes:
        return Path(f"{self._base}{target}").read_bytes()

    def _made(self, target: str, kind: str = "link") -> None:
        if target not in self._nodes:
            self._nodes[target] = next(self._numbers)
            self._name(kind, target, Path(target).name, self._nodes[target])

    def _renamed(self, old: str, new: str) -> None:
        inside = [name for name in self._nodes if name == old or name.startswith(old + "/")]
        moved = {new + name[len(old) :]: self._nodes.pop(name) for name in inside}
        self._nodes.update(moved)
        self._name("rename", new, self._nodes[str(Path(old).parent)], Path(old).name, moved[new], Path(new).name)

    def _name(self, kind: str, target: str, *arguments: Any) -> None:
        self.calls.append(Call(kind, self._nodes[str(Path(target).parent)], target, arguments))

    def _add(self, kind: str, target: str, *arguments: Any) -> None:
        self.calls.append(Call(kind, self._nodes[target], target, arguments))


class State(NamedTuple):
    """A directory that may be found after a power failure."""

    kept: int
    """Bit n: call n has taken effect."""
    torn: tuple[int, str] | None
    """A call of which only some sectors are there, and which: even, odd, first."""
    point: int
    """So many calls had been made."""
    what: str


@dataclass(frozen=True)
class Levels:
    """Calls `first` to `last` (not included) may have been made at once, those on different stores in any order."""

    first: int
    last: int


def states(calls: Sequence[Call], levels: Sequence[Levels] = ()) -> Iterator[State]:
    """At every point: nothing kept that is not synced, all of it, one call alone, all but one, each prefix, sizes
    without data, the last write torn. In levels: every combination of how far each has come, nothing or all kept."""
    for point in range(len(calls) + 1):
        yield from _at(calls, range(point), point)
    for level in levels:
        yield from _between(calls, level)


def _at(calls: Sequence[Call], made: Sequence[int], point: int) -> Iterator[State]:
    durable, pending = _settled(calls, made)
    bits = [1 << number for number in pending]
    everything = durable | sum(bits)
    yield State(durable, None, point, "none")
    yield State(everything, None, point, "all")
    for number, bit in zip(pending, bits, strict=True):
        yield State(durable | bit, None, point, f"only-{number}")
        yield State(everything & ~bit, None, point, f"without-{number}")
    for count in range(2, len(bits)):
        yield State(durable | sum(bits[:count]), None, point, f"prefix-{count}")
    writes = [number for number in pending if calls[number].kind == "write"]
    if writes:
        last = writes[-1]
        offset, data = calls[last].arguments
        if offset // SECTOR != (offset + len(data) - 1) // SECTOR:
            for pattern in ("even", "odd", "first"):
                yield State(durable, (last, pattern), point, f"torn-{last}-{pattern}")
                yield State(everything & ~(1 << last), (last, pattern), point, f"all-torn-{last}-{pattern}")
        yield State(everything & ~sum(1 << n for n in writes), (last, "zeros"), point, f"zeros-{last}")


def _settled(calls: Sequence[Call], made: Sequence[int]) -> tuple[int, list[int]]:
    """Of the calls that were made: those that are durable, and the others, in order."""
    durable, pending = 0, list[int]()
    for number in made:
        call = calls[number]
        if call.kind in ("sync", "whole"):
            for earlier in [n for n in pending if calls[n].node == call.node]:
                durable |= 1 << earlier
                pending.remove(earlier)
            if call.kind == "whole":
                durable |= 1 << number
        else:
            pending.append(number)
    return durable, pending


def _between(calls: Sequence[Call], levels: Levels) -> Iterator[State]:
    by_store: dict[str, list[int]] = {}
    for number in range(levels.first, levels.last):
        by_store.setdefault("/".join(calls[number].path.split("/")[:4]), []).append(number)
    before = range(levels.first)
    for progress in itertools.product(*(range(len(level) + 1) for level in by_store.values())):
        some = [n for level, count in zip(by_store.values(), progress, strict=True) for n in level[:count]]
        durable, pending = _settled(calls, [*before, *sorted(some)])
        what = "-".join(map(str, progress))
        yield State(durable, None, levels.last, f"levels-{what}-none")
        yield State(durable | sum(1 << n for n in pending), None, levels.last, f"levels-{what}-all")


def build(calls: Sequence[Call], state: State, base: Path) -> None:
    """Make the directory of a state in `base`, which holds nothing yet."""
    names: dict[int, dict[str, int]] = {0: {}}
    data: dict[int, bytearray | bytes] = {}
    for number, call in enumerate(calls[: state.point]):
        if state.torn and state.torn[0] == number:
            _tear(data, call, state.torn[1])
        elif state.kept >> number & 1:
            _apply(names, data, call)
    directory = Path(f"{base}{ROOT}")
    directory.mkdir(parents=True)
    directories = {call.arguments[1] for call in calls if call.kind == "mkdir"}
    _write(directory, 0, names, data, directories)


def _apply(names: dict[int, dict[str, int]], data: dict[int, bytearray | bytes], call: Call) -> None:
    if call.kind in ("link", "mkdir"):
        name, node = call.arguments
        names.setdefault(call.node, {})[name] = node
    elif call.kind == "unlink":
        names.setdefault(call.node, {}).pop(call.arguments[0], None)
    elif call.kind == "rename":
        old_directory, old_name, node, new_name = call.arguments
        names.setdefault(old_directory, {}).pop(old_name, None)
        names.setdefault(call.node, {})[new_name] = node
    elif call.kind == "whole":
        data[call.node] = call.arguments[0]
    elif call.kind == "write":
        _put(data, call.node, *call.arguments)
    elif call.kind == "grow":
        content = data.get(call.node, b"")
        data[call.node] = bytearray(content) + bytes(max(0, call.arguments[0] - len(content)))
    elif call.kind == "size":
        content = bytearray(data.get(call.node, b""))
        size = call.arguments[0]
        data[call.node] = content[:size] + bytes(max(0, size - len(content)))


def _put(data: dict[int, bytearray | bytes], node: int, offset: int, more: bytes) -> None:
    content = data.get(node, b"")
    if not isinstance(content, bytearray):
        content = data[node] = bytearray(content)
    if len(content) < offset:
        content += bytes(offset - len(content))
    content[offset : offset + len(more)] = more


def _tear(data: dict[int, bytearray | bytes], call: Call, pattern: str) -> None:
    offset, written = call.arguments
    if pattern == "zeros":  # the size has reached the disk, the data has not
        content = data.get(call.node, b"")
        end = offset + len(written)
        if len(content) < end:
            _put(data, call.node, len(content), bytes(end - len(content)))
        return
    first, last = offset // SECTOR, (offset + len(written) - 1) // SECTOR
    for sector in range(first, last + 1):
        place = sector - first
        if {"even": place % 2 == 0, "odd": place % 2 == 1, "first": sector < (first + last + 1) // 2}[pattern]:
            start, end = max(offset, sector * SECTOR), min(offset + len(written), (sector + 1) * SECTOR)
            _put(data, call.node, start, written[start - offset : end - offset])


def _write(
    path: Path,
    node: int,
    names: dict[int, dict[str, int]],
    data: dict[int, bytearray | bytes],
    directories: set[int],
) -> None:
    for name, child in names.get(node, {}).items():
        if child in directories:
            (path / name).mkdir()
            _write(path / name, child, names, data, directories)
        else:
            (path / name).write_bytes(data.get(child, b""))


def differences(one: Path, other: Path) -> list[str]:
    """Files that differ between two directories, locks aside."""
    found = []
    listed = [
        {p.relative_to(d): p for p in d.rglob("*") if p.is_file() and not p.name.endswith((".lock", "-lock"))}
        for d in (one, other)
    ]
    for name in sorted({*listed[0], *listed[1]}):
        files = [some.get(name) for some in listed]
        contents = [file.read_bytes() if file else None for file in files]
        if contents[0] != contents[1]:
            found.append(f"{name}: {[len(c) if c is not None else None for c in contents]} bytes")
    return found
