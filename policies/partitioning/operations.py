"""A trace as arrays: every send joined to its acks, every operation with its time and its bytes.

This is what the exact model runs on. It holds 44 bytes an operation and is built in one pass without Python objects.
An ack belongs to the send of the same destination and message id; a message lives until as many acks came as it needs,
that is, until the last one. A message sent twice under one id lives, in each of its copies, until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import TraceError
from .sizes import JournalSizes, Model, OperationSizes
from .trace import Finding, canonical_destination, check_times, count_of

Clock = Literal["ts", "seq"]
CLOCKS: tuple[Clock, ...] = ("ts", "seq")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NEVER = float("inf")
SEQ_SPAN_MAX = (1 << 62) - 1
"""Positions from the first operation to the last: a bucket's number and time are computed from their difference."""


@dataclass(frozen=True, slots=True)
class TransactionSet:
    """How many transactions touched exactly these destinations (numbers into `Operations.destinations`)."""

    members: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class DestinationTotals:
    """What one destination did in the trace."""

    name: str
    sends: int
    acks: int
    bytes: int
    pending: int
    """Sends whose last ack the trace does not show."""


@dataclass(frozen=True, slots=True)
class Operations:
    """A whole trace in the global order. Times are seconds on the chosen clock."""

    destinations: tuple[str, ...]
    destination: npt.NDArray[np.int32]
    size: Ints
    time: Floats
    send: Ints
    """For an ack: the row of the send that it ends; -1 for a send and for an ack of an unknown message."""
    end: Floats
    """For a send: the time of its last ack, NEVER if it did not come. For an ack: its own time."""
    seq: Ints
    transactions: tuple[TransactionSet, ...]
    totals: tuple[DestinationTotals, ...]
    sizes: OperationSizes
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.time)

    @property
    def duration(self) -> float:
        """Seconds from the first operation to the last."""
        return float(self.time[-1] - self.time[0])


def build(
    table: pa.Table,
    *,
    model: Model = "anabranch",
    clock: Clock = "ts",
    operations_per_second: float = 1000.0,
    sizes: JournalSizes | None = None,
    source: str = "the trace",
) -> Operations:
    """The arrays of a trace in `trace.SCHEMA`. Raises TraceError where the trace cannot be used.

    `operations_per_second` turns positions into seconds when `clock` is "seq". `source` is what errors call the trace.
    """
    if clock == "ts":
        check_times(table, source)
    table = _ordered(table, source)
    seq = table.column("seq").to_numpy()
    is_send = pc.equal(table.column("op"), "send").to_numpy()
    names, destination = _destinations(table.column("destination"))
    findings: list[Finding] = []
    time = clock_times(table, seq, clock, operations_per_second, findings, source)
    tx, transactions = _transactions(table.column("tx"), destination)
    rule = OperationSizes.of(model, sizes, sum(t.count for t in transactions), int((tx >= 0).sum()))
    size = _int_column(table, "size", -1)
    body = _int_column(table, "body_size", -1)
    _size_findings(model, is_send, size, body, findings, source)
    needed = np.where(is_send, _int_column(table, "acks_needed", 1), 0)
    send, end = _lives(table.column("message_id"), destination, is_send, needed, time, findings)
    totals = _totals(names, destination, is_send, rule.rows(is_send, tx >= 0, size, body), end)
    return Operations(
        destinations=names,
        destination=destination,
        size=rule.rows(is_send, tx >= 0, size, body),
        time=time,
        send=send,
        end=end,
        seq=seq,
        transactions=transactions,
        totals=totals,
        sizes=rule,
        findings=tuple(findings),
    )


def _ordered(table: pa.Table, source: str) -> pa.Table:
    seq = table.column("seq").to_numpy()
    first, last = int(seq.min()), int(seq.max())
    if last - first > SEQ_SPAN_MAX:
        raise TraceError(f"{source}: column seq goes from {first} to {last}; number the operations 0, 1, 2, ...")
    steps = np.diff(seq)
    if (steps < 0).any():
        table = table.sort_by("seq")
        steps = np.diff(table.column("seq").to_numpy())
    duplicates = int((steps == 0).sum())
    if duplicates:
        at = int(table.column("seq")[int(np.argmax(steps == 0))].as_py())
        raise TraceError(
            f"{source}: column seq repeats a value {count_of(duplicates, 'time')}, first {at}; "
            "number the operations 0, 1, 2, ..."
        )
    return table


def _codes(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """Distinct texts and, for each row, the number of its text, -1 for null."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    indices = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return encoded.dictionary.to_pylist(), indices


def _destinations(column: pa.ChunkedArray) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    texts, codes = _codes(column)
    canonical = [canonical_destination(text) for text in texts]
    names = tuple(sorted(set(canonical)))
    number = {name: i for i, name in enumerate(names)}
    renumber = np.array([number[name] for name in canonical], dtype=np.int32)
    numbers: npt.NDArray[np.int32] = renumber[codes]
    return names, numbers


def _int_column(table: pa.Table, name: str, default: int) -> Ints:
    values: Ints = table.column(name).fill_null(default).to_numpy().astype(np.int64)
    return values


def clock_times(
    table: pa.Table, seq: Ints, clock: Clock, operations_per_second: float, findings: list[Finding], source: str
) -> Floats:
    """Seconds of each operation, in the global order and never falling. `ts` has been checked."""
    if clock == "seq":
        stamps = time = seq / operations_per_second
    else:
        stamps = table.column("ts").to_numpy()
        time = np.maximum.accumulate(stamps)
    if not time[-1] > time[0]:
        raise TraceError(f"{source}: {_standing(seq, stamps)}")
    earlier = time - stamps
    backwards = int((earlier > 0).sum())
    if backwards:
        what = "time that lies" if backwards == 1 else "times that lie"
        message = f"{what} before an earlier operation's, by {earlier.max():.6g} s at most; the latest so far is used"
        findings.append(Finding("clock-backwards", backwards, message))
    return time.astype(np.float64)


def _standing(seq: Ints, stamps: Floats) -> str:
    """Why no time passes between the first operation and the last."""
    if len(stamps) == 1:
        return "there is one operation alone; give a trace that covers some days of ordinary use"
    instead = "choose the clock seq (--clock seq) to go by order alone"
    falls = np.flatnonzero(np.diff(stamps) < 0)
    if not len(falls):
        return f"column ts is {stamps[0]} in every row; {instead}, or give a trace that spans some time"
    before, after = falls[0], falls[0] + 1
    return (
        f"column ts goes backwards, first from {stamps[before]} at seq {seq[before]} to {stamps[after]} at seq "
        f"{seq[after]}, and never comes after its first time; number the operations (seq) in the order in which they "
        f"happened, or {instead}"
    )


def _transactions(
    column: pa.ChunkedArray, destination: npt.NDArray[np.int32]
) -> tuple[Ints, tuple[TransactionSet, ...]]:
    if column.null_count == len(column):
        return np.full(len(column), -1, np.int64), ()
    encoded = column.combine_chunks().dictionary_encode()
    tx = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    inside = tx >= 0
    pairs = np.unique(np.stack([tx[inside], destination[inside].astype(np.int64)], axis=1), axis=0)
    bounds = np.flatnonzero(np.diff(pairs[:, 0])) + 1
    counts: dict[tuple[int, ...], int] = {}
    starts, ends = np.append(0, bounds), np.append(bounds, len(pairs))
    members = pairs[:, 1].tolist()
    for first, last in zip(starts.tolist(), ends.tolist(), strict=True):
        key = tuple(members[first:last])
        counts[key] = counts.get(key, 0) + 1
    return tx, tuple(TransactionSet(key, counts[key]) for key in sorted(counts))


def _lives(
    ids: pa.ChunkedArray,
    destination: npt.NDArray[np.int32],
    is_send: npt.NDArray[np.bool_],
    needed: Ints,
    time: Floats,
    findings: list[Finding],
) -> tuple[Ints, Floats]:
    encoded = ids.combine_chunks().dictionary_encode()
    id_codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    keys = id_codes * (int(destination.max()) + 1) + destination
    message, distinct = pd.factorize(keys)
    sends, acks = np.flatnonzero(is_send), np.flatnonzero(~is_send)
    last_send = np.full(len(distinct), -1, np.int64)
    last_send[message[sends]] = sends
    last_ack = np.full(len(distinct), -1, np.int64)
    last_ack[message[acks]] = acks
    ack_count = np.bincount(message[acks], minlength=len(distinct))

    partner = np.full(len(time), -1, np.int64)
    partner[acks] = last_send[message[acks]]
    end = time.copy()
    of_send = message[sends]
    done = ack_count[of_send] >= needed[sends]
    acked = ack_count[of_send] > 0
    end[sends] = np.where(done, np.where(acked, time[last_ack[of_send]], time[sends]), NEVER)
    end[sends] = np.maximum(end[sends], time[sends])
    _life_findings(sends, acks, partner, end, last_send[of_send], ack_count[of_send], needed[sends], findings)
    return partner, end


def _life_findings(
    sends: Ints,
    acks: Ints,
    partner: Ints,
    end: Floats,
    last_send: Ints,
    ack_count: Ints,
    needed: Ints,
    findings: list[Finding],
) -> None:
    pending = int(np.isinf(end[sends]).sum())
    for code, count, one, many in (
        ("no-sends", int(len(sends) == 0), "trace without any send: nothing in it retains a journal file", ""),
        ("no-acks", int(len(acks) == 0), "trace without any ack: every message seems to stay for ever", ""),
        (
            "unknown-acks", int((partner[acks] < 0).sum()),
            "ack of a message sent before the trace began", "acks of messages sent before the trace began",
        ),
        (
            "early-acks", int((partner[acks] > acks).sum()),
            "ack that stands before its send in the order", "acks that stand before their send in the order",
        ),
        (
            "pending-sends", pending,
            "send whose last ack is not in the trace: taken as pending to its end",
            "sends whose last ack is not in the trace: taken as pending to its end",
        ),
        (
            "repeated-sends", int((last_send != sends).sum()),
            "send of a message id sent before: each copy lives to the last ack",
            "sends of a message id sent before: each copy lives to the last ack",
        ),
        (
            "surplus-acks", int((ack_count > np.maximum(needed, 1)).sum()),
            "message acked more often than it needs", "messages acked more often than they need",
        ),
    ):  # fmt: skip
        if count:
            findings.append(Finding(code, count, one if count == 1 else many))


def _size_findings(
    model: Model, is_send: npt.NDArray[np.bool_], size: Ints, body: Ints, findings: list[Finding], source: str
) -> None:
    unsized = is_send & (body < 0) & (size <= 0)
    if is_send.any() and unsized.sum() == is_send.sum():
        raise TraceError(
            f"{source}: no send has a size: give the column size (bytes in the journal) or body_size (of the body)"
        )
    if model == "kahadb":
        unknown = int((size <= 0).sum())
        if unknown:
            what = "operation" if unknown == 1 else "operations"
            message = f"{what} without a size: taken as 100 bytes an ack, 64 and its body a send"
            findings.append(Finding("no-size", unknown, message))
        return
    for code, chosen, message in (
        ("no-size", unsized, "with neither size nor body_size: taken as empty, so the figures are too low"),
        ("no-body-size", is_send & (body < 0) & (size > 0), "without body_size: size is taken for it"),
    ):
        count = int(chosen.sum())
        if count:
            findings.append(Finding(code, count, f"{'send' if count == 1 else 'sends'} {message}"))


def _totals(
    names: tuple[str, ...],
    destination: npt.NDArray[np.int32],
    is_send: npt.NDArray[np.bool_],
    size: Ints,
    end: Floats,
) -> tuple[DestinationTotals, ...]:
    width = len(names)
    sends = np.bincount(destination[is_send], minlength=width)
    acks = np.bincount(destination[~is_send], minlength=width)
    total = np.bincount(destination, weights=size, minlength=width)
    pending = np.bincount(destination[is_send & np.isinf(end)], minlength=width)
    return tuple(
        DestinationTotals(name, int(sends[i]), int(acks[i]), int(total[i]), int(pending[i]))
        for i, name in enumerate(names)
    )
