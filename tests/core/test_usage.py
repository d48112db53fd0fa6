"""What a store tells the usage log: rows and names, the same from the compiled loop and from its twin in Python."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.core.engine import usage
from anabranch.adapters.core.engine.usage import ROW, Buffer, Recorder, Rows, hash_of
from anabranch.adapters.core.operations.branches import Branch, Commit
from anabranch.adapters.core.operations.changes import Ack, AckRange, Change, Send, SendMany
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.state.leases import DestinationState, SubscriptionState
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.system.acceleration import PURE
from anabranch.policies.names.destination import Destination

ORDERS = DestinationState(1, Destination.parse("queue://orders"))
AUDIT = DestinationState(2, Destination.parse("queue://audit"))
PRICES = DestinationState(3, Destination.parse("topic://prices"))
DESK = SubscriptionState(7, PRICES, Subscription(PRICES.destination, "desk", "c1", None, False), 0)
RECORD = bytes(26) + b"body"


def send(state: DestinationState, seq: int, record: bytes = RECORD) -> Send:
    made = Send(state, record, None)
    made.seq = seq
    if state is PRICES:
        made.recipients = [DESK]
    return made


def many(first: int, *bodies: bytes) -> SendMany:
    made = SendMany(ORDERS, bytes(26), bodies, sum(26 + len(body) for body in bodies))
    made.seq = first
    return made


def ticket(*changes: Change, outcomes: list[Any] | None = None, transaction: bool = False) -> Ticket:
    made = Ticket(list(changes), 0)
    made.outcomes = outcomes or [(change.seq, False) if type(change) is Send else None for change in changes]
    made.transaction = transaction
    return made


def plan(*tickets: Ticket) -> Any:
    """As much of a Plan as is asked for; a message that is a duplicate is none of its changes."""
    changes = [
        change for one in tickets for change, outcome in zip(one.content, one.outcomes, strict=True)
        if type(change) is not Send or not outcome[1]
    ]  # fmt: skip
    return SimpleNamespace(changes=changes, tickets=list(tickets))


def recorded(
    *tickets: Ticket, loop: Any = usage.record_usage, **options: Any
) -> tuple[list[tuple[int, ...]], list[Any]]:
    """Rows without their times, and what was declared. Told twice, so that names are known the second time."""
    buffer = Buffer(1 << 20, **options)
    recorder, made = Recorder(buffer, "s", "ab12"), plan(*tickets)
    loop(recorder, made)
    loop(recorder, made)
    rows, declared = buffer.empty()
    return [row[1:] for row in ROW.iter_unpack(rows)], declared


def test_rows_of_each_change() -> None:
    transaction = bytes(28) + (9).to_bytes(4, "big")
    branch = Branch(transaction, (), [send(ORDERS, 20), Ack(AUDIT, 4, 0)])
    rows, declared = recorded(
        ticket(send(ORDERS, 5)),
        ticket(send(ORDERS, 6), outcomes=[(5, True)]),
        ticket(many(7, b"a", b"bcd")),
        ticket(Ack(ORDERS, 5, 0), send(AUDIT, 9), transaction=True),
        ticket(Ack(ORDERS, 7, 0), Ack(AUDIT, 9, 0)),
        ticket(send(PRICES, 10)),
        ticket(Ack(PRICES, 10, 7)),
        ticket(AckRange(ORDERS, 1, (1 << 64) - 1, 0)),
        ticket(Commit(branch), outcomes=[[(20, False), None]]),
        ticket(Commit(branch)),
    )
    half = rows[: len(rows) // 2]
    assert half == [
        (5, 1, 30, 0, 0, 1, usage.SENT, 0),
        (7, 1, 27, 0, 0, 1, usage.SENT, 0),
        (8, 1, 29, 0, 0, 1, usage.SENT, 0),
        (5, 1, 0, 1, 0, 0, usage.ACKED, 0),
        (9, 2, 30, 1, 0, 1, usage.SENT, 0),
        (7, 1, 0, 0, 0, 0, usage.ACKED, 0),
        (9, 2, 0, 0, 0, 0, usage.ACKED, 0),
        (10, 3, 30, 0, 4, 1, usage.SENT, 0),
        (10, 3, 0, 0, 7, 0, usage.ACKED, 0),
        (1, 1, (1 << 32) - 2, (1 << 32) - 1, 0, 0, usage.ACKED_RANGE, 0),
        (20, 1, 30, 9, 0, 1, usage.SENT, usage.ACROSS),
        (4, 2, 0, 9, 0, 0, usage.ACKED, usage.ACROSS),
    ]
    assert declared == [
        (1, ("s", "ab12", False, "queue://orders", [])),
        (2, ("s", "ab12", False, "queue://audit", [])),
        (3, ("s", "ab12", False, "topic://prices", [])),
        (4, [(7, "c1:desk")]),
    ]
    assert rows[len(rows) // 2 :] == [
        (*row[:3], 2 if row[3] == 1 else row[3], *row[4:]) for row in half
    ]  # another transaction


def test_a_row_of_version_1() -> None:
    packed = ROW.pack(0x0102030405060708, 5, 1, 30, 9, 7, 1, usage.SENT, usage.ACROSS)
    assert packed.hex() == "08070605040302010500000000000000010000001e000000090000000700000001000101"


SEQ = st.integers(0, (1 << 64) - 1)
CHANGE = st.one_of(
    st.builds(send, st.sampled_from([ORDERS, AUDIT]), SEQ, st.binary(min_size=26, max_size=60)),
    st.builds(Ack, st.sampled_from([ORDERS, AUDIT, PRICES]), SEQ, st.sampled_from([0, 7])),
    st.builds(
        lambda seq, bodies: many(seq, *bodies), st.integers(0, 1 << 63), st.lists(st.binary(max_size=9), max_size=5)
    ),
)
TICKET = st.builds(
    lambda changes, transaction: ticket(*changes, transaction=transaction), st.lists(CHANGE, max_size=4), st.booleans()
)


@given(st.lists(TICKET, min_size=1, max_size=4), st.sampled_from([1 << 32, 1 << 31, 1]), st.booleans())
def test_both_loops_tell_the_same(tickets: list[Ticket], threshold: int, alone: bool) -> None:
    def takes(destination: Destination) -> bool:
        return not alone or destination == ORDERS.destination

    def told(loop: Any) -> object:
        rows, declared = recorded(*tickets, loop=loop, threshold=threshold, takes=takes)
        order = {number: at for at, number in enumerate(dict.fromkeys(row[3] for row in rows if row[3]), 1)}
        return [(*row[:3], order.get(row[3], 0), *row[4:]) for row in rows], declared  # numbers may be left out

    assert told(usage.record_usage) == told(PURE["record_usage"])


@given(st.integers(0, 1 << 62), st.sampled_from([1 << 31, 1 << 30]))
def test_a_message_is_kept_whole_or_not_at_all(first: int, threshold: int) -> None:
    seqs = range(first, first + 200)
    rows, _ = recorded(*(ticket(send(ORDERS, seq)) for seq in seqs), *(ticket(Ack(ORDERS, seq, 0)) for seq in seqs),
                       threshold=threshold)  # fmt: skip
    sent = {row[0] for row in rows if row[6] == usage.SENT}
    assert sent == {row[0] for row in rows if row[6] == usage.ACKED} == {s for s in seqs if hash_of(s) < threshold}


def test_a_sample_is_about_as_large_as_was_asked_for() -> None:
    for share in (0.5, 0.1):
        kept = sum(hash_of(seq) < share * usage.WHOLE for seq in range(20_000))
        assert abs(kept - share * 20_000) < 5 * (share * (1 - share) * 20_000) ** 0.5


@pytest.mark.parametrize("loop", [usage.record_usage, PURE["record_usage"]])
def test_what_is_not_recorded_is_not(loop: Any) -> None:
    tickets = [ticket(send(ORDERS, 1), Ack(AUDIT, 3, 0)), ticket(Ack(ORDERS, 1, 0))]
    rows, declared = recorded(*tickets, loop=loop, takes=lambda destination: destination.name == "audit")
    assert [row[:2] for row in rows] == [(3, 1)] * 2
    assert [name[3] for _, name in declared] == ["queue://audit"]


@pytest.mark.parametrize("kind", [Rows, PURE["Rows"]])
def test_what_waits_is_bounded_and_the_rest_is_counted(kind: Any) -> None:
    """Rule U5."""
    rows = kind(3 * ROW.size, usage.WHOLE)
    rows.append(bytes(2 * ROW.size))
    rows.append(bytes(2 * ROW.size))
    rows.append(bytes(ROW.size))
    rows.append(bytes(ROW.size))
    assert (rows.size, rows.lost) == (3 * ROW.size, 3)
    assert rows.take() == bytes(3 * ROW.size)
    assert (rows.size, rows.take()) == (0, b"")
    rows.append(bytes(ROW.size))
    assert rows.size == ROW.size


def test_a_store_loses_what_finds_no_room() -> None:
    buffer = Buffer(2 * ROW.size)
    recorder, made = Recorder(buffer, "s", "ab12"), plan(ticket(send(ORDERS, 5)))
    for _ in range(5):
        usage.record_usage(recorder, made)
    assert (buffer.rows.size, buffer.rows.lost) == (2 * ROW.size, 3)


@pytest.mark.parametrize("loop", [usage.record_usage, PURE["record_usage"]])
def test_names_that_wait_are_bounded_and_what_has_none_is_counted(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule U5: nobody empties the buffer, since its disk hangs."""
    monkeypatch.setattr(usage, "NAMES_MAX", 10)
    monkeypatch.setattr(usage, "NAMES_BYTES_MAX", 20 * usage.NAME_BYTES)
    buffer = Buffer(1 << 20)
    recorder = Recorder(buffer, "s", "ab12")

    def told(*changes: Change) -> None:
        made = plan(ticket(*changes))
        loop(recorder, made)

    states = [DestinationState(number, Destination.parse(f"queue://q{number}")) for number in range(1, 101)]
    for state in states:
        told(send(state, 1))
    known = len(buffer.declared)
    assert 15 <= known <= 21
    assert buffer.rows.lost == 100 - known
    told(send(states[known - 1], 2))  # that is known by its number
    assert buffer.rows.lost == 100 - known
    made = many(2, b"a", b"b")
    made.state = states[-1]
    told(made)
    assert buffer.rows.lost == 102 - known
    assert len(buffer.declared) == known
    rows, declared = buffer.empty()
    assert [row[2] for row in ROW.iter_unpack(rows)] == [*dict(declared), known]
    told(send(states[-1], 3))  # there is room again
    assert buffer.rows.lost == 102 - known
    assert [name[3] for _, name in buffer.empty()[1]] == ["queue://q100"]


def test_sets_of_subscriptions_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule U5."""
    monkeypatch.setattr(usage, "NAMES_BYTES_MAX", 5 * usage.NAME_BYTES)
    buffer = Buffer(1 << 20)
    recorder = Recorder(buffer, "s", "ab12")
    desks = [SubscriptionState(n, PRICES, Subscription(PRICES.destination, f"d{n}", "c", None, False), 0)
             for n in range(1, 51)]  # fmt: skip
    for desk in desks:
        change = send(PRICES, 1)
        change.recipients = [desk]
        made = plan(ticket(change))
        usage.record_usage(recorder, made)
    sets = [name for _, name in buffer.declared if not isinstance(name, tuple)]
    assert 2 <= len(sets) <= 5
    assert buffer.rows.size == len(sets) * ROW.size
    assert buffer.rows.lost == 50 - len(sets)


def test_a_fault_of_ours_is_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    """Rule U6."""
    buffer = Buffer(1 << 20, takes=lambda destination: 1 // 0 > 0)
    recorder, made = Recorder(buffer, "s", "ab12"), plan(ticket(send(ORDERS, 5)))
    with caplog.at_level(logging.ERROR):
        usage.record_usage(recorder, made)
        usage.record_usage(recorder, made)
    assert buffer.rows.broken
    assert buffer.rows.lost == 2
    assert buffer.empty()[0] == b""
    assert "the usage log stops" in caplog.text


def test_names_are_declared_anew_once_they_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule U4: no row comes without its name."""
    monkeypatch.setattr(usage, "NAMES_MAX", 2)
    buffer = Buffer(1 << 20)
    recorder = Recorder(buffer, "s", "ab12")
    for _ in range(2):
        for state in (ORDERS, AUDIT, PRICES, ORDERS):
            made = plan(ticket(Ack(state, 5, 0)))
            usage.record_usage(recorder, made)
        rows, declared = buffer.empty()
        names = dict(declared)
        assert [names[row[2]][3] for row in ROW.iter_unpack(rows)] == [
            "queue://orders", "queue://audit", "topic://prices", "queue://orders",
        ]  # fmt: skip
