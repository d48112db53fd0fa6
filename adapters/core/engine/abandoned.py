"""Messages whose receiver has let go of them without settling them: they are free again.

    message = queue.receive()
    message = None              # ResourceWarning; within a second the next receiver has it, delivered once more

`ReceivedMessage.__del__` comes here, in any thread and between any two steps of it, whatever locks that thread holds:
it takes none, and only notes the lease. Who looks once a second for what is not delivered any more gives back what was
noted. A message is a ReceivedMessage from when it is handed to its receiver until that settles it.

Not given back is what somebody may settle still who does not hold the message: a transaction that has claimed it, who
has asked for its token, an ack that is under way.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ....policies.names.destination import Destination
from ....policies.text import count_of
from ...system.rare_warnings import RareWarnings
from ..messages import Message, warn_abandoned
from ..state.leases import LEASED, LEAVING, MOVED, MOVING, Lease

if TYPE_CHECKING:
    from .engine import Engine

log: logging.Logger = logging.getLogger(__name__)


class Abandoned:
    """The messages of one open store that nobody holds any more."""

    def __init__(self, engine: Engine, give_back: Callable[[Sequence[Lease]], None]) -> None:
        """`give_back` makes free what is LEAVING, and counts it as delivered."""
        self._engine, self._give_back = engine, give_back
        self._leases: deque[Lease] = deque()
        self._lock = threading.RLock()  # held by who takes them out; a signal handler may come back to it
        self._warnings = RareWarnings(self._warn)

    def __bool__(self) -> bool:
        """Return whether there is anything to give back, or to tell."""
        return bool(self._leases) or self._warnings.is_due

    @property
    def has_moving(self) -> bool:
        """Return whether some of the messages are in another store, which is to be told, or on their way there."""
        return any(lease.hold in (MOVING, MOVED) for lease in list(self._leases))

    def note(self, message: Message[Any]) -> None:
        """Note a message that nobody holds any more. Any thread, with any lock."""
        lease, there = message._note, self
        if type(lease) is not Lease:
            return
        kept = lease.is_kept
        while lease.hold == MOVED:
            store, lease = lease.successor
            there, kept = store.abandoned, kept or lease.is_kept
        if kept or lease.hold not in (LEASED, MOVING) or not lease.is_held or not there._works():
            return
        there._leases.append(lease)
        warn_abandoned(message)

    def _works(self) -> bool:
        """Return whether anybody can hold anything in the store: not when the process ends, nor in a forked child."""
        engine = self._engine
        return not (engine.closed or engine.failed is not None or engine.forked or sys.is_finalizing())

    def give_back(self) -> None:
        """Give back what was noted. Raises StoreFailedError, ClosedError; then it stays noted."""
        leaving: list[Lease] = []
        delivery = self._engine.delivery
        try:
            with self._lock:
                self._take(leaving)
            if leaving:
                self._give_back(leaving)
            self._warnings.count([lease.channels[0].state.destination for lease in leaving])
        except BaseException:
            delivery.put_back(leaving, LEASED)
            self._leases.extend(leaving)
            raise

    def _warn(self, destination: Destination, count: int) -> None:
        log.warning(
            "store %s: %s of %s, received and let go of without ack, release or reject: free again, delivered once "
            "more", self._engine.name, count_of(count, "message"), destination,
        )  # fmt: skip

    def close(self) -> None:
        """Tell what is not told yet."""
        self._warnings.close()

    def _take(self, leaving: list[Lease]) -> None:
        """Move each lease noted by now into `leaving`. A lease that moves to another store is looked at again later, or
        there."""
        noted = self._leases
        for _ in range(len(noted)):
            lease = noted[0]
            if lease.hold == MOVED:
                store, successor = lease.successor
                store.abandoned._leases.append(successor)
            elif lease.hold == MOVING:
                noted.append(lease)
            else:
                leaving.append(lease)  # first: whoever is interrupted notes it again
                if not self._engine.delivery.move(lease, LEASED, LEAVING):
                    leaving.pop()
            noted.popleft()
