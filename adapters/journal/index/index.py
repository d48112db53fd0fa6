"""The index: which messages are there and where, in LMDB. Derived from the journal alone (rules X1 to X5).

    messages, and what belongs to them: rows.py; transactions: transaction_rows.py
    subscriptions  number                                   ->  topic, client, name, ..., start, bit, to be acked,
                                                                ended, waiting
    segments       number                                   ->  base LSN, last LSN, end, live, live bytes, dead bits
    destinations   number                                   ->  kind, name, messages, bytes, removed, waiting
    duplicates     seq                                      ->  destination, message id
    state          b"checkpoint"                            ->  Checkpoint

Everything between two checkpoints happens in one open write transaction, which is LMDB's cache: nothing of it reaches
the file, so the file always shows the last checkpoint, and the journal is replayed from there. A crash, an error and an
interruption half way through `apply` are therefore the same thing: go back to the checkpoint, replay.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ....policies.errors import AnabranchError, StoreFullError
from ....policies.names.destination import Destination, Kind
from ...core.operations.branches import Branch
from ...core.operations.changes import Ack, Send
from ...core.operations.table import AT_ONCE, SEQ_MAX
from ...core.record.place import OWN, Place
from ...core.state.leases import DestinationState, SubscriptionState
from ...core.state.states import Catalog
from ...core.store_types import Subscription
from ...system.files import FILE_MODE
from ...wal.format import COPIES
from ...wal.recovery.survey import Checkpoint as LogCheckpoint
from ...wal.recovery.survey import Kept
from ...wal.segment import Segment, SegmentTable
from ..changes import Copied
from .checksums import Files, IndexBrokenError
from .file import IndexFile
from .row_format import ID, note_ids
from .rows import TABLES, Ask, MessageRows, at_once
from .states import IndexedSubscription, indexed
from .transaction_rows import TransactionRows

log: logging.Logger = logging.getLogger(__name__)

VERSION: Final = 6
HELD_MAX: Final = 200_000
"""Messages; an error of a store with more does not look for those of one segment, which takes 1 us for each."""

NUMBER = struct.Struct(">Q")


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The state of the journal that an index file reflects. Positions are batch boundaries."""

    version: int
    store_id: bytes
    priorities: bool
    """The store's option: the index is made for it."""
    lsn: int
    """The last LSN that is in the index."""
    segment: int
    nonce: int
    offset: int
    """The offset where the batch after that LSN begins."""
    seq: int
    last_segment: int
    """The highest segment number by then."""
    last_number: int
    """The highest that a destination or a subscription had."""
    snapshot: tuple[int, int]
    clean: bool
    """The store was closed in order, and nothing has been written since."""


class Index:
    """One index file, open: a Table (core/operations/table.py). Every method is called under the store's lock."""

    def __init__(
        self,
        path: Path,
        store_id: bytes,
        catalog: Catalog,
        duplicate_limit: int,
        priorities: bool | None = False,
        file_mode: int = FILE_MODE,
    ) -> None:
        """`priorities` is the store's option; None: what the file was made for, for who does not know the options."""
        self.file: IndexFile = IndexFile(path, file_mode)
        self.priorities: bool = bool(priorities)
        self._takes_priorities = priorities is None
        self._store_id = store_id
        self._catalog = catalog
        self._duplicate_limit = duplicate_limit
        self._txn: Any = None
        self.table: SegmentTable = SegmentTable(())
        """The segments in which is written what is applied."""
        self.checkpointed: Checkpoint | None = None
        self.is_undone: bool = False
        """The file's last checkpoint had no checksums yet when the process was killed: it is the one before."""
        self.states: dict[int, DestinationState] = {}
        """By number: those that are there, and those that were at the last checkpoint."""
        self.subscriptions: dict[int, SubscriptionState] = {}
        """Subscriptions by number, likewise."""
        self._gone: dict[DestinationState, None] = {}
        """Destinations of `states` that are no more."""
        self._ended: dict[SubscriptionState, None] = {}
        """Subscriptions of `subscriptions` that are no more."""
        self.last_number: int = 0
        """The highest that a destination or a subscription had, as far as is applied."""
        self.rows: MessageRows = MessageRows(
            self.priorities, self.states, catalog, self.remember, self.remember_id, self._remove_live
        )
        self.transactions: TransactionRows = TransactionRows(self._remove_prepared)
        self._duplicates = 0
        """Ids of the duplicate window that have rows."""
        self._ids: Counter[int] = Counter()
        """The number of these ids, by destination's number."""
        self._new_ids: dict[int, tuple[int, bytes]] = {}
        """By seq: ids that get their rows with the next checkpoint. Most of many are gone by then."""
        self.find_copies: Callable[[int, int, int, int], Segment]
        """A function as Numbers' (encoding.py), of what is being replayed."""
        self.operations: int = 0
        """Applied since the last checkpoint."""
        self.emptied: bool = False
        """A sealed segment has lost its last live message: there is something to reclaim."""
        self.until_look: int = 0
        """Once so many bytes more have died in sealed segments it is time to look what pays to be compacted."""

    # Opening

    def create(self) -> None:
        """Make the file anew, empty, and open it."""
        self.checkpointed, self.is_undone = None, False
        self.file.create(TABLES + 6)
        self._open_tables()

    def open(self) -> Checkpoint:
        """Verify the file and open it. Raises IndexBrokenError."""
        try:
            self.is_undone = self.file.open(TABLES + 6)
            self._open_tables()
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
        if self._takes_priorities:
            self.priorities = self.rows.priorities = checkpoint.priorities
        if checkpoint.priorities != self.priorities:
            raise IndexBrokenError("the store's option `priorities` has changed")
        if self.is_undone:  # the checkpoint that was undone began to write
            checkpoint = msgspec.structs.replace(checkpoint, clean=False)
        self.checkpointed = checkpoint
        return checkpoint

    def _open_tables(self) -> None:
        env = self.file.env
        self.rows.open(env)
        self.transactions.open(env)
        self._subscriptions_db = env.open_db(b"subscriptions")
        self._segments_db = env.open_db(b"segments")
        self._destinations_db = env.open_db(b"destinations")
        self._duplicates_db = env.open_db(b"duplicates")
        self._state_db = env.open_db(b"state")
        self._begin()

    def _begin(self) -> None:
        self._txn = self.file.begin()
        self._new_ids = {}
        self.rows.lend(self._txn)
        self.transactions.lend(self._txn)

    def abort(self) -> None:
        """Go back to the checkpoint, on disk's side; `load` does memory's."""
        if self._txn is None:  # `compact` was interrupted, or has failed
            self.file.reopen()
            self._open_tables()
        else:
            self._begin()
        # An interrupted checkpoint may have reached the file: what it says counts, not what we remember.
        self.checkpointed = msgspec.msgpack.decode(self._txn.get(b"checkpoint", db=self._state_db), type=Checkpoint)

    def compact(self) -> int:
        """Make the file as small as what is in it; returns by how many bytes. It says what the last checkpoint says,
        and nothing was applied since. Raises lmdb.Error, OSError, IndexBrokenError: then, and when it was
        interrupted, `abort` is next."""
        self._txn = None
        freed = self.file.compact()
        self._open_tables()
        return freed

    @property
    def is_open(self) -> bool:
        return self._txn is not None and self.file.txn is not None  # `close` may have been interrupted between the two

    def close(self) -> None:
        """Let go of the file, dropping what was not checkpointed. Idempotent."""
        self._txn = None
        self.file.close()

    def load(self, segments: Iterable[Segment]) -> None:
        """Set the destinations and the segments' counts to what the checkpoint says."""
        txn = self._txn
        for state in self.states.values():  # what was declared after the checkpoint the replay counts anew
            state.count = state.bytes = state.delayed = 0
            own = indexed(state)
            own.named = own.leaving = False
            own.reset()
        self._catalog.leaving.clear()
        self.rows.changed.clear()
        self.rows.changed_subscriptions.clear()
        # Until it is found, or there again: it may have gone before a checkpoint that was not the last of its row.
        self._gone = dict.fromkeys(self.states.values())
        self._ended = dict.fromkeys(self.subscriptions.values())
        for key, value in txn.cursor(db=self._destinations_db):
            kind, name, count, size, removed, waiting = msgspec.msgpack.decode(value)
            state = self._state(ID.unpack(key)[0], Destination(Kind(kind), name))
            state.count, state.bytes, state.delayed, state.own.named = count, size, waiting, not removed
            self._gone.pop(state, None)
            if removed:
                state.removed = state.own.leaving = True
                self._catalog.leaving[state.channel] = None
        for key, value in txn.cursor(db=self._subscriptions_db):
            self._load_subscription(ID.unpack(key)[0], *msgspec.msgpack.decode(value))
        self.rows.load()
        for segment in segments:
            row = txn.get(NUMBER.pack(segment.number), db=self._segments_db)
            known_end, segment.live, segment.live_bytes, dead = (
                msgspec.msgpack.decode(row)[2:] if row else (0, 0, 0, b"")
            )
            segment.dead = bytearray(dead) if dead else None
            if segment.number >= COPIES:
                segment.counts = row is not None
            # A segment sealed after the checkpoint: with its row left as it is, the next open would not know its end.
            segment.changed = row is None or known_end != (segment.end or 0)
        self._ids = Counter(number for (number, _), _ in self.duplicates())
        self._duplicates = self._ids.total()
        self.transactions.load()
        if self.checkpointed is not None:
            self.last_number = max(self.last_number, self.checkpointed.last_number)
        self.operations = 0

    def _load_subscription(
        self, number: int, topic: int, client: str, name: str, selector: str | None, no_local: bool, start: int,
        slot: int, count: int, ended: bool, waiting: int,
    ) -> None:  # fmt: skip
        """Load a subscription into the same object as before: what is held for it is not the index's."""
        state = self.states[topic]
        subscriber = self.subscriptions.get(number)
        if subscriber is None:
            subscription = Subscription(state.destination, name, client, selector, no_local)
            subscriber = self.subscriptions[number] = SubscriptionState(number, state, subscription, start)
        subscriber.count, subscriber.delayed = count, waiting
        subscriber.own = IndexedSubscription(1 << slot, ended)
        self._ended.pop(subscriber, None)
        if ended:
            self._catalog.leaving[subscriber.channel] = None
        state.own.join(subscriber)

    def _state(self, number: int, destination: Destination) -> DestinationState:
        state = self.states.get(number)
        if state is None:
            state = self.states[number] = DestinationState(number, destination)
        indexed(state)
        self.last_number = max(self.last_number, number)
        return state

    def segment_rows(self) -> dict[int, tuple[int, int, int, int]]:
        """Return number -> (base LSN, last LSN, end or 0, live) of each segment that the checkpoint knows."""
        return {
            NUMBER.unpack(key)[0]: tuple(msgspec.msgpack.decode(value)[:4])
            for key, value in self._txn.cursor(db=self._segments_db)
        }

    def log_checkpoint(self, checkpoint: Checkpoint) -> LogCheckpoint:
        """Return the checkpoint as its log is told it."""
        # One without live messages may just have been released; if it is there it may be needed to rebuild.
        kept = {
            number: Kept(end, last_lsn, required=bool(live))
            for number, (_, last_lsn, end, live) in self.segment_rows().items()
        }
        return LogCheckpoint(
            checkpoint.lsn, checkpoint.segment, checkpoint.nonce, checkpoint.offset, checkpoint.last_segment,
            checkpoint.snapshot, checkpoint.clean, kept,
        )  # fmt: skip

    def held(self, segment: int | None) -> tuple[dict[str, int | None], str]:
        """Return how many messages of which destinations lie in a segment, or in all of them (None), by the last
        checkpoint; and what was looked at, in words: in a large store a single segment is not."""
        txn = self._txn
        rows = {ID.unpack(key)[0]: msgspec.msgpack.decode(row) for key, row in txn.cursor(db=self._destinations_db)}
        names = {number: str(Destination(Kind(kind), name)) for number, (kind, name, *_) in rows.items()}
        counts: dict[int, int] = {number: row[2] for number, row in rows.items() if not row[4]}
        where = "this store"
        if segment is not None and sum(counts.values()) <= HELD_MAX:
            where = "this segment"
            bases = {number: base for number, (base, *_) in self.segment_rows().items()}
            first = bases.get(segment, 0)
            end = min((base for base in bases.values() if base > first), default=1 << 64) if first else 0
            counts = dict.fromkeys(counts, 0)
            for number, place, _ in self.rows.all():
                if number in counts and first <= place[OWN][0] < end:
                    counts[number] += 1
        held: dict[str, int | None] = {names[number]: count for number, count in counts.items() if count}
        return held, f"{where} by the index's last checkpoint"

    def duplicates(self) -> Iterator[tuple[tuple[int, bytes], int]]:
        """Yield (destination, message id), seq; oldest first."""
        rows = (
            (NUMBER.unpack(key)[0], tuple(msgspec.msgpack.decode(value)))
            for key, value in self._txn.cursor(db=self._duplicates_db)
        )
        for seq, key in merge(rows, sorted(self._new_ids.items())):
            yield key, seq

    # Changing

    def put(self, sends: Sequence[Send]) -> None:
        self.rows.put(sends, self.table)

    def ack(self, acks: Sequence[Ack]) -> None:
        for segment, part in groupby(sorted(self.rows.ack(acks)), lambda record: self.table.find(record[0])):
            records = list(part)
            if segment is None:
                raise AssertionError(f"index: record {records[0][0]} of an acked message lies in no segment")
            size = sum([length for _, length in records])
            segment.mark_dead(*[lsn for lsn, _ in records])
            segment.live -= len(records)
            segment.live_bytes -= size
            self._less_live(segment, size)

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        self.operations += self.rows.ack_range(state, first, last, number)
        if last == SEQ_MAX:
            self._complete(state, number)

    def _complete(self, state: DestinationState, number: int) -> None:
        """Complete the removal of a destination, or the end of a subscription, of which nothing is left."""
        subscriber = state.own.subscriptions.get(number)
        if state.own.leaving and not number:
            state.own.leaving = False
            self._gone[state] = None
            self._txn.delete(ID.pack(state.number), db=self._destinations_db)
            self._catalog.leaving.pop(state.channel, None)
        elif subscriber is not None and subscriber.own.ended:
            self._drop(subscriber)

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        self.rows.returned(state, seq, number, count, place)

    def postpone(self, state: DestinationState, seq: int, number: int, due: int, place: Place | None) -> None:
        if indexed(state).named or not due:  # those that are still to go need wait no longer
            self.rows.postpone(state, seq, number, due)

    def declare(self, state: DestinationState) -> None:
        indexed(state).named = True
        self._gone.pop(state, None)
        self.rows.changed[state] = None
        self.states[state.number] = state
        self.last_number = max(self.last_number, state.number)

    def remove(self, state: DestinationState) -> None:
        own = indexed(state)
        if not own.named:
            return
        at_once = state.count <= AT_ONCE
        self._catalog.count(state, -state.count, -state.bytes)
        for subscriber in list(own.subscriptions.values()):
            self._drop(subscriber)
        self._forget_duplicates(state.number)
        own.named, own.leaving, state.removed = False, True, True
        self.rows.changed[state] = None
        self._catalog.leaving[state.channel] = None
        if at_once:
            self.ack_range(state, 0, SEQ_MAX, 0)

    def subscribe(self, subscriber: SubscriptionState) -> None:
        own = subscriber.topic.own
        subscriber.count, subscriber.own = 0, IndexedSubscription(1 << own.free_slot())
        subscriber.delayed = 0
        self.subscriptions[subscriber.number] = subscriber
        self._ended.pop(subscriber, None)
        own.join(subscriber)
        self.rows.changed_subscriptions[subscriber] = None
        self.rows.begin(subscriber)
        self.last_number = max(self.last_number, subscriber.number)

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        own = indexed(subscriber.topic)
        there = own.subscriptions.get(subscriber.number)
        if there is None:
            return
        own.end(there)
        self.rows.changed_subscriptions[there] = None
        self._catalog.leaving[there.channel] = None
        if subscriber.topic.count <= AT_ONCE:
            self.ack_range(subscriber.topic, 0, SEQ_MAX, subscriber.number)

    def complete_removals(self) -> None:
        """Remove what is left of what was removed, and for what has ended: at once, while nobody else is there."""
        for channel in list(self._catalog.leaving):
            self.ack_range(channel.state, 0, SEQ_MAX, channel.number)

    def _drop(self, subscriber: SubscriptionState) -> None:
        self._ended[subscriber] = None
        self._catalog.leaving.pop(subscriber.channel, None)
        subscriber.topic.own.leave(subscriber)
        self._txn.delete(ID.pack(subscriber.number), db=self._subscriptions_db)

    def prepare(self, branch: Branch) -> None:
        self.transactions.prepare(branch, self.table)

    def settled(self, branch: Branch, committed: bool) -> None:
        self.transactions.settle(branch.transaction, committed)

    def forget(self, transactions: Sequence[bytes]) -> None:
        self.transactions.forget(transactions)

    def _remove_live(self, lsn: int, length: int, what: object) -> None:
        """Note that a record is live no more."""
        segment = self.table.find(lsn)
        if segment is None:
            raise AssertionError(f"index: record {lsn} of {what} lies in no segment")
        segment.remove_live(lsn, length)
        self._less_live(segment, length)

    def _less_live(self, segment: Segment, size: int) -> None:
        """Note that so many bytes of a segment are live no more."""
        if segment.end is not None:
            self.until_look -= size
            self.emptied |= not segment.live

    def _remove_prepared(self, lsn: int, length: int, what: object) -> None:
        """Note that a transaction has its outcome: its segment may be compacted from now on, as small as its record may
        be."""
        self._remove_live(lsn, length, what)
        segment = self.table.find(lsn)
        if segment is not None and segment.end is not None:
            self.until_look = 0

    def remember(self, sends: Sequence[Send]) -> None:
        """Keep the ids of new messages: of the latest, as many as the limit says."""
        note_ids(self._new_ids, sends)
        if len(self._new_ids) > 2 * self._duplicate_limit:
            self._new_ids = self._latest_ids()

    def remember_id(self, key: tuple[int, bytes], seq: int) -> None:
        """Keep an id without a message, or whose message is elsewhere, or gone."""
        self._new_ids[seq] = key

    def _latest_ids(self) -> dict[int, tuple[int, bytes]]:
        """Return those of the new ids that are among the latest, in order."""
        new, seqs = self._new_ids, sorted(self._new_ids)
        return {seq: new[seq] for seq in seqs[max(len(seqs) - self._duplicate_limit, 0) :]}

    def _write_ids(self) -> None:
        """Write the rows of the new ids, remove the oldest beyond the limit."""
        txn, db, ids, new = self._txn, self._duplicates_db, self._ids, self._latest_ids()
        rows = ((NUMBER.pack(seq), msgspec.msgpack.encode(key)) for seq, key in new.items())
        with txn.cursor(db=db) as cursor:
            last = NUMBER.unpack(cursor.key())[0] if cursor.last() else 0
        if new and len(new) == self._duplicate_limit and last < next(iter(new)):  # no other is kept
            txn.drop(db, delete=False)
            with txn.cursor(db=db) as cursor:
                cursor.putmulti(rows, append=True)
            self._duplicates, self._ids = len(new), Counter(number for number, _ in new.values())
        else:
            for (number, _), row in zip(new.values(), rows, strict=True):
                if txn.put(*row, db=db, overwrite=False):
                    self._duplicates += 1
                    ids[number] += 1
            with txn.cursor(db=db) as cursor:
                while self._duplicates > self._duplicate_limit:
                    cursor.first()
                    ids[msgspec.msgpack.decode(cursor.value())[0]] -= 1
                    cursor.delete()
                    self._duplicates -= 1
        self._new_ids = {}

    def _forget_duplicates(self, destination: int) -> None:
        """Forget a destination's ids from the latest back to its first: of a queue that was there for a moment they are
        among the last."""
        self._write_ids()
        keys: list[bytes] = []
        count = self._ids.pop(destination, 0)
        with self._txn.cursor(db=self._duplicates_db) as cursor:
            there = count and cursor.last()
            while there and len(keys) < count:
                if msgspec.msgpack.decode(cursor.value())[0] == destination:
                    keys.append(cursor.key())
                there = cursor.prev()
        for key in keys:
            self._txn.delete(key, db=self._duplicates_db)
        self._duplicates -= len(keys)

    def take_copies(self, copies: Segment, messages: Sequence[Copied]) -> None:
        """Take over the messages in a file of copies that live: they are there from now on, and nowhere else."""
        dead = []
        for number, seq, own in messages:
            if self.rows.move(number, seq, own, f"message {seq}"):
                copies.add_live(own[2])
            else:
                dead.append(own[0])
        if dead:
            copies.mark_dead(*dead)
        copies.counts = copies.changed = True
        self.emptied |= not copies.live
        self.operations += len(messages)

    def drop_segments(self, numbers: Iterable[int]) -> None:
        """Drop released segments: their rows go with the next checkpoint."""
        for number in numbers:
            self._txn.delete(NUMBER.pack(number), db=self._segments_db)

    # Checkpoints

    def checkpoint(
        self, checkpoint: Checkpoint, segments: Iterable[Segment], files: Files | None, is_last: bool = True
    ) -> None:
        """Make the index's file reflect all that was applied. The journal is synced through it (rule X3). `files` are
        what `IndexFile.open_checksums` gave. Unless it `is_last`, more is known already than was applied."""
        txn = self._txn
        for segment in segments:
            if segment.changed and segment.counts:
                segment.changed = False
                txn.put(NUMBER.pack(segment.number), _segment_row(segment), db=self._segments_db)
        for state in self.rows.changed:
            if state not in self._gone:
                txn.put(ID.pack(state.number), _destination_row(state), db=self._destinations_db)
        for subscriber in self.rows.changed_subscriptions:
            if subscriber not in self._ended:
                txn.put(ID.pack(subscriber.number), _subscription_row(subscriber), db=self._subscriptions_db)
        self.rows.changed.clear()
        self.rows.changed_subscriptions.clear()
        txn.put(b"checkpoint", msgspec.msgpack.encode(checkpoint), db=self._state_db)
        self.commit_partial()
        self.file.write_checksums(files)
        self.checkpointed = checkpoint
        if is_last:
            self._let_go_of_removed()

    def _let_go_of_removed(self) -> None:
        """Let go of what was removed: nothing goes back to before this checkpoint any more."""
        for state in self._gone:
            if self.states.get(state.number) is state:
                del self.states[state.number]
        for subscriber in self._ended:
            if self.subscriptions.get(subscriber.number) is subscriber:
                del self.subscriptions[subscriber.number]
        self._gone.clear()
        self._ended.clear()

    def commit_partial(self) -> None:
        """Commit, synced, and go on."""
        self._write_ids()
        self.file.commit()
        self._begin()
        self.operations = 0

    # Asking

    def committed(self, ask: Ask = at_once) -> list[bytes]:
        """Return the transactions that are committed and not forgotten; oldest first."""
        return [bytes(key) for key, place in self.rows.pages(self.transactions.db, ask) if not place]

    def there(self) -> tuple[list[DestinationState], list[SubscriptionState]]:
        """Return all destinations and subscriptions, also those whose messages are still to go."""
        states, subscriptions = list(self.states.values()), list(self.subscriptions.values())
        if self._gone:
            states = [state for state in states if state not in self._gone]
        if self._ended:
            subscriptions = [subscriber for subscriber in subscriptions if subscriber not in self._ended]
        return states, subscriptions


def _segment_row(segment: Segment) -> bytes:
    dead = bytes(segment.dead).rstrip(b"\0") if segment.dead else b""
    return msgspec.msgpack.encode(
        (segment.base_lsn, segment.last_lsn, segment.end or 0, segment.live, segment.live_bytes, dead)
    )


def _destination_row(state: DestinationState) -> bytes:
    kind, name = state.destination.kind.value, state.destination.name
    return msgspec.msgpack.encode((kind, name, state.count, state.bytes, state.own.leaving, state.delayed))


def _subscription_row(subscriber: SubscriptionState) -> bytes:
    _, name, client, selector, no_local = subscriber.subscription
    slot = subscriber.own.bit.bit_length() - 1
    topic, own = subscriber.topic.number, subscriber.own
    counts = (subscriber.count, own.ended, subscriber.delayed)
    return msgspec.msgpack.encode((topic, client, name, selector, no_local, subscriber.start, slot, *counts))


def is_of_index(error: Exception) -> bool:
    """Return whether opening a store failed for what its index file says. Its pages are as they were written, but what
    was written may be wrong. That shows as an error of LMDB, or as whatever nonsense makes Python raise."""
    if isinstance(error, StoreFullError):  # told by LMDB, too, but of the disk
        return False
    cause = error.__cause__ if isinstance(error, AnabranchError) else error
    return cause is not None and not isinstance(cause, (OSError, AnabranchError, lmdb.DiskError))
