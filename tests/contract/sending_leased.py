"""The contract of messages that are leased to their sender from their first moment on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing, Receipt
from anabranch.policies.errors import DestinationError, StoreFullError

from .disk import PATIENCE, A, B, Disk, Parallel, T, assert_whole, bodies, drain, eventually, take
from .leasing import LONG, Lasting


def leased(store: Store, body: bytes, lease: float | None = None, **fields: Any) -> Message:
    message = store.send_leased(A, Outgoing(body, **fields), lease)
    assert isinstance(message, Message)
    message._note.kept = True
    return message


class SendingLeasedContract:
    def test_leased_to_its_sender_at_once(self, disk: Disk, store: Store) -> None:
        """Released it is at its place, and delivered again."""
        store.send(A, b"0")
        message = leased(store, b"1", headers={"n": 1}, message_id="id", priority=7, expires_at_ms=1 << 50)
        store.send(A, b"2")
        assert (message.body, message.headers, message.message_id) == (b"1", {"n": 1}, "id")
        assert (message.priority, message.expires_at_ms, message.deliveries) == (7, 1 << 50, 1)
        assert (message.destination, message.redelivered) == (A, False)
        assert bodies(store) == [b"0", b"1", b"2"]
        assert store.counts(A)[:2] == (2, 1)
        assert (store.stats().sends, store.stats().redelivered) == (3, 0)
        first, last = take(store), take(store)
        assert (first.body, last.body, store.receive(A)) == (b"0", b"2", None)
        first.release()
        message.release()
        first, back = take(store), take(store)
        assert (first.body, back.body, back.seq, back.deliveries) == (b"0", b"1", message.seq, 2)
        store.ack([first, back, last])
        assert_whole(store)
        assert bodies(disk.later(store)) == []

    def test_leased_to_its_sender_and_to_nobody_who_waits(self, store: Store) -> None:
        """Neither between store and lease, nor later; though what is sent beside it goes to them at once."""
        count = 40
        got: list[bytes] = []
        ended = threading.Event()

        def look() -> None:
            while (message := store.receive(A, 0)) is not None or not ended.is_set():
                if message is not None:
                    got.append(message.body)
                    message.ack()

        def wait() -> None:
            while (message := store.receive(A, PATIENCE)) is not None and message.body != b"end":
                got.append(message.body)
                message.ack()

        with Parallel(wait) as waiting:
            with Parallel(look) as looking:
                for number in range(count):
                    store.send(A, b"free")
                    message = leased(store, b"%d" % number)
                    if number % 2:
                        message.ack()
                ended.set()
            looking.result()
            held = store.counts(A).leased
            eventually(lambda: len(got) == count, lambda: got)
            store.send(A, b"end")
            waiting.result()
        assert held >= count // 2
        assert got == [b"free"] * count
        assert bodies(store) == [b"%d" % n for n in range(0, count, 2)] + [b"end"]

    def test_leased_to_a_sender_that_is_gone(self, disk: Disk, store: Store, place: str) -> None:
        message = leased(store, b"1")
        store.send(A, b"2")
        if place != "here":
            store = disk.later(store, place)
        else:
            message.release(delivered=False)
        found = [] if store.volatile and place != "here" else [b"1", b"2"]
        assert drain(store) == found
        assert_whole(store)

    def test_leased_to_its_sender_for_so_long(self, store: Store, lasting: Lasting) -> None:
        leased(store, b"1", LONG)
        forever = leased(store, b"2")
        assert store.receive(A) is None
        lasting.go_on(store)
        back = take(store)
        assert (back.body, back.deliveries, store.receive(A)) == (b"1", 2, None)
        forever.ack()

    def test_leased_to_its_sender_it_is_stored_once(self, store: Store) -> None:
        first = leased(store, b"1", message_id="id")
        assert store.send_leased(A, Outgoing(b"2", message_id="id")) == Receipt(A, first.seq, True)
        assert store.send(A, b"3", message_id="id").duplicate
        first.ack()
        assert store.send_leased(A, Outgoing(b"4", message_id="id")) == Receipt(A, first.seq, True)
        assert store.send(B, b"5", message_id="id").duplicate is False
        assert (bodies(store), bodies(store, B)) == ([], [b"5"])

    @pytest.mark.parametrize(
        ("message", "why"),
        [
            (Outgoing(b"1", group="g"), "has a group"),
            (Outgoing(b"1", headers={"message_group": "g"}), "has a group"),
            (Outgoing(b"1", deliver_at_ms=1 << 50), "waits for its time"),
            (Outgoing(b"1", persistent=False), "is not persistent"),
        ],
    )
    def test_leased_to_its_sender_is_not_what_cannot_be(self, store: Store, message: Outgoing, why: str) -> None:
        with pytest.raises(ValueError, match=f"a message that {why}"):
            store.send_leased(A, message)
        with pytest.raises(DestinationError, match="topic://t is no queue"):
            store.send_leased(T, Outgoing(b"1"))
        with pytest.raises(ValueError, match="lease"):
            store.send_leased(A, Outgoing(b"1"), -1)
        with pytest.raises(TypeError):
            store.send_leased(A, Outgoing("1"))  # type: ignore[arg-type]
        assert list(store.destinations()) == []

    def test_leased_to_its_sender_among_groups(self, store: Store) -> None:
        """A message without a group is held by itself."""
        store.send_many(A, [Outgoing(b"a1", group="a"), Outgoing(b"a2", group="a")])
        held = take(store)
        message = leased(store, b"1")
        store.send(A, Outgoing(b"a3", group="a")[0], {"message_group": "a"})
        assert (held.body, store.receive(A)) == (b"a1", None)
        held.ack()
        second = take(store)
        assert (second.body, store.receive(A)) == (b"a2", None)
        message.release()
        assert take(store).body == b"1"
        second.ack()
        assert take(store).body == b"a3"

    def test_leased_to_its_sender_among_transient_ones(self, store: Store) -> None:
        store.send(A, b"0", persistent=False)
        message = leased(store, b"1")
        store.send(A, b"2", persistent=False)
        assert [take(store).body for _ in range(2)] == [b"0", b"2"] and store.receive(A) is None
        message.release()
        assert take(store).body == b"1"

    def test_leased_to_its_sender_it_counts_as_delivered(self, disk: Disk) -> None:
        store = disk.create(max_deliveries=2, dead_letter="dead", count_deliveries="on_receive")
        message = leased(store, b"1")
        (looked,) = store.browse(A)
        assert (message.deliveries, looked.deliveries) == (1, 1)
        message.release()
        take(store).release()
        assert store.receive(A) is None

    def test_leased_to_its_sender_or_not_stored_for_want_of_leases(self, disk: Disk) -> None:
        store = disk.create(max_leases=1)
        message = leased(store, b"1")
        with pytest.raises(StoreFullError, match="max_leases is 1"):
            store.send_leased(A, Outgoing(b"2"))
        message.ack()
        leased(store, b"3")
        assert bodies(store) == [b"3"]

    @pytest.mark.parametrize("when_full", ["fail", "drop_new", "drop_old"])
    def test_leased_to_its_sender_where_there_is_room(self, disk: Disk, when_full: str) -> None:
        store = disk.create(max_messages=2, when_full=when_full)
        store.send(A, b"1")
        leased(store, b"2")
        if when_full == "fail":
            with pytest.raises(StoreFullError):
                store.send_leased(A, Outgoing(b"3"))
        elif when_full == "drop_new":
            assert store.send_leased(A, Outgoing(b"3")) == Receipt(A, -1)
        else:
            leased(store, b"3")
        assert bodies(store) == ([b"2", b"3"] if when_full == "drop_old" else [b"1", b"2"])
        assert store.receive(A) is None or when_full != "drop_old"

    def test_leased_to_its_sender_by_priority(self, disk: Disk) -> None:
        store = disk.create(priorities=True)
        store.send(A, b"1", priority=4)
        message = leased(store, b"2", priority=9)
        assert take(store).body == b"1" and store.receive(A) is None
        store.send(A, b"3", priority=4)
        message.release()
        assert drain(store) == [b"2", b"3"]
