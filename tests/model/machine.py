"""A store of any kind beside the model: any operations in any order, closed and crashed between them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DELIVERY_LIMIT, EXPIRED, Message, Outgoing
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import SubscriptionError, TransactionError, UnknownMessageError, UnknownSubscriptionError
from anabranch.policies.names.destination import Destination, Kind

from ..contract.disk import PATIENCE, Disk
from ..contract.expiring import HOUR, Clock
from ..contract.features import schedule_of
from ..contract.preparing import OTHER, transaction
from . import FAST
from .model import CLAIMED, LEASED, PREPARED, QUEUE, Expected, Held, Model, Sent

WINDOW = 5
QUEUES = [Destination.parse(name) for name in ("a", "b", "ü/..")]
TOPICS = [Destination.parse(name) for name in ("topic://a", "topic://t")]
DESTINATIONS = QUEUES + TOPICS

destinations = st.sampled_from(DESTINATIONS)
topics = st.sampled_from(TOPICS)
keys = st.sampled_from([("c1", "desk"), ("c2", "desk"), ("", "ü")])
receivers = st.one_of(
    st.tuples(st.sampled_from(QUEUES), st.none()), st.tuples(topics, keys), st.tuples(st.just(TOPICS[0]), keys)
)
subscriptions = st.builds(
    lambda topic, key, selector: Subscription(topic, key[1], key[0], selector),
    topics,
    keys,
    st.sampled_from([None] * 3 + ["s"]),
)
changes = st.lists(st.builds(Change, subscriptions, st.booleans(), st.booleans()), max_size=2)
sizes = st.sampled_from([0, 1, 100, 5_000, 15_000, 30_000, 59_000, 70_000])
ids = st.one_of(st.none(), st.sampled_from(["1", "2", "3", "4", "5", "6", "7", "8"]))
priorities = st.one_of(st.sampled_from([4, 4, 0, 9, 10, 255, 256, 65_535]), st.integers(0, 65_535))
hours = st.sampled_from([None, None, None, None, 1, 3])
"""From the beginning of the test until a message is no longer to be delivered."""
kept = st.sampled_from([True, True, True, False])
waits = st.sampled_from([None, None, None, 1, 3])
"""Likewise, until it is delivered at the earliest."""
messages = st.tuples(destinations, sizes, ids, priorities, hours, kept, waits)
Drawn = tuple[Destination, int, str | None, int, int | None, bool, int | None]


@dataclass(slots=True)
class Branch:
    """Prepared: what its commit will do."""

    changes: list[Change]
    sends: list[Sent]
    acks: list[Held]
    kept: bool
    """Something of it is persistent, or there is nothing in it; else it is gone with the process, and nobody asks what
    became of it."""


class StoreMachine(RuleBasedStateMachine):
    """`held` are the messages that this process has leased, `claims` those that a transaction has claimed; `branches`
    are prepared, `ended` are no more. Each kind of store has a machine of its own, which says what its `disk` is."""

    store: Store
    disk: Disk
    size_max: ClassVar[int] = 70_000
    """Bytes of the largest body."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="anabranch-model-", dir=FAST))
        self.clock = Clock()
        self.began = self.clock.now
        self.patches = mock.patch.multiple(time, time=self.clock.time, time_ns=self.clock.time_ns)
        self.patches.start()
        self.held: dict[Message, Held] = {}
        self.claims: dict[Message, Held] = {}
        self.settled: list[Message] = []
        self.count = 0
        self.forget_all()

    def forget_all(self) -> None:
        self.branches: dict[bytes, Branch] = {}
        self.ended: list[bytes] = []
        self.committed: set[bytes] = set()
        self.forgotten: set[bytes] = set()

    def new_disk(self, data: st.DataObject) -> Disk:
        """Of the kind, with options that are drawn."""
        raise AssertionError("each kind has its own")

    @initialize(data=st.data(), ordered=st.booleans(), limited=st.booleans())
    def create(self, data: st.DataObject, ordered: bool, limited: bool) -> None:
        options: dict[str, Any] = {"max_deliveries": 2, "dead_letter": "dlq"} if limited else {}
        self.options = {"priorities": ordered, "duplicate_window": WINDOW, **options}
        self.disk = self.new_disk(data)
        self.model = Model(WINDOW, ordered, 2 if limited else None, self.clock.now, self.disk.volatile)
        self.store = self.disk.create(**self.options)

    def teardown(self) -> None:
        self.patches.stop()
        if hasattr(self, "disk"):
            self.disk.__exit__(None, None, None)
        shutil.rmtree(self.path)

    def body(self, size: int) -> bytes:
        self.count += 1
        size = min(size, self.size_max)
        return f"{self.count:08d}".encode().ljust(size, b"x")[: max(size, 8)] if size else b""

    def sent(self, drawn: Drawn) -> Sent:
        destination, size, message_id, priority, hours, persistent, waits = drawn
        expires = 0 if hours is None else self.began + hours * HOUR
        due = 0 if waits is None else self.began + waits * HOUR
        return Sent(destination, self.body(size), message_id, priority, expires, persistent, due)

    @rule(hours=st.sampled_from([0, 0, 2, 4]))
    def set_the_clock(self, hours: int) -> None:
        """It may go back, too."""
        self.bring()
        self.clock.offset_ms = hours * HOUR
        self.model.now_ms = self.clock.now
        self.bring()

    def bring(self) -> None:
        """A timer does so at some time: what is due by now stays so."""
        self.store._engine.asked(lambda: None)
        schedule_of(self.store).bring()
        self.model.bring()

    # Sending

    @rule(message=messages)
    def send(self, message: Drawn) -> None:
        sent = self.sent(message)
        receipt = self.store.send(
            sent.destination, sent.body, {"n": self.count}, sent.message_id, None, sent.priority, sent.expires_at_ms,
            sent.persistent, sent.deliver_at_ms,
        )  # fmt: skip
        self.model.send([sent], [(receipt.seq, receipt.duplicate)])
        assert self.store.last_seq >= receipt.seq or not sent.persistent

    @rule(destination=destinations, size=sizes, count=st.integers(1, 5), priority=priorities, persistent=kept)
    def send_nowait(self, destination: Destination, size: int, count: int, priority: int, persistent: bool) -> None:
        sent = [Sent(destination, self.body(size), None, priority, 0, persistent) for _ in range(count)]
        futures = [
            self.store.send_nowait(destination, some.body, priority=priority, persistent=persistent) for some in sent
        ]
        for some, future in zip(sent, futures, strict=True):
            receipt = future.result(PATIENCE)
            self.model.send([some], [(receipt.seq, receipt.duplicate)])

    @rule(destination=destinations, batch=st.lists(messages, max_size=4))
    def send_many(self, destination: Destination, batch: list[Drawn]) -> None:
        sent = [self.sent((destination, min(drawn[1], 100), *drawn[2:])) for drawn in batch]
        receipts = self.store.send_many(destination, [outgoing(some) for some in sent])
        outcomes = [(receipt.seq, receipt.duplicate) for receipt in receipts]
        both = list(zip(sent, outcomes, strict=True))
        for _, run in groupby(both, key=lambda one: one[0].persistent or self.model.volatile):
            some = list(run)  # those of one kind go together
            self.model.send([one[0] for one in some], [one[1] for one in some])

    # Receiving and settling

    @rule(receiver=receivers, count=st.integers(1, 8), together=st.booleans())
    def receive(self, receiver: tuple[Destination, tuple[str, str] | None], count: int, together: bool = False) -> None:
        destination, key = receiver
        number = QUEUE if key is None else self.model.number_of(destination, key)
        if number is None:
            with pytest.raises(UnknownSubscriptionError):
                self.store.receive(destination, 0, key)
            return
        batch = iter(self.store.receive_many(destination, count, 0, key) if together else ())
        for _ in range(count):
            expected = self.model.first_ready(destination, number)
            message = next(batch, None) if together else self.store.receive(destination, 0, key)
            if expected is None:
                assert message is None
                return
            assert message is not None, expected
            self.same_message(message, expected, number)
            assert message.subscription == key
            self.lease(message, Held(destination, expected.seq, number))

    def same_message(self, message: Message, expected: Expected, number: int) -> None:
        sent, count = expected.sent, expected.parts[number].count
        assert (message.seq, message.body, message.message_id, message.priority, message.expires_at_ms) == (
            expected.seq, sent.body, sent.message_id, sent.priority, sent.expires_at_ms,
        )  # fmt: skip
        assert message.deliveries == count + 1

    def lease(self, message: Message, held: Held) -> None:
        self.model.hold(held, LEASED)
        self.held[message] = held

    @rule(limit=st.integers(1, 10))
    def take_undelivered(self, limit: int) -> None:
        """Who receives passes them over; whoever takes them may do with them what he likes."""
        expected = self.model.undelivered()
        found = self.store.take_undelivered(limit)
        assert len(found) == min(limit, len(expected)), expected
        for message, reason in found:
            number: int | None = QUEUE
            if message.destination.kind is Kind.TOPIC:
                key = message.subscription
                number = None if key is None else self.model.number_of(message.destination, key)
            held = Held(message.destination, message.seq, number)
            assert held in expected
            expected.remove(held)
            over = self.model.is_over(self.model.find(message.destination, message.seq))
            spent = any(self.model.is_spent(part) for part in self.model.parts(held))
            assert (reason == EXPIRED and over) or (reason == DELIVERY_LIMIT and spent)
            self.lease(message, held)

    def some_held(self, data: st.DataObject) -> list[Message]:
        return data.draw(st.lists(st.sampled_from(list(self.held)), unique_by=id, min_size=1))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.ack_these(self.some_held(data))

    @precondition(lambda self: self.held)
    @rule()
    def ack_all(self) -> None:
        self.ack_these(list(self.held))

    def ack_these(self, some: list[Message]) -> None:
        self.store.ack(some)
        for message in some:
            self.model.remove(*self.held.pop(message))
            self.settled.append(message)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delivered=st.booleans(), delay=st.sampled_from([None, None, 0, 3600, 7200]))
    def release(self, data: st.DataObject, delivered: bool, delay: float | None) -> None:
        self.give_back(self.some_held(data), delivered, delay)

    def give_back(self, some: list[Message], delivered: bool = True, delay: float | None = None) -> None:
        self.store.release(some, delivered, delay)
        due = self.clock.now + int(delay * 1000) if delay else 0
        for message in some:
            self.model.give_back(self.held.pop(message), delivered, due)
            self.settled.append(message)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def run_out(self, data: st.DataObject) -> None:
        """The leases of some have an end, which has come; those of others are given one, which has not."""
        some = self.some_held(data)
        for message in self.held:
            message.extend(1e-9 if message in some else HOUR)
        self.store._lease_times.run()
        for message in some:
            with pytest.raises(UnknownMessageError, match="ran out"):
                message.ack()
            self.model.give_back(self.held.pop(message), delivered=True)
            self.settled.append(message)

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.settled))
        places = {(held.destination, held.seq) for held in (*self.held.values(), *self.claims.values())}
        if (message.destination, message.seq) in places:
            return  # released, and received again: the lease has another holder now
        ways: list[Callable[[], object]] = [message.ack, message.release, lambda: self.store.claim(message)]
        for settle in ways:
            with pytest.raises(UnknownMessageError):
                settle()

    def gone(self) -> None:
        """Subscriptions or destinations are no more: what was held of them is nobody's."""
        for holds in (self.held, self.claims):
            for message, held in list(holds.items()):
                if not self.model.parts(held):
                    del holds[message]
                    self.settled.append(message)

    # Subscriptions

    @rule(subscription=subscriptions, retroactive=st.booleans())
    def subscribe(self, subscription: Subscription, retroactive: bool) -> None:
        if any(held.number is None for held in self.holds()):
            return  # whether what is leased for all is leased for a new one too is nobody's concern
        number = self.model.number_of(subscription.topic, subscription.key)
        if number is None:
            assert self.store.subscribe(subscription, retroactive) is True
            self.model.subscribe(subscription, retroactive)
        elif self.model.subscriptions[number] == subscription:
            assert self.store.subscribe(subscription, retroactive) is False
        else:
            with pytest.raises(SubscriptionError):
                self.store.subscribe(subscription, retroactive)

    def holds(self) -> list[Held]:
        prepared = [held for branch in self.branches.values() for held in branch.acks]
        return [*self.held.values(), *self.claims.values(), *prepared]

    @rule(topic=topics, key=keys)
    def unsubscribe(self, topic: Destination, key: tuple[str, str]) -> None:
        number = self.model.number_of(topic, key)
        if number is None:
            with pytest.raises(UnknownSubscriptionError):
                self.store.unsubscribe(topic, key)
        elif self.claimed(topic, number):
            with pytest.raises(TransactionError, match="claimed"):
                self.store.unsubscribe(topic, key)
        else:
            assert self.store.unsubscribe(topic, key) == self.model.unsubscribe(number)
            self.gone()

    def claimed(self, destination: Destination, number: int | None = None) -> bool:
        """Whether a transaction has claimed some, for one of who may receive them or for any."""
        parts = [e.parts for e in self.model.queue(destination)]
        return any(p.state in (CLAIMED, PREPARED) for some in parts for n, p in some.items() if number in (None, n))

    # Transactions

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        self.claim_these(self.some_held(data))

    def claim_these(self, some: list[Message]) -> None:
        for message in some:
            self.store.claim(message)
            held = self.claims[message] = self.held.pop(message)
            self.model.hold(held, CLAIMED)

    def allowed(self, some: list[Change]) -> list[Change]:
        """No subscribing while something is leased for all, as above."""
        return [] if any(held.number is None for held in self.holds()) else some

    @rule(batch=st.lists(messages, max_size=4), changes=changes)
    def commit(self, batch: list[Drawn], changes: list[Change]) -> None:
        sent, changes = [self.sent(drawn) for drawn in batch], self.allowed(changes)
        receipts = self.store.commit(sends_of(sent), list(self.claims), changes=changes)
        self.apply(changes, sent, [(r.seq, r.duplicate) for r in receipts], list(self.claims.values()))
        self.settled += self.claims
        self.claims.clear()
        self.gone()

    def apply(
        self, changes: list[Change], sent: list[Sent], outcomes: list[tuple[int, bool]], acks: Sequence[Held]
    ) -> None:
        for change in changes:
            self.model.change(change)
        self.model.send(sent, outcomes)
        for held in acks:
            if self.model.parts(held):  # else its subscription is gone
                self.model.remove(*held)

    @precondition(lambda self: self.claims)
    @rule()
    def roll_back(self) -> None:
        self.store.unclaim(list(self.claims))
        for held in self.claims.values():
            self.model.give_back(held)
        self.settled += self.claims
        self.claims.clear()

    # Branches of transactions over several stores

    @rule(
        batch=st.lists(messages, max_size=4),
        acked=st.tuples(receivers, st.integers(0, 4), st.sets(st.integers(0, 3))),
        changes=changes,
        reserved=st.booleans(),
        sync=st.booleans(),
    )
    def prepare(
        self,
        batch: list[Drawn],
        acked: tuple[tuple[Destination, tuple[str, str] | None], int, set[int]],
        changes: list[Change],
        reserved: bool,
        sync: bool,
    ) -> None:
        """`acked`: whose messages it receives, how many, and which of those it gives back."""
        receiver, count, back = acked
        known = len(self.held)
        self.receive(receiver, count)
        returned = [message for n, message in enumerate(list(self.held)[known:]) if n in back]
        if returned:
            self.give_back(returned)
        self.claim_these(list(self.held))
        name = transaction(len(self.branches) + len(self.ended))
        sent, changes = [self.sent(drawn) for drawn in batch], self.allowed(changes)
        sends = sends_of(sent)
        room = self.store.reserve(sends) if reserved else None
        acks = list(self.claims)
        self.store.prepare(name, [OTHER, self.store.store_id], sends, acks, sync, room, changes).wait()
        self.branches[name] = Branch(changes, sent, list(self.claims.values()), self.is_kept(changes, sent))
        for held in self.claims.values():
            self.model.hold(held, PREPARED)
        self.settled += self.claims
        self.claims.clear()

    def is_kept(self, changes: list[Change], sent: list[Sent]) -> bool:
        acked = [self.model.find(held.destination, held.seq).sent for held in self.claims.values()]
        concerned = [*sent, *acked]
        return self.model.volatile or bool(changes) or not concerned or any(one.persistent for one in concerned)

    def some_branch(self, data: st.DataObject) -> tuple[bytes, Branch]:
        name = data.draw(st.sampled_from(sorted(self.branches)))
        self.ended.append(name)
        return name, self.branches.pop(name)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def commit_prepared(self, data: st.DataObject) -> None:
        name, branch = self.some_branch(data)
        receipts = self.store.commit_prepared(name).wait()
        assert [receipt.destination for receipt in receipts] == [sent.destination for sent in branch.sends]
        self.apply(branch.changes, branch.sends, [(r.seq, r.duplicate) for r in receipts], branch.acks)
        if branch.kept:
            self.committed.add(name)
        self.gone()

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def rollback_prepared(self, data: st.DataObject) -> None:
        name, branch = self.some_branch(data)
        assert self.store.rollback_prepared(name).wait() is True
        for held in branch.acks:
            self.model.give_back(held)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def tell_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.ended))
        assert self.store.commit_prepared(name).wait() == []
        assert self.store.rollback_prepared(name).wait() is False

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.committed | set(self.branches))), unique=True))
        self.store.forget(some)
        self.forgotten |= set(some) & self.committed
        self.committed -= set(some)

    @rule()
    def sync(self) -> None:
        self.store.sync()

    @rule()
    def same_branches(self) -> None:
        prepared = [(p.transaction, p.participants, p.sends, p.acks) for p in self.store.recover_prepared()]
        assert prepared == [
            (name, (OTHER, self.store.store_id), len(branch.sends), len(branch.acks))
            for name, branch in sorted(self.branches.items())
        ]
        known = self.store.committed()
        assert list(known) == sorted(known)
        # What was forgotten may come back with an index that had not seen it; it was committed all the same.
        assert self.committed <= set(known) <= self.committed | self.forgotten

    # Removing

    @rule(destination=destinations)
    def purge(self, destination: Destination) -> None:
        before = len(self.model.queue(destination))
        count = self.model.purge(destination)
        # Of a topic's messages those that somebody holds for one subscription are purged for the others.
        assert self.store.purge(destination) in (count, before - len(self.model.queue(destination)))

    @rule(topic=topics, key=keys)
    def purge_for_one(self, topic: Destination, key: tuple[str, str]) -> None:
        number = self.model.number_of(topic, key)
        if number is not None:
            assert self.store.purge(topic, key) == self.model.purge(topic, number)

    @rule(destination=destinations)
    def declare(self, destination: Destination) -> None:
        self.store.declare(destination)
        self.model.declare(destination)

    @rule(destination=destinations)
    def delete(self, destination: Destination) -> None:
        if self.claimed(destination):
            with pytest.raises(TransactionError):
                self.store.delete(destination)
            return
        assert self.store.delete(destination) == self.model.delete(destination)
        self.gone()

    # What happens to a store

    @rule()
    def reclaim(self) -> None:
        self.store.reclaim()

    @rule(data=st.data(), fetched=st.booleans())
    def reopen(self, data: st.DataObject, fetched: bool) -> None:
        self.restarted(self.reopened(data), fetched)

    @rule(data=st.data(), fetched=st.booleans())
    def crash(self, data: st.DataObject, fetched: bool) -> None:
        self.restarted(self.crashed(data), fetched)

    def reopened(self, data: st.DataObject) -> Store:
        return self.disk.reopen(self.store)

    def crashed(self, data: st.DataObject) -> Store:
        again = self.disk.crash(self.store)
        self.store.close()
        return again

    def restarted(self, store: Store, fetched: bool) -> None:
        self.store = store
        if self.disk.volatile:
            self.model = Model(WINDOW, self.model.priorities, self.model.max_deliveries, self.model.now_ms, True)
            self.forget_all()
        self.model.restart()
        self.branches_restarted()
        self.held.clear()
        self.claims.clear()
        self.settled.clear()
        self.same()
        self.same_branches()
        if fetched:  # what comes behind the first is fetched ahead
            for destination in QUEUES:
                self.receive((destination, None), 1)
            for subscription in list(self.model.subscriptions.values()):
                self.receive((subscription.topic, subscription.key), 1)
            if self.held:
                self.give_back(list(self.held))
        assert list(store.check()) == []

    def branches_restarted(self) -> None:
        """What is not persistent of them is gone, and so are those of which that was all."""
        for name, branch in list(self.branches.items()):
            branch.sends = [sent for sent in branch.sends if sent.persistent]
            branch.acks = [held for held in branch.acks if self.model.parts(held)]
            if not branch.kept:
                del self.branches[name]
                self.ended.append(name)

    # Comparing

    @rule(receiver=receivers, limit=st.integers(0, 5), by_seq=st.booleans(), data=st.data())
    def browse(
        self, receiver: tuple[Destination, tuple[str, str] | None], limit: int, by_seq: bool, data: st.DataObject
    ) -> None:
        destination, key = receiver
        number = None if key is None else self.model.number_of(destination, key)
        if key is not None and number is None:
            return
        found = list(self.store.browse(destination, None, 0, key))
        assert [message.seq for message in found] == [e.seq for e in self.model.queue(destination, number)]
        if found:
            n = data.draw(st.integers(0, len(found) - 1))
            after = found[n].seq if by_seq and not self.model.priorities else found[n]
            page = [message.seq for message in self.store.browse(destination, limit, after, key)]
            assert page == [message.seq for message in found[n + 1 :][:limit]]

    @rule()
    def same(self) -> None:
        assert set(self.store.subscriptions()) == set(self.model.subscriptions.values())
        for destination in DESTINATIONS:
            found = [(m.seq, m.body, m.message_id, m.persistent) for m in self.store.browse(destination)]
            queue = self.model.queue(destination)
            assert found == [(e.seq, e.body, e.message_id, e.sent.persistent) for e in queue], str(destination)
        receivers = [(destination, QUEUE) for destination in QUEUES]
        for destination, number in receivers + [(s.topic, n) for n, s in self.model.subscriptions.items()]:
            key = self.model.subscriptions[number].key if number != QUEUE else None
            counts = [(m.seq, m.deliveries) for m in self.store.browse(destination, subscription=key)]
            assert counts == [(e.seq, e.parts[number].count) for e in self.model.queue(destination, number)]
            assert self.store.depth(destination, key) == len(counts)

    @rule()
    def check(self) -> None:
        assert list(self.store.check()) == []

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "store"):
            return
        stats, model = self.store.stats(), self.model
        held = {destination: len(queue) for destination, queue in model.queues.items()}
        assert {d: n for d, n in stats.destinations.items() if d in QUEUES} == {
            d: n for d, n in held.items() if d in QUEUES
        }
        # Whether a topic is there that nobody has subscribed to, or that has lost its last, is all the same.
        assert {d: n for d, n in stats.destinations.items() if n} == {d: n for d, n in held.items() if n}
        assert stats.messages == sum(held.values())
        assert stats.leased == model.leased()
        assert dict(stats.subscriptions) == {s: len(model.queue(s.topic, n)) for n, s in model.subscriptions.items()}


def outgoing(sent: Sent) -> Outgoing:
    return Outgoing(
        sent.body, None, sent.message_id, sent.priority, sent.expires_at_ms, sent.persistent, False, sent.deliver_at_ms
    )


def sends_of(some: list[Sent]) -> list[tuple[Destination, Outgoing]]:
    return [(sent.destination, outgoing(sent)) for sent in some]
