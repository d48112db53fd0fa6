"""Reclaiming: segments without live messages go, once a snapshot has said what else was in them (rules J6, J7)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ...policies.errors import AnabranchError
from ..background import shared
from ..files import disk_errors
from . import format as f
from .log import Log
from .segment import Segment
from .ticket import Ticket

log = logging.getLogger(__name__)


class Reclaimer:
    """Frees segments in the background, or when asked. One at a time."""

    def __init__(
        self,
        the_log: Log,
        snapshot: Callable[[], tuple[list[Segment], bytes]],
        forget: Callable[[set[int]], None],
        archive_directory: Path | None,
    ) -> None:
        self._log = the_log
        self._snapshot = snapshot
        self._forget = forget
        self._archive_directory = archive_directory
        self._lock = threading.Lock()  # one reclaiming at a time
        self._due = False

    def notice(self) -> None:
        """A segment may have become free."""
        if not self._due:
            self._due = True
            shared().schedule(0, self._run_in_background)

    def _run_in_background(self) -> None:
        self._due = False
        try:
            if not self._log.forked:
                self.run()
        except AnabranchError as error:
            log.debug("%s: nothing reclaimed: %s", self._log.name, error)

    def finish(self) -> None:
        """Wait for the one under way, if one is; the log is closed, so that no other begins."""
        with self._lock:
            pass

    def run(self) -> int:
        """Free what can be freed; returns bytes.

        The snapshot is durable before the checkpoint is written, and both before any file goes: a crash between finds
        either everything, or files that nothing accounts for any more, which the next open removes.
        """
        with self._lock:
            empty, document = self._snapshot()
            freed = sum(segment.capacity for segment in empty)
            if not empty:
                return 0
            with disk_errors(f"{self._log.name}: no segment can be released"):
                names = self._log.files.names()
            size = f.RECORD_HEADER.size + len(document)
            ticket = Ticket([(f.SNAPSHOT, document)], size, sync=True)
            ticket.may_use_reserve = True
            self._log.submit(ticket)
            self._log.wait(ticket)
            self._forget({segment.number for segment in empty})
            options = self._log.options
            try:
                self._log.files.release(
                    [(s.number, s.capacity) for s in empty], options.pool_files, self._archive(), names
                )
            except OSError as error:
                # The store is right without them; the next open removes what is left.
                log.warning("%s: released segments could not be removed: %s", self._log.name, error)
            log.debug("%s: %d segments released", self._log.name, len(empty))
            return freed

    def _archive(self) -> Path | None:
        """This store's own folder in the archive directory, which stores may share."""
        archive = self._archive_directory
        if archive is None:
            return None
        return archive / f"{self._log.files.directory.parent.name}-{self._log.store_id.hex()[:8]}"
