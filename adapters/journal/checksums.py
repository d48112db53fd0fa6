"""A checksum of each page of the index's file, in a file beside it: LMDB 0.9 keeps none.

    <index>.sums   header, then the CRC-32C of each page of the index's file, 0 where the page does not count

LMDB believes every page that it reads: one flipped bit gives wrong messages, ends the process or never ends. So the
pages are verified before LMDB opens the file, and a file in doubt is not opened: the journal has everything.

The checksums are those of one commit of LMDB, the last checkpoint. LMDB writes a page anew instead of over itself, and
leaves the pages of the commit before alone until the one after. Hence

- a page that two commits in a row share is the same page: after a checkpoint only what is new in its tree is read;
- killed between a commit and the writing of its checksums, the commit before is whole, and its checksums say so: the
  younger is undone. This file may be stale, torn or gone: then the index is rebuilt, at worst for nothing.

Everything here reads the index's file by itself. Nothing of LMDB is asked.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

import google_crc32c
import lmdb

from ..files import FILE_MODE, sync_directory
from .files import File, write_all

log = logging.getLogger(__name__)

MAGIC: Final = b"ABsums\x00\x01"
HEADER = struct.Struct("=8sQII")
"""Magic, LMDB's number of the commit, bytes in a page, pages. Then the CRC-32C of these and of all that follows it."""
assert HEADER.size == 24
CRC = struct.Struct("=I")
SUM_BYTES: Final = 4
CHUNK_PAGES: Final = 256
"""Read at once when all are verified."""

META = struct.Struct("=8xHH4xII8xQ48s48sQQ")
"""A meta page, of which there are two, the first two pages, written in turn: 0, flags, magic, version, map size, the
tree of free pages, the main tree, last page, number of the commit."""
assert META.size == 152
TREE = struct.Struct("=IHHQQQQQ")
"""Bytes in a page (of the free pages' tree), flags, depth, branch, leaf and overflow pages, rows, root."""
assert TREE.size == 48
PAGE = struct.Struct("=QHHHH")
"""Its own number, 0, flags, end of the node pointers, begin of the nodes. Of an overflow page the last two are one: how
many pages it takes."""
assert PAGE.size == 16
PAGE_START = struct.Struct("=QxxH")
OVERFLOW_PAGES = struct.Struct("=12xI")
NODE = struct.Struct("=IHH")
"""In a leaf: bytes of the value, flags, bytes of the key, which follows. In a branch: the low 32 bits of the number of
the page below, the high 16, bytes of the key."""
assert NODE.size == 8
NUMBER = struct.Struct("=Q")

LMDB_MAGIC: Final = 0xBEEFC0DE
METAS: Final = 2
PAGE_SIZES: Final = range(512, 1 << 16)
BRANCH, LEAF, OVERFLOW = 1, 2, 4
IN_OVERFLOW, SUBTREE = 1, 2
EMPTY: Final = (1 << 64) - 1
DEPTH_MAX: Final = 32


class IndexBrokenError(Exception):
    """The index file is missing, damaged, of another version or another store: rebuild it."""


class Tree(NamedTuple):
    page_bytes: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    rows: int
    root: int


class Meta(NamedTuple):
    """What one commit begins at."""

    free: Tree
    main: Tree
    last_page: int
    commit: int


def checksum(page: bytes) -> int:
    """The CRC-32C of a page; never 0, which says that the page does not count."""
    return int(google_crc32c.value(page)) or 1


class PageChecksums:
    """Of one index file. Every method is called under the store's index lock."""

    def __init__(self, index: Path, file_mode: int = FILE_MODE) -> None:
        self.path = path_of(index)
        self._index, self._file_mode = index, file_mode
        self._commit = -1
        """The commit that `_sums` are of; -1 if of none."""
        self._sums = array("I")
        self._written = True

    def verify(self) -> bool:
        """Compare the index's file with its checksums, before LMDB opens it. Raises IndexBrokenError.

        True if a commit without checksums was undone.
        """
        try:
            commit, page_bytes, sums = self._read()
            file = File(self._index, os.O_RDWR)
            newest = commit % METAS
            undo = False
            for page in _different(file.fd, page_bytes, sums):
                if page >= METAS or page == newest:
                    raise IndexBrokenError(f"page {page} of its file is damaged")
                undo = True
            if undo:
                _repeat_meta(file.fd, page_bytes, commit)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise IndexBrokenError(f"its file cannot be read: {error}") from error
        self._commit, self._sums = commit, sums
        return undo

    def _read(self) -> tuple[int, int, array[int]]:
        """Commit, bytes in a page and checksums, as this file says."""
        try:
            return decode(self.path.read_bytes())
        except FileNotFoundError:
            raise IndexBrokenError("its checksums are missing") from None

    def write(self) -> None:
        """After a commit: make the checksums those of it. Raises lmdb.CorruptedError if its tree is none.

        An error of the disk is logged: without checksums the index is good, until the next open rebuilds it.
        """
        try:
            file = File(self._index, os.O_RDONLY)
            commit, page_bytes, sums = self._of_last_commit(file.fd)
            data = encode(commit, page_bytes, sums)
            is_new = not self.path.exists()
            target = File(self.path, os.O_RDWR | os.O_CREAT, self._file_mode)
            write_all(target.fd, data, 0)
            os.ftruncate(target.fd, len(data))
            os.fdatasync(target.fd)
            if is_new:
                sync_directory(self.path.parent)
        except OSError as error:
            if self._written:
                log.warning(
                    "%s cannot be written: %s; unless a later checkpoint can, the next open rebuilds the index",
                    self.path, error,
                )  # fmt: skip
            self._written, self._commit = False, -1
            self.remove()
        else:
            self._written, self._commit, self._sums = True, commit, sums

    def remove(self) -> None:
        """Take the file away. One that stays is stale, and found to be so."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("%s stays: %s", self.path, error)

    def _of_last_commit(self, fd: int) -> tuple[int, int, array[int]]:
        """The last commit, bytes in a page, and the checksums of its pages."""
        first = _Pages(fd, META.size).meta(0)
        pages = _Pages(fd, first.free.page_bytes)
        metas = sorted((first, pages.meta(1)), key=lambda meta: meta.commit)
        old, new = metas
        known = self._sums if old.commit == self._commit else array("I")
        sums = known + array("I", bytes(SUM_BYTES * max(0, new.last_page + 1 - len(known))))
        shared: set[int] = set()

        def is_known(page: int) -> bool:
            if page < len(known) and known[page]:
                shared.add(page)
                return True
            return False

        added = pages.walk(new, is_known)
        if known:
            for page in pages.walk(old, shared.__contains__, summed=False):
                sums[page] = 0
        for page, crc in added.items():
            sums[page] = crc
        for page in range(METAS):
            sums[page] = checksum(pages.read(page))
        return new.commit, pages.page_bytes, sums


class _Pages:
    """The index's file, read by itself. Raises lmdb.CorruptedError where it is no LMDB file."""

    def __init__(self, fd: int, page_bytes: int) -> None:
        self._fd = fd
        self.page_bytes = page_bytes

    def read(self, first: int, count: int = 1) -> bytes:
        data = os.pread(self._fd, self.page_bytes * count, first * self.page_bytes)
        if len(data) != self.page_bytes * count:
            raise lmdb.CorruptedError(f"page {first + count - 1} lies beyond the end of the file")
        return data

    def _read_all(self, pages: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Of pages in order of their numbers, in few calls."""
        size, position = self.page_bytes, 0
        while position < len(pages):
            end = position + 1
            while end < len(pages) and end - position < CHUNK_PAGES and pages[end] == pages[end - 1] + 1:
                end += 1
            data = self.read(pages[position], end - position)
            for number in range(end - position):
                yield pages[position + number], data[number * size : (number + 1) * size]
            position = end

    def meta(self, page: int) -> Meta:
        _, _, magic, _, _, free, main, last_page, commit = META.unpack_from(self.read(page))
        meta = Meta(Tree._make(TREE.unpack(free)), Tree._make(TREE.unpack(main)), last_page, commit)
        if magic != LMDB_MAGIC or meta.free.page_bytes not in PAGE_SIZES:
            raise lmdb.CorruptedError(f"page {page} is no meta page")
        return meta

    def walk(self, meta: Meta, is_known: Callable[[int], bool], summed: bool = True) -> dict[int, int]:
        """The checksum of each page of a commit, but of none that is known, nor of those below one. Without `summed`
        checksums are 0, and pages with nothing below them are not read."""
        found: dict[int, int] = {}

        def claim(pages: Sequence[int]) -> None:
            """Pages in order of their numbers, each of which is met for the first time."""
            if pages:
                inside = pages[0] >= METAS and pages[-1] <= meta.last_page
                if not inside or len(set(pages)) != len(pages) or not found.keys().isdisjoint(pages):
                    raise lmdb.CorruptedError(f"one of pages {pages[0]} to {pages[-1]} cannot be where it is")
                found.update(dict.fromkeys(pages, 0))

        trees = [meta.free, meta.main]
        while trees:
            tree = trees.pop()
            if tree.depth > DEPTH_MAX:
                raise lmdb.CorruptedError(f"a tree is {tree.depth} levels deep")
            level = [tree.root] if tree.root != EMPTY else []
            for above in range(tree.depth - 1, -1, -1):
                level = sorted(page for page in level if not is_known(page))
                claim(level)
                extents: list[int] = []
                below: list[int] = []
                parsed = above or tree.overflows or tree is meta.main
                for page, data in self._read_all(level) if parsed or summed else ():
                    self._require(page, data, BRANCH if above else LEAF)
                    if summed:
                        found[page] = checksum(data)
                    if above:
                        below += _children(data)
                    elif parsed:
                        _look_into(data, extents, trees)
                for first in extents:
                    if not is_known(first):
                        pages = self._extent(first)
                        claim(pages)
                        if summed:
                            found.update((page, checksum(data)) for page, data in self._read_all(pages))
                level = below
        return found

    def _require(self, page: int, data: bytes, kind: int) -> None:
        if PAGE_START.unpack_from(data) != (page, kind):
            raise lmdb.CorruptedError(f"page {page} is not what the tree says")

    def _extent(self, first: int) -> range:
        """The pages of a value that is too large for a leaf. Only the first has a header."""
        data = self.read(first)
        self._require(first, data, OVERFLOW)
        return range(first, first + OVERFLOW_PAGES.unpack_from(data)[0])


def _nodes(data: bytes) -> tuple[int, ...]:
    """The offsets of a page's nodes."""
    *_, end, begin = PAGE.unpack_from(data)
    if not PAGE.size <= end <= begin <= len(data) or end % 2:
        raise lmdb.CorruptedError("a page's bounds are none")
    offsets: tuple[int, ...] = struct.unpack_from(f"={(end - PAGE.size) // 2}H", data, PAGE.size)
    if offsets and max(offsets) + NODE.size > len(data):
        raise lmdb.CorruptedError("a node lies beyond its page")
    return offsets


def _children(data: bytes) -> list[int]:
    return [low | high << 32 for low, high, _ in map(NODE.unpack_from, repeat(data), _nodes(data))]


def _look_into(leaf: bytes, extents: list[int], trees: list[Tree]) -> None:
    """Add the first pages of values that are too large for it, and the trees that it holds."""
    try:
        for offset in _nodes(leaf):
            _, flags, key_bytes = NODE.unpack_from(leaf, offset)
            if flags & IN_OVERFLOW:
                extents.append(NUMBER.unpack_from(leaf, offset + NODE.size + key_bytes)[0])
            elif flags & SUBTREE:
                trees.append(Tree._make(TREE.unpack_from(leaf, offset + NODE.size + key_bytes)))
    except struct.error as error:
        raise lmdb.CorruptedError("a node lies beyond its page") from error


def _different(fd: int, page_bytes: int, sums: array[int]) -> Iterator[int]:
    """The pages that count and are not as their checksum says."""
    for start in range(0, len(sums), CHUNK_PAGES):
        some = sums[start : start + CHUNK_PAGES]
        data = os.pread(fd, page_bytes * CHUNK_PAGES, start * page_bytes) if any(some) else b""
        for number, expected in enumerate(some):
            if expected and checksum(data[number * page_bytes : (number + 1) * page_bytes]) != expected:
                yield start + number


def _repeat_meta(fd: int, page_bytes: int, commit: int) -> None:
    """Make the other meta page say what that of this commit says, as an older commit: LMDB takes the newest."""
    other = (commit + 1) % METAS
    page = bytearray(os.pread(fd, page_bytes, commit % METAS * page_bytes))
    NUMBER.pack_into(page, 0, other)
    NUMBER.pack_into(page, META.size - NUMBER.size, commit - 1)
    write_all(fd, bytes(page), other * page_bytes)
    os.fdatasync(fd)


def encode(commit: int, page_bytes: int, sums: array[int]) -> bytes:
    """The bytes of the file."""
    header, data = HEADER.pack(MAGIC, commit, page_bytes, len(sums)), sums.tobytes()
    return header + CRC.pack(google_crc32c.value(header + data)) + data


def decode(data: bytes) -> tuple[int, int, array[int]]:
    """Commit, bytes in a page and checksums. Raises IndexBrokenError."""
    begin = HEADER.size + CRC.size
    if len(data) < begin:
        raise IndexBrokenError("its checksums are cut short")
    magic, commit, page_bytes, pages = HEADER.unpack_from(data)
    if CRC.unpack_from(data, HEADER.size)[0] != google_crc32c.value(data[: HEADER.size] + data[begin:]):
        raise IndexBrokenError("its checksums are damaged")
    if magic != MAGIC or len(data) != begin + SUM_BYTES * pages:
        raise IndexBrokenError("its checksums are of another version")
    sums = array("I")
    sums.frombytes(data[begin:])
    return commit, page_bytes, sums


def path_of(index: Path) -> Path:
    """Where the checksums of an index file lie."""
    return index.with_suffix(".sums")
