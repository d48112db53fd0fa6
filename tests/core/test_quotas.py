"""Limits: which concern what is sent, what there is of each, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.features.quotas.rooms import Request
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.operations.destination_changes import CloseGate
from anabranch.adapters.core.operations.plan import Plan
from anabranch.adapters.core.record.encoding import REQUEUED
from anabranch.adapters.core.state.gates import Gate, MovedError
from anabranch.adapters.core.state.limits import DiskRoom, Grant, NoRoomYetError, Room, may_wait, without_waiting
from anabranch.adapters.system.volumes import Volume
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.config.when_full import WhenFull
from anabranch.policies.errors import StoreFailedError, StoreFullError

from ..contract.disk import PATIENCE, A, B, Disk, Parallel, bodies, drain, eventually, take
from ..contract.features import limits_of
from ..contract.when_full import LONG, limit, waiting
from ..crash.interrupts import everywhere
from ..shares import Share
from .made import journal, memory, onefile, send_to

# Which limits concern what is sent, and how much of each it needs


def test_without_limits_there_is_nothing_to_ask(journal_store: Store) -> None:
    assert journal_store._engine.quotas is None and not limits_of(journal_store).yields


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


# One limit: what is held and reserved counts, and what is reserved is given back when nobody needs it


def test_what_is_held_and_reserved_counts() -> None:
    held = [(2, 20)]
    room = Room("store 's'", 4, 100, lambda: held[0])
    first = room.hold((1, 10))
    assert room.lacking((2, 10)) == (1, 0)
    with pytest.raises(StoreFullError, match=r"holds 3 messages, 2 more would come; max_messages is 4"):
        raise room.error((2, 10))
    assert room.lacking((1, 71)) == (0, 1)
    with pytest.raises(StoreFullError, match=r"holds 30 bytes of messages, 71 more would come; max_bytes is 100"):
        raise room.error((1, 71))
    second = room.hold((1, 70))
    del first, second
    held[0] = (4, 100)  # they have become messages
    assert room.lacking((0, 0)) == (0, 0)
    assert room.lacking((1, 0)) == (1, 0)


def test_what_would_never_fit_is_known() -> None:
    room = Room("s", 4, 100, lambda: (0, 0))
    assert not room.is_too_small((4, 100))
    assert room.is_too_small((5, 0))
    assert room.is_too_small((1, 101))
    assert "that is more than it ever holds; send less at once, or raise the limit" in str(room.error((1, 101)))
    assert "receive and ack some, remove some if they are values of a map" in str(room.error((4, 100)))


def test_one_that_holds_more_than_it_may_shrinks_a_little_with_each() -> None:
    room = Room("s", 10, None, lambda: (5000, 0))
    assert room.to_go((1, 0), room.lacking((1, 0))) == (101, 0)
    assert Room("s", 10, None, lambda: (10, 0)).to_go((3, 0), (3, 0)) == (3, 0)
    assert Room("s", 10, None, lambda: (15, 0)).to_go((1, 0), (6, 0)) == (6, 0)


def test_what_is_given_back_is_there_again() -> None:
    room = Room("s", 1, None, lambda: (0, 0))
    for _ in range(100):
        reservation = room.hold((1, 1))
        assert room.lacking((1, 1)) == (1, 0)
        del reservation
        assert room.lacking((1, 1)) == (0, 0)


def test_interrupted_anywhere_nothing_is_reserved_for_good_or_given_back_twice() -> None:
    room = Room("s", 10, None, lambda: (0, 0))

    def use() -> None:
        first = room.hold((3, 0))
        room.hold((2, 0)).release()
        room.taken()
        first.release()

    def check(_at: int, where: str) -> None:
        assert room.taken() == (0, 0), where

    assert everywhere(lambda _: use, check) > 10


def test_a_grant_gives_back_all_of_it_once() -> None:
    freed: list[Any] = []
    rooms = [Room("s", 10, None, lambda: (0, 0)) for _ in range(2)]
    grant = Grant(freed.append)
    grant.parts += [room.hold((3, 0)) for room in rooms]
    grant.evicted = ["message"]  # type: ignore[list-item]
    assert [room.taken()[0] for room in rooms] == [3, 3]
    grant.cancel()
    grant.cancel()
    assert [room.taken()[0] for room in rooms] == [0, 0]
    assert freed == [["message"]]


def test_who_works_for_many_does_not_wait() -> None:
    assert may_wait()
    assert without_waiting(lambda: (may_wait(), without_waiting(may_wait), may_wait())) == (False, False, False)
    assert may_wait()
    with pytest.raises(ZeroDivisionError):
        without_waiting(lambda: 1 // 0)
    assert may_wait()
    assert issubclass(NoRoomYetError, StoreFullError)


def test_a_disk_has_room_above_what_is_to_stay_free(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    free = volume.free(0)
    least = free // 2
    room = DiskRoom("store 's'", tmp_path, volume, least, WhenFull.FAIL, 0.0)
    assert room.lacking((1, 1000)) == (0, 0)
    assert room.lacking((1, 0)) == (0, 0)
    assert room.lacking((1, free)) != (0, 0)
    held = room.hold((1, free))
    assert room.lacking((1, 1000)) != (0, 0)
    with pytest.raises(StoreFullError, match=f"are free on the disk of {tmp_path}.*min_free_disk is {least}"):
        raise room.error((1, 1000))
    held.release()
    volume._asked_at = -1e9
    assert room.lacking((1, 1000)) == (0, 0)


# Room in all limits at once, and the line of those who wait for some


def test_no_two_get_the_same() -> None:
    with journal() as disk:
        store = disk.create(max_messages=50)

        def reserve(_: int) -> object:
            try:
                return store.reserve([(A, Outgoing(b"x"))])
            except StoreFullError:
                return None

        with ThreadPoolExecutor(8) as pool:
            got = [one for one in pool.map(reserve, range(200)) if one is not None]
        assert len(got) == 50


@pytest.mark.parametrize("kind", [journal, onefile])
def test_what_is_written_counts_once(kind: Callable[[], AbstractContextManager[Disk]]) -> None:
    """As held or as reserved, also before its sender has been told."""
    with kind() as disk:
        store = disk.create(max_messages=2)
        of: Any = store._engine if kind is journal else store._writer
        name = "take" if kind is journal else "_done"
        written = getattr(of, name)
        seen = []

        def look(plan: Plan) -> None:
            written(plan)
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))])) as another:
                seen.append(another.result())
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))] * 2)) as another, pytest.raises(StoreFullError):
                another.result()

        setattr(of, name, look)
        store.send(A, b"1")
        assert len(seen) == 1


def test_each_part_of_a_large_send_counts_once() -> None:
    with journal() as disk:
        store = disk.create(max_messages=10, batch_bytes_max=1 << 16)
        take = store._engine.take

        def look(plan: Plan) -> None:
            take(plan)
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))] * 2)) as another:
                assert another.result() is not None
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))] * 3)) as another, pytest.raises(StoreFullError):
                another.result()
            plans.append(plan)

        plans: list[Plan] = []
        store._engine.take = look  # type: ignore[method-assign]
        store.send_many(A, [b"x" * 50_000] * 8)
        assert len(plans) > 1


def test_who_does_not_want_to_wait_is_told_at_once_and_holds_nothing() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        room = store.reserve([(A, Outgoing(b"x"))], wait=False)
        with pytest.raises(NoRoomYetError, match="max_messages is 1"):
            store.reserve([(A, Outgoing(b"x"))], wait=False)
        assert not waiting(store)
        assert room is not None
        room.cancel()
        store.send(A, b"1")


def test_whose_time_began_before_waits_for_the_rest_of_it() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"1")
        with pytest.raises(StoreFullError, match="no room came in time"):
            store.reserve([(A, Outgoing(b"x"))], since=-10 * LONG)


def test_who_came_before_is_not_passed_by_who_needs_less() -> None:
    with journal() as disk:
        store = disk.create(max_messages=3, when_full="block", block_timeout=LONG)
        store.send_many(A, [b"1", b"2"])
        with Parallel(lambda: store.commit([(B, Outgoing(b"two"))] * 2, [])) as large:
            eventually(lambda: waiting(store) == 1)
            with Parallel(lambda: store.send(B, b"one")) as small:
                eventually(lambda: waiting(store) == 2)
                take(store).ack()
                large.result()
                assert waiting(store) == 1
                take(store).ack()
                small.result()
        assert bodies(store, B) == [b"two", b"two", b"one"]


def test_many_threads_wait_in_turn(share: Share) -> None:
    """All are served, and by the order in which they came."""
    count = share.count(100, 1000)
    with memory() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"full")
        granted: list[int] = []
        limits = limits_of(store)

        def wait(number: int) -> None:
            grant = limits.reserve(store._sending.sends([(A, Outgoing(b"x"))]))
            granted.append(number)
            grant.cancel()
            limits.wake()

        threads = []
        for number in range(count):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            eventually(lambda: waiting(store) == len(threads))
        take(store).ack()
        for thread in threads:
            thread.join(PATIENCE)
        assert granted == list(range(count))


def test_who_waits_follows_a_destination_that_moves() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(B, b"1")
        future = store.send_nowait(A, b"2")
        with Parallel(lambda: store.send(A, b"3")) as sender:
            eventually(lambda: waiting(store) == 2)
            store._sending.write([CloseGate(Gate.passed(A))])
            with pytest.raises(MovedError):
                sender.result()
        with pytest.raises(MovedError):
            future.result(PATIENCE)
        assert not waiting(store)


def test_who_waits_hears_that_the_store_has_failed() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"1")
        future = store.send_nowait(A, b"2")
        with Parallel(lambda: store.send(A, b"3")) as sender:
            eventually(lambda: waiting(store) == 2)
            store._engine.fail(OSError("the disk is gone"))
            with pytest.raises(StoreFailedError):
                sender.result()
        with pytest.raises(StoreFailedError):
            future.result(PATIENCE)


@pytest.mark.parametrize("when_full", ["block", "drop_old", "drop_new"])
@pytest.mark.parametrize("kind", [journal, memory])
def test_interrupted_anywhere_nothing_is_held_for_good(
    kind: Callable[[], AbstractContextManager[Disk]], when_full: str, share: Share
) -> None:
    """A send to a store that is full, in which it waits, drops, or is dropped."""
    with kind() as disk:
        store: list[Store] = []

        def prepare(_: int) -> Callable[[], None]:
            store[:] = [disk.create(max_messages=2, when_full=when_full, block_timeout=0.002)]
            store[0].send_many(A, [b"1", b"2"])

            def send() -> None:
                try:
                    store[0].send(A, b"3")
                except StoreFullError:
                    assert when_full == "block"

            return send

        def check(_: int, where: str) -> None:
            assert not waiting(store[0]), where
            eventually(lambda: not store[0].stats().leased, lambda: where)
            left = drain(store[0])
            possible = [[b"1", b"2"]] + [[b"2", b"3"]] * (when_full == "drop_old")
            assert left in possible, where
            limits_of(store[0]).reserve(store[0]._sending.sends([(A, Outgoing(b"x"))] * 2)).cancel()
            store[0].close()

        assert everywhere(prepare, check, 40, share) > 20


def test_a_limit_of_a_destination_is_that_of_the_destination_that_is_there() -> None:
    with journal() as disk:
        store = disk.create(limits=[LimitOptions(match=("a",), max_messages=1)])
        store.send(A, b"1")
        store.delete(A)
        store.send(A, b"2")
        with pytest.raises(StoreFullError):
            store.send(A, b"3")


def test_messages_that_come_from_another_store_neither_wait_nor_make_others_go() -> None:
    with journal() as disk:
        for when_full in ("block", "drop_old", "drop_new"):
            store = disk.create(limits=[limit("a", 1)], max_messages=5, when_full=when_full)
            store.send(A, b"1")
            state = store._engine.catalog.state(A)
            with pytest.raises(StoreFullError):
                limits_of(store).reserve_moved(state, (1, 10))
            take(store).ack()
            limits_of(store).reserve_moved(state, (1, 10)).cancel()
