"""The models once more, written from their definitions without regard to speed.

`segments`: a store's segments are found one at a time, and the ack rule is iterated to its fixed point.
`CompactingJournal`: a store of ours that compacts, with an object a message, and the journal's own choice of files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.policies.advisor import UsageEvent
from anabranch.policies.advisor.model.kernel import (
    COMPACTED_BYTES,
    KEPT_BYTES,
    KEPT_EXPECTED,
    ROOM,
    SNAPSHOT_BYTES,
    SNAPSHOT_WORTH,
    JournalRules,
)
from anabranch.policies.compaction import BATCH_BYTES, choose, look_after


def segments(
    events: Sequence[UsageEvent], stores: Sequence[set[str]], capacity: int, *, chains: bool
) -> list[tuple[int, float, float]]:
    """(store, start, end) of every segment."""
    finish = events[-1].ts
    result = []
    for number, store in enumerate(stores):
        mine = [event for event in events if event.destination in store]
        files: list[list[UsageEvent]] = []
        for event in mine:
            if not files or sum(min(e.size, capacity) for e in files[-1]) + min(event.size, capacity) > capacity:
                files.append([])
            files[-1].append(event)
        life = [max(_needed_until(files, i, mine), _next(files, i, finish)) for i in range(len(files))]
        life = [min(end, finish) for end in life]
        if chains:
            life = _fixed_point(files, life)
        result += [(number, file[0].ts, end) for file, end in zip(files, life, strict=True)]
    return result


def _needed_until(files: list[list[UsageEvent]], i: int, mine: Sequence[UsageEvent]) -> float:
    until = -math.inf
    for event in files[i]:
        if event.op == "send":
            acks = [a.ts for a in mine if a.op == "ack" and _key(a) == _key(event)]
            until = max(until, max(acks, default=event.ts) if len(acks) >= event.acks_needed else math.inf)
    return until


def _next(files: list[list[UsageEvent]], i: int, finish: float) -> float:
    return files[i + 1][0].ts if i + 1 < len(files) else finish


def _fixed_point(files: list[list[UsageEvent]], life: list[float]) -> list[float]:
    where = {_key(event): i for i, file in enumerate(files) for event in file if event.op == "send"}
    while True:
        after = list(life)
        for s, file in enumerate(files):
            for event in file:
                t = where.get(_key(event), s)
                if event.op == "ack" and t < s:
                    after[s] = max(after[s], life[t])
        if after == life:
            return life
        life = after


def _key(event: UsageEvent) -> tuple[str, str]:
    return event.destination, event.message_id


def peak(files: Sequence[tuple[int, float, float]]) -> int:
    """The most on disk at one moment."""
    return max(sum(start <= at <= end for _, start, end in files) for _, at, _ in files)


class File:
    """One of the journal's."""

    __slots__ = ("generation", "live", "live_bytes", "messages", "records", "taken")

    def __init__(self, generation: int, taken: int) -> None:
        self.generation, self.taken = generation, taken
        self.live = self.live_bytes = 0
        self.records = 0
        self.messages: dict[int, int] = {}
        """The bytes of those that live, in the order in which they lie there."""

    def put(self, message: int, size: int) -> None:
        self.messages[message] = size
        self.live += 1
        self.live_bytes += size


class CompactingJournal:
    """One store's. Sizes of records are without their batch's header."""

    def __init__(self, rules: JournalRules) -> None:
        self._rules = rules
        self._segment_bytes, self._capacity = rules.segment_bytes, rules.capacity
        self._used = 0
        self._where: dict[int, File] = {}
        self.segments: list[File] = [File(0, self._capacity)]
        """Those in which something lives, and the one that is being written, the last."""
        self.copies: list[File] = []
        self._until_look = 0
        self.empty: list[int] = []
        """The bytes of those in which nothing lives, until they go."""
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
        least = self._rules.min_segments if min_segments is None else min_segments
        header = self._segment_bytes - self._capacity
        files, rules = [*self.segments[:-1], *self.copies], self._rules
        self._until_look = look_after(sum(file.live_bytes for file in files), self._capacity)
        sources = choose(files, rules.live_percent, least, self._capacity, header, rules.messages_max)
        if not sources:
            return 0
        moved = [(message, size) for source in sources for message, size in source.messages.items()]
        generation = 1 + sources[0].generation
        file: File | None = None
        end = batch = 0
        for message, size in moved:
            if file is not None and (
                file.live >= self._rules.messages_max or header + end + size > self._segment_bytes
            ):
                self._publish(file, end)
                file = None
            if file is None:
                file, end, batch = File(generation, 0), self._rules.batch_overhead, 0
            elif end - batch >= BATCH_BYTES:
                batch = end
                end += self._rules.batch_overhead
            file.put(message, size)
            file.records += 1
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
        return sum(self._on_disk(file) for file in (*self.segments, *self.copies)) + sum(self.empty)

    @property
    def count(self) -> int:
        """Of all files."""
        return len(self.segments) + len(self.copies) + len(self.empty)

    def release(self) -> None:
        """Let the files go in which nothing lives, if they are worth a snapshot."""
        kept = [*self.segments[:-1], *self.copies]
        records = sum(file.records for file in kept)
        if not self.empty or SNAPSHOT_WORTH * (KEPT_EXPECTED * len(kept) + records // 64) > sum(self.empty):
            return
        gone = len(self.empty)
        self.write(SNAPSHOT_BYTES + KEPT_BYTES * len(kept) + records // 8)
        del self.empty[:gone]

    def _on_disk(self, file: File) -> int:
        return self._segment_bytes - self._capacity + file.taken

    def write(self, size: int) -> None:
        """A record of so many bytes, of which nothing more is needed."""
        size += self._rules.batch_overhead
        self.written += size
        if self._used and self._used + size + ROOM > self._capacity:
            if not self.segments[-1].live:
                self.empty.append(self._on_disk(self.segments.pop()))
            self.segments.append(File(0, self._capacity))
            self._used = 0
        self._used += size
        self.segments[-1].records += 1

    def die(self, message: int) -> bool:
        """Whether it is time to look what pays to be compacted."""
        file = self._where[message]
        if file is not self.segments[-1]:
            self._until_look -= file.messages[message]
        self._die(message)
        return self._until_look <= 0

    def _die(self, message: int) -> None:
        file = self._where.pop(message, None)
        if file is None:
            return
        size = file.messages.pop(message)
        file.live -= 1
        file.live_bytes -= size
        if not file.live and file is not self.segments[-1]:
            (self.copies if file.generation else self.segments).remove(file)
            self.empty.append(self._on_disk(file))

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


@dataclass(slots=True)
class Course:
    """What a store that compacts has on disk."""

    levels: list[tuple[int, int, int]] = field(default_factory=list)
    """Position, bytes and files, where these have changed."""
    sums: tuple[int, int, int] = (0, 0, 0)
    """Bytes written and copied, and how often the message was copied that was copied most often."""


def compacted(
    rules: JournalRules, position: Sequence[int], size: Sequence[int], partner: Sequence[int], ends: Sequence[int]
) -> Course:
    """A store that compacts what pays whenever a segment of it is full or a file becomes mostly dead."""
    journal, course = CompactingJournal(rules), Course()
    ending: dict[int, list[int]] = {}
    for row, (at, record, send, end) in enumerate(zip(position, size, partner, ends, strict=True)):
        writing = journal.segments[-1]
        record -= rules.batch_overhead
        if send < 0 and end > at:
            journal.send(row, record)
            ending.setdefault(end, []).append(row)
        else:
            journal.write(record)
        crossed = False
        for message in ending.pop(at, ()):
            crossed |= journal.die(message)
        journal.release()
        if crossed or journal.segments[-1] is not writing:
            while journal.compact():
                journal.release()
        now = journal.bytes, journal.count
        if not course.levels or course.levels[-1][1:] != now:
            course.levels.append((at, *now))
    course.sums = journal.written, journal.copied, journal.most_copied
    return course
