"""Where tests keep files that need no disk."""

from __future__ import annotations

import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 4 << 30


def in_memory() -> Path | None:
    """A directory of a file system in memory with room enough; None where there is none."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM else None
