"""Codecs: what is sent is encoded and labelled, what is received decoded, and what does not decode is in hand."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

import anabranch
from anabranch import DecodeError, Message, Outgoing

from ..contract.disk import PATIENCE
from ..taking import take

PLAIN: Any = {"number": 17, "price": 1.5, "paid": True, "who": None, "lines": [{"a": "ä"}, []]}


@pytest.mark.parametrize(
    ("codec", "content_type", "value"),
    [
        ("json", "application/json", PLAIN),
        (
            "msgpack",
            "application/msgpack",
            {**PLAIN, 7: b"bytes", "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
        ),
        ("pickle", "application/x-python-pickle", {*"abc", 2 + 1j}),
    ],
)
def test_values_go_in_and_come_out(router: anabranch.Router, codec: str, content_type: str, value: Any) -> None:
    queue = router.queue("q", codec=codec)
    queue.send(value, {"own": 1}, "id-1")
    message = take(queue)
    assert message.body == value
    assert message.body is message.body
    assert message.headers == {"own": 1, "content_type": content_type}
    assert message.message_id == "id-1"
    (plain,) = router.queue("q").browse()
    assert plain.body == plain.raw_body == message.raw_body
    assert f"{len(plain.body)} bytes" in repr(message)
    message.ack()
    assert queue.depth() == 0


def test_whatever_sends(router: anabranch.Router) -> None:
    queue = router.queue("q", codec="json")
    queue.send([0])
    queue.send_nowait([1], priority=9).result(PATIENCE)
    queue.send_many([[2], Outgoing([3], {"own": 3}, "id-3")])
    with router.transaction() as tx:
        tx.send(queue, [4])
    router.send(queue, [5])
    router.queue("q").send(b"[6]")  # without the header, which whoever made the bytes has not said
    router.queue("q").send(b"[7]", {"content_type": "Application/JSON; charset=utf-8"})
    messages = list(queue.browse())
    assert [message.body for message in messages] == [[n] for n in range(8)]
    assert [message.headers.get("content_type") for message in messages[:6]] == ["application/json"] * 6
    assert messages[3].headers["own"] == 3


def test_whatever_receives(router: anabranch.Router) -> None:
    queue = router.queue("q", codec="json")
    for n in range(8):
        queue.send([n], message_id=f"id-{n}")
    found = queue.find("id-0")
    assert found is not None
    assert found.body == [0]
    assert take(queue).body == [0]
    assert [message.body for message in queue.receive_many(2)] == [[1], [2]]
    consumed = queue.consume(timeout=0)
    assert [next(consumed).body, next(consumed).body] == [[3], [4]]
    heard: SimpleQueue[Message[Any]] = SimpleQueue()
    listener = queue.listen(heard.put, credit=2)
    assert [heard.get(timeout=PATIENCE).body for _ in range(2)] == [[5], [6]]
    listener.close()
    assert [message.body for message in consumed] == [[7]]


def test_a_topic_and_its_subscriptions(router: anabranch.Router) -> None:
    topic = router.topic("t", codec="msgpack")
    audit = topic.subscribe("audit")
    topic.send({"n": 1})
    assert take(audit).body == {"n": 1}
    (again,) = topic.subscriptions()
    assert [message.body for message in again.browse()] == [message.body for message in topic.browse()] == [{"n": 1}]


# What does not decode


@pytest.mark.parametrize(
    ("codec", "body", "headers", "says"),
    [
        ("json", b"{", None, "does not decode as application/json"),
        ("json", b"\xff", None, "does not decode as application/json"),
        ("json", b"[" * 100_000, None, "does not decode as application/json"),
        ("msgpack", b"\xc1", None, "does not decode as application/msgpack"),
        ("pickle", b"what?", None, "does not decode as application/x-python-pickle"),
        ("json", b"1", {"content_type": "application/msgpack"}, "is of content type 'application/msgpack'"),
        ("msgpack", b"1", {"content_type": 7}, "is of content type 7"),
    ],
)
def test_what_does_not_decode_is_in_hand(
    memory: anabranch.Router, codec: str, body: bytes, headers: anabranch.Headers | None, says: str
) -> None:
    memory.queue("q").send(body, headers)
    queue = memory.queue("q", codec=codec)
    message = take(queue)
    for _ in range(2):
        with pytest.raises(DecodeError, match=says) as caught:
            _ = message.body
        assert caught.value.message is message
    assert message.raw_body == body
    assert queue.counts() == anabranch.Counts(0, 1)
    message.release()
    take(queue).reject("it does not decode")
    (letter,) = memory.queue("dlq").browse()
    assert (letter.body, letter.headers["dead_letter_reason"]) == (body, "it does not decode")


def test_one_that_does_not_decode_holds_up_no_other(router: anabranch.Router) -> None:
    router.queue("q").send_many([b"1", b"?", b"3"])
    queue = router.queue("q", codec="json")
    messages = queue.receive_many(5)
    assert [messages[0].body, messages[2].body] == [1, 3]
    with pytest.raises(DecodeError):
        _ = messages[1].body
    router.release(messages)
    with router.transaction() as tx:
        for message in queue.consume(timeout=0):
            tx.ack(message)
    assert queue.depth() == 0


def test_dead_letters_of_values_go_back(router: anabranch.Router) -> None:
    """And a queue of them is read by the codec of their source."""
    queue = router.queue("q", codec="json")
    queue.send({"n": 1})
    take(queue).reject()
    letter = take(router.queue("dlq", codec="json"))
    assert letter.body == {"n": 1}
    assert router.requeue(letter) == 1
    assert take(queue).body == {"n": 1}


# Codecs of one's own, and what is none


class Upper:
    content_type = "text/upper"

    def encode(self, value: str) -> bytes:
        return value.upper().encode()

    def decode(self, body: bytes) -> str:
        return body.decode().lower()


def test_a_codec_of_ones_own(memory: anabranch.Router) -> None:
    queue = memory.queue("q", codec=Upper())
    queue.send("abc")
    message = take(queue)
    assert (message.body, message.raw_body) == ("abc", b"ABC")
    with pytest.raises(ValueError, match=r"cannot be encoded as text/upper: .*it is 17"):
        queue.send(17)  # type: ignore[arg-type]


def test_a_codec_that_makes_no_bytes(memory: anabranch.Router) -> None:
    class Text(Upper):
        def encode(self, value: str) -> Any:
            return value

    with pytest.raises(TypeError, match="has encoded 'x' as str, not bytes"):
        memory.queue("q", codec=Text()).send("x")


@pytest.mark.parametrize(
    ("codec", "kind", "says"),
    [
        ("jsno", ValueError, "no codec 'jsno'; there are json, msgpack, pickle"),
        ("", ValueError, "no codec ''"),
        (pickle, TypeError, "a codec is one of json, msgpack, pickle"),
        (Upper, TypeError, "a codec is one of"),
        (7, TypeError, "a codec is one of"),
    ],
)
def test_what_is_no_codec(memory: anabranch.Router, codec: Any, kind: type[Exception], says: str) -> None:
    calls: list[Callable[..., Any]] = [memory.queue, memory.topic]
    for call in calls:
        with pytest.raises(kind, match=says):
            call("q", codec=codec)
    assert not memory.exists("q")


@pytest.mark.parametrize(
    ("codec", "value", "kind"),
    [
        ("json", b"bytes", TypeError),
        ("json", float("nan"), ValueError),
        ("json", "\ud800", ValueError),
        ("json", {1, 2}, TypeError),
        ("msgpack", object(), TypeError),
        ("msgpack", 1 << 70, ValueError),
        ("pickle", lambda: None, ValueError),
    ],
)
def test_what_cannot_be_encoded_is_not_sent(
    memory: anabranch.Router, codec: str, value: Any, kind: type[Exception]
) -> None:
    queue = memory.queue("q", codec=codec)
    sends: list[Callable[[], object]] = [
        lambda: queue.send(value),
        lambda: queue.send_nowait(value),
        lambda: queue.send_many([1, value]),
        lambda: queue.send_many([Outgoing(value)]),
        lambda: memory.send(queue, value),
    ]
    for send in sends:
        with pytest.raises(kind, match="a body for queue://q cannot be encoded as application/"):
            send()
    assert queue.depth() == 0


def test_headers_that_contradict_the_codec(memory: anabranch.Router) -> None:
    queue = memory.queue("q", codec="json")
    with pytest.raises(
        ValueError, match=r"content_type is 'text/plain'.*writes application/json; leave the header out"
    ):
        queue.send(1, {"content_type": "text/plain"})
    with pytest.raises(TypeError, match="headers map names"):
        queue.send(1, ["content_type"])  # type: ignore[arg-type]
    queue.send(1, {"content_type": "application/json; charset=utf-8"})
    assert take(queue).body == 1
