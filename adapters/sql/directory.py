"""An SQL store's directory, beside its id and its lock.

store.db     the tables, if they are in SQLite and not on a server; beside it SQLite's store.db-wal and store.db-shm
"""

from __future__ import annotations

from typing import Final

from ..system import directory

NODE: Final = "store.node"
"""The file of a shared store alone, which names the directory among those of other routers."""


class StoreDirectory(directory.StoreDirectory):
    """The directory of one SQL store. The constructor touches nothing. The id is also in the table STORE."""

    advice = (
        "If it lies on another disk, mount that first; if only this file is lost, restore it (the table STORE holds "
        "the same id)"
    )
