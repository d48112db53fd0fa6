"""A router beside the model: stores, per_destination stores, and configurations that change between two opens."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import anabranch
from anabranch.adapters.base import Message
from anabranch.policies.destination import Destination
from anabranch.policies.errors import PlacementError, TransactionError

from . import FAST, SETTINGS
from .model import LEASED, READY, Model

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


class RouterMachine(RuleBasedStateMachine):
    """`homes` says in which store a destination was first put."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="anabranch-model-", dir=FAST))
        self.layout = "one"
        self.models: dict[tuple[str, str | None], Model] = {}
        self.homes: dict[str, tuple[str, str | None]] = {}
        self.held: list[Message] = []
        self.count = 0
        self.router = anabranch.open(self.config("one"))

    def config(self, layout: str) -> anabranch.Config:
        return anabranch.Config(
            self.path / "data",
            [
                anabranch.StoreConfig(name, patterns, per_destination=each, journal=OPTIONS)
                for name, patterns, each in LAYOUTS[layout]
            ],
        )

    def teardown(self) -> None:
        self.router.close()
        shutil.rmtree(self.path)

    def model_of(self, name: str) -> Model:
        """Of the store that the destination lives in, from its first send on."""
        where = self.homes.setdefault(name, home(self.layout, name))
        return self.models.setdefault(where, Model(1000))

    def queue_of(self, name: str) -> list[bytes]:
        where = self.homes.get(name)
        if where is None:
            return []
        return [expected.body for expected in self.models[where].queue(Destination.parse(name))]

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

    @rule(sends=st.lists(names, min_size=1, max_size=3), acks=st.booleans())
    def transact(self, sends: list[str], acks: bool) -> None:
        """Over one store it commits, over two the step that would touch the second is refused."""
        tx = self.router.transaction()
        wheres = [self.homes.get(name, home(self.layout, name)) for name in sends]
        done = []
        for name, where in zip(sends, wheres, strict=True):
            if where == wheres[0]:
                tx.send(name, b"of a transaction")
                done.append(name)
            else:
                with pytest.raises(TransactionError, match="one store"):
                    tx.send(name, b"of a transaction")
            self.model_of(name)  # its place is recorded either way
        acked = [m for m in self.held if self.homes[m.destination.name] == wheres[0]] if acks else []
        for message in acked:
            tx.ack(message)
            self.held.remove(message)
        receipts = tx.commit()
        self.model_of(sends[0]).send(
            [(Destination.parse(name), b"of a transaction", None) for name in done],
            [(receipt.seq, receipt.duplicate) for receipt in receipts],
        )
        for message in acked:
            self.model_of(message.destination.name).remove(message.destination, message.seq)

    @rule(name=names)
    def purge(self, name: str) -> None:
        where = self.homes.get(name)
        expected = self.models[where].purge(Destination.parse(name)) if where else 0
        assert self.router.queue(name).purge() == expected

    @rule(name=names)
    def delete(self, name: str) -> None:
        where = self.homes.get(name)
        expected = self.models[where].delete(Destination.parse(name)) if where else 0
        assert self.router.queue(name).delete() == expected
        self.held = [message for message in self.held if message.destination.name != name]

    @rule(layout=st.sampled_from(sorted(LAYOUTS)))
    def reconfigure(self, layout: str) -> None:
        """Close and open with another configuration: refused if and only if it would hide a message (invariant 6)."""
        self.router.close()
        self.held.clear()
        for model in self.models.values():
            model.restart()
        hidden = [name for name, where in self.homes.items() if self.queue_of(name) and home(layout, name) != where]
        if hidden:
            with pytest.raises(PlacementError) as caught:
                anabranch.open(self.config(layout))
            text = str(caught.value)
            assert {name for name in NAMES if f"queue://{name}:" in text} == set(hidden)
        else:
            self.layout = layout
            self.homes = {name: where for name, where in self.homes.items() if home(layout, name) == where}
        self.router = anabranch.open(self.config(self.layout))
        if hidden:  # what is empty may have been given up by the refused open: it goes where it is routed
            self.homes = {name: where for name, where in self.homes.items() if home(self.layout, name) == where}

    @invariant()
    def same(self) -> None:
        for name in NAMES:
            assert [message.body for message in self.router.queue(name).browse()] == self.queue_of(name), name
            assert len(self.router.queue(name)) == len(self.queue_of(name))

    @rule()
    def check(self) -> None:
        for store in self.router._open_stores.values():
            assert list(store.check()) == []


TestRouter = RouterMachine.TestCase
TestRouter.settings = SETTINGS
