"""What every part that keeps files needs: making a change of names durable, and LMDB files that survive their birth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import lmdb

LMDB_ENGINE: Final = 0
"""The lmdb package bundles two engines whose files are mutually unreadable: 0 is LMDB 0.9."""


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and what is missing above it, durably."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_directory(made.parent)


def open_lmdb(path: Path, map_bytes: int, max_dbs: int) -> Any:
    """One file, no lock file: the directory's lock is the owner's."""
    return lmdb.open(
        str(path), map_size=map_bytes, subdir=False, lock=False, max_dbs=max_dbs, readahead=False,
        lib_version=LMDB_ENGINE,
    )  # fmt: skip


def create_lmdb(path: Path, map_bytes: int) -> None:
    """A new, empty file. Made under another name and renamed, since LMDB refuses a file that a power failure met
    before its first commit (rule X5)."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    env = open_lmdb(unfinished, map_bytes, 1)
    env.sync(True)
    env.close()
    unfinished.rename(path)
    sync_directory(path.parent)
