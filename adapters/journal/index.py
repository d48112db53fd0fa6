"""The index: which messages are there and where, in LMDB. Derived from the journal alone (rules X1 to X5).

    messages       destination id, order, seq (big-endian)  ->  LSN, offset in the segment, length of the record
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
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ...policies.destination import Destination, Kind
from ...policies.errors import AnabranchError
from ..delivery import PLAIN_ORDERS, Feed
from ..files import fill_lmdb, is_cut_short, open_lmdb
from . import format as f
from .batch import Entry
from .destinations import DestinationState, Place
from .segment import Segment, SegmentTable

log = logging.getLogger(__name__)

VERSION: Final = 1
MAP_BYTES: Final = 1 << 30
"""The first size of the map: address space, not memory nor disk. Doubled when 70 % full (rule X4)."""
MAP_FULL_PERCENT: Final = 70

KEY = struct.Struct(">IBQ")
KEY_SEQ = struct.Struct(">5xQ")
PREFIX_BYTES: Final = 5
"""What the keys of one destination's messages share."""
PLACE = struct.Struct("<QII")
NUMBER = struct.Struct(">Q")
ID = struct.Struct(">I")
COMMITTED_MAX: Final = 100_000
"""Transactions over several stores that are remembered as committed until their coordinator forgets them."""
ORDER: Final = 0
"""The order byte of every key: one order until stores know priorities."""


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


class IndexBrokenError(Exception):
    """The index file is missing, damaged, of another version or another store: rebuild it."""


class Index:
    """One index file, open. Every method is called under the store's index lock."""

    def __init__(self, path: Path, store_id: bytes, duplicate_limit: int) -> None:
        self.path = path
        self._store_id = store_id
        self._duplicate_limit = duplicate_limit
        self._env: Any = None
        self._txn: Any = None
        self.checkpointed: Checkpoint | None = None
        self.states: dict[int, DestinationState] = {}
        self.by_destination: dict[Destination, DestinationState] = {}
        self.next_destination = 1
        self.messages = self.bytes = 0
        """Of all destinations."""
        self._duplicates = 0
        self.transactions = 0
        """Prepared, or committed and not forgotten."""
        self.operations = 0
        """Applied since the last checkpoint."""
        self.emptied = False
        """A sealed segment has lost its last live message: there is something to reclaim."""

    # Opening

    def open(self) -> Checkpoint | None:
        """Open the file; None if it is new and empty. Raises IndexBrokenError."""
        if not self.path.exists():
            raise IndexBrokenError("it is missing")
        if is_cut_short(self.path):
            raise IndexBrokenError("its file is cut short")
        try:
            self._env = open_lmdb(self.path, max(MAP_BYTES, 2 * self.path.stat().st_size), max_dbs=6)
            self._begin()
            packed = self._txn.get(b"checkpoint", db=self._state_db)
        except lmdb.Error as error:
            self.close()
            raise IndexBrokenError(str(error)) from error
        if packed is None:
            return None
        try:
            checkpoint = msgspec.msgpack.decode(packed, type=Checkpoint)
        except msgspec.MsgspecError as error:
            raise IndexBrokenError(f"its checkpoint does not parse: {error}") from error
        if checkpoint.version != VERSION or checkpoint.store_id != self._store_id:
            raise IndexBrokenError("it is of another version or of another store")
        self.checkpointed = checkpoint
        return checkpoint

    def _begin(self) -> None:
        env = self._env
        self._messages_db = env.open_db(b"messages")
        self._segments_db = env.open_db(b"segments")
        self._destinations_db = env.open_db(b"destinations")
        self._duplicates_db = env.open_db(b"duplicates")
        self._transactions_db = env.open_db(b"transactions")
        self._state_db = env.open_db(b"state")
        self._txn = env.begin(write=True, buffers=False)

    def abort(self) -> None:
        """Back to the checkpoint, on disk's side; `load` does memory's."""
        if self._txn is not None:
            self._txn.abort()
        self._txn = self._env.begin(write=True, buffers=False)
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
        self.messages = self.bytes = 0
        for state in known.values():
            self.messages += state.count
            self.bytes += state.bytes
        for number, state in self.states.items():
            if number not in known:  # declared after the checkpoint: the replay counts anew
                state.count = state.bytes = 0
                state.named = False
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
        self.operations = 0

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
        live = live_bytes = 0
        for entry in entries:
            kind = entry[0]
            if kind == f.SEND:
                _, state, seq, lsn, offset, length, key = entry
                puts.append((pack_key(state.id, ORDER, seq), pack_place(lsn, offset, length)))
                state.count += 1
                state.bytes += length
                state.changed = True
                live += 1
                live_bytes += length
                if key is not None:
                    self.remember(key, seq)
                continue
            if puts:
                self._put(puts, segment, live, live_bytes)
                puts, live, live_bytes = [], 0, 0
            if kind == f.ACK:
                self._kill(entry[1], entry[2], table)
            elif kind == f.ACK_RANGE:
                self._kill_range(entry[1], entry[2], entry[3], table)
            elif kind == f.DESTINATION:
                entry[1].changed = entry[1].named = True
            elif kind == f.PREPARE:
                self._prepare(entry, segment)
            elif kind in (f.COMMIT, f.ROLLBACK):
                self._settle(entry[1], kind == f.COMMIT, table)
            else:
                self._remove(entry[1], table)
        if puts:
            self._put(puts, segment, live, live_bytes)
        self.operations += len(entries)

    def _put(self, puts: list[tuple[bytes, bytes]], segment: Segment, live: int, live_bytes: int) -> None:
        if len(puts) == 1:
            self._txn.put(*puts[0], db=self._messages_db)
        else:
            with self._txn.cursor(db=self._messages_db) as cursor:
                cursor.putmulti(puts)
        self.messages += live
        self.bytes += live_bytes
        segment.live += live
        segment.live_bytes += live_bytes
        segment.changed = True

    def _prepare(self, entry: Entry, segment: Segment) -> None:
        """The record of a prepared branch retains its segment as a live message does."""
        _, transaction, lsn, offset, length = entry
        # A rebuild may know from the snapshot that it is committed before it comes to the PREPARE.
        known = self._txn.replace(transaction, PLACE.pack(lsn, offset, length), db=self._transactions_db)
        self.transactions += known is None
        segment.born(length)

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

    def _kill(self, state: DestinationState, seq: int, table: SegmentTable) -> None:
        value = self._txn.pop(KEY.pack(state.id, ORDER, seq), db=self._messages_db)
        if value is not None:
            self._dead(state, value, table)

    def _dead(self, state: DestinationState, value: bytes, table: SegmentTable) -> None:
        lsn, _, length = PLACE.unpack(value)
        self._bury(lsn, length, state.destination, table)
        self.messages -= 1
        self.bytes -= length
        state.count -= 1
        state.bytes -= length
        state.changed = True

    def _bury(self, lsn: int, length: int, what: object, table: SegmentTable) -> None:
        """A record is live no more."""
        segment = table.find(lsn)
        if segment is None:
            raise AssertionError(f"index: record {lsn} of {what} lies in no segment")
        segment.kill(lsn, length)
        if not segment.live and segment.end is not None:
            self.emptied = True

    def _kill_range(self, state: DestinationState, first: int, last: int, table: SegmentTable) -> int:
        killed = 0
        with self._txn.cursor(db=self._messages_db) as cursor:
            found = cursor.set_range(KEY.pack(state.id, ORDER, first))
            while found:
                number, order, seq = KEY.unpack(cursor.key())
                if number != state.id or order != ORDER or seq > last:
                    break
                self._dead(state, cursor.value(), table)
                killed += 1
                found = cursor.delete() and bool(cursor.key())
        return killed

    def _remove(self, state: DestinationState, table: SegmentTable) -> None:
        self._kill_range(state, 0, (1 << 64) - 1, table)
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

    def checkpoint(self, checkpoint: Checkpoint, segments: Iterable[Segment]) -> None:
        """Make the index's file reflect all that was applied. The journal is synced through it (rule X3)."""
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
        txn.put(b"checkpoint", msgspec.msgpack.encode(checkpoint), db=self._state_db)
        self.commit_partial()
        self.checkpointed = checkpoint

    def commit_partial(self) -> None:
        """Commit, synced, and go on; the map grows here, where no transaction is open (rule X4)."""
        self._txn.commit()
        self._txn = None
        fill_lmdb(self._env, self.path)
        info = self._env.info()
        if (info["last_pgno"] + 1) * self._env.stat()["psize"] * 100 > info["map_size"] * MAP_FULL_PERCENT:
            self._env.set_mapsize(2 * info["map_size"])
        self._txn = self._env.begin(write=True, buffers=False)
        self.operations = 0

    # Asking

    def orders(self, feed: Feed) -> tuple[int, ...]:
        return PLAIN_ORDERS

    def fetch(self, feed: Feed, order: int, after: int, limit: int) -> list[Place]:
        return self.scan(feed.owner, after, limit)

    def deliveries(self, feed: Feed, seq: int) -> int:
        return 0

    def expired(self, now: int) -> Iterator[tuple[tuple[Feed, ...], Place]]:
        return iter(())

    def spent(self, least: int) -> Iterator[tuple[Feed, int]]:
        return iter(())

    def scan(self, state: DestinationState, after: int, count: int) -> list[Place]:
        """Up to `count` messages of a destination by seq, from the one after seq `after`."""
        start = KEY.pack(state.id, ORDER, after + 1)
        with self._txn.cursor(db=self._messages_db) as cursor:
            if not cursor.set_range(start):
                return []
            rows = list(islice(cursor.iternext(), count))
        prefix = start[:PREFIX_BYTES]
        while rows and not rows[-1][0].startswith(prefix):
            rows.pop()  # of the next destination
        unpack_seq, unpack_place = KEY_SEQ.unpack, PLACE.unpack
        return [(0, *unpack_seq(key), 0, *unpack_place(value)) for key, value in rows]

    def place(self, feed: Feed, seq: int) -> Place | None:
        value = self._txn.get(KEY.pack(feed.owner.id, ORDER, seq), db=self._messages_db)
        return None if value is None else (0, seq, 0, *PLACE.unpack(value))

    def prepared(self) -> list[tuple[bytes, tuple[int, int, int]]]:
        """Transaction and (LSN, offset, length) of each that waits for its outcome; oldest first."""
        with self._txn.cursor(db=self._transactions_db) as cursor:
            return [(bytes(key), PLACE.unpack(place)) for key, place in cursor if place]

    def committed(self) -> list[bytes]:
        """The transactions that are committed and not forgotten; oldest first."""
        with self._txn.cursor(db=self._transactions_db) as cursor:
            return [bytes(key) for key, place in cursor if not place]

    def all_places(self) -> Iterator[tuple[int, Place]]:
        """Destination id and place of every message, for checking."""
        with self._txn.cursor(db=self._messages_db) as cursor:
            for key, value in cursor.iternext():
                number, _, seq = KEY.unpack(key)
                yield number, (0, seq, 0, *PLACE.unpack(value))


def _segment_row(row: tuple[int, int, int, int, int, bytes]) -> bytes:
    base_lsn, last_lsn, end, live, live_bytes, dead = row
    return msgspec.msgpack.encode((base_lsn, last_lsn, end, live, live_bytes, dead.rstrip(b"\0")))


def is_of_index(error: Exception) -> bool:
    """Whether opening a store failed for what its index file says. LMDB has no checksums: damage shows as an error of
    LMDB or as bytes that decode to nonsense, and whatever that makes Python raise."""
    cause = error.__cause__ if isinstance(error, AnabranchError) else error
    return cause is not None and not isinstance(cause, (OSError, AnabranchError, lmdb.DiskError))


def remove_file(path: Path) -> None:
    """Take a broken index away."""
    for name in (path, path.with_name(path.name + "-lock"), path.with_name(path.name + ".tmp")):
        if name.exists():
            name.unlink()
