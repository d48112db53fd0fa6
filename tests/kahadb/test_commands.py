"""Each command's decoding, and payloads that are not commands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.kahadb import commands as c

from . import writer as w

QUEUE_A = c.KahaDestination(c.QUEUE, "a")
LOCAL = c.TransactionId("ID:host-1:7", False)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (w.loaded(), c.Trace("LOADED Sat Nov 21 21:07:48 UTC 2026")),
        (w.command(0), c.Trace(None)),
        (
            w.command(1, w.field(2, w.destination("a")), w.field(3, "m:1"), w.field(4, b"x")),
            c.AddMessage(None, QUEUE_A, "m:1", b"x", 4, False),
        ),
        (
            w.command(
                1,
                w.field(1, w.local("ID:host-1", 7)),
                w.field(2, w.destination("t", w.TOPIC)),
                w.field(3, "m:1"),
                w.field(4, b"x" * 300),
                w.field(5, 9),
                w.field(6, 1),
            ),
            c.AddMessage(LOCAL, c.KahaDestination(c.TOPIC, "t"), "m:1", b"x" * 300, 9, True),
        ),
        (w.remove("a", "m:1"), c.RemoveMessage(None, QUEUE_A, "m:1", b"", None)),
        (
            w.remove("a", "m:1", w.local("ID:host-1", 7), subscription="client:name"),
            c.RemoveMessage(LOCAL, QUEUE_A, "m:1", b"", "client:name"),
        ),
        (
            w.command(2, w.field(2, w.destination("a")), w.field(3, "m")),
            c.RemoveMessage(None, QUEUE_A, "m", None, None),
        ),
        (w.prepare(w.xa(86, b"\x01\x02", b"\x03")), c.Prepare(c.TransactionId("xa:86:0102:03", True, 86))),
        (w.commit(w.local("ID:host-1", 7)), c.Commit(LOCAL)),
        (w.commit(w.local("ID:host-1", -1)), c.Commit(c.TransactionId("ID:host-1:-1", False))),
        (w.rollback(w.xa(-1, b"\x01", b"\x02")), c.Rollback(c.TransactionId("xa:-1:01:02", True, -1))),
        (w.commit(w.xa(61616, b"ID:host-1", b"7")), c.Commit(c.TransactionId("ID:host-1:7", True, 61616))),
        (w.remove_destination("a"), c.RemoveDestination(QUEUE_A)),
        (
            w.subscribe("t", "client:name", retroactive=True),
            c.Subscription(c.KahaDestination(c.TOPIC, "t"), "client:name", True, b"\x00\x00\x00\x01\x37"),
        ),
        (
            w.subscribe("t", "client:name", end=True),
            c.Subscription(c.KahaDestination(c.TOPIC, "t"), "client:name", False, None),
        ),
        (w.command(8, w.field(1, b"\xac\xed")), c.ProducerAudit(b"\xac\xed")),
        (w.command(9, w.field(1, b"\xac\xed")), c.AckMessageFileMap(b"\xac\xed")),
        (
            w.update(w.command(1, w.field(2, w.destination("a")), w.field(3, "m:1"), w.field(4, b"x" * 200))),
            c.UpdateMessage(c.AddMessage(None, QUEUE_A, "m:1", b"x" * 200, 4, False)),
        ),
        *((w.command(number, w.field(1, "JMS")), c.SchedulerCommand(number)) for number in range(11, 16)),
        (w.rewritten(3), c.RewrittenDataFile(3, 1, True)),
        (w.command(16, w.field(1, 3)), c.RewrittenDataFile(3, 0, True)),
        (w.rewritten(3, skip_if_source_exists=False), c.RewrittenDataFile(3, 1, False)),
    ],
)
def test_a_command_decodes(payload: bytes, expected: c.Command) -> None:
    assert c.decode(payload) == expected


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\x2a\x00", "unknown command number 42"),
        (b"\x01\x00", "required field 2 is missing"),
        (b"\x01\x05\x12", "says 5 bytes, the record holds 1"),
        (b"\x01", "cut"),
        (b"\x01\x02\x12\x7f", "field 2 is cut"),
        (b"\x01\x02\x0d\x00", "wire type 5"),
        (b"\x00" + b"\xff" * 12, "longer than 10 bytes"),
        (w.command(6, w.field(1, w.field(1, 9) + w.field(2, "a"))), "unknown destination type 9"),
    ],
)
def test_what_is_not_a_command_is_named(payload: bytes, reason: str) -> None:
    with pytest.raises(c.CommandError, match=reason):
        c.decode(payload)


@given(st.binary(min_size=1, max_size=60))
def test_any_bytes_decode_or_are_refused(payload: bytes) -> None:
    try:
        c.decode(payload)
    except c.CommandError as error:
        assert str(error)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_integers_of_any_sign_come_back(number: int) -> None:
    assert c.decode(w.commit(w.local("p", number))) == c.Commit(c.TransactionId(f"p:{number}", False))


def test_a_name_that_is_not_utf8_stays_distinct() -> None:
    names = {
        str(c.decode(w.command(6, w.field(1, w.field(1, 0) + w.field(2, raw)))))
        for raw in (b"\xff", b"\xfe", "ü".encode())
    }
    assert len(names) == 3
