"""A trace as arrays: every send joined to its acks, every operation with its time and its bytes.

This is what the exact model runs on. It holds 44 bytes an operation and is built in one pass without Python objects.
An ack belongs to the send of the same destination and message id; a message lives until as many acks came as it needs,
that is, until the last one. A message sent twice under one id lives, in each of its copies, until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import TraceError
from ...text import count_of
from ..trace.arrays import NEVER, NEVER_POSITION, Floats, Ints
from ..trace.table import Finding, backwards_finding, canonical_destination, check_times
from .sizes import JournalSizes, Model, OperationSizes

Clock = Literal["ts", "seq"]
CLOCKS: tuple[Clock, ...] = ("ts", "seq")

SEQ_SPAN_MAX = (1 << 62) - 1
"""Positions from the first operation to the last: a bucket's number and time are computed from their difference."""


@dataclass(frozen=True, slots=True)
class TransactionSet:
    """The number of transactions that touched exactly these destinations (numbers into `Operations.destinations`)."""

    members: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class DestinationTotals:
    """The totals of one destination in the trace."""

    name: str
    sends: int
    acks: int
    bytes: int
    pending: int
    """Sends whose last ack the trace does not show."""

    @property
    def operations(self) -> int:
        return self.sends + self.acks


@dataclass(frozen=True, slots=True)
class Operations:
    """A whole trace in the global order. Times are seconds on the chosen clock."""

    destinations: tuple[str, ...]
    destination: npt.NDArray[np.int32]
    size: Ints
    time: Floats
    send: Ints
    """For an ack: the row of the send that it ends; -1 for a send and for an ack of an unknown message."""
    ends: Ints
    """For a send: the row of its last ack, NEVER_POSITION if that did not come, its own where it waits for none. For an
    ack: its own row."""
    seq: Ints
    transactions: tuple[TransactionSet, ...]
    totals: tuple[DestinationTotals, ...]
    sizes: OperationSizes
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.time)

    @property
    def end(self) -> Floats:
        """Return the times of `ends`, NEVER for what did not come."""
        times: Floats = np.append(self.time, NEVER)[np.minimum(self.ends, len(self.time))]
        return times

    @property
    def duration(self) -> float:
        """Return the seconds from the first operation to the last."""
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
    """Make the arrays of a trace in `trace.SCHEMA`. Raises TraceError where the trace cannot be used.

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
    bodiless = is_send & (body < 0)
    size_findings(
        model,
        int(is_send.sum()),
        int((bodiless & (size <= 0)).sum()),
        int((size <= 0).sum()),
        int((bodiless & (size > 0)).sum()),
        findings,
        source,
    )
    needed = np.where(is_send, _int_column(table, "acks_needed", 1), 0)
    send, ends = _lives(table.column("message_id"), destination, is_send, needed, findings)
    totals = _totals(names, destination, is_send, rule.rows(is_send, tx >= 0, size, body), ends)
    return Operations(
        destinations=names,
        destination=destination,
        size=rule.rows(is_send, tx >= 0, size, body),
        time=time,
        send=send,
        ends=ends,
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


def _codes(column: pa.ChunkedArray) -> tuple[pa.Array, Ints]:
    """Find the distinct texts and, for each row, the number of its text, -1 for null."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return encoded.dictionary, encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _destinations(column: pa.ChunkedArray) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    texts, codes = _codes(column)
    canonical = [canonical_destination(text) for text in texts.to_pylist()]
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
    """Return the seconds of each operation, in the global order and never falling. `ts` has been checked."""
    if clock == "seq":
        stamps = time = seq / operations_per_second
    else:
        stamps = table.column("ts").to_numpy()
        time = np.maximum.accumulate(stamps)
    if not time[-1] > time[0]:
        raise TraceError(f"{source}: {_standing(seq, stamps)}")
    earlier = time - stamps
    findings += backwards_finding(int((earlier > 0).sum()), float(earlier.max()))
    return time.astype(np.float64)


def _standing(seq: Ints, stamps: Floats) -> str:
    """Say why no time passes between the first operation and the last."""
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
    _, tx = _codes(column)
    inside = tx >= 0
    pairs = np.unique(np.stack([tx[inside], destination[inside].astype(np.int64)], axis=1), axis=0)
    touched = np.split(pairs[:, 1], np.flatnonzero(np.diff(pairs[:, 0])) + 1)
    counts = Counter(tuple(members.tolist()) for members in touched)
    return tx, tuple(TransactionSet(key, counts[key]) for key in sorted(counts))


def _lives(
    ids: pa.ChunkedArray,
    destination: npt.NDArray[np.int32],
    is_send: npt.NDArray[np.bool_],
    needed: Ints,
    findings: list[Finding],
) -> tuple[Ints, Ints]:
    _, id_codes = _codes(ids)
    keys = id_codes * (int(destination.max()) + 1) + destination
    message, distinct = pd.factorize(keys)
    sends, acks = np.flatnonzero(is_send), np.flatnonzero(~is_send)
    last_send = np.full(len(distinct), -1, np.int64)
    last_send[message[sends]] = sends
    last_ack = np.full(len(distinct), -1, np.int64)
    last_ack[message[acks]] = acks
    ack_count = np.bincount(message[acks], minlength=len(distinct))

    partner = np.full(len(is_send), -1, np.int64)
    partner[acks] = last_send[message[acks]]
    ends = np.arange(len(is_send))
    of_send = message[sends]
    done = ack_count[of_send] >= needed[sends]
    ends[sends] = np.where(done, np.maximum(last_ack[of_send], sends), NEVER_POSITION)
    findings += life_findings(
        len(sends),
        len(acks),
        {
            "unknown-acks": int((partner[acks] < 0).sum()),
            "early-acks": int((partner[acks] > acks).sum()),
            "pending-sends": int((ends[sends] == NEVER_POSITION).sum()),
            "repeated-sends": int((last_send[of_send] != sends).sum()),
            "surplus-acks": int((ack_count[of_send] > np.maximum(needed[sends], 1)).sum()),
        },
    )
    return partner, ends


def life_findings(sends: int, acks: int, counts: Mapping[str, int]) -> list[Finding]:
    """Find what is wrong with a trace's messages, of so many sends and acks. `counts`: how many of each kind, by
    code."""
    counts = {"no-sends": int(sends == 0), "no-acks": int(acks == 0), **counts}
    return [
        Finding(code, counts[code], one if counts[code] == 1 else many)
        for code, one, many in (
            ("no-sends", "trace without any send: nothing in it retains a journal file", ""),
            ("no-acks", "trace without any ack: every message seems to stay for ever", ""),
            (
                "unknown-acks",
                "ack of a message sent before the trace began", "acks of messages sent before the trace began",
            ),
            (
                "early-acks",
                "ack that stands before its send in the order", "acks that stand before their send in the order",
            ),
            (
                "pending-sends",
                "send whose last ack is not in the trace: taken as pending to its end",
                "sends whose last ack is not in the trace: taken as pending to its end",
            ),
            (
                "repeated-sends",
                "send of a message id sent before: each copy lives to the last ack",
                "sends of a message id sent before: each copy lives to the last ack",
            ),
            (
                "surplus-acks",
                "message acked more often than it needs", "messages acked more often than they need",
            ),
        )
        if counts[code]
    ]  # fmt: skip


def size_findings(
    model: Model, sends: int, unsized: int, unsized_rows: int, bodiless: int, findings: list[Finding], source: str
) -> None:
    """Add what a trace does not say of sizes. Raises TraceError where it says nothing.

    `unsized`: sends with neither size nor body_size; `unsized_rows`: operations without size; `bodiless`: sends with
    size alone.
    """
    if sends and unsized == sends:
        raise TraceError(
            f"{source}: no send has a size: give the column size (bytes in the journal) or body_size (of the body)"
        )
    if model == "kahadb":
        if unsized_rows:
            what = "operation" if unsized_rows == 1 else "operations"
            message = f"{what} without a size: taken as 100 bytes an ack, 64 and its body a send"
            findings.append(Finding("no-size", unsized_rows, message))
        return
    for code, count, message in (
        ("no-size", unsized, "with neither size nor body_size: taken as empty, so the figures are too low"),
        ("no-body-size", bodiless, "without body_size: size is taken for it"),
    ):
        if count:
            findings.append(Finding(code, count, f"{'send' if count == 1 else 'sends'} {message}"))


def _totals(
    names: tuple[str, ...],
    destination: npt.NDArray[np.int32],
    is_send: npt.NDArray[np.bool_],
    size: Ints,
    ends: Ints,
) -> tuple[DestinationTotals, ...]:
    width = len(names)
    sends = np.bincount(destination[is_send], minlength=width)
    acks = np.bincount(destination[~is_send], minlength=width)
    total = np.bincount(destination, weights=size, minlength=width)
    pending = np.bincount(destination[is_send & (ends == NEVER_POSITION)], minlength=width)
    return tuple(
        DestinationTotals(name, int(sends[i]), int(acks[i]), int(total[i]), int(pending[i]))
        for i, name in enumerate(names)
    )
