"""A KahaDB or mKahaDB directory as a usage trace.

The rows say this, where KahaDB leaves a choice:

- `seq` is the order of the records in the journal. A send inside a transaction takes effect at the commit, but its
  bytes lie where its record lies, and which file is kept depends on that alone.
- `size` is the record and its share of its batch's header. A transaction's last operation carries its Prepare and
  Commit records too. A redelivery rewrites the whole message (UpdateMessage): the next event of that destination
  carries those bytes. Bytes of no message (audits, ack maps, rolled back operations) are in `bytes_other`.
- `ts` of a send is the broker's clock. Acks have none: theirs are spread evenly between the sends around them.
- A topic message needs an ack from each durable subscription there is when it is sent. A subscription that ends, or a
  destination that is removed, acks what was left, in events of size 0.
- Operations of destinations whose names are none here (longer than 1,024 bytes, say) are not in the trace.
- Operations of transactions that were rolled back, discarded by a restart or not yet committed are not in the trace.
- Stores of an mKahaDB are merged by their clocks; a transaction over several of them has one `tx` in all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Final

from ...policies.advisor.trace.events import UsageEvent
from ...policies.errors import DestinationError, TraceError
from ...policies.names.destination import Destination
from ...policies.text import count_of
from .commands import AddMessage, RemoveMessage, UpdateMessage
from .entries import Entry, Outcome, Outcomes, Transaction, broker_time, decided, message_info, read_entries
from .files import Damage, KahaDirectory, StoreFiles, find_stores, name_range
from .journal import Journal, Report
from .openwire import OpenWireError, read_ack
from .replay import ACK, SEND, UPDATE, Effect, Replay

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Findings:
    """The content of the journal, and what it could not tell."""

    stores: int
    files: int
    records: int
    sends: int
    acks: int
    acks_unknown: int
    """Among the acks, those of messages whose send is not in the journal: the trace begins in the middle."""
    acks_repeated: int
    """Acks of messages that were acked before; not in the trace."""
    acks_by_type: Mapping[str, int]
    """ActiveMQ's ack types: `individual`, `standard`, `expired`, `poison` and so on."""
    sends_repeated: int
    """Sends of messages that were there already, which the broker ignored; not in the trace."""
    nameless: int
    """Operations of destinations whose names are none here; not in the trace."""
    updates: int
    """Messages written again to keep their redelivery count."""
    pending: int
    """Messages that no ack ends."""
    transactions: Mapping[str, int]
    """`committed`, `rolled back`, `discarded by a restart`, `prepared`, `open`."""
    prepared: tuple[str, ...]
    """Ids of the transactions that were left prepared."""
    clocks_interpolated: int
    """Events whose `ts` is not their own: all acks, and sends whose message could not be read."""
    bytes_total: int
    bytes_other: int
    """Bytes that no event carries."""
    missing_files: tuple[str, ...]
    """Numbers without a file, by store. Without an archive that is what ActiveMQ's clean-up leaves."""
    shadowed: tuple[Path, ...]
    """Archived files that were not read, as the live directory has the same number."""
    damages: tuple[Damage, ...]

    @property
    def events(self) -> int:
        return self.sends + self.acks

    def warnings(self) -> tuple[str, ...]:
        """Return what a user should know before trusting the trace, a sentence each."""
        lines = [str(damage) for damage in self.damages]
        if self.missing_files:
            names = ", ".join(self.missing_files)
            lines.append(f"files that ActiveMQ removed are not in the trace: {names}; set archiveDataLogs to keep them")
        if self.acks_unknown:
            count = count_of(self.acks_unknown, "ack")
            lines.append(f"{count} of messages that were sent before the trace begins")
        if self.nameless:
            count = count_of(self.nameless, "operation")
            lines.append(f"{count} of destinations whose names are none here: not in the trace")
        if self.updates:
            count = count_of(self.updates, "rewrite")
            lines.append(
                f"{count} of messages that were redelivered: the model kahadb "
                "keeps these where they were first sent, so its figures, that of one store above all, may be too high"
            )
        if self.prepared:
            count = count_of(len(self.prepared), "prepared transaction")
            lines.append(f"{count} not in the trace: {', '.join(self.prepared)}")
        if opened := self.transactions.get(Outcome.OPEN.value):
            count = count_of(opened, "transaction")
            lines.append(f"{count} still open where the journal ends: not in the trace")
        lines += [f"{path} was not read: the live directory has that file too" for path in self.shadowed]
        return tuple(lines)


class KahaTrace:
    """The events of a directory, in the order of `seq`. Iterate it any number of times; each reads the files again."""

    def __init__(self, directory: KahaDirectory, progress: Progress | None = None) -> None:
        self.directory: Final = directory.directory
        self._damages: dict[Damage, None] = {}
        self._note = self._damages.setdefault
        ids = decided(directory.transaction_store, self._note)
        self._stores = [_StoreTrace(files, self._note, ids, progress) for files in directory.stores]
        self._findings: Findings | None = None

    def __iter__(self) -> Iterator[UsageEvent]:
        counts = _Counts()
        if len(self._stores) == 1:
            yield from self._stores[0].events(counts, self._note)
        else:
            streams = [_by_clock(s.events(counts, self._note), i) for i, s in enumerate(self._stores)]
            seq = count()
            for _, _, event in heapq.merge(*streams, key=lambda item: item[:2]):
                yield event._replace(seq=next(seq))
        self._findings = self._summarise(counts)

    @property
    def findings(self) -> Findings:
        """Return the findings, known once the trace was read to its end; reads it if it was not."""
        if self._findings is None:
            for _ in self:
                pass
        assert self._findings is not None
        return self._findings

    def _summarise(self, counts: _Counts) -> Findings:
        stores = self._stores
        outcomes = sum((store.outcomes.count() for store in stores), Counter[Outcome]())
        unfinished = {t.id.text: t for store in stores for t in store.outcomes.unfinished()}
        return Findings(
            stores=len(stores),
            files=sum(len(store.journal.files.files) for store in stores),
            records=counts.records,
            sends=counts.sends,
            acks=counts.acks,
            acks_unknown=counts.replay["acks_unknown"],
            acks_repeated=counts.replay["acks_repeated"],
            acks_by_type=dict(sorted(counts.ack_types.items())),
            sends_repeated=counts.replay["sends_repeated"],
            nameless=counts.nameless,
            updates=counts.replay["updates"],
            pending=counts.pending,
            transactions={outcome.value: outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
            prepared=tuple(text for text, t in unfinished.items() if t.outcome is Outcome.PREPARED),
            clocks_interpolated=counts.interpolated,
            bytes_total=counts.bytes_total,
            bytes_other=counts.bytes_total - counts.bytes_events,
            missing_files=tuple(line for store in stores for line in _gap_lines(store.journal.files)),
            shadowed=tuple(path for store in stores for path in store.journal.files.shadowed),
            damages=tuple(self._damages),
        )


def usage_trace(directory: str | Path, progress: Progress | None = None) -> KahaTrace:
    """Return the usage trace of a KahaDB or mKahaDB directory, its archive included where there is one.

    `progress` is called with (bytes read, bytes in all), from 0 again for each store and each reading. Raises
    TraceError where there is no journal to read; damage inside a journal is in the findings instead. Nothing is
    written to the directory. Memory grows with the number of messages and transactions, not with their bodies.
    """
    return KahaTrace(find_stores(directory), progress)


class _Counts:
    """The counts of one reading, over all stores."""

    def __init__(self) -> None:
        self.records = self.sends = self.acks = self.pending = self.interpolated = self.nameless = 0
        self.bytes_total = self.bytes_events = 0
        self.ack_types: Counter[str] = Counter()
        self.replay: Counter[str] = Counter()


class _StoreTrace:
    """One store: the outcomes of its transactions, and its events in journal order."""

    def __init__(self, files: StoreFiles, report: Report, decided: frozenset[str], progress: Progress | None) -> None:
        self.journal = Journal(files, progress)
        self.outcomes = Outcomes.read(self.journal, report, decided)
        if not self.outcomes.records and not self.journal.looks_like_one():
            raise TraceError(
                f"{files.directory} is not a KahaDB journal: none of its {len(files.files)} db-*.log files begins "
                "as one does, or none can be read; give the directory of a KahaDB store"
            )
        _report_gaps(files, report)

    def events(self, counts: _Counts, report: Report) -> Iterator[UsageEvent]:
        replay, clock = Replay(self.outcomes), _Clock(self.outcomes)
        carried: Counter[str] = Counter()  # bytes of UpdateMessage records, by destination
        seq = 0
        for entry in read_entries(self.journal, report):
            counts.records += 1
            size = entry.record.length + entry.record.share
            counts.bytes_total += size
            effects = replay.apply(entry)
            if not entry.repeated:
                clock.pass_by(entry)
            if not effects:
                continue
            transaction = self._transaction(entry)
            if transaction is not None and transaction.last == entry.place:
                size += transaction.outcome_bytes
            for effect in effects:
                name = str(effect.destination)
                if not _is_name(name):
                    counts.nameless += 1
                    continue
                if effect.op is UPDATE:
                    carried[name] += size
                    continue
                bytes_here = (size if effect.is_record else 0) + carried.pop(name, 0)
                counts.bytes_events += bytes_here
                yield _event(seq, entry, effect, name, bytes_here, clock, transaction, counts)
                seq += 1
        for damage in replay.missing(self.journal.files):
            report(damage)
        counts.pending += replay.pending()
        counts.replay.update(replay.counts)

    def _transaction(self, entry: Entry) -> Transaction | None:
        command = entry.command
        if isinstance(command, AddMessage | RemoveMessage) and command.transaction is not None:
            return self.outcomes.find(command.transaction, entry.place)
        return None


@lru_cache(maxsize=4096)
def _is_name(text: str) -> bool:
    try:
        Destination.parse(text)
    except DestinationError:
        return False
    return True


def _event(
    seq: int,
    entry: Entry,
    effect: Effect,
    name: str,
    size: int,
    clock: _Clock,
    transaction: Transaction | None,
    counts: _Counts,
) -> UsageEvent:
    tx = transaction.id.text if transaction is not None and effect.is_record else None
    if effect.op is SEND:
        counts.sends += 1
        if not clock.is_exact:
            counts.interpolated += 1
        body = clock.body_size
        return UsageEvent(seq, clock.now, SEND, name, effect.message_id, size, tx, effect.acks_needed, None, body)
    counts.acks += 1
    counts.interpolated += 1
    if effect.is_record and isinstance(entry.command, RemoveMessage):
        counts.ack_types[_ack_type(entry.command)] += 1
    return UsageEvent(seq, clock.now, ACK, name, effect.message_id, size, tx, 1, effect.subscription)


def _ack_type(command: RemoveMessage) -> str:
    if not command.ack:
        return "unmatched"  # a durable subscription whose selector did not want it
    try:
        return read_ack(command.ack).type_name
    except OpenWireError:
        return "unreadable"


class _Clock:
    """The time at each record: exact at sends, between them by the share of the acks gone by."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._times, self._runs = outcomes.clock_times, outcomes.clock_runs
        self._next = 0
        self._removes = 0
        self._before = self._times[0] if self._times else 0.0
        self.now = self._before
        self.is_exact = False
        self.body_size: int | None = None

    def pass_by(self, entry: Entry) -> None:
        """Move on to this record."""
        command = entry.command
        if isinstance(command, RemoveMessage):
            self._removes += 1
            self.is_exact = False
            self._interpolate()
        elif isinstance(command, AddMessage):
            info = message_info(command)
            self.body_size = None if info is None else info.body_size
            time = broker_time(info)
            self.is_exact = time is not None
            if time is not None:
                self.now = self._before = time
                self._next += 1
                self._removes = 0
        elif isinstance(command, UpdateMessage):  # counts as a send where the first copy is gone
            info = message_info(command.message)
            self.body_size = None if info is None else info.body_size
            self.is_exact = False

    def _interpolate(self) -> None:
        if self._next >= len(self._times):
            self.now = self._before
            return
        gap = self._times[self._next] - self._before
        self.now = self._before + gap * self._removes / (self._runs[self._next] + 1)


def _by_clock(events: Iterator[UsageEvent], store: int) -> Iterator[tuple[float, int, UsageEvent]]:
    """Yield events under a clock that never goes back, so that merging keeps each store's own order."""
    latest = float("-inf")
    for event in events:
        latest = max(latest, event.ts)
        yield latest, store, event


def _report_gaps(files: StoreFiles, report: Report) -> None:
    """Report numbers that are missing beside an archive: the broker moves files there instead of deleting them."""
    if files.has_archive:
        for first, last in files.gaps:
            reason = f"{name_range(first, last)} missing: neither in the live directory nor in the archive"
            report(Damage(str(files.directory / f"db-{first}.log"), 0, reason, "missing"))


def _gap_lines(files: StoreFiles) -> list[str]:
    if files.has_archive or not files.files:
        return []
    begin = files.files[0].number  # a broker numbers from 1
    gone = [*([(1, begin - 1)] if begin > 1 else []), *files.gaps]
    return [f"{files.name} " + ", ".join(name_range(first, last) for first, last in gone)] if gone else []
