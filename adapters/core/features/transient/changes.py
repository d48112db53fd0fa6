"""The changes of transient messages in a ticket or plan with others, and what a plan does to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ...operations.changes import Ack, Change, Postponed, Returned, Send
from ...operations.pending_counts import PendingCounts
from ...operations.plan import Effect, Plan
from ...record.encoding import is_requeued
from ...state.delivery import Delivery
from ...state.duplicates import DuplicateWindow, Key
from ...state.leases import DestinationState
from ...state.rows import Rows

Inner = Send | Ack | Returned | Postponed


class TransientChange(Change):
    """A change that concerns a transient message, in a ticket: no backend is told of it."""

    __slots__ = ("begin", "change", "room")

    size: int = 0

    def __init__(self, begin: Callable[[], TransientEffect], change: Inner) -> None:
        """`begin` returns the effect of a plan that has none yet."""
        self.begin: Final = begin
        self.change: Final = change
        self.room: Any = None
        """Memory that is reserved for it."""

    @property
    def inner(self) -> Inner:
        return self.change

    def plan(self, plan: Plan) -> tuple[int, bool] | None:
        """Plan the change; of a message, as Send.plan."""
        change, outcome = self.change, None
        effect = plan.effect(TransientEffect, self.begin)
        if type(change) is Send:
            if plan.removed or not change.state.declared:  # as Send.plan
                change.state = plan.current(change.state)
            name = change.name
            key = (change.state.number, name) if name is not None else None
            first = effect.seq_of(key, plan) if key is not None and not is_requeued(change.record) else None
            if first is not None:
                return first, bool(name and name[0])  # as Send.plan
            change.seq = plan.last_seq = seq = plan.last_seq + 1
            if key is not None:
                effect.ids[key] = seq
            outcome = seq, False
        effect.apart.append(self)
        plan.beside = effect
        return outcome

    def states(self) -> tuple[DestinationState, ...]:
        return (self.change.state,)

    def add_to(self, counts: PendingCounts) -> None:
        change = self.change
        if type(change) is Send:
            counts.add_send(change.state, change.recipients or list(change.state.subscriptions.values()))
        else:
            change.add_to(counts)

    def undo(self, delivery: Delivery, rows: Rows) -> None:
        self.change.undo(delivery, rows)

    def give_back_room(self) -> None:
        self.room = None  # the error that says so may keep the change for long


class TransientEffect(Effect):
    """The transient changes of a plan, which take effect with it."""

    def __init__(self, window: DuplicateWindow, apply: Callable[[Plan, TransientEffect], object]) -> None:
        """`window`: of messages that are there. `apply` brings these into the rows, and may be called again."""
        self._window, self._apply = window, apply
        self.apart: list[TransientChange] = []
        self.ids: dict[Key, int] = {}
        """Ids of the messages."""

    def seq_of(self, key: Key, plan: Plan) -> int | None:
        """Return the seq of the message with this id, for a transient message. It is a duplicate of either kind; a
        persistent one, of its kind alone."""
        return plan.seq_of(key) or self.ids.get(key) or self._window.get(key)

    def taken(self) -> None:
        for one in self.apart:
            for channel in one.change.state.channels():
                if channel.receivers:
                    channel.wake()

    def apply(self, plan: Plan) -> None:
        if self.apart:
            self._apply(plan, self)

    def changes(self) -> Sequence[Change]:
        return list(self.apart)
