"""Messages with all that a store knows of them come into another store of any kind (core/migration/copying.py)."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing, Receipt
from anabranch.adapters.core.migration import copying
from anabranch.adapters.core.migration.copying import (
    Item,
    Prefix,
    Seen,
    Stored,
    amount,
    bring,
    common,
    digest,
    messages,
    prefix,
    read,
)
from anabranch.adapters.core.record.keys import put_of
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import MessageTooLargeError, StoreFullError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, Disk, T, assert_whole, bodies, take
from ..journal.disk import JournalDisk
from ..memory.disk import MemoryDisk
from ..sql.disk import PostgresDisk, SqliteDisk, table_sets

DISKS: dict[str, type[Any]] = {"journal": JournalDisk, "sqlite": SqliteDisk, "memory": MemoryDisk}
PAIRS = list(itertools.product(DISKS, DISKS))
EARLY, LATE = Subscription(T, "early", "c", "a > 1", True), Subscription(T, "late")
IDLE = Subscription(T, "idle")
FOREVER = 4_000_000_000_000
"""When messages expire, in ms."""


@dataclass
class Both:
    """A store to read, and one to bring into."""

    source_disk: Disk
    target_disk: Disk
    source: Store
    target: Store

    def later(self) -> None:
        """The target as the next process finds it."""
        self.target = self.target_disk.later(self.target)


Given = tuple[str, dict[str, Any], str, dict[str, Any]]
"""Kind and options of the source, and of the target."""


def with_options(source: dict[str, Any], target: dict[str, Any], every: bool = False) -> pytest.MarkDecorator:
    """The stores of a test have these options; they are journals, or of every kind."""
    given = [(a, source, b, target) for a, b in (PAIRS if every else [("journal", "journal")])]
    return pytest.mark.parametrize("both", given, indirect=True, ids=[f"{a}-{b}" for a, _, b, _ in given])


def disk_of(kind: str, path: Path, request: pytest.FixtureRequest) -> Disk:
    if kind == "postgresql":
        return PostgresDisk(path, request.getfixturevalue("sets"))
    disk: Disk = DISKS[kind](path)
    return disk


sets = pytest.fixture(scope="module")(table_sets)


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    given: Given = getattr(request, "param", ("journal", {}, "journal", {}))
    with ExitStack() as stack:
        disks: list[Disk] = []
        for name, kind in ("from", given[0]), ("to", given[2]):
            (tmp_path / name).mkdir()
            disks.append(stack.enter_context(disk_of(kind, tmp_path / name, request)))
        source, target = disks[0].create(**given[1]), disks[1].create(**given[3])
        target.send(B, b"in the way")  # seqs and numbers differ
        yield Both(disks[0], disks[1], source, target)


def fill_queue(store: Store) -> None:
    """Some of everything: acked before, between and behind what is there."""
    store.send(A, b"acked first", message_id="first")
    take(store).ack()
    for number in range(5):
        store.send(A, b"%d" % number, {"n": number, "deep": {"l": [1, None]}}, f"id-{number}", priority=number % 3)
    store.send(A, b"expires", expires_at_ms=FOREVER)
    store.send(A, b"large" * 40_000, {"k": "v"})
    held = {message.body: message for message in iter(lambda: store.receive(A), None)}
    held.pop(b"3").ack()
    for times in range(3):
        held[b"2"].release()
        if times < 2:
            held[b"2"] = take(store)
    for body, message in held.items():
        if body != b"2":
            message.release(delivered=False)
    store.send(A, b"acked last", message_id="last")
    for message in list(iter(lambda: store.receive(A), None)):
        if message.body == b"acked last":
            message.ack()
        else:
            message.release(delivered=False)


def facts(store: Store, destination: Destination, subscription: tuple[str, str] | None = None) -> list[Any]:
    """What a user sees of each message, by the order in which they are delivered."""
    return [
        (m.body, m.headers, m.message_id, m.priority, m.timestamp_ms, m.expires_at_ms, m.deliveries, m.persistent)
        for m in store.browse(destination, subscription=subscription)
    ]


class Pairs:
    """Between any two kinds."""

    def test_a_queue(self, both: Both) -> None:
        fill_queue(both.source)
        expected = facts(both.source, A)
        assert [fact[6] for fact in expected if fact[0] == b"2"] == [3]
        came = bring(both.target, A, read(both.source, A))
        assert (came.count, came.hex()) == (6, digest(messages(read(both.source, A))).hex())
        both.later()
        assert facts(both.target, A) == expected
        assert digest(messages(read(both.target, A))).hex() == came.hex()
        assert list(read(both.target, A)) == list(read(both.source, A))
        for seen in ("first", "id-0", "id-3", "last"):
            assert both.target.send(A, b"again", message_id=seen).duplicate, seen
        assert not both.target.send(A, b"new", message_id="new").duplicate
        assert [take(both.target).body for _ in range(7)][-1] == b"new"
        assert_whole(both.target)

    def test_a_topic(self, both: Both) -> None:
        """Each subscription has what it had; one that nothing waits for is there too."""
        source = both.source
        source.subscribe(EARLY)
        source.send(T, b"0", message_id="t-0")
        source.subscribe(LATE)
        for number in range(1, 5):
            source.send(T, b"%d" % number, {"n": number}, f"t-{number}")
        taken = [take(source, T, subscription=EARLY.key) for _ in range(5)]
        taken[1].ack()
        taken[3].ack()
        for message in (taken[0], taken[2], taken[4]):
            message.release()
        take(source, T, subscription=LATE.key).ack()  # number 1 is gone for both
        take(source, T, subscription=LATE.key).release()
        source.subscribe(IDLE)
        expected = {one: facts(source, T, one.key) for one in (EARLY, LATE, IDLE)}
        assert [len(found) for found in expected.values()] == [3, 3, 0]
        bring(both.target, T, read(source, T), amount(source, T).subscriptions)
        both.later()
        assert set(both.target.subscriptions()) == {EARLY, LATE, IDLE}
        for one, found in expected.items():
            assert facts(both.target, T, one.key) == found
            assert both.target.depth(T, one.key) == len(found)
        assert both.target.depth(T) == source.depth(T) == 4
        assert list(read(both.target, T)) == list(read(source, T))
        assert both.target.send(T, b"again", message_id="t-1").duplicate
        both.target.send(T, b"for all")
        assert [both.target.depth(T, one.key) for one in expected] == [4, 4, 1]
        assert_whole(both.target)

    def test_a_prefix_is_gone_on_with(self, both: Both) -> None:
        fill_queue(both.source)
        items = list(read(both.source, A))
        bring(both.target, A, items[:4])
        both.later()
        there = common(both.source, both.target, A)
        assert there == len(list(messages(items[:4])))
        left = list(messages(items))[there:]
        bring(both.target, A, left)
        both.later()
        assert facts(both.target, A) == facts(both.source, A)

    def test_what_waits_otherwise_is_no_prefix(self, both: Both) -> None:
        """A crash may have kept a message and not that it waits (rule K6): it would be delivered at once."""
        soon = Destination.queue("soon")
        for deliver_at_ms in (0, FOREVER):
            both.source.send_many(A, [Outgoing(b"x", deliver_at_ms=deliver_at_ms)])
        both.source.subscribe(EARLY)
        both.source.send(T, b"t")
        take(both.source, T, subscription=EARLY.key).release(delay=1e6)
        both.source.send(soon, b"x", deliver_at_ms=1)
        for destination in (A, T, soon):
            items = list(messages(read(both.source, destination)))
            now = [replace(item, until=0, untils={}) for item in items]
            bring(both.target, destination, now, amount(both.source, destination).subscriptions)
            assert common(both.source, both.target, destination) == (1 if destination == soon else None)
            assert prefix(items, both.target, destination) == Prefix(len(items), destination == soon)
            both.target.delete(destination)
            bring(both.target, destination, items, amount(both.source, destination).subscriptions)
            assert common(both.source, both.target, destination) == len(items)

    def test_a_prefix_of_messages_of_another_origin(self, both: Both) -> None:
        for number in range(3):
            both.source.send(A, b"%d" % number, message_id=f"id-{number}")
        take(both.source).release()
        items = list(messages(read(both.source, A)))
        assert prefix(items, both.target, A) == Prefix(0, True)
        bring(both.target, A, items[:2])
        both.later()
        assert prefix(items, both.target, A) == Prefix(2, True)
        assert prefix([Stored(items[0].record), *items[1:]], both.target, A) == Prefix(2, False)
        assert prefix(items[:1], both.target, A) is None
        assert prefix(items[1:], both.target, A) is None
        take(both.target).ack()
        assert prefix(items, both.target, A) is None

    def test_what_was_given_back_holds_its_group_where_it_comes(self, both: Both) -> None:
        both.source.send_many(A, [Outgoing(b"%d" % number, group="g") for number in range(2)])
        take(both.source).release(delay=3600)
        bring(both.target, A, read(both.source, A))
        assert both.target.receive(A) is None

    def test_an_id_is_left_of_a_message_that_somebody_acked(self, both: Both) -> None:
        both.source.send(A, b"0", message_id="id")
        items = list(read(both.source, A))
        bring(both.target, A, items)
        take(both.target).ack()
        both.later()
        assert both.target.depth(A) == 0
        assert prefix(items, both.target, A) is None

    def test_what_is_no_prefix(self, both: Both) -> None:
        for number in range(3):
            both.source.send(A, b"%d" % number)
        both.target.send(A, b"1")
        assert common(both.source, both.target, A) is None
        both.target.delete(A)
        assert common(both.source, both.target, A) == 0


@with_options({}, {}, every=True)
class TestPairs(Pairs):
    """Those that need nothing beside this process."""


@pytest.mark.parametrize(
    "both", [("journal", {}, "postgresql", {}), ("postgresql", {}, "journal", {})], indirect=True, ids=["to", "from"]
)
class TestServer(Pairs):
    """And a database server."""


@with_options({"priorities": True}, {"priorities": True}, every=True)
def test_priorities(both: Both) -> None:
    fill_queue(both.source)
    bring(both.target, A, read(both.source, A))
    both.later()
    assert facts(both.target, A) == facts(both.source, A)
    assert bodies(both.target, A)[:1] == [b"expires"]


@with_options({"priorities": True}, {})
def test_into_a_store_without_priorities_they_come_as_they_were_sent(both: Both) -> None:
    for number, priority in enumerate((1, 9, 4)):
        both.source.send(A, b"%d" % number, priority=priority)
    bring(both.target, A, read(both.source, A))
    assert [(m.body, m.priority) for m in both.target.browse(A)] == [(b"0", 1), (b"1", 9), (b"2", 4)]


@with_options({"duplicate_window": 2}, {})
def test_an_id_that_the_window_has_lost(both: Both) -> None:
    """Both messages are there, so both come."""
    for name in ("a", "b", "c", "a"):
        both.source.send(A, name.encode(), message_id=name)
    assert both.source.depth(A) == 4
    bring(both.target, A, read(both.source, A))
    assert bodies(both.target, A) == [b"a", b"b", b"c", b"a"]


def test_a_message_that_was_put_back(both: Both) -> None:
    both.source.send(A, b"1", message_id="a")
    both.source.send_many(A, [Outgoing(b"2", None, "a", requeued=True)])
    bring(both.target, A, read(both.source, A))
    assert facts(both.target, A) == facts(both.source, A)
    assert list(read(both.target, A)) == list(read(both.source, A))


@with_options({}, {"max_messages": 3})
def test_a_target_that_is_full(both: Both) -> None:
    for number in range(3):
        both.source.send(A, b"%d" % number)
    with pytest.raises(StoreFullError, match="max_messages is 3"):
        bring(both.target, A, read(both.source, A))
    assert both.target.depth(A) == 0
    take(both.target, B).ack()
    bring(both.target, A, read(both.source, A))
    assert both.target.depth(A) == 3


@with_options({}, {"message_bytes_max": 10})
def test_a_message_that_is_too_large_there(both: Both) -> None:
    both.source.send(A, b"0")
    both.source.send(A, bytes(11))
    with pytest.raises(MessageTooLargeError, match=r"11 bytes of queue://a is larger than message_bytes_max, 10"):
        bring(both.target, A, read(both.source, A))
    assert both.target.depth(A) == 0


def test_messages_of_another_origin(both: Both) -> None:
    """Any series of records will do."""
    both.source.send(A, b"1", message_id="x")
    (one,) = messages(read(both.source, A))
    items: list[Item] = [Seen(b"gone"), *[Stored(one.record, deliveries) for deliveries in range(copying.PAGE + 1)]]
    bring(both.target, A, iter(items))
    assert [m.deliveries for m in both.target.browse(A)] == list(range(copying.PAGE + 1))
    assert both.target.send(A, b"", message_id="gone").duplicate
    assert_whole(both.target)


def test_the_name_of_a_commit_comes_along_without_its_seqs(both: Both) -> None:
    """The receipts of what was sent have other seqs there, or none."""
    m = Destination.map("m")
    sends = [(A, Outgoing(b"1")), (m, put_of("k", b"v"))]
    both.source.send(A, b"0")
    both.source.commit(sends, [], None, (), "mark")
    for destination in (A, m):
        bring(both.target, destination, read(both.source, destination))
    assert both.target.marked("mark", sends) == [Receipt(A, 0), Receipt(m, 0)]
    assert both.target.marked("mark", sends[1:]) == [Receipt(m, 0)]
    assert [(message.body) for message in both.target.browse(A)] == [b"0", b"1"]
    assert list(both.target.maps.items(m)) == [("k", b"v")]
    bring(both.source, B, read(both.target, A))
    assert both.source.marked("mark", [], [B]) == []
    assert_whole(both.target)
    assert_whole(both.source)


def test_pages_are_bounded() -> None:
    large, small = Stored(bytes(copying.PAGE_BYTES)), Stored(b"1")
    assert [len(page) for page in copying.pages([large, small, small, large, large])] == [1, 2, 1, 1]
    assert [len(page) for page in copying.pages([small] * (copying.PAGE + 1))] == [copying.PAGE, 1]
    assert list(copying.pages([])) == []


def test_an_unknown_destination(both: Both) -> None:
    assert list(read(both.source, A)) == []
    assert amount(both.source, A) == copying.Amount()
    assert common(both.source, both.target, A) == 0


def test_a_message_that_dies_before_its_large_body_is_held(tmp_path: Path) -> None:
    """It is passed over: its body may be gone, and nothing is damaged."""
    with JournalDisk(tmp_path) as disk:
        store = disk.create(large_message_size=5000)
        for number in range(3):
            store.send(A, store.keep(BytesIO(bytes([number]) * 9000)))
        items = messages(read(store, A, 0, None))
        assert next(items).seq == 1
        kept, dead = take(store), take(store)
        dead.ack()
        del dead
        gc.collect()
        store.sync()
        store._engine.bodies.tidy()  # type: ignore[union-attr]
        assert [(item.seq, bytes(item.large.chunk(0)[:1])) for item in items if item.large] == [(3, b"\2")]
        kept.ack()
