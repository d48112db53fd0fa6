"""The messages of all destinations in memory, in chunks, and in swap files what does not fit: what a memory store has,
and what any other store has for its messages that are not persistent (features/transient).

`require_room` sees that there is room; `apply_changes` puts the messages into their chunks (applying.py). Both run on
the thread of whoever calls, under the store's lock, and Ctrl-C may strike anywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....policies.errors import StoreFailedError, StoreFullError
from ..operations.branches import Prepare
from ..operations.changes import Change, Postponed, Send
from ..operations.destination_changes import Declare, Subscribe
from ..operations.table import apply_all
from ..record.encoding import REMOVAL
from ..record.place import ALSO_WAITING, OWN, Place
from ..state.leases import Channel, DestinationState, SubscriptionState
from ..state.states import Catalog
from . import check
from .applying import MemoryTable, memory_of_branch, takes
from .key_index import KEY_COST
from .memory_limit import MemoryLimit
from .message_chunks import ADDRESS_COST, CHUNK_COST, NUMBERS_COST, WAIT_COST, indexes, memory_of
from .messages import DESTINATION_COST, SUBSCRIPTION_COST, DestinationMessages, place_of
from .swap_files import SwapFiles

if TYPE_CHECKING:
    from ....policies.config.options import MemoryOptions

log: logging.Logger = logging.getLogger(__name__)

PAGE_BYTES: Final = 256 * 1024
"""Bytes that are read under the lock at once, or one message."""
NUMBERS_MAX: Final = NUMBERS_COST + 16
"""At most so many bytes an open chunk keeps of each message, when it expires included."""
CHANGE_COST: Final = 128
"""At most so many bytes of memory a change takes beside what it says itself."""
NEW_COST: Final = CHUNK_COST + DESTINATION_COST
"""Bytes of memory, at most, that a destination and its first chunk take."""


class MemoryRows:
    """The rows of one open store. Under its lock, but for `bodies`."""

    def __init__(
        self, name: str, directory: Path, options: MemoryOptions, priorities: bool, catalog: Catalog,
        lock: threading.RLock,
    ) -> None:  # fmt: skip
        """`directory` is where the swap files' is made when something is swapped. `priorities`: messages of different
        orders are kept apart."""
        self._name, self._catalog, self._lock = name, catalog, lock
        self._swap = SwapFiles(directory, options.roll_over_size, options.file_mode)
        self._memory = MemoryLimit(name, self._swap, options.max_bytes)
        self._table = MemoryTable(catalog, self._memory, self._swap, priorities)

    def wipe(self) -> None:
        """Remove all swap files, of an earlier process too. Raises OSError."""
        self._swap.wipe()

    def let_go(self, clean: bool) -> None:
        """Let go of all, the swap files too if `clean`: else the files there may be another's."""
        for state in self._catalog.held():
            for chunk in state.own.chunks() if state.own is not None else ():
                chunk.dead |= chunk.live
                chunk.records.clear()  # the caller may keep the store, or a message
                chunk.out = len(chunk)
        if clean:
            try:
                self._swap.wipe()
            except OSError as error:
                log.warning("store %s: its swap files cannot be removed now, the next open does: %s", self._name, error)

    # Writing: there is room

    def finish_all(self) -> None:
        """Finish all while nothing is pending: what was written ahead is some interrupted write's."""
        if self._memory.unfinished is not None or self._table.ahead:
            self._table.ahead = {}
            self._table.finish()

    def reserve(self, key: bytes, sends: Sequence[Send]) -> None:
        """Reserve room for what is sent later, until `free`. Raises as `make_room`."""
        size = sum(memory_of(len(send.record)) for send in sends)
        self._memory.make_room(size)
        self._table.prepared[key] = size
        self._memory.prepared = sum(self._table.prepared.values())

    def free(self, key: bytes) -> None:
        """Free reserved room. Idempotent."""
        self._table.prepared.pop(key, None)
        self._memory.prepared = sum(self._table.prepared.values())

    def require_room(self, changes: Sequence[Change], size: int, reserved: Sequence[bytes] = ()) -> None:
        """Require room for changes that follow, which take at most so many bytes. Raises as `make_room`."""
        self.finish_all()
        if reserved or not self._memory.fits(size):
            self.make_room(changes, reserved)

    def make_room(self, changes: Sequence[Change], reserved: Sequence[bytes] = ()) -> None:
        """Make room for changes that follow. Raises StoreFullError and StoreFailedError, and then nothing was written;
        not for what only frees room, nor where there are keys of what was `reserved`."""
        sends = [
            send for send in changes
            if type(send) is Send and (send.recipients or not send.state.is_topic) and not is_removal(send)
        ]  # fmt: skip
        others = DESTINATION_COST * sum(type(change) is Declare for change in changes)
        others += SUBSCRIPTION_COST * sum(type(change) is Subscribe for change in changes)
        prepared = sum(memory_of_branch(change.branch) for change in changes if type(change) is Prepare)
        if not sends and not others and not prepared:
            return
        memory = self._memory
        others += sum(KEY_COST + len(send.name or b"") for send in sends if send.state.is_map)
        records = sum(memory_of(len(send.record)) + NUMBERS_MAX for send in sends)
        others += WAIT_COST * sum(type(change) is Postponed and change.due > 0 for change in changes)
        chunks = len({(send.state.number, send.order) for send in sends}) + len(sends) // 64
        more = records + others + CHUNK_COST * chunks
        less = sum(self._table.prepared.get(key, 0) for key in reserved)  # it is in memory already
        try:
            memory.make_room(more + prepared - less)
            if not memory.fits(more - less):
                self._write_ahead(sends)
                more = others + (CHUNK_COST + ADDRESS_COST) * len(self._table.ahead) + NUMBERS_MAX * len(sends)
                if not memory.fits(more - less) and not reserved:
                    raise memory.full()
        except (StoreFullError, StoreFailedError) as error:
            for address, _ in self._table.ahead.values():  # all of them go into memory, or none is sent
                self._swap.release(address)
            self._table.ahead = {}
            if not reserved:
                raise
            log.warning("%s", error)

    def _write_ahead(self, sends: Sequence[Send]) -> None:
        """Write sends into the swap, as the chunks that they are going to be, so that they take no memory."""
        groups: list[list[Send]] = []
        last: dict[tuple[int, int], tuple[list[Send], int]] = {}
        for send in sends:
            key = (send.state.number, send.order)
            group, size = last.get(key, ([], 0))
            if not group or not takes(len(group), size, len(send.record), self._memory.chunk_bytes):
                group, size = [], 0
                groups.append(group)
            group.append(send)
            last[key] = group, size + len(send.record)
        for group in groups:
            address = self._memory.write([send.record for send in group])
            self._table.ahead[group[0].seq] = (address, group)
        self._memory.unfinished = None

    # Applying

    def apply_changes(self, changes: Sequence[Change]) -> None:
        """Apply changes, for which `make_room` was called last. May be done again."""
        apply_all(changes, self._changeable())
        if self._table.ahead:
            self._table.ahead = {}

    def declare(self, state: DestinationState) -> None:
        """Declare a destination, as of Table, and so the next three."""
        self._changeable().declare(state)

    def subscribe(self, subscriber: SubscriptionState) -> None:
        self._changeable().subscribe(subscriber)

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        self._changeable().unsubscribe(subscriber)

    def remove(self, state: DestinationState) -> None:
        self._changeable().remove(state)

    def _changeable(self) -> MemoryTable:
        """Return the table with nothing half done in it (B2)."""
        if self._memory.unfinished is not None:
            self._table.finish()
        return self._table

    def mend(self) -> None:
        """Make whole what is there, for `apply_changes` to be done again: it was interrupted."""
        self._table.finish()

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        messages: DestinationMessages | None = state.own
        if messages is None or (subscription is not None and not subscription.count):
            return None
        also = order & ALSO_WAITING
        first = messages.orders.first(order - also)
        return first + also if first is not None else None

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        return state.own.rows(subscription, order, after, limit) if state.own is not None else ()

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        return state.own.row(subscription, seq, order) if state.own is not None else None

    def keyed(self, state: DestinationState, names: Sequence[bytes]) -> Mapping[bytes, Place]:
        """Return where the values of keys are, as of Backend, and so the next."""
        return state.own.keyed(names) if state.own is not None else {}

    def keys(self, state: DestinationState, start: bytes, limit: int) -> Sequence[tuple[bytes, Place]]:
        return state.own.keyed_from(start, limit) if state.own is not None else ()

    def unacked(self, state: DestinationState, seq: int) -> Sequence[Channel]:
        messages: DestinationMessages | None = state.own
        slot = messages.find(seq) if messages is not None else None
        return messages.channels(slot) if messages is not None and slot is not None else ()

    def expired(self, since: int, now: int) -> Iterator[tuple[DestinationState, Place]]:
        """Yield expired messages. Chunks that hold nothing but what was given before are skipped, unless the same is
        asked for again."""
        table = self._table
        again = since < table.given
        if not again and (not table.soonest or now < table.soonest):
            return
        table.given = now  # first: who is interrupted asks again
        for chunk in list(table.expiring):
            if not again and not 0 < chunk.soonest <= now:
                continue
            for index in indexes(chunk.live):
                if since < chunk.expires_at(index) <= now:
                    yield chunk.level.state, place_of((chunk, index), 0)
            later = (chunk.expires_at(index) for index in indexes(chunk.live))
            chunk.soonest = min((at for at in later if at > now), default=0)
        table.soonest = min((chunk.soonest for chunk in table.expiring if chunk.soonest), default=0)

    def limited(self, least: int) -> Iterator[tuple[Channel, Place]]:
        for state in list(self._catalog.destinations.values()):
            channels = {channel.number: channel for channel in state.channels()}
            for chunk in state.own.chunks() if state.own is not None else ():
                for (number, index), count in list(chunk.counts.items()):
                    if count >= least and number in channels:
                        yield channels[number], place_of((chunk, index), number)

    def next_due(self) -> int:
        return self._table.dues.first()

    def due(self, now: int, limit: int) -> list[tuple[DestinationState, int, Place]]:
        return [
            (chunk.level.state, number, place_of((chunk, index), number))
            for chunk, index, number in self._table.dues.until(now, limit)
        ]

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        messages: DestinationMessages | None = state.own
        slot = messages.find(seq) if messages is not None else None
        if slot is None or not slot[0].waits:
            return 0
        chunk, index = slot
        number = subscription.number if subscription is not None else 0
        return max(chunk.waits.get((0, index), 0), chunk.waits.get((number, index), 0))

    def bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        if len(places) == 1:
            return iter(self._page(places, 0))
        return self._pages(places)

    def _pages(self, places: Sequence[Place]) -> Iterator[bytes | None]:
        at = 0
        while at < len(places):
            page = self._page(places, at)
            for record in page:
                chunk, index = places[at][OWN]
                yield record if not chunk.dead >> index & 1 else None  # it may have died meanwhile
                at += 1

    def _page(self, places: Sequence[Place], at: int) -> list[bytes | None]:
        """Return as many records from the one at `at` as are read at once. The lock is not held longer."""
        memory, size = self._memory, 0
        page: list[bytes | None] = []
        with self._lock:
            if memory.unfinished is not None:
                self._table.finish()
            while at < len(places) and size < PAGE_BYTES:
                chunk, index = places[at][OWN]
                record = memory.record(chunk, index)
                page.append(record)
                size += len(record) if record is not None else 0
                at += 1
        return page

    # Upkeep

    @property
    def memory_bytes(self) -> int:
        """Return how many bytes of memory all messages take."""
        self.finish_all()
        return self.counted_bytes

    @property
    def counted_bytes(self) -> int:
        """Return how many bytes of memory they take, as counted last. Any thread, without the lock."""
        return self._memory.used + self._memory.prepared

    @property
    def swap_bytes(self) -> int:
        """Return how many bytes the swap files have."""
        return self._swap.total_bytes

    def violations(self) -> Iterator[str]:
        """Yield violations, as of check.py."""
        self.finish_all()
        yield from check.violations(self._catalog, self._memory, self._swap)


def is_removal(send: Send) -> bool:
    """Return whether a message of a map takes a key's value away."""
    return send.state.is_map and send.expires_at_ms == REMOVAL
