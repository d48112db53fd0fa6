"""Large bodies as files in a store's directory (record/large.py says what is in them).

    <store>/large/<name>.part     one that is being written
    <store>/large/<name>.body     one that is whole

The directory is made with the first of them. No file is open between two calls but those that are being written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from .....policies.errors import StoreFailedError
from ....system.files import (
    FILE_MODE,
    FULL,
    MAKE_ROOM,
    make_directory,
    open_file,
    refused,
    sync_directory,
    sync_file,
    write_all,
)
from ...record.large import BODY, CHUNK_BYTES, CRC, DIRECTORY, NAME_BYTES, NAMED_AT, PART, START_BYTES, chunk_offset

log: logging.Logger = logging.getLogger(__name__)


class LargeFiles:
    """The large bodies of one store, in files. The constructor touches nothing."""

    def __init__(self, name: str, directory: Path, file_mode: int | None = None) -> None:
        self._what = f"store {name!r}: a large body cannot be written"
        self.directory: Final = directory / DIRECTORY
        self._file_mode = file_mode or FILE_MODE
        self._writing: dict[bytes, int] = {}
        """Descriptors."""
        self._entered = False
        """The directory's own name is durable, as far as is known."""

    def _path(self, name: bytes, suffix: str = BODY) -> Path:
        return self.directory / f"{name.hex()}{suffix}"

    def begin(self, name: bytes, start: bytes) -> None:
        try:
            make_directory(self.directory, self._file_mode, is_ours=True)
            fd = open_file(self._path(name, PART), os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
            self._writing[name] = fd
            write_all(fd, start, 0)
        except OSError as error:
            self._refuse(name, error)

    def append(self, name: bytes, number: int, chunk: bytes, chunk_bytes: int) -> None:
        try:
            write_all(self._writing[name], chunk, chunk_offset(number, chunk_bytes))
        except OSError as error:
            self._refuse(name, error)

    def publish(self, name: bytes, sync: bool) -> None:
        try:
            if sync:
                sync_file(self._writing[name])
            os.close(self._writing.pop(name))
            self._path(name, PART).rename(self._path(name))
            if sync:
                sync_directory(self.directory)
                if not self._entered:  # who made it may still be about to sync that, or have failed
                    sync_directory(self.directory.parent)
                    self._entered = True
        except OSError as error:
            self._refuse(name, error)

    def _refuse(self, name: bytes, error: OSError) -> NoReturn:
        """Leave nothing of the body, unless it cannot be removed: then the next open does it. The page cache's result
        of a failed sync is gone with it, so the store goes on (rule J9)."""
        with suppress(OSError):
            self.remove(name)
        if error.errno in FULL:
            raise refused(f"{self._what}: {error}", error, ". Nothing was sent", MAKE_ROOM) from error
        raise StoreFailedError(f"{self._what}: {error}; see to the disk and try again. Nothing was sent") from error

    def read(self, name: bytes, number: int, chunk_bytes: int) -> bytes:
        try:
            fd = self.descriptor(name)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, CRC.size + chunk_bytes, chunk_offset(number, chunk_bytes))
        finally:
            os.close(fd)

    def descriptor(self, name: bytes) -> int:
        try:
            return open_file(self._path(name), os.O_RDONLY)
        except OSError as error:
            if error.errno in FULL:
                raise refused(f"{self._path(name)} cannot be read now: {error}", error) from error
            raise

    def note(self, name: bytes, named: bytes, sync: bool) -> None:
        try:
            fd = open_file(self._path(name), os.O_WRONLY)
            try:
                write_all(fd, named, NAMED_AT)
                if sync:
                    sync_file(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if not sync:
                log.debug("%s: which message names it is not noted: %s", self._path(name), error)
                return
            if error.errno in FULL:
                raise refused(f"{self._what}: {error}", error, ". Nothing was sent", MAKE_ROOM) from error
            raise StoreFailedError(f"{self._what}: {error}; see to the disk and try again. Nothing was sent") from error

    def remove(self, name: bytes) -> None:
        fd = self._writing.pop(name, None)
        if fd is not None:
            os.close(fd)
        for suffix in (PART, BODY):
            self._path(name, suffix).unlink(missing_ok=True)

    def kept(self) -> Iterator[tuple[bytes, bytes | None]]:
        with suppress(FileNotFoundError):
            for path in list(self.directory.iterdir()):
                name = _name_of(path)
                if name is None:
                    log.warning("%s is none of ours, and stays", path)
                elif path.suffix == PART:
                    yield name, None
                else:
                    fd = open_file(path, os.O_RDONLY)
                    try:
                        start = os.pread(fd, START_BYTES, 0)
                    finally:
                        os.close(fd)
                    yield name, start

    def place(self, name: bytes, number: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, int]:
        return str(self._path(name)), chunk_offset(number, chunk_bytes)

    def close(self) -> None:
        while self._writing:
            os.close(self._writing.popitem()[1])


def _name_of(path: Path) -> bytes | None:
    if path.suffix not in (PART, BODY):
        return None
    try:
        name = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return name if len(name) == NAME_BYTES else None
