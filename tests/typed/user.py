"""What a user writes, for type checkers: what runs is right, and what is wrong is an error in the line that says so.

A wrong line has a comment that silences its error. Both checkers are told to complain of such a comment where there is
nothing to silence (test_checkers.py), so that an error which is not found any more is found out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import anabranch
from anabranch import (
    Config,
    JournalOptions,
    LimitOptions,
    MemoryOptions,
    Outgoing,
    Redelivery,
    SqlOptions,
    StoreConfig,
    TransactionOptions,
    UsageOptions,
)
from anabranch.aio import AsyncMap, AsyncQueue


@dataclass(frozen=True)
class Mail:
    """What goes through the queues here."""

    to: str


class MailCodec:
    """Written without a word of ours."""

    content_type = "text/mail"

    def encode(self, value: Mail) -> bytes:
        return value.to.encode()

    def decode(self, body: bytes) -> Mail:
        return Mail(body.decode())


def options_as_they_run(directory: Path) -> Config:
    """Sizes, durations and choices as text, secrets as plain text."""
    limit = LimitOptions(match=["queue://a"], max_bytes="1GiB", when_full="block", block_timeout="2m")
    journal = JournalOptions(
        sync="never", sync_interval="1s", segment_size="32MiB", on_corruption="salvage", dead_letter="dlq",
        max_deliveries=3, redelivery=Redelivery(delay="1s", max_delay=60), lease_timeout="30s", limits=[limit],
        file_mode="0640", archive_directory=str(directory / "archive"), archive_max_age="1d",
    )  # fmt: skip
    sql = SqlOptions(lease_expiration="30s", url=f"sqlite:///{directory}/c.db", min_free_disk=None, chunk_size="64KiB")
    return Config(
        str(directory),
        [
            StoreConfig("a", ["a", "b"], journal=journal),
            StoreConfig("b", ["*"], memory=MemoryOptions(max_bytes="1MiB")),
            StoreConfig("c", ["c.>"], sql=sql),
        ],
        TransactionOptions(timeout="5m", sync="never"),
        usage=UsageOptions(flush_interval="500ms", max_bytes="2MiB"),
    )


def options_that_are_wrong() -> None:
    JournalOptions(sync="nevr")  # type: ignore
    JournalOptions(segment_size=1.5)  # type: ignore
    JournalOptions(lease_timeout=timedelta(seconds=1))  # type: ignore
    JournalOptions(url="sqlite://")  # type: ignore
    JournalOptions(max_deliveries="3")  # type: ignore
    SqlOptions(url=5)  # type: ignore
    SqlOptions(sync="never")  # type: ignore
    Redelivery()  # type: ignore
    LimitOptions(match=["a"], when_full="drop")  # type: ignore
    TransactionOptions(sync="periodic")  # type: ignore


def queues_as_they_run(router: anabranch.Router) -> None:
    """Of bytes, and of Mail."""
    plain = router.queue("a")
    assert_type(plain, anabranch.Queue[bytes])
    plain.send(b"1", {"n": 1}, deliver_in=0)
    plain.send_many([b"2", Outgoing(b"3", priority=9)])
    for message in plain.receive_many(3):
        assert_type(message.body, bytes)
        message.ack()

    mails = router.queue("b", codec=MailCodec())
    assert_type(mails, anabranch.Queue[Mail])
    mails.send(Mail("a"))
    mails.send_many([Mail("b"), Outgoing(Mail("c"))])
    mails.send_nowait(Mail("d")).result()
    with router.transaction() as tx:
        tx.send(mails, Mail("e"))
        tx.send("queue://b", b"f")
    router.send(mails, Mail("g"))
    received = mails.receive()
    assert received is not None
    assert_type(received, anabranch.Message[Mail])
    assert_type(received.body, Mail)
    assert_type(received.raw_body, bytes)
    received.ack()
    for other in mails.consume(timeout=0):
        assert_type(other.body, Mail)
        router.ack(other)
    for letter in mails.dead_letters():
        assert_type(letter.message.body, Mail)
    for one in router.consume("b.>", timeout=0, codec=MailCodec()):
        assert_type(one.body, Mail)
    anything = router.receive(router.queue("b", codec="json"))
    assert_type(anything, anabranch.Message[Any] | None)


def topics_and_maps_as_they_run(router: anabranch.Router) -> None:
    """And what comes of them."""
    topic = router.topic("b", codec=MailCodec())
    desk = topic.subscribe("desk")
    assert_type(desk, anabranch.Subscriber[Mail])
    topic.send(Mail("a"))
    assert [message.body.to for message in desk.receive_many(5)] == ["a"]
    map = router.map("b", codec=MailCodec())
    map.put("k", Mail("a"))
    assert_type(map.get("k"), Mail | None)
    assert_type(map.get_nowait("k").result(), Mail | None)
    assert_type(map.get_many_nowait(["k"]).result(), dict[str, Mail])
    assert_type(router.map("b"), anabranch.Map[bytes])


def passed_on(queue: anabranch.Queue, mails: anabranch.Queue[Mail], message: anabranch.Message) -> bytes:
    """A bare name means bytes."""
    assert_type(queue, anabranch.Queue[bytes])
    queue.send(message.body)
    mails.send(Mail(message.body.decode()))
    return message.body


async def what_is_awaited(mails: AsyncQueue[Mail], map: AsyncMap[Mail]) -> None:
    """Not run."""
    await mails.send(Mail("a"))
    await mails.send_many([Mail("b"), Outgoing(Mail("c"))])
    await map.put("k", Mail("a"))
    await map.compare_and_set("k", Mail("a"), Mail("b"))


def queues_that_are_wrong(router: anabranch.Router) -> None:
    plain, mails = router.queue("a"), router.queue("b", codec=MailCodec())
    topic = router.topic("b", codec=MailCodec())
    mails.send(3)  # type: ignore
    mails.send(b"3")  # type: ignore
    mails.send_nowait("x")  # type: ignore
    mails.send_many([3])  # type: ignore
    mails.send_many([Outgoing(3)])  # type: ignore
    plain.send("text")  # type: ignore
    plain.send(Mail("a"))  # type: ignore
    plain.send(b"1", prio=3)  # type: ignore
    router.send(mails, 3)  # type: ignore
    router.send("queue://b", Mail("a"))  # type: ignore
    router.transaction().send(mails, b"3")  # type: ignore
    router.queue("b", codec=3)  # type: ignore
    topic.receive()  # type: ignore
    router.map("b", codec=MailCodec()).put("k", "v")  # type: ignore
    for message in plain.receive_many(1):
        passed_on(mails, mails, message)  # type: ignore
    router.settle("token", "ack")  # type: ignore
