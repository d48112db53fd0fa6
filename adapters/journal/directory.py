"""A journal store's directory, beside its id and its lock.

journal/        the segments
index.mdb       the index, here or in `index_directory`
index.sums      the checksums of its pages, beside it
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...policies.errors import StoreFailedError
from ..system import directory
from ..system.directory import Fill
from ..system.files import FILE_MODE, make_directory
from ..wal.files.segment_files import create_log


class StoreDirectory(directory.StoreDirectory):
    """The directory of one journal store. The constructor touches nothing. Its id is also in every segment."""

    advice = (
        "If it lies on another disk, mount that first; if only this file is lost, restore it (the segments' headers "
        "hold the same id)"
    )

    def __init__(
        self,
        name: str,
        path: Path,
        index_directory: Path | None,
        file_mode: int | None = None,
        on_lost: Callable[[StoreFailedError], None] | None = None,
    ) -> None:
        super().__init__(name, path, file_mode, on_lost)
        self.journal: Final = path / "journal"
        self._index_directory = index_directory

    @property
    def index(self) -> Path:
        if self._index_directory is None:
            return self.path / "index.mdb"
        return self._index_directory / f"{self.read_id().hex()}.mdb"

    def _locked(self, store_id: bytes) -> None:
        if self._index_directory is not None:
            make_directory(self._index_directory, self.file_mode)


def first_segment(segment_size: int, file_mode: int | None = None) -> Fill:
    """Return the Fill of a new store's directory: an empty segment."""

    def fill(path: Path, store_id: bytes) -> bytes:
        create_log(path / "journal", store_id, segment_size, file_mode or FILE_MODE)
        return store_id

    return fill
