"""The journal files that ActiveMQ keeps, by the rules of MessageDatabase.checkpointUpdate in ActiveMQ 5.17.

A file is kept if
1. it is the one being written, or comes after it;
2. it holds the latest producer audit or the latest ack map;
3. it lies between the first and the last record of the unfinished transactions;
4. it holds a pending message, or the record that made a durable subscription;
5. it holds acks of messages, or outcomes of transactions, that lie in a file that is kept itself.
The fifth rule makes chains: each file holds some acks for the one before it, and so one old message keeps them all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ...policies.text import count_of, human_bytes
from .entries import Transaction
from .files import JournalFile, StoreFiles
from .replay import DestinationState, Message, Replay

WRITE, PENDING, SUBSCRIPTION, TRANSACTION, AUDIT, ACK_MAP, ACKS = (
    "write-file",
    "pending-messages",
    "subscription",
    "transaction",
    "producer-audit",
    "ack-map",
    "acks",
)


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason to keep a file."""

    kind: str
    """`write-file`, `pending-messages`, `subscription`, `transaction`, `producer-audit`, `ack-map` or `acks`."""
    text: str
    destination: str | None = None
    messages: int = 0
    """The number of messages here, for `pending-messages`. For `acks`: how many acks here are of messages in
    `files`."""
    bytes: int = 0
    oldest_message_id: str | None = None
    files: tuple[int, ...] = ()
    """The kept files for which the file is kept, for `acks`."""


class Retention:
    """The files that are kept, and for what: rules 1 to 4 give `direct`, rule 5 the rest."""

    def __init__(
        self, files: StoreFiles, replay: Replay, unfinished: Iterable[Transaction], write_file: JournalFile | None
    ) -> None:
        self.numbers: Final = [file.number for file in files.files]
        self._present = set(self.numbers)
        self.references: Final = {
            number: sorted(needed & self._present - {number}) for number, needed in replay.references().items()
        }
        self.ack_counts: Final = replay.ack_files
        self.direct: dict[int, list[Reason]] = defaultdict(list)
        self._writing(write_file.number if write_file is not None else self.numbers[-1])
        self._records(replay)
        self._transactions(unfinished)
        self._messages(replay)
        self._subscriptions(replay)
        self.kept: Final = self.sweep(self.direct)
        self._way_to_pending = self.reaching(self.roots())
        self._way_to_any = self.reaching(self.direct)

    def sweep(self, direct: Iterable[int]) -> set[int]:
        """Apply rule 5, in the broker's own single pass from the lowest file up."""
        kept = set(direct)
        for number in self.numbers:
            if number not in kept and any(needed in kept for needed in self.references.get(number, ())):
                kept.add(number)
        return kept

    def reaching(self, roots: Iterable[int]) -> dict[int, int]:
        """Return kept files from which the roots are reached by acks -> the next file on a shortest way there."""
        needed_by: dict[int, list[int]] = defaultdict(list)
        for number, needed in self.references.items():
            if number in self.kept:
                for other in needed:
                    needed_by[other].append(number)
        way = {root: root for root in roots}
        queue = deque(sorted(way))
        while queue:
            here = queue.popleft()
            for number in sorted(needed_by[here]):
                if number not in way:
                    way[number] = here
                    queue.append(number)
        return way

    def roots(self, destination: str | None = None) -> list[int]:
        """Return files with pending messages, of one destination or of any."""
        return [
            number
            for number, reasons in self.direct.items()
            if any(r.kind == PENDING and destination in (None, r.destination) for r in reasons)
        ]

    def chain(self, number: int) -> tuple[int, ...]:
        """Return the shortest way from a kept file to one with pending messages, else to one kept for itself."""
        way = self._way_to_pending if number in self._way_to_pending else self._way_to_any
        chain = [number]
        while way[chain[-1]] != chain[-1]:
            chain.append(way[chain[-1]])
        return tuple(chain)

    def root(self, number: int) -> tuple[str, ...]:
        """Return why a file is kept for itself: its destinations with pending messages, else the kinds of its
        reasons."""
        reasons = self.direct[number]
        pending = tuple(r.destination for r in reasons if r.kind == PENDING and r.destination is not None)
        return pending or tuple(reason.kind for reason in reasons)

    def _keep(self, number: int, reason: Reason) -> None:
        if number in self._present:
            self.direct[number].append(reason)

    def _writing(self, write_number: int) -> None:
        for number in self.numbers:
            if number == write_number:
                self._keep(number, Reason(WRITE, "is being written"))
            elif number > write_number:
                self._keep(number, Reason(WRITE, f"comes after db-{write_number}.log, which is being written"))

    def _records(self, replay: Replay) -> None:
        if replay.producer_audit_file is not None:
            self._keep(replay.producer_audit_file, Reason(AUDIT, "holds the latest producer audit"))
        if replay.ack_map_file is not None:
            self._keep(replay.ack_map_file, Reason(ACK_MAP, "holds the latest ack map"))

    def _transactions(self, unfinished: Iterable[Transaction]) -> None:
        places = [number for transaction in unfinished for number in transaction.files]
        ids = ", ".join(f"{t.id.text} ({t.outcome.value})" for t in unfinished)
        for number in self.numbers:
            if places and min(places) <= number <= max(places):
                self._keep(number, Reason(TRANSACTION, f"is within the reach of unfinished transactions: {ids}"))

    def _messages(self, replay: Replay) -> None:
        for destination, state in replay.destinations.items():
            by_file: dict[int, list[Message]] = defaultdict(list)
            for message in state.messages.values():
                by_file[message.file].append(message)
            for number, messages in by_file.items():
                size = sum(message.bytes for message in messages)
                text = f"holds {count_of(len(messages), 'pending message')} of {destination}, {human_bytes(size)}"
                reason = Reason(PENDING, text, str(destination), len(messages), size, messages[0].id)
                self._keep(number, reason)

    def _subscriptions(self, replay: Replay) -> None:
        for destination, state in replay.destinations.items():
            for key, subscription in state.subscriptions.items():
                free = [number for number in self.numbers if number not in self.direct]
                # A subscription with nothing pending in the lowest file that could go is written anew further on.
                moves = free[:1] == [subscription.file] and not waiting_for(state, key)
                if not moves:
                    text = f"holds the record of durable subscription {key} to {destination}"
                    self._keep(subscription.file, Reason(SUBSCRIPTION, text, str(destination)))


def waiting_for(state: DestinationState, key: str) -> list[Message]:
    return [m for m in state.messages.values() if m.waiting is not None and key in m.waiting]
