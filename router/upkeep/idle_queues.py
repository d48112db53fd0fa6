"""Idle queues go by themselves when nobody uses them: `router.queue("replies.17", expires_when_idle=60)`.

Only an empty queue goes, so that no message is lost with it. A queue is idle while it is empty, nobody waits or listens
there and nothing passes through it. The router looks four times in the queue's time, but at most once a second. The
option is not recorded: it holds in the router that was told, until that is closed, as long as there is the queue, or an
object of it with this option.
"""

from __future__ import annotations

import logging
import threading
import weakref
from time import monotonic
from typing import Any, Final

from ...adapters.system.background import CoalescedJob
from ...policies.errors import AnabranchError
from ...policies.names.destination import Destination
from ..api.queue import Queue
from ..placement.registry import StoreRegistry
from ..transactions.table import TransactionTable

log: logging.Logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
LOOKS: Final = 4
"""How often to look in the time that a queue may be idle."""


class _Idle:
    """A queue that is to go."""

    __slots__ = ("handles", "look_at", "mark", "seconds", "since")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.handles: weakref.WeakValueDictionary[int, Queue[Any]] = weakref.WeakValueDictionary()
        """The queue's objects, through which somebody may send there again once it is gone: by their ids, since equal
        ones are several."""
        self.mark: object = None
        """The latest answer of Store.idle_mark."""
        self.since = monotonic()
        """When that answer came first."""
        self.look_at = 0.0
        """When to look next (monotonic)."""

    def begin(self, mark: object) -> None:
        """Begin to count: the queue was used until now; from now on, perhaps, it is not."""
        self.mark, self.since = mark, monotonic()


class IdleQueues:
    """The queues of one router that go when they are idle. Threads: all; `_lock` guards the table."""

    def __init__(self, registry: StoreRegistry, transactions: TransactionTable) -> None:
        self._registry, self._transactions = registry, transactions
        self._lock = threading.RLock()  # re-entrant, for signal handlers
        self._queues: dict[Destination, _Idle] = {}
        self._job = CoalescedJob(self._look)

    def add(self, queue: Queue[Any], seconds: float) -> None:
        """Add a queue, which goes once it has been idle for so long; the latest word counts."""
        with self._lock:
            idle = self._queues.get(queue.destination)
            if idle is None:
                idle = self._queues[queue.destination] = _Idle(seconds)
            idle.seconds, idle.look_at = seconds, 0.0
            idle.handles[id(queue)] = queue
            idle.begin(None)
        self._job.schedule(LOOK_SECONDS)

    def close(self) -> None:
        """Forget all of them. Idempotent."""
        with self._lock:
            self._queues.clear()

    def _look(self) -> None:
        """Look at each queue whose turn it is, in the background."""
        if not self._registry.opened:
            return
        try:
            for destination, idle in list(self._queues.items()):
                if idle.look_at <= monotonic():
                    self._look_at(destination, idle)
                    idle.look_at = monotonic() + idle.seconds / LOOKS
        finally:
            if self._queues:
                self._job.schedule(LOOK_SECONDS)

    def _look_at(self, destination: Destination, idle: _Idle) -> None:
        try:
            if destination not in self._registry.table.destinations:
                with self._lock:
                    if not idle.handles:
                        self._queues.pop(destination, None)
                idle.begin(None)
                return
            is_over = monotonic() - idle.since >= idle.seconds
            store = self._registry.open_store_of(destination)
            if store is not None:
                mark = store.idle_mark(destination)
            elif idle.mark is not None:
                mark = idle.mark  # in one that is closed nothing passes
            elif is_over:  # nobody has opened it in all that time
                mark = idle.mark = self._registry.for_held(
                    destination, lambda store: store.idle_mark(destination), None
                )
            else:
                return
            if mark is None or mark != idle.mark:
                idle.begin(mark)
            elif is_over and not self._registry.removal.delete_if_idle(
                destination, lambda: self._may_go(destination, idle)
            ):
                idle.begin(None)
        except AnabranchError as error:  # its store has failed, say: the next look may find it well
            log.debug("%s is not removed yet: %s", destination, error)

    def _may_go(self, destination: Destination, idle: _Idle) -> bool:
        """Return whether a queue is as it was, and no transaction that had its store is on its way there. Nobody finds
        its store any more."""
        if self._queues.get(destination) is not idle or idle.mark is None:
            return False  # somebody has just asked for it
        return not any(
            transaction.passing and transaction.concerns(destination) for transaction in list(self._transactions.begun)
        )


def require_seconds(seconds: object) -> float:
    """Raise TypeError or ValueError for what is no time to be idle for."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"expires_when_idle is a number of seconds, not {type(seconds).__name__}: {seconds!r}")
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"expires_when_idle is a number of seconds above 0, up to {threading.TIMEOUT_MAX:.0f}, not {seconds!r}; "
            "leave it out for a queue that stays"
        )
    return seconds
