"""Which limits concern what is sent, and how much of each it needs."""

from __future__ import annotations

from anabranch.adapters.core.features.quotas.rooms import Request
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.record.encoding import REQUEUED
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.config.when_full import WhenFull

from ..contract.disk import A, B, take
from ..contract.features import limits_of
from .made import journal, send_to


def test_without_limits_there_is_nothing_to_ask() -> None:
    with journal() as disk:
        store = disk.create()
        assert store._engine.quotas is None and not limits_of(store).yields


def test_the_amount_is_that_of_what_is_not_stored_yet() -> None:
    with journal() as disk:
        store = disk.create(max_messages=10)
        store.send(A, b"1", message_id="1")
        a, rooms = store._engine.catalog.state(A), limits_of(store)._rooms
        assert rooms.each_amount([send_to(a, message_id="1")]) == [(0, 0)]
        amounts = rooms.each_amount([send_to(a, message_id="1", flags=REQUEUED), send_to(a)])
        assert [count for count, _ in amounts] == [1, 1]


def test_the_narrowest_limit_comes_first_and_the_best_pattern_wins() -> None:
    with journal() as disk:
        limits = (
            LimitOptions(match=(">",), max_messages=7),
            LimitOptions(match=("a",), max_bytes=100, when_full=WhenFull.DROP_OLD),
        )
        store = disk.create(limits=limits, max_messages=10, nonpersistent_max_messages=3, when_full="block")
        sending = store._sending
        rooms = limits_of(store)._rooms
        kept, passing = sending.sends([(A, Outgoing(b"x")), (B, Outgoing(b"x", persistent=False))])
        assert [room.name for room in rooms.of(kept)] == [f"queue://a in store {store.name!r}", f"store {store.name!r}"]
        assert [room.when_full for room in rooms.of(kept)] == [WhenFull.DROP_OLD, WhenFull.BLOCK]
        assert [room.volatile for room in rooms.of(passing)] == [False, True, False]
        assert rooms.of(kept)[0] is rooms.of(kept)[0]
        assert rooms.yields


def test_what_goes_makes_room_for_what_comes_where_it_was() -> None:
    with journal() as disk:
        store = disk.create(limits=[LimitOptions(match=(">",), max_messages=1)], max_messages=10)
        store.send(A, b"123")
        message: Message = take(store)
        sending = store._sending
        rooms = limits_of(store)._rooms
        sends = sending.sends([(A, Outgoing(b"1234")), (B, Outgoing(b"5"))])
        of_a, of_store = rooms.of(sends[0])
        of_b = rooms.of(sends[1])[0]
        needs = Request(rooms, sends, [message], [4, 1]).needs()
        assert needs[of_a] == (0, 1)
        assert needs[of_b][0] == 1
        assert needs[of_store][0] == 1
        assert Request(rooms, sends, [message], [4, 1]).needs(frozenset([1]))[of_store] == (0, 1)
