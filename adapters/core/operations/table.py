"""The steps of a backend for each change, which stand beside the changes, and the order in which they are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from ..state.leases import DestinationState
from .branches import BranchTable
from .changes import Ack, Change, MessageTable, Postponed, Send
from .destination_changes import DestinationTable

SEQ_MAX: Final = (1 << 64) - 1

AT_ONCE: Final = 4096
"""A destination with no more messages is removed, and its subscriptions end, in one go."""


class Table(MessageTable, DestinationTable, BranchTable, Protocol):
    """The steps of a backend for each change, in their order. A step that is done already must change nothing: after an
    interruption it is done again."""


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
