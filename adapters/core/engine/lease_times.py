"""The time for which a message is leased, where that has an end: then the message is free again, at its old place.

H5  What a lease's time is stands in the lease (`LeaseTime.until`), and counts. The heap only says when to look: an
    entry for each, at that time or before it. So to extend a lease is one assignment, and an ack does nothing here.
H6  A lease runs out while it is LEASED, under the lock under which its holder would settle it: one of the two is
    first. What a transaction has claimed does not run out; what is just being settled, or moves to another store, is
    looked at again.
H7  Who comes when the time is over is too late, whether anybody has looked by then or not.

The clock is monotonic: nobody's lease depends on what is done to the wall clock. It ends with the process.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from ....policies.errors import AnabranchError
from ...system.background import shared
from ..state.leases import CLAIMED, LEASED, MOVED, Lease, LeaseTime

if TYPE_CHECKING:
    from ..messages import Message, MessageStore
    from .engine import Engine

log: logging.Logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 0.1
"""Between two looks at least: so much later than said a message may be free."""
AGAIN_SECONDS: Final = 0.25
"""Until what was just being settled, or could not be given back, is looked at again."""
TOGETHER_MAX: Final = 1000
"""Messages that are given back together."""
FORGET_AT: Final = 1024
"""Entries beyond twice those that were needed at the last look: the others are dropped."""

Entry = tuple[float, int, Lease]
"""When to look (monotonic), a number of its own, the lease."""

_numbers = itertools.count()


def require_seconds(seconds: object, what: str) -> None:
    """Raise TypeError or ValueError for what is no time that a lease may last."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"{what} is a number of seconds, not {type(seconds).__name__}: {seconds!r}")
    if not 0 < seconds <= sys.float_info.max:
        raise ValueError(f"{what} is a number of seconds above 0, not {seconds!r}; leave it out for the store's own")


class LeaseTimes:
    """The times at which leases of one open store end. Threads: all."""

    def __init__(self, engine: Engine, give_back: Callable[[Sequence[Lease]], None]) -> None:
        """`give_back` makes free what is LEAVING, and counts it as delivered."""
        self._engine, self._give_back = engine, give_back
        self._lock = threading.RLock()  # guards the heap, within Delivery.lock; re-entrant for signal handlers
        self._heap: list[Entry] = []
        self._look_at = math.inf
        """When somebody looks next, at the latest."""
        self._most = FORGET_AT
        """The number of entries beyond which those that nobody needs are dropped."""
        self._warned = False
        """Somebody is about to."""

    def begin(self, lease: Lease, seconds: float) -> None:
        """Begin a lease's time now. Called before the consumer has the message: a caller that is interrupted gives it
        back."""
        self.carry(lease, seconds, monotonic() + seconds)

    def carry(self, lease: Lease, seconds: float, until: float) -> None:
        """Carry over a lease's time that began before, in another store."""
        lease.time = LeaseTime(seconds, until)
        self._engine.delivery.timed = True  # after it: from now on they are asked for it
        self._enter(lease, until)

    def extend(self, store: MessageStore, message: Message, seconds: float | None) -> None:
        """End the lease so many seconds from now; with None, as many as it was leased for. With None a lease without an
        end is left as it is. Raises TypeError, ValueError, UnknownMessageError, LeaseMovedError."""
        if seconds is not None:
            require_seconds(seconds, "seconds")
        delivery = self._engine.delivery
        with delivery.lock:
            (lease,) = delivery.take(store, [message], LEASED, LEASED)
            time = lease.time_limit
            if time is None and seconds is None:
                return
            if time is None:
                assert seconds is not None
                self.begin(lease, seconds)
                return
            time.until = until = monotonic() + (time.seconds if seconds is None else seconds)
            if seconds is not None:
                time.seconds = seconds
            if until < time.queued:  # the entry that there is comes too late
                self._enter(lease, until)

    def unclaimed(self, lease: Lease) -> None:
        """Look after a lease again that is LEASED after it was CLAIMED: meanwhile nobody looked when it ends (H6)."""
        if lease.time_limit is not None:
            self._enter(lease, lease.time.until)

    def _enter(self, lease: Lease, at: float) -> None:
        time = lease.time_limit
        assert time is not None
        with self._lock:
            heapq.heappush(self._heap, (at, next(_numbers), lease))
            time.queued = at
            if at < self._look_at:
                self._look(at)
            elif len(self._heap) > self._most and not self._warned:
                self._warned = True
                self._look(0)

    def _look(self, at: float) -> None:
        """See that somebody looks then."""
        shared().schedule_while_alive(max(at - monotonic(), 0), self.run)
        self._look_at = min(at, self._look_at)

    # In the background

    def run(self) -> None:
        """Give back all whose time is over. On a thread of ours, where no Ctrl-C strikes."""
        engine = self._engine
        self._look_at = math.inf
        if engine.closed or engine.forked or engine.failed is not None:
            self._heap.clear()  # nobody holds anything there
            return
        more = True
        try:
            while more:
                due: list[Lease] = []
                try:
                    more = self._take(due)
                    if due:
                        self._give_back(due)
                        log.info("store %s: %d leases have run out; their messages are free", engine.name, len(due))
                except BaseException:
                    engine.delivery.put_back(due, LEASED)
                    for lease in due:
                        self._enter(lease, monotonic() + AGAIN_SECONDS)
                    raise
        except AnabranchError as error:
            log.warning("store %s: messages whose lease is over are not free yet: %s", engine.name, error)
        finally:
            self._go_on()

    def _take(self, due: list[Lease]) -> bool:
        """Take some of the leases whose time is over; they are LEAVING from now on. Returns whether there are more."""
        delivery = self._engine.delivery
        with delivery.lock, self._lock:
            now, heap = monotonic(), self._heap
            for _ in range(TOGETHER_MAX):
                if not heap or heap[0][0] > now:
                    return False
                at, _, lease = heap[0]
                time = lease.time_limit
                if time is not None and at == time.queued and lease.is_held:
                    if delivery.lapse(lease, now):
                        due.append(lease)
                    else:
                        self._keep(lease, time, now)
                heapq.heappop(heap)
        return True

    def _keep(self, lease: Lease, time: LeaseTime, now: float) -> None:
        """Enter a lease that has not run out again, behind its entry that is about to go."""
        if lease.hold in (CLAIMED, MOVED):
            return  # for good
        at = time.until if time.until > now else now + AGAIN_SECONDS
        heapq.heappush(self._heap, (at, next(_numbers), lease))
        time.queued = at

    def _go_on(self) -> None:
        with self._lock:
            if len(self._heap) > self._most:
                self._heap = [entry for entry in self._heap if entry[2].is_held]
                heapq.heapify(self._heap)
                self._most = 2 * len(self._heap) + FORGET_AT
            self._warned = False
            if self._heap:
                at = max(self._heap[0][0], monotonic() + PAUSE_SECONDS)
                if at < self._look_at:
                    self._look(at)
