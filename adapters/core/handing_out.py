"""What is done with a message that somebody has just leased, before they see it: its time begins to run.

Who is interrupted in here gives the message back, as anybody who leases one and does not get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .lease_times import LeaseTimes, require_seconds

if TYPE_CHECKING:
    from .backend import Settings
    from .delivery import Lease


class HandingOut:
    """Of one store that is open. Threads: all."""

    __slots__ = ("_timeout", "_times", "needed")

    def __init__(self, settings: Settings, times: LeaseTimes) -> None:
        self._times, self._timeout = times, settings.lease_timeout
        self.needed = self._timeout is not None
        """Whether there is anything to do for each message; else only for one that is leased for a time of its own."""

    def __call__(self, leases: Sequence[Lease], seconds: float | None) -> None:
        """They are leased for so many `seconds`; None: as long as their store says."""
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
