"""Which messages go from a store that is full, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.features.quotas.dropping import DropLog, Oldest
from anabranch.adapters.core.record.place import Place
from anabranch.adapters.core.service import purging
from anabranch.adapters.core.state.leases import DestinationState
from anabranch.adapters.core.state.limits import Grant, Room
from anabranch.policies.config.when_full import WhenFull
from anabranch.policies.errors import CorruptionError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, bodies, drain, take
from ..journal.disk import segments_of
from .made import journal


def test_the_oldest_of_all_destinations_go_first(journal_store: Store) -> None:
    for number in range(300):
        journal_store.send((A, B)[number % 2], b"%d" % number)
    held = take(journal_store, B)
    engine = journal_store._engine
    oldest, room = Oldest(engine), Room("s", 10, None, lambda: (0, 0))
    for _ in range(2):  # what was looked up before is not looked up again, and what is given back is there again
        grant = Grant()
        with engine.lock:
            assert oldest.take({room: (200, 0)}, grant, False) == set()
        assert [lease.seq for lease in grant.evicted] == [seq for seq in range(1, 202) if seq != held.seq]
        message = take(journal_store, A)
        assert message.seq > 200
        message.release()
        with engine.lock:
            oldest.give_back(grant)
    assert (len(bodies(journal_store, A)), len(bodies(journal_store, B))) == (150, 150)


def test_of_one_destination_alone(journal_store: Store) -> None:
    journal_store.send_many(A, [b"1", b"2"])
    journal_store.send_many(B, [b"3", b"4"])
    engine, oldest = journal_store._engine, Oldest(journal_store._engine)
    room = Room("b", 10, 100, lambda: (0, 0), state=engine.catalog.state(B))
    grant = Grant()
    assert engine.asked(lambda: oldest.take({room: (1, 0)}, grant, True)) == set()
    assert [lease.seq for lease in grant.evicted] == [3]
    assert grant.sizes[0] > 1
    assert engine.asked(lambda: oldest.take({room: (5, 0)}, grant, True)) == {room}
    engine.asked(lambda: oldest.give_back(grant))
    assert bodies(journal_store, B) == [b"3", b"4"]


def test_a_destination_that_comes_while_the_oldest_is_looked_for_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with journal() as disk:
        store = disk.create(max_messages=2, when_full=WhenFull.DROP_OLD)
        store.send(A, b"1")
        store.send(B, b"2")
        look, names = Oldest._places, iter(range(1000))

        def come(oldest: Oldest, state: DestinationState, volatile: bool, after: int) -> Iterator[Place]:
            store._engine.catalog.state(Destination.parse(f"new{next(names)}"))  # as another thread may
            return look(oldest, state, volatile, after)

        monkeypatch.setattr(Oldest, "_places", come)
        for body in (b"3", b"4", b"5"):
            store.send(B, body)
        assert drain(store) == []
        assert bodies(store, B) == [b"4", b"5"]


@pytest.mark.parametrize("limit, persistent", [("max_messages", True), ("nonpersistent_max_messages", False)])
def test_a_full_store_does_not_look_at_all_destinations_for_each_message(
    monkeypatch: pytest.MonkeyPatch, limit: str, persistent: bool
) -> None:
    with journal() as disk:
        store = disk.create(**{limit: 100}, when_full=WhenFull.DROP_OLD)
        many = [Destination.parse(f"d{number}") for number in range(100)]
        for destination in (*many, many[0]):
            store.send(destination, b"", persistent=persistent)
        look, looks = Oldest._places, count()

        def counted(oldest: Oldest, state: DestinationState, volatile: bool, after: int) -> Iterator[Place]:
            next(looks)
            return look(oldest, state, volatile, after)

        monkeypatch.setattr(Oldest, "_places", counted)
        for destination in (*many[1:51], Destination.parse("new")):
            store.send(destination, b"", persistent=persistent)
        assert next(looks) < 200
        assert [store.depth(destination) for destination in (*many, Destination.parse("new"))].count(1) == 100


def test_what_is_applied_late_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transient message is there at once, though one that was sent before it is still on its way to the disk."""
    with journal() as disk:
        store = disk.create(max_messages=3, when_full=WhenFull.DROP_OLD)
        for body in (b"late", b"2", b"3"):
            store.send(A, body)
        look = Oldest._places
        monkeypatch.setattr(Oldest, "_places", lambda oldest, state, volatile, after: look(oldest, state, volatile, 1))
        store.send(A, b"4")
        monkeypatch.setattr(Oldest, "_places", look)
        late, *_ = [take(store) for _ in range(3)]
        late.release()
        store.send(A, b"5")
        assert late.body == b"late" and bodies(store, A) == [b"3", b"4", b"5"]


def test_what_is_dropped_is_told_at_once_and_then_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "anabranch.adapters.core.features.quotas.dropping")
    log = DropLog("s")
    log.new([A])
    assert "store s is full: 1 messages were not stored since this was said last: 1 of queue://a" in caplog.text
    caplog.clear()
    log.new([A] * 3)
    log.new([Destination.parse(f"d{number}") for number in range(9)])
    assert not caplog.records
    log._tell_later()
    assert "12 messages were not stored" in caplog.text
    assert "3 of queue://a" in caplog.text
    assert "and of 5 more" in caplog.text
    caplog.clear()
    log._tell_later()
    assert not caplog.records
    log.new([B])
    assert "1 of queue://b" in caplog.text
    assert log.count == 14


def damage(path: Path, data: bytes) -> None:
    """Change bytes of a file that holds them."""
    before = path.read_bytes()
    assert before.count(data) == 1
    path.write_bytes(before.replace(data, data[::-1]))


def test_a_damaged_message_stays_and_those_behind_it_go() -> None:
    with journal() as disk:
        store = disk.create(max_bytes=500, when_full=WhenFull.DROP_OLD)
        store.send(A, b"0123456789" * 10)
        store.send(A, b"b" * 100)
        store.send(A, b"c" * 100)
        (path,) = (path for path in segments_of(store) if b"0123456789" * 10 in path.read_bytes())
        damage(path, b"0123456789" * 10)
        for body in (b"d", b"e", b"f"):
            store.send(A, body * 100)
        with pytest.raises(CorruptionError):
            store.receive(A, 0)
        assert [body[:1] for body in drain(store)] == [b"e", b"f"]


def test_a_destination_that_comes_back_hides_none_that_is_new() -> None:
    """One is there while a receive waits, and goes as a send to it begins."""
    with journal() as disk:
        store = disk.create(max_messages=3, when_full=WhenFull.DROP_OLD)
        catalog = store._engine.catalog
        back = catalog.state(B)
        for _ in range(4):
            store.send(A, b"")
        catalog.drop(back)
        new = Destination.parse("new")
        catalog.state(new)
        assert catalog.current(back) is back
        for _ in range(4):
            store.send(new, b"")
        assert (store.depth(A), store.depth(new)) == (0, 3)


def test_what_is_left_of_a_removed_destination_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one goes in pages."""
    most = 5000
    with journal() as disk:
        store = disk.create(max_messages=most, when_full=WhenFull.DROP_OLD)
        store.send_many(A, [b""] * most)
        store.send(B, b"1")  # the search knows A
        monkeypatch.setattr(purging.Removal, "_drop", lambda removal, channel: None)  # it is under way
        monkeypatch.setattr(purging.Removal, "_drop_in_background", lambda removal: None)
        store.delete(A)
        store.send_many(B, [b""] * (most - 1))
        for _ in range(3):
            store.send(B, b"")
        assert store.depth(B) == most and take(store, B).body == b""
