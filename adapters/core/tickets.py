"""What a caller asks for, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ..background import shared

if TYPE_CHECKING:
    from .changes import Change


class Ticket:
    """Changes that take effect together."""

    __slots__ = ("_waiter", "changes", "done", "error", "future", "outcomes", "reservation", "size", "sync", "unsynced")

    def __init__(self, changes: Sequence[Change], size: int, sync: bool = False, unsynced: bool = False) -> None:
        """`size`: at most so many bytes they take. `unsynced`: no power failure is waited for, whatever the policy."""
        self.changes = changes
        self.size = size
        self.sync = sync
        self.unsynced = unsynced
        self.done = False
        self.error: BaseException | None = None
        self.outcomes: list[Any] = []
        """What came of each change. Set by who writes, never changed in place."""
        self.reservation: object = None
        """Room in the store that it holds until it is done (limits.py)."""
        self.future: tuple[Future[Any], Callable[[Ticket], Any]] | None = None
        self._waiter: Any = None

    def finish(self, error: BaseException | None) -> None:
        """Done, well or not. May be called again with the same by who makes up for an interruption."""
        if error is not None:
            self.error = error
        self.reservation = None
        if self.future is not None and not self.done:
            future, result = self.future
            shared().resolve([(future, None if self.error is not None else result(self), self.error)])
        self.done = True
        self.wake()

    def wake(self) -> None:
        """Let the thread that waits for it look."""
        if self._waiter is not None:
            try:
                self._waiter.release()
            except RuntimeError:
                pass  # it is awake already

    def wait(self, seconds: float) -> None:
        """Until it may be done, or so long."""
        if self._waiter is None:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiter = waiter
        if not self.done:
            self._waiter.acquire(timeout=seconds)
