"""The contract of deliveries that are counted before a message is handed out (`count_deliveries: on_receive`)."""

from __future__ import annotations

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DELIVERY_LIMIT, Message, Outgoing
from anabranch.adapters.core.store_types import Settlement, Subscription
from anabranch.policies.errors import StoreFailedError, StoreFullError

from .disk import PATIENCE, A, B, Disk, T, assert_whole, bodies, drain, eventually, survives, take
from .expiring import undelivered
from .leasing import LONG, Lasting
from .preparing import claim, prepare

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def counting(disk: Disk, **options: object) -> Store:
    return disk.create(count_deliveries="on_receive", **options)


def counts(store: Store) -> list[int]:
    """How often each of A was delivered, as it is stored."""
    return [message.deliveries for message in store.browse(A)]


class CountingContract:
    @survives
    @pytest.mark.parametrize("ended", ["closed", "crashed"])
    def test_a_process_that_ends_has_been_counted(self, disk: Disk, ended: str) -> None:
        """Whatever it held, be it in a batch, in a transaction, or in a callback."""
        store = counting(disk)
        store.send_many(A, [b"%d" % n for n in range(6)])
        take(store)
        store.claim(take(store))
        store.receive_many(A, 2)
        heard: list[Message] = []
        listener = store.listen(A, heard.append)
        eventually(lambda: heard)
        store = disk.later(store, ended)
        assert counts(store) == [1, 1, 1, 1, 1, 0]
        assert [message.deliveries for message in store.receive_many(A, 9)] == [2, 2, 2, 2, 2, 1]
        listener.close()
        assert_whole(store)

    def test_it_is_counted_once(self, disk: Disk, place: str) -> None:
        store = counting(disk)
        store.send_many(A, [b"1", b"2"])
        for expected in range(1, 5):
            message = take(store)
            assert (message.body, message.deliveries) == (b"1", expected)
            assert counts(store) == [expected, 0]
            message.release()
        store = disk.later(store, place)
        assert counts(store) == [4, 0]
        message = take(store)
        assert message.deliveries == 5
        message.ack()
        assert drain(store) == [b"2"]
        assert_whole(store)

    def test_one_that_was_not_delivered_is_counted_no_more(self, disk: Disk, place: str) -> None:
        store = counting(disk)
        store.send_many(A, [b"1", b"2"])
        take(store).release()
        for _ in range(3):
            message = take(store)
            assert message.deliveries == 2
            message.release(delivered=False)
        store = disk.later(store, place)
        assert counts(store) == [1, 0]

    @survives
    def test_it_ends_its_process_no_more_than_so_often(self, disk: Disk) -> None:
        store = counting(disk, max_deliveries=3, dead_letter="dlq")
        store.send_many(A, [b"1", b"2"])
        for expected in (1, 2, 3):
            message = take(store)
            assert (message.body, message.deliveries) == (b"1", expected)
            store = disk.crash(store)
        assert take(store).body == b"2"
        ((message, reason),) = undelivered(store)
        assert (message.body, reason, message.deliveries) == (b"1", DELIVERY_LIMIT, 4)
        store = disk.crash(store)  # who dead-letters it may be killed as often as you like
        ((message, _),) = undelivered(store)
        message.ack()
        assert drain(store) == [b"2"]

    def test_a_lease_that_runs_out_is_counted_once(self, disk: Disk, lasting: Lasting, place: str) -> None:
        store = counting(disk, lease_timeout=LONG)
        store.send(A, b"1")
        take(store)
        lasting.go_on(store)
        assert take(store).deliveries == 2
        store = disk.later(store, place)
        assert counts(store) == [2]

    def test_rollbacks(self, disk: Disk, place: str) -> None:
        """Each counts once, whether it is rolled back here or by another process."""
        store = counting(disk)
        store.send_many(A, [b"1", b"2", b"3"])
        store.unclaim([claim(store)])
        first = claim(store)
        second = claim(store)
        name = prepare(store, 1, (), [first, second])
        assert counts(store) == [2, 1, 0]
        store = disk.later(store, place)
        store.rollback_prepared(name).wait()
        assert counts(store) == [2, 1, 0]
        assert [message.deliveries for message in store.receive_many(A, 9)] == [3, 2, 1]

    def test_commits(self, disk: Disk, place: str) -> None:
        store = counting(disk)
        store.send_many(A, [b"1", b"2"])
        store.commit([(B, Outgoing(b"b"))], [claim(store)])
        name = prepare(store, 1, [(B, Outgoing(b"c"))], [claim(store)])
        store = disk.later(store, place)
        store.commit_prepared(name).wait()
        assert (bodies(store), bodies(store, B)) == ([], [b"b", b"c"])
        assert_whole(store)

    def test_of_a_topic(self, disk: Disk, place: str) -> None:
        store = counting(disk)
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(T, b"1")
        take(store, T, 0, DESK.key).release()
        take(store, T, 0, DESK.key)
        store = disk.later(store, place)
        found = [[m.deliveries for m in store.browse(T, subscription=one.key)] for one in (DESK, BOOK)]
        assert found == [[2], [0]]

    @pytest.mark.parametrize("priorities", [False, True])
    def test_of_those_that_are_not_persistent(self, disk: Disk, priorities: bool) -> None:
        store = counting(disk, priorities=priorities, max_deliveries=2, dead_letter="dlq")
        store.send(A, b"1", persistent=False)
        store.send(A, b"2")
        held: list[Message] = []
        for expected in (1, 2):
            for body in (b"1", b"2"):
                message = take(store)
                assert (message.body, message.deliveries) == (body, expected)
                held.append(message)
            store.release([held.pop(), held.pop()])
        assert store.receive(A) is None
        assert sorted(message.body for message, _ in undelivered(store)) == [b"1", b"2"]

    def test_who_keeps_up_is_counted_too(self, disk: Disk) -> None:
        """What is passed on to receivers without being looked up."""
        store = counting(disk)
        for number in range(50):
            store.send(A, b"%d" % number)
            message = take(store, A, PATIENCE)
            assert (message.body, message.deliveries) == (b"%d" % number, 1)
            if number % 3 == 0:
                store.settle([store.token(message)], Settlement.RELEASE)
                again = take(store)
                assert (again.seq, again.deliveries) == (message.seq, 2)
                again.ack()
            else:
                message.ack()
        assert drain(store) == []
        assert_whole(store)

    def test_on_a_full_disk_they_are_handed_out_uncounted(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        store = counting(disk)
        store.send(A, b"1")

        def full(changes: object) -> None:
            raise StoreFullError("full")

        with monkeypatch.context() as patches:
            patches.setattr(store._settling, "_write_unsynced", full)
            message = take(store)
            assert (message.deliveries, counts(store)) == (1, [0])
        message.release()
        assert (counts(store), take(store).deliveries) == ([1], 2)

    def test_what_cannot_be_counted_is_not_handed_out(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        store = counting(disk)
        store.send_many(A, [b"1", b"2"])

        def away(changes: object) -> None:
            raise StoreFailedError("its database is away")

        with monkeypatch.context() as patches:
            patches.setattr(store._settling, "_write_unsynced", away)
            with pytest.raises(StoreFailedError):
                store.receive(A)
            with pytest.raises(StoreFailedError):
                store.receive_many(A, 2)
            ended: list[Exception] = []
            listener = store.listen(A, print, on_end=ended.append)
            eventually(lambda: ended)
            listener.close()
        assert store.counts(A) == (2, 0, 0, 0)
        assert [message.deliveries for message in store.receive_many(A, 9)] == [1, 1]
