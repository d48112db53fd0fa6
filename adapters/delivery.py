"""Who holds which message, and which message is delivered next (invariant 2, rule X6): what all kinds of stores share.

H1  A message that nobody holds is in exactly one place: beyond the cursor of its lane, in the lane's `ready`, or in
    `returned`, or, if it is not to be delivered any more, nowhere but in the store (its time is over) and in `_spent`;
    in a second one after an interruption, or if it came back before it was fetched: `lease` gives it once.
H2  A message that somebody holds is in none of them: LEASED by a receiver, CLAIMED by a transaction, or LEAVING while
    its ack or its return is under way.
H3  Holds are memory alone: what a store does to its own state, such as restoring an index, does not touch them.

A topic's message is held for each subscription on its own, under the number `feed.base + seq`.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

from ..policies.errors import StoreFullError, UnknownMessageError
from .base import EXPIRED, PRIORITY_MAX, SPENT, Message, Store, SubscriptionKey, require_leased

log = logging.getLogger(__name__)

LEASED: Final = 1
CLAIMED: Final = 2
LEAVING: Final = 3

FETCH: Final = 64
"""How many messages a receive looks up ahead."""
SPENT_MAX: Final = 10_000
"""Of the messages that have come back too often, so many are remembered; the others are looked for once these are gone
(invariant 10)."""
CLOCK_SECONDS: Final = 1.0
"""Who waits where a message was passed over looks at the clock so often: it may go back."""

Place = tuple[Any, ...]
"""Where a message is: (order, seq, expires at in ms or 0, what else its store needs). Sorts by order, then seq."""

PLAIN_ORDERS: Final = (0,)
"""The orders of a store that knows no priorities."""
PRIORITY_ORDERS: Final = tuple(range(PRIORITY_MAX + 1))
"""Of one that does: `order_of` each priority, the highest first."""

SUBSCRIPTION_SHIFT: Final = 64


def order_of(priority: int, priorities: bool) -> int:
    """What comes before the seq in the order of delivery."""
    return PRIORITY_MAX - priority if priorities else 0


def wall_ms() -> int:
    """Now, in milliseconds since the epoch: what expiry goes by."""
    return time.time_ns() // 1_000_000


class Lane:
    """What has been fetched of one order of a feed."""

    __slots__ = ("cursor", "ready")

    def __init__(self) -> None:
        self.cursor = 0
        """All up to this seq has been fetched."""
        self.ready: deque[Place] = deque()


class Feed:
    """What one who receives draws from: a queue, or one subscription of a topic. All fields belong to the store's lock
    (the one under which Delivery's methods are called), but `waiters`."""

    __slots__ = ("base", "first", "key", "lanes", "number", "owner", "passed_at", "purging", "returned", "waiters")

    def __init__(self, owner: Any, number: int = 0, key: SubscriptionKey | None = None) -> None:
        self.owner = owner
        """The store's own."""
        self.number = number
        """Of the subscription in its store; 0 for a queue."""
        self.base = number << SUBSCRIPTION_SHIFT
        """Added to a seq, what the message is held under."""
        self.key = key
        """Of the subscription; None for a queue."""
        self.first = Lane()
        """The lane of order 0, the only one in a store without priorities."""
        self.lanes: dict[int, Lane] = {0: self.first}
        self.returned: list[Place] = []
        """A heap of what was released."""
        self.purging = 0
        """Purges under way: nothing is delivered meanwhile."""
        self.passed_at = 0
        """The latest time (ms) by which a message was passed over because its own was over; 0: none was."""
        self.waiters: list[Callable[[], object]] = []
        """Called once, when a message may have become free."""

    @property
    def has_ready(self) -> bool:
        """Whether something of the first order is fetched already: it comes before all that is yet to come. In a store
        with priorities something more urgent may come, unless it has the highest."""
        return bool(self.first.ready) and not self.passed_at

    def lane(self, order: int) -> Lane:
        lane = self.lanes.get(order)
        if lane is None:
            lane = self.lanes[order] = Lane()
        return lane

    def rewind(self) -> None:
        """Fetch everything anew. Wherever Ctrl-C strikes nothing is out of sight: cursors go first."""
        for lane in self.lanes.values():
            lane.cursor = 0
            lane.ready.clear()
        self.returned.clear()
        self.passed_at = 0

    def wake(self) -> None:
        """Tell all that wait for a message here. Any thread may."""
        while self.waiters:
            try:
                self.waiters.pop()()
            except (IndexError, RuntimeError):
                pass  # another thread woke it


class Source(Protocol):
    """What a store knows of its messages. Asked under the store's lock."""

    def orders(self, feed: Feed) -> Sequence[int]:
        """PLAIN_ORDERS or PRIORITY_ORDERS."""

    def fetch(self, feed: Feed, order: int, after: int, limit: int) -> Sequence[Place]:
        """The first `limit` messages of this order, by seq, from the one after seq `after`: those that the subscription
        has yet to ack. Whether somebody holds them, or their time is over, is not the source's affair."""

    def place(self, feed: Feed, seq: int) -> Place | None:
        """Where one message is; None if it is dead, or acked by the subscription."""

    def deliveries(self, feed: Feed, seq: int) -> int:
        """How often it has come back."""

    def expired(self, now: int) -> Iterable[tuple[Sequence[Feed], Place]]:
        """Those whose time is over by now (ms), in any order: each with the feeds that have yet to ack it."""

    def spent(self, least: int) -> Iterable[tuple[Feed, int]]:
        """Feed and seq of those that have come back so often or oftener. Asked for at open and when there are many."""


Lost = tuple[tuple[Feed, ...], Place, str]
"""What take_undelivered leases: the feeds it is held for, where it is, and EXPIRED or SPENT."""

Note = Feed | tuple[Feed, ...]
"""What a store keeps in Message.note: the feed it was leased from, or those it was leased for by take_undelivered."""


def feeds_of(note: Note) -> tuple[Feed, ...]:
    return note if isinstance(note, tuple) else (note,)


class Delivery:
    """Of one store. `held` changes under `_lock`, or by one step under the store's lock; feeds under the store's."""

    def __init__(self, name: str, max_leases: int, max_deliveries: int | None = None) -> None:
        self._name = name
        self._max_leases = max_leases
        self._max_deliveries = max_deliveries
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread
        self.held: dict[int, tuple[Feed, int]] = {}
        """feed.base + seq -> who draws it, and how it is held."""
        self._waiting: set[object] = set()
        self._spent: dict[int, Feed] = {}
        """feed.base + seq of messages that have come back as often as `max_deliveries` says."""
        self._look_for_spent = max_deliveries is not None
        """There may be others than those in `_spent`."""

    @property
    def waiting(self) -> int:
        """Threads that wait for a message, and watches."""
        return len(self._waiting)

    # Leasing. Under the store's lock

    def lease(self, feed: Feed, source: Source) -> Place | None:
        """Take the first message that nobody holds and that is to be delivered. All that has returned is in the source;
        if `feed.has_ready` it need not be, unless this returns None. Call `require_room` before.

        A message leaves its place only once it is held: Ctrl-C in between makes it seen twice here, not passed over.
        """
        if feed.purging:
            return None  # what is free is about to go
        if feed.passed_at and wall_ms() < feed.passed_at:
            feed.rewind()
        held, returned, base = self.held, feed.returned, feed.base
        lane: Lane | None
        while True:
            lane = feed.first
            if not lane.ready:
                lane = self._first(feed, source)
            if returned and (lane is None or returned[0] < lane.ready[0]):
                place = returned[0]
                # An interrupted ack of it may have been under way when it was released.
                free = base + place[1] not in held and source.place(feed, place[1]) == place
                free = free and self._deliverable(feed, place, source)
                if free:
                    held[base + place[1]] = (feed, LEASED)
                heapq.heappop(returned)
            elif lane is not None:
                place = lane.ready[0]
                free = base + place[1] not in held and (
                    (not place[2] and self._max_deliveries is None) or self._deliverable(feed, place, source)
                )
                if free:
                    held[base + place[1]] = (feed, LEASED)
                lane.ready.popleft()
            else:
                return None
            if free:
                return place

    def _first(self, feed: Feed, source: Source) -> Lane | None:
        """The first lane that has something ready."""
        for order in source.orders(feed):
            lane = feed.lane(order)
            if lane.ready or self._fetch(feed, order, lane, source):
                return lane
        return None

    def _fetch(self, feed: Feed, order: int, lane: Lane, source: Source) -> bool:
        """Look some ahead; False if nobody holds none. What a transaction prepared before this open has claimed is
        passed over: a rollback brings it back, after a commit nothing would tell that it is dead."""
        held, base = self.held, feed.base
        while places := source.fetch(feed, order, lane.cursor, FETCH):
            lane.ready.extend(place for place in places if base + place[1] not in held)
            lane.cursor = places[-1][1]
            if lane.ready:
                return True
        return False

    def _deliverable(self, feed: Feed, place: Place, source: Source) -> bool:
        if place[2]:
            now = wall_ms()
            if place[2] <= now:
                feed.passed_at = max(now, feed.passed_at)
                return False
        if self._is_spent(feed, place[1], source):
            self._spend(feed, place[1])
            return False
        return True

    def _is_spent(self, feed: Feed, seq: int, source: Source, count: int | None = None) -> bool:
        if self._max_deliveries is None:
            return False
        return (source.deliveries(feed, seq) if count is None else count) >= self._max_deliveries

    def _spend(self, feed: Feed, seq: int) -> None:
        if len(self._spent) < SPENT_MAX:
            self._spent[feed.base + seq] = feed
        else:
            self._look_for_spent = True

    def anything(self, feed: Feed, source: Source) -> bool:
        """Whether `lease` may find something, all that is pending being in the source."""
        if feed.purging:
            return False
        if feed.returned or (feed.passed_at and wall_ms() < feed.passed_at):
            return True
        lanes = ((order, feed.lane(order)) for order in source.orders(feed))
        return any(lane.ready or source.fetch(feed, order, lane.cursor, 1) for order, lane in lanes)

    def require_room(self) -> None:
        """Raise StoreFullError at the limit of leases."""
        if len(self.held) >= self._max_leases:
            raise StoreFullError(
                f"{len(self.held)} messages of store {self._name!r} are leased; max_leases is {self._max_leases}: "
                "ack or release some"
            )

    def at_limit(self) -> bool:
        return len(self.held) >= self._max_leases

    def take_undelivered(self, limit: int, source: Source, found: list[Lost] | None = None) -> list[Lost]:
        """Lease up to so many of those that are not to be delivered; fewer at the limit of leases. They are added to
        `found` before they are leased, so that a caller who is interrupted knows which to `unlease`."""
        limit = min(limit, self._max_leases - len(self.held))
        taken = [] if found is None else found
        try:
            for feeds, place, reason in self._undelivered(source):
                if len(taken) >= limit:
                    break
                self._lease_all(tuple(feeds), place, reason, taken)
        except BaseException:
            if found is None:
                for feeds, place, _ in taken:
                    self.unlease(feeds, place[1], source)
            raise
        return taken

    def _lease_all(self, feeds: tuple[Feed, ...], place: Place, reason: str, found: list[Lost]) -> None:
        """Unless somebody holds it for one of the feeds."""
        seq = place[1]
        with self._lock:
            if feeds and not any(feed.base + seq in self.held for feed in feeds):
                found.append((feeds, place, reason))
                for feed in feeds:
                    self.held[feed.base + seq] = (feed, LEASED)

    def _undelivered(self, source: Source) -> Iterator[tuple[Sequence[Feed], Place, str]]:
        for feeds, place in source.expired(wall_ms()):
            yield feeds, place, EXPIRED
        if self._max_deliveries is None:
            return
        if self._look_for_spent and not self._spent:
            for feed, seq in source.spent(self._max_deliveries):
                if len(self._spent) >= SPENT_MAX:
                    break
                self._spent[feed.base + seq] = feed
            else:
                self._look_for_spent = False
        for key, feed in list(self._spent.items()):
            found = source.place(feed, key - feed.base) if key not in self.held else None
            if found is not None:
                yield (feed,), found, SPENT
            self._spent.pop(key, None)  # it is held now, by whom does not matter: who gives it back says so again

    # Settling

    def take(self, store: Store, messages: Sequence[Message], before: int, after: int) -> list[tuple[Note, int]]:
        """Move all from one hold to another, or none. Returns their notes and seqs. Raises UnknownMessageError."""
        taken: list[tuple[Note, int]] = []
        held = self.held
        with self._lock:
            for message in messages:
                feed, seq = message.note, message.seq
                if (
                    type(feed) is not Feed
                    or held.get(feed.base + seq) != (feed, before)
                    or message.store is not store
                    or not message.leased
                ):
                    if message.store is store and message.leased and self._take_all(feed, seq, before, after):
                        taken.append((feed, seq))
                        continue
                    for note, again in taken:
                        self._move(note, again, after, before)
                    require_leased(message)
                    raise UnknownMessageError(
                        f"{message!r} is not {'leased' if before == LEASED else 'claimed'} here any more: it was "
                        "acked, released or claimed by a transaction"
                    )
                held[feed.base + seq] = (feed, after)
                taken.append((feed, seq))
        return taken

    def _take_all(self, note: Note | None, seq: int, before: int, after: int) -> bool:
        """One that take_undelivered leased for several feeds; some of them may be gone by now, not all."""
        return isinstance(note, tuple) and self._move(note, seq, before, after)

    def _move(self, note: Note, seq: int, before: int, after: int) -> bool:
        moved = False
        for feed in feeds_of(note):
            if self.held.get(feed.base + seq) == (feed, before):
                self.held[feed.base + seq] = (feed, after)
                moved = True
        return moved

    def put_back(self, messages: Iterable[Message], hold: int) -> None:
        """What was LEAVING and is still there is held again: its ack has failed, or was interrupted."""
        with self._lock:
            for message in messages:
                if message.note is not None:
                    self._move(message.note, message.seq, LEAVING, hold)

    def give_back(self, messages: Iterable[Message], source: Source) -> None:
        """What was LEAVING is free, each at its old place. Under the store's lock, all that is pending in the source.

        Who gave a message back cannot do anything with it any more, be it held again by somebody else.
        """
        for message in messages:
            if message.note is not None:
                self.unlease(feeds_of(message.note), message.seq, source)
                message.note = None

    def unlease(self, feeds: Iterable[Feed], seq: int, source: Source) -> None:
        """Whoever leased it was interrupted before the message was read: it is free, at its old place."""
        for feed in feeds:
            self.free(feed, seq, source)

    def free(self, feed: Feed, seq: int, source: Source, count: int | None = None) -> None:
        """Nobody holds it any more. Under the store's lock. `count`: how often it has come back, if the source does not
        know yet."""
        key = feed.base + seq
        if key in self.held:  # else the feed is gone, or it was acked for all
            place = source.place(feed, seq)
            if place is not None:
                if self._is_spent(feed, seq, source, count):
                    self._spend(feed, seq)
                else:
                    heapq.heappush(feed.returned, place)
            self.held.pop(key, None)
        feed.wake()

    def acked(self, feed: Feed, seq: int) -> None:
        """It is dead for this feed."""
        self.held.pop(feed.base + seq, None)

    def claim_again(self, claims: Iterable[tuple[Note, int]]) -> None:
        """At open: what a prepared transaction acks is claimed, before anybody can receive (rule X6)."""
        for note, seq in claims:
            for feed in feeds_of(note):
                self.held[feed.base + seq] = (feed, CLAIMED)

    def gone(self, feed: Feed) -> None:
        """The feed is no more, or all in it is dead, held or not. Under the store's lock."""
        for lane in feed.lanes.values():
            lane.ready.clear()
        feed.returned.clear()
        for key in [key for key, (holder, _) in list(self.held.items()) if holder is feed]:
            self.held.pop(key, None)
        for key in [key for key, holder in list(self._spent.items()) if holder is feed]:
            self._spent.pop(key, None)
        feed.wake()

    def purged(self, feed: Feed, source: Source) -> None:
        """Some of its free messages are dead. Under the store's lock, the purge in the source."""
        for lane in feed.lanes.values():
            lane.ready = deque(p for p in lane.ready if source.place(feed, p[1]) == p)
        feed.returned = [p for p in feed.returned if source.place(feed, p[1]) == p]
        heapq.heapify(feed.returned)

    def claimed(self, feed: Feed) -> int:
        """How many of its messages transactions have claimed."""
        return sum(holder is feed and hold == CLAIMED for holder, hold in list(self.held.values()))

    # Waiting

    def wait(self, feed: Feed, deadline: float | None, anything: Callable[[], bool]) -> bool:
        """Wait for a message, a release, a failure or close; False when the time (monotonic, in seconds) is over.

        `anything` looks whether there is a message, after the waiter is in place: who sends from then on sees the
        waiter, who sent before is seen.
        """
        waiter = threading.Lock()
        waiter.acquire()
        wake = waiter.release
        try:
            self._waiting.add(waiter)
            feed.waiters.append(wake)
            if anything():
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if feed.passed_at and (left is None or left > CLOCK_SECONDS):
                waiter.acquire(timeout=CLOCK_SECONDS)
                return True
            return waiter.acquire(timeout=-1 if left is None else left)
        finally:
            self._waiting.discard(waiter)
            try:
                feed.waiters.remove(wake)
            except ValueError:
                pass  # who woke it took it out

    def watch(self, feed: Feed, wake: Callable[[], None]) -> Callable[[], None]:
        """Store.watch of one feed."""
        watch = _Watch(feed, wake, self._waiting)
        self._waiting.add(watch)
        feed.waiters.append(watch)
        return watch.end


class _Watch:
    """A waiter that is told by a call."""

    def __init__(self, feed: Feed, wake: Callable[[], None], waiting: set[object]) -> None:
        self._feed, self._wake, self._waiting = feed, wake, waiting

    def __call__(self) -> None:
        self._waiting.discard(self)
        try:
            self._wake()
        except Exception:  # who sends or releases must not pay for it
            log.exception("who watches a destination raised an error when told that a message may be free")

    def end(self) -> None:
        self._waiting.discard(self)
        try:
            self._feed.waiters.remove(self)
        except ValueError:
            pass  # it was told
