"""The contract of bodies of any size: read from files, kept apart from their messages, and gone with them (rule J9)."""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import io
import os
import random
import threading
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.record.large import CHUNK_BYTES, Sized, StoredBody, named_by, start_of
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import (
    ClosedError,
    LargeMessageError,
    MessageTooLargeError,
    StoreFailedError,
    StoreFullError,
)
from anabranch.policies.names.destination import Destination

from .disk import A, B, Disk, T, assert_whole, in_one_store, survives, take
from .features import bodies_of
from .preparing import prepare, transaction

SMALL = 2000
"""Bytes of a body that is large where `large_message_size` is 1024."""
DESK, LAMP = Subscription(T, "desk", "c1"), Subscription(T, "lamp", "c1")


def body(size: int = SMALL, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@functools.singledispatch
def kept(store: Store) -> int:
    """How many bodies the store has, once it has removed those that nobody needs."""
    gc.collect()
    with bodies_of(store)._work:  # not while it does so by itself
        bodies_of(store).tidy()
    return len(list(bodies_of(store).storage.kept()))


def contents(store: Store, destination: Destination = A) -> list[bytes]:
    return [message.read() for message in store.browse(destination)]


class _Breaking(io.RawIOBase):
    """A file whose disk fails half way."""

    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            raise OSError(5, "the disk has failed")
        self._left -= 1
        return b"x"


class LargeContract:
    @pytest.fixture
    def large(self, disk: Disk) -> Store:
        """A store for which little is large."""
        return disk.create(large_message_size=1024)

    @pytest.mark.parametrize("size", [1025, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
    def test_what_a_file_holds_is_received(self, disk: Disk, large: Store, place: str, size: int) -> None:
        sent = body(size)
        large.send(A, io.BytesIO(sent), {"h": 1}, "id", priority=7)
        large.send(A, b"behind")
        store = disk.later(large, place)
        message = take(store)
        assert (message.size, message.headers, message.message_id, message.priority) == (size, {"h": 1}, "id", 7)
        assert message.is_large
        with message.open() as stream:
            assert hashlib.sha256(stream.read()).digest() == hashlib.sha256(sent).digest()
            assert stream.read() == b""
            assert (stream.seek(size - 5), stream.read(), stream.tell()) == (size - 5, sent[-5:], size)
            assert stream.seek(-2, os.SEEK_END) == size - 2
            stream.seek(max(0, CHUNK_BYTES - 3))
            assert stream.read(6) == sent[CHUNK_BYTES - 3 :][:6]
        message.ack()
        assert take(store).body == b"behind"
        del message
        assert kept(store) == 0
        assert_whole(store)

    def test_a_short_file_becomes_a_message_as_others(self, large: Store) -> None:
        for sent in (b"", b"abc", body(1024)):
            large.send(A, io.BytesIO(sent))
            message = take(large)
            assert (message.body, message.size, message.is_large) == (sent, len(sent), False)
            assert (message.open().read(), message.read()) == (sent, sent)
            message.ack()
        assert kept(large) == 0

    def test_bytes_stay_in_their_message(self, large: Store) -> None:
        large.send(A, body(SMALL))
        large.send(A, bytearray(body(SMALL)))  # type: ignore[arg-type]
        assert [message.body for message in large.browse(A)] == [body(SMALL)] * 2
        assert kept(large) == 0

    def test_its_body_is_not_in_memory_unless_asked_for(self, large: Store) -> None:
        large.send(A, io.BytesIO(body()))
        message = take(large)
        with pytest.raises(LargeMessageError, match=r"message.open\(\)"):
            message.body  # noqa: B018
        with pytest.raises(MessageTooLargeError, match="limit of 1999"):
            message.read(1999)
        assert message.read(SMALL) == body()
        assert f"{SMALL} bytes" in repr(message)

    def test_what_is_no_seekable_file_is_read_as_it_comes(self, large: Store) -> None:
        reading, writing = os.pipe()
        sent = body(200_000)

        def write() -> None:
            with os.fdopen(writing, "wb", buffering=0) as file:
                for start in range(0, len(sent), 777):
                    file.write(sent[start : start + 777])

        thread = threading.Thread(target=write)
        thread.start()
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            large.send(A, pipe)
        thread.join()
        assert contents(large) == [sent]

    @in_one_store(
        "given, error, says",
        [
            (_Breaking(1500), OSError, "the disk has failed"),
            (_Breaking(10), OSError, "the disk has failed"),
            (io.StringIO("x" * 5000), TypeError, "reads str instead of bytes"),
            (Sized(io.BytesIO(body()), SMALL + 1), ValueError, f"{SMALL} bytes, and size says {SMALL + 1}"),
            (Sized(io.BytesIO(body()), SMALL - 1), ValueError, f"at least {SMALL} bytes, and size says {SMALL - 1}"),
            (Sized(io.BytesIO(b"abc"), 2), ValueError, "3 bytes, and size says 2"),
            (Sized(b"abc", 2), ValueError, "3 bytes, and size says 2"),
            (Sized(io.BytesIO(b"abc"), -1), ValueError, "not -1"),
            (Sized(io.BytesIO(b"abc"), "2"), TypeError, "not str"),  # type: ignore[arg-type]
            (7, TypeError, "not int"),
        ],
    )
    def test_what_is_no_body_leaves_nothing(self, large: Store, given: Any, error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            large.send(A, copy.deepcopy(given))  # it is read, and other stores are given the same
        closed = io.BytesIO(body())
        closed.close()
        with pytest.raises(ValueError, match="closed"):
            large.send(A, closed)
        assert (contents(large), kept(large), large.stats().sends) == ([], 0, 0)

    def test_in_a_row_with_others(self, large: Store) -> None:
        large.send_many(A, [b"1", Outgoing(io.BytesIO(body())), Outgoing(b"3"), Outgoing(io.BytesIO(b"4"), {"h": 1})])
        assert contents(large) == [b"1", body(), b"3", b"4"]
        assert large.send_nowait(A, io.BytesIO(body(seed=2))).result(60).seq
        assert contents(large)[-1] == body(seed=2)
        assert kept(large) == 2

    def test_a_duplicate_leaves_nothing(self, disk: Disk, large: Store, place: str) -> None:
        first = large.send(A, io.BytesIO(body()), None, "id")
        store = disk.later(large, place)
        again = store.send(A, io.BytesIO(body(seed=2)), None, "id")
        assert (again.seq, again.duplicate) == (
            (first.seq, True) if not store.volatile or store is large else again[1:]
        )
        store.send(B, b"who writes keeps what was written last")
        assert (contents(store), kept(store)) == ([body()], 1)

    def test_who_holds_it_may_read_it_though_it_is_acked(self, large: Store) -> None:
        large.send(A, io.BytesIO(body(CHUNK_BYTES + 9)))
        message = take(large)
        stream = message.open()
        start = stream.read(10)
        message.ack()
        assert kept(large) == 1
        assert start + stream.read() == body(CHUNK_BYTES + 9)
        del message
        assert kept(large) == 1
        stream.close()
        del stream
        assert kept(large) == 0

    def test_nothing_is_read_of_a_closed_store(self, disk: Disk, large: Store) -> None:
        large.send(A, io.BytesIO(body(CHUNK_BYTES + 9)))
        message = next(iter(large.browse(A)))
        stream = message.open()
        assert not large.retire()
        stream.read(10)
        large.close()
        with pytest.raises(ClosedError):
            stream.read()
        with pytest.raises(ClosedError):
            message.open()
        stream.close()
        disk.reopen(large)

    def test_who_still_holds_it_when_its_store_is_closed_keeps_nothing(self, disk: Disk, large: Store) -> None:
        large.send(A, io.BytesIO(body()))
        large.send(A, io.BytesIO(body(seed=2)))
        acked, unsent = take(large), large.keep(io.BytesIO(body(seed=3)))
        acked.ack()
        storage = bodies_of(large).storage
        large.close()
        if not large.volatile and (large.directory / "large").exists():
            assert len(list(storage.kept())) == 1
        again = disk.reopen(large)
        assert contents(again) == ([] if again.volatile else [body(seed=2)])
        del acked, unsent

    def test_a_store_in_which_a_body_waits_for_its_message_is_not_idle(self, large: Store) -> None:
        waiting = large.keep(io.BytesIO(body()))
        assert isinstance(waiting, StoredBody)
        assert not large.retire()
        del waiting
        assert kept(large) == 0
        assert large.retire()

    # Transactions

    def test_a_commit_sends_it_and_nothing_else_is_left(self, disk: Disk, large: Store, place: str) -> None:
        large.send(A, io.BytesIO(body()))
        message = take(large)
        large.claim(message)
        large.commit([(B, Outgoing(io.BytesIO(body(seed=2)))), (B, Outgoing(b"x"))], [message])
        del message
        store = disk.later(large, place)
        assert (contents(store), contents(store, B)) == ([], [body(seed=2), b"x"])
        assert kept(store) == 1
        assert_whole(store)

    def test_what_is_not_sent_is_gone(self, disk: Disk, large: Store) -> None:
        """Also if the process ends before anybody says so."""
        waiting = large.keep(io.BytesIO(body()))
        assert kept(large) == 1
        assert kept(disk.crash(large)) == 0
        del waiting
        assert kept(large) == 0

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_a_branch_keeps_it_until_its_outcome(self, disk: Disk, large: Store, place: str, outcome: str) -> None:
        large.send(A, io.BytesIO(body(seed=3)))
        message = take(large)
        large.claim(message)
        prepare(large, 1, [(B, Outgoing(io.BytesIO(body())))], [message])
        del message
        assert kept(large) == 2
        store = disk.later(large, place)
        assert kept(store) == 2
        assert not store.retire()
        getattr(store, f"{outcome}_prepared")(transaction(1)).wait()
        expected = ([], [body()]) if outcome == "commit" else ([body(seed=3)], [])
        for one in disk.views(store):
            assert (contents(one), contents(one, B)) == expected
            assert kept(one) == 1
            assert_whole(one)

    @survives
    def test_a_branch_that_outlives_messages_which_do_not_keeps_it(self, disk: Disk, large: Store) -> None:
        """These had seqs of their own, which nobody knows of after a crash: what is committed then comes behind them
        all the same, and each later open finds that it names its body (rule A5)."""
        large.send(A, b"x")
        for _ in range(3):
            large.send(A, b"x", persistent=False)
            large.send(B, io.BytesIO(body(seed=3)), persistent=False)
        take(large).ack()
        prepare(large, 1, [(B, Outgoing(io.BytesIO(body())))])
        store = disk.crash(large)
        store.commit_prepared(transaction(1)).wait()
        for _ in range(2):
            assert (contents(store, B), kept(store)) == ([body()], 1)
            assert_whole(store)
            store = disk.reopen(store)
        store = disk.crash(store)
        assert (contents(store, B), kept(store)) == ([body()], 1)

    # Which message names it

    @survives
    def test_a_body_is_found_without_its_note(self, disk: Disk, large: Store) -> None:
        for seed in (1, 2):
            large.send(A, io.BytesIO(body(seed=seed)))
            large.send_many(A, [b"between"] * 300)
        for note in (named_by(0, 0), named_by(1, 2), named_by(9, 9), b"\xff" * 16):
            for name, start in list(bodies_of(large).storage.kept()):
                assert start is not None
                bodies_of(large).storage.note(name, note, sync=True)
            later = disk.crash(large)
            assert [found for found in contents(later) if found != b"between"] == [body(seed=1), body(seed=2)]
            assert kept(later) == 2

    @survives
    def test_what_a_crash_leaves_half_written_is_removed(self, disk: Disk, large: Store) -> None:
        large.send(A, io.BytesIO(body()))
        storage = bodies_of(large).storage
        for name in (b"begun" * 3 + b".", b"with a chunk...."):
            storage.begin(name, start_of(name, 0))
        storage.append(b"with a chunk....", 0, b"1234" + body(), CHUNK_BYTES)
        later = disk.crash(large)
        assert (contents(later), kept(later)) == ([body()], 1)

    def test_one_body_of_two_messages_goes_with_the_second(self, disk: Disk, large: Store, place: str) -> None:
        large.send(A, io.BytesIO(body()))
        kept(large)
        (found,) = large.browse(A)
        large.send(B, found.content)
        del found
        store = disk.later(large, place)
        assert kept(store) == 1
        take(store).ack()
        store = disk.later(store, place)
        assert (contents(store), contents(store, B), kept(store)) == ([], [body()], 1)
        assert_whole(store)
        take(store, B).ack()
        assert kept(store) == 0

    # What ends a message

    def test_a_topics_goes_with_the_last_that_acks_it(self, disk: Disk, large: Store, place: str) -> None:
        large.subscribe(DESK)
        large.subscribe(LAMP)
        large.send(T, io.BytesIO(body()))
        store = disk.later(large, place)
        for subscription, left in (DESK, 1), (LAMP, 0):
            message = take(store, T, subscription=subscription.key)
            assert message.read() == body()
            message.ack()
            del message
            assert kept(store) == left
        assert_whole(store)

    def test_a_topics_that_nobody_wants_is_not_kept(self, large: Store) -> None:
        large.send(T, io.BytesIO(body()))
        assert kept(large) == 0

    @pytest.mark.parametrize("how", ["purge", "delete", "unsubscribe", "expire"])
    def test_whatever_ends_a_message_ends_its_body(self, disk: Disk, large: Store, place: str, how: str) -> None:
        destination = T if how == "unsubscribe" else A
        large.subscribe(DESK)
        for seed in range(3):
            large.send(destination, io.BytesIO(body(seed=seed)), expires_at_ms=int(how == "expire"))
        store = disk.later(large, place)
        if how == "purge":
            assert store.purge(A) == 3
        elif how == "delete":
            assert store.delete(A) == 3
        elif how == "unsubscribe":
            store.unsubscribe(T, DESK.key)
        else:
            for undelivered in store.take_undelivered():
                undelivered.message.ack()
            del undelivered
        for one in disk.views(store):
            assert kept(one) == 0
            assert_whole(one)

    # Not persistent

    def test_one_that_is_not_persistent_is_gone_with_its_store(self, disk: Disk, large: Store) -> None:
        large.send(A, io.BytesIO(body()), persistent=False)
        large.send(A, io.BytesIO(body(seed=2)))
        assert contents(large) == [body(), body(seed=2)]
        message = take(large)
        assert not message.persistent
        message.release()
        assert kept(large) == 2
        crashed, again = disk.crash(large), disk.reopen(large)
        for one in crashed, again:
            expected = [] if one.volatile else [body(seed=2)]
            assert (contents(one), kept(one)) == (expected, len(expected))

    def test_one_that_is_not_persistent_goes_with_its_ack(self, large: Store) -> None:
        large.send(A, io.BytesIO(body()), persistent=False)
        take(large).ack()
        assert kept(large) == 0
        large.send(A, io.BytesIO(body()), persistent=False)
        large.delete(A)
        assert kept(large) == 0

    # Limits

    def test_its_bytes_count(self, disk: Disk, place: str) -> None:
        store = disk.create(large_message_size=1024, max_bytes=5000)
        store.send(A, io.BytesIO(body()))
        store = disk.later(store, place)
        store.send(A, io.BytesIO(body()))
        with pytest.raises(StoreFullError, match="5000"):
            store.send(A, io.BytesIO(body()))
        with pytest.raises(StoreFullError, match="5000"):
            store.send(A, io.BytesIO(bytes(6000)))
        assert kept(store) == 2
        assert (store.stats().large_messages, store.stats().large_bytes) == (2, 2 * SMALL)
        message: Message | None = take(store)
        assert message is not None
        message.ack()
        message = None
        assert kept(store) == 1
        store.send(A, io.BytesIO(body()))

    def test_its_bytes_count_among_those_that_are_not_persistent(self, disk: Disk) -> None:
        if disk.volatile:
            return  # there all messages are alike
        store = disk.create(large_message_size=1024, nonpersistent_max_bytes=5000)
        store.send(A, io.BytesIO(body()))  # a persistent one does not count for that
        for number in range(10):
            for _ in range(2):
                store.send(A, io.BytesIO(body()), persistent=False)
            with pytest.raises(StoreFullError, match="nonpersistent_max_bytes is 5000"):
                store.send(A, io.BytesIO(body()), persistent=False)
            store.send(A, io.BytesIO(body()))
            if number % 3 == 0:
                store.purge(A)
            elif number % 3 == 1:
                store.delete(A)
            else:
                assert contents(store) == [body()] * 3
                while message := store.receive(A, 0):
                    message.ack()
        assert_whole(store)

    @pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not-persistent"])
    def test_its_bytes_are_free_with_its_ack(self, disk: Disk, persistent: bool) -> None:
        """Not only once the body is removed, a little later: else the next send would be refused."""
        store = disk.create(large_message_size=1024, max_bytes=5000)
        for _ in range(2):
            store.send(A, io.BytesIO(body()), persistent=persistent)
        for _ in range(20):
            message = take(store)
            message.ack()
            store.send(A, io.BytesIO(body()), persistent=persistent)
        assert store.depth(A) == 2
        assert_whole(store)

    def test_a_ring_of_large_ones_drops_no_more_than_it_must(self, disk: Disk) -> None:
        store = disk.create(large_message_size=1024, max_bytes=8000, when_full="drop_old")
        for number in range(3):
            store.send(A, io.BytesIO(body(seed=number)))
        take(store).ack()
        store.send(A, io.BytesIO(body(seed=3)))
        assert contents(store) == [body(seed=number) for number in (1, 2, 3)]
        assert store.stats().dropped == 0
        for number in range(4, 10):
            store.send(A, io.BytesIO(body(seed=number)))
        assert contents(store) == [body(seed=number) for number in (7, 8, 9)]

    def test_a_store_that_fails_keeps_what_is_whole(self, disk: Disk, large: Store) -> None:
        large.send(A, io.BytesIO(body()))
        message = take(large)
        message.ack()
        large._engine.fail(StoreFailedError("on purpose"))
        del message
        bodies_of(large).tidy()
        again = disk.reopen(large)
        assert kept(again) == 0
