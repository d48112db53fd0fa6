"""What the store holds, and what each operation makes of it: plain values, no files, no threads, no leases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from anabranch.adapters.base import Change, Outgoing, Subscription
from anabranch.adapters.clock import now_ms
from anabranch.adapters.headers import pack_headers, pack_id
from anabranch.policies.destination import Destination, Kind

QUEUE = 0
"""Who has yet to ack a queue's message; a topic's subscriptions have numbers from 1 on."""

COMMITTED_MAX = 100_000


class Sent(NamedTuple):
    """A message on its way, checked."""

    destination: str
    body: bytes
    headers: bytes
    message_id: str | None
    priority: int
    expires_at_ms: int
    timestamp_ms: int
    requeued: bool = False

    @property
    def size(self) -> int:
        """In bytes, as the limits count it."""
        return len(self.body) + len(self.headers) + 64


class Acked(NamedTuple):
    """A message that is done with, by whom: a number, or None for all."""

    destination: str
    seq: int
    number: int | None


class Changed(NamedTuple):
    """A Change, as it is kept."""

    topic: str
    name: str
    client_id: str
    selector: str | None
    no_local: bool
    subscribe: bool
    retroactive: bool

    @classmethod
    def of(cls, change: Change) -> Changed:
        topic, name, client_id, selector, no_local = change.subscription
        return cls(str(topic), name, client_id, selector, no_local, change.subscribe, change.retroactive)

    @property
    def subscription(self) -> Subscription:
        return Subscription(
            Destination.restored(self.topic), self.name, self.client_id, self.selector, bool(self.no_local)
        )


class Stored(msgspec.Struct):
    """A message."""

    seq: int
    sent: Sent
    pending: dict[int, int]
    """Who has yet to ack it -> how often it has come back from there."""


class Branch(msgspec.Struct):
    """A transaction that is prepared."""

    participants: list[bytes]
    changes: list[Changed]
    sends: list[Sent]
    acks: list[Acked]


class Contents(msgspec.Struct):
    """All of a store."""

    store_id: bytes
    last_seq: int = 0
    last_number: int = QUEUE
    destinations: dict[str, dict[int, Stored]] = {}
    """Name -> seq -> message, in the order of the seqs."""
    subscriptions: dict[int, Changed] = {}
    """By number."""
    window: dict[tuple[str, str], int] = {}
    """Destination and message id -> seq, the oldest first."""
    branches: dict[bytes, Branch] = {}
    committed: list[bytes] = []

    def held(self) -> tuple[int, int]:
        """Messages and their bytes, those of branches included."""
        sizes = [stored.sent.size for found in self.destinations.values() for stored in found.values()]
        sizes += [sent.size for branch in self.branches.values() for sent in branch.sends]
        return len(sizes), sum(sizes)

    def of(self, destination: str) -> dict[int, Stored]:
        return self.destinations.get(destination, {})

    def number_of(self, topic: str, client_id: str, name: str) -> int | None:
        """Of a subscription; None if there is none."""
        found = (n for n, s in self.subscriptions.items() if (s.topic, s.client_id, s.name) == (topic, client_id, name))
        return next(found, None)

    def apply(
        self, changes: Iterable[Changed], sends: Iterable[Sent], acks: Iterable[Acked], window_limit: int
    ) -> list[tuple[int, bool]]:
        """What a transaction does; returns seq and whether it is a duplicate, for each send."""
        for change in changes:
            if change.subscribe:
                self.subscribe(change)
            else:
                self.unsubscribe(change.topic, change.client_id, change.name)
        outcomes = [self.send(sent) for sent in sends]
        while len(self.window) > window_limit:
            del self.window[next(iter(self.window))]
        for acked in acks:
            self.ack(acked)
        return outcomes

    def send(self, sent: Sent) -> tuple[int, bool]:
        key = (sent.destination, sent.message_id or "")
        if sent.message_id is not None and key in self.window and not sent.requeued:
            return self.window[key], True
        self.last_seq += 1
        if Destination.restored(sent.destination).kind is Kind.TOPIC:
            numbers = [n for n, known in self.subscriptions.items() if known.topic == sent.destination]
        else:
            numbers = [QUEUE]
        messages = self.destinations.setdefault(sent.destination, {})
        if numbers:
            messages[self.last_seq] = Stored(self.last_seq, sent, dict.fromkeys(numbers, 0))
        if sent.message_id is not None:
            self.window.pop(key, None)  # requeued: it is among the latest again
            self.window[key] = self.last_seq
        return self.last_seq, False

    def ack(self, acked: Acked) -> None:
        messages = self.of(acked.destination)
        stored = messages.get(acked.seq)
        if stored is not None:
            if acked.number is None:
                stored.pending.clear()
            stored.pending.pop(acked.number or QUEUE, None)
            if not stored.pending:
                del messages[acked.seq]

    def returned(self, acks: Iterable[Acked]) -> None:
        """These have come back."""
        for acked in acks:
            stored = self.of(acked.destination).get(acked.seq)
            if stored is None:
                continue
            for number in stored.pending:
                if acked.number in (number, None):
                    stored.pending[number] += 1

    def subscribe(self, change: Changed) -> bool:
        if self.number_of(change.topic, change.client_id, change.name) is not None:
            return False
        self.last_number += 1
        self.subscriptions[self.last_number] = change
        for stored in self.destinations.setdefault(change.topic, {}).values():
            if change.retroactive:
                stored.pending[self.last_number] = 0
        return True

    def unsubscribe(self, topic: str, client_id: str, name: str) -> int:
        number = self.number_of(topic, client_id, name)
        if number is None:
            return 0
        del self.subscriptions[number]
        backlog = [seq for seq, stored in self.of(topic).items() if number in stored.pending]
        for seq in backlog:
            self.ack(Acked(topic, seq, number))
        return len(backlog)

    def delete(self, destination: str) -> int:
        self.subscriptions = {n: known for n, known in self.subscriptions.items() if known.topic != destination}
        self.window = {key: seq for key, seq in self.window.items() if key[0] != destination}
        return len(self.destinations.pop(destination, {}))

    def violations(self) -> Iterator[str]:
        for name, messages in self.destinations.items():
            for seq, stored in messages.items():
                if not 0 < seq <= self.last_seq:
                    yield f"message {seq} of {name} is beyond the last one, {self.last_seq}"
                if not stored.pending:
                    yield f"message {seq} of {name} waits for nobody"
                for number in stored.pending:
                    if number != QUEUE and number not in self.subscriptions:
                        yield f"message {seq} of {name} waits for subscription {number}, which is not there"
            if list(messages) != sorted(messages):
                yield f"the messages of {name} are not in order"


def checked_send(destination: Destination, message: Outgoing) -> Sent:
    """As the base class of all errors says: TypeError and ValueError for what is no message."""
    if message.message_id is not None:
        pack_id(message.message_id)
    headers = pack_headers(message.headers) if message.headers else b""
    return Sent(
        str(destination), message.body, headers, message.message_id, message.priority, message.expires_at_ms, now_ms(),
        message.requeued,
    )  # fmt: skip
