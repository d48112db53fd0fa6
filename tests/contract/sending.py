"""The contract of send, send_many and send_nowait."""

from __future__ import annotations

import concurrent.futures
import enum
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing, Receipt
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import MessageTooLargeError
from anabranch.policies.names.destination import NAME_BYTES_MAX, Destination

from .disk import PATIENCE, A, B, C, Disk, assert_whole, bodies, drain, in_one_store, survives, take

NAMES = [
    "x" * NAME_BYTES_MAX,
    "ü" * (NAME_BYTES_MAX // 2),
    "a/b/../c",
    "..",
    ".",
    "a..b",
    "%00",
    "\x01\x7f\u2028\ufeff",
    "spaces and \n lines",
    "\U0001f600.\U0001f600",
    "queue",
]


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    """A str to everybody, of another type."""

    __slots__ = ()


HEADERS: dict[str, Any] = {
    "text": "väl\U0001f600ue",
    "": "an empty name",
    "nul \0 in it": "a\0b",
    "int": -5,
    "largest": 2**64 - 1,
    "smallest": -(2**63),
    "float": 1.5,
    "infinite": float("inf"),
    "true": True,
    "false": False,
    "bytes": b"\x00\xff",
    "none": None,
}


class SendingContract:
    def test_a_message_comes_back_as_it_was_sent(self, store: Store) -> None:
        receipt = store.send(A, b"body", HEADERS, "id-1")
        assert receipt == Receipt(A, receipt.seq, False)
        for message in (next(store.browse(A)), take(store)):
            assert message.body == b"body"
            assert message.headers == HEADERS
            assert {name: type(value) for name, value in message.headers.items()} == {
                name: type(value) for name, value in HEADERS.items()
            }
            assert message.message_id == "id-1"
            assert message.destination == A
            assert message.seq == receipt.seq
            assert message.timestamp_ms > 1_600_000_000_000
            assert message._store.store_id == store.store_id

    def test_nothing_attached_comes_back_as_nothing(self, store: Store) -> None:
        store.send(A, b"x")
        store.send(A, b"y", {})
        for message in store.browse(A):
            assert message.headers == {}
            assert message.message_id is None

    @survives
    def test_headers_come_back_after_reopening(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x", HEADERS, "id")
        store.close()
        message = take(disk.reopen(store))
        assert (message.headers, message.message_id) == (HEADERS, "id")

    @pytest.mark.parametrize("size", [0, 1, 63 * 1024, 64 * 1024, 300_000])
    def test_bodies_of_all_sizes(self, disk: Disk, store: Store, size: int) -> None:
        body = bytes(range(256)) * (size // 256) + bytes(size % 256)
        store.send(A, b"before")
        store.send(A, body)
        store.send(A, b"after")
        assert bodies(store) == [b"before", body, b"after"]
        again = disk.later(store, "closed")
        assert drain(again) == [b"before", body, b"after"]
        assert_whole(again)

    @pytest.mark.parametrize("mib", [40])
    def test_a_body_of_many_mib(self, disk: Disk, mib: int) -> None:
        store = disk.create(message_bytes_max=(mib + 1) * 1024 * 1024)
        body = bytes(range(256)) * (mib * 4096)
        store.send(A, body)
        store.send(A, b"after")
        store = disk.later(store, "closed")
        message = take(store)
        assert message.body == body
        message.ack()
        assert drain(store) == [b"after"]
        assert_whole(store)

    @pytest.mark.parametrize("body", [bytearray(b"abc"), memoryview(b"xabcx")[1:4]])
    def test_any_bytes_are_a_body(self, store: Store, body: Any) -> None:
        store.send(A, body)
        assert bodies(store) == [b"abc"]

    def test_a_body_is_copied_when_it_can_change(self, store: Store) -> None:
        body = bytearray(b"abc")
        future = store.send_nowait(A, body)  # type: ignore[arg-type]
        body[:] = b"xyz"
        future.result(PATIENCE)
        assert bodies(store) == [b"abc"]

    @in_one_store("body", ["text", None, 5, [b"x"], object()])
    def test_what_is_not_bytes_is_refused(self, store: Store, body: Any) -> None:
        for send in (store.send, store.send_nowait):
            with pytest.raises(TypeError, match="bytes"):
                send(A, body)
        with pytest.raises(TypeError, match="bytes"):
            store.send_many(A, [body])
        with pytest.raises(TypeError, match="bytes"):
            store.commit([(A, Outgoing(body))], [])
        assert bodies(store) == []

    @in_one_store(
        "headers",
        [{1: "x"}, {"x": [1j]}, {"x": {1: 2}}, {"x": object()}, {b"x": 1}, {"x": bytearray(b"y")}, ["x"], "x"],
    )
    def test_headers_that_are_not_plain_are_refused(self, store: Store, headers: Any) -> None:
        with pytest.raises(TypeError, match="header"):
            store.send(A, b"x", headers)
        assert bodies(store) == []

    @in_one_store("headers", [{"x": 2**64}, {"x": -(2**63) - 1}, {"x": "\ud800"}, {"\ud800": 1}])
    def test_header_values_that_cannot_be_kept_are_refused(self, store: Store, headers: Any) -> None:
        with pytest.raises(ValueError, match=r"header|surrogate"):
            store.send(A, b"x", headers)
        assert bodies(store) == []

    def test_headers_of_derived_types_come_back_plain(self, store: Store) -> None:
        store.send(A, b"x", {"colour": Colour.RED, Text("name"): Text("text")})
        assert next(store.browse(A)).headers == {"colour": 1, "name": "text"}

    @in_one_store("message_id", [b"bytes", 5, ["x"]])
    def test_a_message_id_is_a_str(self, store: Store, message_id: Any) -> None:
        with pytest.raises(TypeError, match="message_id"):
            store.send(A, b"x", None, message_id)
        assert bodies(store) == []

    @in_one_store("message_id", ["", "x" * 1025, "\ud800"])
    def test_a_message_id_has_a_length(self, store: Store, message_id: str) -> None:
        with pytest.raises(ValueError, match=r"message_id|surrogate"):
            store.send(A, b"x", None, message_id)
        assert bodies(store) == []

    @pytest.mark.parametrize("names", [NAMES[::2], NAMES[1::2]], ids=["some", "others"])
    def test_names_of_all_kinds(self, disk: Disk, store: Store, names: list[str]) -> None:
        queues = [Destination.parse(f"queue://{name}") for name in names]
        topics = [Destination.parse(f"topic://{name}") for name in names]
        for number, (queue, topic) in enumerate(zip(queues, topics, strict=True)):
            store.subscribe(Subscription(topic, "desk"))
            store.send(queue, b"q%d" % number)
            store.send(topic, b"t%d" % number)
        again = disk.later(store, "closed")
        assert set(again.destinations()) == {*queues, *topics}
        for number, (queue, topic) in enumerate(zip(queues, topics, strict=True)):
            assert drain(again, queue) == [b"q%d" % number]
            assert drain(again, topic, ("", "desk")) == [b"t%d" % number]
        assert_whole(again)

    def test_seqs_grow_over_all_destinations(self, store: Store) -> None:
        seqs = [store.send(destination, b"x").seq for destination in (A, B, A, C, B)]
        assert seqs == sorted(set(seqs))
        assert seqs[0] > 0

    def test_destinations_are_separate(self, store: Store) -> None:
        store.send(A, b"a")
        store.send(B, b"b")
        store.send(C, b"c")
        assert (bodies(store, A), bodies(store, B), bodies(store, C)) == ([b"a"], [b"b"], [b"c"])

    def test_send_is_seen_on_return(self, store: Store) -> None:
        for count in range(1, 30):
            store.send(A, b"x")
            assert store.depth(A) == count
        assert len(bodies(store)) == 29

    @survives
    def test_sync_of_one_message(self, disk: Disk, store: Store) -> None:
        before = store.stats().syncs
        store.send(A, b"x", sync=True)
        assert store.stats().syncs > before

    def test_a_message_too_large_is_refused(self, disk: Disk) -> None:
        store = disk.create(message_bytes_max=1000)
        store.send(A, b"x" * 500)
        for call in (
            lambda: store.send(A, b"x" * 1001),
            lambda: store.send(A, b"x", {"header": "h" * 1001}),
            lambda: store.send_nowait(A, b"x" * 1001),
            lambda: store.commit([(A, Outgoing(b"y")), (A, Outgoing(b"x" * 1001))], []),
        ):
            with pytest.raises(MessageTooLargeError, match="1000"):
                call()
        assert bodies(store) == [b"x" * 500]

    # send_many

    def test_send_many_keeps_order(self, disk: Disk, store: Store) -> None:
        sent: list[Outgoing | bytes] = [Outgoing(b"0", {"n": 0}, "id-0"), b"1", Outgoing(b"2"), b""]
        receipts = store.send_many(A, sent)
        assert [receipt.seq for receipt in receipts] == sorted({receipt.seq for receipt in receipts})
        messages = list(store.browse(A))
        assert [m.body for m in messages] == [b"0", b"1", b"2", b""]
        assert [m.seq for m in messages] == [receipt.seq for receipt in receipts]
        assert (messages[0].headers, messages[0].message_id) == ({"n": 0}, "id-0")

    def test_send_many_of_nothing(self, store: Store) -> None:
        assert store.send_many(A, []) == []
        assert bodies(store) == []

    def test_send_many_takes_an_iterator(self, store: Store) -> None:
        store.send_many(A, (str(n).encode() for n in range(5000)))
        assert bodies(store) == [str(n).encode() for n in range(5000)]
        assert_whole(store)

    def test_send_many_waits_for_the_disk_less_often(self, store: Store) -> None:
        before = store.stats()
        store.send_many(A, [b"x" * 10] * 1000)
        after = store.stats()
        assert after.batches - before.batches < 50
        assert after.sends - before.sends == 1000

    def test_send_many_more_than_a_file_holds(self, disk: Disk, store: Store) -> None:
        sent = [bytes([n % 256]) * 1000 for n in range(300)]
        store.send_many(A, sent)
        again = disk.later(store, "closed")
        assert bodies(again) == sent
        assert_whole(again)

    # send_nowait

    def test_send_nowait_resolves_with_the_receipt(self, store: Store) -> None:
        receipt = store.send_nowait(A, b"x", {"n": 1}, "id").result(PATIENCE)
        (message,) = store.browse(A)
        assert receipt == Receipt(A, message.seq, False)
        assert (message.headers, message.message_id) == ({"n": 1}, "id")

    def test_send_nowait_keeps_order(self, store: Store) -> None:
        futures = [store.send_nowait(A, str(n).encode()) for n in range(500)]
        receipts = [future.result(PATIENCE) for future in futures]
        assert [r.seq for r in receipts] == sorted({r.seq for r in receipts})
        assert bodies(store) == [str(n).encode() for n in range(500)]

    def test_sends_of_one_thread_keep_order_waiting_or_not(self, store: Store) -> None:
        for n in range(50):
            store.send_nowait(A, str(2 * n).encode())
            store.send(A, str(2 * n + 1).encode())
        assert bodies(store) == [str(n).encode() for n in range(100)]

    def test_a_resolved_future_is_seen(self, store: Store) -> None:
        seen: list[int] = []
        done = threading.Event()

        def look(_: Future[Receipt]) -> None:
            seen.append(store.depth(A))
            done.set()

        store.send_nowait(A, b"x").add_done_callback(look)
        assert done.wait(PATIENCE)
        assert seen == [1]

    def test_a_callback_may_call_the_store(self, store: Store) -> None:
        """Rule G4: callbacks run when no lock is held. One that sends, receives and acks neither hangs nor fails."""
        done = threading.Event()
        seen: list[bytes] = []

        def again(_: Future[Receipt]) -> None:
            store.send(B, b"from the callback")
            store.send_nowait(B, b"too").add_done_callback(last)

        def last(_: Future[Receipt]) -> None:
            seen.extend(drain(store, B))
            done.set()

        store.send_nowait(A, b"x").add_done_callback(again)
        assert done.wait(PATIENCE)
        assert seen == [b"from the callback", b"too"]

    def test_a_send_under_way_cannot_be_cancelled(self, store: Store) -> None:
        """It may be on its way to the disk: a future that said `cancelled` would lie."""
        futures = [store.send_nowait(A, b"x") for _ in range(200)]
        assert not any(future.cancel() for future in futures)
        done, pending = concurrent.futures.wait(futures, PATIENCE)
        assert (len(done), len(pending)) == (200, 0)
        assert store.depth(A) == 200

    def test_close_finishes_what_is_queued(self, disk: Disk, store: Store) -> None:
        futures = [store.send_nowait(A, str(n).encode()) for n in range(300)]
        store.close()
        assert all(isinstance(future.result(PATIENCE), Receipt) for future in futures)
        if not disk.volatile:
            assert bodies(disk.reopen(store)) == [str(n).encode() for n in range(300)]
