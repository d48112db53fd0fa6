"""Events: what happens and no call returns is told on a background thread, and nobody waits for who is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import anabranch
from anabranch import Destination, Event, MessageDeadLettered, MessageDropped, MessageExpired, StoreFailed, StoreOpened
from anabranch.router import events

from ..contract.disk import PATIENCE, eventually
from ..router.disk import take
from .test_hosting import KINDS

Q, DLQ = Destination.queue("q"), Destination.queue("dlq")


def opened(directory: Path, kind: str = "memory", **options: Any) -> anabranch.Router:
    """Everything in a store of this kind but its dead letters."""
    store = KINDS[kind].model_copy(update={"max_deliveries": 1, **options})
    stores = [anabranch.StoreConfig("all", [">"], **{kind: store}), anabranch.StoreConfig("dead", ["dlq"])]
    return anabranch.open(anabranch.Config(directory / "data", stores))


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    with opened(tmp_path) as router:
        yield router


class Told:
    """Who is told."""

    def __init__(self) -> None:
        self._events: SimpleQueue[tuple[Event, str]] = SimpleQueue()

    def __call__(self, event: Event) -> None:
        self._events.put((event, threading.current_thread().name))

    def next(self) -> Event:
        event, thread = self._events.get(timeout=PATIENCE)
        assert thread != threading.current_thread().name
        assert event.at_ms > 0
        return event

    @property
    def is_empty(self) -> bool:
        return self._events.empty()


@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_of_messages(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path, kind) as router:
        queue, told = router.queue("q"), Told()
        queue.send_many([b"1", b"2"])
        router.queue("dlq").send(b"0")
        router.on_event(told)
        limited = take(router, "q")
        limited.release()
        router.sweep()
        about = ("all", Q, limited.seq, None)
        assert told.next() == MessageDeadLettered(*about, "delivery_limit", 1, DLQ)
        rejected = take(router, "q")
        rejected.reject("it is wrong")
        assert told.next() == MessageDeadLettered("all", Q, rejected.seq, None, "it is wrong", 1, DLQ)
        receipt = queue.send(b"3", message_id="m-3", expires_in=0.001)
        expired = ("all", Q, receipt.seq, "m-3")
        assert told.next() == MessageExpired(*expired)
        assert told.next() == MessageDeadLettered(*expired, "expired", 0, DLQ)
        assert told.is_empty


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead_letter", ["dlq", None])
def test_what_has_expired_is_counted(tmp_path: Path, kind: str, dead_letter: str | None) -> None:
    """Since the store was opened; of a subscription what it had not acked."""
    with opened(tmp_path, kind, dead_letter=dead_letter, max_deliveries=None) as router:
        queue, topic = router.queue("q"), router.topic("t")
        desk, book = topic.subscribe("desk"), topic.subscribe("book")
        for persistent in (True, False):
            queue.send(b"1", expires_in=3600, persistent=persistent)
        take(router, "q").reject("expired")  # which it has not
        for persistent in (True, False):
            queue.send(b"2", expires_in=0.001, persistent=persistent)
        topic.send(b"3", expires_in=1000)
        message = desk.receive()
        assert message is not None
        message.ack()
        topic.send(b"4", expires_in=0.001)
        eventually(lambda: queue.counts() == anabranch.Counts(1, 0, 0, 2), queue.counts)
        eventually(lambda: desk.counts() == anabranch.Counts(0, 0, 0, 1), desk.counts)
        assert book.counts() == anabranch.Counts(1, 0, 0, 1)
        assert router.queue("dlq").counts().expired == 0


def test_what_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, dead_letter=None, max_deliveries=None) as router:
        told = Told()
        router.on_event(told)
        receipt = router.queue("q").send(b"1", expires_in=0.001)
        assert told.next() == StoreOpened("all", False)
        assert told.next() == MessageExpired("all", Q, receipt.seq, None)
        assert told.next() == MessageDropped("all", Q, receipt.seq, None, "expired", 0)
        receipt = router.queue("q").send(b"2")
        take(router, "q").reject()
        assert told.next() == MessageDropped("all", Q, receipt.seq, None, "rejected", 1)


def test_of_a_topic(router: anabranch.Router) -> None:
    told = Told()
    topic = router.topic("t")
    desk = topic.subscribe("desk")
    router.queue("dlq").send(b"0")
    receipt = topic.send(b"1")
    router.on_event(told)
    message = desk.receive()
    assert message is not None
    message.reject()
    assert told.next() == MessageDeadLettered("all", topic.destination, receipt.seq, None, "rejected", 1, DLQ)


@pytest.mark.parametrize("kind", ["journal", "sql"])
def test_what_becomes_of_stores(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path, kind) as router:
        told = Told()
        router.on_event(told)
        router.queue("q").send(b"1")
        assert told.next() == StoreOpened("all", False)
        (store,) = router._registry.open_stores()
        store._engine.fail(OSError("its disk is gone"))
        store._engine.fail(OSError("and again"))
        assert told.next() == StoreFailed("all", "its disk is gone")
        router.reopen("all")
        assert told.next() == StoreOpened("all", True)
        router.reopen("all")
        assert told.next() == StoreOpened("all", False)
        assert told.is_empty


def test_nobody_waits_for_who_is_told(router: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is slow misses what is too much, and knows how much; another listener does not."""
    monkeypatch.setattr(events, "EVENTS_MAX", 5)
    queue = router.queue("q")
    queue.send_many([b"x"] * 20)
    router.queue("dlq").send(b"0")
    begun, go_on, slow, quick = threading.Event(), threading.Event(), Told(), Told()

    def hang(event: Event) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        slow(event)

    listener, other = router.on_event(hang), router.on_event(quick)
    take(router, "q").reject()
    assert begun.wait(PATIENCE)
    quick.next()
    for _ in range(19):
        take(router, "q").reject()
        quick.next()
    assert (listener.dropped, other.dropped) == (14, 0)
    go_on.set()
    seqs = [event.seq for event in (slow.next() for _ in range(6)) if isinstance(event, MessageDeadLettered)]
    assert seqs == sorted(seqs)
    assert len(seqs) == 6


def test_one_that_raises_is_told_all_the_same(router: anabranch.Router, caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def raise_it(event: Event) -> None:
        told(event)
        raise SystemExit("no")

    router.on_event(raise_it)
    router.queue("q").send_many([b"1", b"2"])
    told.next()
    for _ in range(2):
        take(router, "q").reject()
    assert {type(told.next()) for _ in range(3)} == {StoreOpened, MessageDeadLettered}
    eventually(lambda: "raised an error" in caplog.text)


def test_who_has_closed_is_not_told(router: anabranch.Router) -> None:
    """Also from within the callback."""
    told, once = Told(), Told()
    router.queue("q").send_many([b"1", b"2", b"3"])
    router.queue("dlq").send(b"0")
    listeners: list[anabranch.EventListener] = []

    def tell(event: Event) -> None:
        listeners[0].close()
        once(event)

    listeners.append(router.on_event(tell))
    other = router.on_event(told)
    take(router, "q").reject()
    once.next()
    told.next()
    other.close()
    other.close()
    take(router, "q").reject()
    last = Told()
    router.on_event(last)
    take(router, "q").reject()
    last.next()
    assert told.is_empty
    assert once.is_empty


@pytest.mark.parametrize("wrong", [None, 7, "print"])
def test_who_cannot_be_told(router: anabranch.Router, wrong: Any) -> None:
    call: Callable[[Any], object] = router.on_event
    with pytest.raises(TypeError, match="takes a function of one event"):
        call(wrong)
