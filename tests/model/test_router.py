"""A router beside the model: stores, per_destination stores, transactions over any of them that stay open, are
prepared, survive restarts and kills, and configurations that change between two opens."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.policies.errors import PlacementError, TransactionError
from anabranch.policies.names.destination import Destination

from ..router.disk import crashed
from ..shares import Share
from . import FAST, check
from .model import CLAIMED, LEASED, PREPARED, READY, Expected, Model

NAMES = ["a.x", "a.y", "b.x", "b.Y", "c"]
OPTIONS = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER, duplicate_window=1000)

Layout = tuple[tuple[str, tuple[str, ...], bool], ...]
"""Stores: name, patterns, per_destination."""

LAYOUTS: dict[str, Layout] = {
    "one": (("rest", (">",), False),),
    "split": (("a", ("queue://a.>",), False), ("rest", (">",), False)),
    "each": (("a-each", ("queue://a.>",), True), ("rest", (">",), False)),
    "all each": (("each", (">",), True),),
    "three": (("a", ("queue://a.>",), False), ("b-each", ("queue://b.>",), True), ("rest", (">",), False)),
    "exact": (("a", ("queue://a.x",), False), ("rest", (">", "queue://a.y"), False)),
}


def home(layout: str, name: str) -> tuple[str, str | None]:
    """The store of a destination, by rules as plain as can be: the exact pattern, else its prefix, else the rest."""
    for pattern in (f"queue://{name}", f"queue://{name[0]}.>", ">"):
        for store, patterns, each in LAYOUTS[layout]:
            if pattern in patterns and (pattern != f"queue://{name[0]}.>" or "." in name):
                return store, name if each else None
    raise AssertionError(name)


names = st.sampled_from(NAMES)
Home = tuple[str, str | None]


@dataclass(slots=True)
class Begun:
    """A transaction that has not ended."""

    sends: list[tuple[str, bytes]] = field(default_factory=list)
    acks: list[tuple[str, int]] = field(default_factory=list)
    tx: anabranch.Transaction | None = None
    """Until it is prepared."""


class RouterMachine(RuleBasedStateMachine):
    """`homes` says in which store a destination was first put; `begun` are open, `prepared` wait for their outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="anabranch-model-", dir=FAST))
        self.layout = "one"
        self.models: dict[Home, Model] = {}
        self.homes: dict[str, Home] = {}
        self.held: list[Message] = []
        self.begun: list[Begun] = []
        self.prepared: dict[anabranch.Xid, Begun] = {}
        self.count = 0
        self.router = anabranch.open(self.config("one"))

    def config(self, layout: str) -> anabranch.Config:
        return anabranch.Config(
            self.path / "data",
            [
                anabranch.StoreConfig(name, patterns, per_destination=each, journal=OPTIONS)
                for name, patterns, each in LAYOUTS[layout]
            ],
            transactions=anabranch.TransactionOptions(sync=anabranch.Sync.NEVER),
        )

    def teardown(self) -> None:
        self.router.close()
        shutil.rmtree(self.path)

    def model_of(self, name: str) -> Model:
        """Of the store that the destination lives in, from its first send on."""
        where = self.homes.setdefault(name, home(self.layout, name))
        return self.models.setdefault(where, Model(1000))

    def expected_of(self, name: str) -> list[Expected]:
        where = self.homes.get(name)
        return self.models[where].queue(Destination.parse(name)) if where is not None else []

    def queue_of(self, name: str) -> list[bytes]:
        return [expected.body for expected in self.expected_of(name)]

    @rule(name=names, count=st.integers(1, 3), size=st.sampled_from([10, 30_000]))
    def send(self, name: str, count: int, size: int) -> None:
        self.count += 1
        body = f"{self.count}".encode().ljust(size, b".")
        receipts = self.router.queue(name).send_many([body] * count)
        destination = Destination.parse(name)
        self.model_of(name).send(
            [(destination, body, None)] * count, [(receipt.seq, receipt.duplicate) for receipt in receipts]
        )

    @rule(name=names)
    def receive(self, name: str) -> None:
        message = self.router.queue(name).receive()
        where = self.homes.get(name)
        expected = self.models[where].first_ready(Destination.parse(name)) if where else None
        assert (message.body if message else None) == (expected.body if expected else None)
        if message is not None and expected is not None:
            assert message.seq == expected.seq
            expected.state = LEASED
            self.held.append(message)

    @rule()
    def receive_from_any(self) -> None:
        """Of one of them, its first; None if there is none in any."""
        message = self.router.receive(">")
        if message is None:
            assert not any(
                self.models[where].first_ready(Destination.parse(name)) for name, where in self.homes.items()
            )
            return
        where = self.homes[message.destination.name]
        expected = self.models[where].first_ready(message.destination)
        assert expected is not None
        assert (message.seq, message.body) == (expected.seq, expected.body)
        expected.state = LEASED
        self.held.append(message)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ack=st.booleans())
    def settle(self, data: st.DataObject, ack: bool) -> None:
        message = data.draw(st.sampled_from(self.held))
        self.held.remove(message)
        model = self.model_of(message.destination.name)
        if ack:
            message.ack()
            model.remove(message.destination, message.seq)
        else:
            message.release()
            model.find(message.destination, message.seq).state = READY

    # Transactions

    @rule()
    def begin(self) -> None:
        if len(self.begun) < 3:
            self.begun.append(Begun(tx=self.router.transaction(anabranch.Xid(1, f"{self.count}"))))
            self.count += 1

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), sends=st.lists(names, max_size=3), size=st.sampled_from([10, 30_000]), acks=st.integers(0, 3))
    def do(self, data: st.DataObject, sends: list[str], size: int, acks: int) -> None:
        """Sends and acks in an open transaction: nobody sees anything of it."""
        begun = data.draw(st.sampled_from(self.begun))
        assert begun.tx is not None
        for name in sends:
            self.count += 1
            body = f"{self.count} of a transaction".encode().ljust(size, b".")
            begun.tx.send(name, body)
            begun.sends.append((name, body))
            self.model_of(name)  # its place is recorded
        for message in self.held[:acks]:
            begun.tx.ack(message)
            self.held.remove(message)
            begun.acks.append((message.destination.name, message.seq))
            self.find(message.destination.name, message.seq).state = CLAIMED

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), how=st.sampled_from(["commit", "rollback", "prepare", "prepare", "one phase", "by name"]))
    def end(self, data: st.DataObject, how: str) -> None:
        begun = data.draw(st.sampled_from(self.begun))
        self.begun.remove(begun)
        tx = begun.tx
        assert tx is not None
        assert tx.xid is not None
        if how == "commit":
            receipts = tx.commit()
            assert [receipt.destination.name for receipt in receipts] == [name for name, _ in begun.sends]
            self.committed(begun, [receipt.seq for receipt in receipts])
        elif how == "one phase":
            self.router.commit(tx.xid, one_phase=True)
            self.committed(begun)
        elif how == "prepare":
            tx.prepare()
            self.prepared[tx.xid] = begun
            begun.tx = None
            for name, seq in begun.acks:
                self.find(name, seq).state = PREPARED
        else:
            self.router.rollback(tx.xid) if how == "by name" else tx.rollback()
            self.rolled_back(begun)

    @precondition(lambda self: self.prepared)
    @rule(data=st.data(), how=st.sampled_from(["commit", "rollback", "resolve commit", "resolve rollback"]))
    def tell(self, data: st.DataObject, how: str) -> None:
        """The outcome of a prepared one, by its manager or by hand."""
        xid = data.draw(st.sampled_from(sorted(self.prepared)))
        begun = self.prepared.pop(xid)
        if how == "commit":
            self.router.commit(xid)
        elif how == "rollback":
            self.router.rollback(xid)
        else:
            (waiting,) = (waiting for waiting in self.router.in_doubt() if waiting.xid == xid)
            self.router.resolve(waiting.transaction, "commit" if how.endswith("commit") else "rollback")
            self.router.forget(waiting.transaction)
        if how.endswith("commit"):
            self.committed(begun)
        else:
            self.rolled_back(begun)

    def find(self, name: str, seq: int) -> Expected:
        return self.model_of(name).find(Destination.parse(name), seq)

    def committed(self, begun: Begun, seqs: list[int] | None = None) -> None:
        for name, seq in begun.acks:
            self.model_of(name).remove(Destination.parse(name), seq)
        if seqs is None:  # those of the last messages of each queue
            last = {
                name: [message.seq for message in self.router.queue(name).browse()][-len(some) :]
                for name in {name for name, _ in begun.sends}
                if (some := [body for sent, body in begun.sends if sent == name])
            }
            seqs = [last[name].pop(0) for name, _ in begun.sends]
        by_store: dict[Home, list[tuple[str, bytes, int]]] = {}
        for (name, body), seq in zip(begun.sends, seqs, strict=True):
            by_store.setdefault(self.homes[name], []).append((name, body, seq))
        for where, sent in by_store.items():
            self.models[where].send(
                [(Destination.parse(name), body, None) for name, body, _ in sent], [(seq, False) for *_, seq in sent]
            )

    def rolled_back(self, begun: Begun) -> None:
        for name, seq in begun.acks:
            self.find(name, seq).state = READY

    @rule(name=names)
    def purge(self, name: str) -> None:
        where = self.homes.get(name)
        expected = self.models[where].purge(Destination.parse(name)) if where else 0
        assert self.router.queue(name).purge() == expected

    @rule(name=names)
    def delete(self, name: str) -> None:
        where = self.homes.get(name)
        if any(expected.state in (CLAIMED, PREPARED) for expected in self.expected_of(name)):
            with pytest.raises(TransactionError, match="has claimed"):
                self.router.queue(name).delete()
            return
        expected = self.models[where].delete(Destination.parse(name)) if where else 0
        assert self.router.queue(name).delete() == expected
        self.held = [message for message in self.held if message.destination.name != name]

    @rule(layout=st.sampled_from(sorted(LAYOUTS)))
    def reconfigure(self, layout: str) -> None:
        """Close and open with another configuration: refused if and only if it would hide a message (invariant 6), one
        that somebody has prepared to send included."""
        self.router.close()
        self.ended()
        concerned = {name for begun in self.prepared.values() for name, _ in (*begun.sends, *begun.acks)}
        waiting = {self.homes[name] for name in concerned}
        elsewhere = {name: where for name, where in self.homes.items() if home(layout, name) != where}
        hidden = {name for name in elsewhere if self.queue_of(name) or name in concerned}
        # What was deleted before is given up at a time of the router's own, but while something is prepared there.
        perhaps = {name for name, where in elsewhere.items() if where in waiting}
        try:
            anabranch.open(self.config(layout)).close()
        except PlacementError as error:
            found = {name for name in NAMES if f"queue://{name}:" in str(error)}
            assert found and hidden <= found <= hidden | perhaps
            hidden = found
        else:
            assert not hidden
            self.layout = layout
            self.homes = {name: where for name, where in self.homes.items() if home(layout, name) == where}
        self.router = anabranch.open(self.config(self.layout))
        if hidden:  # what is empty may have been given up by the refused open: it goes where it is routed
            self.homes = {name: where for name, where in self.homes.items() if home(self.layout, name) == where}

    def ended(self) -> None:
        """The process's leases and open transactions end with it; what is prepared does not."""
        self.held.clear()
        self.begun.clear()
        for model in self.models.values():
            model.restart()

    @rule()
    def kill(self) -> None:
        copy = crashed(self.router, self.path / "copy")
        self.router.close()
        shutil.rmtree(self.router.config.directory)
        copy.rename(self.router.config.directory)
        self.ended()
        self.router = anabranch.open(self.config(self.layout))

    @invariant()
    def same(self) -> None:
        assert self.router.recover() == list(self.prepared)
        for name in NAMES:
            assert [message.body for message in self.router.queue(name).browse()] == self.queue_of(name), name
            assert self.router.queue(name).depth() == len(self.queue_of(name))

    @rule()
    def check(self) -> None:
        for store in self.router._registry.open_stores():
            assert list(store.check()) == []
        assert {waiting.xid for waiting in self.router.in_doubt()} == set(self.prepared)


def test_a_router_does_what_the_model_does(share: Share) -> None:
    check(RouterMachine, share, 40, 1600)
