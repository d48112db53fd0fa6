"""What a store should hold, as plain lists: no files, no threads, nothing to get wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.adapters.core.store_types import Change, Subscription, SubscriptionKey
from anabranch.policies.names.destination import Destination, Kind

READY, LEASED, CLAIMED, PREPARED = "ready", "leased", "claimed", "prepared"
QUEUE = 0
"""The number of who receives from a queue; each subscription of a topic that there ever was has another."""


class Sent(NamedTuple):
    """A message on its way."""

    destination: Destination
    body: bytes
    message_id: str | None = None
    priority: int = 4
    expires_at_ms: int = 0
    persistent: bool = True
    deliver_at_ms: int = 0


@dataclass(slots=True)
class Part:
    """A message as one receiver has yet to ack it."""

    state: str = READY
    count: int = 0
    """How often it has been given back."""
    due: int = 0
    """Until when it waits; 0: it does not."""


@dataclass(slots=True)
class Expected:
    """One message."""

    seq: int
    sent: Sent
    parts: dict[int, Part]
    """By the number of who has yet to ack it."""
    due: int = 0
    """Until when it waits for all; 0: it does not."""

    @property
    def body(self) -> bytes:
        return self.sent.body

    @property
    def message_id(self) -> str | None:
        return self.sent.message_id

    @property
    def state(self) -> str:
        """Of a queue's message."""
        return self.parts[QUEUE].state

    @state.setter
    def state(self, state: str) -> None:
        self.parts[QUEUE].state = state


class Held(NamedTuple):
    """A message that somebody holds: the number of whom it was received for; None: of a topic, for all."""

    destination: Destination
    seq: int
    number: int | None


@dataclass(slots=True)
class Model:
    """One store. Every method does at once what the store does durably."""

    window_limit: int
    priorities: bool = False
    max_deliveries: int | None = None
    now_ms: int = 0
    volatile: bool = False
    """Nothing is persistent, whatever was said."""
    queues: dict[Destination, list[Expected]] = field(default_factory=dict)
    """Of each destination, queues and topics, in the order in which they were sent."""
    subscriptions: dict[int, Subscription] = field(default_factory=dict)
    window: dict[tuple[Destination, str], int] = field(default_factory=dict)
    passing: dict[tuple[Destination, str], int] = field(default_factory=dict)
    """The window of messages that are not persistent."""
    last_seq: int = 0
    last_kept: int = 0
    """The same of persistent messages."""
    kept: set[Destination] = field(default_factory=set)
    """Destinations that are there after a restart, be they empty."""
    last_number: int = QUEUE

    # Changing

    def send(self, messages: Iterable[Sequence[object]], outcomes: Iterable[tuple[int, bool]]) -> None:
        """One batch was sent, with these outcomes: are they right?"""
        fresh: dict[tuple[Destination, str], int] = {}
        passing: dict[tuple[Destination, str], int] = {}
        for sent, (seq, duplicate) in zip((Sent(*some) for some in messages), outcomes, strict=True):  # type: ignore[arg-type]
            key = (sent.destination, sent.message_id) if sent.message_id is not None else None
            kept = sent.persistent or self.volatile
            known = (fresh.get(key) or self.window.get(key)) if key is not None else None
            if not kept and key is not None and known is None:  # of the others it may be a duplicate, they not of it
                known = passing.get(key) or self.passing.get(key)
            if known is not None:
                assert (seq, duplicate) == (known, True), f"{key} is in the window with seq {known}"
                continue
            assert not duplicate
            assert seq > self.last_seq
            self.last_seq = seq
            if kept:
                self.last_kept = seq
                self.kept.add(sent.destination)
            queue = self.queues.setdefault(sent.destination, [])
            numbers = self.numbers(sent.destination)
            if numbers:
                queue.append(Expected(seq, sent, {number: Part() for number in numbers}, sent.deliver_at_ms))
            if key is not None:
                (fresh if kept else passing)[key] = seq
        for window, new in ((self.window, fresh), (self.passing, passing)):
            window.update(new)
            while len(window) > self.window_limit:
                del window[next(iter(window))]

    def remove(self, destination: Destination, seq: int, number: int | None = QUEUE) -> None:
        """It is acked: for one, or (None) for all."""
        expected = self.find(destination, seq)
        if number is None:
            expected.parts.clear()
        else:
            del expected.parts[number]
        if not expected.parts:
            self.queues[destination].remove(expected)

    def change(self, change: Change) -> None:
        """In a transaction, where what is no change any more is skipped."""
        number = self.number_of(change.subscription.topic, change.subscription.key)
        if change.subscribe and number is None:
            self.subscribe(change.subscription, change.retroactive)
        elif not change.subscribe and number is not None:
            self.unsubscribe(number)

    def subscribe(self, subscription: Subscription, retroactive: bool) -> None:
        self.last_number += 1
        self.subscriptions[self.last_number] = subscription
        self.kept.add(subscription.topic)
        for expected in self.queues.setdefault(subscription.topic, []):
            if retroactive:
                expected.parts[self.last_number] = Part()

    def unsubscribe(self, number: int) -> int:
        topic = self.subscriptions.pop(number).topic
        backlog = [expected.seq for expected in self.queue(topic) if number in expected.parts]
        for seq in backlog:
            self.remove(topic, seq, number)
        return len(backlog)

    def purge(self, destination: Destination, number: int | None = None) -> int:
        """What nobody holds goes; how many messages, for one of who may receive them, or for any."""
        count = 0
        for expected in list(self.queue(destination)):
            free = [n for n, part in expected.parts.items() if part.state == READY and number in (None, n)]
            count += bool(free)
            for n in free:
                self.remove(destination, expected.seq, n)
        return count

    def declare(self, destination: Destination) -> None:
        self.queues.setdefault(destination, [])
        self.kept.add(destination)

    def delete(self, destination: Destination) -> int:
        self.window = {key: seq for key, seq in self.window.items() if key[0] != destination}
        self.passing = {key: seq for key, seq in self.passing.items() if key[0] != destination}
        self.kept.discard(destination)
        self.subscriptions = {n: s for n, s in self.subscriptions.items() if s.topic != destination}
        return len(self.queues.pop(destination, []))

    def hold(self, held: Held, state: str) -> None:
        for part in self.parts(held):
            part.state = state

    def give_back(self, held: Held, delivered: bool = True, due: int = 0) -> None:
        for part in self.parts(held):
            part.state = READY
            part.count += delivered and held.number is not None  # what is leased for all was delivered to nobody
            part.due = due if held.number is not None and not self.is_spent(part) else part.due

    def bring(self) -> None:
        """What is due by now stays so, whatever becomes of the clock."""
        expected = [one for queue in self.queues.values() for one in queue]
        for one in expected:
            one.due = one.due if one.due > self.now_ms else 0
        for part in [part for one in expected for part in one.parts.values()]:
            part.due = part.due if part.due > self.now_ms else 0

    def restart(self) -> None:
        """Leases and claims end with the process, but for those of a prepared transaction; what is not persistent goes
        with it."""
        if not self.volatile:
            self.passing.clear()
            self.last_seq = self.last_kept
            found = {d: [e for e in queue if e.sent.persistent] for d, queue in self.queues.items() if d in self.kept}
            self.queues = found
        for queue in self.queues.values():
            for expected in queue:
                for part in expected.parts.values():
                    if part.state != PREPARED:
                        part.state = READY

    # Asking

    def numbers(self, destination: Destination) -> list[int]:
        """Who a message sent now is for."""
        if destination.kind is Kind.QUEUE:
            return [QUEUE]
        return [number for number, known in self.subscriptions.items() if known.topic == destination]

    def number_of(self, topic: Destination, key: SubscriptionKey) -> int | None:
        found = (n for n, known in self.subscriptions.items() if (known.topic, known.key) == (topic, key))
        return next(found, None)

    def queue(self, destination: Destination, number: int | None = None) -> list[Expected]:
        """In the order of delivery; of a topic those that one has yet to ack, or all."""
        found = [e for e in self.queues.get(destination, []) if number in (None, *e.parts)]
        return sorted(found, key=lambda e: -e.sent.priority) if self.priorities else found

    def is_over(self, expected: Expected) -> bool:
        return 0 < expected.sent.expires_at_ms <= self.now_ms

    def is_spent(self, part: Part) -> bool:
        return self.max_deliveries is not None and part.count >= self.max_deliveries

    def first_ready(self, destination: Destination, number: int = QUEUE) -> Expected | None:
        """What receive gives."""
        self.bring()
        for expected in self.queue(destination, number):
            part = expected.parts[number]
            if expected.due or part.due:
                continue
            if part.state == READY and not self.is_over(expected) and not self.is_spent(part):
                return expected
        return None

    def undelivered(self) -> set[Held]:
        """What take_undelivered may give."""
        found = set()
        for destination, queue in self.queues.items():
            for expected in queue:
                if self.is_over(expected) and all(part.state == READY for part in expected.parts.values()):
                    found.add(Held(destination, expected.seq, QUEUE if destination.kind is Kind.QUEUE else None))
                    continue
                for number, part in expected.parts.items():
                    if part.state == READY and self.is_spent(part):
                        found.add(Held(destination, expected.seq, number))
        return found

    def find(self, destination: Destination, seq: int) -> Expected:
        return next(expected for expected in self.queue(destination) if expected.seq == seq)

    def parts(self, held: Held) -> list[Part]:
        """What is left of what somebody holds: a subscription may be gone by now, or the message."""
        found = (e for e in self.queue(held.destination) if e.seq == held.seq)
        return [part for e in found for number, part in e.parts.items() if held.number in (None, number)]

    def delayed(self, destination: Destination, number: int = QUEUE) -> int:
        """How many wait for their time, as they stand."""
        return sum(bool(one.due or one.parts[number].due) for one in self.queue(destination, number))

    def leased(self) -> int:
        """How many are held, a message once for each for whom it is."""
        parts = [p for queue in self.queues.values() for expected in queue for p in expected.parts.values()]
        return sum(part.state != READY for part in parts)
