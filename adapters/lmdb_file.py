"""LMDB's file format, read without LMDB: whether a file is whole, and what is in it.

LMDB believes its file. One flipped bit there may abort the process, kill it, or show other rows without a word. What
must not do that is looked at here first: the two meta pages, every page that the trees reach, the list of free pages.
Rows themselves have no checksum in LMDB; who needs one keeps it in a row.

Read are LMDB 0.9's files of this machine's byte order and 64 bits, without LMDB's options for duplicate keys. A file
holds the last two commits: pages that the one before the last needs are not used again before the next one counts.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from .files import LMDB_MAGIC

META_AT: Final = 16
META: Final = struct.Struct("=II8x8x")
"""Magic, version; address and size of the map are nothing to us. Two TREEs follow, of free pages and of tables."""
assert META.size == 24
TREE: Final = struct.Struct("=IHHQQQQQ")
"""Padding (in the first: the page size), flags, depth, branch pages, leaf pages, overflow pages, entries, root."""
assert TREE.size == 48
META_END: Final = struct.Struct("=QQ")
"""Last page, transaction."""
assert META_END.size == 16
PAGE: Final = struct.Struct("=QHHHH")
"""Number, padding, flags, end of the pointers, beginning of the nodes; in an overflow page the last two are one number,
that of its pages."""
assert PAGE.size == 16
PAGES: Final = struct.Struct("=12xI")
assert PAGES.size == PAGE.size
NODE: Final = struct.Struct("=HHHH")
"""Length of the data (low, high), flags, length of the key. In a branch the first three are a page's number."""
assert NODE.size == 8
NUMBER: Final = struct.Struct("=Q")

_VERSION: Final = 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _TABLE = 1, 2
_NO_PAGE: Final = (1 << 64) - 1
_INTEGER_KEYS: Final = 0x08
_NO_DIRECTORY: Final = 0x4000
_PAGE_BYTES: Final = tuple(1 << bits for bits in range(9, 17))
DEPTH_MAX: Final = 32
"""LMDB's own limit of a tree's depth."""

Rows = list[tuple[bytes, bytes]]


class LmdbDamagedError(Exception):
    """The file is not what LMDB writes; `offset` in bytes is about where."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


class Commit(NamedTuple):
    """What one of the two last commits left."""

    transaction: int
    """Its number; 0 where nothing was ever committed."""
    tables: dict[bytes, Rows]
    """By the table's name, its rows in order of their keys."""


class _Tree(NamedTuple):
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class _Meta(NamedTuple):
    page_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    transaction: int


def read_commits(path: Path) -> tuple[Commit, Commit]:
    """The last commit of a file that nobody has open, and the one before it. Reads all of the file into memory.

    Raises LmdbDamagedError for a file that LMDB must not be given, and OSError.
    """
    data = path.read_bytes()
    metas = _metas(data)
    last, before = sorted(metas, key=lambda meta: meta.transaction, reverse=True)
    return _read(data, last, with_free=True), _read(data, before, with_free=False)


def _metas(data: bytes) -> list[_Meta]:
    first = _meta(data, 0, 0)
    metas = [first, _meta(data, 1, first.page_bytes)]
    if metas[0].page_bytes != metas[1].page_bytes:
        raise LmdbDamagedError(META_AT, "its two meta pages differ in the size of a page")
    # Each commit writes the meta page that its number's last bit says, over the one before the last.
    numbers = [meta.transaction for meta in metas]
    fresh = numbers == [0, 0]
    if not fresh and (numbers[0] % 2 or not numbers[1] % 2 or abs(numbers[0] - numbers[1]) != 1):
        raise LmdbDamagedError(META_AT, f"its meta pages are of the transactions {numbers[0]} and {numbers[1]}")
    return metas


def _meta(data: bytes, number: int, at: int) -> _Meta:
    end = at + META_AT + META.size + 2 * TREE.size + META_END.size
    if len(data) < end:
        raise LmdbDamagedError(len(data), "it is cut short")
    page_number, _, page_flags, _, _ = PAGE.unpack_from(data, at)
    magic, version = META.unpack_from(data, at + META_AT)
    if (page_number, page_flags, magic, version) != (number, _META, LMDB_MAGIC, _VERSION):
        raise LmdbDamagedError(at, f"page {number} is no meta page of an LMDB 0.9 file")
    trees_at = at + META_AT + META.size
    page_bytes, *free = TREE.unpack_from(data, trees_at)
    padding, *main = TREE.unpack_from(data, trees_at + TREE.size)
    last_page, transaction = META_END.unpack_from(data, end - META_END.size)
    if page_bytes not in _PAGE_BYTES or padding or free[0] & ~_NO_DIRECTORY != _INTEGER_KEYS or main[0]:
        raise LmdbDamagedError(trees_at, f"the trees of meta page {number} have unknown options")
    if last_page < 1 or (last_page + 1) * page_bytes > len(data):
        raise LmdbDamagedError(end - META_END.size, f"it ends before page {last_page}, which it says is the last")
    return _Meta(page_bytes, _Tree(*free), _Tree(*main), last_page, transaction)


def _read(data: bytes, meta: _Meta, with_free: bool) -> Commit:
    walk = _Walk(data, meta)
    tables: dict[bytes, Rows] = {}
    for name, value, flags in walk.rows(meta.main):
        if flags != _TABLE or len(value) != TREE.size:
            raise LmdbDamagedError(0, f"the table {name!r} is none")
        padding, *tree = TREE.unpack(value)
        if padding or tree[0]:
            raise LmdbDamagedError(0, f"the table {name!r} has unknown options")
        tables[name] = [(key, row) for key, row, flags in walk.rows(_Tree(*tree)) if walk.plain(flags)]
    if with_free:
        walk.check_free()
    return Commit(meta.transaction, tables)


class _Walk:
    """Over all trees of one commit. No page is met twice, so that no walk is endless."""

    def __init__(self, data: bytes, meta: _Meta) -> None:
        self._data, self._meta = data, meta
        self._page_bytes = meta.page_bytes
        self._used: set[int] = set()
        self._counts = [0, 0, 0]
        """Branch, leaf and overflow pages of the tree that is walked."""

    @staticmethod
    def plain(flags: int) -> bool:
        """True for a row that is data; raises for any other."""
        if flags:
            raise LmdbDamagedError(0, f"a row has unknown flags {flags:#x}")
        return True

    def rows(self, tree: _Tree, integers: bool = False) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, data and flags of all rows. Raises LmdbDamagedError, at the end too if counts do not fit."""
        self._counts = [0, 0, 0]
        found: list[tuple[bytes, bytes, int]] = []
        if tree.root != _NO_PAGE:
            if not 1 <= tree.depth <= DEPTH_MAX:
                raise LmdbDamagedError(0, f"a tree has a depth of {tree.depth}")
            found += self._page(tree.root, tree.depth, None, None, integers)
        counted = (*self._counts, len(found))
        if (tree.branches, tree.leaves, tree.overflows, tree.entries) != counted or (tree.depth and not found):
            raise LmdbDamagedError(0, f"a tree has other numbers of pages and rows than it says: {counted}")
        yield from found

    def _page(
        self, number: int, depth: int, low: bytes | None, high: bytes | None, integers: bool
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """The rows below a page, whose keys are from `low` to before `high`."""
        at = self._take(number)
        data, size = self._data, self._page_bytes
        _, _, flags, lower, upper = PAGE.unpack_from(data, at)
        if flags != (_LEAF if depth == 1 else _BRANCH) or not PAGE.size <= lower <= upper <= size or lower % 2:
            raise LmdbDamagedError(at, f"page {number} is damaged")
        self._counts[depth == 1] += 1
        keys: list[bytes] = []
        nodes: list[tuple[int, int, int, int]] = []
        for (pointer,) in struct.iter_unpack("=H", data[at + PAGE.size : at + lower]):
            if not upper <= pointer <= size - NODE.size:
                raise LmdbDamagedError(at, f"page {number} points outside of its nodes")
            node = NODE.unpack_from(data, at + pointer)
            start = pointer + NODE.size
            if start + node[3] > size:
                raise LmdbDamagedError(at, f"a key of page {number} goes beyond it")
            nodes.append((node[0], node[1], node[2], start + node[3]))
            keys.append(data[at + start : at + start + node[3]])
        if depth > 1 and keys:
            keys[0] = low if low is not None else b""  # LMDB never looks at it
        if len(nodes) < (2 if depth > 1 and not integers else 1):
            raise LmdbDamagedError(at, f"page {number} has too few nodes")
        self._require_order(at, number, keys, low, high, integers)
        for place, (first, second, third, end) in enumerate(nodes):
            if depth > 1:
                child = first | second << 16 | third << 32
                below = keys[place] if place else low
                above = keys[place + 1] if place + 1 < len(nodes) else high
                yield from self._page(child, depth - 1, below, above, integers)
            else:
                length = first | second << 16
                yield keys[place], self._value(number, at, end, length, third & _BIG), third & ~_BIG

    def _require_order(
        self, at: int, number: int, keys: list[bytes], low: bytes | None, high: bytes | None, integers: bool
    ) -> None:
        if integers and any(len(key) not in (0, NUMBER.size) for key in keys):
            raise LmdbDamagedError(at, f"a key of page {number} is no number")
        ordered = [NUMBER.unpack(key)[0] if key else -1 for key in keys] if integers else keys
        bounds = [b if b is None or not integers else (NUMBER.unpack(b)[0] if b else -1) for b in (low, high)]
        pairs = itertools.pairwise(ordered)
        if (
            any(not one < other for one, other in pairs)  # type: ignore[operator]
            or (bounds[0] is not None and ordered[0] < bounds[0])  # type: ignore[operator]
            or (bounds[1] is not None and not ordered[-1] < bounds[1])  # type: ignore[operator]
        ):
            raise LmdbDamagedError(at, f"the keys of page {number} are not in order")

    def _value(self, number: int, at: int, start: int, length: int, big: int) -> bytes:
        size, data = self._page_bytes, self._data
        if not big:
            if start + length > size:
                raise LmdbDamagedError(at, f"a row of page {number} goes beyond it")
            return data[at + start : at + start + length]
        if start + NUMBER.size > size:
            raise LmdbDamagedError(at, f"a row of page {number} goes beyond it")
        page = NUMBER.unpack_from(data, at + start)[0]
        over = self._take(page)
        pages = PAGES.unpack_from(data, over)[0]  # more than it needs, where a longer row was replaced
        if PAGE.unpack_from(data, over)[2] != _OVERFLOW or pages * size < PAGE.size + length:
            raise LmdbDamagedError(over, f"page {page} is damaged")
        self._take_pages(page + 1, pages - 1)
        self._counts[2] += pages
        return data[over + PAGE.size : over + PAGE.size + length]

    def _take(self, number: int) -> int:
        """Where a page begins that has not been met before."""
        self._take_pages(number, 1)
        at = number * self._page_bytes
        if PAGE.unpack_from(self._data, at)[0] != number:
            raise LmdbDamagedError(at, f"page {number} says that it is another one")
        return at

    def _take_pages(self, number: int, pages: int) -> None:
        """Pages that have not been met before."""
        if pages and not 2 <= number <= number + pages - 1 <= self._meta.last_page:
            raise LmdbDamagedError(0, f"there is no page {number}")
        taken = set(range(number, number + pages))
        if taken & self._used:
            raise LmdbDamagedError(number * self._page_bytes, f"page {number} is used twice")
        self._used |= taken

    def check_free(self) -> None:
        """Raise unless no page is free that is used, or free twice: the next commit writes over it."""
        free: set[int] = set()
        for key, value, flags in self.rows(self._meta.free, integers=True):
            if flags or NUMBER.unpack(key)[0] > self._meta.transaction or len(value) % NUMBER.size or not value:
                raise LmdbDamagedError(0, "the list of free pages is damaged")
            count, *numbers = (number for (number,) in NUMBER.iter_unpack(value))
            if count > len(numbers):
                raise LmdbDamagedError(0, "the list of free pages is cut short")
            for number in numbers[:count]:
                if not 2 <= number <= self._meta.last_page or number in free:
                    raise LmdbDamagedError(0, f"page {number} cannot be free")
                free.add(number)
            if any(not one > other for one, other in itertools.pairwise(numbers[:count])):
                raise LmdbDamagedError(0, "the list of free pages is not in order")
        if free & self._used:
            raise LmdbDamagedError(0, f"page {min(free & self._used)} is both free and used")
