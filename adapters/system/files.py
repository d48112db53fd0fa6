"""The needs of every part that keeps files. Here is what a disk's errors mean, and how files are made, written and made
durable with their names. Differences between platforms are in policies/platform_files.py and here."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import lmdb

from ...policies.errors import ConfigError, OutOfDescriptorsError, StoreFailedError, StoreFullError
from ...policies.paths import FILE_MODE as FILE_MODE
from ...policies.platform_files import sync_data as sync_data
from ...policies.platform_files import sync_directory as sync_directory
from ...policies.platform_files import sync_file as sync_file
from .descriptors import limit

OUT_OF_FILES: Final = frozenset((errno.EMFILE, errno.ENFILE))
"""Errors by which the operating system says that a process, or a machine, can have no more files open."""
FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG)) | OUT_OF_FILES
"""Errors by which it says that there is no room now, on a disk or for another open file. The request took no effect and
may be tried again."""
DENIED: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST))
"""Errors by which it says that the place is the wrong one."""
_ZEROS: Final = memoryview(bytes(1 << 20))
"""Once and for all: made for each store, they would stay behind in its memory."""


MAKE_ROOM: Final = (
    "receive and ack messages, or purge them (a file goes once nothing in it is needed), call `compact`, or delete "
    "something else there"
)
"""How a full disk that a store is on gets room."""


def refused(what: str, error: OSError, after: str = "", how: str = "") -> StoreFullError:
    """Return the error to raise, `from` the given one, for an error that is in FULL. `what`: what was refused, and why.
    The text then says what to do before the same is tried again, and `after` that. `how`: in which ways a full disk
    gets room."""
    if error.errno == errno.EMFILE:
        step = f"raise `ulimit -n` (it is {limit()}) or have fewer files open, and try again"
    elif error.errno == errno.ENFILE:
        step = "raise the whole machine's limit (fs.file-max; `ulimit -n` is one process's), and try again"
    else:
        return StoreFullError(f"{what}; free some space and try again{how and f': {how}'}{after}")
    return OutOfDescriptorsError(f"{what}; {step}{after}")


def is_out_of_files(error: BaseException) -> bool:
    """Return whether no more files could be opened, and nothing else is wrong."""
    return isinstance(error, OutOfDescriptorsError) or (isinstance(error, OSError) and error.errno in OUT_OF_FILES)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn the disk's errors into StoreFullError, ConfigError or StoreFailedError, while something is created or
    opened. The errors say what could not be done. Nothing took effect that the next try does not find and put right."""
    try:
        yield
    except (OSError, lmdb.Error) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise ConfigError([f"{what}: {error.filename} is {error.strerror}"]) from error
        if isinstance(error, OSError) and error.errno in DENIED:
            step = "give this user the right to write there, or choose another directory"
            raise ConfigError([f"{what}: {error}; {step}"]) from error
        if isinstance(error, OSError) and error.errno in FULL:
            raise refused(f"{what}: {error}", error) from error
        full = isinstance(error, lmdb.DiskError)
        step = "free some space and try again" if full else "see to the disk and try again"
        raise (StoreFullError if full else StoreFailedError)(f"{what}: {error}; {step}") from error


def require_no_link(path: Path) -> None:
    """Raise OSError (ELOOP) for a symbolic link. Nothing in a data directory is one: it would be read, written, cut or
    removed where the link leads."""
    if path.is_symlink():
        raise _is_a_link(path)


def require_no_links(directory: Path) -> None:
    """Raise OSError for a symbolic link in a directory, however deep. The search follows none."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise _is_a_link(entry.path)
            if entry.is_dir(follow_symlinks=False):
                require_no_links(Path(entry.path))


def _is_a_link(path: str | Path) -> OSError:
    what = "a symbolic link, and nothing in a data directory may be one: its target would be written over"
    return OSError(errno.ELOOP, f"{what}. Put its target there, or delete the link", str(path))


def directory_mode(file_mode: int) -> int:
    """Return the mode of a directory whose files have `file_mode`: who may read them may enter it, and list it."""
    return file_mode | (file_mode & 0o444) >> 2


def new_directory(path: Path, file_mode: int) -> None:
    """Make one directory for files of this mode, whatever the umask. Raises OSError."""
    path.mkdir(mode=0o700)
    found, mode = stat.S_IMODE(path.stat().st_mode), directory_mode(file_mode)
    if found & 0o777 != mode:
        with suppress(PermissionError):  # a file system without modes
            path.chmod(found & 0o7000 | mode)


def make_directory(path: Path, file_mode: int = FILE_MODE, is_ours: bool = False) -> None:
    """Make a directory for files of this mode, and what is missing above it likewise, durably. A directory that is
    there is left as it is; one that `is_ours`, and not where its user has said, may not be a link. Raises OSError."""
    if is_ours:
        require_no_link(path)
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for made in reversed(missing):
        with suppress(FileExistsError):  # another thread or process was faster
            new_directory(made, file_mode)
    path.mkdir(mode=0o700, exist_ok=True)  # raises FileExistsError for what is no directory
    for made in reversed(missing):
        sync_directory(made.parent)


def open_file(path: Path, flags: int, file_mode: int = FILE_MODE) -> int:
    """Open a file as os.open does, for this process alone; returns the descriptor. One that is made, with O_CREAT, has
    this mode whatever the umask; one that is there keeps its own. No symbolic link to a file will do. Raises OSError.
    """
    try:
        return _open_file(path, flags | os.O_CLOEXEC, file_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            require_no_link(path)
        raise


def _open_file(path: Path, flags: int, file_mode: int) -> int:
    if not flags & os.O_DIRECTORY:
        flags |= os.O_NOFOLLOW
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


def open_to_read(path: Path) -> BinaryIO:
    """Open a file as Path.open("rb"), but no symbolic link. Raises OSError."""
    return open(path, "rb", opener=_open_file_to_read)  # in one step: the descriptor is never without an owner


def _open_file_to_read(path: str, flags: int) -> int:
    return open_file(Path(path), flags)


def read_file(path: Path) -> bytes:
    """Return all that is in a small file. Raises OSError."""
    with open_to_read(path) as file:
        return file.read()


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Call pwrite until all is written; the kernel may write less, most often just before it says that the disk is
    full."""
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        view = memoryview(data)[written:]
        written += os.pwrite(fd, view, offset + written)


def write_file(path: Path, data: bytes, file_mode: int = FILE_MODE) -> None:
    """Make a file that holds `data`. It is durable, its name is once its directory is synced. Raises OSError."""
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode)
    try:
        write_all(fd, data, 0)
        sync_file(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, file_mode: int = FILE_MODE) -> None:
    """Make a file that holds `data`, or replace it, whole or not at all whatever crash comes. Raises OSError."""
    making = path.with_name(f"{path.name}.tmp")
    write_file(making, data, file_mode)
    making.rename(path)
    sync_directory(path.parent)


def unfinished(path: Path, store_id: bytes) -> Path:
    """Return the path of a store's directory until it is whole."""
    return path.with_name(f".{path.name}.{store_id.hex()}.tmp")


def remove_directory(path: Path, store_id: bytes) -> None:
    """Remove a store's directory, whole or not at all whatever crash comes (rule D2): put aside it looks as if it had
    never been finished, and is swept at the next open. Raises OSError."""
    aside = unfinished(path, store_id)
    path.rename(aside)
    sync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sweep_unfinished(directory: Path, name: str | None = None) -> int:
    """Remove what a crash left of stores that were being made in a directory (of the one store `name`); return how
    many."""
    if not directory.is_dir():
        return 0
    pattern = re.compile(rf"\.{re.escape(name) if name is not None else '.+'}\.[0-9a-f]{{32}}\.tmp")
    paths = [path for path in directory.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]
    for path in paths:
        shutil.rmtree(path)
    return len(paths)


@contextmanager
def made_whole(target: Path, what: str) -> Iterator[Path]:
    """Give the path of a directory to make in the block, a hidden one beside `target`: it has that name, durably, once
    the block has ended, and after an error nothing is left of it. Raises StoreFullError, OSError."""
    making = target.with_name(f".{target.name}.{what}")
    shutil.rmtree(making, ignore_errors=True)
    make_directory(target.absolute().parent)
    try:
        yield making
        if target.exists():
            target.rmdir()
        making.rename(target)
        sync_directory(target.absolute().parent)
    except BaseException as error:
        shutil.rmtree(making, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise refused(f"{target} cannot be made: {error}", error, "; nothing is left of it") from error
        raise


def zero_fill(fd: int, start: int, end: int) -> None:
    """Write zeros, so that later writes there allocate nothing and their sync need not touch the inode. Raises
    OSError."""
    while start < end:
        size = min(len(_ZEROS), end - start)
        write_all(fd, _ZEROS[:size], start)
        start += size


def allocate(fd: int, start: int, end: int) -> None:
    """Take so much of the disk without writing it, for bytes that are about to be: a large batch is not written twice.
    Where the operating system cannot, as macOS, zeros do it. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, end - start)
    else:
        zero_fill(fd, start, end)


def extend(fd: int, size: int) -> None:
    """Make a file so long, of zeros that have their place on the disk. Nobody else makes it longer meanwhile. Raises
    OSError."""
    start = os.fstat(fd).st_size
    if start < size:
        allocate(fd, start, size)
