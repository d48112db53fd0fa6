"""The index's file: an LMDB environment with one write transaction open, verified before LMDB gets it (rule X8), and
with its room on the disk ahead of what is written (rule J10)."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb

from ...system.files import (
    FILE_MODE,
    OUT_OF_FILES,
    extend,
    open_file,
    require_no_link,
    sync_directory,
    sync_file,
    write_all,
)
from ...system.malloc import large_blocks_mapped
from ...wal.files.file import File
from . import lmdb_format
from .checksums import Files, IndexBrokenError, PageChecksums, path_of

ENGINE: Final = 0
"""The lmdb package bundles two engines whose files are mutually unreadable: 0 is LMDB 0.9."""
MAP_BYTES: Final = 1 << 30
"""The first size of the map: address space, not memory nor disk. Doubled when 70 % full (rule X4)."""
MAP_FULL_PERCENT: Final = 70

MARGIN_PAGES: Final = 64
MARGIN_SHARE: Final = 8
"""LMDB writes pages anew instead of over themselves, and uses again those of the last commit but one. So a small index
takes as many pages more as it has, a large one such a share of them and some: its commits are made as small as that."""
AHEAD_PAGES: Final = 256
"""Pages that are allocated beyond what the file needs, so that this is not done each time."""
SEND_BYTES: Final = 128
"""At most so many a message takes, about."""
COPIES: Final = 3
"""Copies of a long row: the one that counts, that of the commit before, and the one that is being written."""

SHORT_WRITE_MAX: Final = 1 << 20
"""Bytes; LMDB writes a quarter of that at once."""


class IndexFile:
    """The file of one index. The constructor touches nothing."""

    def __init__(self, path: Path, file_mode: int = FILE_MODE) -> None:
        self._file_mode = file_mode
        self.path = path
        self.env: Any = None
        self.txn: Any = None
        """All that was written since the last commit; None while the file is not open."""
        self._checksums = PageChecksums(path, file_mode)
        self._pages = self._reserved = 0
        """Pages in use by the last commit, and pages that are kept for what comes."""
        self._page_bytes = 4096
        self._max_dbs = 0
        self._swap_lock = threading.Lock()
        """Held while the file's name becomes another file's, and while room is kept in it."""

    def create(self, max_dbs: int) -> None:
        """Make the file anew, empty, and open it. The file keeps what it had of the disk (rule J10)."""
        self._checksums.void()
        create_lmdb(self.path, MAP_BYTES, self._file_mode)
        self._checksums = PageChecksums(self.path, self._file_mode)  # what the old file held says nothing of this one
        self._open(max_dbs)

    def open(self, max_dbs: int) -> bool:
        """Verify the file and open it. True if its last commit was undone. Raises IndexBrokenError, lmdb.Error."""
        if not self.path.exists():
            raise IndexBrokenError("it is missing")
        is_undone = self._checksums.verify()
        self._open(max_dbs)
        return is_undone

    def _open(self, max_dbs: int) -> None:
        self._max_dbs = max_dbs
        self.env = open_lmdb(self.path, max(MAP_BYTES, 2 * self.path.stat().st_size), max_dbs)
        self._page_bytes, self._reserved = self.env.stat()["psize"], 0
        self._pages = self.env.info()["last_pgno"] + 1

    def begin(self) -> Any:
        """Go back to the last commit, if there is anything to undo. Returns the transaction from now on."""
        if self.txn is not None:
            self.txn.abort()
        self.txn = self.env.begin(write=True, buffers=False)
        return self.txn

    def close(self) -> None:
        """Let go of the file, dropping what was not committed. Idempotent."""
        txn, self.txn = self.txn, None
        if txn is not None:
            txn.abort()
        if self.env is not None:
            self.env.close()
        self.env = None

    def reopen(self) -> None:
        """Open again, after `compact` was interrupted or has failed, the file as its name says. Raises lmdb.Error,
        OSError."""
        self.close()
        self._checksums = PageChecksums(self.path, self._file_mode)
        self._open(self._max_dbs)

    def compact(self) -> int:
        """Write the last commit, without the pages that are free, into a file that takes the place of this one (rule
        X5); returns by how many bytes it is smaller. Writes since are dropped, and the file is open anew, with no
        transaction. Raises lmdb.Error, OSError, IndexBrokenError; then `reopen`. Killed between the new names of the
        file and of its checksums it is found to be in doubt, and the next opening makes the index anew."""
        path = self.path.with_name(self.path.name + ".tmp")
        before = self.path.stat().st_size
        path.unlink(missing_ok=True)
        if self.txn is not None:
            self.txn.abort()
            self.txn = None
        try:
            self.env.copy(str(path), compact=True)
            descriptor = File(path, os.O_RDWR)
            os.fchmod(descriptor.fd, self._file_mode & 0o666)
            sync_file(descriptor.fd)
            after = path.stat().st_size
            if after >= before:
                return 0
            checksums = PageChecksums(path, self._file_mode)
            checksums.write(checksums.open_files())
            checksums.verify()
            with self._swap_lock:
                self.close()
                self._checksums = PageChecksums(self.path, self._file_mode)  # which know nothing of any file yet
                checksums.path.rename(self._checksums.path)
                path.rename(self.path)
                sync_directory(self.path.parent)
                self._open(self._max_dbs)
            return before - after
        finally:
            path.unlink(missing_ok=True)
            path_of(path).unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Return how many bytes the file and its checksums have; 0 for what is just being replaced."""
        size = 0
        for path in (self.path, self._checksums.path):
            with suppress(OSError):
                size += path.stat().st_size
        return size

    @property
    def spare_pages(self) -> int:
        """Return how many pages the file has beyond what the last commit uses."""
        return self.path.stat().st_size // self._page_bytes - self._pages

    def open_checksums(self) -> Files | None:
        """Open the files that `write_checksums` needs. Raises OSError if the process can open no more files."""
        return self._checksums.open_files()

    def commit(self) -> None:
        """Commit, synced. The map grows here, where no transaction is open (rule X4)."""
        self.txn.commit()
        self.txn = None
        info = self.env.info()
        self._pages = info["last_pgno"] + 1
        if self._pages * self._page_bytes * 100 > info["map_size"] * MAP_FULL_PERCENT:
            self.env.set_mapsize(2 * info["map_size"])

    def write_checksums(self, files: Files | None) -> None:
        """Write the checksums of the last commit, before the next transaction can write any page. `files` are
        `open_checksums`'."""
        self._checksums.write(files)

    def reserve(self, sends: int, segments: int, dead_bytes: int) -> None:
        """Allocate the file ahead, for so many messages more than at the last checkpoint and for the rows of so many
        segments, which say in so many bytes what is dead: no commit needs more of the disk then. Any thread, without
        the lock. Raises OSError."""
        margin = min(self._pages + 16, MARGIN_PAGES + self._pages // MARGIN_SHARE)
        growth = (SEND_BYTES * sends + COPIES * dead_bytes) // self._page_bytes + segments
        pages = self._pages + margin + growth
        if pages <= self._reserved:
            return
        pages += min(pages // MARGIN_SHARE, AHEAD_PAGES)
        with self._swap_lock:
            try:
                file = File(self.path, os.O_RDWR)
                extend(file.fd, pages * self._page_bytes)
                self._checksums.reserve(pages)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            self._reserved = pages


def open_lmdb(path: Path, map_bytes: int, max_dbs: int) -> Any:
    """Open one file, without a lock file: the directory's lock is the owner's. Raises OSError if no file can be opened
    any more, which says nothing about this one; lmdb.Error."""
    require_no_link(path)
    try:
        with large_blocks_mapped():
            return lmdb.open(
                str(path), map_size=map_bytes, subdir=False, lock=False, max_dbs=max_dbs, readahead=False,
                lib_version=ENGINE, mode=FILE_MODE,
            )  # fmt: skip
    except lmdb.Error as error:
        for number in OUT_OF_FILES:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        raise


def create_lmdb(path: Path, map_bytes: int, file_mode: int = FILE_MODE) -> None:
    """Create an empty file, as LMDB writes it. Made under another name and renamed, since LMDB refuses a file that a
    power failure met before its first commit (rule X5). One that is there is emptied, and keeps its place on the
    disk."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        path.rename(unfinished)
    fd = open_file(unfinished, os.O_RDWR | os.O_CREAT, file_mode)  # LMDB heeds the umask
    try:
        write_all(fd, lmdb_format.empty_file(map_bytes), 0)
        sync_file(fd)
    finally:
        os.close(fd)
    unfinished.rename(path)
    sync_directory(path.parent)


def is_for_room(error: lmdb.Error, path: Path) -> bool:
    """Return whether LMDB failed at a commit to this file for want of space. Where a write came out short LMDB says
    EIO: a disk that is just getting full says it so first. Trying again later is right even if it was another EIO. A
    commit that failed has touched no page of the one before."""
    if isinstance(error, lmdb.DiskError):
        return True
    if os.strerror(errno.EIO) not in str(error):
        return False
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < SHORT_WRITE_MAX


def remove_file(path: Path) -> None:
    """Take a broken index away."""
    for name in (path, path_of(path), path.with_name(path.name + "-lock"), path.with_name(path.name + ".tmp")):
        name.unlink(missing_ok=True)
