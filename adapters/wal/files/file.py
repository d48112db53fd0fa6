"""One open file of a log, and how its space is allocated ahead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ...system.files import FILE_MODE, open_file

FILL_MIN: Final = 64 * 1024
FILL_MAX: Final = 1024 * 1024
"""Zero-fill goes ahead of the appends in chunks from FILL_MIN, doubling up to FILL_MAX (rule D5)."""


class File:
    """An open file that closes itself when its last user lets go of it.

    A reader that holds one reads that file whatever becomes of its name: no descriptor is ever closed, and its number
    used for another file, under a reader's feet.
    """

    __slots__ = ("__weakref__", "_close", "fd")

    def __init__(self, path: Path, flags: int, file_mode: int = FILE_MODE) -> None:
        self._close = os.close  # os may be gone when the interpreter goes
        self.fd: Final = open_file(path, flags, file_mode)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self._close(self.fd)
