"""The steps between a lease and its consumer's sight: the message is counted, and its lease's time begins.

With `count_deliveries: on_receive` a delivery is written before the message is handed out, so that a process which dies
while it holds one has been counted, and whatever is killed, no message is delivered more often than `max_deliveries`
says. A count that was written for a receive that was then interrupted stays, until the message is handed out again: too
many may be counted, never too few. The count in a lease's `place` is that without this delivery, in either mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ..state.gates import MovedError
from ..state.leases import MOVING, Lease
from .lease_times import LeaseTimes, require_seconds

if TYPE_CHECKING:
    from ..backend import Settings


class HandingOut:
    """The handing out of one open store's messages. Threads: all. A caller that is interrupted in here gives the
    messages back, as any caller that leases messages and does not get them."""

    __slots__ = ("_count", "_timeout", "_times", "needed")

    def __init__(self, settings: Settings, times: LeaseTimes, count: Callable[[Sequence[Lease]], None]) -> None:
        """`count` writes that these were handed out once more."""
        self._times, self._timeout = times, settings.lease_timeout
        self._count = count if settings.count_on_receive else None
        self.needed: Final = self._timeout is not None or self._count is not None
        """True if there is anything to do for each message; else only for one that is leased for a time of its own."""

    def __call__(self, leases: Sequence[Lease], seconds: float | None) -> None:
        """Count the leases and begin their time: `seconds`, or with None as long as their store says. Raises
        StoreFailedError, OutcomeUnknownError, MovedError: then the leases are to be given back."""
        if self._count is not None:
            self._count(leases)
            for lease in leases:
                if lease.hold >= MOVING:  # the count may have come too late to go along
                    raise MovedError(lease.gate)
        self.begin(leases, seconds)

    def begin(self, leases: Sequence[Lease], seconds: float | None) -> None:
        """Begin the time of leases, as above; they are not counted."""
        if seconds is None:
            seconds = self._timeout
        if seconds is not None:
            for lease in leases:
                self._times.begin(lease, seconds)

    @staticmethod
    def check(seconds: float | None) -> None:
        """Raise TypeError or ValueError for what is no time that a lease may last."""
        if seconds is not None:
            require_seconds(seconds, "lease")
