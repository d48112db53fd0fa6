"""The toy maker's day: six queues that live at different speeds, replayed one operation after the other.

The operations are those of examples/toymaker/toymaker-ops.csv.xz. A real ActiveMQ 5.17 broker, given the same ones
with 512 KiB journal files, peaked at 44 files (23.1 MB) with one KahaDB, and at 6 files (3.1 MB) with `orders.custom`
and `dlq` in stores of their own.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

OPERATIONS = Path(__file__).resolve().parents[2] / "examples" / "toymaker" / "toymaker-ops.csv.xz"
SEGMENT_BYTES = 512 * 1024
LOOK_EVERY = 25


class Operation(NamedTuple):
    """A send of `size` bytes, or an ack (size 0) of the message with that id."""

    op: str
    destination: str
    id: int
    size: int
    tx: str


class Day(Protocol):
    """What a peer offers for the replay."""

    def send(self, messages: Sequence[tuple[str, int, bytes]]) -> None:
        """Destination, id and body of each; more than one are one transaction."""

    def ack(self, destination: str, id: int) -> None: ...

    def disk(self) -> tuple[int, int]:
        """Files and bytes that hold messages now."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Disk:
    """The most that was on disk at once, and what was left at the end."""

    peak_files: int
    peak_bytes: int
    end_files: int
    end_bytes: int
    pending_bytes: int
    """Bodies that were sent and not acked, at their most."""


def operations(n: int) -> list[Operation]:
    """The first n of them."""
    with lzma.open(OPERATIONS, "rt", newline="") as file:
        rows = csv.DictReader(file)
        return [
            Operation(row["op"], row["destination"], int(row["id"]), int(row["size"]), row["tx"])
            for row, _ in zip(rows, range(n), strict=False)
        ]


def replay(operations: Sequence[Operation], day: Day) -> Disk:
    """Does them all, looking at the disk after every few."""
    peak_files = peak_bytes = pending = pending_bytes = 0
    sizes: dict[tuple[str, int], int] = {}
    for step, group in enumerate(transactions(operations)):
        for op in group:
            if op.op == "send":
                sizes[op.destination, op.id] = op.size
                pending += op.size
            else:
                pending -= sizes.pop((op.destination, op.id))
        pending_bytes = max(pending_bytes, pending)
        if group[0].op == "send":
            day.send([(op.destination, op.id, op.id.to_bytes(8, "big").ljust(op.size, b"\0")) for op in group])
        else:
            day.ack(group[0].destination, group[0].id)
        if step % LOOK_EVERY == 0:
            files, size = day.disk()
            peak_files, peak_bytes = max(peak_files, files), max(peak_bytes, size)
    files, size = day.disk()
    return Disk(max(peak_files, files), max(peak_bytes, size), files, size, pending_bytes)


def transactions(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Neighbours of one transaction together, everything else alone."""
    for _, group in groupby(enumerate(operations), key=lambda item: item[1].tx or item[0]):
        yield [operation for _, operation in group]
