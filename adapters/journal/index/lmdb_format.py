"""LMDB's file format: what the bytes of one page say.

Which pages of a file are read, and what for, checksums.py says.

These are LMDB 0.9's files, of this machine's byte order and 64 bits, without LMDB's options for duplicate keys. The
first two pages are the meta pages, which the commits write in turn: a file holds the last two commits, and pages that
the one before the last needs are not used again before the next one counts.
"""

from __future__ import annotations

import mmap
import struct
from itertools import repeat
from typing import Final, NamedTuple

import lmdb

MAGIC: Final = 0xBEEFC0DE
VERSION: Final = 1
METAS: Final = 2
"""The first pages of a file; the commit with the number n writes page n % 2."""
META = struct.Struct("=QxxH4xII8xQ48s48sQQ")
"""A meta page: its own number, flags, magic, version, the size of the map, the tree of free pages, the tree of tables,
last page, number of the commit. Before the size of the map stands its address."""
assert META.size == 152
TREE = struct.Struct("=IHHQQQQQ")
"""The fields of Tree."""
assert TREE.size == 48
PAGE = struct.Struct("=QHHHH")
"""Its own number, padding, flags, end of the pointers to its nodes, beginning of the nodes. In an overflow page the
last two are one number, that of the pages that it takes."""
assert PAGE.size == 16
PAGE_START = struct.Struct("=QxxH")
OVERFLOW_PAGES = struct.Struct("=12xI")
assert OVERFLOW_PAGES.size == PAGE.size
NODE = struct.Struct("=IHH")
"""In a leaf: bytes of the value, flags, bytes of the key, which follows, and then the value. In a branch: the low 32
bits of the number of the page below, the high 16, bytes of the key."""
assert NODE.size == 8
NUMBER = struct.Struct("=Q")
"""A page's number as the value of a node whose row lies in overflow pages."""

BRANCH, LEAF, OVERFLOW, META_PAGE = 1, 2, 4, 8
"""Flags of a page."""
IN_OVERFLOW, SUBTREE = 1, 2
"""Flags of a leaf's node."""
INTEGER_KEYS: Final = 0x08
"""Flag of a tree whose keys are numbers: that of free pages."""
NO_DIRECTORY: Final = 0x4000
"""Flag of the environment, which the tree of free pages has too: the file lies in no directory of its own."""
NO_PAGE: Final = (1 << 64) - 1
"""The root of an empty tree."""
DEPTH_MAX: Final = 32
"""LMDB's own limit of a tree's depth."""
PAGE_SIZES: Final = frozenset(1 << bits for bits in range(9, 17))
PAGE_BYTES_MAX: Final = 1 << 15
"""The size of pages with which LMDB makes a new file where the machine's pages are larger."""


class LmdbDamagedError(lmdb.CorruptedError):
    """The file is not what LMDB writes; `offset` in bytes is about where. LMDB itself was not asked."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


class Tree(NamedTuple):
    """A table, the tree of tables or that of free pages."""

    page_bytes: int
    """Bytes in a page, in the tree of free pages; 0 in all others."""
    flags: int
    depth: int
    branches: int
    """Branch pages."""
    leaves: int
    """Leaf pages."""
    overflows: int
    """Overflow pages."""
    rows: int
    root: int
    """The number of the page that it starts from."""


class Meta(NamedTuple):
    """The state from which one commit starts."""

    free: Tree
    main: Tree
    last_page: int
    commit: int
    """Its number, that of LMDB's transaction."""

    @property
    def page_bytes(self) -> int:
        return self.free.page_bytes


def read_tree(data: bytes, at: int = 0) -> Tree:
    """Return the tree that is written at `at`. Raises struct.error where the data end."""
    return Tree._make(TREE.unpack_from(data, at))


def empty_file(map_bytes: int) -> bytes:
    """Return the bytes that LMDB writes into a new file."""
    page_bytes = min(mmap.PAGESIZE, PAGE_BYTES_MAX)
    free = TREE.pack(page_bytes, INTEGER_KEYS | NO_DIRECTORY, 0, 0, 0, 0, 0, NO_PAGE)
    main = TREE.pack(0, 0, 0, 0, 0, 0, 0, NO_PAGE)
    metas = [META.pack(n, META_PAGE, MAGIC, VERSION, map_bytes, free, main, METAS - 1, 0) for n in range(METAS)]
    return b"".join(meta.ljust(page_bytes, b"\0") for meta in metas)


def read_meta(page: bytes, number: int, offset: int) -> Meta:
    """Return a meta page, or at least its beginning; `offset` in bytes is where in the file. Raises
    LmdbDamagedError."""
    if len(page) < META.size:
        raise LmdbDamagedError(offset + len(page), "it is cut short")
    own_number, flags, magic, version, _, free, main, last_page, commit = META.unpack_from(page)
    meta = Meta(read_tree(free), read_tree(main), last_page, commit)
    if (own_number, flags, magic, version) != (number, META_PAGE, MAGIC, VERSION) or meta.page_bytes not in PAGE_SIZES:
        raise LmdbDamagedError(offset, f"page {number} is no meta page of an LMDB 0.9 file")
    return meta


def require_page(page: bytes, number: int, kind: int) -> None:
    """Raise LmdbDamagedError unless this is the page with this number, and a BRANCH, LEAF or OVERFLOW."""
    if PAGE_START.unpack_from(page) != (number, kind):
        raise LmdbDamagedError(number * len(page), f"page {number} is damaged: it says that it is another one")


def node_offsets(page: bytes) -> tuple[int, ...]:
    """Return where the nodes of a branch or a leaf begin, in the order of their keys. The head of each lies in the
    page; what follows it may not. Raises LmdbDamagedError."""
    number, _, _, end, begin = PAGE.unpack_from(page)
    if not PAGE.size <= end <= begin <= len(page) or end % 2:
        raise LmdbDamagedError(number * len(page), f"page {number} is damaged: its nodes begin at {begin}")
    offsets: tuple[int, ...] = struct.unpack_from(f"={(end - PAGE.size) // 2}H", page, PAGE.size)
    if offsets and not begin <= min(offsets) <= max(offsets) <= len(page) - NODE.size:
        raise LmdbDamagedError(number * len(page), f"page {number} is damaged: it points outside of its nodes")
    return offsets


def children(branch: bytes) -> list[int]:
    """Return the numbers of the pages below a branch. Raises LmdbDamagedError."""
    return [low | high << 32 for low, high, _ in map(NODE.unpack_from, repeat(branch), node_offsets(branch))]


def overflow_pages(first: bytes) -> int:
    """Return how many pages a row takes, which is too large for its leaf; this is the first, and alone has a header."""
    return int(OVERFLOW_PAGES.unpack_from(first)[0])
