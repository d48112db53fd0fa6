"""What every part that keeps files needs: making a change of names durable, and LMDB files that survive their birth."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import lmdb

from ..policies.config_options import FILE_MODE as FILE_MODE
from ..policies.errors import ConfigError, OutOfDescriptorsError, StoreFailedError, StoreFullError
from .acceleration import inner_loop
from .descriptors import limit

LMDB_ENGINE: Final = 0
"""The lmdb package bundles two engines whose files are mutually unreadable: 0 is LMDB 0.9."""


OUT_OF_FILES: Final = frozenset((errno.EMFILE, errno.ENFILE))
"""What the operating system says of a process, and of a machine, that can have no more files open."""
FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG)) | OUT_OF_FILES
"""What it says where there is no room now, on a disk or for another open file: what was asked for took no effect and
may be tried again."""
DENIED: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST))
"""And of a place that is the wrong one."""


SHORT_WRITE_MAX: Final = 1 << 20
"""Bytes; LMDB writes a quarter of that at once."""


def refused(what: str, error: OSError, after: str = "") -> StoreFullError:
    """What to raise, `from` the error, for one that is in FULL. `what`: what was refused, and why. It says then what to
    do before the same is tried again, and `after` that."""
    if error.errno == errno.EMFILE:
        step = f"raise `ulimit -n` (it is {limit()}) or have fewer files open, and try again"
    elif error.errno == errno.ENFILE:
        step = "raise the whole machine's limit (fs.file-max; `ulimit -n` is one process's), and try again"
    else:
        return StoreFullError(f"{what}; free some space and try again{after}")
    return OutOfDescriptorsError(f"{what}; {step}{after}")


def is_out_of_files(error: BaseException) -> bool:
    """Whether no more files could be opened, and nothing else is wrong."""
    return isinstance(error, OutOfDescriptorsError) or (isinstance(error, OSError) and error.errno in OUT_OF_FILES)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """While something is created or opened: the disk's errors become StoreFullError, ConfigError or StoreFailedError,
    which say what could not be done; nothing took effect that the next try does not find and put right."""
    try:
        yield
    except (OSError, lmdb.Error) as error:
        if isinstance(error, OSError) and error.errno in DENIED:
            step = "give this user the right to write there, or choose another directory"
            raise ConfigError([f"{what}: {error}; {step}"]) from error
        if isinstance(error, OSError) and error.errno in FULL:
            raise refused(f"{what}: {error}", error) from error
        full = isinstance(error, lmdb.DiskError)
        step = "free some space and try again" if full else "see to the disk and try again"
        raise (StoreFullError if full else StoreFailedError)(f"{what}: {error}; {step}") from error


def is_for_room(error: lmdb.Error, path: Path) -> bool:
    """Whether LMDB failed at a commit to this file for want of space. Where a write came out short it says EIO, and
    that is how a disk that is just getting full says it first. Trying again later is right even if it was another EIO:
    a commit that failed has touched no page of the one before."""
    if isinstance(error, lmdb.DiskError):
        return True
    if os.strerror(errno.EIO) not in str(error):
        return False
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < SHORT_WRITE_MAX


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def directory_mode(file_mode: int) -> int:
    """The mode of a directory whose files have `file_mode`: who may read them may enter it, and list it."""
    return file_mode | (file_mode & 0o444) >> 2


def new_directory(path: Path, file_mode: int) -> None:
    """Make one directory for files of this mode, whatever the umask. Raises OSError."""
    path.mkdir(mode=0o700)
    found, mode = stat.S_IMODE(path.stat().st_mode), directory_mode(file_mode)
    if found & 0o777 != mode:
        with suppress(PermissionError):  # a file system without modes
            path.chmod(found & 0o7000 | mode)


def make_directory(path: Path, file_mode: int = FILE_MODE) -> None:
    """Make a directory for files of this mode, and what is missing above it likewise, durably. What is there is left as
    it is."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for made in reversed(missing):
        with suppress(FileExistsError):  # another thread or process was faster
            new_directory(made, file_mode)
    path.mkdir(mode=0o700, exist_ok=True)  # raises FileExistsError for what is no directory
    for made in reversed(missing):
        sync_directory(made.parent)


def open_file(path: Path, flags: int, file_mode: int = FILE_MODE) -> int:
    """Open a file as os.open does, for this process alone; returns the descriptor. One that is made, with O_CREAT, has
    this mode whatever the umask; one that is there keeps its own. Raises OSError."""
    flags |= os.O_CLOEXEC
    if not flags & os.O_CREAT:
        return os.open(path, flags)
    while True:
        try:
            fd = os.open(path, flags | os.O_EXCL, 0o600)
            break
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        try:
            return os.open(path, flags & ~os.O_CREAT)
        except FileNotFoundError:
            pass  # it went between the two
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != file_mode:
            with suppress(PermissionError):  # a file system without modes
                os.fchmod(fd, file_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite until all is written; the kernel may write less, most often just before it says that the disk is full."""
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        view = memoryview(data)[written:]
        written += os.pwrite(fd, view, offset + written)


@inner_loop
def write_small(fd: int, data: bytes, offset: int) -> None:
    """write_all, for what is not synced now. Compiled, a write of up to 16 KiB does not hand the interpreter to other
    threads, which takes longer than the write; once two within a second took more than a millisecond, the second of
    them waiting for the disk, all do for twenty times as long as it took: a slow disk stops the other threads for a
    twentieth of the time."""
    write_all(fd, data, offset)


@inner_loop
def write_synced(fd: int, data: bytes, offset: int) -> None:
    """write_all, then fdatasync. Compiled, other threads take their turn once meanwhile instead of twice: whoever hands
    the interpreter over may have to wait for it."""
    write_all(fd, data, offset)
    os.fdatasync(fd)


def unfinished(path: Path, store_id: bytes) -> Path:
    """What a store's directory is called until it is whole."""
    return path.with_name(f".{path.name}.{store_id.hex()}.tmp")


def remove_directory(path: Path, store_id: bytes) -> None:
    """Remove a store's directory, whole or not at all whatever crash comes (rule D2): put aside it looks as if it had
    never been finished, and is swept at the next open. Raises OSError."""
    aside = unfinished(path, store_id)
    path.rename(aside)
    sync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sweep_unfinished(directory: Path, name: str | None = None) -> int:
    """Remove what a crash left of stores that were being made in a directory (of the one store `name`); how many."""
    if not directory.is_dir():
        return 0
    pattern = re.compile(rf"\.{re.escape(name) if name is not None else '.+'}\.[0-9a-f]{{32}}\.tmp")
    found = [path for path in directory.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]
    for path in found:
        shutil.rmtree(path)
    return len(found)


def open_lmdb(path: Path, map_bytes: int, max_dbs: int) -> Any:
    """One file, no lock file: the directory's lock is the owner's. Raises OSError if no file can be opened any more,
    which says nothing about this one; lmdb.Error."""
    try:
        _map_blocks_from(LMDB_LIST_BYTES)
        return lmdb.open(
            str(path), map_size=map_bytes, subdir=False, lock=False, max_dbs=max_dbs, readahead=False,
            lib_version=LMDB_ENGINE, mode=FILE_MODE,
        )  # fmt: skip
    except lmdb.Error as error:
        for number in OUT_OF_FILES:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        raise
    finally:
        _map_blocks_from(MAPPED_BYTES)


def extend(fd: int, size: int) -> None:
    """Make a file so long, of zeros that have their place on the disk. Nobody else makes it longer meanwhile. Raises
    OSError."""
    start = os.fstat(fd).st_size
    if start < size:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, start, size - start)
        else:
            write_all(fd, bytes(size - start), start)


def create_lmdb(path: Path, map_bytes: int, file_mode: int = FILE_MODE) -> None:
    """An empty file. Made under another name and renamed, since LMDB refuses a file that a power failure met before its
    first commit (rule X5). One that is there is emptied, and keeps its place on the disk."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        path.rename(unfinished)
    fd = open_file(unfinished, os.O_RDWR | os.O_CREAT, file_mode)  # LMDB heeds the umask
    try:
        empty = _empty_lmdb.get(map_bytes)
        if empty is None:
            size = os.fstat(fd).st_size
            os.ftruncate(fd, 0)
            _let_lmdb_begin(unfinished, map_bytes)
            _empty_lmdb[map_bytes] = unfinished.read_bytes()
            with suppress(OSError):  # another process may have been faster to take it
                extend(fd, size)
        else:
            write_all(fd, empty, 0)
            os.fsync(fd)
    finally:
        os.close(fd)
    unfinished.rename(path)
    sync_directory(path.parent)


def _let_lmdb_begin(path: Path, map_bytes: int) -> None:
    """What a new environment writes, into an empty file."""
    env = open_lmdb(path, map_bytes, 1)
    env.sync(True)
    env.close()


_empty_lmdb: Final[dict[int, bytes]] = {}
"""What LMDB has written into a new file, by the size of the map: always the same, some KiB. LMDB itself is asked once
alone, since each environment that is opened and closed again leaves 2 MiB of memory that it has touched."""


LMDB_LIST_BYTES: Final = 1 << 20
"""LMDB takes a list of 2 MiB for each environment, cleared, and uses a few KiB of it; and another of 1 MiB."""
MAPPED_BYTES: Final = 32 << 20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def _map_blocks_from(size: int) -> None:
    """Have the C library take blocks of so many bytes and more from the system, and give them back once they are freed.

    A list that LMDB gets from the system takes only the memory that is used of it; one that lies where another was
    freed is cleared, and takes all: 2 MiB for each store that is opened after others were closed. Bodies shall not be
    taken from the system one by one, so else the size is the highest that glibc itself would come to. Does nothing
    where it is another library, or where the environment says what the size shall be."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None and not _ALLOCATION_IS_GIVEN:
        tune(_M_MMAP_THRESHOLD, size)
        tune(_M_TRIM_THRESHOLD, 2 * MAPPED_BYTES)


_ALLOCATION_IS_GIVEN: Final = any(
    name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in value) for name, value in os.environ.items()
)


def give_memory_back() -> None:
    """Let the C library return to the system what was freed. LMDB takes 3 MiB for each environment, of which glibc
    keeps what lies between blocks that are in use. Does nothing where it is another library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
