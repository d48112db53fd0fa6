"""The compiled loops and those in Python: the same bytes, the same errors. Where nothing is compiled those in Python
are compared with themselves; CI looks that they are compiled."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google_crc32c import extend as crc32c
from hypothesis import example, given
from hypothesis import strategies as st

import anabranch
from anabranch.adapters.core.engine.engine import Engine
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.operations.branches import Forget
from anabranch.adapters.core.operations.changes import Ack, AckRange, Mark, Returned, Send, SendMany
from anabranch.adapters.core.operations.plan import Sequencer
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.record import encoding as records
from anabranch.adapters.core.record.place import order_of
from anabranch.adapters.core.service import sending, settling
from anabranch.adapters.core.state import decoding
from anabranch.adapters.core.state.delivery import Delivery
from anabranch.adapters.core.state.leases import (
    CLAIMED,
    LEASED,
    LEAVING,
    Channel,
    DestinationState,
    Lease,
    LeaseTime,
    Receiver,
    SubscriptionState,
)
from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import bodies, writing
from anabranch.adapters.journal.encoding import SEND_OVERHEAD
from anabranch.adapters.journal.index import row_format
from anabranch.adapters.journal.writing import JournalEncoder
from anabranch.adapters.system import acceleration
from anabranch.adapters.system.acceleration import PURE
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal import reader
from anabranch.adapters.wal.appending import Appender
from anabranch.adapters.wal.appending.python_appender import PythonAppender
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.ticket import Tail
from anabranch.policies.errors import UnknownMessageError
from anabranch.policies.names.destination import Destination
from anabranch.router.sharing import protocol

from ..journal.disk import JournalDisk
from ..wal.made import header_of

ORDERS = Destination.parse("queue://orders")
OTHERS = Destination.parse("queue://others")
SEGMENT = Segment(header_of(base_lsn=1), Path("x"))

STORE: Any = object()

LARGE = st.sampled_from([16_384 - 32, 16_384, 16_385, 20_000]).map(bytes)
"""Longer ones google-crc32c sums."""
BODY = st.one_of(st.binary(max_size=200), LARGE)
EDGES = (0, 1, 255, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -1)
NUMBER = st.one_of(st.integers(0, (1 << 32) - 1), st.sampled_from(EDGES))
LONG = st.one_of(st.integers(0, (1 << 64) - 1), st.sampled_from(EDGES))
GOOD_LONG = st.integers(0, (1 << 40) - 1)


class Rank(enum.IntEnum):
    """A priority of a type of its own."""

    HIGH = 9


def outcome(loop: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What comes of a call: the result, or the error."""
    try:
        return "returned", loop(*arguments)
    except Exception as error:
        return type(error), str(error)


def both(module: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """What comes of a loop; that of its twin is the same."""
    found = outcome(getattr(module, name), *arguments)
    assert found == outcome(PURE[name], *arguments)
    return found


def is_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what the compiled loop leaves to its twin fails."""

    def left(*_: object) -> None:
        raise AssertionError(f"{name} is left to Python")

    if "loops" in anabranch.accelerated:
        monkeypatch.setitem(PURE, name, left)


# Leases


def channel_of(number: int | None, destination: Destination = ORDERS) -> Channel:
    """A queue's channel, or a subscription's of this number."""
    state = state_of(7, destination)
    if number is None:
        return state.channel
    return SubscriptionState(number, state, Subscription(Destination.topic("t"), "a"), 0).channel


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), NUMBER), LONG, st.booleans()).map(
            lambda one: Lease((channel_of(one[0]),), (0, one[1], 0, 0, None), whole=one[2])
        ),
        max_size=4,
    ),
)
def test_acks_are_the_same(leases: list[Lease]) -> None:
    delivery = Delivery("s", 10)
    for lease in leases:
        message = held_by(lease)
        found: list[Any] = []
        for loop in (settling.leave, PURE["leave"]):
            with pytest.MonkeyPatch.context() as patches:
                if loop is settling.leave:
                    is_alone("leave", patches)
                found += loop(delivery, STORE, [message], LEASED)
            assert lease.hold == LEAVING
            lease.hold = LEASED
        fields = ("state", "seq", "number", "place", "drops")
        assert [getattr(found[0], name) for name in fields] == [getattr(found[1], name) for name in fields]
        assert type(found[0]) is Ack
    with pytest.raises(AttributeError):
        settling.leave(delivery, STORE, [None], LEASED)  # type: ignore[list-item]


def held_by(lease: Lease) -> Message:
    """The message of a lease, which its channel knows."""
    lease.channels[0].held[lease.seq] = lease
    return Message(STORE, ORDERS, lease.seq, b"", {}, None, 0, True, lease)


@pytest.mark.parametrize("loop", [settling.leave, PURE["leave"]])
@pytest.mark.parametrize("wrong", ["", "another hold", "another store", "browsed", "acked", "late"])
def test_one_that_is_not_held_does_not_leave(loop: Callable[..., Any], wrong: str) -> None:
    delivery, lease = Delivery("s", 10), Lease((channel_of(None),), (0, 5, 0, 0, None))
    message = held_by(lease)
    if wrong == "another hold":
        lease.hold = CLAIMED
    elif wrong == "another store":
        message._store = object()  # type: ignore[assignment]
    elif wrong == "browsed":
        message = Message(STORE, ORDERS, 5, b"", {}, None, 0, False, lease.place)
    elif wrong == "acked":
        lease.channels[0].held.clear()
    elif wrong == "late":
        lease.time, delivery.timed = LeaseTime(1.0, 0.0), True
    if not wrong:
        (ack,) = loop(delivery, STORE, [message], LEASED)
        assert (ack.seq, lease.hold) == (5, LEAVING)
        return
    with pytest.raises(UnknownMessageError):
        loop(delivery, STORE, [message], LEASED)
    assert lease.hold == (CLAIMED if wrong == "another hold" else LEASED)


@pytest.mark.parametrize("wrong", ["", "twice", "another hold", "another store", "browsed", "acked"])
def test_all_leases_are_taken_or_none(wrong: str) -> None:
    delivery, channel = Delivery("s", 10), channel_of(None)
    leases = [Lease((channel,), (0, seq, 0, 0, None)) for seq in range(3)]
    messages = [Message(STORE, ORDERS, lease.seq, b"", {}, None, 0, True, lease) for lease in leases]
    channel.held.update({lease.seq: lease for lease in leases if wrong != "acked" or lease.seq < 2})
    if wrong == "twice":
        messages.append(messages[0])
    elif wrong == "another hold":
        leases[2].hold = CLAIMED
    elif wrong == "another store":
        messages[2]._store = object()  # type: ignore[assignment]
    elif wrong == "browsed":
        messages[2] = Message(STORE, ORDERS, 2, b"", {}, None, 0, False, leases[2].place)
    if not wrong:
        assert delivery.take(STORE, messages, LEASED, LEAVING) == leases
        assert [lease.hold for lease in leases] == [LEAVING] * 3
        return
    with pytest.raises(UnknownMessageError):
        delivery.take(STORE, messages, LEASED, LEAVING)
    assert [lease.hold for lease in leases] == [LEASED, LEASED, CLAIMED if wrong == "another hold" else LEASED]


class NoRows:
    """The rows of a store in which there is nothing more."""

    def rows(self, *_: object) -> tuple[()]:
        return ()

    def row(self, state: object, subscription: object, seq: int, order: int) -> Any:
        return (order, seq, 0, 0, None)


@pytest.mark.parametrize("loop", [Delivery.lease, PURE["lease"]])
@pytest.mark.parametrize(
    ("case", "expected"), [("", [1, 2]), ("held", [2]), ("returned", [0, 1]), ("expired", [2]), ("purging", [])]
)
def test_the_first_that_nobody_holds_is_leased(loop: Callable[..., Any], case: str, expected: list[int]) -> None:
    delivery, channel, rows = Delivery("s", 10), channel_of(None), NoRows()
    channel.first.ready = deque((0, seq, 1 if case == "expired" and seq == 1 else 0, 0, None) for seq in (1, 2))
    if case == "held":
        channel.held[1] = Lease((channel,), channel.first.ready[0])
    elif case == "returned":
        channel.returned.append((0, 0))
        channel.returned_places[0] = (0, 0, 0, 0, None)
    elif case == "purging":
        channel.purging.add(object())
    found = []
    for _ in range(2):
        receiver = Receiver()
        assert loop(delivery, channel, rows, receiver) is (receiver.lease is not None)
        if receiver.lease is not None:
            found.append(receiver.lease)
            assert channel.held[receiver.lease.seq] is receiver.lease
            assert (receiver.lease.channels, receiver.lease.hold, receiver.lease.whole) == ((channel,), LEASED, False)
    assert [lease.seq for lease in found] == expected
    assert len({lease.number for lease in found}) == len(found)


def test_messages_come_and_go_without_the_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournalDisk(tmp_path) as disk:
        store = disk.create()
        store.send(ORDERS, b"0")
        assert store.receive(ORDERS) is not None  # looked up
        assert store.receive(ORDERS) is None
        for name in ("lease_ready", "look", "leave", "decode"):
            is_alone(name, monkeypatch)
        for number in range(100):
            store.send(ORDERS, b"%d" % number)
            message = store.receive(ORDERS)
            assert message is not None and message.body == b"%d" % number
            message.ack()
            assert message._note.hold == LEAVING


NAMES = st.lists(st.sampled_from([None, None, b"a", b"b", b"c", b"\0made"]), min_size=1, max_size=4)


@given(st.lists(NAMES, max_size=9), st.integers(0, 4))
def test_messages_with_ids_are_planned_the_same(tickets: list[list[bytes | None]], limit: int) -> None:
    """Whatever is a duplicate of what, and falls out of the window."""
    found = []
    for loops in (writing, None):
        sequencer = Sequencer(Catalog(), limit)
        encoder = JournalEncoder(cast("Any", SimpleNamespace(sequencer=sequencer)))
        tail, told = Tail(SEGMENT, 100, 1, 0), list[Any]()
        state = state_of(7)
        for names in tickets:
            sends = [Send(state, bytes(range(records.HEAD.size)), name) for name in names]
            ticket = Ticket(sends, 0)
            batch = (loops.encode_ticket if loops else PURE["encode_ticket"])(sequencer, tail, ticket, 0)
            (loops.accept_batch if loops else PURE["accept_batch"])(encoder, batch)
            tail = batch.tail
            window = sequencer.window
            told.append((ticket.outcomes, batch.data, tail, [one.seq for one in batch.plan.changes], batch.plan.ids))
            told.append((window.items(), dict(window.counts), len(window.order), sequencer.last_seq, sequencer.number))
        found.append(told)
    assert found[0] == found[1]


def test_messages_with_ids_come_and_go_without_the_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournalDisk(tmp_path) as disk:
        store = disk.create(duplicate_window=100)
        store.send(ORDERS, b"0", None, "first")
        assert next(store.browse(ORDERS)).body == b"0"  # what declares the queue is applied
        for name in ("remember", "note_ids", "new_send", "look"):
            is_alone(name, monkeypatch)
        if "loops" in anabranch.accelerated:  # the twins of the others have the marks of a log that ends
            monkeypatch.setattr(Sequencer, "plan", None)
            monkeypatch.setattr(Sequencer, "accept", None)
            monkeypatch.setattr(Engine, "take", None)
        for number in range(300):
            store.send(ORDERS, b"%d" % number, None, str(number))
            store.begin_sends([(ORDERS, Outgoing(b"x", None, f"{number}.{n}")) for n in range(3)]).wait()
        assert store.depth(ORDERS) == 1201


@given(st.lists(st.tuples(LONG, st.sampled_from([None, b"a", b"b"]), st.booleans()), max_size=9))
def test_ids_are_noted_the_same(made: list[tuple[int, bytes | None, bool]]) -> None:
    sends = []
    for seq, name, is_map in made:
        sends.append(Send(state_of(7, Destination.parse("map://m") if is_map else ORDERS), b"", name))
        sends[-1].seq = seq
    found: list[dict[int, Any]] = [{}, {}]
    row_format.note_ids(found[0], sends)
    PURE["note_ids"](found[1], sends)
    assert found[0] == found[1] and list(found[0]) == list(found[1])


# Writing a batch


def state_of(number: int, destination: Destination = ORDERS) -> DestinationState:
    state = DestinationState(number, destination)
    state.declared = True
    return state


MANY = st.lists(BODY, max_size=9).map(tuple)


def many_of(messages: tuple[bytes, ...], state: DestinationState | None = None) -> SendMany:
    head = bytes(range(records.HEAD.size))
    return SendMany(state or state_of(7), head, messages, sum(map(len, messages)) + len(head) * len(messages))


@st.composite
def changes_of(draw: st.DrawFn) -> list[Any]:
    states = [state_of(draw(NUMBER)), state_of(draw(NUMBER), OTHERS)]
    made: list[Any] = []
    for kind in draw(st.lists(st.sampled_from("ssssaaaarxfmn"), min_size=1, max_size=40)):
        state = draw(st.sampled_from(states))
        if kind == "s":
            made.append(Send(state, draw(BODY), None))
            made[-1].seq = draw(st.one_of(GOOD_LONG, LONG))
        elif kind == "n":
            made.append(Mark(state, draw(st.binary(max_size=40)), declares=True))
            made[-1].seq = draw(st.one_of(GOOD_LONG, LONG))
        elif kind == "m":
            made.append(many_of(draw(MANY), state))
            made[-1].seq = draw(st.one_of(GOOD_LONG, LONG))
        elif kind == "a":
            made.append(Ack(state, draw(st.one_of(GOOD_LONG, LONG)), draw(NUMBER)))
        elif kind == "r":
            made.append(AckRange(state, draw(LONG), draw(LONG), draw(NUMBER)))
        elif kind == "x":
            made.append(Returned(state, draw(LONG), draw(NUMBER), draw(GOOD_LONG)))
        else:
            made.append(Forget([bytes(32)]))
    return made


def two_of(seq: int) -> list[Any]:
    """A change of two messages, whose first has this seq."""
    many = many_of((b"1", b"2"))
    many.seq = seq
    return [many]


@given(changes_of(), LONG, LONG, LONG, NUMBER)
@example(two_of((1 << 64) - 2), 0, 0, 0, 0)
@example(two_of((1 << 64) - 1), 0, 0, 0, 0)
def test_a_batch_is_the_same(changes: list[Any], offset: int, lsn: int, counter: int, watermark: int) -> None:
    start = Tail(SEGMENT, offset, lsn, counter)
    found = outcome(writing.encode_batch, start, changes, counter, watermark)
    owns = [getattr(change, "own", None) for change in changes]
    for change in changes:
        if type(change) in (Send, SendMany, Mark):
            change.own = None
    assert found == outcome(PURE["encode_batch"], start, changes, counter, watermark)
    if found[0] == "returned":
        assert owns == [getattr(change, "own", None) for change in changes]


@given(st.lists(st.tuples(BODY, GOOD_LONG), min_size=1, max_size=70), st.integers(0, 1 << 31), GOOD_LONG)
def test_messages_are_written_and_read_without_their_twins(
    messages: list[tuple[bytes, int]], offset: int, lsn: int
) -> None:
    state = state_of(7)
    sends = [Send(state, body, None) for body, _ in messages]
    for send, (_, seq) in zip(sends, messages, strict=True):
        send.seq = seq
    mark = Mark(state, b"\0\0name", declares=True)
    with pytest.MonkeyPatch.context() as patches:
        for name in ("encode_batch", "bodies_of", "body_of", "pack_rows", "places_of", "span_of"):
            is_alone(name, patches)
        assert writing.encode_batch(Tail(SEGMENT, offset, lsn, 0), [mark, *sends], 1, 2)[1].lsn == lsn + 1 + len(sends)
        data, end = writing.encode_batch(Tail(SEGMENT, offset, lsn, 0), [*sends], 1, 2)
        assert end == (SEGMENT, offset + len(data), lsn + len(sends), 1)
        packed = row_format.pack_rows(7, sends)
        assert packed is not None
        places = row_format.places_of(packed[0])
        assert places == [(0, send.seq, 0, 0, send.own) for send in sends]
        assert packed[1] == sum(length for *_, (_, _, length) in places) == len(data) - w.BATCH_HEADER.size
        read = bodies.bodies_of(data, offset, SEGMENT.seed, 7, places)
        assert read == [body for body, _ in messages]
        assert bodies.span_of(places) == (lsn + 1, end.lsn, offset + w.BATCH_HEADER.size, end.offset)
        first = data[w.BATCH_HEADER.size :][: places[0][4][2]]
        assert bodies.body_of(first, places[0][4][1], SEGMENT.seed, 7, places[0]) == messages[0][0]


@given(MANY.filter(bool), st.integers(0, 1 << 31), GOOD_LONG, GOOD_LONG)
def test_many_are_written_as_one_by_one_without_their_twins(
    messages: tuple[bytes, ...], offset: int, lsn: int, seq: int
) -> None:
    many = many_of(messages)
    many.seq = seq
    each = list(many)
    expected = writing.encode_batch(Tail(SEGMENT, offset, lsn, 0), [*each], 1, 2)
    with pytest.MonkeyPatch.context() as patches:
        for name in ("encode_batch", "rows_of_many"):
            is_alone(name, patches)
        assert writing.encode_batch(Tail(SEGMENT, offset, lsn, 0), [many], 1, 2) == expected
        packed = row_format.pack_rows(7, each)
        assert packed is not None
        assert list(row_format.rows_of_many(7, many)) == packed[0]
    assert packed[1] == many.record_bytes + len(many) * SEND_OVERHEAD


@given(MANY, st.tuples(LONG, NUMBER), LONG, NUMBER)
def test_the_rows_of_many_are_the_same(
    messages: tuple[bytes, ...], own: tuple[int, int], seq: int, number: int
) -> None:
    many = many_of(messages)
    many.own, many.seq = own, seq
    found = [
        outcome(lambda loop=loop: list(loop(number, many))) for loop in (row_format.rows_of_many, PURE["rows_of_many"])
    ]
    assert found[0] == found[1]


@given(st.integers(0, (1 << 32) - 1), st.one_of(BODY, st.binary(min_size=760, max_size=1600)))
def test_a_sum_is_that_of_the_package(seed: int, data: bytes) -> None:
    compiled_loops = acceleration.find_compiled(LOOPS, {})
    if compiled_loops is not None:
        assert compiled_loops.checksums(seed, data) == (crc32c(seed, data),) * 2


# Reading a page


@given(
    st.lists(BODY, min_size=1, max_size=5),
    st.integers(0, 400),
    st.integers(0, 255),
    st.tuples(LONG, LONG, LONG, LONG, LONG, st.integers(0, 10)),
    st.integers(0, 5000),
)
def test_what_is_damaged_reads_back_the_same(
    messages: list[bytes], at: int, byte: int, wrong: tuple[int, ...], start: int
) -> None:
    state, offset = state_of(7), 4096
    sends = [Send(state, body, None) for body in messages]
    data, _ = PURE["encode_batch"](Tail(SEGMENT, offset, 5, 0), sends, 1, 2)
    places: list[Any] = [(0, send.seq, 0, 0, send.own) for send in sends]
    lsn, seq, where, length, number, which = wrong
    damaged = bytearray(data)
    if at < len(damaged):
        damaged[at] = byte
    for view, first in (
        (bytes(damaged), offset),
        (data, start),
        (data[:at], offset),
        (b"", 0),
        (damaged, offset),
        (None, 0),
    ):
        both(bodies, "bodies_of", view, first, SEGMENT.seed, 7, places)
    both(bodies, "bodies_of", data, offset, SEGMENT.seed, number, places)
    _, _, _, _, (good_lsn, good_where, good_length) = places[0]
    both(bodies, "bodies_of", data, offset, SEGMENT.seed, 7, [None])
    both(bodies, "bodies_of", data, offset, SEGMENT.seed, 7, [(0, 5, 0, 0, None)])
    mixed = (0, seq if which & 1 else 0, 0, 0, (
        lsn if which & 2 else good_lsn, where if which & 4 else good_where, length if which & 8 else good_length,
    ))  # fmt: skip
    both(bodies, "bodies_of", data, offset, SEGMENT.seed, 7, [mixed])
    both(bodies, "body_of", data[32:], offset + 32, SEGMENT.seed, 7, mixed)
    both(bodies, "body_of", data[32 : 32 + good_length], offset + 32, SEGMENT.seed, 7, mixed)


@given(st.lists(st.tuples(LONG, LONG, LONG), max_size=5))
def test_messages_lie_as_far_apart(owns: list[tuple[int, int, int]]) -> None:
    both(bodies, "span_of", [(0, 5, 0, 0, own) for own in owns])
    both(bodies, "span_of", [None])


@given(
    st.lists(BODY, min_size=1, max_size=5),
    st.tuples(st.integers(0, 400), st.integers(0, 255)),
    st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(-2, 2)),
    st.sampled_from([4096, (1 << 32) - 100]),
    st.one_of(st.just(5), st.sampled_from(EDGES)),
)
def test_the_records_of_a_batch_are_the_same(
    messages: list[bytes], damage: tuple[int, int], wrong: tuple[int, int, int], offset: int, lsn: int
) -> None:
    sends = [Send(state_of(7), body, None) for body in messages]
    data, _ = PURE["encode_batch"](Tail(SEGMENT, 4096, 5, 0), sends, 1, 2)
    damaged = bytearray(data)
    if damage[0] < len(damaged):
        damaged[damage[0]] = damage[1]
    behind, _ = PURE["encode_batch"](Tail(SEGMENT, 4096 + len(data), 5 + len(sends), 0), sends[:1], 1, 2)
    size = w.BATCH_HEADER.size
    other = w.encode_batch_header(SEGMENT.seed, 4096, len(data) - size, len(sends) + wrong[2] & 0xFFFFFFFF, 6, 0)
    for view in (data, bytes(damaged), data[: damage[0]], data + b"x", data + behind, other + data[size:]):
        both(reader, "batches_in", view, SEGMENT.seed, 4096, 5)
        both(reader, "batches_in", view, SEGMENT.seed, offset + wrong[0], lsn + wrong[1])
        both(reader, "records_of", reader.Batch(SEGMENT, offset, w.BatchHeader(0, 0, 0, 0), view[size:]))
    both(reader, "batches_in", None, SEGMENT.seed, 0, 0)
    both(reader, "records_of", None)


def test_a_log_is_read_without_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = [Send(state_of(7), body, None) for body in (b"one", bytes(20_000), b"two")]
    data, _ = writing.encode_batch(Tail(SEGMENT, 4096, 5, 0), [*sends], 1, 2)
    records = data[w.BATCH_HEADER.size :]
    behind, _ = writing.encode_batch(Tail(SEGMENT, 4096 + len(data), 8, 0), [Send(state_of(7), b"three", None)], 1, 2)
    for name in ("batches_in", "records_of"):
        is_alone(name, monkeypatch)
    found = [w.BatchHeader(len(records), 3, 6, 2), w.BatchHeader(len(behind) - w.BATCH_HEADER.size, 1, 9, 2)]
    assert reader.batches_in(data + behind, SEGMENT.seed, 4096, 5) == found
    assert reader.batches_in(data + behind[:-1], SEGMENT.seed, 4096, 5) == found[:1]
    assert reader.batches_in(data, SEGMENT.seed, 4096, 4) == []
    read = reader.records_of(reader.Batch(SEGMENT, 4096, w.BatchHeader(0, 0, 0, 0), records))
    assert [(record.lsn, record.offset, record.length) for record in read] == [send.own for send in sends]


def keeper(limit: int, priorities: bool = False) -> sending.Intake:
    """The intake of a store in which no message can wait."""
    return sending.Intake(
        limit, priorities, None, lambda message: message, lambda: sending.require_schedule(NEVER), True
    )


NEVER: Any = SimpleNamespace(name="s", schedule=None)
HEADERS = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(-9, 1 << 65), st.text(max_size=5), st.binary()))


LOOPS = "anabranch.adapters.system.compiled_loops"
MODULES = {"loops": LOOPS, "appender": "anabranch.adapters.wal.appending.compiled_appender"}


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_123_456_789)


@given(
    st.one_of(BODY, BODY.map(bytearray), st.sampled_from(["text", None])),
    st.one_of(st.none(), HEADERS, st.just({"a": object()}), st.just([1])),
    st.one_of(st.none(), st.text(max_size=9), st.just("i" * 1025), st.just("\ud800"), st.just(7)),
    st.one_of(st.integers(-1, 10), st.sampled_from([*EDGES, 65_535, 65_536, True, 4.0, "4", None, Rank.HIGH])),
    st.one_of(st.just(0), LONG, st.just(None)),
    st.sampled_from([0, 100, 1 << 20]),
    st.booleans(),
)
@pytest.mark.usefixtures("stopped_clock")
def test_a_message_is_made_the_same(
    body: Any, headers: Any, name: Any, priority: Any, expires: Any, limit: int, requeued: bool
) -> None:
    state, outgoing = state_of(7), anabranch.Outgoing(body, headers, name, priority, expires, requeued=requeued)
    found, other = (
        outcome(lambda loop=loop: shown(loop(state, outgoing, keeper(limit))))
        for loop in (sending.new_send, PURE["new_send"])
    )
    assert found == other
    if found[0] == "returned":
        record = found[1][Send.__slots__.index("record")]
        message = decoded(record, (0, 5, expires, 0, None), None)
        assert (message["seq"], message["body"], message["headers"]) == (5, bytes(body), dict(headers or {}))


def decoded(record: bytes, place: Any, lease: Lease | None) -> dict[str, Any]:
    """All fields of the message; those that the twin gives it are the same."""
    found = []
    for loop in (decoding.decode, PURE["decode"]):
        message = loop(STORE, ORDERS, place, record, lease)
        assert message._store is STORE and message.destination is ORDERS
        assert message._note is (lease if lease is not None else place)
        found.append({name: getattr(message, name, None) for name in anabranch.Message.__slots__})
    assert found[0] == found[1]
    return found[0]


@given(
    st.one_of(st.none(), st.binary(max_size=80), BODY),
    GOOD_LONG,
    GOOD_LONG,
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
)
def test_whatever_a_record_holds_is_read_the_same(
    record: Any, seq: int, expires: int, deliveries: int, leased: bool, whole: bool
) -> None:
    place = (0, seq, expires, deliveries, (1, 2, 3))
    lease = Lease((Channel(state_of(7)),), place, whole=whole) if leased else None
    found = [outcome(loop, None, ORDERS, place, record, lease) for loop in (decoding.decode, PURE["decode"])]
    if found[0][0] == "returned":
        decoded(record, place, lease)
    else:
        assert found[0] == found[1]


@pytest.mark.usefixtures("stopped_clock")
def test_plain_messages_are_made_and_read_without_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decode", "new_send", "new_sends", "receipts"):
        is_alone(name, monkeypatch)
    outgoing = anabranch.Outgoing(b"body", {"sku": "T-1"}, "id-1", 9, 12345)
    (send,) = sending.new_sends(state_of(7), [outgoing], keeper(100))
    assert isinstance(send, Send)
    message = decoding.decode(STORE, ORDERS, (0, 5, 12345, 2, None), send.record, None)
    assert send.name == b"id-1"
    assert (message.body, message.headers, message.message_id) == (b"body", {"sku": "T-1"}, "id-1")
    assert (message.priority, message.expires_at_ms, message.deliveries) == (9, 12345, 2)
    assert message.timestamp_ms == 1_700_000_000_123
    (send,) = sending.new_sends(state_of(7), [b"one"], keeper(100))
    assert isinstance(send, Send)
    assert send.record == records.encode(ORDERS, b"one", None, None, 100)[0]
    gathered = anabranch.Outgoing(b"one", {"sku": "T-1"}, "id-1", 9, 12345, requeued=True)
    (send,) = sending.new_sends(state_of(7), iter([gathered]), keeper(100, True))
    assert isinstance(send, Send)
    assert (send.record, send.name) == records.encode_outgoing(ORDERS, gathered, 100)
    assert (send.order, send.expires_at_ms) == (order_of(9, True), 12345)
    assert sending.receipts(ORDERS, [(5, False)]) == [anabranch.Receipt(ORDERS, 5, False)]


OUTGOING = st.builds(
    anabranch.Outgoing,
    BODY,
    st.one_of(st.none(), st.just({"sku": "T-1"}), st.just({"sku": object()})),
    st.one_of(st.none(), st.text()),
    st.one_of(st.just(4), st.integers(-1, 70_000), st.just(2.5)),
    st.sampled_from([0, 0, 5, -1, 1 << 60]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 0, 5]),
)


@given(
    st.lists(
        st.one_of(BODY, OUTGOING, st.just(7)),
        max_size=9,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from([10, 1 << 20]),
)
@pytest.mark.usefixtures("stopped_clock")
def test_many_messages_are_made_the_same(messages: list[Any], declared: bool, priorities: bool, limit: int) -> None:
    state = state_of(7)
    state.declared = declared
    found = [
        outcome(lambda loop=loop: [shown(send) for send in loop(state, messages, keeper(limit, priorities))])
        for loop in (sending.new_sends, PURE["new_sends"])
    ]
    assert found[0] == found[1]


def shown(send: Send) -> list[Any]:
    return [getattr(send, name) for name in Send.__slots__]


@given(st.lists(st.tuples(LONG, st.tuples(LONG, NUMBER, NUMBER), st.sampled_from([0, 0, 0, 5])), max_size=20), NUMBER)
def test_rows_are_the_same(made: list[tuple[int, tuple[int, int, int], int]], number: int) -> None:
    sends = []
    for seq, own, expires in made:
        send = Send(state_of(7), b"", None, 0, expires)
        send.seq, send.own = seq, own
        sends.append(send)
    found = both(row_format, "pack_rows", number, sends)
    both(row_format, "pack_rows", number, [*sends, Send(state_of(7), b"", None)])
    if found[0] == "returned" and found[1] is not None:
        both(row_format, "places_of", found[1][0])


@given(st.lists(st.tuples(st.binary(min_size=12, max_size=12), st.binary(min_size=14, max_size=30)), max_size=9))
def test_whatever_rows_hold_is_read_the_same(page: list[tuple[bytes, bytes]]) -> None:
    both(row_format, "places_of", page)
    both(row_format, "places_of", [(key[:-1], value) for key, value in page])
    both(row_format, "places_of", [*page, (None, None)])


@given(
    st.lists(st.one_of(BODY, BODY.map(bytearray), st.just(None)), max_size=9).map(tuple),
    st.integers(-1, 10),
    st.sampled_from([10, 300, 1 << 20]),
    st.sampled_from([0, 500, 1 << 20]),
)
def test_bodies_alone_are_found_the_same(messages: tuple[Any, ...], first: int, limit: int, size_max: int) -> None:
    found = both(sending, "plain_bodies", messages, first, limit, size_max)
    both(sending, "plain_bodies", messages, None, limit, size_max)
    if found[0] == "returned":
        count, size = found[1]
        taken = messages[first : first + count]
        assert size == sum(records.HEAD.size + len(body) for body in taken)


@given(LONG, st.integers(-1, 9))
def test_receipts_of_many_are_the_same(first: int, count: int) -> None:
    found = both(sending, "receipts_from", ORDERS, first, count)
    assert [type(receipt) for receipt in found[1]] == [anabranch.Receipt] * max(count, 0)
    both(sending, "receipts_from", ORDERS, None, count)
    both(sending, "receipts_from", ORDERS, first, None)


@given(st.lists(st.tuples(GOOD_LONG, st.booleans())))
def test_receipts_are_the_same(outcomes: list[tuple[int, bool]]) -> None:
    both(sending, "receipts", ORDERS, outcomes)
    both(sending, "receipts", ORDERS, [*outcomes, (1,)])


# Which of them are used


@given(
    st.one_of(LONG, st.integers(), st.none()),
    st.one_of(st.none(), st.tuples(st.one_of(LONG, st.integers()), st.booleans())),
)
def test_answers_are_the_same(number: Any, result: Any) -> None:
    both(protocol, "pack_sent", number, result)


def test_answers_are_made_without_their_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    is_alone("pack_sent", monkeypatch)
    frame = bytearray(protocol.pack_sent(1000, (5, False)))
    assert protocol.unpack(frame) == [[1000, True, [5, False]]]


def test_it_is_told_which_are_used() -> None:
    assert anabranch.accelerated is acceleration.accelerated
    assert (writing.encode_batch is PURE["encode_batch"]) is ("loops" not in anabranch.accelerated)
    assert (Appender is PythonAppender) is ("appender" not in anabranch.accelerated)


@pytest.mark.parametrize(
    ("compiled", "python", "pure", "told"),
    [
        (["loops", "appender"], [], False, "compiled: loops, appender"),
        (
            ["loops"],
            ["appender"],
            False,
            "compiled: loops; in Python, which is slower: appender. That was not compiled",
        ),
        ([], ["loops", "appender"], True, "nothing is compiled; in Python, which is slower: loops, appender (ANABR"),
    ],
)
def test_it_is_told_and_logged_which_are_not_and_why(
    compiled: list[str], python: list[str], pure: bool, told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(acceleration, "_compiled_parts", compiled)
    monkeypatch.setattr(acceleration, "_python_parts", python)
    monkeypatch.setenv(acceleration.FORCE_PURE, "1" if pure else "0")
    assert acceleration.describe_parts().startswith(told)
    assert ("pip install --force-reinstall" in acceleration.describe_parts()) is (not pure and bool(python))
    with caplog.at_level("INFO", "anabranch.adapters.system"), anabranch.open(tmp_path / "data"):
        pass
    assert [told in message for message in caplog.messages] == [True] * bool(python)


@pytest.mark.parametrize(("value", "pure"), [("1", True), ("0", False), ("", False)])
def test_the_environment_can_ask_for_the_loops_in_python(value: str, pure: bool) -> None:
    program = "import anabranch; print(*anabranch.accelerated)"
    environment = {**os.environ, acceleration.FORCE_PURE: value}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    there = [part for part, name in MODULES.items() if acceleration.find_compiled(name, {}) is not None]
    assert run.stdout.split() == ([] if pure else there)
