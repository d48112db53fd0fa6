"""The messages that a full store drops, and what is said of them: `when_full: drop_new`, `drop_old`.

D7  What somebody holds never goes: leased, claimed, acked by a prepared branch, being purged. What is to go is held
    itself, LEAVING, from when it is chosen until its ack is applied, in one write with what takes its place.
    A map's values never go.
D8  A topic's message goes for all its subscriptions, or stays for all: if one of them holds it.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from .....policies.errors import CorruptionError
from .....policies.names.destination import Destination
from ....system.background import CoalescedJob
from ...record.place import SEQ, Place, is_volatile
from ...state.leases import LEAVING, DestinationState, Lease
from ...state.limits import NOTHING, Amount, Grant, Room

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...state.states import Catalog

log: logging.Logger = logging.getLogger(__name__)

PAGE: Final = 64
"""Messages that are looked up at once."""
FORGET_AFTER: Final = 1000
"""Searches after which destinations that are gone are forgotten."""
Begin = tuple[int, int, DestinationState]
"""A seq, the number of a destination that has no message below it, the destination."""
LOG_SECONDS: Final = 60.0
SHOWN: Final = 5
"""Destinations that a line of the log names."""


class _Heap:
    """All destinations but maps, each with a seq below which it has no message, as far as that was looked up. The
    search of all messages has one, and that of transient ones another."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._begins: list[Begin] | None = None
        """None: to be made anew, also after an interruption."""
        self._known: set[DestinationState] = set()
        """Destinations in it."""
        self._seen = 0
        """How many had come to the catalog."""
        self._taken: list[Begin] | None = None
        """The heap, while it is searched."""
        self._searches = 0
        self.found: list[Begin] = []
        """What is known of the destinations that the search has taken out of it."""

    def take(self) -> list[Begin]:
        """Return the heap for a search, with those that are new in it. Others may add some meanwhile."""
        catalog = self._catalog
        begins, self._begins = self._begins, None
        self._searches += 1
        if begins is None:
            begins, self._known, self._seen = [], set(), 0
        elif self._searches % FORGET_AFTER == 0 or len(begins) > 2 * len(catalog.by_number) + PAGE:
            begins = [begin for begin in begins if catalog.by_number.get(begin[1]) is begin[2]]
            heapq.heapify(begins)
            self._known, self._seen = {state for _, _, state in begins}, 0
        with catalog.lock:
            new = list(islice(reversed(catalog.by_number.values()), catalog.added - self._seen))
            self._seen = catalog.added
        for state in new:
            if state not in self._known and not state.is_map:
                self._known.add(state)
                heapq.heappush(begins, (0, state.number, state))
        self._taken, self.found = begins, []
        return begins

    def keep(self) -> None:
        """Keep the heap, with what was found of the destinations that a search has taken out of it. Not where that was
        interrupted: it is made anew."""
        if self._taken is not None:
            for begin in self.found:
                heapq.heappush(self._taken, begin)
            self._begins, self._taken = self._taken, None

    def forget(self) -> None:
        """Forget a search that has ended early, or has met all there is: the heap is made anew then."""
        self._taken = None


class Oldest:
    """The messages of one store, the oldest first. Under its lock, with all that has returned applied."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._all, self._transient = _Heap(engine.catalog), _Heap(engine.catalog)

    def take(self, lacking: Mapping[Room, Amount], grant: Grant, sized: bool) -> set[Room]:
        """Hold so much, of the oldest that nobody holds, that each room has what it lacks. Returns those that still
        lack some: then all that could go is held. `sized`: it matters how large they are."""
        short = set()
        for room in sorted(lacking, key=lambda room: room.state is None):  # the narrow ones first: theirs count for all
            heap = self._transient if room.volatile else self._all
            heap.forget()
            for lease in self._free(room, heap):
                if self._is_enough(lacking[room], self.amounts(grant, [room])[room]):
                    break
                self._hold(lease, grant, sized)
            heap.keep()
            if not self._is_enough(lacking[room], self.amounts(grant, [room])[room]):
                short.add(room)
        return short

    @staticmethod
    def _is_enough(lack: Amount, going: Amount) -> bool:
        return going[0] >= lack[0] and going[1] >= lack[1]

    def amounts(self, grant: Grant, rooms: Iterable[Room]) -> dict[Room, Amount]:
        """Return how much of each room the messages that are to go leave free."""
        found = dict.fromkeys(rooms, NOTHING)
        for lease, size in zip(grant.evicted, grant.sizes, strict=False):
            for room in found:
                state = lease.channels[0].state
                if room.state in (None, state) and (not room.volatile or is_volatile(lease.place)):
                    count, total = found[room]
                    found[room] = count + 1, total + size
        return found

    def give_back(self, grant: Grant) -> None:
        """Give back all that is held. Idempotent."""
        for lease in grant.evicted:
            self._engine.delivery.unlease(lease, self._engine.rows)
        grant.evicted, grant.sizes = [], []

    def _hold(self, lease: Lease, grant: Grant, sized: bool) -> None:
        seq, size = lease.seq, 0
        if sized:
            try:
                rows, state = self._engine.rows, lease.channels[0].state
                record = self._engine.reading(lambda: next(iter(rows.bodies(state, [lease.place])), None))
            except CorruptionError:  # it is there to be received, and told of
                return
            if record is None:
                return
            size = len(record) + (self._engine.bodies.size_at(state, seq) if self._engine.bodies is not None else 0)
        grant.sizes.append(size)
        grant.evicted.append(lease)  # first: who is interrupted knows what to give back
        for channel in lease.channels:
            channel.held[seq] = lease
            channel.remove_fetched(seq, seq)

    def _free(self, room: Room, heap: _Heap) -> Iterator[Lease]:
        """Yield leases of what nobody holds, not held yet."""
        if room.state is not None:
            if room.state.is_map:
                return
            places = self._places(room.state, room.volatile, 0)
            yield from (lease for place in places if (lease := self._lease(room.state, place)) is not None)
            return
        for _ in range(2):  # what is applied late may lie below what was known of its destination
            yield from self._in_order(heap.take(), heap.found, room.volatile)
            heap.forget()

    def _in_order(self, begins: list[Begin], found: list[Begin], volatile: bool) -> Iterator[Lease]:
        """Yield leases of what nobody holds in these destinations, the oldest first. A destination is taken out of the
        heap once its turn may have come; `found` gets what is known of it then."""
        heap: list[tuple[int, int, DestinationState, Iterator[Place], Place]] = []
        while begins or heap:
            if begins and (not heap or begins[0][0] <= heap[0][0]):
                begin, number, state = heapq.heappop(begins)
                if state.removed:  # what is left of it counts no more
                    continue
                places = self._places(state, volatile, max(begin - 1, 0))
                place = next(places, None)
                found.append((place[SEQ] if place else self._engine.applied_seq + 1, number, state))
                if place is not None:
                    heapq.heappush(heap, (place[SEQ], number, state, places, place))
                continue
            _, number, state, places, place = heap[0]
            if (lease := self._lease(state, place)) is not None:
                yield lease
            following = next(places, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (following[SEQ], number, state, places, following))

    def _places(self, state: DestinationState, volatile: bool, after: int) -> Iterator[Place]:
        engine = self._engine
        of_all = engine.rows.rows
        if volatile and engine.transient is not None:
            of_all = engine.transient.rows_alone
        while True:
            places = of_all(state, None, None, after, PAGE)
            yield from places
            if len(places) < PAGE:
                return
            after = places[-1][SEQ]

    def _lease(self, state: DestinationState, place: Place) -> Lease | None:
        """Return a lease; None if somebody holds the message, or it is gone."""
        channels = tuple(self._engine.rows.unacked(state, place[SEQ])) if state.is_topic else (state.channel,)
        if not channels or any(place[SEQ] in channel.held or channel.purging for channel in channels):
            return None
        return Lease(channels, place, LEAVING, state.is_topic)


class DropLog:
    """The log of messages that a store has dropped: counted, and logged at once and then each minute. Threads: all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self.count: int = 0
        """Messages, since open."""
        self._new: Counter[Destination] = Counter()
        """Since it was logged last: those that were not stored, and those that had to go."""
        self._old: Counter[Destination] = Counter()
        self._job = CoalescedJob(self._tell_later)
        self._quiet = True

    def new(self, destinations: Iterable[Destination]) -> None:
        """Note that messages sent there are not stored."""
        self._add(self._new, destinations)

    def old(self, leases: Iterable[Lease]) -> None:
        """Note that the messages of these leases are dropped."""
        self._add(self._old, (lease.channels[0].state.destination for lease in leases))

    def _add(self, counts: Counter[Destination], destinations: Iterable[Destination]) -> None:
        with self._lock:
            for destination in destinations:
                counts[destination] += 1
                self.count += 1
            if self._quiet and (self._new or self._old):
                self._quiet = False
                self._tell()
                self._job.schedule(LOG_SECONDS)

    def _tell_later(self) -> None:
        with self._lock:
            if not self._new and not self._old:
                self._quiet = True
                return
            self._tell()
        self._job.schedule(LOG_SECONDS)

    def _tell(self) -> None:
        for counts, what in ((self._new, "not stored"), (self._old, "dropped to make room")):
            if counts:
                shown = [f"{count} of {destination}" for destination, count in counts.most_common(SHOWN)]
                more = f" and of {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
                log.warning(
                    "store %s is full: %d messages were %s since this was said last: %s%s",
                    self._name, counts.total(), what, ", ".join(shown), more,
                )  # fmt: skip
                counts.clear()
