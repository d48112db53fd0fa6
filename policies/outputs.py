"""A command's input and output for its user: paths of this machine, files that appear whole or not at all.

    path = local_path("s3a://bucket/advice", "--out")          # ConfigError: not on this machine
    with scratch_directory(path.parent, "advice") as scratch:  # gone at the end, also where its process was killed
        ...
    write_files(path, {"stores.yaml": text}, overwrite=False)

Files are written and synced beside their place, under the name `.<name>.<16 hex digits>.tmp`, and renamed into it. A
scratch directory is locked (flock) as long as its process lives: what nobody has locked was left by one that was
killed, and goes when the next is made in the same place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .errors import ConfigError
from .paths import URL_SCHEME, from_home
from .platform_files import sync_directory, sync_file


def is_elsewhere(given: object) -> bool:
    """Return whether this is the URL of another file system than this machine's, such as hdfs://namenode/usage."""
    scheme = URL_SCHEME.match(given) if isinstance(given, str) else None
    return scheme is not None and scheme[1] != "file"


def local_path(given: str | os.PathLike[str], what: str) -> Path:
    """Return the path of this machine that was given, also as a URL (`file:///srv/trace.csv`).

    Raises ConfigError for a URL of another file system; `what` says for what it was given, such as `--out`.
    """
    text = os.fspath(given)
    scheme = URL_SCHEME.match(text)
    if scheme is None:
        return from_home(text)
    url = urlsplit(text)
    if url.scheme == "file" and url.netloc in ("", "localhost"):
        return Path(unquote(url.path))
    raise ConfigError(
        [
            f"{what} {text}: files are read and written on this machine alone, and {scheme[1]}:// is elsewhere; "
            "give a path here, and copy the files from there or to there"
        ]
    )


@contextmanager
def scratch_directory(parent: Path, name: str, mode: int = 0o700) -> Iterator[Path]:
    """Make a new directory in `parent`. It is removed at the end with all that is in it, unless it has been renamed
    meanwhile.

    First those of `name` go whose processes were killed. Raises OSError where it cannot be made.
    """
    _sweep(parent, name)
    path, fd = _make(parent, name, mode)
    try:
        yield path
    finally:
        # While it is locked: else another process may be at it too.
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _make(parent: Path, name: str, mode: int) -> tuple[Path, int]:
    """Make a new directory; return it, and the descriptor that has it locked."""
    while True:
        path = parent / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            path.mkdir(mode)
        except OSError as error:
            error.filename = os.fspath(parent)  # that is what is wrong, and what its user knows
            raise
        with suppress(FileNotFoundError):  # swept before it was locked
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with suppress(OSError):  # a file system without locks: there nobody can sweep it either
                fcntl.flock(fd, fcntl.LOCK_EX)
            if path.is_dir():
                return path, fd
            os.close(fd)


def _sweep(parent: Path, name: str) -> None:
    """Remove the scratch directories of this name that are ours and that no process has locked."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    entries: list[Path] = []
    with suppress(OSError):  # it may be written to and not be listed; where it is missing, making one says so
        entries += parent.iterdir()
    for entry in entries:
        if pattern.fullmatch(entry.name):
            with suppress(OSError):  # in use, or somebody else's
                fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if os.fstat(fd).st_uid == os.geteuid():
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(entry)
                finally:
                    os.close(fd)


def write_files(directory: Path, texts: Mapping[str, str], *, overwrite: bool) -> list[Path]:
    """Write these files (name to text, as UTF-8) into a directory, which is made where it is missing. Return their
    paths.

    All of them are on disk, synced, before the first appears. A new directory appears with all of them at once; in one
    that is there they appear one after another, each whole. On an error none does. Raises ConfigError where one is
    there already, unless `overwrite`, or where something else is in its way; OSError where it cannot be written.
    """
    check_files(directory, texts, overwrite=overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    there = directory.exists()
    with scratch_directory(directory if there else directory.parent, "anabranch", 0o777) as scratch:
        for name, text in texts.items():
            _write(scratch / name, text)
        sync_directory(scratch)
        if not there:
            scratch.rename(directory)
        else:
            try:
                _move(scratch, directory, list(texts), overwrite=overwrite)
            except FileExistsError as error:
                raise taken(Path(error.filename), ANOTHER_DIRECTORY) from None
    sync_directory(directory if there else directory.parent)
    return [directory / name for name in texts]


def write_file(path: Path, write: Callable[[Path], object], *, overwrite: bool) -> None:
    """Let `write` write one file, whose directory is made where it is missing. It appears whole, synced, or not at all.
    Raises as `write_files`."""
    check_file(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(path.parent, "anabranch") as scratch:
        written = scratch / path.name
        try:
            write(written)
        except OSError as error:
            if error.filename is None:
                error.filename = str(path)
            raise
        fd = os.open(written, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync_file(fd)
        finally:
            os.close(fd)
        try:
            _move(scratch, path.parent, [path.name], overwrite=overwrite)
        except FileExistsError:
            raise taken(path, ANOTHER_FILE) from None
    sync_directory(path.parent)


def write_new_file(path: Path, text: str) -> None:
    """Write a file (as UTF-8) that is not there yet, in a directory that is made where it is missing.

    It appears whole, synced, or not at all. Raises FileExistsError where its name, or that of its directory, is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(path.parent, "anabranch") as scratch:
        _write(scratch / path.name, text)
        _link(scratch / path.name, path)
    sync_directory(path.parent)


def _write(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync_file(file.fileno())


def check_files(directory: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Raise ConfigError where `write_files` would refuse to write these files. Touches nothing."""
    _check(directory, names, ANOTHER_DIRECTORY, overwrite)


def check_file(path: Path, *, overwrite: bool) -> None:
    """Raise ConfigError where `write_file` would refuse to write this one. Touches nothing."""
    _check(path.parent, [path.name], ANOTHER_FILE, overwrite)


ANOTHER_DIRECTORY = "another directory"
ANOTHER_FILE = "another file"
"""The thing that the user is to give instead of the one given."""


def _check(directory: Path, names: Iterable[str], instead: str, overwrite: bool) -> None:
    for above in (directory, *directory.parents):
        if above.exists() or above.is_symlink():
            if not above.is_dir():
                raise ConfigError([f"{above} is in the way: a directory is needed there; give {instead}"])
            if not os.access(above, os.W_OK | os.X_OK):
                raise ConfigError([f"{above} cannot be written to by this user; give {instead}"])
            break
    for name in names:
        path = directory / name
        if path.is_dir():
            raise ConfigError([f"{path} is in the way: a file of that name is to be written; give {instead}"])
        if not overwrite and (path.is_symlink() or path.exists()):
            raise taken(path, instead)


def taken(path: Path | str, instead: str = ANOTHER_DIRECTORY) -> ConfigError:
    """Return the error that something is there already which may not be replaced. `instead` says what else to give."""
    step = f"give {instead}, or replace it (--force; from Python: overwrite=True)"
    return ConfigError([f"{path} exists already and was left as it is; {step}"])


def _move(scratch: Path, directory: Path, names: list[str], *, overwrite: bool) -> None:
    placed: list[Path] = []
    try:
        for name in names:
            if overwrite:
                (scratch / name).replace(directory / name)
            else:
                _link(scratch / name, directory / name)
                placed.append(directory / name)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        raise


def _link(source: Path, path: Path) -> None:
    """Give a file a name that is free. Raises FileExistsError, of that name, where it is not."""
    try:
        path.hardlink_to(source)
    except OSError as error:  # another than that is of a file system without hard links
        if isinstance(error, FileExistsError) or path.is_symlink() or path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path)) from None
        source.rename(path)
