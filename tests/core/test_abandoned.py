"""Messages that nobody holds any more, and nobody has settled (adapters/core/engine/abandoned.py)."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import (
    DecodedMessage,
    LargeMessage,
    Message,
    ReceivedDecodedMessage,
    ReceivedLargeMessage,
    ReceivedMessage,
    decoded,
)
from anabranch.adapters.core.state.gates import Gate
from anabranch.adapters.system import rare_warnings
from anabranch.policies.errors import LargeMessageError, StoreFailedError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, C, eventually, take
from ..crash.interrupts import everywhere
from . import test_interrupts
from .made import memory
from .test_copying import Both, both  # noqa: F401
from .test_interrupts import emptied
from .test_live_copy import moved

pytestmark = pytest.mark.filterwarnings("ignore:.*let go of without:ResourceWarning")

a_store = test_interrupts.store


def abandon(store: Store) -> None:
    """Receive one, and forget it."""
    assert store.receive(A) is not None


def test_only_what_is_in_hand_is_seen_to(store: Store) -> None:
    """What was settled, or looked at, is a message as any other."""
    store.send_many(A, [b"%d" % n for n in range(6)])
    (browsed, *_) = store.browse(A)
    one, two, three = (take(store) for _ in range(3))
    assert [type(message) for message in (browsed, one)] == [Message, ReceivedMessage]
    assert isinstance(one, Message)
    assert repr(one) == f"<Message {one.seq} of queue://a, 1 bytes>"
    heard: list[Message] = []
    listener = store.listen(A, heard.append)
    many = store.receive_many(A, 2)
    eventually(lambda: heard)
    listener.close()
    assert {type(message) for message in (*many, *heard)} == {ReceivedMessage}
    one.ack()
    two.release()
    store.claim(three)
    store.commit([], [three])
    assert {type(message) for message in (one, two, three)} == {Message}


def test_one_with_a_large_body_is_seen_to_likewise() -> None:
    """It is of classes of its own, so that no other message is asked for its attributes the long way."""
    assert not hasattr(Message, "__getattr__")
    with memory() as disk:
        store = disk.create(large_message_size=1024)
        store.send(A, io.BytesIO(bytes(2000)))
        (browsed,) = store.browse(A)
        message = store.receive(A)
        assert message is not None
        assert [type(one) for one in (browsed, message)] == [LargeMessage, ReceivedLargeMessage]
        for one in (browsed, message, decoded(browsed, lambda one, body: body)):
            assert (one.is_large, one.size) == (True, 2000)
            with pytest.raises(LargeMessageError):
                _ = one.body
            with pytest.raises(LargeMessageError):
                _ = one.raw_body
        del browsed, one, message
        store.take_undelivered()
        message = take(store)
        assert (message.deliveries, message.read()) == (2, bytes(2000))
        assert type(decoded(message, lambda one, body: body)) is ReceivedDecodedMessage
        message.ack()
        assert type(message) is DecodedMessage


def test_the_warning_names_the_line_that_let_go(store: Store) -> None:
    store.send(A, b"1")
    message = store.receive(A)
    with pytest.warns(ResourceWarning, match="let go of without ack") as told:
        message = None
    assert message is None
    assert [one.filename for one in told] == [__file__]


def test_in_a_store_that_has_failed_nobody_holds_anything(recwarn: pytest.WarningsRecorder, store: Store) -> None:
    store.send(A, b"1")
    message = store.receive(A)
    store._engine.fail(OSError("gone"))
    del message
    assert not store.abandoned
    with pytest.raises(StoreFailedError):
        store.take_undelivered()
    assert [warned for warned in recwarn if warned.category is ResourceWarning] == []


def test_nor_when_the_process_ends(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    store.send(A, b"1")
    with monkeypatch.context() as patches:
        patches.setattr(sys, "is_finalizing", lambda: True)
        abandon(store)
    assert not store.abandoned
    assert store.counts(A).leased == 1


def test_it_is_noted_with_whatever_lock_held(memory_store: Store) -> None:
    memory_store.send_many(A, [b"1", b"2"])
    held = [memory_store.receive(A), memory_store.receive(A)]
    with memory_store._engine.lock, memory_store._engine.delivery.lock, memory_store.abandoned._lock:
        held.pop()
        gc.collect()
    held.clear()
    memory_store.take_undelivered()
    assert memory_store.counts(A) == (2, 0, 0, 0)


def test_what_cannot_be_given_back_now_is_later(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    store.send(A, b"1")
    abandon(store)

    def away(leases: object) -> None:
        raise StoreFailedError("away")

    with monkeypatch.context() as patches:
        patches.setattr(store.abandoned, "_give_back", away)
        with pytest.raises(StoreFailedError):
            store.take_undelivered()
    store.take_undelivered()
    assert take(store).deliveries == 2


def test_what_has_moved_is_free_where_it_is(both: Both) -> None:  # noqa: F811
    """Whether it was let go of before, meanwhile or after; but not that of which somebody has the token."""
    for number in range(4):
        both.source.send(A, b"%d" % number)
    before, meanwhile, after, kept = (both.source.receive(A) for _ in range(4))
    assert kept is not None and before is not None
    token = both.source.token(kept)
    del before, kept

    copy = moved(both, A)
    del after
    assert copy.target is both.target
    for store in (both.source, both.target):
        store.take_undelivered()
    assert both.target.counts(A) == (2, 2, 0, 0)
    del meanwhile
    both.target.take_undelivered()
    assert [(m.body, m.deliveries) for m in both.target.receive_many(A, 9)] == [(b"0", 2), (b"1", 2), (b"2", 2)]
    assert token.partition(".")[2]


def test_one_that_is_just_moving_is_looked_at_again(store: Store) -> None:
    store.send(A, b"1")
    message = store.receive(A)
    assert message is not None
    gate, frozen = Gate.passed(A), dict[object, int]()
    store._engine.delivery.freeze([store._engine.catalog.state(A).channel], gate, frozen)  # type: ignore[arg-type]
    lease = message._note
    del message
    store.take_undelivered()
    assert store.abandoned.has_moving
    assert store.receive(B) is None
    lease.hold = frozen[lease]
    store.take_undelivered()
    assert take(store).deliveries == 2


def test_ctrl_c_where_they_are_given_back(a_store: Store) -> None:
    """Who looks again finds them."""

    def prepare(at: int) -> Callable[[], object]:
        a_store.send_many(A, [b"1", b"2"])
        abandon(a_store)
        abandon(a_store)
        return a_store.take_undelivered

    def check(at: int, where: str) -> None:
        a_store._writer.flush()
        a_store.take_undelivered()
        assert emptied(a_store, where) == [b"1", b"2"], where

    assert everywhere(prepare, check) > 30


def test_the_log_tells_of_a_queue_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """How many it were; of the first at once, and what is not told by then when the store closes."""
    now = 1000.0
    monkeypatch.setattr(rare_warnings, "monotonic", lambda: now)
    with memory() as disk:
        store = disk.create()

        def let_go(*queues: Destination) -> list[str]:
            caplog.clear()
            for queue in queues:
                store.send(queue, b"1")
                assert store.receive(queue) is not None
            store.take_undelivered()
            return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

        def of(count: str, queue: Destination) -> str:
            return (
                f"store {store.name}: {count} of {queue}, received and let go of without ack, release or reject: free "
                "again, delivered once more"
            )

        assert let_go(A, A) == [of("2 messages", A)]
        assert let_go(A, B) == [of("1 message", B)]
        now += rare_warnings.TELL_SECONDS - 1
        assert let_go(A) == []
        now += 2
        assert let_go() == [of("2 messages", A)]
        assert let_go() == []
        now += 2 * rare_warnings.TELL_SECONDS
        assert let_go() == []
        assert sorted(let_go(B, A)) == [of("1 message", A), of("1 message", B)]
        assert let_go(A, A, A) == []
        caplog.clear()
        store.close()
        assert [record.getMessage() for record in caplog.records] == [of("3 messages", A)]


def test_of_very_many_queues_the_log_tells_more_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rare_warnings, "LOGGED_MAX", 2)
    with memory() as disk:
        store = disk.create()
        for _ in range(2):
            for queue in (A, B, C):
                store.send(queue, b"1")
                assert store.receive(queue) is not None
            store.take_undelivered()
            assert len(store.abandoned._warnings._logged) <= 2
        assert len(caplog.records) == 6
