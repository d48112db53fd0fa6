"""A checksum of each page of the index's file, in a file beside it: LMDB 0.9 keeps none (rule X8).

    <index>.sums   header, then the CRC-32C of each page of the index's file, 0 where the page does not count; what is
                   behind them was allocated ahead, or is of an earlier commit, and says nothing

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
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import google_crc32c

from ...system.files import FILE_MODE, extend, is_out_of_files, read_file, sync_data, sync_file, write_all
from ...wal.files.file import File
from . import lmdb_format as lm

log: logging.Logger = logging.getLogger(__name__)

MAGIC: Final = b"ABsums\x00\x01"
HEADER = struct.Struct("=8sQII")
"""Magic, LMDB's number of the commit, bytes in a page, pages. Then the CRC-32C of these and of all that follows it."""
assert HEADER.size == 24
CRC = struct.Struct("=I")
SUM_BYTES: Final = 4
CHUNK_PAGES: Final = 256
"""Read at once when all are verified."""


class IndexBrokenError(Exception):
    """The index file is missing, damaged, of another version or another store: rebuild it."""


def checksum(page: bytes) -> int:
    """Return the CRC-32C of a page; never 0, which says that the page does not count."""
    return int(google_crc32c.value(page)) or 1


class Files(NamedTuple):
    """The files that are written once LMDB has committed. All of them close when nobody holds this any more."""

    pages: File
    """The index's file, for reading."""
    sums: File
    names: File | None
    """The directory, if the file of the checksums is new there."""


class PageChecksums:
    """The checksums of one index file. Every method is called under the store's index lock."""

    def __init__(self, index: Path, file_mode: int = FILE_MODE) -> None:
        self.path: Final = path_of(index)
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
            newest = commit % lm.METAS
            undo = False
            for page in _different(file.fd, page_bytes, sums):
                if page >= lm.METAS or page == newest:
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
        """Return commit, bytes in a page and checksums, as this file says."""
        try:
            return decode(read_file(self.path))
        except FileNotFoundError:
            raise IndexBrokenError("its checksums are missing") from None

    def void(self) -> None:
        """Make the file say nothing any more, if it is there. Durable on return. Raises OSError."""
        if self.path.exists():
            file = File(self.path, os.O_RDWR)
            write_all(file.fd, bytes(HEADER.size + CRC.size), 0)
            sync_data(file.fd)

    def reserve(self, pages: int) -> None:
        """Keep room for the checksums of so many pages. Raises OSError."""
        file = File(self.path, os.O_RDWR | os.O_CREAT, self._file_mode)
        extend(file.fd, HEADER.size + CRC.size + SUM_BYTES * pages)

    def open_files(self) -> Files | None:
        """Open the files that `write` needs, before the commit, when there is a way back. Raises OSError if the process
        can open no more files. Returns None after another error of the disk, which is logged as `write` does."""
        try:
            is_new = not self.path.exists()
            pages = File(self._index, os.O_RDONLY)
            names = File(self.path.parent, os.O_RDONLY | os.O_DIRECTORY) if is_new else None
            return Files(pages, File(self.path, os.O_RDWR | os.O_CREAT, self._file_mode), names)
        except OSError as error:
            if is_out_of_files(error):
                raise
            self._give_up(error)
            return None

    def write(self, files: Files | None) -> None:
        """Make the checksums, after a commit, those of it. Raises LmdbDamagedError if its tree is none.

        An error of the disk is logged: without checksums the index is good, until the next open rebuilds it.
        """
        if files is None:
            return
        try:
            commit, page_bytes, sums = self._of_last_commit(files.pages.fd)
            data = encode(commit, page_bytes, sums)
            write_all(files.sums.fd, data, 0)
            sync_data(files.sums.fd)
            if files.names is not None:
                sync_file(files.names.fd)
        except OSError as error:
            self._give_up(error)
        else:
            self._written, self._commit, self._sums = True, commit, sums

    def _give_up(self, error: OSError) -> None:
        """Take the file away. One that stays is stale, and found to be so."""
        if self._written:
            log.warning(
                "%s cannot be written: %s; unless a later checkpoint can, the next open rebuilds the index",
                self.path, error,
            )  # fmt: skip
        self._written, self._commit = False, -1
        try:
            self.path.unlink(missing_ok=True)
        except OSError as stays:
            log.debug("%s stays: %s", self.path, stays)

    def _of_last_commit(self, fd: int) -> tuple[int, int, array[int]]:
        """Return the last commit, bytes in a page, and the checksums of its pages."""
        first = _Pages(fd, lm.META.size).meta(0)
        pages = _Pages(fd, first.page_bytes)
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
        for page in range(lm.METAS):
            sums[page] = checksum(pages.read(page))
        return new.commit, pages.page_bytes, sums


class _Pages:
    """The index's file, read by itself. Raises LmdbDamagedError where it is no LMDB file."""

    def __init__(self, fd: int, page_bytes: int) -> None:
        self._fd = fd
        self.page_bytes = page_bytes

    def read(self, first: int, count: int = 1) -> bytes:
        data = os.pread(self._fd, self.page_bytes * count, first * self.page_bytes)
        if len(data) != self.page_bytes * count:
            last = first + count - 1
            raise lm.LmdbDamagedError(last * self.page_bytes, f"page {last} lies beyond the end of the file")
        return data

    def _read_all(self, pages: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield pages in order of their numbers, read in few calls."""
        size, position = self.page_bytes, 0
        while position < len(pages):
            end = position + 1
            while end < len(pages) and end - position < CHUNK_PAGES and pages[end] == pages[end - 1] + 1:
                end += 1
            data = self.read(pages[position], end - position)
            for number in range(end - position):
                yield pages[position + number], data[number * size : (number + 1) * size]
            position = end

    def meta(self, page: int) -> lm.Meta:
        return lm.read_meta(self.read(page), page, page * self.page_bytes)

    def walk(self, meta: lm.Meta, is_known: Callable[[int], bool], summed: bool = True) -> dict[int, int]:
        """Return the checksum of each page of a commit, but of none that is known, nor of those below one. Without
        `summed` checksums are 0, and pages with nothing below them are not read."""
        found: dict[int, int] = {}

        def claim(pages: Sequence[int]) -> None:
            """Claim pages in order of their numbers, each of which is met for the first time."""
            if pages:
                inside = pages[0] >= lm.METAS and pages[-1] <= meta.last_page
                if not inside or len(set(pages)) != len(pages) or not found.keys().isdisjoint(pages):
                    reason = f"one of pages {pages[0]} to {pages[-1]} cannot be where it is"
                    raise lm.LmdbDamagedError(pages[0] * self.page_bytes, reason)
                found.update(dict.fromkeys(pages, 0))

        trees = [meta.free, meta.main]
        while trees:
            tree = trees.pop()
            if tree.depth > lm.DEPTH_MAX:
                raise lm.LmdbDamagedError(0, f"a tree is {tree.depth} levels deep")
            level = [tree.root] if tree.root != lm.NO_PAGE else []
            for above in range(tree.depth - 1, -1, -1):
                level = sorted(page for page in level if not is_known(page))
                claim(level)
                extents: list[int] = []
                below: list[int] = []
                parsed = above or tree.overflows or tree is meta.main
                for page, data in self._read_all(level) if parsed or summed else ():
                    lm.require_page(data, page, lm.BRANCH if above else lm.LEAF)
                    if summed:
                        found[page] = checksum(data)
                    if above:
                        below += lm.children(data)
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

    def _extent(self, first: int) -> range:
        """Return the pages of a value that is too large for a leaf."""
        data = self.read(first)
        lm.require_page(data, first, lm.OVERFLOW)
        return range(first, first + lm.overflow_pages(data))


def _look_into(leaf: bytes, extents: list[int], trees: list[lm.Tree]) -> None:
    """Add the first pages of values that are too large for it, and the trees that it holds."""
    try:
        for offset in lm.node_offsets(leaf):
            _, flags, key_bytes = lm.NODE.unpack_from(leaf, offset)
            if flags & lm.IN_OVERFLOW:
                extents.append(lm.NUMBER.unpack_from(leaf, offset + lm.NODE.size + key_bytes)[0])
            elif flags & lm.SUBTREE:
                trees.append(lm.read_tree(leaf, offset + lm.NODE.size + key_bytes))
    except struct.error as error:
        number = lm.NUMBER.unpack_from(leaf)[0]
        raise lm.LmdbDamagedError(number * len(leaf), f"a row of page {number} goes beyond it") from error


def damages(index: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield what of an index's file, and of that of its checksums, is not as it was written: file, offset, and what.
    Where a kill has left no checksums there is nothing to compare. Writes nothing. Raises OSError."""
    sums = path_of(index)
    try:
        data = read_file(sums)
        if not any(data[: HEADER.size + CRC.size]):
            return
        commit, page_bytes, expected = decode(data)
        file = File(index, os.O_RDONLY)
    except FileNotFoundError:
        return
    except IndexBrokenError as error:
        yield sums, 0, str(error)
        return
    for page in _different(file.fd, page_bytes, expected):
        is_newer = False
        if page == (commit + 1) % lm.METAS:  # of a commit whose checksums a kill kept from being written?
            with suppress(lm.LmdbDamagedError):
                is_newer = _Pages(file.fd, page_bytes).meta(page).commit == commit + 1
        if not is_newer:
            yield index, page * page_bytes, f"page {page} of the index is damaged"


def _different(fd: int, page_bytes: int, sums: array[int]) -> Iterator[int]:
    """Yield the pages that count and are not as their checksum says."""
    for start in range(0, len(sums), CHUNK_PAGES):
        expected = sums[start : start + CHUNK_PAGES]
        data = os.pread(fd, page_bytes * CHUNK_PAGES, start * page_bytes) if any(expected) else b""
        for number, crc in enumerate(expected):
            if crc and checksum(data[number * page_bytes : (number + 1) * page_bytes]) != crc:
                yield start + number


def _repeat_meta(fd: int, page_bytes: int, commit: int) -> None:
    """Make the other meta page say what that of this commit says, as an older commit: LMDB takes the newest."""
    other = (commit + 1) % lm.METAS
    page = bytearray(os.pread(fd, page_bytes, commit % lm.METAS * page_bytes))
    lm.NUMBER.pack_into(page, 0, other)
    lm.NUMBER.pack_into(page, lm.META.size - lm.NUMBER.size, commit - 1)
    write_all(fd, bytes(page), other * page_bytes)
    sync_data(fd)


def encode(commit: int, page_bytes: int, sums: array[int]) -> bytes:
    """Return the bytes of the file."""
    header, data = HEADER.pack(MAGIC, commit, page_bytes, len(sums)), sums.tobytes()
    return header + CRC.pack(google_crc32c.value(header + data)) + data


def decode(data: bytes) -> tuple[int, int, array[int]]:
    """Return commit, bytes in a page and checksums. Raises IndexBrokenError."""
    begin = HEADER.size + CRC.size
    if len(data) < begin:
        raise IndexBrokenError("its checksums are cut short")
    magic, commit, page_bytes, pages = HEADER.unpack_from(data)
    end = begin + SUM_BYTES * pages
    if magic != MAGIC:
        raise IndexBrokenError("its checksums are of another version")
    if CRC.unpack_from(data, HEADER.size)[0] != google_crc32c.value(data[: HEADER.size] + data[begin:end]):
        raise IndexBrokenError("its checksums are damaged")
    if len(data) < end:
        raise IndexBrokenError("its checksums are cut short")
    sums = array("I")
    sums.frombytes(data[begin:end])
    return commit, page_bytes, sums


def path_of(index: Path) -> Path:
    """Return where the checksums of an index file lie."""
    return index.with_suffix(".sums")
