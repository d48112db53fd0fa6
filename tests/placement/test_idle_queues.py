"""Queues that go by themselves when nobody uses them, and nothing with them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.policies.names.destination import Destination
from anabranch.router.upkeep import idle_queues

from ..contract.disk import PATIENCE, Parallel, eventually
from ..messages.test_pattern_consumers import config
from ..router.disk import contents, take

KINDS = ("journal", "sql", "memory")
SHORT = 0.02


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_queues, "LOOK_SECONDS", SHORT / 4)


@pytest.fixture(params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        yield router


def looked(router: anabranch.Router, times: int = 3) -> None:
    """Wait until it was looked at all of them so often."""
    looks = threading.Semaphore(0)
    idle = router._idle_queues
    look_at = idle._look_at

    def note(*arguments: Any) -> None:
        look_at(*arguments)
        looks.release()

    idle._look_at = note  # type: ignore[method-assign, assignment]
    for _ in range(times * len(idle._queues)):
        assert looks.acquire(timeout=PATIENCE)
    idle._look_at = look_at  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["q", "each.q", "new.b"])
def test_an_empty_queue_goes(router: anabranch.Router, name: str) -> None:
    """And comes again when it is sent to, and goes again."""
    queue = router.queue(name, expires_when_idle=SHORT)
    for body in (b"1", b"2"):
        queue.send(body)
        take(router, name).ack()
        eventually(lambda: not router.exists(name))
        assert queue.receive() is None
    assert router.destinations() == []


def test_one_with_messages_stays(router: anabranch.Router) -> None:
    """Leased ones, those that are not persistent, and those that wait for their time, too."""
    queue, other = router.queue("q", expires_when_idle=SHORT), router.queue("other", expires_when_idle=SHORT)
    later = router.queue("later", codec="json", expires_when_idle=SHORT)
    later.send([3], deliver_in=3600)
    queue.send(b"1")
    other.send(b"2", persistent=False)
    looked(router)
    held = take(router, "q")
    looked(router)
    assert (contents(router, "q"), contents(router, "other")) == ([b"1"], [b"2"])
    held.ack()
    take(router, "other").ack()
    eventually(lambda: router.destinations() == [later.destination])
    looked(router)
    assert later.counts().delayed == 1


def test_one_where_somebody_waits_stays(router: anabranch.Router) -> None:
    """But for a pattern, which is told of it when it is there again."""
    queue, other = router.queue("q", expires_when_idle=SHORT), router.queue("listened", expires_when_idle=SHORT)
    for each in (queue, other):
        each.send(b"1")
        take(router, each.destination.name).ack()
    heard: list[Message] = []
    listener = other.listen(heard.append)
    with Parallel(lambda: queue.receive(None)) as receiver:
        assert receiver.outlives(0.01)
        looked(router)
        assert [str(name) for name in router.destinations()] == ["queue://listened", "queue://q"]
        queue.send(b"2")
        receiver.result().ack()
    listener.close()
    with Parallel(lambda: router.receive("*", None)) as receiver:
        eventually(lambda: router.destinations() == [])
        queue.send(b"3")
        assert receiver.result().body == b"3"


def test_one_that_is_used_stays(journals: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passed through since the last look is seen, though it is empty each time."""
    queue = journals.queue("q", expires_when_idle=3600)
    queue.send(b"1")
    take(journals, "q").ack()
    (store,) = journals._registry.open_stores()
    before = store.idle_mark(queue.destination)
    assert before is not None
    assert store.idle_mark(queue.destination) == before
    queue.send(b"2")
    take(journals, "q").ack()
    assert store.idle_mark(queue.destination) not in (None, before)


def test_one_that_is_in_a_store_that_is_not_open(journals: anabranch.Router, tmp_path: Path) -> None:
    """It is looked at once its time is over."""
    for name in ("q", "each.q", "full"):
        journals.queue(name).send(b"1")
    for name in ("q", "each.q"):
        take(journals, name).ack()
    journals.close()
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        for name in ("q", "each.q", "full", "never"):
            router.queue(name, expires_when_idle=SHORT)
        eventually(lambda: [str(name) for name in router.destinations()] == ["queue://full"])
        assert contents(router, "full") == [b"1"]


def test_nothing_is_lost_that_is_sent_at_that_moment(router: anabranch.Router) -> None:
    """However it is sent: all of it is received, once."""
    queue = router.queue("q", expires_when_idle=0.0001)
    count = 150
    got: list[bytes] = []

    def send() -> None:
        for number in range(0, count, 5):
            queue.send(b"%d" % number)
            queue.send_many([b"%d" % (number + 1)])
            queue.send_nowait(b"%d" % (number + 2))
            router.send("q,beside", b"%d" % (number + 3))
            queue.send(b"%d" % (number + 4), persistent=False)
            eventually(lambda number=number: len(got) == number + 5)  # type: ignore[misc]

    def receive() -> None:
        while len(got) < count:
            message = queue.receive()
            if message is not None:
                message.ack()
                got.append(message.body)

    with Parallel(send) as sender, Parallel(receive) as receiver:
        sender.result()
        receiver.result()
    assert sorted(map(int, got)) == list(range(count))
    eventually(lambda: not router.exists("q"))


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_nothing_is_lost_that_is_sent_behind_its_removal(
    router: anabranch.Router, monkeypatch: pytest.MonkeyPatch, idle: bool, used: bool
) -> None:
    """By who had found its store before, which is to go as well: it stays then."""
    queue = router.queue("each.q").destination
    store = router._registry.store_for(queue)
    if used:
        router.queue("each.q").send(b"1")
        take(router, "each.q").ack()
    table = router._registry.table
    let_go = table.let_go

    def let_go_and_send(gone: bytes | Destination) -> None:
        let_go(gone)
        if gone == queue:
            store.send(queue, b"late")

    monkeypatch.setattr(table, "let_go", let_go_and_send)
    if idle:
        assert router._registry.removal.delete_if_idle(queue, lambda: True)
    else:
        router.delete("each.q")
    monkeypatch.undo()
    assert take(router, "each.q").body == b"late"
    assert router.destinations() == [queue]


def test_nobody_remembers_one_that_is_gone(journals: anabranch.Router) -> None:
    """Unless somebody still has an object of it."""
    kept = journals.queue("kept", expires_when_idle=SHORT)
    for number in range(20):
        journals.queue(f"q.{number}", expires_when_idle=SHORT).send(b"1")
        take(journals, f"q.{number}").ack()
    gc.collect()
    eventually(lambda: list(journals._idle_queues._queues) == [kept.destination])
    assert journals.destinations() == []


def test_with_a_codec(journals: anabranch.Router) -> None:
    queue = journals.queue("q", codec="json", expires_when_idle=SHORT)
    queue.send({"n": 1})
    message = queue.receive()
    assert message is not None
    assert message.body == {"n": 1}
    message.ack()
    eventually(lambda: not journals.exists("q"))


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [(0, ValueError), (-1, ValueError), (float("inf"), ValueError), (float("nan"), ValueError), (True, TypeError),
     ("60", TypeError)],
)  # fmt: skip
def test_bad_input(journals: anabranch.Router, seconds: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="expires_when_idle is a number of seconds"):
        journals.queue("q", expires_when_idle=seconds)
    assert not journals._idle_queues._queues
