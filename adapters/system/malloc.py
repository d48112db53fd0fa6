"""The C library's memory: LMDB takes much of it for each file, and uses little. Does nothing where it is another
library than glibc."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LIST_BYTES: Final = 1 << 20
"""LMDB takes a list of 2 MiB for each environment, cleared, and uses a few KiB of it; and another of 1 MiB."""
MAPPED_BYTES: Final = 32 << 20
"""The highest size that glibc itself would come to."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_IS_GIVEN: Final = any(
    name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in value) for name, value in os.environ.items()
)
"""The environment says what the sizes shall be."""


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Take blocks of LIST_BYTES and more from the system here, to give them back once they are freed.

    A list that LMDB gets from the system takes only the memory that is used of it; one that lies where another was
    freed is cleared, and takes all: 2 MiB for each store that is opened after others were closed. Bodies shall not be
    taken from the system one by one, so else the size is MAPPED_BYTES."""
    try:
        _map_blocks_from(LIST_BYTES)
        yield
    finally:
        _map_blocks_from(MAPPED_BYTES)


def _map_blocks_from(size: int) -> None:
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None and not _IS_GIVEN:
        tune(_M_MMAP_THRESHOLD, size)
        tune(_M_TRIM_THRESHOLD, 2 * MAPPED_BYTES)


def give_memory_back() -> None:
    """Let the C library return to the system what was freed. LMDB takes 3 MiB for each environment, of which glibc
    keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
