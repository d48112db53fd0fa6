"""A journal store beside the model: any operations in any order, closed, crashed, its index deleted between them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.adapters.base import Message, Outgoing
from anabranch.adapters.journal import JournalStore
from anabranch.policies.destination import Destination
from anabranch.policies.errors import TransactionError, UnknownMessageError

from ..contract.preparing import OTHER, transaction
from ..journal.disk import JournalDisk, directory_of
from . import FAST, SETTINGS
from .model import CLAIMED, LEASED, PREPARED, READY, Model

WINDOW = 5
DESTINATIONS = [Destination.parse(name) for name in ("a", "b", "topic://a", "ü/..")]

destinations = st.sampled_from(DESTINATIONS)
sizes = st.sampled_from([0, 1, 100, 5_000, 15_000, 30_000, 59_000, 70_000])
ids = st.one_of(st.none(), st.sampled_from(["1", "2", "3", "4", "5", "6", "7", "8"]))
messages = st.tuples(destinations, sizes, ids)


@dataclass(slots=True)
class Branch:
    """Prepared: what its commit will do."""

    sends: list[tuple[Destination, bytes, str | None]]
    acks: list[tuple[Destination, int]]


class StoreMachine(RuleBasedStateMachine):
    """`held` are the messages that this process has leased, `claims` those that a transaction has claimed; `branches`
    are prepared, `ended` are no more."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="anabranch-model-", dir=FAST))
        self.model = Model(WINDOW)
        self.held: list[Message] = []
        self.claims: list[Message] = []
        self.settled: list[Message] = []
        self.branches: dict[bytes, Branch] = {}
        self.ended: list[bytes] = []
        self.committed: set[bytes] = set()
        self.forgotten: set[bytes] = set()
        self.count = 0

    @initialize(sync=st.sampled_from(["always", "periodic", "never"]), pool=st.integers(0, 2), often=st.booleans())
    def create(self, sync: str, pool: int, often: bool) -> None:
        options: dict[str, Any] = {"sync": sync, "pool_files": pool, "duplicate_window": WINDOW}
        if often:
            options |= {"checkpoint_operations": 3, "checkpoint_interval": 0.01, "sync_interval": 0.01}
        self.disk = JournalDisk(self.path, **options)
        self.store: JournalStore = self.disk.create()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.path)

    def body(self, size: int) -> bytes:
        self.count += 1
        return f"{self.count:08d}".encode().ljust(size, b"x")[: max(size, 8)] if size else b""

    # Sending

    @rule(message=messages)
    def send(self, message: tuple[Destination, int, str | None]) -> None:
        destination, size, message_id = message
        body = self.body(size)
        receipt = self.store.send(destination, body, {"n": self.count}, message_id)
        self.model.send([(destination, body, message_id)], [(receipt.seq, receipt.duplicate)])

    @rule(destination=destinations, size=sizes, count=st.integers(1, 5))
    def send_nowait(self, destination: Destination, size: int, count: int) -> None:
        sent = [self.body(size) for _ in range(count)]
        futures = [self.store.send_nowait(destination, body) for body in sent]
        for body, future in zip(sent, futures, strict=True):
            receipt = future.result(20)
            self.model.send([(destination, body, None)], [(receipt.seq, receipt.duplicate)])

    @rule(destination=destinations, batch=st.lists(st.tuples(st.integers(0, 100), ids), max_size=4))
    def send_many(self, destination: Destination, batch: list[tuple[int, str | None]]) -> None:
        sent = [(destination, self.body(size), message_id) for size, message_id in batch]
        receipts = self.store.send_many(destination, [Outgoing(body, None, name) for _, body, name in sent])
        self.model.send(sent, [(receipt.seq, receipt.duplicate) for receipt in receipts])

    # Receiving and settling

    @rule(destination=destinations, count=st.integers(1, 8))
    def receive(self, destination: Destination, count: int) -> None:
        for _ in range(count):
            expected = self.model.first_ready(destination)
            message = self.store.receive(destination)
            if expected is None:
                assert message is None
                return
            assert message is not None
            assert (message.seq, message.body, message.message_id) == (
                expected.seq, expected.body, expected.message_id,
            )  # fmt: skip
            expected.state = LEASED
            self.held.append(message)

    def some_held(self, data: st.DataObject) -> list[Message]:
        return data.draw(st.lists(st.sampled_from(self.held), unique_by=id, min_size=1))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        some = self.some_held(data)
        self.store.ack(some)
        for message in some:
            self.model.remove(message.destination, message.seq)
            self.held.remove(message)
            self.settled.append(message)

    @precondition(lambda self: self.held)
    @rule()
    def ack_all(self) -> None:
        self.store.ack(self.held)
        for message in self.held:
            self.model.remove(message.destination, message.seq)
        self.held.clear()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.give_back(self.some_held(data))

    def give_back(self, some: list[Message]) -> None:
        self.store.release(some)
        for message in some:
            self.model.find(message.destination, message.seq).state = READY
            self.held.remove(message)
            self.settled.append(message)

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.settled))
        if any((m.destination, m.seq) == (message.destination, message.seq) for m in self.held + self.claims):
            return  # released, and received again: the lease has another holder now
        for settle in (message.ack, message.release, lambda: self.store.claim(message)):
            with pytest.raises(UnknownMessageError):
                settle()

    # Transactions

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        for message in self.some_held(data):
            self.store.claim(message)
            self.model.find(message.destination, message.seq).state = CLAIMED
            self.held.remove(message)
            self.claims.append(message)

    def claim_all(self) -> None:
        for message in self.held:
            self.store.claim(message)
            self.model.find(message.destination, message.seq).state = CLAIMED
        self.claims += self.held
        self.held.clear()

    @rule(batch=st.lists(messages, max_size=4))
    def commit(self, batch: list[tuple[Destination, int, str | None]]) -> None:
        sent = [(destination, self.body(size), message_id) for destination, size, message_id in batch]
        receipts = self.store.commit([(d, Outgoing(body, None, name)) for d, body, name in sent], self.claims)
        self.model.send(sent, [(receipt.seq, receipt.duplicate) for receipt in receipts])
        for message in self.claims:
            self.model.remove(message.destination, message.seq)
        self.claims.clear()

    @precondition(lambda self: self.claims)
    @rule()
    def roll_back(self) -> None:
        self.store.unclaim(self.claims)
        for message in self.claims:
            self.model.find(message.destination, message.seq).state = READY
        self.claims.clear()

    # Branches of transactions over several stores

    @rule(
        batch=st.lists(messages, max_size=4),
        acked=st.tuples(destinations, st.integers(0, 4), st.sets(st.integers(0, 3))),
        reserved=st.booleans(),
        sync=st.booleans(),
    )
    def prepare(
        self,
        batch: list[tuple[Destination, int, str | None]],
        acked: tuple[Destination, int, set[int]],
        reserved: bool,
        sync: bool,
    ) -> None:
        """`acked`: whose messages it receives, how many, and which of those it gives back."""
        destination, count, back = acked
        known = len(self.held)
        self.receive(destination, count)
        self.give_back([message for n, message in enumerate(self.held[known:]) if n in back])
        self.claim_all()
        name = transaction(len(self.branches) + len(self.ended))
        sent = [(destination, self.body(size), message_id) for destination, size, message_id in batch]
        sends = [(d, Outgoing(body, None, message_id)) for d, body, message_id in sent]
        room = self.store.reserve(sends) if reserved else None
        self.store.prepare(name, [OTHER, self.store.store_id], sends, self.claims, sync, room).wait()
        self.branches[name] = Branch(sent, [(message.destination, message.seq) for message in self.claims])
        for message in self.claims:
            self.model.find(message.destination, message.seq).state = PREPARED
            self.settled.append(message)
        self.claims.clear()

    def some_branch(self, data: st.DataObject) -> tuple[bytes, Branch]:
        name = data.draw(st.sampled_from(sorted(self.branches)))
        self.ended.append(name)
        return name, self.branches.pop(name)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def commit_prepared(self, data: st.DataObject) -> None:
        name, branch = self.some_branch(data)
        receipts = self.store.commit_prepared(name).wait()
        assert [receipt.destination for receipt in receipts] == [destination for destination, _, _ in branch.sends]
        self.model.send(branch.sends, [(receipt.seq, receipt.duplicate) for receipt in receipts])
        for destination, seq in branch.acks:
            self.model.remove(destination, seq)
        self.committed.add(name)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def rollback_prepared(self, data: st.DataObject) -> None:
        name, branch = self.some_branch(data)
        assert self.store.rollback_prepared(name).wait() is True
        for destination, seq in branch.acks:
            self.model.find(destination, seq).state = READY

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
        assert self.store.purge(destination) == self.model.purge(destination)

    @rule(destination=destinations)
    def delete(self, destination: Destination) -> None:
        prepared = [acked for branch in self.branches.values() for acked, _ in branch.acks]
        if destination in [*prepared, *(message.destination for message in self.claims)]:
            with pytest.raises(TransactionError):
                self.store.delete(destination)
            return
        assert self.store.delete(destination) == self.model.delete(destination)
        self.settled += [message for message in self.held if message.destination == destination]
        self.held = [message for message in self.held if message.destination != destination]

    # What happens to a store

    @rule()
    def checkpoint(self) -> None:
        self.store.checkpoint()

    @rule()
    def reclaim(self) -> None:
        self.store.reclaim()

    @rule(without_index=st.booleans(), fetched=st.booleans())
    def reopen(self, without_index: bool, fetched: bool) -> None:
        self.store.close()
        if without_index:
            (directory_of(self.store) / "index.mdb").unlink()
        self.restarted(self.disk.reopen(self.store), fetched)

    @rule(without_index=st.booleans(), fetched=st.booleans())
    def crash(self, without_index: bool, fetched: bool) -> None:
        path = self.disk.copy(self.store)
        self.store.close()
        shutil.rmtree(directory_of(self.store))
        if without_index:
            (path / "index.mdb").unlink()
        self.restarted(self.disk.open(path), fetched)

    def restarted(self, store: JournalStore, fetched: bool) -> None:
        self.store = store
        self.model.restart()
        self.held.clear()
        self.claims.clear()
        self.settled.clear()
        self.same()
        self.same_branches()
        if fetched:  # what comes behind the first is fetched ahead
            for destination in DESTINATIONS:
                self.receive(destination, 1)
            if self.held:
                self.give_back(list(self.held))
        assert list(store.check()) == []

    # Comparing

    @rule(destination=destinations, limit=st.integers(0, 5), data=st.data())
    def browse(self, destination: Destination, limit: int, data: st.DataObject) -> None:
        queue = self.model.queue(destination)
        after = data.draw(st.sampled_from([0, *(expected.seq for expected in queue)]))
        seqs = [expected.seq for expected in queue if expected.seq > after][:limit]
        assert [message.seq for message in self.store.browse(destination, limit, after)] == seqs

    @rule()
    def same(self) -> None:
        for destination in DESTINATIONS:
            found = [(m.seq, m.body, m.message_id) for m in self.store.browse(destination)]
            assert found == [(e.seq, e.body, e.message_id) for e in self.model.queue(destination)], str(destination)

    @rule()
    def check(self) -> None:
        assert list(self.store.check()) == []

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "store"):
            return
        stats = self.store.stats()
        assert stats.destinations == {d: len(queue) for d, queue in self.model.queues.items()}
        prepared = sum(len(branch.acks) for branch in self.branches.values())
        assert stats.leased == len(self.held) + len(self.claims) + prepared
        kept = stats.messages + len(self.branches)
        assert stats.segments["active"] + stats.segments["retained"] <= 2 + kept + 40


TestStore = StoreMachine.TestCase
TestStore.settings = SETTINGS
