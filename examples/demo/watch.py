"""Watch the journals of a router as closely as the advisor's model does: what compaction copies is there for a moment
beside what it is copied from, and it is waited for, as it would be over where a day's operations take a day."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.journal.backend import JournalBackend
from anabranch.adapters.wal.segment import Segment

IDLE: Final = 3
"""Compaction is done that was seen idle so often."""


@dataclass(slots=True)
class Watch:
    """`look` is called behind each operation."""

    peak_bytes: int = 0
    peak_files: int = 0
    looks: list[int] = field(default_factory=list)
    """Bytes when each look was over."""
    _seen: set[int] = field(default_factory=set)

    def look(self, router: anabranch.Router) -> tuple[int, int]:
        """Wait until the journals have compacted and released what they can. Returns files and bytes."""
        stores = list(_stores(router))
        backends = [backend for _, backend in stores]
        for store, backend in stores:
            if id(backend) not in self._seen:
                self._watch(backend, router)
            with store._engine.lock:
                store._engine.current()  # who writes next does it, else
            self._note(backends)
            idle = 0
            while idle < IDLE and (idle or _is_compacting(backend)):  # between two it is idle for a moment
                idle = 0 if _is_compacting(backend) else idle + 1
                time.sleep(0.0003)
            _release_dead(backend)
            self._seen.add(id(backend))
        self._note(backends)
        files, size = _used(backends)
        self.looks.append(size)
        return files, size

    def _watch(self, backend: JournalBackend, router: anabranch.Router) -> None:
        """Look also when files are there beside those that replace them: copies were added, segments are to go."""
        add_copies, forget_segments = backend._log.add_copies, backend._log.forget_segments

        def added(copies: Segment) -> None:
            add_copies(copies)
            self._note([other for _, other in _stores(router)])

        def forgotten(numbers: set[int]) -> None:
            self._note([other for _, other in _stores(router)])
            forget_segments(numbers)

        backend._log.add_copies = added  # type: ignore[method-assign]
        backend._log.forget_segments = forgotten  # type: ignore[method-assign]

    def _note(self, backends: list[JournalBackend]) -> None:
        files, size = _used(backends)
        self.peak_files, self.peak_bytes = max(self.peak_files, files), max(self.peak_bytes, size)


def _stores(router: anabranch.Router) -> Iterator[tuple[Store, JournalBackend]]:
    for store in router._registry.open_stores():
        assert isinstance(store, Store)
        assert isinstance(store.backend, JournalBackend)
        yield store, store.backend


def _used(backends: list[JournalBackend]) -> tuple[int, int]:
    """Their journal files, and the bytes of these, at full size that are being written; pooled ones do not count."""
    sizes = [segment.capacity for backend in backends for segment in backend._log.table.all]
    return len(sizes), sum(sizes)


def _release_dead(backend: JournalBackend) -> None:
    """Release the files in which nothing lives, which the background does some moments later."""
    tail = backend._log.tail.segment
    if any(not segment.live and segment is not tail for segment in backend._log.table.all):
        backend.reclaim()


def _is_compacting(backend: JournalBackend) -> bool:
    """Whether its compaction is under way, or about to be."""
    compactor = backend._compactor
    return not compactor._job.last.begun or compactor._lock.locked()
