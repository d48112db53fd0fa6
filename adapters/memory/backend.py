"""The backend: messages in memory, in chunks, and in swap files what does not fit.

`write` sees that there is room; `apply` puts the messages into their chunks (applying.py). Both run on the thread of
whoever calls, under the store's lock, and Ctrl-C may strike anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ...policies.errors import StoreFailedError, StoreFullError
from ...policies.options import MemoryOptions
from ..base import Progress
from ..clock import now_us
from ..core import Backend, BackendStats, Found, Host, Settings
from ..core.changes import Change, Commit, Declare, Prepare, Send, Subscribe, apply_all
from ..core.delivery import OWN, PLAIN_ORDERS, PRIORITY_ORDERS, Feed, Place
from ..core.plan import Plan
from ..core.states import Catalog, DestinationState, SubscriptionState
from . import check
from .applying import MemoryTable, memory_of_branch, takes
from .directory import StoreDirectory, TransientDirectory
from .memory_limit import DESTINATION_COST, MemoryLimit
from .message_chunks import ADDRESS_COST, CHUNK_COST, NUMBERS_COST, indexes, memory_of
from .messages import place_of
from .swap_files import SwapFiles

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 256 * 1024
"""So much is read under the lock at once, or one message."""
NUMBERS_MAX: Final = NUMBERS_COST + 16
"""At most so many bytes an open chunk keeps of each message, when it expires included."""
CHANGE_COST: Final = 128
"""At most so many bytes of memory a change takes beside what it says itself."""


class MemoryBackend(Backend):
    """One store's."""

    kind = "memory"
    volatile = True
    shared = False
    descriptors = 1
    threaded = False

    def __init__(self, name: str, directory: Path, options: MemoryOptions, index_directory: Path | None = None) -> None:
        self._name, self._options = name, options
        self.directory: StoreDirectory | TransientDirectory = StoreDirectory(
            name, directory, options.file_mode, self._lost
        )
        self.position: Callable[[], int] | None = None
        """Asked, under the store's lock, when messages are applied; kept with each. Set before it is opened."""
        self._last_seq = 0
        self._begin(Catalog())
        self.settings = Settings.of(
            options, max_bytes=options.max_stored_bytes, max_bytes_option="max_stored_bytes",
            ticket_bytes_max=self._memory.chunk_bytes,
        )  # fmt: skip

    def _begin(self, catalog: Catalog) -> None:
        """What there is in a store that holds nothing."""
        options = self._options
        self._catalog = catalog
        self._swap = SwapFiles(self.directory.path, options.roll_over_size, options.file_mode)
        self._memory = MemoryLimit(self._name, self._swap, options.max_bytes)
        self._table = MemoryTable(catalog, self._memory, self._swap, options.priorities)
        self._table.position = self.position
        self._applied = 0

    @classmethod
    def create(cls, name: str, directory: Path, options: MemoryOptions) -> bytes:
        return StoreDirectory(name, directory, options.file_mode).create()

    @classmethod
    def is_contained(cls, options: MemoryOptions) -> bool:
        return True

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        return StoreDirectory("", directory).identify()

    # Opening and closing

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        self.directory.unlock()  # of an opening, or a close, that was interrupted
        try:
            store_id = self.directory.lock()
            self._host = host
            self._begin(host.catalog)
            self._swap.wipe()
        except BaseException:
            self.directory.unlock()
            raise
        # By the clock, so that no seq comes twice, neither in a next life of the store nor in a next process.
        return store_id, Found(max(self._last_seq, now_us()))

    def close(self, clean: bool) -> None:
        for state in list(self._catalog.destinations.values()):
            for chunk in state.own.chunks() if state.own is not None else ():
                chunk.dead |= chunk.live
                chunk.records.clear()  # the caller may keep the store, or a message
                chunk.out = len(chunk)
        if clean:  # else the files there may be another's
            try:
                self._swap.wipe()
            except OSError as error:
                log.warning("store %s: its swap files cannot be removed now, the next open does: %s", self._name, error)
        self.directory.unlock()

    def require_owned(self) -> None:
        self.directory.require_lock()

    def _lost(self, error: StoreFailedError) -> None:
        """The lock's file is gone, or is another's: so may the swap files be."""
        self._host.fail(error)

    # Writing: there is room

    def write(self, plan: Plan) -> None:
        self._finish_all()
        self._last_seq = plan.last_seq
        size = CHANGE_COST * len(plan.changes) + (CHUNK_COST + DESTINATION_COST) * (1 + len(plan.declared))
        for ticket in plan.tickets:
            size += ticket.size
        if plan.prepared or not self._memory.fits(size):
            self._make_room(plan.changes)

    def _finish_all(self) -> None:
        """Nothing is pending: what was written ahead is some interrupted write's."""
        if self._memory.unfinished is not None or self._table.ahead:
            self._table.ahead = {}
            self._table.finish()

    def _make_room(self, changes: Sequence[Change]) -> None:
        """Raises StoreFullError and StoreFailedError, and then nothing was written; not for what only frees room, nor
        for the commit of what was prepared."""
        sends = [send for send in changes if type(send) is Send and (send.entitled or not send.state.is_topic)]
        others = DESTINATION_COST * sum(type(change) is Declare or type(change) is Subscribe for change in changes)
        prepared = sum(memory_of_branch(change.branch) for change in changes if type(change) is Prepare)
        if not sends and not others and not prepared:
            return
        memory = self._memory
        records = sum(memory_of(len(send.record)) + NUMBERS_MAX for send in sends)
        chunks = len({(send.state.number, send.order) for send in sends}) + len(sends) // 64
        more = records + others + CHUNK_COST * chunks
        commits = [change.branch.transaction for change in changes if type(change) is Commit]
        less = sum(self._table.prepared.get(transaction, 0) for transaction in commits)  # it is in memory already
        try:
            memory.make_room(more + prepared - less)
            if not memory.fits(more - less):
                self._write_ahead(sends)
                more = others + (CHUNK_COST + ADDRESS_COST) * len(self._table.ahead) + NUMBERS_MAX * len(sends)
                if not memory.fits(more - less) and not commits:
                    raise memory.full()
        except (StoreFullError, StoreFailedError) as error:
            for address, _ in self._table.ahead.values():  # all of them go into memory, or none is sent
                self._swap.release(address)
            self._table.ahead = {}
            if not commits:
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

    def took_effect(self, plan: Plan) -> bool:
        raise AssertionError("nothing here has an unknown outcome")

    # Applying

    def apply(self, changes: Sequence[Change], number: int) -> None:
        if self._memory.unfinished is not None:
            self._table.finish()
        apply_all(changes, self._table)
        self._applied = number
        if self._table.ahead:
            self._table.ahead = {}

    def recover(self) -> int:
        self._table.finish()
        return self._applied

    # Reading

    def orders(self, feed: Feed) -> Sequence[int]:
        return PRIORITY_ORDERS if self.settings.priorities else PLAIN_ORDERS

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        return state.own.rows(subscription, order, after, limit) if state.own is not None else ()

    def row(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> Place | None:
        return state.own.row(subscription, seq) if state.own is not None else None

    def expired(self, now: int) -> Iterable[tuple[Sequence[Feed], Place]]:
        """By the times themselves, whenever it is asked: a clock that went forward and back again hides nothing."""
        if not self._table.soonest or now < self._table.soonest:
            return
        for chunk in list(self._table.expiring):
            if not chunk.soonest or now < chunk.soonest:
                continue
            soonest = 0
            for index in indexes(chunk.live):
                at = chunk.expires_at(index)
                soonest = min(soonest or at, at) if at else soonest
                if at and at <= now:
                    yield chunk.lane.messages.feeds((chunk, index)), place_of((chunk, index), 0)
            chunk.soonest = soonest  # of those that were given as well: whoever takes them may give them back
            if not soonest:
                self._table.expiring.pop(chunk, None)
        self._table.soonest = min((chunk.soonest for chunk in self._table.expiring), default=0)

    def limited(self, least: int) -> Iterable[tuple[Feed, int]]:
        for state in list(self._catalog.destinations.values()):
            feeds = {feed.number: feed for feed in state.feeds()}
            for chunk in state.own.chunks() if state.own is not None else ():
                for (number, index), count in list(chunk.counts.items()):
                    if count >= least and number in feeds:
                        yield feeds[number], chunk.seq(index)

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
        """As many from the one at `at` as are read at once. The lock is not held longer."""
        memory, size = self._memory, 0
        page: list[bytes | None] = []
        with self._host.lock:
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

    def sync(self) -> None:
        """Nothing here survives anything."""

    def checkpoint(self) -> None:
        """Likewise."""

    def reclaim(self) -> int:
        """Nothing: swap files go by themselves."""
        return 0

    def stats(self) -> BackendStats:
        memory = self._memory
        self._finish_all()
        return BackendStats(memory_bytes=memory.used + memory.prepared, swap_bytes=self._swap.total_bytes)

    def check(self) -> Iterator[str]:
        self._finish_all()
        yield from check.violations(self._catalog, self._memory, self._swap)
