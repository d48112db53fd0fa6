"""The steps of a backend for each change: the methods of a table, and the order in which they are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from ..record.place import Place
from ..state.leases import DestinationState, SubscriptionState
from .changes import Ack, Change, Postponed, Send

if TYPE_CHECKING:
    from .branches import Branch

SEQ_MAX: Final = (1 << 64) - 1

AT_ONCE: Final = 4096
"""A destination with no more messages is removed, and its subscriptions end, in one go."""


class Table(Protocol):
    """The steps of a backend for each change, in their order. A step that is done already must change nothing: after an
    interruption it is done again."""

    def put(self, sends: Sequence[Send]) -> None:
        """Put new messages, all of one destination. A topic's message is for those whom `recipients` names; without any
        it is not kept. Their destination and those subscriptions count them. A map's message takes the place of the
        message of the same id, which is dead from then on. A REMOVAL (encoding.py) is dead itself. So is one that comes
        after another of a higher seq."""

    def ack(self, acks: Sequence[Ack]) -> None:
        """Ack messages: each is dead for the subscription of its ack's number, and for good when all have acked it;
        number 0: for all. The `place` of an ack: where its message was when it was leased, if that is known."""

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        """Ack all messages between two seqs; also for a subscription that has ended, and in a destination that was
        removed."""

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        """Set how often a message was given back by now. `place`: where it was when it was leased, if that is known."""

    def postpone(self, state: DestinationState, seq: int, number: int, due: int, place: Place | None) -> None:
        """Let a message wait until this time (ms), or, at 0, no longer: Rows tells what that means. For the
        subscription of this number; 0: a queue's, or a topic's for all. Nothing happens to one that is dead, or acked.
        The destination, and subscriptions, count what waits. A backend that `postpones` has it."""

    def declare(self, state: DestinationState) -> None:
        """Declare a destination that is there from now on."""

    def remove(self, state: DestinationState) -> None:
        """Remove a destination with all that belongs to it: nothing of it is seen any more, and its number is never
        used again. Its messages, if there are more than AT_ONCE, may stay: then it is put into `Catalog.leaving`, and
        is told by `ack_range` which of them go, until one reaches to SEQ_MAX; or the next opening removes them."""

    def subscribe(self, subscriber: SubscriptionState) -> None:
        """Begin a subscription: all that its topic holds behind `subscriber.start` is for it as well."""

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        """End a subscription: it has acked all, so to speak. If its topic holds more than AT_ONCE messages, it may do
        so by pages, likewise."""

    def prepare(self, branch: Branch) -> None:
        """Prepare a branch, which waits for its outcome: `branch.payload` is to be kept until then."""

    def settled(self, branch: Branch, committed: bool) -> None:
        """Settle a branch that has its outcome; that it is committed is remembered until `forget`."""

    def forget(self, transactions: Sequence[bytes]) -> None:
        """Forget these transactions, which need no longer be remembered."""


def apply_all(changes: Iterable[Change], table: Table) -> None:
    """Apply changes in order, messages that follow each other to one destination with one call. In a list this also
    holds for messages that have only acks between them, which come behind them: whoever acks what is not applied yet
    comes behind it, too. In anything else the next change is asked for once the one before it is applied, unless both
    are messages."""
    if type(changes) is list:
        _apply_list(changes, table)
        return
    sends: list[Send] = []
    for change in changes:
        if type(change) is Send:
            if sends and sends[0].state is not change.state:
                table.put(sends)
                sends = []
            sends.append(change)
            continue
        if sends:
            table.put(sends)
            sends = []
        change.apply(table)
    if sends:
        table.put(sends)


def _apply_list(changes: list[Change], table: Table) -> None:
    if len(changes) == 1:
        changes[0].apply(table)
        return
    sends: dict[DestinationState, list[Send]] = {}
    acks: list[Ack] = []
    waits: list[Postponed] = []
    for change in changes:
        kind = type(change)
        if kind is Ack:
            acks.append(change)  # type: ignore[arg-type]
        elif kind is Send:
            those = sends.get(change.state)  # type: ignore[attr-defined]
            if those is None:
                those = sends[change.state] = []  # type: ignore[attr-defined]
            those.append(change)  # type: ignore[arg-type]
        elif kind is Postponed:
            waits.append(change)  # type: ignore[arg-type]
        else:
            _apply_both(sends, acks, waits, table)
            change.apply(table)
    _apply_both(sends, acks, waits, table)


def _apply_both(
    sends: dict[DestinationState, list[Send]], acks: list[Ack], waits: list[Postponed], table: Table
) -> None:
    """Apply sends and acks, and then waits: a wait of a message that is dead by then says nothing."""
    for those in sends.values():
        table.put(those)
    if acks:
        table.ack(acks[:])
    sends.clear()
    acks.clear()
    if waits:
        for wait in waits:
            wait.apply(table)
        waits.clear()
