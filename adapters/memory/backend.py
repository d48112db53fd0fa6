"""The backend: messages in memory, in chunks, and in swap files what does not fit.

`write` sees that there is room; `apply` puts the messages into their chunks. Both run on the thread of whoever calls,
under the store's lock, and Ctrl-C may strike anywhere:

B1  What a change says is done to a chunk in an order such that it can be done again: a message counts as there once it
    is among its chunk's offsets, as dead once its bit is set, and both are looked at first.
B2  While a chunk changes, `MemoryLimit.unfinished` is what makes it whole. Whoever finds one, calls it, counts
    everything anew that is counted, and has the interrupted changes applied once more.
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
from ..core.changes import Branch, Change, Commit, Declare, Prepare, Send, Subscribe, apply_all
from ..core.delivery import OWN, PLAIN_ORDERS, PRIORITY_ORDERS, Feed, Place
from ..core.plan import Plan
from ..core.states import DestinationState, SubscriptionState
from . import check
from .directory import StoreDirectory, TransientDirectory
from .memory_limit import DESTINATION_COST, MemoryLimit, nothing
from .message_chunks import ADDRESS_COST, BITS, CHUNK_COST, MASKS, MESSAGES_MAX, Chunk, Lane, indexes, memory_of
from .messages import DestinationMessages, Spot, place_of
from .swap_files import Address, SwapFiles

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 256 * 1024
"""So much is read under the lock at once, or one message."""
NUMBERS_MAX: Final = 128
"""At most so many bytes of memory a message takes beside its record, and what its change is said to take."""


class MemoryBackend(Backend):
    """One store's."""

    kind = "memory"
    volatile = True
    shared = False
    descriptors = 1
    threaded = False

    def __init__(
        self, name: str, directory: Path, options: MemoryOptions, index_directory: Path | None = None
    ) -> None:
        self._name, self._options = name, options
        self.directory: StoreDirectory | TransientDirectory = StoreDirectory(
            name, directory, options.file_mode, self._lost
        )
        self.position: Callable[[], int] | None = None
        """Asked, under the store's lock, when messages are applied; kept with each."""
        self._last_seq = 0
        self._begin()
        self.settings = Settings.of(
            options, max_bytes=options.max_stored_bytes, max_bytes_option="max_stored_bytes",
            ticket_bytes_max=self._memory.chunk_bytes,
        )  # fmt: skip

    def _begin(self) -> None:
        """What there is in a store that holds nothing."""
        options = self._options
        self.swap = SwapFiles(self.directory.path, options.roll_over_size, options.file_mode)
        self._memory = MemoryLimit(self._name, self.swap, options.max_bytes)
        self._expiring: dict[Chunk, None] = {}
        """Those in which messages expire."""
        self._soonest = 0
        """No message expires before; 0: none does."""
        self._prepared: dict[bytes, int] = {}
        """Bytes of memory that each prepared transaction takes."""
        self._ahead: list[Address] = []
        """Entries of the swap that the plan which is being written has, and no chunk yet."""
        self._applied = 0

    @classmethod
    def create(cls, name: str, directory: Path, options: MemoryOptions) -> bytes:
        return StoreDirectory(name, directory, options.file_mode).create()

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        return StoreDirectory("", directory).identify()

    # Opening and closing

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        self.directory.unlock()  # of an opening, or a close, that was interrupted
        try:
            store_id = self.directory.lock()
            self._host = host
            self._begin()
            self.swap.wipe()
        except BaseException:
            self.directory.unlock()
            raise
        # By the clock, so that no seq comes twice, neither in a next life of the store nor in a next process.
        return store_id, Found(max(self._last_seq, now_us()))

    def close(self, clean: bool) -> None:
        for state in list(self._host.catalog.destinations.values()):
            for chunk in state.own.chunks() if state.own is not None else ():
                chunk.dead |= chunk.live
                chunk.records.clear()  # the caller may keep the store, or a message
                chunk.out = len(chunk)
        if clean:  # else the files there may be another's
            try:
                self.swap.wipe()
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
        if self._memory.unfinished is not None or self._ahead:
            self._ahead = []
            self._finish()
        self._last_seq = plan.last_seq
        size = NUMBERS_MAX * len(plan.changes) + CHUNK_COST + DESTINATION_COST
        for ticket in plan.tickets:
            size += ticket.size
        if not self._memory.fits(size):
            self._make_room(plan.changes)

    def _make_room(self, changes: Sequence[Change]) -> None:
        """Raises StoreFullError and StoreFailedError, and then nothing was written; not for what only frees room, nor
        for the commit of what was prepared."""
        sends = [send for send in changes if type(send) is Send and (send.entitled or not send.state.is_topic)]
        others = DESTINATION_COST * sum(type(change) is Declare or type(change) is Subscribe for change in changes)
        prepared = sum(_memory_of_branch(change.branch) for change in changes if type(change) is Prepare)
        if not sends and not others and not prepared:
            return
        memory = self._memory
        records = sum(memory_of(len(send.record)) + NUMBERS_MAX // 4 for send in sends)
        more = records + others + CHUNK_COST * (1 + len(sends) // 64)
        try:
            memory.make_room(more + prepared)
            if not memory.fits(more):
                more = others + self._write_ahead(sends)
                if not memory.fits(more):
                    raise memory.full()
        except (StoreFullError, StoreFailedError) as error:
            if not any(type(change) is Commit for change in changes):
                self._ahead = []
                memory.unfinished = nothing  # what was written ahead goes
                raise
            log.warning("%s", error)

    def _write_ahead(self, sends: Sequence[Send]) -> int:
        """Write sends into the swap, so that they take no memory: `own` of each is then the address, and all the sends
        that lie there. Returns how many bytes of memory they take nevertheless."""
        groups: dict[tuple[DestinationState, int], list[list[Send]]] = {}
        for send in sends:
            of = groups.setdefault((send.state, send.order), [])
            if not of or not self._takes(len(of[-1]), sum(len(one.record) for one in of[-1]), len(send.record)):
                of.append([])
            of[-1].append(send)
        more = 0
        for group in (group for of in groups.values() for group in of):
            address = self._memory.write([send.record for send in group])
            self._ahead.append(address)
            more += CHUNK_COST + ADDRESS_COST + NUMBERS_MAX // 4 * len(group)
            for send in group:
                send.own = (address, group)
        self._memory.unfinished = None
        return more

    def _takes(self, count: int, size: int, more: int) -> bool:
        """Whether a chunk of so many messages and bytes takes one of `more` bytes."""
        return count == 0 or (count < MESSAGES_MAX and size + more <= self._memory.chunk_bytes)

    def took_effect(self, plan: Plan) -> bool:
        raise AssertionError("nothing here has an unknown outcome")

    # Applying

    def apply(self, changes: Sequence[Change], number: int) -> None:
        if self._memory.unfinished is not None:
            self._finish()
        apply_all(changes, self)
        self._applied = number
        if self._ahead:
            self._ahead = []

    def recover(self) -> int:
        self._finish()
        return self._applied

    def _finish(self) -> None:
        """Make whole what was interrupted, and count anew all that is counted (B2)."""
        memory, catalog = self._memory, self._host.catalog
        if memory.unfinished is not None:
            memory.unfinished()
        chunks: list[Chunk] = []
        others = 0
        for state in list(catalog.destinations.values()):
            count = size = 0
            messages: DestinationMessages | None = state.own
            if messages is not None:
                of = list(messages.chunks())
                count = sum(chunk.live.bit_count() for chunk in of)
                size = sum(chunk.bytes_of(chunk.live) for chunk in of)
                for known in messages.subscriptions.values():
                    known.count = sum(messages.pending(known, chunk).bit_count() for chunk in of)
                others += 1 + len(messages.subscriptions)
                chunks += of
            state.count, state.bytes = count, size
        catalog.recount()
        memory.prepared = sum(self._prepared.values())
        memory.recount(chunks, others)
        needed = {(address.file, address.offset) for chunk in chunks for address in chunk.addresses}
        needed |= {(address.file, address.offset) for address in self._ahead}
        for address in self.swap.entries:
            if (address.file, address.offset) not in needed:
                self.swap.release(address)
        memory.unfinished = None

    def put(self, sends: Sequence[Send]) -> None:
        state = sends[0].state
        position = self.position() if self.position is not None else None
        if state.is_topic:
            sends = [send for send in sends if send.entitled]  # nobody will ever ask for the others
        if not self.settings.priorities:
            self._add(state.own.lane(0), sends, position)
            return
        orders: dict[int, list[Send]] = {}
        for send in sends:
            orders.setdefault(send.order, []).append(send)
        for order, some in orders.items():
            self._add(state.own.lane(order), some, position)

    def _add(self, lane: Lane, sends: Sequence[Send], position: int | None) -> None:
        """At the end of a lane, but for those that are there already."""
        last, at, end = lane.last, 0, len(sends)
        chunk_bytes = self._memory.chunk_bytes
        while at < end:
            send = sends[at]
            if send.seq <= last:
                at += 1
                continue
            if send.own is not None:
                address, group = send.own
                self._add_chunk(lane, group, position, address)
                last = group[-1].seq
                continue
            chunk = lane.chunks[-1] if lane.chunks and not lane.chunks[-1].sealed else None
            first = at
            size, room = (0, MESSAGES_MAX) if chunk is None else (chunk.total_bytes, MESSAGES_MAX - len(chunk.offsets))
            while at < end and at - first < room and sends[at].own is None:
                size += len(sends[at].record)
                if size > chunk_bytes and (at > first or chunk is not None):
                    break
                at += 1
            if at == first:
                assert chunk is not None
                self._seal(chunk)
            elif chunk is None:
                self._add_chunk(lane, sends[first:at], position)
            else:
                self._extend(chunk, sends[first:at] if at - first < end else sends, position)

    def _add_chunk(self, lane: Lane, sends: Sequence[Send], position: int | None, address: Address | None = None) -> None:
        """A new one. `address`: where its records are, if they do not stay in memory."""
        if lane.chunks and not lane.chunks[-1].sealed:
            self._seal(lane.chunks[-1])
        self._memory.unfinished = nothing
        chunk = Chunk(lane, sends[0].seq)
        self._fill(chunk, sends, position)
        if address is not None:
            chunk.addresses, chunk.records, chunk.resident = (address,), [], 0
            chunk.written = chunk.out = len(chunk)
            chunk.seal()
        else:
            self._memory.kept[chunk] = None
        lane.chunks.append(chunk)
        self._memory.count(chunk)
        self._count_sends(sends)
        self._memory.unfinished = None

    def _extend(self, chunk: Chunk, sends: Sequence[Send], position: int | None) -> None:
        memory = self._memory
        memory.unfinished = chunk.mend
        self._fill(chunk, sends, position)
        if chunk not in memory.kept:
            memory.kept[chunk] = None
            memory.loaded.pop(chunk, None)
        memory.count(chunk)
        self._count_sends(sends)
        memory.unfinished = None

    def _fill(self, chunk: Chunk, sends: Sequence[Send], position: int | None) -> None:
        first = chunk.first
        expiries = [send.expires_at_ms for send in sends]
        soonest = min([at for at in expiries if at], default=0) if any(expiries) else 0
        if soonest:
            chunk.soonest = min(chunk.soonest or soonest, soonest)
            self._expiring[chunk] = None
            self._soonest = min(self._soonest or soonest, soonest)
        chunk.extend(
            len(chunk.offsets), [send.seq - first for send in sends], [send.record for send in sends],
            expiries if soonest else (), position,
        )  # fmt: skip

    def _count_sends(self, sends: Sequence[Send]) -> None:
        state = sends[0].state
        self._host.catalog.count(state, len(sends), sum([len(send.record) for send in sends]))
        if state.is_topic:
            for send in sends:
                for known in send.entitled:
                    known.count += 1

    def _seal(self, chunk: Chunk) -> None:
        """Nothing more comes into it."""
        self._memory.unfinished = chunk.seal
        chunk.seal()
        if chunk.is_dead:
            self._drop(chunk)
        else:
            self._memory.count(chunk)
        self._memory.unfinished = None

    def ack(self, state: DestinationState, seq: int, number: int, place: Place | None) -> None:
        messages: DestinationMessages | None = state.own
        if messages is None:
            return
        spot: Spot | None = place[OWN] if place is not None else messages.find(seq)
        if spot is None:
            return
        chunk, index = spot
        if state.is_topic or chunk.counts:
            self._done(messages, chunk, BITS[index], number)
            return
        bit = BITS[index]
        if chunk.dead & bit:
            return
        memory = self._memory
        memory.unfinished = chunk.mend
        chunk.dead |= bit
        size = chunk.sizes[index]
        if index >= chunk.out:
            chunk.records[index - chunk.out] = None
            less = memory_of(size)
            chunk.resident -= less
            chunk.charge -= less
            memory.used -= less
        self._host.catalog.count(state, -1, -size)
        if (chunk.sealed or chunk.addresses) and chunk.dead == MASKS[len(chunk.offsets)]:
            self._drop(chunk)
        memory.unfinished = None

    def _done(self, messages: DestinationMessages, chunk: Chunk, mask: int, number: int) -> None:
        """Some messages of a chunk are dead for a subscription, or for all."""
        known = messages.subscriptions.get(number) if number else None
        if number and known is None:
            return  # it has ended
        mask &= messages.pending(known, chunk)
        if not mask:
            return
        self._memory.unfinished = chunk.mend
        kept = mask & messages.wanted(chunk, known) if known is not None else 0
        if kept:
            assert known is not None
            chunk.acked[number] = chunk.acked.get(number, 0) | kept
            known.count -= kept.bit_count()
            for key in [key for key in chunk.counts if key[0] == number and kept >> key[1] & 1]:
                chunk.counts.pop(key, None)
        self._kill(messages, chunk, mask & ~kept)
        if (chunk.sealed or chunk.addresses) and chunk.is_dead:
            self._drop(chunk)
        else:
            self._memory.count(chunk)
        self._memory.unfinished = None

    def _kill(self, messages: DestinationMessages, chunk: Chunk, mask: int) -> None:
        """Some messages of a chunk that live are dead for all."""
        if not mask:
            return
        for known in messages.subscriptions.values():
            known.count -= (messages.pending(known, chunk) & mask).bit_count()
        chunk.dead |= mask
        for index in indexes(mask >> chunk.out):
            chunk.records[index] = None
            chunk.resident -= memory_of(chunk.sizes[index + chunk.out])
        for key in [key for key in chunk.counts if mask >> key[1] & 1] if chunk.counts else ():
            chunk.counts.pop(key, None)
        self._host.catalog.count(messages.state, -mask.bit_count(), -chunk.bytes_of(mask))

    def _drop(self, chunk: Chunk) -> None:
        """Nothing of it lives. Idempotent, but for what is counted."""
        chunk.lane.drop(chunk)
        self._expiring.pop(chunk, None)
        self._memory.forget(chunk)

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        messages: DestinationMessages | None = state.own
        for chunk in messages.chunks() if messages is not None else ():
            if chunk.first > last or chunk.last < first:
                continue
            assert messages is not None
            self._done(messages, chunk, chunk.between(first, last), number)

    def returned(self, state: DestinationState, seq: int, number: int, count: int) -> None:
        messages: DestinationMessages | None = state.own
        spot = messages.find(seq) if messages is not None else None
        if messages is None or spot is None:
            return
        chunk, index = spot
        known = messages.subscriptions.get(number) if number else None
        if (number and known is None) or not messages.pending(known, chunk) >> index & 1:
            return
        self._memory.unfinished = nothing
        chunk.counts[number, index] = count
        self._memory.count(chunk)
        self._memory.unfinished = None

    def declare(self, state: DestinationState) -> None:
        if state.own is None:
            self._memory.unfinished = nothing
            state.own = DestinationMessages(state)
            self._memory.used += DESTINATION_COST
            self._memory.unfinished = None

    def remove(self, state: DestinationState) -> None:
        messages: DestinationMessages | None = state.own
        if messages is None:
            return
        memory = self._memory
        memory.unfinished = nothing
        for chunk in messages.chunks():
            chunk.dead |= chunk.live  # for who is browsing it
            self._drop(chunk)
        memory.used -= DESTINATION_COST * (1 + len(messages.subscriptions))
        state.own = None
        self._host.catalog.count(state, -state.count, -state.bytes)
        memory.unfinished = None

    def subscribe(self, known: SubscriptionState) -> None:
        messages: DestinationMessages = known.topic.own
        if known.number not in messages.subscriptions:
            self._memory.unfinished = nothing
            messages.subscriptions[known.number] = known
            known.count = sum(messages.pending(known, chunk).bit_count() for chunk in messages.chunks())
            self._memory.used += DESTINATION_COST
            self._memory.unfinished = None

    def unsubscribe(self, known: SubscriptionState) -> None:
        messages: DestinationMessages | None = known.topic.own
        if messages is None or known.number not in messages.subscriptions:
            return
        for chunk in messages.chunks():
            self._done(messages, chunk, messages.pending(known, chunk), known.number)
        self._memory.unfinished = nothing
        for chunk in messages.chunks():
            chunk.acked.pop(known.number, None)
            self._memory.count(chunk)
        messages.subscriptions.pop(known.number, None)
        self._memory.used -= DESTINATION_COST
        self._memory.unfinished = None

    def prepare(self, branch: Branch) -> None:
        self._prepared[branch.transaction] = _memory_of_branch(branch)
        self._memory.prepared = sum(self._prepared.values())

    def settled(self, branch: Branch, committed: bool) -> None:
        self._prepared.pop(branch.transaction, None)
        self._memory.prepared = sum(self._prepared.values())

    def forget(self, transactions: Sequence[bytes]) -> None:
        """Nothing is kept of them here."""

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
        if not self._soonest or now < self._soonest:
            return
        for chunk in list(self._expiring):
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
                self._expiring.pop(chunk, None)
        self._soonest = min((chunk.soonest for chunk in self._expiring), default=0)

    def limited(self, least: int) -> Iterable[tuple[Feed, int]]:
        for state in list(self._host.catalog.destinations.values()):
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
        memory, page, size = self._memory, list[bytes | None](), 0
        with self._host.lock:
            if memory.unfinished is not None:
                self._finish()
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
        if memory.unfinished is not None:
            self._finish()
        return BackendStats(memory_bytes=memory.used + memory.prepared, swap_bytes=self.swap.bytes)

    def check(self) -> Iterator[str]:
        if self._memory.unfinished is not None:
            self._finish()
        yield from check.violations(self._host.catalog, self._memory, self.swap)


def _memory_of_branch(branch: Branch) -> int:
    return sum(memory_of(len(send.record)) for send in branch.sends)


