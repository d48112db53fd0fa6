"""Rings against a model: any history of sends, receivers, transactions and restarts where what is old is dropped."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.errors import StoreFullError

from ..contract.disk import A, B, Disk, assert_whole, bodies
from ..journal.disk import JournalDisk
from ..memory.disk import MemoryDisk
from . import FAST

OF_A = 3
OF_STORE = 5
destinations = st.sampled_from([A, B])


class Rings(RuleBasedStateMachine):
    """Queue `a` keeps three messages, the store five. What is held stays; where nothing else is left, a send fails."""

    kind: ClassVar[type[Disk]]

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="anabranch-rings-", dir=FAST)
        self.all: list[tuple[object, bytes]] = []
        """What is there, the oldest first."""
        self.held: dict[bytes, Message] = {}
        self.prepared: list[bytes] = []
        self.number = self.dropped = 0

    @initialize()
    def create(self) -> None:
        self.disk = self.kind(Path(self.directory.name))  # type: ignore[call-arg]
        self.store: Store = self.disk.create(
            limits=[LimitOptions(match=("a",), max_messages=OF_A)], max_messages=OF_STORE, when_full="drop_old"
        )

    def teardown(self) -> None:
        for store in self.disk.opened:
            store.close()
        self.directory.cleanup()

    def new(self, to: object) -> tuple[object, bytes]:
        self.number += 1
        return to, b"%d" % self.number

    def fit(self, comes: list[tuple[object, bytes]], goes: list[bytes] = []) -> bool:  # noqa: B006
        """Whether these fit, once what is oldest is gone; then it is so."""
        left = [one for one in self.all if one[1] not in goes]
        victims: list[tuple[object, bytes]] = []
        for most, of in ((OF_A, A), (OF_STORE, None)):
            there = [one for one in left if of in (None, one[0])]
            more = [one for one in comes if of in (None, one[0])]
            taken = [one for one in self.all if of in (None, one[0])]
            net = len(more) - (len(taken) - len(there))
            over = len(there) + len(more) - most if net > 0 else 0
            going = [one for one in there if one[1] not in self.held and one not in victims]
            over -= sum(one in victims for one in there)
            if over > len(going):
                return False
            victims += going[: max(0, over)]
        self.all = [one for one in left if one not in victims] + comes
        self.dropped += len(victims)
        return True

    @rule(to=destinations, nowait=st.booleans())
    def send(self, to: object, nowait: bool) -> None:
        one = self.new(to)
        try:
            if nowait:
                self.store.send_nowait(*one).result(60)  # type: ignore[arg-type]
            else:
                self.store.send(*one)  # type: ignore[arg-type]
            done = True
        except StoreFullError:
            done = False
        assert done is self.fit([one])

    @rule(to=st.lists(destinations, min_size=1, max_size=3), acks=st.booleans())
    def commit(self, to: list[object], acks: bool) -> None:
        comes = [self.new(one) for one in to]
        goes = list(self.held) if acks else []
        messages = [self.held[body] for body in goes]
        for message in messages:
            self.store.claim(message)
        try:
            self.store.commit([(one, Outgoing(body)) for one, body in comes], messages)  # type: ignore[misc]
            done = True
        except StoreFullError:
            self.store.unclaim(messages)
            done = False
        assert done is self.fit(comes, goes)
        for body in goes:
            del self.held[body]

    @rule(to=destinations)
    def receive(self, to: object) -> None:
        message = self.store.receive(to, 0)  # type: ignore[arg-type]
        free = [body for one, body in self.all if one == to and body not in self.held]
        assert (message.body if message is not None else None) == (free[0] if free else None)
        if message is not None:
            self.held[message.body] = message

    @precondition(lambda self: self.held)
    @rule(acks=st.booleans())
    def settle(self, acks: bool) -> None:
        body, message = self.held.popitem()
        if acks:
            message.ack()
            self.all = [one for one in self.all if one[1] != body]
        else:
            message.release()

    @rule(to=destinations, commits=st.booleans())
    def branch(self, to: object, commits: bool) -> None:
        one = self.new(to)
        name = b"%32d" % self.number
        sends = [(to, Outgoing(one[1]))]
        try:
            room = self.store.reserve(sends)  # type: ignore[arg-type]
        except StoreFullError:
            assert not self.fit([one])
            return
        self.store.prepare(name, [self.store.store_id], sends, [], False, room).wait()  # type: ignore[arg-type]
        if commits:
            self.store.commit_prepared(name).wait()
            assert self.fit([one])
        else:
            self.store.rollback_prepared(name).wait()

    @precondition(lambda self: not self.kind.volatile)
    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        self.store = self.disk.crash(self.store) if crash else self.disk.reopen(self.store)
        self.held.clear()
        self.dropped = 0

    @invariant()
    def same(self) -> None:
        for to in (A, B):
            assert bodies(self.store, to) == [body for one, body in self.all if one == to]
        assert self.store.stats().dropped == self.dropped
        assert self.store.stats().leased == len(self.held)

    @rule()
    def check(self) -> None:
        assert_whole(self.store)


class JournalRings(Rings):
    kind = JournalDisk


class MemoryRings(Rings):
    kind = MemoryDisk


TestJournalRings = JournalRings.TestCase
TestJournalRings.settings = settings(max_examples=25, stateful_step_count=30)
TestMemoryRings = MemoryRings.TestCase
TestMemoryRings.settings = settings(max_examples=25, stateful_step_count=30)
