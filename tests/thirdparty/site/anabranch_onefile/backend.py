"""The backend: what is in the file, and what each change does to it."""

from __future__ import annotations

import errno
import heapq
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from anabranch.adapters.core import BackendStats, Found, Host, Settings, WrittenBackend
from anabranch.adapters.core.operations.branches import Branch
from anabranch.adapters.core.operations.changes import Ack, Change, Send
from anabranch.adapters.core.operations.plan import Plan
from anabranch.adapters.core.operations.table import apply_all
from anabranch.adapters.core.record.encoding import REMOVAL, name_of, order_and_expiry
from anabranch.adapters.core.record.place import ALSO_WAITING, DELIVERIES, Place, order_of
from anabranch.adapters.core.state.leases import Channel, DestinationState, SubscriptionState
from anabranch.adapters.core.store_types import Progress, Subscription
from anabranch.adapters.system.directory import StoreDirectory
from anabranch.adapters.system.files import sync_directory
from anabranch.policies.config.options import StoreOptions
from anabranch.policies.errors import CorruptionError, OutcomeUnknownError, StoreFullError
from anabranch.policies.names.destination import Destination, Kind

FILE = "contents.bin"


class OneFileOptions(StoreOptions):
    """What the file may say under `onefile:`, beside what every kind of ours has."""

    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """The most bytes of messages that the store holds; a send beyond it fails. None: no limit."""


class Row(msgspec.Struct, array_like=True):
    """A message."""

    record: bytes
    priority: int
    expires_at_ms: int
    waiting: list[int] = []
    """Of a topic's: the numbers of the subscriptions that have yet to ack it."""
    counts: dict[int, int] = {}
    """How often it has been given back, by subscription (0: a queue's)."""
    waits: dict[int, int] = {}
    """Until when it waits for its time, by subscription (0: for all)."""


class Contents(msgspec.Struct, array_like=True):
    """All that the file says."""

    last_seq: int = 0
    last_number: int = 0
    destinations: dict[int, tuple[int, str]] = {}
    """Number -> kind, name."""
    subscriptions: dict[int, tuple[int, str, str, str | None, bool, int]] = {}
    """Number -> topic, client, name, selector, no_local, start."""
    messages: dict[int, dict[int, Row]] = {}
    """Destination -> seq -> message."""
    ids: list[tuple[int, bytes, int]] = []
    """The duplicate window, oldest first: destination, message id, seq."""
    prepared: dict[str, bytes] = {}
    committed: list[str] = []


class OneFileDirectory(StoreDirectory):
    advice = "Restore it from a backup"


class OneFileBackend(WrittenBackend):
    """Every write makes new contents out of the old ones and writes them whole; `apply` then shows them."""

    kind = "onefile"
    volatile = False
    shared = False
    descriptors = 4

    def __init__(self, name: str, directory: Path, options: OneFileOptions, index_directory: Path | None = None):
        self.name, self.options, self.path = name, options, directory / FILE
        self.settings = Settings.of(options, max_bytes=options.max_bytes)
        self._directory = OneFileDirectory(name, directory, options.file_mode, self._lost)
        self._now = self._next = Contents()  # what is seen, and what is written
        self._syncs = 0

    @classmethod
    def create(cls, name: str, directory: Path, options: OneFileOptions) -> bytes:
        def fill(path: Path, store_id: bytes) -> bytes:
            write(path / FILE, msgspec.msgpack.encode(Contents()))
            return store_id

        return OneFileDirectory(name, directory, options.file_mode).create(fill)

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        return OneFileDirectory("", directory).identify()

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        store_id = self._directory.lock()
        self._host = host
        self._now = self._next = now = msgspec.msgpack.decode(read(self.path), type=Contents)
        catalog = host.catalog
        catalog.last_number = now.last_number
        for number, (kind, name) in now.destinations.items():
            catalog.load(number, Destination(Kind(kind), name))
        for number, (topic, client, name, selector, no_local, start) in now.subscriptions.items():
            state = catalog.by_number[topic]
            subscription = Subscription(state.destination, name, client, selector, no_local)
            catalog.load_subscription(number, state, subscription, start)
        self._count()
        prepared = [(bytes.fromhex(transaction), payload) for transaction, payload in now.prepared.items()]
        committed = [bytes.fromhex(transaction) for transaction in now.committed]
        return store_id, Found(now.last_seq, (((d, i), seq) for d, i, seq in now.ids), prepared, committed)

    def close(self, clean: bool) -> None:
        self._directory.unlock()

    def require_owned(self) -> None:
        self._directory.require_lock()

    def _lost(self, error: BaseException) -> None:
        self._host.fail(error)

    # Writing

    def write(self, plan: Plan) -> None:
        self._next = new = msgspec.msgpack.decode(msgspec.msgpack.encode(self._now), type=Contents)
        apply_all(plan.changes, self)
        new.last_seq, new.last_number = plan.last_seq, self._host.catalog.last_number
        kept = {(number, name): seq for number, name, seq in new.ids if number in new.destinations}
        for key, seq in plan.ids.items():
            kept.pop(key, None)
            kept[key] = seq
        limit = self.settings.duplicate_window
        new.ids = [(*key, seq) for key, seq in kept.items()][-limit:] if limit else []
        try:
            self._syncs += 1
            write(self.path, msgspec.msgpack.encode(new))
        except OSError as error:
            self._next = self._now
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFullError(f"store {self.name!r} cannot be written: {error}; free some space") from error
            self._host.fail(error)
            raise OutcomeUnknownError(f"store {self.name!r} could not be written: {error}; reopen it") from error

    def apply(self, changes: Sequence[Change], last: Plan) -> None:
        self._now = self._next
        self._count()

    def put(self, sends: Sequence[Send]) -> None:
        messages = self._next.messages[sends[0].state.number]
        for send in sends:
            if send.state.is_map:
                former = next((seq for seq, row in messages.items() if name_of(row.record) == send.name), 0)
                if former < send.seq:
                    messages.pop(former, None)
                if former > send.seq or send.expires_at_ms == REMOVAL:
                    continue
            if not send.state.is_topic or send.recipients:
                waiting = [subscriber.number for subscriber in send.recipients]
                messages[send.seq] = Row(send.record, order_and_expiry(send.record)[0], send.expires_at_ms, waiting, {})

    def ack(self, acks: Sequence[Ack]) -> None:
        for ack in acks:
            self.ack_range(ack.state, ack.seq, ack.seq, ack.number)

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        messages = self._next.messages.get(state.number, {})
        for seq in [seq for seq in messages if first <= seq <= last]:
            row = messages[seq]
            row.waiting = [other for other in row.waiting if other != number]
            row.waits.pop(number, None) if number else None
            if not row.waiting or not number:
                del messages[seq]

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        if row := find(self._next, state, seq, number):
            row.counts[number] = count

    def postpone(self, state: DestinationState, seq: int, number: int, due: int, place: Place | None) -> None:
        if row := find(self._next, state, seq, number):
            row.waits.pop(number, None)
            if due:
                row.waits[number] = due

    def declare(self, state: DestinationState) -> None:
        self._next.destinations[state.number] = (state.destination.kind.value, state.destination.name)
        self._next.messages.setdefault(state.number, {})

    def remove(self, state: DestinationState) -> None:
        new = self._next
        new.destinations.pop(state.number, None)
        new.messages.pop(state.number, None)
        new.subscriptions = {n: row for n, row in new.subscriptions.items() if row[0] != state.number}

    def subscribe(self, subscriber: SubscriptionState) -> None:
        new, number, topic, start = self._next, subscriber.number, subscriber.topic.number, subscriber.start
        _, name, client, selector, no_local = subscriber.subscription
        new.subscriptions[number] = (topic, client, name, selector, no_local, start)
        for seq, row in new.messages[topic].items():
            if seq > start and number not in row.waiting:
                row.waiting.append(number)

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        self._next.subscriptions.pop(subscriber.number, None)
        self.ack_range(subscriber.topic, 0, self._next.last_seq, subscriber.number)

    def prepare(self, branch: Branch) -> None:
        self._next.prepared[branch.transaction.hex()] = branch.payload

    def settled(self, branch: Branch, committed: bool) -> None:
        self._next.prepared.pop(branch.transaction.hex(), None)
        if committed:
            self._next.committed.append(branch.transaction.hex())

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._next.committed = [one for one in self._next.committed if bytes.fromhex(one) not in transactions]

    # Reading

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        also = order & ALSO_WAITING
        orders = (self._order(row) + also for row in self._now.messages.get(state.number, {}).values())
        return min((one for one in orders if one >= order), default=None)

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        number = subscription.number if subscription is not None else 0
        also = order is None or order & ALSO_WAITING
        order = order if order is None else order & ~ALSO_WAITING
        found = (
            seq for seq, row in self._now.messages.get(state.number, {}).items()
            if seq > after and order in (None, self._order(row)) and (not number or number in row.waiting)
            and (also or not row.waits.keys() & {0, number})
        )  # fmt: skip
        return [self._place(state, seq, number) for seq in heapq.nsmallest(limit, found)]

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        number = subscription.number if subscription is not None else 0
        return self._place(state, seq, number) if find(self._now, state, seq, number) else None

    def _place(self, state: DestinationState, seq: int, number: int) -> Place:
        row = self._now.messages[state.number][seq]
        return self._order(row), seq, row.expires_at_ms, row.counts.get(number, 0), None

    def _order(self, row: Row) -> int:
        return order_of(row.priority, self.settings.priorities)

    def _all(self) -> Iterator[tuple[DestinationState, int, Row]]:
        for number, messages in self._now.messages.items():
            for seq, row in messages.items():
                yield self._host.catalog.by_number[number], seq, row

    def unacked(self, state: DestinationState, seq: int) -> Sequence[Channel]:
        waiting = self._now.messages[state.number][seq].waiting
        return [channel for channel in state.channels() if not channel.number or channel.number in waiting]

    def expired(self, since: int, now: int) -> Iterable[tuple[DestinationState, Place]]:
        due = [(state, seq) for state, seq, row in self._all() if since < row.expires_at_ms <= now]
        return [(state, self._place(state, seq, 0)) for state, seq in due]

    def limited(self, least: int) -> Iterable[tuple[Channel, Place]]:
        channels = [(channel, seq) for state, seq, _ in self._all() for channel in self.unacked(state, seq)]
        places = [(channel, self._place(channel.state, seq, channel.number)) for channel, seq in channels]
        return [(channel, place) for channel, place in places if place[DELIVERIES] >= least]

    def next_due(self) -> int:
        return min((due for _, _, row in self._all() for due in row.waits.values()), default=0)

    def due(self, now: int, limit: int) -> Sequence[tuple[DestinationState, int, Place]]:
        waiting = ((due, seq, number, state) for state, seq, row in self._all() for number, due in row.waits.items())
        first = heapq.nsmallest(limit, (one for one in waiting if one[0] <= now), key=lambda one: one[:3])
        return [(state, number, self._place(state, seq, number)) for _, seq, number, state in first]

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        row, number = find(self._now, state, seq), subscription.number if subscription is not None else 0
        return max(row.waits.get(0, 0), row.waits.get(number, 0)) if row else 0

    def bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        rows = (find(self._now, state, place[1]) for place in places)
        yield from (row.record if row else None for row in rows)

    def keyed(self, state: DestinationState, names: Sequence[bytes]) -> dict[bytes, Place]:
        return {key: place for name in names for key, place in self.keys(state, name, 1) if key == name}

    def keys(self, state: DestinationState, start: bytes, limit: int) -> Sequence[tuple[bytes, Place]]:
        rows = self._now.messages.get(state.number, {})
        found = sorted((name_of(row.record) or b"", seq) for seq, row in rows.items())
        return [(key, self._place(state, seq, 0)) for key, seq in found if key >= start][:limit]

    def _count(self) -> None:
        for state in self._host.catalog.by_number.values():
            rows = self._now.messages.get(state.number, {}).values()
            state.count, state.bytes = len(rows), sum(len(row.record) for row in rows)
            state.delayed = sum(0 in row.waits for row in rows)
            for subscriber in state.subscriptions.values():
                there = [row for row in rows if subscriber.number in row.waiting]
                subscriber.count = len(there)
                subscriber.delayed = sum(bool(row.waits.keys() & {0, subscriber.number}) for row in there)
        self._host.catalog.recount()

    # Upkeep

    def stats(self) -> BackendStats:
        return BackendStats(syncs=self._syncs, journal_bytes=self.path.stat().st_size)

    def check(self) -> Iterator[str]:
        for state, seq, row in self._all():
            if state.is_topic != bool(row.waiting):
                yield f"message {seq} of {state.destination} waits for {row.waiting}"


def find(contents: Contents, state: DestinationState, seq: int, number: int = 0) -> Row | None:
    """The message, unless the subscription of this number has acked it."""
    row = contents.messages.get(state.number, {}).get(seq)
    return row if row is not None and (not number or number in row.waiting) else None


def write(path: Path, encoded: bytes) -> None:
    """A checksum, then the contents: durable on return, whole or not at all whatever crash comes."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(zlib.crc32(encoded).to_bytes(4, "big") + encoded)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def read(path: Path) -> Any:
    """Raises CorruptionError."""
    found = path.read_bytes()
    if zlib.crc32(found[4:]).to_bytes(4, "big") != found[:4]:
        raise CorruptionError(str(path), 0, "the checksum does not fit", "restore it from a backup")
    return found[4:]
