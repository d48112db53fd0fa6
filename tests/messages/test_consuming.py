"""Ways to receive: many at once, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anabranch

from ..contract.disk import PATIENCE, Parallel
from .test_hosting import router as router  # a fixture


def test_many_at_once(router: anabranch.Router) -> None:
    queue = router.queue("q")
    assert queue.receive_many(5) == []
    assert not router.exists("q")
    with Parallel(lambda: queue.receive_many(5, timeout=PATIENCE)) as receiver:
        assert receiver.outlives(0.05)
        queue.send(b"0")
        messages = receiver.result()
    queue.send_many([b"1", b"2", b"3"])
    messages += queue.receive_many(2)
    assert [message.body for message in messages] == [b"0", b"1", b"2"]
    router.ack(messages)
    assert [message.body for message in queue.browse()] == [b"3"]


def test_many_of_a_subscription(router: anabranch.Router) -> None:
    topic = router.topic("t")
    audit = topic.subscribe("audit")
    topic.send_many([b"1", b"2"])
    assert [message.body for message in audit.receive_many(5, timeout=None)] == [b"1", b"2"]


def test_consuming(router: anabranch.Router) -> None:
    """None is leased ahead; it ends when nothing comes, and begins again."""
    queue = router.queue("q")
    queue.send_many([b"1", b"2", b"3"])
    seen = []
    for message in queue.consume(timeout=0):
        assert queue.counts().leased == 1
        seen.append(message.body)
        message.ack()
    assert seen == [b"1", b"2", b"3"]
    with Parallel(lambda: next(queue.consume())) as consumer:
        assert consumer.outlives(0.05)
        queue.send(b"4")
        assert consumer.result().body == b"4"
    assert list(queue.consume(timeout=0.01)) == []


def test_waiting_until_it_is_empty(router: anabranch.Router) -> None:
    """Whatever is held counts: what is ready, leased, or waits for its time."""
    queue, audit = router.queue("q"), router.topic("t").subscribe("audit")
    assert queue.wait_empty() and audit.wait_empty(0)
    queue.send_many([b"1", b"2"])
    queue.send(b"3", deliver_in=3600)
    router.send("topic://t", b"4")
    with Parallel(lambda: queue.wait_empty(PATIENCE)) as waiter:
        first, second = queue.receive_many(2)
        first.ack()
        assert not audit.wait_empty(0.01) and waiter.outlives(0.02)
        with router.transaction() as tx:
            tx.ack(second)
            assert not queue.wait_empty(-1)
        assert not queue.wait_empty(0) and waiter.outlives(0.02)
        queue.purge()
        assert waiter.result()
    assert audit.purge() == 1 and audit.wait_empty(0)
    for wrong in ("1", True):
        with pytest.raises(TypeError, match="timeout"):
            queue.wait_empty(wrong)  # type: ignore[arg-type]


def test_a_consumer_ends_with_its_router(tmp_path: Path) -> None:
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"])])
    with anabranch.open(config) as router, Parallel(lambda: list(router.queue("q").consume())) as consumer:
        assert consumer.outlives(0.05)
        router.close()
        with pytest.raises(anabranch.ClosedError):
            consumer.result()


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda q: q.receive_many(0), ValueError, "n is a number of messages, 1 or more, not 0"),
        (lambda q: q.receive_many(-3), ValueError, "not -3"),
        (lambda q: q.receive_many(True), TypeError, "n is a number of messages, not bool: True"),
        (lambda q: q.receive_many("5"), TypeError, "not str: '5'"),
        (lambda q: q.receive_many(5, timeout="1"), TypeError, "timeout is a number of seconds, not str"),
        (lambda q: q.receive_many(5, timeout=float("nan")), ValueError, "timeout is a number of seconds up to"),
        (lambda q: q.consume(timeout=True), TypeError, "not bool: True"),
        (lambda q: q.consume(timeout=float("inf")), ValueError, "None is for ever"),
        (lambda q: q.receive(timeout=True), TypeError, "not bool: True"),
    ],
)
def test_bad_input(memory: anabranch.Router, call: Callable[[Any], object], kind: type[Exception], says: str) -> None:
    queue = memory.queue("q")
    queue.send(b"1")
    with pytest.raises(kind, match=says):
        call(queue)
    assert queue.counts() == anabranch.Counts(1, 0)


def test_a_time_that_is_over_does_not_wait(memory: anabranch.Router) -> None:
    """So `deadline - now` needs no care."""
    queue = memory.queue("q")
    assert (queue.receive(-1), queue.receive_many(5, -1), list(queue.consume(-1))) == (None, [], [])
    queue.send(b"1")
    assert [message.body for message in queue.receive_many(5, -1)] == [b"1"]
