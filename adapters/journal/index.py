"""The index: which messages are there and where, in LMDB. Derived from the journal alone (rules X1 to X5).

    messages, and what belongs to them: rows.py
    subscriptions  number                                   ->  topic, client, name, ..., start, bit, to be acked
    segments       number                                   ->  base LSN, last LSN, end, live, live bytes, dead bits
    destinations   id                                       ->  kind, name, messages, bytes
    duplicates     seq                                      ->  destination id, message id
    transactions   id                                       ->  LSN, offset, length of its PREPARE; empty: committed
    state          b"checkpoint"                            ->  Checkpoint

Everything between two checkpoints happens in one open write transaction, which is LMDB's cache: nothing of it reaches
the file, so the file always shows the last checkpoint, and the journal is replayed from there. A crash, an error and an
interruption half way through `apply` are therefore the same thing: go back to the checkpoint, replay.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ...policies.destination import Destination, Kind
from ...policies.errors import AnabranchError
from ..base import Subscription
from ..files import FILE_MODE, create_lmdb, open_lmdb
from ..wal.segment import Segment, SegmentTable
from ..wal.survey import Checkpoint as LogCheckpoint
from ..wal.survey import Kept
from . import format as f
from .batch import Entry
from .checksums import Files, IndexBrokenError, PageChecksums, path_of
from .destinations import LSN, DestinationState, SubscriptionState
from .rows import ID, KEY, PLACE, SEQ_END, TABLES, Rows

log = logging.getLogger(__name__)

VERSION: Final = 2
MAP_BYTES: Final = 1 << 30
"""The first size of the map: address space, not memory nor disk. Doubled when 70 % full (rule X4)."""
MAP_FULL_PERCENT: Final = 70

HELD_MAX: Final = 200_000
"""Messages; an error of a store with more does not look for those of one segment, which takes 1 us for each."""

NUMBER = struct.Struct(">Q")
COMMITTED_MAX: Final = 100_000
"""Transactions over several stores that are remembered as committed until their coordinator forgets them."""


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """What an index file reflects. Positions are batch boundaries."""

    version: int
    store_id: bytes
    lsn: int
    """The last LSN that is in the index."""
    segment: int
    nonce: int
    offset: int
    """Where the batch after that LSN begins."""
    seq: int
    last_number: int
    """The highest segment number by then."""
    next_destination: int
    snapshot: tuple[int, int]
    clean: bool
    """The store was closed in order, and nothing has been written since."""
    next_subscription: int = 1
    priorities: bool = False
    """The store's option: the index is made for it."""


class Index:
    """One index file, open. Every method is called under the store's index lock."""

    def __init__(
        self,
        path: Path,
        store_id: bytes,
        duplicate_limit: int,
        priorities: bool = False,
        file_mode: int = FILE_MODE,
    ) -> None:
        self.path = path
        self._file_mode = file_mode
        self.priorities = priorities
        self._store_id = store_id
        self._duplicate_limit = duplicate_limit
        self._env: Any = None
        self._txn: Any = None
        self._checksums = PageChecksums(path, file_mode)
        self.checkpointed: Checkpoint | None = None
        self.is_undone = False
        """The file's last checkpoint had no checksums yet when the process was killed: it is the one before."""
        self.states: dict[int, DestinationState] = {}
        self.by_destination: dict[Destination, DestinationState] = {}
        self.next_destination = 1
        self.subscribers: dict[int, SubscriptionState] = {}
        """By number; also those that an earlier checkpoint does not know."""
        self.next_subscription = 1
        self.rows = Rows(priorities, self.states, self._bury)
        self._duplicates = 0
        self.transactions = 0
        """Prepared, or committed and not forgotten."""
        self.operations = 0
        """Applied since the last checkpoint."""
        self.emptied = False
        """A sealed segment has lost its last live message: there is something to reclaim."""
        self.dropped = (0, 0)
        """Messages of topics without subscriptions since open, and the seq of the last that was counted."""

    # Opening

    def create(self) -> None:
        """Make the file anew, empty, and open it."""
        remove_file(self.path)
        create_lmdb(self.path, MAP_BYTES, self._file_mode)
        self.checkpointed, self.is_undone = None, False
        self._checksums = PageChecksums(self.path, self._file_mode)  # what the old file held says nothing of this one
        self._open_file()

    def open(self) -> Checkpoint:
        """Verify the file and open it. Raises IndexBrokenError."""
        if not self.path.exists():
            raise IndexBrokenError("it is missing")
        self.is_undone = self._checksums.verify()
        try:
            self._open_file()
            packed = self._txn.get(b"checkpoint", db=self._state_db)
        except lmdb.Error as error:
            self.close()
            raise IndexBrokenError(str(error)) from error
        if packed is None:
            raise IndexBrokenError("it has no checkpoint")
        try:
            checkpoint = msgspec.msgpack.decode(packed, type=Checkpoint)
        except msgspec.MsgspecError as error:
            raise IndexBrokenError(f"its checkpoint does not parse: {error}") from error
        if checkpoint.version != VERSION or checkpoint.store_id != self._store_id:
            raise IndexBrokenError("it is of another version or of another store")
        if checkpoint.priorities != self.priorities:
            raise IndexBrokenError("the store's option `priorities` has changed")
        if self.is_undone:  # the checkpoint that was undone began to write
            checkpoint = msgspec.structs.replace(checkpoint, clean=False)
        self.checkpointed = checkpoint
        return checkpoint

    def _open_file(self) -> None:
        self._env = open_lmdb(self.path, max(MAP_BYTES, 2 * self.path.stat().st_size), max_dbs=TABLES + 6)
        self._begin()

    def _begin(self) -> None:
        env = self._env
        self.rows.open(env)
        self._subscriptions_db = env.open_db(b"subscriptions")
        self._segments_db = env.open_db(b"segments")
        self._destinations_db = env.open_db(b"destinations")
        self._duplicates_db = env.open_db(b"duplicates")
        self._transactions_db = env.open_db(b"transactions")
        self._state_db = env.open_db(b"state")
        self._begin_transaction()

    def _begin_transaction(self) -> None:
        self._txn = self._env.begin(write=True, buffers=False)
        self.rows.lend(self._txn)

    def abort(self) -> None:
        """Back to the checkpoint, on disk's side; `load` does memory's."""
        if self._txn is not None:
            self._txn.abort()
        self._begin_transaction()
        # An interrupted checkpoint may have reached the file: what it says counts, not what we remember.
        self.checkpointed = msgspec.msgpack.decode(self._txn.get(b"checkpoint", db=self._state_db), type=Checkpoint)

    @property
    def is_open(self) -> bool:
        return self._txn is not None

    def close(self) -> None:
        """Let go of the file, dropping what was not checkpointed. Idempotent."""
        txn, self._txn = self._txn, None
        if txn is not None:
            txn.abort()
        if self._env is not None:
            self._env.close()
        self._env = None

    def load(self, segments: Iterable[Segment]) -> None:
        """Set the destinations and the segments' counts to what the checkpoint says."""
        txn = self._txn
        known = {}
        for key, value in txn.cursor(db=self._destinations_db):
            kind, name, count, size = msgspec.msgpack.decode(value)
            number = ID.unpack(key)[0]
            known[number] = self._state(number, Destination(Kind(kind), name), count, size)
        for number, state in self.states.items():
            if number not in known:  # declared after the checkpoint: the replay counts anew
                state.count = state.bytes = 0
                state.named = False
        self._load_subscriptions()
        self.rows.load()
        for segment in segments:
            row = txn.get(NUMBER.pack(segment.number), db=self._segments_db)
            known_end, segment.live, segment.live_bytes, dead = (
                msgspec.msgpack.decode(row)[2:] if row else (0, 0, 0, b"")
            )
            segment.dead = bytearray(dead) if dead else None
            # A segment sealed after the checkpoint: with its row left as it is, the next open would not know its end.
            segment.changed = row is None or known_end != (segment.end or 0)
        self._duplicates = txn.stat(self._duplicates_db)["entries"]
        self.transactions = txn.stat(self._transactions_db)["entries"]
        if self.checkpointed is not None:
            self.next_destination = max(self.next_destination, self.checkpointed.next_destination)
            self.next_subscription = max(self.next_subscription, self.checkpointed.next_subscription)
        self.operations = 0

    def _load_subscriptions(self) -> None:
        """Each is the same object as before: what is held for it is not the index's."""
        for state in self.states.values():
            state.subscribers, state.mask, state.newest = {}, 0, 0
        for key, value in self._txn.cursor(db=self._subscriptions_db):
            destination, client, name, selector, no_local, start, slot, count = msgspec.msgpack.decode(value)
            number, state = ID.unpack(key)[0], self.states[destination]
            known = self.subscribers.get(number)
            if known is None:
                subscription = Subscription(state.destination, name, client, selector, no_local)
                known = self.subscribers[number] = SubscriptionState(number, state, subscription, start)
            known.bit, known.count, known.changed = 1 << slot, count, False
            state.join(known)

    def _state(self, number: int, destination: Destination, count: int = 0, size: int = 0) -> DestinationState:
        state = self.states.get(number)
        if state is None:
            state = DestinationState(number, destination, declared=True)
            self.states[number] = state
            self.by_destination[destination] = state
        state.count, state.bytes, state.changed, state.named = count, size, False, True
        self.next_destination = max(self.next_destination, number + 1)
        return state

    def declare(self, number: int, destination: Destination) -> None:
        """A DESTINATION record met in the journal."""
        if number not in self.states:
            self._state(number, destination).changed = True
        self.states[number].declared = True

    def segment_rows(self) -> dict[int, tuple[int, int, int, int]]:
        """number -> (base LSN, last LSN, end or 0, live) of each segment that the checkpoint knows."""
        return {
            NUMBER.unpack(key)[0]: tuple(msgspec.msgpack.decode(value)[:4])
            for key, value in self._txn.cursor(db=self._segments_db)
        }

    def log_checkpoint(self, checkpoint: Checkpoint) -> LogCheckpoint:
        """What the checkpoint says to the log that it is of."""
        # One without live messages may just have been released; if it is there it may be needed to rebuild.
        kept = {
            number: Kept(end, last_lsn, required=bool(live))
            for number, (_, last_lsn, end, live) in self.segment_rows().items()
        }
        return LogCheckpoint(
            checkpoint.lsn, checkpoint.segment, checkpoint.nonce, checkpoint.offset, checkpoint.last_number,
            checkpoint.snapshot, checkpoint.clean, kept,
        )  # fmt: skip

    def held(self, segment: int | None) -> tuple[dict[str, int | None], str]:
        """How many messages of which destinations lie in a segment, or in all of them (None), by the last checkpoint;
        and what was looked at, in words: in a large store a single segment is not."""
        txn = self._txn
        rows = {ID.unpack(key)[0]: msgspec.msgpack.decode(row) for key, row in txn.cursor(db=self._destinations_db)}
        names = {number: str(Destination(Kind(kind), name)) for number, (kind, name, *_) in rows.items()}
        counts: dict[int, int] = {number: row[2] for number, row in rows.items()}
        where = "this store"
        if segment is not None and sum(counts.values()) <= HELD_MAX:
            where = "this segment"
            bases = {number: base for number, (base, *_) in self.segment_rows().items()}
            first = bases.get(segment, 0)
            end = min((base for base in bases.values() if base > first), default=1 << 64) if first else 0
            counts = dict.fromkeys(names, 0)
            for number, place, _ in self.rows.all():
                if number in counts and first <= place[LSN] < end:
                    counts[number] += 1
        held: dict[str, int | None] = {names[number]: count for number, count in counts.items() if count}
        return held, f"{where} by the index's last checkpoint"

    def duplicates(self) -> Iterator[tuple[tuple[int, bytes], int]]:
        """(destination id, message id), seq; oldest first."""
        for key, value in self._txn.cursor(db=self._duplicates_db):
            number, message_id = msgspec.msgpack.decode(value)
            yield (number, message_id), NUMBER.unpack(key)[0]

    # Changing

    def apply(self, entries: list[Entry], segment: Segment, table: SegmentTable) -> None:
        """Apply one batch, in order. `segment` is where it was written."""
        puts: list[tuple[bytes, bytes]] = []
        pack_key, pack_place = KEY.pack, PLACE.pack
        live_bytes = 0
        for entry in entries:
            kind = entry[0]
            if kind == f.SEND:
                _, state, seq, lsn, offset, length, key, extra = entry
                if key is not None:
                    self.remember(key, seq)
                row = pack_place(lsn, offset, length)
                if extra is not None or state.is_topic:
                    more = self.rows.more(state, seq, extra)
                    if more is None:
                        segment.mark_dead(lsn)
                        if seq > self.dropped[1]:  # not when it is applied once more, from the checkpoint on
                            self.dropped = (self.dropped[0] + 1, seq)
                        continue
                    row += more
                puts.append((pack_key(state.id, seq), row))
                state.count += 1
                state.bytes += length
                state.changed = True
                live_bytes += length
                continue
            if puts:
                self.rows.put(puts, segment, live_bytes)
                puts, live_bytes = [], 0
            if kind == f.ACK:
                _, state, seq, number = entry
                if number:
                    self.rows.ack_for(state, seq, number, table)
                else:
                    self.rows.kill(state, seq, table)
            else:
                self._apply_other(entry, segment, table)
        if puts:
            self.rows.put(puts, segment, live_bytes)
        self.operations += len(entries)

    def _apply_other(self, entry: Entry, segment: Segment, table: SegmentTable) -> None:
        kind = entry[0]
        if kind == f.ACK_RANGE:
            _, state, first, last, number = entry
            self.rows.ack_range(state, first, last, number, table)
        elif kind == f.DESTINATION:
            entry[1].changed = entry[1].named = True
        elif kind == f.DELIVERED:
            _, state, seq, number, count = entry
            self.rows.delivered(state, number, seq, count)
        elif kind == f.SUBSCRIBE:
            self.subscribe(entry[2])
        elif kind == f.UNSUBSCRIBE:
            self._unsubscribe(entry[1], entry[2], table)
        elif kind == f.PREPARE:
            self._prepare(entry, segment)
        elif kind in (f.COMMIT, f.ROLLBACK):
            self._settle(entry[1], kind == f.COMMIT, table)
        else:
            self._remove(entry[1], table)

    def subscribe(self, known: SubscriptionState) -> None:
        """A subscription begins. One that was there before the index went back to a checkpoint is the same again."""
        known = self.subscribers.setdefault(known.number, known)
        state = known.state
        known.bit, known.count, known.changed = 1 << state.free_slot(), 0, True
        state.join(known)
        self.rows.begin(known)
        self.next_subscription = max(self.next_subscription, known.number + 1)

    def _unsubscribe(self, state: DestinationState, number: int, table: SegmentTable) -> None:
        """It has acked all, so to speak."""
        known = state.subscribers.get(number)
        if known is not None:
            self.rows.ack_range(state, 0, SEQ_END, number, table)
            self._drop(known)

    def _drop(self, known: SubscriptionState) -> None:
        known.state.leave(known)
        self.subscribers.pop(known.number, None)
        self._txn.delete(ID.pack(known.number), db=self._subscriptions_db)

    def _prepare(self, entry: Entry, segment: Segment) -> None:
        """The record of a prepared branch retains its segment as a live message does."""
        _, transaction, lsn, offset, length = entry
        # A rebuild may know from the snapshot that it is committed before it comes to the PREPARE.
        known = self._txn.replace(transaction, PLACE.pack(lsn, offset, length), db=self._transactions_db)
        self.transactions += known is None
        segment.add_live(length)

    def _settle(self, transaction: bytes, commit: bool, table: SegmentTable) -> None:
        value = self._txn.pop(transaction, db=self._transactions_db)
        self.transactions -= value is not None
        if value:
            lsn, _, length = PLACE.unpack(value)
            self._bury(lsn, length, f"transaction {transaction.hex()}", table)
        if commit:
            self.remember_committed(transaction)

    def remember_committed(self, transaction: bytes) -> None:
        """Until it is forgotten, or the oldest of too many."""
        self._txn.put(transaction, b"", db=self._transactions_db)
        self.transactions += 1
        if self.transactions > COMMITTED_MAX:
            with self._txn.cursor(db=self._transactions_db) as cursor:
                oldest = next((key for key, place in cursor if not place), None)
            if oldest is not None:
                self.forget([oldest])

    def forget(self, transactions: Iterable[bytes]) -> None:
        """Of committed ones; others stay."""
        for transaction in transactions:
            if self._txn.get(transaction, db=self._transactions_db) == b"":
                self._txn.delete(transaction, db=self._transactions_db)
                self.transactions -= 1

    def _bury(self, lsn: int, length: int, what: object, table: SegmentTable) -> None:
        """A record is live no more."""
        segment = table.find(lsn)
        if segment is None:
            raise AssertionError(f"index: record {lsn} of {what} lies in no segment")
        segment.remove_live(lsn, length)
        if not segment.live and segment.end is not None:
            self.emptied = True

    def _remove(self, state: DestinationState, table: SegmentTable) -> None:
        self.rows.ack_range(state, 0, SEQ_END, 0, table)
        for known in state.subscribers.values():
            self._drop(known)
        self._txn.delete(ID.pack(state.id), db=self._destinations_db)
        self._forget_duplicates(state.id)
        state.changed = state.named = False

    def remember(self, key: tuple[int, bytes], seq: int) -> None:
        """Keep an id of the duplicate window, drop the oldest beyond the limit."""
        txn, db = self._txn, self._duplicates_db
        if txn.put(NUMBER.pack(seq), msgspec.msgpack.encode(key), db=db, overwrite=False):
            self._duplicates += 1
        while self._duplicates > self._duplicate_limit:
            with txn.cursor(db=db) as cursor:
                cursor.first()
                cursor.delete()
            self._duplicates -= 1

    def _forget_duplicates(self, destination: int) -> None:
        with self._txn.cursor(db=self._duplicates_db) as cursor:
            found = cursor.first()
            while found:
                if msgspec.msgpack.decode(cursor.value())[0] == destination:
                    self._duplicates -= 1
                    found = cursor.delete() and bool(cursor.key())
                else:
                    found = cursor.next()

    def drop_segments(self, numbers: Iterable[int]) -> None:
        """Released segments: their rows go with the next checkpoint."""
        for number in numbers:
            self._txn.delete(NUMBER.pack(number), db=self._segments_db)

    def checksum_files(self) -> Files | None:
        """What `checkpoint` needs besides. Raises OSError if the process can open no more files."""
        return self._checksums.open_files()

    def checkpoint(self, checkpoint: Checkpoint, segments: Iterable[Segment], files: Files | None) -> None:
        """Make the index's file reflect all that was applied. The journal is synced through it (rule X3). `files` are
        those that `checksum_files` has opened."""
        txn = self._txn
        for segment in segments:
            if segment.changed:
                segment.changed = False
                dead = bytes(segment.dead) if segment.dead else b""
                row = (
                    segment.base_lsn, segment.last_lsn, segment.end or 0, segment.live, segment.live_bytes, dead,
                )  # fmt: skip
                txn.put(NUMBER.pack(segment.number), _segment_row(row), db=self._segments_db)
        for state in list(self.states.values()):
            if state.changed and state.named:
                state.changed = False
                packed = msgspec.msgpack.encode(
                    (state.destination.kind.value, state.destination.name, state.count, state.bytes)
                )
                txn.put(ID.pack(state.id), packed, db=self._destinations_db)
        for known in list(self.subscribers.values()):
            if known.changed and known.number in known.state.subscribers:
                known.changed = False
                txn.put(ID.pack(known.number), _subscription_row(known), db=self._subscriptions_db)
        txn.put(b"checkpoint", msgspec.msgpack.encode(checkpoint), db=self._state_db)
        self.commit_partial()
        self._checksums.write(files)  # before the next transaction can write any page
        self.checkpointed = checkpoint

    def commit_partial(self) -> None:
        """Commit, synced, and go on; the map grows here, where no transaction is open (rule X4)."""
        self._txn.commit()
        self._txn = None
        info = self._env.info()
        if (info["last_pgno"] + 1) * self._env.stat()["psize"] * 100 > info["map_size"] * MAP_FULL_PERCENT:
            self._env.set_mapsize(2 * info["map_size"])
        self._begin_transaction()
        self.operations = 0

    # Asking

    def prepared(self) -> list[tuple[bytes, tuple[int, int, int]]]:
        """Transaction and (LSN, offset, length) of each that waits for its outcome; oldest first."""
        with self._txn.cursor(db=self._transactions_db) as cursor:
            return [(bytes(key), PLACE.unpack(place)) for key, place in cursor if place]

    def committed(self) -> list[bytes]:
        """The transactions that are committed and not forgotten; oldest first."""
        with self._txn.cursor(db=self._transactions_db) as cursor:
            return [bytes(key) for key, place in cursor if not place]


def _segment_row(row: tuple[int, int, int, int, int, bytes]) -> bytes:
    base_lsn, last_lsn, end, live, live_bytes, dead = row
    return msgspec.msgpack.encode((base_lsn, last_lsn, end, live, live_bytes, dead.rstrip(b"\0")))


def _subscription_row(known: SubscriptionState) -> bytes:
    subscription = known.subscription
    return msgspec.msgpack.encode(
        (
            known.state.id, subscription.client_id, subscription.name, subscription.selector, subscription.no_local,
            known.start, known.bit.bit_length() - 1, known.count,
        )
    )  # fmt: skip


def is_of_index(error: Exception) -> bool:
    """Whether opening a store failed for what its index file says: its pages are as they were written, but what was
    written may be wrong. That shows as an error of LMDB, or as whatever nonsense makes Python raise."""
    cause = error.__cause__ if isinstance(error, AnabranchError) else error
    return cause is not None and not isinstance(cause, (OSError, AnabranchError, lmdb.DiskError))


def remove_file(path: Path) -> None:
    """Take a broken index away."""
    for name in (path, path_of(path), path.with_name(path.name + "-lock"), path.with_name(path.name + ".tmp")):
        name.unlink(missing_ok=True)
