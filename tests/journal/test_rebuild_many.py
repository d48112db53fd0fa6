"""What the journal says is what the index says: replayed from a checkpoint, or rebuilt from snapshots and segments, it
is the same to the last bit (rules J6, X2, X3)."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.service import purging
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.adapters.journal import JournalStore, pending_before, snapshot
from anabranch.adapters.journal.index import index, rows
from anabranch.adapters.journal.pending_before import PendingBefore
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, T, assert_whole, bodies, drain, take
from .disk import JournalDisk

QUEUE, TOPIC, OTHER = (Destination.parse(name) for name in ("q", "topic://t", "topic://u"))
SUBSCRIPTIONS = [
    Subscription(TOPIC, "a"),
    Subscription(TOPIC, "b", "client", "x > 1", no_local=True),
    Subscription(TOPIC, "c"),
    Subscription(OTHER, "a"),
]
FAR = 1 << 42
"""A time (ms) that does not come while the test runs."""


def image(store: JournalStore) -> dict[str, Any]:
    """All that the index says, by what is the same in any index of that journal."""
    with store._engine.lock:
        store._engine.current()
        index, catalog = store.backend._index, store._engine.catalog
        rows = index.rows
        return {
            "messages": {
                (number, place): sorted(
                    s.number for s in index.states[number].own.subscriptions.values() if s.own.bit & pending
                )
                for number, place, pending in rows.all()
            },
            "lanes": sorted(rows.all_lanes()),
            "expiries": sorted(rows.all_expiries()),
            "deliveries": sorted(rows.all_deliveries()),
            "waits": sorted(rows.all_waits()),
            "destinations": sorted(
                (str(s.destination), s.count, s.bytes) for s in index.states.values() if s.own.named
            ),
            "subscriptions": sorted(
                (s.number, str(s.subscription), s.start, s.count)
                for state in index.states.values()
                for s in state.own.subscriptions.values()
            ),
            "known to the core": sorted(
                (str(s.destination), sorted(known.number for known in s.subscriptions.values()))
                for s in catalog.declared()
            ),
            "totals": (catalog.messages, catalog.bytes, rows.counted),
            "prepared": sorted(index.transactions.prepared()),
            "segments": [
                (s.number, s.live, s.live_bytes, bytes(s.dead or b"").rstrip(b"\0"))
                for s in store.backend._log.table.segments
                if s.live
            ],
        }


class StruckError(BaseException):
    """Stands for Ctrl-C."""


def strike() -> None:
    raise StruckError


@pytest.fixture(autouse=True, scope="module")
def _small_pages() -> Iterator[None]:
    """So that a handful of messages take several."""
    with ExitStack() as stack:
        for module, name, value in (
            (index, "AT_ONCE", 1), (purging, "PAGE", 1), (purging, "PAGES", 2), (rows, "PAGE", 2),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.object(purging, "DROP_SECONDS", 3600.0))
        stack.enter_context(patch.object(snapshot, "WORTH", 0))
        yield


class Workload:
    """What a store is asked to do, drawn as it goes."""

    def __init__(self, store: JournalStore, data: st.DataObject) -> None:
        self.store, self._data = store, data
        self.held: list[Message] = []
        self.branches: list[bytes] = []

    def step(self) -> None:
        steps = [
            self.send, self.send, self.send, self.receive, self.receive, self.receive, self.ack, self.ack, self.release,
            self.release, self.subscribe, self.unsubscribe, self.purge, self.commit, self.prepare, self.settle,
            self.reclaim, self.reclaim_meanwhile, self.checkpoint, self.delete,
        ]  # fmt: skip
        self._data.draw(st.sampled_from(steps))()

    def _with_pages(self, between: Callable[[], object], call: Callable[[], object]) -> None:
        """Call; `between` is called after each page that is removed."""
        with patch.object(purging, "sleep", lambda seconds: between()), suppress(StruckError):
            call()

    def goes_on_in(self, store: JournalStore) -> None:
        """In the next process, which holds nothing but what is prepared."""
        self.store, self.held = store, []

    def _one(self, among: list[Any]) -> Any:
        return self._data.draw(st.sampled_from(among))

    def _outgoing(self) -> tuple[Destination, Outgoing]:
        body = bytes(self._one([0, 100, 9_000, 30_000]))
        expires = self._one([0, 0, 1, FAR])
        message_id = self._one([None, None, "1", "2"])
        destination = self._one([QUEUE, TOPIC, TOPIC, OTHER])
        return destination, Outgoing(body, None, message_id, self._one([4, 4, 0, 9]), expires)

    def _subscribed(self) -> list[Subscription]:
        return sorted(self.store.subscriptions(), key=str)

    def send(self) -> None:
        destination, message = self._outgoing()
        self.store.send_many(destination, [message] * self._one([1, 3]))

    def receive(self) -> None:
        known = self._subscribed()
        which = self._one([None, *known])
        for _ in range(self._one([1, 4])):
            message = (
                self.store.receive(QUEUE) if which is None else self.store.receive(which.topic, subscription=which.key)
            )
            if message is not None:
                self.held.append(message)
        self.held += [lost.message for lost in self.store.take_undelivered(self._one([0, 2]))]

    def _some(self) -> list[Message]:
        count = self._one([1, 2, 6])
        some, self.held = self.held[:count], self.held[count:]
        return some

    def ack(self) -> None:
        self.store.ack(self._some())

    def release(self) -> None:
        self.store.release(self._some(), delivered=self._one([True, True, False]))

    def subscribe(self) -> None:
        self.store.subscribe(self._one(SUBSCRIPTIONS), self._one([False, True]))

    def _drop(self, gone: Any) -> None:
        self.held = [m for m in self.held if not gone(m)]

    def unsubscribe(self) -> None:
        known = self._subscribed()
        if known and not self.branches and self._one([True, False]):
            one = self._one(known)
            self._with_pages(self._between(), lambda: self.store.unsubscribe(one.topic, one.key))
            self._drop(lambda m: m.destination == one.topic)

    def purge(self) -> None:
        if self._one([True, False]):
            self.store.purge(self._one([QUEUE, TOPIC]))

    def delete(self) -> None:
        if not self.branches and self._one([True, False, False]):
            topic = self._one([OTHER, QUEUE])
            self._with_pages(self._between(), lambda: self.store.delete(topic))
            self._drop(lambda m: m.destination == topic)

    def _parts(self) -> tuple[list[tuple[Destination, Outgoing]], list[Message], list[Change]]:
        acks = self._some()
        for message in acks:
            self.store.claim(message)
        changes = [Change(self._one(SUBSCRIPTIONS), True, self._one([False, True])) for _ in range(self._one([0, 1]))]
        return [self._outgoing() for _ in range(self._one([0, 2]))], acks, changes

    def commit(self) -> None:
        sends, acks, changes = self._parts()
        self.store.commit(sends, acks, None, changes)

    def prepare(self) -> None:
        sends, acks, changes = self._parts()
        name = len(self.branches).to_bytes(4, "big") + self.store.last_seq.to_bytes(28, "big")
        if name not in self.branches:
            self.store.prepare(name, [self.store.store_id], sends, acks, False, None, changes).wait()
            self.branches.append(name)
        else:
            self.store.unclaim(acks)

    def settle(self) -> None:
        if self.branches:
            name = self.branches.pop()
            if self._one([True, False]):
                self.store.commit_prepared(name).wait()
            else:
                self.store.rollback_prepared(name).wait()

    def _between(self) -> Callable[[], object]:
        """What happens after a page: nothing, another call, or Ctrl-C."""
        between: Callable[[], object] = self._one([lambda: None, self.send, self.receive, self.subscribe, strike])
        return between

    def reclaim(self) -> None:
        """Others go on while its snapshot is taken."""
        self.store.reclaim()

    def reclaim_meanwhile(self) -> None:
        steps = [self.send, self.receive, self.ack, self.release, self.subscribe, self.settle, self.commit]
        left = [self._one(steps) for _ in range(self._one([1, 3, 6]))]
        applier, asked = self.store.backend._applier, self.store._engine.asked
        begin = applier._begin_snapshot
        begun: list[bool] = []

        def ask(question: Callable[[], Any]) -> Any:
            found = asked(question)
            if begun and left:
                left.pop()()
            return found

        def begin_snapshot() -> Any:
            begun.append(True)
            return begin()

        with patch.object(applier, "_begin_snapshot", begin_snapshot), patch.object(self.store._engine, "asked", ask):
            self.store.reclaim()

    def checkpoint(self) -> None:
        self.store.checkpoint()


@given(st.data(), st.booleans())
@settings(max_examples=1500, derandomize=False, phases=[__import__("hypothesis").Phase.generate])
def test_the_journal_tells_what_the_index_says(data: st.DataObject, priorities: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        options: dict[str, Any] = {"sync": "never", "checkpoint_interval": 3600.0, "priorities": priorities}
        with JournalDisk(Path(scratch), **options, max_deliveries=3, dead_letter="dlq") as disk:
            workload = Workload(disk.create(), data)
            for _ in range(data.draw(st.integers(1, 3), "lives")):
                store = workload.store
                store.backend._applier.on_empty = lambda: None  # reclaimed when the test says so
                for _ in range(data.draw(st.integers(10, 40), "steps")):
                    workload.step()
                with store.backend._compactor._lock:  # nothing is copied in the background meanwhile
                    copies = [disk.copy(store) for _ in range(2)]
                    assert_whole(store)  # after what was interrupted is removed
                    expected = image(store)
                later = []
                for path, without_index in zip(copies, (False, True), strict=True):
                    if without_index:
                        (path / "index.mdb").unlink()
                    later.append(disk.open(path))
                    assert image(later[-1]) == expected, without_index
                    assert_whole(later[-1])
                workload.goes_on_in(data.draw(st.sampled_from(later)))


def test_a_retroactive_subscription_has_nothing_of_one_whose_end_was_interrupted(tmp_path: Path) -> None:
    """What the next opening removes, the journal does not tell: with and without the index it is gone."""
    with JournalDisk(tmp_path) as disk:
        store = disk.create()
        ended = SUBSCRIPTIONS[0]
        store.subscribe(ended, False)
        store.send_many(ended.topic, [Outgoing(b"")] * 3)
        with patch.object(purging, "sleep", lambda seconds: strike()), suppress(StruckError):
            store.unsubscribe(ended.topic, ended.key)
        store = disk.crash(store)
        store.subscribe(ended, True)
        expected = image(store)
        path = disk.copy(store)
        (path / "index.mdb").unlink()
        assert image(disk.open(path)) == expected
        assert store.depth(ended.topic) == 0


def rebuilt_as(disk: JournalDisk, store: JournalStore) -> None:
    """Its index says the same once it is rebuilt."""
    expected = image(store)
    path = disk.copy(store)
    (path / "index.mdb").unlink()
    assert image(disk.open(path)) == expected


def amid_reclaiming(store: JournalStore, *steps: Callable[[], object]) -> None:
    """Reclaim; what is done then comes between the snapshot's beginning and its pages."""
    applier = store.backend._applier
    begin = applier._begin_snapshot

    def begin_snapshot() -> Any:
        begun = begin()
        assert begun[1] is not None
        left.extend(steps)
        return begun

    def ask(question: Callable[[], Any], real: Callable[..., Any] = store._engine.asked) -> Any:
        found = real(question)
        while left:
            left.pop(0)()
        return found

    left: list[Callable[[], object]] = []
    with patch.object(applier, "_begin_snapshot", begin_snapshot), patch.object(store._engine, "asked", ask):
        assert store.reclaim()


@pytest.fixture
def acked_by_one(tmp_path: Path) -> Iterator[tuple[JournalDisk, JournalStore, Message]]:
    """Nine messages of a topic with two subscriptions, of which one has acked the second, which the other holds; and a
    segment that may go."""
    with JournalDisk(tmp_path, segment_size=64 * 1024) as disk:
        store = disk.create()
        store.backend._applier.on_empty = lambda: None
        for _ in range(3):
            store.send(QUEUE, bytes(30_000))
        for subscription in (SUBSCRIPTIONS[0], SUBSCRIPTIONS[2]):
            store.subscribe(subscription)
        store.send_many(TOPIC, [str(n).encode() for n in range(9)])
        store.ack([take(store, TOPIC, 0, SUBSCRIPTIONS[2].key) for _ in range(2)][1:])
        take(store, TOPIC, 0, SUBSCRIPTIONS[0].key)
        held = take(store, TOPIC, 0, SUBSCRIPTIONS[0].key)
        while (message := store.receive(QUEUE)) is not None:
            message.ack()
        yield disk, store, held


def test_what_its_last_subscription_acks_amid_a_snapshot_comes_back_to_nobody(
    acked_by_one: tuple[JournalDisk, JournalStore, Message],
) -> None:
    disk, store, held = acked_by_one
    amid_reclaiming(store, held.ack)
    rebuilt_as(disk, store)


def test_what_is_acked_amid_a_snapshot_is_there_for_a_retroactive_subscription_before(
    acked_by_one: tuple[JournalDisk, JournalStore, Message],
) -> None:
    disk, store, held = acked_by_one
    amid_reclaiming(store, lambda: store.subscribe(SUBSCRIPTIONS[1], True), held.ack)
    assert store.depth(TOPIC, SUBSCRIPTIONS[1].key) == 9
    rebuilt_as(disk, store)


def test_what_is_replayed_amid_a_snapshot_does_not_undo_what_was_acked_before(
    acked_by_one: tuple[JournalDisk, JournalStore, Message],
) -> None:
    disk, store, held = acked_by_one

    def recover() -> None:
        with store._engine.lock:
            store.backend._applier.recover()

    amid_reclaiming(store, recover, held.ack, recover)
    rebuilt_as(disk, store)


def test_an_ended_subscription_whose_slot_is_used_again_amid_a_snapshot_has_nothing_more(tmp_path: Path) -> None:
    """It was going page by page as the snapshot began; a retroactive one has its bit by the time the rows are read."""
    with JournalDisk(tmp_path, segment_size=64 * 1024) as disk:
        store = disk.create()
        store.backend._applier.on_empty = lambda: None
        for _ in range(3):
            store.send(QUEUE, bytes(30_000))
        ended, other, begun = SUBSCRIPTIONS[0], SUBSCRIPTIONS[2], SUBSCRIPTIONS[1]
        store.subscribe(ended)
        store.subscribe(other)
        store.send_many(TOPIC, [str(n).encode() for n in range(9)])
        while (message := store.receive(QUEUE)) is not None:
            message.ack()
        removal, catalog = store._removal, store._engine.catalog
        with patch.object(removal, "_drop"):
            store.unsubscribe(TOPIC, ended.key)
        (channel,) = catalog.leaving
        rows, write = store._engine.backend.rows, store._sending.write
        first = removal._drop_pages(catalog, rows, write, channel, 0)
        assert first is not None

        def go_on() -> None:
            behind: int | None = first
            while behind is not None:
                behind = removal._drop_pages(catalog, rows, write, channel, behind)

        amid_reclaiming(store, go_on, lambda: store.subscribe(begun, True))
        assert store.depth(TOPIC, begun.key) == 9
        rebuilt_as(disk, store)


def test_what_ctrl_c_strikes_is_kept_by_who_does_it_again() -> None:
    kept = PendingBefore(9)

    def interrupted(seqs: list[int], seq: int) -> None:
        heapq.heappush(seqs, seq)
        raise StruckError

    with patch.object(pending_before, "heappush", interrupted), suppress(StruckError):
        kept.keep(1, 5, 3)
    kept.keep(1, 5, 3)
    kept.keep(1, 5, 1)  # it has changed by then
    kept.keep(1, 10, 1)  # it has come since
    assert (kept.take(1, 0, 4), kept.take(1, 5, 20), kept.take(1, 0, 20)) == ({}, {5: 3}, {})


def test_what_waits_is_told_by_snapshots(tmp_path: Path) -> None:
    """Also once the segments are gone that said it: to be delivered later, given back with a delay, due again."""
    with JournalDisk(tmp_path) as disk:
        store = disk.create(segment_size=64 * 1024, pool_files=0)
        store.send(A, b"later", deliver_at_ms=2**50)
        store.send_many(A, [b"given back", b"free"])
        store.release([take(store, A)], delay=10**9)
        store.subscribe(Subscription(T, "desk"))
        store.subscribe(Subscription(T, "book"))
        store.send_many(T, [Outgoing(b"t later", deliver_at_ms=2**50), b"t"])
        take(store, T, subscription=("", "desk")).release(delay=10**9)
        for _ in range(10):
            store.send_many(B, [b"x" * 1000] * 200)
            drain(store, B)
        store.reclaim()
        assert store.stats().segments["retained"] < 8  # of more than 30
        for _ in range(2):
            store.close()
            for path in store.directory.glob("index.*"):
                path.unlink()
            store = disk.reopen(store)
            assert_whole(store)
            assert store.counts(A) == (1, 0, 2, 0)
            assert [store.counts(T, ("", name)) for name in ("desk", "book")] == [(0, 0, 2, 0), (1, 0, 1, 0)]
            assert bodies(store, A) == [b"later", b"given back", b"free"]
            assert take(store, A).body == b"free"
