"""What a sweep finds, and at how many rows it looks for it (Z1, Z2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.messages import DELIVERY_LIMIT, EXPIRED, Message, Outgoing
from anabranch.adapters.core.state import sweep
from anabranch.adapters.core.state.sweep import Remembered, Sweep
from anabranch.adapters.core.store import Store
from anabranch.adapters.core.store_types import Subscription

from ..contract.disk import A, B, Disk, T, drain, take
from ..contract.expiring import Clock, stopped_clock
from ..journal.disk import JournalDisk
from ..memory.disk import MemoryDisk
from ..sql.disk import SqliteDisk
from ..thirdparty.disk import OneFileDisk

LEASED = 2000
FREE = 1000


clock = pytest.fixture(stopped_clock)


@pytest.fixture(params=["journal", "sql", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    kinds: dict[str, Any] = {
        "journal": partial(JournalDisk, tmp_path, sync="never", segment_size=1 << 20),
        "sql": partial(SqliteDisk, tmp_path),
        "memory": partial(MemoryDisk, tmp_path),
    }
    with kinds[request.param]() as disk:
        yield disk


def count_rows(store: Any) -> Counter[str]:
    """How many rows the store is asked for, and how many it gives, from now on."""
    counts: Counter[str] = Counter()

    def ask(name: str, question: Any, *arguments: Any) -> Any:
        counts[name] += 1
        found = question(*arguments)
        return given(name, found) if name in ("expired", "limited") else found

    def given(name: str, found: Any) -> Iterator[Any]:
        for one in found:
            counts[name] += 1
            yield one

    for name in ("row", "unacked", "expired", "limited"):
        setattr(store.backend, name, partial(ask, name, getattr(store.backend, name)))
    return counts


def sweep_all(store: Any, reason: str) -> int:
    """As the router does, in hundreds."""
    count = 0
    while found := store.take_undelivered(100):
        assert {why for _, why in found} == {reason}
        store.ack([message for message, _ in found])
        count += len(found)
    return count


def test_a_sweep_behind_leased_messages_passes_them_once(clock: Clock, disk: Disk) -> None:
    store = disk.create()
    store.send_many(A, [Outgoing(b"leased", expires_at_ms=clock.now + 1000)] * LEASED)
    leased = [take(store) for _ in range(LEASED)]
    store.send_many(A, [Outgoing(b"free", expires_at_ms=clock.now + 1001)] * FREE)
    clock.offset_ms += 2000
    counts = count_rows(store)
    assert sweep_all(store, EXPIRED) == FREE
    assert counts["expired"] + counts["row"] <= LEASED + 2 * FREE + 100
    counts.clear()
    for _ in range(20):
        clock.offset_ms += 1000
        assert store.take_undelivered(100) == []
    assert counts["expired"] + counts["row"] <= 100  # none of those is looked at again
    store.ack(leased[: LEASED // 2])
    store.release(leased[LEASED // 2 :])
    counts.clear()
    assert sweep_all(store, EXPIRED) == LEASED // 2
    assert counts["expired"] + counts["row"] <= LEASED + 100
    assert store.depth(A) == 0


def test_what_is_refused_again_and_again_stands_in_nobodys_way(clock: Clock, disk: Disk) -> None:
    """Put back each time, as by a dead-letter queue that is full: others come first."""
    store = disk.create()
    store.send_many(A, [Outgoing(b"refused", expires_at_ms=clock.now + 1000)] * 1000)
    store.send_many(B, [Outgoing(b"fine", expires_at_ms=clock.now + 1000)] * 1000)
    clock.offset_ms += 2000
    counts = count_rows(store)
    gone = looks = 0
    while gone < 1000:
        looks += 1
        found = [message for message, _ in store.take_undelivered(100)]
        store.release([message for message in found if message.body == b"refused"], delivered=False)
        fine = [message for message in found if message.body == b"fine"]
        store.ack(fine)
        gone += len(fine)
    assert looks <= 40
    assert counts["expired"] + counts["row"] <= 12_000


def test_messages_at_the_delivery_limit_are_looked_at_once(clock: Clock, disk: Disk) -> None:
    """Also those that were there before the store was opened."""
    store = disk.create(max_deliveries=1, dead_letter="dead")
    store.send_many(A, [b"x"] * FREE)
    store.release([take(store) for _ in range(FREE)])
    assert store.receive(A) is None
    counts = count_rows(store)
    assert sweep_all(store, DELIVERY_LIMIT) == FREE
    assert counts["limited"] + counts["row"] <= 3 * FREE + 200
    store.send_many(A, [b"x"] * FREE)
    store.release([take(store) for _ in range(FREE)])
    if not disk.volatile:
        store = disk.reopen(store)
        counts = count_rows(store)
    counts.clear()
    assert sweep_all(store, DELIVERY_LIMIT) == FREE
    assert counts["limited"] + counts["row"] <= 4 * FREE + 200


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are remembered, and few are looked at at once. Before a store is opened."""
    monkeypatch.setattr(sweep, "REMEMBERED_MAX", 10)
    monkeypatch.setattr(sweep, "LOOKED_MAX", 7)


@pytest.mark.usefixtures("small")
class TestMoreThanIsRemembered:
    def test_expired_ones(self, clock: Clock, disk: Disk) -> None:
        store = disk.create()
        store.send_many(A, [Outgoing(b"%d" % n, expires_at_ms=clock.now + 1000 + n) for n in range(50)])
        leased = [take(store) for _ in range(50)]
        clock.offset_ms += 2000
        assert store.take_undelivered(100) == []
        store.release(leased[5:])
        store.send_many(B, [Outgoing(b"late", expires_at_ms=clock.now - 1500)] * 20)
        clock.offset_ms += 1000
        assert sweep_all(store, EXPIRED) == 65
        store.release(leased[:5])
        assert sweep_all(store, EXPIRED) == 5
        assert store.stats().messages == 0

    def test_at_the_delivery_limit(self, clock: Clock, disk: Disk) -> None:
        store = disk.create(max_deliveries=1, dead_letter="dead")
        store.send_many(A, [b"x"] * 50)
        leased = [take(store) for _ in range(50)]
        store.release(leased[5:])
        assert sweep_all(store, DELIVERY_LIMIT) == 45
        store.release(leased[:5])
        assert sweep_all(store, DELIVERY_LIMIT) == 5
        assert store.stats().messages == 0

    def test_where_there_is_no_room_for_leases(self, clock: Clock, disk: Disk) -> None:
        """They wait until there is, and others do not wait for them."""
        store = disk.create(max_leases=2)
        store.send_many(A, [Outgoing(b"a", expires_at_ms=clock.now + 1000)] * 30)
        held = [take(store), take(store)]
        store.send_many(B, [Outgoing(b"b", expires_at_ms=clock.now + 1000)] * 30)
        clock.offset_ms += 2000
        gone: list[Message] = []
        for _ in range(100):
            found = [message for message, _ in store.take_undelivered(100)]
            store.ack(found)
            gone += found
            clock.offset_ms += 1
        assert [message.body for message in gone] == [b"b"] * 30
        store.ack(held)
        for _ in range(100):
            sweep_all(store, EXPIRED)
            clock.offset_ms += 1
        assert store.stats().messages == 0


class Interrupted(BaseException):
    pass


def test_a_walk_that_is_interrupted_is_begun_anew(clock: Clock, tmp_path: Path) -> None:
    with OneFileDisk(tmp_path) as disk:
        store: Store = disk.create(max_deliveries=1, dead_letter="dead")
        store.send_many(A, [Outgoing(b"x", expires_at_ms=clock.now + 1000)] * 10)
        store.send_many(B, [b"y"] * 10)
        store.release([take(store, B) for _ in range(10)])
        clock.offset_ms += 2000
        backend: Any = store.backend
        row, expired, limited = backend.row, backend.expired, backend.limited
        left = 0

        def interrupted_at(step: int, question: Any) -> Any:
            def ask(*arguments: Any) -> Any:
                nonlocal left
                left = step
                return walk(question(*arguments))

            return ask

        def walk(found: Any) -> Iterator[Any]:
            nonlocal left
            for one in found:
                left -= 1
                if left == 0:
                    raise Interrupted
                yield one

        def count(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Interrupted
            return row(*arguments)

        for step in range(1, 25):
            for name, question in (("expired", expired), ("limited", limited)):
                setattr(backend, name, interrupted_at(step, question))
            backend.row = count
            store._engine.delivery._sweep = Sweep(1)
            try:
                found = list(store.take_undelivered(100))
            except Interrupted:
                found = []
            backend.expired, backend.limited, backend.row = expired, limited, row
            found += store.take_undelivered(100)
            assert sorted(message.body for message, _ in found) == [b"x"] * 10 + [b"y"] * 10
            store.release([message for message, _ in found], delivered=False)


def test_what_is_removed_leaves_nothing(clock: Clock, tmp_path: Path) -> None:
    with OneFileDisk(tmp_path) as disk:
        store: Store = disk.create(max_deliveries=1, dead_letter="dead")
        found = store._engine.delivery._sweep
        for key in ("one", "two"):
            store.subscribe(Subscription(T, key))
        for destination in (A, T):
            store.send_many(destination, [Outgoing(b"x", expires_at_ms=clock.now + 1000), b"y"])
        held = [store.receive(A), store.receive(A)]
        held += [store.receive(T, subscription=("", "one")), store.receive(T, subscription=("", "one"))]
        clock.offset_ms += 2000
        assert [message.body for message, _ in store.take_undelivered()] == []
        store.release([message for message in held if message is not None])
        assert (len(found._expired), len(found._limited)) == (2, 4)
        store.delete(A)
        store.delete(T)
        assert drain(store) == []
        assert (len(found._expired), len(found._limited)) == (0, 0)


def test_each_owner_has_its_turn() -> None:
    remembered: Remembered[str] = Remembered(5)
    for owner, seq in (("a", 1), ("a", 2), ("a", 3), ("b", 4)):
        assert remembered.add(owner, (0, seq, 0, 0, None))
    assert remembered.add("b", (0, 4, 0, 0, None))
    assert remembered.add("b", (0, 5, 0, 0, None))
    assert not remembered.add("c", (0, 6, 0, 0, None))
    seen = [remembered.next() for _ in range(6)]
    assert [(one[0], one[1][1]) for one in seen if one is not None] == [
        ("a", 1), ("b", 4), ("a", 2), ("b", 5), ("a", 3), ("b", 4),
    ]  # fmt: skip
    remembered.drop("a", 2)
    remembered.drop("a", 2)
    remembered.forget("b")
    assert len(remembered) == 2
