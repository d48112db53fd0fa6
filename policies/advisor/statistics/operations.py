"""A trace as arrays: every send joined to its acks, every operation with its time and its bytes.

This is what the exact model runs on. It holds 44 bytes an operation and is built in one pass without Python objects.
An ack belongs to the send of the same destination and message id; a message lives until as many acks came as it needs,
that is, until the last one. A message sent twice under one id lives, in each of its copies, until then.
"""

from __future__ import annotations

from collections import Counter
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
from ..trace.nodes import NodeUse, count_nodes, node_use
from ..trace.table import BY_ORDER, Finding, backwards_finding, canonical_destination, check_times, codes
from .lives import REPEATED, SURPLUS, life_findings, match
from .sizes import JournalSizes, Model, OperationSizes

Clock = Literal["ts", "seq"]
CLOCKS: tuple[Clock, ...] = ("ts", "seq")

SEQ_SPAN_MAX = (1 << 62) - 1
"""Positions from the first operation to the last: a bucket's number and time are computed from their difference."""

NUMBER_THEM = "number the operations 0, 1, 2, ..."
ALONE = "there is one operation alone; give a trace that covers some days of ordinary use"


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
    use: NodeUse | None = None
    """Of a trace of several nodes: where destinations were used."""
    node: Ints | None = None
    """And the number of each operation's node. It is 0 for all of a destination that has one store for all nodes, since
    messages crossed."""
    elsewhere: frozenset[int] = frozenset()
    """Destinations that are in no journal, since their store is none, or is shared by nodes."""

    @property
    def site(self) -> npt.NDArray[np.int32]:
        """Return each operation's destination on its node, one number: the destination's, times how many nodes there
        are, and the node's."""
        if self.node is None:
            return self.destination
        return (self.destination * count_nodes(self.use) + self.node).astype(np.int32)

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
    """Make the arrays of a trace in the columns of `trace.table`. Raises TraceError where the trace cannot be used.

    `operations_per_second` turns positions into seconds when `clock` is "seq". `source` is what errors call the trace.
    """
    if clock == "ts":
        check_times(table, source)
    table = _ordered(table, source)
    seq = table.column("seq").to_numpy()
    is_send = pc.equal(table.column("op"), "send").to_numpy()
    names, destination = _destinations(table.column("destination"))
    time, findings = clock_times(table, seq, clock, operations_per_second, source)
    tx, transactions = _transactions(table.column("tx"), destination)
    rule = OperationSizes.of(model, sizes, sum(t.count for t in transactions), int((tx >= 0).sum()))
    size = _int_column(table, "size", -1)
    body = _int_column(table, "body_size", -1)
    bodiless = is_send & (body < 0)
    counted = is_send, bodiless & (size <= 0), size <= 0, bodiless & (size > 0)
    findings += size_findings(model, *(int(np.count_nonzero(rows)) for rows in counted), source=source)
    needed = np.where(is_send, _int_column(table, "acks_needed", 1), -1)
    message, _ = pd.factorize(codes(table.column("message_id"))[1] * len(names) + destination)
    use, node = node_use(table, destination, message, is_send)
    if use is not None and node is not None:
        message, _ = pd.factorize(message * len(use.nodes) + node)
    send, ends, found = _lives(message, needed)
    written = rule.rows(is_send, tx >= 0, size, body)
    return Operations(
        destinations=names,
        destination=destination,
        size=written,
        time=time,
        send=send,
        ends=ends,
        seq=seq,
        transactions=transactions,
        totals=_totals(names, destination, is_send, written, ends),
        sizes=rule,
        findings=(*findings, *found),
        use=use,
        node=node,
        elsewhere=frozenset(use.crossed if use else ()),
    )


def _ordered(table: pa.Table, source: str) -> pa.Table:
    seq = table.column("seq").to_numpy()
    first, last = int(seq.min()), int(seq.max())
    check_span(first, last, source)
    steps = np.diff(seq)
    if (steps < 0).any():
        table = table.sort_by("seq")
        steps = np.diff(table.column("seq").to_numpy())
    duplicates = int((steps == 0).sum())
    if duplicates:
        at = int(table.column("seq")[int(np.argmax(steps == 0))].as_py())
        raise repeated_seq(duplicates, at, source)
    return table


def check_span(first: int, last: int, source: str) -> None:
    """Raise TraceError where positions lie too far apart."""
    if last - first > SEQ_SPAN_MAX:
        raise TraceError(f"{source}: column seq goes from {first} to {last}; {NUMBER_THEM}")


def repeated_seq(times: int, first: int, source: str) -> TraceError:
    """Return the error that positions are not distinct."""
    return TraceError(f"{source}: column seq repeats a value {count_of(times, 'time')}, first {first}; {NUMBER_THEM}")


def _destinations(column: pa.ChunkedArray) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    texts, numbers_of_texts = codes(column)
    canonical = [canonical_destination(text) for text in texts.to_pylist()]
    names = tuple(sorted(set(canonical)))
    number = {name: i for i, name in enumerate(names)}
    renumber = np.array([number[name] for name in canonical], dtype=np.int32)
    numbers: npt.NDArray[np.int32] = renumber[numbers_of_texts]
    return names, numbers


def _int_column(table: pa.Table, name: str, default: int) -> Ints:
    values: Ints = table.column(name).fill_null(default).to_numpy().astype(np.int64)
    return values


def clock_times(
    table: pa.Table, seq: Ints, clock: Clock, operations_per_second: float, source: str
) -> tuple[Floats, list[Finding]]:
    """Return the seconds of each operation, in the global order and never falling, and what was wrong with them. `ts`
    has been checked."""
    if clock == "seq":
        stamps = time = seq / operations_per_second
    else:
        stamps = table.column("ts").to_numpy()
        time = np.maximum.accumulate(stamps)
    if not time[-1] > time[0]:
        raise TraceError(f"{source}: {_standing(seq, stamps)}")
    earlier = time - stamps
    return time.astype(np.float64), backwards_finding(int((earlier > 0).sum()), float(earlier.max()))


def _standing(seq: Ints, stamps: Floats) -> str:
    """Say why no time passes between the first operation and the last."""
    if len(stamps) == 1:
        return ALONE
    falls = np.flatnonzero(np.diff(stamps) < 0)
    if not len(falls):
        return f"column ts is {stamps[0]} in every row; {BY_ORDER}, or give a trace that spans some time"
    before, after = falls[0], falls[0] + 1
    return (
        f"column ts goes backwards, first from {stamps[before]} at seq {seq[before]} to {stamps[after]} at seq "
        f"{seq[after]}, and never comes after its first time; number the operations (seq) in the order in which they "
        f"happened, or {BY_ORDER}"
    )


def _transactions(
    column: pa.ChunkedArray, destination: npt.NDArray[np.int32]
) -> tuple[Ints, tuple[TransactionSet, ...]]:
    if column.null_count == len(column):
        return np.full(len(column), -1, np.int64), ()
    _, tx = codes(column)
    inside = tx >= 0
    pairs = np.unique(np.stack([tx[inside], destination[inside].astype(np.int64)], axis=1), axis=0)
    touched = np.split(pairs[:, 1], np.flatnonzero(np.diff(pairs[:, 0])) + 1)
    counts = Counter(tuple(members.tolist()) for members in touched)
    return tx, tuple(TransactionSet(key, counts[key]) for key in sorted(counts))


def _lives(message: Ints, needed: Ints) -> tuple[Ints, Ints, list[Finding]]:
    """Find the rows of `Operations.send` and `ends`. The arguments are those of `match`."""
    rows, is_send = np.arange(len(message)), needed >= 0
    partner, ends, flags = match(message, rows, needed)
    counted = {
        "unknown-acks": ~is_send & (partner < 0),
        "early-acks": partner > rows,
        "pending-sends": ends == NEVER_POSITION,
        "repeated-sends": flags & REPEATED,
        "surplus-acks": flags & SURPLUS,
    }
    counts = {code: int(np.count_nonzero(flagged)) for code, flagged in counted.items()}
    sends = int(np.count_nonzero(is_send))
    return partner, ends, life_findings(sends, len(message) - sends, counts)


def size_findings(
    model: Model, sends: int, unsized: int, unsized_rows: int, bodiless: int, *, source: str
) -> list[Finding]:
    """Find what a trace does not say of sizes. Raises TraceError where it says nothing.

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
            return [Finding("no-size", unsized_rows, message)]
        return []
    return [
        Finding(code, count, f"{'send' if count == 1 else 'sends'} {message}")
        for code, count, message in (
            ("no-size", unsized, "with neither size nor body_size: taken as empty, so the figures are too low"),
            ("no-body-size", bodiless, "without body_size: size is taken for it"),
        )
        if count
    ]


def _totals(
    names: tuple[str, ...], destination: npt.NDArray[np.int32], is_send: npt.NDArray[np.bool_], size: Ints, ends: Ints
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
