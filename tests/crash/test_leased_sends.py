"""A process that is killed while it holds what it has sent (Queue.send_leased): that is there once, and free."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.core.messages import Message

from ..contract.children import forked, reaped
from ..contract.disk import PATIENCE
from ..shares import Share
from ..sql.server import PostgresServer
from .interrupts import everywhere
from .ledger import violations
from .test_interrupts import router, store_of

__all__ = ["router"]  # a fixture


@pytest.fixture(params=["journal", "sqlite", "shared"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> anabranch.StoreConfig:
    if request.param == "journal":
        return anabranch.StoreConfig("all", [">"], journal=anabranch.JournalOptions(large_message_size=5000))
    if request.param == "sqlite":
        return anabranch.StoreConfig("all", [">"], sql=anabranch.SqlOptions())
    postgres: PostgresServer = request.getfixturevalue("postgres")
    if postgres.pid is None:
        postgres.start()
    options = anabranch.SqlOptions(url=postgres.new_database(), shared=True)
    return anabranch.StoreConfig("all", ["queue://>", "topic://>"], sql=options)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=[pytest.mark.campaign, pytest.mark.weight(0)])])
def test_what_a_killed_sender_held_is_delivered_once_more(
    store: anabranch.StoreConfig, tmp_path: Path, kills: int
) -> None:
    """Also what it was just sending, if that was stored; what it had acked does not come back."""
    config = anabranch.Config(tmp_path / "data", [store])
    for kill in range(kills):
        reader, writer = os.pipe()
        pid = forked(lambda: _send(config, writer))  # noqa: B023
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = [pipe.readline().split() for _ in range(20 + kill)]
            os.kill(pid, signal.SIGKILL)
            told += [line.split() for line in pipe]
        assert reaped(pid) == -signal.SIGKILL
        sent = {number for what, number in told if what == "sent"}
        acked, acking = ({number for what, number in told if what == one} for one in ("acked", "acking"))
        with anabranch.open(config) as router:
            found = list(_numbers(router.queue("q")))
            assert len(found) == len(set(found))
            assert sent - acking <= set(found) <= (sent - acked) | {str(len(sent))}
            assert found == sorted(found, key=int)
            assert list(router.queue("q").browse()) == [] and violations(router) == []


def _send(config: anabranch.Config, writer: int) -> None:
    with anabranch.open(config) as router:
        for number in range(1 << 30):
            body = b"%d" % number
            message = router.queue("q").send_leased(BytesIO(body + bytes(9000)) if number % 5 == 4 else body)
            assert message is not None
            os.write(writer, b"sent %d\n" % number)
            if number % 3 == 0:
                os.write(writer, b"acking %d\n" % number)
                message.ack()
                os.write(writer, b"acked %d\n" % number)
            else:
                message.token  # it is kept, though nobody has the message  # noqa: B018


def _numbers(queue: anabranch.Queue) -> Iterator[str]:
    """What is received, each acked."""
    while (message := queue.receive()) is not None:
        assert message.deliveries <= 2
        yield message.read().rstrip(b"\0").decode() if message.is_large else bytes(message.body).rstrip(b"\0").decode()
        message.ack()


def test_a_leased_send_interrupted_anywhere_is_stored_once_and_held_by_nobody(
    router: anabranch.Router, share: Share
) -> None:
    queue = router.queue("q")
    got: list[Message[bytes] | None] = []
    left: set[bytes] = set()
    """Abandoned, between the call's end and this test's note of it: they come back a moment later."""

    def prepare(at: int) -> Callable[[], object]:
        got.clear()
        return lambda: got.append(queue.send_leased(b"%d" % at, message_id=str(at)))

    def check(at: int, where: str) -> None:
        left.add(b"%d" % at)
        again = queue.send_leased(b"%d" % at, message_id=str(at))  # if that was not stored
        messages = [one for one in (*got, again) if one is not None]
        while (message := queue.receive()) is not None:
            messages.append(message)
        for message in messages:
            left.remove(message.body)  # each comes once
            message.ack()
        assert queue.depth() == len(left) < 12, where

    assert everywhere(prepare, check, share=share) > 50
    while left:
        message = queue.receive(PATIENCE)
        assert message is not None
        left.remove(message.body)
        message.ack()
    assert store_of(router).stats().leased == queue.depth() == 0
