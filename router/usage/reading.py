"""Reads usage logs as a usage trace: those of one router or of several, also while they are written, and what a damaged
one has left.

- `message_id` is the message's store and its number there. `size` is what a journal store of ours writes for the
  operation, `body_size` that of a send without what every message has: with the headers and the message id, that is.
- What ends many messages at once (a purge, a destination that is deleted, a subscription that ends, a memory store that
  is closed) acks each that was sent since the log begins.
- `ts` follows each machine's steady clock from the time at which a recording was begun. A later recording of the same
  router that says it was begun earlier goes on where the one before it ended.
- Several logs, one of each node, are merged by their clocks; each keeps its own order. A message of a store that
  nodes share has the same id in the logs of all, since they know the store by one id.
- Where a part of the messages is recorded, their sizes are scaled up, so that files fill as they would.
- `UsageTrace.remembered` is the configuration that it was recorded under.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from pathlib import Path
from typing import Final

from ...adapters.core.engine.usage import ACKED, ACKED_RANGE, ACROSS, ENDED, REMOVED, SENT, WHOLE
from ...adapters.core.record.encoding import HEAD
from ...adapters.wal import SNAPSHOT
from ...adapters.wal.files.segment_files import SEGMENT_SUFFIX, read_header, segment_path
from ...adapters.wal.files.watermark import Watermark, WatermarkFile
from ...adapters.wal.format import BATCH_HEADER, BATCH_MAGIC, HEADER_BYTES, RECORD_HEADER, SegmentHeader
from ...adapters.wal.reader import BatchReader, read_at, records_of
from ...adapters.wal.segment import Segment
from ...policies.advisor.trace.events import NodeLog, UsageEvent
from ...policies.errors import ConfigError, CorruptionError, TraceError
from ...policies.paths import from_home
from ...policies.text import count_of
from .blocks import BLOCK, VERSION_FILE, Block, decode_block
from .configuration import Remembered, remembered

Progress = Callable[[int, int], None]

SEND_BYTES: Final = RECORD_HEADER.size + 12
"""Bytes that a journal adds to a message's record: those of the log, the destination's number and the seq."""
ACK_BYTES: Final = RECORD_HEADER.size + 16
SHARED_BYTES: Final = HEAD.size + SEND_BYTES + ACK_BYTES
"""Bytes of each message beside `body_size`."""
SETS_KEPT: Final = 100_000
_UNKNOWN: Final = "so nothing is taken to be in force: give that by --current"
JUMP_US: Final = 1_000_000
"""Microseconds. A clock that moves more than that against the steady one was set."""


def find_logs(directory: Path) -> list[Path]:
    """Return the journals of the usage logs in a directory: of a log itself, of a data directory, or of some of either
    below it. Raises TraceError where there is none."""
    for candidates in ([directory], _below(directory)):
        found = [found for one in candidates for found in (one / "usage" / "journal", one / "journal", one)
                 if _has_segments(found)]  # fmt: skip
        if found:
            return found
    what = f"{directory} holds no usage log" if directory.is_dir() else f"there is no usage log at {directory}"
    raise TraceError(
        f"{what}: a router records its use once it is switched on with `usage: {{}}` in stores.yaml; give its data "
        "directory then, or the directory usage/ in it"
    )


def directory_of(journal: Path) -> Path:
    """Return the usage log that a journal belongs to; the journal itself, where it is a copy without the rest."""
    return journal.parent if (journal.parent / VERSION_FILE).exists() else journal


def _below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []


def _has_segments(path: Path) -> bool:
    return path.is_dir() and any(entry.name.endswith(SEGMENT_SUFFIX) for entry in path.iterdir())


def usage_trace(directories: Iterable[str | Path], progress: Progress | None = None) -> UsageTrace:
    """Return the trace of usage logs. `progress` is called with (bytes read, bytes in all). Raises TraceError where
    there is none to read; damaged or missing parts are among the warnings. Nothing is written."""
    segments: dict[bytes, dict[int, _File]] = {}
    places: dict[bytes, Path] = {}
    marks: dict[bytes, list[tuple[Watermark, Path]]] = {}
    warnings: list[str] = []
    for directory in directories:
        for journal in find_logs(from_home(directory)):
            for log_id, mark in _marks(journal):
                marks.setdefault(log_id, []).append((mark, journal))
            for path in sorted(journal.glob(f"*{SEGMENT_SUFFIX}")):
                try:
                    header = read_header(path)
                    size = path.stat().st_size
                except FileNotFoundError:
                    continue  # the router has removed it just now
                except CorruptionError as error:
                    warnings.append(f"{path} was not read: {error.reason}")
                    continue
                if (other := places.setdefault(header.log_id, journal)) is not journal:
                    raise TraceError(
                        f"the usage log {directory_of(journal)} was given already, as {directory_of(other)}; give each "
                        "node's once. A copy of a data directory goes on with the other's log: delete that there"
                    )
                segments.setdefault(header.log_id, {})[header.number] = _File(path, header, size)
    logs = []
    for log_id, files in segments.items():
        newest = files[max(files)]
        for mark, journal in marks.get(log_id, []):
            if mark.segment > newest.header.number and not (path := segment_path(journal, mark.segment)).exists():
                warnings.append(f"{path}, the newest file, is missing: what it held is not in the trace")
            if (mark.segment, mark.nonce) == (newest.header.number, newest.header.nonce):
                newest = files[mark.segment] = replace(newest, durable_lsn=max(mark.lsn, newest.durable_lsn))
        logs.append(_in_order(files))
    if not logs:
        raise TraceError(f"no file of the usage log can be read: {warnings[0]}" if warnings else "no log was given")
    return UsageTrace(logs, _node_names([directory_of(places[log_id]) for log_id in segments]), warnings, progress)


def _node_names(logs: Sequence[Path]) -> tuple[str, ...]:
    """Name nodes by where their logs lie: by the last part of each path in which they differ, and as many before it as
    tell all of them apart."""
    parts = [tuple(part.encode("utf-8", "replace").decode() for part in path.absolute().parts) for path in logs]
    while len(parts) > 1 and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    shorter = [each[:-1] if each[-1] == "usage" else each for each in parts]
    parts = shorter if len(set(shorter)) == len(set(parts)) else parts
    length = next(n for n in count(1) if len({each[-n:] for each in parts}) == len(set(parts)))
    return tuple("/".join(each[-length:]) for each in parts)


def _marks(journal: Path) -> list[tuple[bytes, Watermark]]:
    """Return the newest file of the log in a directory, and up to where all is on disk. Call this before the files are
    looked for: a router may be at it, which goes on to a new file and removes the oldest."""
    for path in sorted(journal.glob(f"*{SEGMENT_SUFFIX}"), reverse=True):
        with suppress(OSError, CorruptionError):
            log_id = read_header(path).log_id
            mark = WatermarkFile(journal, log_id).read()
            return [] if mark is None else [(log_id, mark)]
    return []


@dataclass(frozen=True, slots=True)
class _File:
    """One segment of a log."""

    path: Path
    header: SegmentHeader
    size: int
    end: int | None = None
    """The end of its records, if the file after it says so."""
    gap: bool = False
    """True if the file before it is missing, and is not the first."""
    durable_lsn: int = 0
    """All up to it is on disk, as is known from elsewhere, and if it is the newest file in this one or before it."""


def _in_order(files: dict[int, _File]) -> list[_File]:
    """Return the files that count, oldest first. Numbers between a header's and the one before that it names are
    void."""
    newest = files[max(files)]
    ordered = [newest]
    while True:
        header = ordered[-1].header
        before = files.get(header.prev_number)
        if before is not None:
            ordered.append(replace(before, end=header.prev_end))
            continue
        older = [number for number in files if number < header.prev_number]
        if not older:
            return ordered[::-1]
        last = ordered.pop()
        ordered += [replace(last, gap=True), files[max(older)]]


class UsageTrace:
    """The events of usage logs, in the order of `seq`. Iterate it any number of times; each reads the files again."""

    def __init__(
        self, logs: list[list[_File]], nodes: tuple[str, ...], warnings: list[str], progress: Progress | None
    ) -> None:
        self.nodes = nodes
        """The names of the logs' nodes. Events have them where there are several."""
        self.logs: tuple[NodeLog, ...] = ()
        """The nodes beside each other, once somebody has compared their clocks (`merge_clocks`)."""
        self.sampled: dict[str, float] = {}
        """The part of each node's messages that was recorded. Known once the trace was read to its end."""
        self._logs, self._found, self._progress = logs, warnings, progress
        self._total = sum(file.size for files in logs for file in files)
        self._read = 0
        self.warnings: tuple[str, ...] = ()
        """Facts to know before trusting the trace, a sentence each. Known once it was read to its end."""
        self.remembered: Remembered | None = None
        """The configuration in force when it was recorded last. None where the logs do not say, or contradict each
        other. Known once the trace was read to its end, as are facts to know of it, a sentence each: `notes`."""
        self.notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[UsageEvent]:
        self._read = 0
        readers = [_LogReader(files, self._advance) for files in self._logs]
        seq = count()
        if len(readers) == 1:
            for event in readers[0]:
                yield event._replace(seq=next(seq))
        else:
            streams = [zip(repeat(number), reader) for number, reader in enumerate(readers)]
            silent = dict(enumerate(readers))
            for number, event in heapq.merge(*streams, key=lambda item: item[1].ts):
                silent.pop(number, None)
                yield event._replace(seq=next(seq), node=self.nodes[number])
            for reader in silent.values():
                told = "; ".join(["nothing is recorded there yet", *reader.warnings()])
                raise TraceError(f"{reader.directory}: {told}. Leave it out, or let its router run for some days")
        warnings = [*self._found]
        for reader in readers:
            warnings += reader.warnings()
        if len({reader.sampled for reader in readers}) > 1:
            warnings.append("the nodes recorded different parts of their messages, so not all that crossed can be seen")
        self.remembered, self.notes = _remembered(readers)
        self.sampled = {node: reader.sampled for node, reader in zip(self.nodes, readers, strict=True)}
        self.warnings = tuple(dict.fromkeys(warnings))

    def _advance(self, size: int) -> None:
        self._read += size
        if self._progress is not None:
            self._progress(self._read, self._total)


def _remembered(readers: list[_LogReader]) -> tuple[Remembered | None, tuple[str, ...]]:
    """Return the configuration that logs were recorded under, where it is one and the same, and what one should know of
    it."""
    found: dict[str, Remembered] = {}
    notes = []
    for reader in readers:
        try:
            one = remembered(reader.directory)
        except ConfigError as error:
            return None, (f"{error}; {_UNKNOWN}",)
        if one is None:
            return None, (f"{reader.directory} does not say under which configuration it was recorded; {_UNKNOWN}",)
        found[one.text] = one
        if reader.begun_us < one.since * 1e6 - JUMP_US:
            notes.append(
                f"{reader.directory} was recorded under more than one configuration; the latest counts, in force since "
                f"{one.day}"
            )
    if len(found) > 1:
        return None, (f"{' and '.join(str(one.path) for one in found.values())} differ; {_UNKNOWN}",)
    return next(iter(found.values())), tuple(notes)


@dataclass(slots=True)
class _Destination:
    """One destination of one store, or of one opening of a memory store."""

    text: str
    token: str
    subscriptions: dict[int, str]
    """Names by number."""
    pending: dict[int, set[int]] = field(default_factory=dict)
    """The messages that were sent since the log begins, each with those it waits for. {0}: a queue's."""


class _LogReader:
    """The events of one log; `seq` is 0 in all."""

    def __init__(self, files: list[_File], advance: Callable[[int], None]) -> None:
        self._files, self._advance = files, advance
        self._destinations: dict[tuple[str, str], _Destination] = {}
        """Destinations by token and text."""
        self._volatile: dict[str, _Destination] = {}
        """Those among them that are in memory stores, by text."""
        self._numbers: dict[int, _Destination] = {}
        self._sets: dict[int, list[tuple[int, str]]] = {}
        self._older: dict[int, _Destination] = {}
        """The numbers before: a thread may have been about to use one when they were declared anew."""
        self._session = self._wall_us = self._shift_us = self._now_us = 0
        self._latest_wall_us = 0
        self.begun_us = 0
        """The time of its first operation."""
        self._lost_before = self._lost = self._unknown = self._jumps = self._backwards = 0
        self._jump_us = 0
        self._threshold = WHOLE
        self._damage: list[str] = []

    @property
    def directory(self) -> Path:
        """The directory of its newest part."""
        return directory_of(self._files[-1].path.parent)

    @property
    def sampled(self) -> float:
        """The part of its messages that was recorded, at the least."""
        return self._threshold / WHOLE

    def warnings(self) -> list[str]:
        """Return warnings about what was read."""
        lines = list(self._damage)
        where = self._files[0].path.parent.parent
        if lost := self._lost_before + self._lost:
            lines.append(f"some {count_of(lost, 'operation')} of {where} were not recorded: the disk did not keep up")
        if self._unknown:
            lines.append(f"of {count_of(self._unknown, 'operation')} of {where} the destination's name is lost")
        if self._jumps:
            lines.append(
                f"the clock of {where} was set {_times(self._jumps)}, by {self._jump_us / 1e6:,.1f} s at most; times "
                "follow the steady clock from when each recording was begun"
            )
        if self._backwards:
            lines.append(
                f"{_times(self._backwards)} a recording in {where} says that it was begun before the one before it "
                "ended; its times are moved behind that"
            )
        if self.sampled < 1:
            lines.append(f"{self.sampled:.3g} of the messages of {where} were recorded; sizes are scaled up by that")
        return lines

    def __iter__(self) -> Iterator[UsageEvent]:
        for file in self._files:
            if file.gap:
                self._damage.append(f"the file before {file.path} is missing: what it held is not in the trace")
            yield from self._events_of(file)
            self._advance(file.size)

    def _events_of(self, file: _File) -> Iterator[UsageEvent]:
        segment = Segment(file.header, file.path)
        try:
            reader = BatchReader(segment, HEADER_BYTES, file.header.base_lsn - 1, file.end)
            for batch in reader:
                for record in records_of(batch):
                    if record.kind == BLOCK:
                        yield from self._events(*decode_block(record.payload))
                    elif record.kind != SNAPSHOT:
                        raise TraceError(
                            f"{file.path} is a journal of another kind, not a usage log; give the directory usage/ of "
                            "a data directory"
                        )
            if file.end is None and _is_damaged(segment, reader, file.durable_lsn):
                self._damage.append(f"{file.path} is damaged at offset {reader.offset}: what follows there is lost")
        except FileNotFoundError:
            self._damage.append(f"{file.path} was removed while the log was read: the trace begins behind it")
            return
        except (ValueError, OSError) as error:
            self._damage.append(f"{file.path} was not read to its end: {error}")
            return
        if file.end is not None and reader.offset != file.end:
            lost = file.end - reader.offset
            self._damage.append(f"{file.path} is damaged or cut short at offset {reader.offset}: {lost} bytes are lost")

    def _events(self, block: Block, rows: Iterator[tuple[int, ...]]) -> Iterator[UsageEvent]:
        if block.session != self._session:
            yield from self._begin_session(block, rows_from := list(rows))
            rows = iter(rows_from)
        elif abs(block.wall_us - self._latest_wall_us) > JUMP_US:
            self._jumps += 1
            self._jump_us = max(self._jump_us, abs(block.wall_us - self._latest_wall_us))
        self._latest_wall_us, self._lost = block.wall_us, block.lost
        self._threshold = min(self._threshold, block.threshold)
        if block.destinations and block.destinations[0][0] not in self._numbers:
            self._older, self._numbers, self._sets = self._numbers, {}, dict(list(self._sets.items())[-SETS_KEPT:])
        for number, (_, token, volatile, text, subscriptions) in block.destinations:
            yield from self._declare(number, token, volatile, text, subscriptions)
        self._sets.update(block.sets)
        share = block.threshold / WHOLE
        for time, seq, number, amount, transaction, who, needed, kind, flags in rows:
            destination = self._numbers.get(number) or self._older.get(number)
            if destination is None:
                self._unknown += 1
                continue
            self._now_us = max(self._now_us, time + self._wall_us + self._shift_us)
            pending = destination.pending
            if kind == SENT:
                yield self._sent(destination, seq, amount, self._tx(transaction, flags), who, needed, share)
            elif kind == ACKED:
                tx = self._tx(transaction, flags)
                if not who and len(pending.get(seq, ())) > 1:
                    yield from self._end(destination, [seq], 0, tx)
                else:
                    yield self._ack(destination, seq, who, tx, ACK_BYTES)
                    _discard(pending, seq, who)
            elif kind == ACKED_RANGE:
                last = seq + amount + (transaction << 32)
                yield from self._end(destination, _between(pending, seq, last), who)
            elif kind in (ENDED, REMOVED):
                yield from self._end(destination, list(pending), who)

    def _begin_session(self, block: Block, rows: list[tuple[int, ...]]) -> Iterator[UsageEvent]:
        """Begin another recording: the content of memory stores is gone, and the clock is another."""
        first = (rows[0][0] if rows else 0) + block.wall_us
        self._shift_us = max(0, self._now_us - first)
        if self._shift_us and self._session:
            self._backwards += 1
        self.begun_us = self.begun_us or first
        self._session, self._wall_us, self._latest_wall_us = block.session, block.wall_us, block.wall_us
        self._lost_before, self._lost = self._lost_before + self._lost, 0
        self._numbers, self._older, self._sets = {}, {}, {}
        for text in list(self._volatile):
            yield from self._end_volatile(text)

    def _declare(
        self, number: int, token: str, volatile: bool, text: str, subscriptions: list[tuple[int, str]]
    ) -> Iterator[UsageEvent]:
        destination = self._destinations.get((token, text))
        if destination is None:
            destination = _Destination(text, token, {})
            if volatile:
                yield from self._end_volatile(text)  # of a memory store that was opened again
                self._volatile[text] = destination
            self._destinations[token, text] = destination
        destination.subscriptions.update(subscriptions)
        self._numbers[number] = destination

    def _end_volatile(self, text: str) -> Iterator[UsageEvent]:
        destination = self._volatile.pop(text, None)
        if destination is not None:
            yield from self._end(destination, list(destination.pending), 0)
            del self._destinations[destination.token, text]

    def _tx(self, transaction: int, flags: int) -> str | None:
        return f"{self._session:x}{'x' if flags & ACROSS else '-'}{transaction:x}" if transaction else None

    def _sent(
        self, destination: _Destination, seq: int, amount: int, tx: str | None, who: int, needed: int, share: float
    ) -> UsageEvent:
        if who:
            recipients = self._sets.get(who, [])
            destination.subscriptions.update(recipients)
            if recipients:
                destination.pending[seq] = {number for number, _ in recipients}
        else:
            destination.pending[seq] = {0}
        body, size = amount - HEAD.size, amount + SEND_BYTES
        if share < 1:
            body = round((body + SHARED_BYTES) / share) - SHARED_BYTES
            size = body + HEAD.size + SEND_BYTES
        return UsageEvent(0, self._now_us / 1e6, "send", destination.text, f"{destination.token}-{seq}", size, tx,
                          needed, None, body)  # fmt: skip

    def _ack(self, destination: _Destination, seq: int, who: int, tx: str | None, size: int) -> UsageEvent:
        subscription = destination.subscriptions.get(who, str(who)) if who else None
        name = f"{destination.token}-{seq}"
        return UsageEvent(0, self._now_us / 1e6, "ack", destination.text, name, size, tx, 1, subscription)

    def _end(
        self, destination: _Destination, seqs: Iterable[int], who: int, tx: str | None = None
    ) -> Iterator[UsageEvent]:
        """Ack all that these messages wait for, or what they wait for from one."""
        pending = destination.pending
        for seq in seqs:
            waits = pending[seq]
            for number in sorted(waits) if not who else [who] if who in waits else []:
                yield self._ack(destination, seq, number, tx, 0)
                _discard(pending, seq, number)


def _is_damaged(segment: Segment, reader: BatchReader, durable_lsn: int) -> bool:
    """Return whether the newest file, of which no other says where it ends, held more than was read: no crash does
    that."""
    if reader.lsn < durable_lsn:
        return True
    if any(reader.lsn < header.watermark for header in reader.headers_beyond()):
        # The batch was on disk before that header was written: it reads now, if a router has written both meanwhile.
        return next(iter(BatchReader(segment, reader.offset, reader.lsn)), None) is None
    start = read_at(segment.reading(), reader.offset, BATCH_HEADER.size)
    # Where a used file's first batch began another begins; elsewhere anything may be left of what it held before.
    return reader.offset == HEADER_BYTES and any(start) and not start.startswith(BATCH_MAGIC)


def _discard(pending: dict[int, set[int]], seq: int, who: int) -> None:
    waits = pending.get(seq)
    if waits is not None:
        waits.discard(who)
        if not waits or not who:
            del pending[seq]


def _between(pending: dict[int, set[int]], first: int, last: int) -> list[int]:
    """Return the numbers between two, which stand in about that order; a page is looked at, not all."""
    found = []
    for seq in pending:
        if seq > last:
            break
        if seq >= first:
            found.append(seq)
    return found


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
