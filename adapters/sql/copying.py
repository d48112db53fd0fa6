"""A copy of a store in SQLite while it is used, by SQLite itself: a reader's transaction sees one moment, however long
it takes, and whoever writes meanwhile writes to the log behind it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ...policies.errors import StoreFailedError
from ..system.files import FILE_MODE, sync_file

PAGES = 1000
"""Pages that are copied at once."""


class SqliteCopier:
    """Copies one database, once."""

    def __init__(self, name: str, path: Path, writing: threading.Lock, file_mode: int | None) -> None:
        """Make a copier. `writing` is held by whoever writes."""
        self._name, self._path, self._writing, self._file_mode = name, path, writing, file_mode or FILE_MODE
        self._reader: sqlite3.Connection | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Close the reader at the end."""
        try:
            yield
        finally:
            if self._reader is not None:
                self._reader.close()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Begin to read while nobody writes."""
        with self._writing:
            try:
                self._reader = reader = sqlite3.connect(
                    f"{self._path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
                )
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on it sees this moment
            except sqlite3.Error as error:
                raise StoreFailedError(f"store {self._name!r} cannot be copied: {error}") from error
            yield

    def copy(self, directory: Path) -> int:
        """Copy the database."""
        assert self._reader is not None
        made = directory / self._path.name
        fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._file_mode)
        try:
            with closing(sqlite3.connect(made)) as target:
                self._reader.backup(target, pages=PAGES, sleep=0)
            sync_file(fd)
            return os.fstat(fd).st_size
        except sqlite3.Error as error:
            raise StoreFailedError(f"store {self._name!r} cannot be copied: {error}") from error
        finally:
            os.close(fd)
