"""The exact model of one store of ours that compacts: which files its journal has after each operation, and how much it
copies. It goes by the same choice as the journal (policies/compaction.py); a test replays random traces through both
and compares the files after each step.

The retention model (model.py) is without compaction: it says what each partitioning leaves for compaction to do, in
one pass over all stores, and so what is searched by. This one takes some microseconds for each operation of each store
that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..compaction import BATCH_BYTES, MESSAGES_MAX, choose
from .model import Partition
from .operations import Operations
from .sizes import JournalSizes

ROOM: Final = 32
"""Bytes more than an operation takes that have to be free in a segment before it is written there."""
COMPACTED_BYTES: Final = 48
"""The record that says that a file of copies counts, without its batch."""


class File:
    """One of the journal's."""

    __slots__ = ("generation", "live", "live_bytes", "messages", "taken")

    def __init__(self, generation: int, taken: int) -> None:
        self.generation, self.taken = generation, taken
        self.live = self.live_bytes = 0
        self.messages: dict[int, int] = {}
        """The bytes of those that live, in the order in which they lie there."""

    def put(self, message: int, size: int) -> None:
        self.messages[message] = size
        self.live += 1
        self.live_bytes += size


@dataclass(frozen=True, slots=True)
class CompactedUse:
    """What stores take that compact."""

    peak_bytes: int
    """The most that all of them hold at one time."""
    mean_bytes: float
    """Over the trace's time."""
    written_bytes: int
    copied_bytes: int
    most_copied: int
    """How often the message was copied that was copied most often."""


class _Level:
    """How many bytes there are, over time."""

    def __init__(self, begin: float) -> None:
        self.peak = self.now = 0
        self._begin = self._since = begin
        self._area = 0.0

    def set(self, size: int, time: float) -> None:
        self._area += self.now * (time - self._since)
        self.now, self._since = size, time
        self.peak = max(self.peak, size)

    def mean(self, end: float) -> float:
        self.set(self.now, end)
        return self._area / (end - self._begin) if end > self._begin else float(self.now)


class CompactingJournal:
    """One store's. Sizes of records are without their batch's header."""

    def __init__(self, segment_bytes: int, live_percent: int, min_segments: int, sizes: JournalSizes) -> None:
        self._segment_bytes, self._sizes = segment_bytes, sizes
        self._live_percent, self._min_segments = live_percent, min_segments
        self._capacity = sizes.capacity(segment_bytes)
        self._used = 0
        self._where: dict[int, File] = {}
        self.segments: list[File] = [File(0, self._capacity)]
        """Those in which something lives, and the one that is being written, the last."""
        self.copies: list[File] = []
        self.written = self.copied = self.most_copied = 0

    def send(self, message: int, size: int) -> None:
        """A message whose record takes so many bytes."""
        self.write(size)
        self.segments[-1].put(message, size)
        self._where[message] = self.segments[-1]

    def ack(self, message: int, size: int) -> None:
        """By a record of so many bytes."""
        self.write(size)
        self._die(message)

    def compact(self, min_segments: int | None = None) -> int:
        """Once, if it pays; returns how many files were copied from."""
        least = self._min_segments if min_segments is None else min_segments
        header = self._segment_bytes - self._capacity
        sources = choose([*self.segments[:-1], *self.copies], self._live_percent, least, self._capacity, header)
        if not sources:
            return 0
        moved = [(message, size) for source in sources for message, size in source.messages.items()]
        generation = 1 + sources[0].generation
        file: File | None = None
        end = batch = 0
        for message, size in moved:
            if file is not None and (file.live >= MESSAGES_MAX or header + end + size > self._segment_bytes):
                self._publish(file, end)
                file = None
            if file is None:
                file, end, batch = File(generation, 0), self._sizes.batch_overhead, 0
            elif end - batch >= BATCH_BYTES:
                batch = end
                end += self._sizes.batch_overhead
            file.put(message, size)
            end += size
        if file is not None:
            self._publish(file, end)
        return len(sources)

    @property
    def files(self) -> list[tuple[int, int, int, int]]:
        """Generation, live messages, their bytes and the file's, header included, of each that is needed."""
        header = self._segment_bytes - self._capacity
        needed = [*(s for s in self.segments if s.live), *self.copies]
        return [(file.generation, file.live, file.live_bytes, header + file.taken) for file in needed]

    @property
    def bytes(self) -> int:
        """Of all files, the one that is being written at its full size."""
        header = self._segment_bytes - self._capacity
        taken = self._segment_bytes * len(self.segments)
        return taken + sum(header + file.taken for file in self.copies) if self.copies else taken

    def write(self, size: int) -> None:
        """A record of so many bytes, of which nothing more is needed."""
        size += self._sizes.batch_overhead
        self.written += size
        if self._used and self._used + size + ROOM > self._capacity:
            if not self.segments[-1].live:
                self.segments.pop()
            self.segments.append(File(0, self._capacity))
            self._used = 0
        self._used += size

    def _die(self, message: int) -> None:
        file = self._where.pop(message, None)
        if file is None:
            return
        size = file.messages.pop(message)
        file.live -= 1
        file.live_bytes -= size
        if not file.live and file is not self.segments[-1]:
            (self.copies if file.generation else self.segments).remove(file)

    def _publish(self, file: File, taken: int) -> None:
        """Its messages are there from now on."""
        self.write(COMPACTED_BYTES)
        for message, size in file.messages.items():
            self._die(message)
            self._where[message] = file
            self.copied += size
        file.taken = taken
        self.copies.append(file)
        self.most_copied = max(self.most_copied, file.generation)


def compacted(
    operations: Operations, partition: Partition, segment_bytes: int, live_percent: int, min_segments: int
) -> CompactedUse:
    """What the stores of a partitioning take together if each compacts what pays whenever a segment of it is full, as a
    journal does. Messages that the trace does not see acked live to its end."""
    sizes = operations.sizes.sizes
    store_of = {member: number for number, members in enumerate(partition) for member in members}
    journals = [CompactingJournal(segment_bytes, live_percent, min_segments, sizes) for _ in partition]
    times = operations.time.tolist()
    begin, end = (times[0], times[-1]) if times else (0.0, 0.0)
    level, last = _Level(begin), [0] * len(partition)
    overhead = sizes.batch_overhead
    rows = zip(
        operations.destination.tolist(),
        operations.size.tolist(),
        operations.send.tolist(),
        operations.end.tolist(),
        times,
        strict=True,
    )
    ends = operations.end.tolist()
    for row, (destination, size, send, died, time) in enumerate(rows):
        number = store_of.get(destination)
        if number is None:
            continue
        journal = journals[number]
        writing = journal.segments[-1]
        if send >= 0 and ends[send] <= time:
            journal.ack(send, size - overhead)
        elif send < 0 and died > time:
            journal.send(row, size - overhead)
        else:  # others have yet to ack it, or it is nobody's
            journal.write(size - overhead)
        if journal.segments[-1] is not writing:
            while journal.compact():
                pass
        now = journal.bytes
        if now != last[number]:
            level.set(level.now + now - last[number], time)
            last[number] = now
    return CompactedUse(
        level.peak,
        level.mean(end),
        sum(journal.written for journal in journals),
        sum(journal.copied for journal in journals),
        max((journal.most_copied for journal in journals), default=0),
    )
