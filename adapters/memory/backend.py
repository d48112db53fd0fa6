"""The backend: all that a store holds in memory (rows.py). Nothing is written, so nothing can be unknown."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ...policies.config.options import MemoryOptions
from ...policies.errors import StoreFailedError
from ..core.backend import BackendStats, Direct, Found, Host, Settings, Writer, WrittenBackend
from ..core.in_memory.rows import CHANGE_COST, NEW_COST, MemoryRows
from ..core.operations.branches import Commit
from ..core.operations.changes import Change
from ..core.operations.plan import Plan
from ..core.state.states import Catalog
from ..core.store_types import Progress
from ..system.clock import now_us
from .directory import StoreDirectory


class MemoryBackend(MemoryRows, WrittenBackend):
    """The backend of one memory store."""

    kind = "memory"
    volatile = True
    shared = False
    descriptors = 1

    def __init__(self, name: str, directory: Path, options: MemoryOptions, index_directory: Path | None = None) -> None:
        self._name, self._options = name, options
        self.directory: Final = StoreDirectory(name, directory, options.file_mode, self._lost)
        self._last_seq = self._applied = 0
        super().__init__(name, directory, options, options.priorities, Catalog(), threading.RLock())
        self.settings: Settings = Settings.of(
            options, max_bytes=options.max_stored_bytes, max_bytes_option="max_stored_bytes",
            ticket_bytes_max=self._memory.chunk_bytes,
        )  # fmt: skip

    @classmethod
    def create(cls, name: str, directory: Path, options: MemoryOptions) -> bytes:
        return StoreDirectory(name, directory, options.file_mode).create()

    @classmethod
    def is_contained(cls, options: MemoryOptions) -> bool:
        return True

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        return StoreDirectory("", directory).identify()

    # Opening and closing

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        self.directory.unlock()  # of a close that was interrupted
        store_id = self.directory.lock()
        self._host = host
        super().__init__(
            self._name, self.directory.path, self._options, self._options.priorities, host.catalog, host.lock
        )
        self._applied = 0
        self.wipe()
        # By the clock, so that no seq comes twice, neither in a next life of the store nor in a next process.
        return store_id, Found(max(self._last_seq, now_us()))

    def close(self, clean: bool) -> None:
        self.let_go(clean)
        self.directory.unlock()

    def require_owned(self) -> None:
        self.directory.require_lock()

    def _lost(self, error: StoreFailedError) -> None:
        """Stop, since the lock's file is gone, or is another's: so may the swap files be."""
        self._host.fail(error)

    # Writing: there is room

    def writer(self, host: Host) -> Writer:
        """Return a writer on whose caller's thread all happens."""
        return Direct(host, self)

    def write(self, plan: Plan) -> None:
        self._last_seq = plan.last_seq
        size = CHANGE_COST * len(plan.changes) + NEW_COST * (1 + len(plan.declared))
        for ticket in plan.tickets:
            size += ticket.size
        if plan.prepared or plan.settled:
            commits = [change.branch.transaction for change in plan.changes if type(change) is Commit]
            self.finish_all()
            self.make_room(plan.changes, commits)
        else:
            self.require_room(plan.changes, size)

    def apply(self, changes: Sequence[Change], last: Plan) -> None:
        self.apply_changes(changes)
        self._applied = last.number

    def recover(self) -> int:
        self.mend()
        return self._applied

    # Upkeep

    def stats(self) -> BackendStats:
        return BackendStats(memory_bytes=self.memory_bytes, swap_bytes=self.swap_bytes)

    def check(self) -> Iterator[str]:
        yield from self.violations()
