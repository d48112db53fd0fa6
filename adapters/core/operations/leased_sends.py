"""A message that is leased to its sender from its first moment on.

It is written as any other. Its lease begins as it is applied, under the store's lock, and before it is in the rows: so
whoever looks for messages finds it held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..state.leases import DestinationState, Lease
from .changes import Change, Send
from .plan import Effect

if TYPE_CHECKING:
    from ..state.delivery import Delivery
    from .plan import Plan


class LeasedSend(Change):
    """A send whose message its caller holds, in a ticket. The plan has the send itself."""

    __slots__ = ("given_up", "lease", "send", "size")

    brings = True

    def __init__(self, send: Send) -> None:
        self.send: Send = send
        self.size: int = send.size
        self.lease: Lease | None = None
        """Set as the lease begins."""
        self.given_up: bool = False
        """Its caller was interrupted, or was told that the outcome is not known: nobody is to hold the message."""

    @property
    def inner(self) -> Send:
        return self.send

    @property
    def state(self) -> DestinationState:
        """Return the state of its queue."""
        return self.send.state

    def plan(self, plan: Plan) -> tuple[int, bool]:
        """Plan the send, as Send.plan; unless it is a duplicate it is held."""
        self.send.seq = 0  # of a plan before, which an interruption has ended
        outcome = self.send.plan(plan)
        if self.send.seq:
            plan.effect(_Beginnings, _Beginnings).begin(self)
        return outcome


class _Beginning(Change):
    """The beginning of a lease. It stands before its message among what is applied, and no backend does anything."""

    __slots__ = ("leased",)

    size: int = 0

    def __init__(self, leased: LeasedSend) -> None:
        self.leased: LeasedSend = leased

    def apply(self, table: Any) -> None:
        """Do nothing: a lease is in memory alone."""

    def settle(self, delivery: Delivery) -> None:
        leased, send = self.leased, self.leased.send
        if leased.given_up:
            return
        channel = send.state.channel
        if leased.lease is None:
            leased.lease = Lease((channel,), (send.order, send.seq, send.expires_at_ms, 0, send.own))
        dict.__setitem__(channel.held, send.seq, leased.lease)  # as it has no group, nothing has to watch over it


class _Beginnings(Effect):
    """The leases that begin with a plan."""

    def __init__(self) -> None:
        self._begun: list[Change] = []

    def begin(self, leased: LeasedSend) -> None:
        """Add one."""
        self._begun.append(_Beginning(leased))

    def take(self, plan: Plan, applied: int) -> None:
        if plan.changes[0] is not self._begun[0]:
            # In front: so nothing behind is passed on to consumers before it is applied (rule Y2).
            plan.changes[:0] = self._begun
