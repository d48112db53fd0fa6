"""An LMDB file read without LMDB: whether it is whole, and what is in it.

LMDB believes its file. One flipped bit there may abort the process, kill it, or show other rows without a word. What
must not do that is looked at here first: the two meta pages, every page that the trees reach, the list of free pages.
Rows themselves have no checksum in LMDB; who needs one keeps it in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .lmdb_format import (
    BRANCH,
    DEPTH_MAX,
    IN_OVERFLOW,
    INTEGER_KEYS,
    LEAF,
    META,
    METAS,
    NO_DIRECTORY,
    NO_PAGE,
    NODE,
    NUMBER,
    OVERFLOW,
    PAGE,
    SUBTREE,
    TREE,
    LmdbDamagedError,
    Meta,
    Tree,
    children,
    node_offsets,
    overflow_pages,
    read_meta,
    read_tree,
    require_page,
)

Rows = list[tuple[bytes, bytes]]


class Commit(NamedTuple):
    """What one of the two last commits left."""

    transaction: int
    """Its number; 0 where nothing was ever committed."""
    tables: dict[bytes, Rows]
    """By the table's name, its rows in order of their keys."""


def read_commits(path: Path) -> tuple[Commit, Commit]:
    """The last commit of a file that nobody has open, and the one before it. Reads all of the file into memory.

    Raises LmdbDamagedError for a file that LMDB must not be given, and OSError.
    """
    data = path.read_bytes()
    metas = _metas(data)
    before, last = sorted(metas, key=lambda meta: meta.commit)
    return _read(data, last, with_free=True), _read(data, before, with_free=False)


def _metas(data: bytes) -> list[Meta]:
    first = _meta(data, 0, 0)
    metas = [first, _meta(data, 1, first.page_bytes)]
    if first.page_bytes != metas[1].page_bytes:
        raise LmdbDamagedError(0, "its two meta pages differ in the size of a page")
    # Each commit writes the meta page that its number's last bit says, over the one before the last.
    numbers = [meta.commit for meta in metas]
    fresh = numbers == [0, 0]
    if not fresh and (numbers[0] % 2 or not numbers[1] % 2 or abs(numbers[0] - numbers[1]) != 1):
        raise LmdbDamagedError(0, f"its meta pages are of the transactions {numbers[0]} and {numbers[1]}")
    return metas


def _meta(data: bytes, number: int, at: int) -> Meta:
    meta = read_meta(data[at : at + META.size], number, at)
    if meta.main.page_bytes or meta.free.flags & ~NO_DIRECTORY != INTEGER_KEYS or meta.main.flags:
        raise LmdbDamagedError(at, f"the trees of meta page {number} have unknown options")
    if meta.last_page < 1 or (meta.last_page + 1) * meta.page_bytes > len(data):
        raise LmdbDamagedError(at, f"it ends before page {meta.last_page}, which it says is the last")
    return meta


def _read(data: bytes, meta: Meta, with_free: bool) -> Commit:
    walk = _Walk(data, meta)
    tables: dict[bytes, Rows] = {}
    for name, value, flags in walk.rows(meta.main):
        if flags != SUBTREE or len(value) != TREE.size:
            raise LmdbDamagedError(0, f"the table {name!r} is none")
        tree = read_tree(value)
        if tree.page_bytes or tree.flags:
            raise LmdbDamagedError(0, f"the table {name!r} has unknown options")
        tables[name] = [(key, row) for key, row, flags in walk.rows(tree) if walk.plain(flags)]
    if with_free:
        walk.check_free()
    return Commit(meta.commit, tables)


class _Walk:
    """Over all trees of one commit. No page is met twice, so that no walk is endless."""

    def __init__(self, data: bytes, meta: Meta) -> None:
        self._data, self._meta = data, meta
        self._used: set[int] = set()
        self._counts = [0, 0, 0]
        """Branch, leaf and overflow pages of the tree that is walked."""

    @staticmethod
    def plain(flags: int) -> bool:
        """True for a row that is data; raises for any other."""
        if flags:
            raise LmdbDamagedError(0, f"a row has unknown flags {flags:#x}")
        return True

    def rows(self, tree: Tree, integers: bool = False) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, data and flags of all rows. Raises LmdbDamagedError, at the end too if counts do not fit."""
        self._counts = [0, 0, 0]
        found: list[tuple[bytes, bytes, int]] = []
        if tree.root != NO_PAGE:
            if not 1 <= tree.depth <= DEPTH_MAX:
                raise LmdbDamagedError(0, f"a tree has a depth of {tree.depth}")
            found += self._page(tree.root, tree.depth, None, None, integers)
        counted = (*self._counts, len(found))
        if (tree.branches, tree.leaves, tree.overflows, tree.rows) != counted or (tree.depth and not found):
            raise LmdbDamagedError(0, f"a tree has other numbers of pages and rows than it says: {counted}")
        yield from found

    def _page(
        self, number: int, depth: int, low: bytes | None, high: bytes | None, integers: bool
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """The rows below a page, whose keys are from `low` to before `high`."""
        page = self._take(number, BRANCH if depth > 1 else LEAF)
        at = number * len(page)
        self._counts[depth == 1] += 1
        keys: list[bytes] = []
        nodes: list[tuple[int, int, int]] = []
        for offset in node_offsets(page):
            length, flags, key_bytes = NODE.unpack_from(page, offset)
            start = offset + NODE.size
            end = start + key_bytes
            if end > len(page):
                raise LmdbDamagedError(at, f"a key of page {number} goes beyond it")
            keys.append(page[start:end])
            nodes.append((length, flags, end))
        if depth > 1 and keys:
            keys[0] = low if low is not None else b""  # LMDB never looks at it
        if len(nodes) < (2 if depth > 1 and not integers else 1):
            raise LmdbDamagedError(at, f"page {number} has too few nodes")
        self._require_order(at, number, keys, low, high, integers)
        if depth > 1:
            bounds = [low, *keys[1:], high]
            for child, (below, above) in zip(children(page), itertools.pairwise(bounds), strict=True):
                yield from self._page(child, depth - 1, below, above, integers)
            return
        for key, (length, flags, end) in zip(keys, nodes, strict=True):
            yield key, self._value(number, page, end, length, flags & IN_OVERFLOW), flags & ~IN_OVERFLOW

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

    def _value(self, number: int, leaf: bytes, start: int, length: int, in_overflow: int) -> bytes:
        size = len(leaf)
        if start + (NUMBER.size if in_overflow else length) > size:
            raise LmdbDamagedError(number * size, f"a row of page {number} goes beyond it")
        if not in_overflow:
            return leaf[start : start + length]
        first = NUMBER.unpack_from(leaf, start)[0]
        pages = overflow_pages(self._take(first, OVERFLOW))  # more than it needs, where a longer row was replaced
        at = first * size
        if pages * size < PAGE.size + length:
            raise LmdbDamagedError(at, f"page {first} is damaged")
        self._take_pages(first + 1, pages - 1)
        self._counts[2] += pages
        return self._data[at + PAGE.size : at + PAGE.size + length]

    def _take(self, number: int, kind: int) -> bytes:
        """A page that has not been met before."""
        self._take_pages(number, 1)
        size = self._meta.page_bytes
        page = self._data[number * size : (number + 1) * size]
        require_page(page, number, kind)
        return page

    def _take_pages(self, number: int, pages: int) -> None:
        """Pages that have not been met before."""
        if pages and not METAS <= number <= number + pages - 1 <= self._meta.last_page:
            raise LmdbDamagedError(0, f"there is no page {number}")
        taken = set(range(number, number + pages))
        if taken & self._used:
            raise LmdbDamagedError(number * self._meta.page_bytes, f"page {number} is used twice")
        self._used |= taken

    def check_free(self) -> None:
        """Raise unless no page is free that is used, or free twice: the next commit writes over it."""
        free: set[int] = set()
        for key, value, flags in self.rows(self._meta.free, integers=True):
            whole = len(key) == NUMBER.size and value and not len(value) % NUMBER.size
            if flags or not whole or NUMBER.unpack(key)[0] > self._meta.commit:
                raise LmdbDamagedError(0, "the list of free pages is damaged")
            count, *numbers = (number for (number,) in NUMBER.iter_unpack(value))
            if count > len(numbers):
                raise LmdbDamagedError(0, "the list of free pages is cut short")
            for number in numbers[:count]:
                if not METAS <= number <= self._meta.last_page or number in free:
                    raise LmdbDamagedError(0, f"page {number} cannot be free")
                free.add(number)
            if any(not one > other for one, other in itertools.pairwise(numbers[:count])):
                raise LmdbDamagedError(0, "the list of free pages is not in order")
        if free & self._used:
            raise LmdbDamagedError(0, f"page {min(free & self._used)} is both free and used")
