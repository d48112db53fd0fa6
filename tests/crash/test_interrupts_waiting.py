"""Ctrl-C at every bytecode of what concerns messages that wait for their time: none lost, none twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.core.features.scheduled import Waiting

from ..contract.expiring import HOUR, Clock
from ..shares import Share
from .interrupts import everywhere
from .ledger import body_of, identity_of, violations

EVERY = 9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """No timer looks at it: only who receives."""
    clock = Clock()
    with monkeypatch.context() as patches:
        patches.setattr(time, "time_ns", clock.time_ns)
        patches.setattr(Waiting, "_set_timer", lambda self: None)
        yield clock


@pytest.fixture(params=["journal", "memory"])
def router(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[anabranch.Router]:
    journal = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, segment_size=64 * 1024, checkpoint_interval=3600.0)
    kind = {"journal": journal} if request.param == "journal" else {"memory": anabranch.MemoryOptions()}
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], **kind)])
    with anabranch.open(config) as router:
        yield router


def drained(queue: anabranch.Queue) -> list[str]:
    found = []
    while (message := queue.receive()) is not None:
        found.append(identity_of(message.body))
        message.ack()
    return found


def test_what_is_due_comes_back_once_wherever_it_is_interrupted(
    router: anabranch.Router, clock: Clock, share: Share
) -> None:
    def prepare(at: int) -> Callable[[], object]:
        queue = router.queue(f"q.{at}")
        for number in range(3):
            queue.send(body_of(f"s.{number}"), deliver_in=3600)
        queue.send(body_of("s.free"))
        clock.offset_ms += HOUR
        return queue.receive

    def check(at: int, where: str) -> None:
        queue = router.queue(f"q.{at}")
        found = drained(queue)
        all_of_them = ["s.0", "s.1", "s.2", "s.free"]
        assert found in (all_of_them, all_of_them[1:]), where  # the first may have been received
        assert queue.depth() == 4 - len(found), where

    assert everywhere(prepare, check, EVERY, share) > 50
    assert violations(router) == []


def test_a_delay_interrupted_anywhere(router: anabranch.Router, clock: Clock, share: Share) -> None:
    held: list[anabranch.Message] = []

    def prepare(at: int) -> Callable[[], object]:
        queue = router.queue(f"q.{at}")
        queue.send(body_of("s.0"))
        queue.send(body_of("s.1"))
        message = queue.receive()
        assert message is not None
        held[:] = [message]
        return lambda: message.release(delay=3600)

    def check(at: int, where: str) -> None:
        queue = router.queue(f"q.{at}")
        store_of_router = next(iter(router._registry.open_stores()))
        if store_of_router.stats().leased:
            held[0].release(delay=3600)  # it can be tried again until it has taken effect
        with pytest.raises(anabranch.UnknownMessageError):
            held[0].ack()
        assert (drained(queue), queue.counts()) == (["s.1"], (0, 0, 1, 0)), where
        clock.offset_ms += HOUR
        assert (drained(queue), queue.depth()) == (["s.0"], 0), where

    assert everywhere(prepare, check, EVERY, share) > 50
    assert violations(router) == []
