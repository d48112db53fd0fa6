"""Ctrl-C at every bytecode of what concerns message groups: never two of one at once, and none held back for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import anabranch

from ..shares import Share
from .interrupts import everywhere
from .ledger import body_of, identity_of, violations

EVERY = 9
SENT = ["g.0", "h.0", "g.1", "h.1", "none", "g.2"]
"""The identities of messages, which begin with their groups."""


@pytest.fixture(params=["journal", "memory"])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    journal = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, segment_size=64 * 1024, checkpoint_interval=3600.0)
    kind = {"journal": journal} if request.param == "journal" else {"memory": anabranch.MemoryOptions()}
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], **kind)])
    with anabranch.open(config) as router:
        yield router


def filled(router: anabranch.Router, at: int) -> anabranch.Queue:
    queue = router.queue(f"q.{at}")
    for identity in SENT:
        queue.send(body_of(identity), group=identity[0] if "." in identity else None)
    return queue


def emptied(router: anabranch.Router, at: int, where: str, acked: bool = False) -> None:
    """What is left comes out: each group in order. The first of g may have been acked."""
    router.sweep()  # it frees what an interrupted receive had in hand
    queue, found = router.queue(f"q.{at}"), list[str]()
    while messages := queue.receive_many(10):
        assert len({message.group for message in messages}) == len(messages), where
        found += [identity_of(message.body) for message in messages]
        for message in messages:
            message.ack()
    assert queue.depth() == 0, where
    left = [one for one in found if one[0] == "g"]
    assert left == ["g.0", "g.1", "g.2"] or (acked and left == ["g.1", "g.2"]), where
    assert [one for one in found if one[0] == "h"] == ["h.0", "h.1"], where


def test_a_receive_interrupted_anywhere(router: anabranch.Router, share: Share) -> None:
    """The first that looks for groups there, and one behind it, which meets one that is held back."""
    kept: list[anabranch.Message] = []

    def prepare(at: int) -> Callable[[], object]:
        queue = filled(router, at)
        kept.clear()

        def receive() -> None:
            for _ in range(3):
                kept.extend(queue.receive_many(1))

        return receive

    def check(at: int, where: str) -> None:
        queue = router.queue(f"q.{at}")
        groups = [message.group for message in kept]
        assert len(set(groups)) == len(groups), where
        while messages := queue.receive_many(10):
            kept.extend(messages)
            groups = [message.group for message in kept]
            assert len(set(groups)) == len(groups), where
        for message in kept:
            with suppress(anabranch.UnknownMessageError):  # its receive was interrupted once it had it
                message.release()
        emptied(router, at, where)

    assert everywhere(prepare, check, EVERY, share) > 50
    assert violations(router) == []


@pytest.mark.parametrize("end", ["ack", "release"])
def test_an_end_interrupted_anywhere(router: anabranch.Router, share: Share, end: str) -> None:
    """And the receive that brings the next one of the group."""
    held: list[anabranch.Message] = []

    def prepare(at: int) -> Callable[[], object]:
        queue = filled(router, at)
        held[:] = [message for message in queue.receive_many(10) if message.group == "g"]
        assert queue.receive() is None

        def finish() -> None:
            getattr(held[0], end)()
            held.extend(queue.receive_many(10))

        return finish

    def check(at: int, where: str) -> None:
        with suppress(anabranch.UnknownMessageError):
            held[0].release()
        for message in held[1:]:
            message.release()
        held.clear()
        emptied(router, at, where, end == "ack")

    assert everywhere(prepare, check, EVERY, share) > 50
    assert violations(router) == []
