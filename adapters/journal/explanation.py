"""The reasons why each segment of a journal store is kept: what in it is still needed, and by whom.

    explain_store("orders", directory, scratch)

The store is read as its next opening would read it, and nothing is written to it: its index is copied into a scratch
directory, brought up to the journal there, and made anew from the journal where it cannot be used. Nobody may have the
store open meanwhile (reading_lock.py). It reads of the journal the headers of all segments, what lies behind the
index's last checkpoint, the records of prepared transactions, and of each destination the oldest message in each
segment: what is damaged among these is told. Store.check() reads all of it.

A store that is open explains itself (explain_open), by the index as it has it.

A segment is kept for live messages and for prepared transactions alone; acks keep none (rule J6). One in which nothing
is needed goes when a snapshot is worth writing that lets it go.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ...policies.errors import CorruptionError
from ..core.operations.branches import Branch, branch_of
from ..core.record import large
from ..core.record.encoding import sent_at_ms
from ..core.record.place import EXPIRES, OWN, SEQ, Place
from ..core.state.leases import DestinationState, SubscriptionState
from ..core.state.states import Catalog
from ..core.store_types import Progress
from ..wal.files.reserve import SPARE_SUFFIX
from ..wal.files.segment_files import POOL_SUFFIX, UNFINISHED_SUFFIX, SegmentFiles
from ..wal.format import COPIES, RESTORE
from ..wal.log import Log
from ..wal.segment import Segment, SegmentTable
from . import snapshot
from .bodies import body_of
from .directory import StoreDirectory
from .index.checksums import path_of
from .index.file import remove_file
from .index.index import Index, is_of_index
from .recovery.opening import Opened, bring_up, payload_of

MESSAGES: Final = "messages"
TRANSACTION: Final = "transaction"
WRITTEN: Final = "written"
"""Kinds of reasons."""


@dataclass(frozen=True, slots=True)
class SubscriptionShare:
    """The messages that a durable subscription has yet to ack."""

    client: str
    name: str
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason to keep a segment."""

    kind: str
    """`messages`: live ones of a destination; `transaction`: a prepared one's record; `written`: it is the segment that
    is being written."""
    destination: str | None = None
    transaction: str | None = None
    """Its id, as `anabranch transactions` lists it."""
    messages: int = 0
    bytes: int = 0
    """Bytes of these records in the segment."""
    oldest_sent_at_ms: int | None = None
    expired: int = 0
    """How many of the messages have expired: they go when the store is open."""
    claimed: int = 0
    """How many of them a prepared transaction acks: they go when it is committed."""
    subscriptions: tuple[SubscriptionShare, ...] = ()
    """Subscriptions that have yet to ack a topic's messages. A message that several have yet to ack counts for each of
    them."""


@dataclass(frozen=True, slots=True)
class SegmentExplanation:
    """One file of the journal."""

    number: int
    """A file of copies has one that is counted apart."""
    path: str
    bytes: int
    """Its size on disk; `used_bytes` of them hold records, `live_bytes` records that are needed."""
    used_bytes: int
    live_bytes: int
    reasons: tuple[Reason, ...]
    """None: nothing in it is needed."""
    generation: int = 0
    """How often compaction has copied what is in it; 0: a segment as it was written."""

    @property
    def key(self) -> int:
        """Return a number that no other file of the journal has."""
        return self.number + (COPIES if self.generation else 0)

    @property
    def kept(self) -> bool:
        return bool(self.reasons)


@dataclass(frozen=True, slots=True)
class Pinning:
    """The disk that messages of a destination, or of one subscription, keep."""

    destination: str
    subscription: tuple[str, str] | None
    """Client and name of a durable subscription; None: all messages of the destination."""
    messages: int
    bytes: int
    oldest_sent_at_ms: int | None
    segments: int
    """In so many they lie."""
    kept_bytes: int
    """Bytes that these segments take on disk. Others may keep the same ones."""
    freed_bytes: int
    """Bytes that could go if these messages alone were gone."""


@dataclass(frozen=True, slots=True)
class WaitingTransaction:
    """A transaction that is prepared and waits for its outcome."""

    id: str
    sends: int
    acks: int
    bytes: int
    segment: int


@dataclass(frozen=True, slots=True)
class Files:
    """Files of the store beside its segments: how many, and how many bytes."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreExplanation:
    """One journal store."""

    name: str
    kind: str
    directory: str
    segments: tuple[SegmentExplanation, ...]
    pinning: tuple[Pinning, ...]
    """The pinning of each destination that holds messages; the one that keeps most first."""
    subscriptions: tuple[Pinning, ...]
    """The pinning of each durable subscription; the one that keeps most first."""
    transactions: tuple[WaitingTransaction, ...]
    snapshot_bytes: int
    """About what a snapshot would take that lets go of what is not needed. It is written when that frees `WORTH` times
    as much."""
    index_rebuilt: bool
    """The index could not be used: the next opening makes it anew from the journal, as was done here."""
    pool: Files
    """Files that wait to become segments again."""
    reserve: Files
    """Files that are kept free for acks on a full disk."""
    leftovers: Files
    """Files that a crash left: segments that nothing accounts for, unfinished files. The next opening removes them."""
    index: Files
    large: Files
    """Large bodies, which lie beside the journal until their messages are gone."""
    archive: Files | None
    """Segments that were released into `archive_directory`; None where that is not known. They are history."""
    damages: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Return how many bytes the segments have."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def unneeded(self) -> tuple[SegmentExplanation, ...]:
        """Return the segments in which nothing is needed."""
        return tuple(segment for segment in self.segments if not segment.kept)


def explain_store(
    name: str,
    directory: Path,
    scratch: Path,
    now_ms: int,
    index_directory: Path | None = None,
    archive_directory: Path | None = None,
    progress: Progress | None = None,
) -> StoreExplanation:
    """Return why each segment of the journal store in a directory is kept. Nobody has it open meanwhile.

    `scratch` is a directory of the caller's, with room for a copy of the index. Raises PlacementError where there is no
    store, CorruptionError where the journal cannot be read, which says what lies there as far as that is known, and
    OSError.
    """
    where = StoreDirectory(name, directory, index_directory)
    store_id = where.read_id()
    files = SegmentFiles(where.journal, 0)
    index, opened = copy_and_bring_up(name, store_id, files, where.index, scratch / "index.mdb", progress)
    try:
        index.complete_removals()
        table = opened.survey.table()
        leftovers = [
            *opened.survey.void,
            *where.journal.glob(f"*{UNFINISHED_SUFFIX}"),
            *(directory / large.DIRECTORY).glob(f"*{large.PART}"),
        ]
        journal = _Journal(
            table, table.segments[-1].number, opened.survey.end.offset, opened.prepared, len(opened.ids),
            opened.rebuilt, leftovers,
        )  # fmt: skip
        return _explained(where, index, journal, now_ms, archive_directory)
    finally:
        index.close()


def explain_open(
    where: StoreDirectory, index: Index, log: Log, now_ms: int, archive_directory: Path | None
) -> StoreExplanation:
    """Return why each segment of a store is kept that is open. Called under the store's lock, with nothing pending."""
    tail, table = log.written(), log.table
    prepared = []
    for transaction, own in index.transactions.prepared():
        payload = payload_of(transaction, own, table)
        if payload is not None:
            prepared.append((transaction, payload))
    ids = sum(1 for _ in index.duplicates())
    journal = _Journal(table, tail.segment.number, tail.offset, prepared, ids, rebuilt=False, leftovers=())
    return _explained(where, index, journal, now_ms, archive_directory)


class _Journal(NamedTuple):
    """The state of a journal beside its index."""

    table: SegmentTable
    writing: int
    """The number of the segment that is being written."""
    end: int
    """Where the records of that one end."""
    prepared: list[tuple[bytes, bytes]]
    """Transaction and payload of each branch that waits for its outcome."""
    ids: int
    """Entries of the duplicate window."""
    rebuilt: bool
    """The index was made anew."""
    leftovers: Iterable[Path]
    """Files that nothing accounts for."""


def _explained(
    where: StoreDirectory, index: Index, journal: _Journal, now_ms: int, archive_directory: Path | None
) -> StoreExplanation:
    found = _Found(index, journal, now_ms)
    segments = tuple(found.segment(segment) for segment in journal.table.all)
    by_key = {segment.key: segment for segment in segments}
    archive = None
    if archive_directory is not None:
        archive = _sizes((archive_directory / f"{where.path.name}-{where.read_id().hex()[:8]}").glob("*.seg"))
    return StoreExplanation(
        name=where.name,
        kind="journal",
        directory=str(where.path),
        segments=segments,
        pinning=tuple(_sorted(found.pinned_by(state, by_key) for state in index.states.values() if state.count)),
        subscriptions=tuple(_sorted(found.held_for(one, by_key) for one in index.subscriptions.values())),
        transactions=tuple(found.transactions),
        snapshot_bytes=_snapshot_bytes(index, journal),
        index_rebuilt=journal.rebuilt,
        pool=_sizes(where.journal.glob(f"*{POOL_SUFFIX}")),
        reserve=_sizes(where.journal.glob(f"*{SPARE_SUFFIX}")),
        leftovers=_sizes(journal.leftovers),
        index=_sizes([where.index, path_of(where.index)]),
        large=_sizes((where.path / large.DIRECTORY).glob(f"*{large.BODY}")),
        archive=archive,
        damages=tuple(found.damages),
    )


def copy_index(path: Path, copy: Path) -> None:
    """Copy an index, as far as it is there, and its checksums. Raises OSError."""
    for original, copied in ((path, copy), (path_of(path), path_of(copy))):
        with suppress(FileNotFoundError):
            shutil.copyfile(original, copied)


def copy_and_bring_up(
    name: str, store_id: bytes, files: SegmentFiles, path: Path, copy: Path, progress: Progress | None
) -> tuple[Index, Opened]:
    """Return the index as the next opening would have it, in `copy`. Raises CorruptionError, OSError."""
    copy_index(path, copy)
    try:
        return _bring_up(name, store_id, files, copy, progress)
    except Exception as error:
        if not is_of_index(error):
            raise
        remove_file(copy)
        return _bring_up(name, store_id, files, copy, progress)


def _bring_up(
    name: str, store_id: bytes, files: SegmentFiles, path: Path, progress: Progress | None
) -> tuple[Index, Opened]:
    index = Index(path, store_id, Catalog(), sys.maxsize, None)
    return index, bring_up(name, store_id, files, index, progress, settle=_leave)


def _leave(survey: object, files: object) -> None:
    """Leave what may not be on disk yet as it is: nobody is shown more than this explanation."""


class _Tally:
    """Messages of one destination in one segment."""

    __slots__ = ("bytes", "claimed", "expired", "messages", "oldest", "waiting", "waiting_bytes")

    def __init__(self, oldest: Place) -> None:
        self.messages = self.bytes = self.expired = self.claimed = 0
        self.oldest = oldest
        self.waiting: Counter[int] = Counter()
        """The number of a topic's messages, by the bits of those who have yet to ack them."""
        self.waiting_bytes: Counter[int] = Counter()
        """Their bytes, by the same bits."""

    def add(self, place: Place, pending: int, now_ms: int, claimed: bool) -> None:
        length = place[OWN][2]
        self.messages += 1
        self.bytes += length
        self.expired += 0 < place[EXPIRES] <= now_ms
        self.claimed += claimed
        if pending:
            self.waiting[pending] += 1
            self.waiting_bytes[pending] += length

    def for_bit(self, bit: int) -> tuple[int, int]:
        """Return messages and bytes that the subscription of this bit has yet to ack."""
        mine = [bits for bits in self.waiting if bits & bit]
        return sum(self.waiting[bits] for bits in mine), sum(self.waiting_bytes[bits] for bits in mine)


class _Found:
    """The content of the index, by segment and destination."""

    def __init__(self, index: Index, journal: _Journal, now_ms: int) -> None:
        self._index, self._table, self._writing, self._end = index, journal.table, journal.writing, journal.end
        self.damages: list[str] = []
        branches = _branches(index, journal.prepared)
        self.transactions = list(self._waiting(branches))
        numbers = {state.destination: state.number for state in index.states.values()}
        claimed = {(numbers.get(ack.state.destination), ack.seq) for branch in branches for ack in branch.acks}
        self._tallies: dict[int, dict[int, _Tally]] = {}
        """By segment's number, then destination's."""
        for number, place, pending in index.rows.all():
            segment = self._table.find(place[OWN][0])
            if segment is None:
                self.damages.append(f"message {place[SEQ]} of {index.states[number].destination} lies in no segment")
                continue
            tallies = self._tallies.setdefault(segment.number, {})
            if number not in tallies:  # by seq: it is the oldest
                tallies[number] = _Tally(place)
            tallies[number].add(place, pending, now_ms, bool(claimed) and (number, place[SEQ]) in claimed)
        self._lying_in: dict[int, list[int]] = {}
        """Numbers of the segments that a destination's messages lie in, by its number."""
        self._sent: dict[tuple[int, int], int | None] = {}
        for segment in self._table.all:
            for number, tally in self._tallies.get(segment.number, {}).items():
                self._lying_in.setdefault(number, []).append(segment.number)
                self._sent[segment.number, number] = self._sent_at(segment, index.states[number], tally.oldest)

    def _waiting(self, branches: Iterable[Branch]) -> Iterator[WaitingTransaction]:
        for branch in branches:
            lsn, _, length = branch.own
            segment = self._table.find(lsn)
            number = segment.number if segment is not None else 0
            yield WaitingTransaction(branch.transaction.hex(), len(branch.sends), len(branch.acks), length, number)

    def _sent_at(self, segment: Segment, state: DestinationState, place: Place) -> int | None:
        """Return when a message was sent (ms); None if it does not read back, which is noted."""
        _, offset, length = place[OWN]
        try:
            file = segment.open()  # held while it is read: who rolls or compacts lets go of it meanwhile
            record = os.pread(file.fd, length, offset)
            body = body_of(record, offset, segment.seed, state.number, place)
        except OSError as error:
            self.damages.append(f"{segment.path} at offset {offset}: it cannot be read: {error.strerror}")
            return None
        if body is None:
            reason = f"message {place[SEQ]} of {state.destination} does not read back; others here may be damaged too"
            self.damages.append(str(CorruptionError(str(segment.path), offset, reason, RESTORE)))
            return None
        return sent_at_ms(body)

    def segment(self, segment: Segment) -> SegmentExplanation:
        """Return why a segment is kept."""
        reasons = [self._reason(segment, *one) for one in self._tallies.get(segment.number, {}).items()]
        reasons.sort(key=lambda reason: (-reason.bytes, reason.destination))
        reasons += [
            Reason(TRANSACTION, transaction=one.id, bytes=one.bytes)
            for one in self.transactions
            if one.segment == segment.number
        ]
        if segment.number == self._writing:
            reasons.append(Reason(WRITTEN))
        used = segment.end or self._end
        return SegmentExplanation(
            segment.number % COPIES, str(segment.path), segment.allocated, used, segment.live_bytes, tuple(reasons),
            segment.generation,
        )  # fmt: skip

    def _reason(self, segment: Segment, number: int, tally: _Tally) -> Reason:
        state = self._index.states[number]
        shares = []
        if tally.waiting:
            for subscriber in state.own.subscriptions.values():
                messages, size = tally.for_bit(subscriber.own.bit)
                if messages:
                    client, name = subscriber.subscription.key
                    shares.append(SubscriptionShare(client, name, messages, size))
        return Reason(
            MESSAGES,
            destination=str(state.destination),
            messages=tally.messages,
            bytes=tally.bytes,
            oldest_sent_at_ms=self._sent[segment.number, number],
            expired=tally.expired,
            claimed=tally.claimed,
            subscriptions=tuple(sorted(shares, key=lambda share: (-share.messages, share.client, share.name))),
        )

    def pinned_by(self, state: DestinationState, segments: Mapping[int, SegmentExplanation]) -> Pinning:
        """Return what all messages of a destination keep; `segments` by key."""
        mine = [segments[number] for number in self._lying_in.get(state.number, ())]
        alone = [segment for segment in mine if len(segment.reasons) == 1]
        tallies = [self._tallies[segment.key][state.number] for segment in mine]
        return Pinning(
            str(state.destination),
            None,
            sum(tally.messages for tally in tallies),
            sum(tally.bytes for tally in tallies),
            self._oldest(state, mine),
            len(mine),
            sum(segment.bytes for segment in mine),
            sum(segment.bytes for segment in alone),
        )

    def held_for(self, subscriber: SubscriptionState, segments: Mapping[int, SegmentExplanation]) -> Pinning:
        """Return what is kept until a subscription has acked it; `segments` by key."""
        topic, bit = subscriber.topic, subscriber.own.bit
        mine, alone = [], []
        messages = size = 0
        for number in self._lying_in.get(topic.number, ()):
            segment, tally = segments[number], self._tallies[number][topic.number]
            waiting, waiting_bytes = tally.for_bit(bit)
            if not waiting:
                continue
            mine.append(segment)
            messages, size = messages + waiting, size + waiting_bytes
            if len(segment.reasons) == 1 and all(bits == bit for bits in tally.waiting):
                alone.append(segment)
        return Pinning(
            str(topic.destination),
            subscriber.subscription.key,
            messages,
            size,
            self._oldest(topic, mine),
            len(mine),
            sum(segment.bytes for segment in mine),
            sum(segment.bytes for segment in alone),
        )

    def _oldest(self, state: DestinationState, segments: Iterable[SegmentExplanation]) -> int | None:
        sent = [self._sent[segment.key, state.number] for segment in segments]
        return min((at for at in sent if at is not None), default=None)


def _branches(index: Index, prepared: Iterable[tuple[bytes, bytes]]) -> list[Branch]:
    """Return the prepared branches, with where their records are."""
    own = dict(index.transactions.prepared())
    catalog = Catalog()  # of its own: to name a destination makes none in the index
    branches = []
    for transaction, payload in prepared:
        branch = branch_of(transaction, payload, catalog, index.priorities)
        branch.own = own[transaction]
        branches.append(branch)
    return branches


def _snapshot_bytes(index: Index, journal: _Journal) -> int:
    """Return the size of a snapshot, as Applier asks whether one is worth it."""
    rows = journal.ids + index.transactions.count + len(index.subscriptions) + index.rows.counted
    sealed = [segment for segment in journal.table.all if segment.live and segment.number != journal.writing]
    return snapshot.size_expected(sealed, len(index.states), rows)


def _sorted(found: Iterable[Pinning]) -> list[Pinning]:
    return sorted(found, key=lambda p: (-p.freed_bytes, -p.kept_bytes, -p.bytes, p.destination, p.subscription or ()))


def _sizes(paths: Iterable[Path]) -> Files:
    count = size = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size += path.stat().st_size
            count += 1
    return Files(count, size)
