"""The files that make up a KahaDB journal: found, numbered, and never written to.

A KahaDB directory holds `db-1.log`, `db-2.log` and so on; files that the broker no longer needed are gone, or lie in
an archive directory beside or inside it. An mKahaDB directory holds one KahaDB directory per store.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...policies.errors import TraceError

ARCHIVE_NAMES = ("archive", "data-archive")
"""Directories that hold files which the broker archived; `data-archive` is ActiveMQ's own default."""

TRANSACTION_STORE_NAME = "txStore"
"""mKahaDB's own journal: the outcomes of transactions that touched several stores."""

_FILE_NAME = re.compile(r"db-(\d{1,9})\.log")


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that could not be read, and what that means. Nothing is ever left out without one of these."""

    path: str
    offset: int
    reason: str
    kind: str = "damaged"
    """`torn`: the unfinished end of the file being written. `damaged`: bytes that were whole once. `missing`: a file
    that should be there. `unreadable`: the operating system refused."""
    length: int = 0
    """Bytes that could not be used, from `offset` on."""

    def __str__(self) -> str:
        return f"{self.path} at offset {self.offset}: {self.reason}"


@dataclass(frozen=True, slots=True)
class JournalFile:
    """One `db-N.log`."""

    number: int
    path: Path
    archived: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """The files of one KahaDB store, by number."""

    name: str
    directory: Path
    files: tuple[JournalFile, ...]
    has_archive: bool = False
    shadowed: tuple[Path, ...] = ()
    """Archived files whose number is in the live directory too. The live file wins: the broker reads that one."""

    @property
    def live(self) -> StoreFiles:
        """Return the same store without its archive: what the broker itself sees."""
        return StoreFiles(self.name, self.directory, tuple(f for f in self.files if not f.archived))

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the first and last of each run of numbers between files that have none: collected by the broker, or
        lost."""
        pairs = itertools.pairwise(file.number for file in self.files)
        return tuple((before + 1, after - 1) for before, after in pairs if after - before > 1)


@dataclass(frozen=True, slots=True)
class KahaDirectory:
    """The content of a directory: one store, or the stores of an mKahaDB and its transaction store."""

    directory: Path
    stores: tuple[StoreFiles, ...]
    transaction_store: StoreFiles | None = None


def name_range(first: int, last: int) -> str:
    """Return `db-3.log`, or `db-3.log to db-8.log`."""
    return f"db-{first}.log" if first == last else f"db-{first}.log to db-{last}.log"


def find_stores(directory: str | Path) -> KahaDirectory:
    """Look at `directory`: a KahaDB directory, one with its archive beside it under a common parent, or an mKahaDB.

    Raises TraceError, naming the directory and what was expected, if there is no journal file in it.
    """
    root = Path(directory)
    children = _children(root)
    if _journal_files(root, archived=False):
        return KahaDirectory(root, (_store(root.name, root, root),))
    inside = [path for path in children if path.is_dir() and path.name not in ARCHIVE_NAMES]
    homes = [path for path in inside if _journal_files(path, archived=False)]
    if any(path.name == TRANSACTION_STORE_NAME for path in homes):  # a store of its may have a directory of its own
        below = [child for path in inside if path not in homes for child in _children(path) if child.is_dir()]
        homes += [path for path in below if path.name not in ARCHIVE_NAMES and _journal_files(path, archived=False)]
    stores = [path for path in homes if path.name != TRANSACTION_STORE_NAME]
    if len(stores) == 1 and len(homes) == 1:
        return KahaDirectory(root, (_store(stores[0].name, stores[0], stores[0], root),))
    if stores:
        decisions = [_store(path.name, path, path) for path in homes if path.name == TRANSACTION_STORE_NAME]
        return KahaDirectory(root, tuple(_store(p.name, p, p) for p in stores), decisions[0] if decisions else None)
    if (only_archive := _store(root.name, root, root)).files:
        return KahaDirectory(root, (only_archive,))
    raise TraceError(
        f"{root} holds no KahaDB journal: no db-<number>.log in it, in its archive or in its subdirectories; "
        "give the directory that activemq.xml names in <kahaDB directory=...>"
    )


def file_bytes(directory: str | Path) -> int | None:
    """Return the size of the broker's files, its `journalMaxFileLength`: the most frequent one, since it allocates each
    file whole. None where no two are alike. Raises TraceError as `find_stores`."""
    ((size, times),) = Counter(f.bytes for store in find_stores(directory).stores for f in store.files).most_common(1)
    return size if times > 1 else None


def open_file(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError, also where it is none: to wait for a pipe's writer may take for ever."""
    return open(path, "rb", opener=_opened)


def _opened(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no file", path)
    return fd


def _store(name: str, live: Path, *archive_parents: Path) -> StoreFiles:
    archives = [parent / archive for parent in archive_parents for archive in ARCHIVE_NAMES]
    found = [file for path in archives if path.is_dir() for file in _journal_files(path, archived=True)]
    by_number = {file.number: file for file in found}
    live_files = _journal_files(live, archived=False)
    shadowed = tuple(by_number[f.number].path for f in live_files if f.number in by_number)
    by_number.update((file.number, file) for file in live_files)
    files = tuple(by_number[number] for number in sorted(by_number))
    return StoreFiles(name, live, files, bool(found), shadowed)


def _journal_files(directory: Path, *, archived: bool) -> list[JournalFile]:
    files = []
    for path in _children(directory):
        if match := _FILE_NAME.fullmatch(path.name):
            try:
                size = path.stat().st_size
            except OSError:
                size = 0  # named when it is read
            files.append(JournalFile(int(match[1]), path, archived, size))
    return sorted(files, key=lambda file: file.number)


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        raise TraceError(f"{directory} does not exist; give the directory of a store") from None
    except NotADirectoryError:
        raise TraceError(f"{directory} is not a directory; give the directory of a store") from None
    except OSError as error:
        raise TraceError(f"{directory} cannot be read: {error.strerror}; run as a user who may read it") from error
