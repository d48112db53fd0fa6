"""Removing destinations, subscriptions, and many messages: these a page at a time, so that others get their turn in
between. Those of a queue that is purged, and those that a removed destination, or a subscription that has ended, has
left behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import sleep
from typing import Final

from ....policies.errors import AnabranchError, ClosedError, OutcomeUnknownError, StoreFailedError
from ....policies.names.destination import Destination
from ...system.background import CoalescedJob
from ..engine.engine import Engine
from ..operations.changes import AckRange, Change
from ..operations.destination_changes import CloseGate, Remove, Unsubscribe
from ..operations.table import SEQ_MAX
from ..record.place import SEQ, Place
from ..state.gates import Gate
from ..state.leases import Channel, DestinationState, SubscriptionState, claimed
from ..state.states import Catalog
from ..store_types import SubscriptionKey
from .receiving import Receiving
from .sending import Sending
from .subscriptions import require_unclaimed, shown, unknown

log: logging.Logger = logging.getLogger(__name__)

PAGE: Final = 512
"""Messages that are looked at under the store's lock at once."""
PAGES: Final = 4
"""Pages whose messages are removed by one write."""
PAUSE: Final = 0.0005
"""Seconds after such a write: a lock that is free for a moment only goes to who had it, not to who waits for it."""

DROP_SECONDS: Final = 1.0
"""After so long the background removes what a removed destination has left behind, if nobody else does, and tries again
after an error."""

Write = Callable[[Sequence[Change]], object]

RowsOf = Callable[[DestinationState, SubscriptionState | None, None, int, int], Sequence[Place]]
"""A function as Rows.rows."""


class Removal:
    """The removal of messages, subscriptions and destinations in one open store. Threads: all."""

    def __init__(self, engine: Engine, sending: Sending, receiving: Receiving) -> None:
        self._engine, self._sending, self._receiving = engine, sending, receiving
        self._drop_job = drop_job = CoalescedJob(self._drop_in_background)
        engine.on_leaving = lambda: drop_job.schedule(DROP_SECONDS)  # which does not keep the store alive
        self._dropping = threading.RLock()  # a signal handler may come back to it in the same thread
        """Held for each write by who removes what something has left behind: two would do it twice."""

    def purge(self, destination: Destination, subscription: SubscriptionKey | None) -> int:
        """Purge a queue or a subscription, as Store.purge."""
        self._engine.settle()
        engine, write = self._engine, self._sending.write
        if subscription is not None:
            subscriber = self._receiving.subscription(destination, subscription)
            return purge(engine, subscriber.topic, (subscriber.channel,), write)[0]
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.require_here(destination)
            return 0
        free, gone = purge(engine, state, state.channels(), write)
        return gone if state.is_topic else free

    def delete(self, destination: Destination, moves: bool = False) -> int:
        """Delete a destination, as Store.delete. `moves`: a move does so, which no gate keeps out."""
        engine = self._engine
        engine.settle()
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.ensure_usable() if moves else engine.require_here(destination)
            return 0
        held, count = engine.asked(lambda: (sum(claimed(channel) for channel in state.channels()), state.total))
        require_unclaimed(str(destination), "deleted", held)
        self._remove(state, moves)
        return count

    def _remove(self, state: DestinationState, moves: bool) -> None:
        engine, remove = self._engine, Remove(state)
        self._sending.write([remove], moves=moves)
        volatile = engine.transient
        if volatile is not None:
            with suppress(ClosedError, StoreFailedError):  # with the store they are gone
                engine.asked(lambda: volatile.remove(state))
        engine.look_soon()  # so that nothing fetched ahead is received, nothing leased acked
        self._drop(remove.state.channel)

    def idle_mark(self, queue: Destination) -> object:
        """Return the mark of an idle queue, as Store.idle_mark."""
        state = self._engine.catalog.destinations.get(queue)
        return 0 if state is None else self._engine.asked(lambda: self._mark(state))

    def _mark(self, state: DestinationState) -> object:
        channel = state.channel
        if state.total or channel.is_needed or self._engine.sequencer.prepared:  # which may send there
            return None
        return state.number, channel.first.cursor, channel.levels.position if channel.levels is not None else 0

    def delete_if_idle(self, queue: Destination, gate: Gate) -> bool:
        """Delete a queue if it is idle, as Store.delete_if_idle."""
        engine, gates = self._engine, self._engine.sequencer.gates
        state = engine.catalog.destinations.get(queue)
        if state is None:
            engine.require_here(queue)
        if self.idle_mark(queue) is None or queue in gates:
            return False
        try:
            self._sending.write([CloseGate(gate)])  # what was sent before it is seen now, and nothing is sent behind it
            if engine.catalog.destinations.get(queue) is not state or self.idle_mark(queue) is None:
                return False
            if state is not None:
                self._remove(state, moves=True)
            return True
        finally:
            if gates.get(queue) is gate:
                gates.pop(queue, None)

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        """End a subscription, as Store.unsubscribe."""
        engine = self._engine
        engine.settle()
        subscriber = self._receiving.subscription(topic, subscription)
        held, count = engine.asked(lambda: (claimed(subscriber.channel), subscriber.total))
        require_unclaimed(f"the {shown(topic, subscription)}", "removed", held)
        ((ended, _),) = self._sending.write([Unsubscribe(subscriber.topic, subscription)])
        engine.look_soon()
        if ended is None:
            raise unknown(topic, subscription)
        self._drop(ended.channel)
        return count

    def _drop(self, channel: Channel) -> None:
        """Remove what is left of a destination that is no more. That it is gone stands: if this fails, or is
        interrupted, the background goes on, or the next opening."""
        try:
            self._drop_left(lambda other: (other.state.number, other.number) == (channel.state.number, channel.number))
        except AnabranchError as error:
            log.debug("store %s: %s is not removed whole yet: %s", self._engine.name, channel.state.destination, error)

    def drop_all(self) -> None:
        """Drop all that is left of what is gone."""
        self._drop_left(lambda channel: True)

    def _drop_left(self, is_asked_for: Callable[[Channel], bool]) -> None:
        """Remove what is left of these channels, persistent or transient."""
        engine, volatile = self._engine, self._engine.transient
        kinds: list[tuple[Catalog, RowsOf, Write]] = [(engine.catalog, engine.backend.rows, self._sending.write)]
        if volatile is not None:
            kinds.append((volatile.mirrors, volatile.mirror_rows, volatile.write_mirrors))
        for catalog, rows, write in kinds:
            for channel in filter(is_asked_for, list(catalog.leaving)):
                first: int | None = 0
                while first is not None:
                    first = self._drop_pages(catalog, rows, write, channel, first)
                    if first is not None:
                        sleep(PAUSE)

    def _drop_pages(self, catalog: Catalog, rows: RowsOf, write: Write, channel: Channel, first: int) -> int | None:
        """Drop some pages from the seq `first` on; return where to go on, None at the end. Nobody sees these messages
        any more, so that no page need know what somebody holds."""
        engine = self._engine
        with self._dropping:
            engine.check()
            with engine.lock:
                engine.current()
                if channel not in catalog.leaving:
                    return None
                last = _last_of_pages(rows, channel.state, first)
            write([AckRange(channel.state, first, SEQ_MAX if last is None else last, channel.number)])
        return None if last is None else last + 1

    def _drop_in_background(self) -> None:
        try:
            self.drop_all()
        except AnabranchError as error:
            log.debug("store %s: nothing more is removed now: %s", self._engine.name, error)
            if not self._engine.closed and self._engine.failed is None:
                self._drop_job.schedule(DROP_SECONDS)


def purge(engine: Engine, state: DestinationState, channels: Sequence[Channel], write: Write) -> tuple[int, int]:
    """Remove what nobody holds of these channels. Returns how many were free, of all channels together, and by how many
    messages the destination is less. Raises OutcomeUnknownError if the store fails, or is closed, once some are gone:
    tried again in the store that is opened next, it would tell of those that are left."""
    kinds: list[tuple[RowsOf, Write, bool]] = [(engine.backend.rows, write, True)]
    if engine.transient is not None:  # apart: the messages of one kind may lie between those of the other
        kinds.append((engine.transient.rows_alone, engine.transient.write, False))
    free = gone = 0
    for channel in channels:
        for rows, write_range, lasts in kinds:
            after: int | None = 0
            while after is not None:
                try:
                    found, less, after = _purge_some(engine, state, channel, after, rows, write_range)
                except (ClosedError, StoreFailedError) as error:
                    if not free:
                        raise
                    if not lasts:
                        break  # with the store these are gone
                    raise OutcomeUnknownError(f"{free} messages of {state.destination} are purged: {error}") from error
                free += found
                gone += less
                if after is not None:
                    sleep(PAUSE)
    return free, gone


def _purge_some(
    engine: Engine, state: DestinationState, channel: Channel, after: int, rows: RowsOf, write: Write
) -> tuple[int, int, int | None]:
    """Purge the next pages. Returns how many messages were free, by how many the destination is less, and the seq to go
    on behind, None at the end."""
    mark = object()
    try:
        engine.check()
        with engine.lock:
            engine.current()
            if state.removed or engine.is_gone(channel):
                return 0, 0, None
            ranges, count, last = _free_ranges(rows, state, channel, after)
            before = state.total
            if not ranges:
                return 0, 0, last
            channel.purging.add(mark)  # nobody shall receive what is about to go
        write([AckRange(state, first, to, channel.number) for first, to in ranges])
        engine.look_soon()
        less = max(before - state.total, 0)
    finally:
        channel.purging.discard(mark)
        channel.wake()
    return count, min(less, count), last


def _free_ranges(
    rows: RowsOf, state: DestinationState, channel: Channel, after: int
) -> tuple[list[tuple[int, int]], int, int | None]:
    """Return the seqs of some pages that nobody holds, as ranges between those that somebody holds, and how many; and
    the last seq that was looked at, None if there are no more."""
    ranges: list[tuple[int, int]] = []
    count = start = end = 0
    last: int | None = after
    for _ in range(PAGES):
        if last is None:
            break
        places = rows(state, channel.subscription, None, last, PAGE)
        for place in places:
            seq = place[SEQ]
            if seq in channel.held:
                if start:
                    ranges.append((start, end))
                start = 0
            else:
                start, end, count = start or seq, seq, count + 1
        last = places[-1][SEQ] if len(places) == PAGE else None
    if start:
        ranges.append((start, end))
    return ranges, count, last


def _last_of_pages(rows: RowsOf, state: DestinationState, first: int) -> int | None:
    """Return the last seq of the next pages, None if there are no more behind them."""
    after = max(first - 1, 0)
    for _ in range(PAGES):
        places = rows(state, None, None, after, PAGE)
        if len(places) < PAGE:
            return None
        after = places[-1][SEQ]
    return after
