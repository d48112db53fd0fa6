"""The sweep for messages not to be delivered any more: expired ones, and those that have reached the delivery limit.

Z1  Every message that expired by `_until` was looked at, is ahead in the walk that is under way, is held, or is
    remembered. So who ends a hold on one, or sends one, has it remembered.
Z2  A message is remembered until it is held or dead. If too many are, the next walk begins before them.

So a sweep costs what it finds: what is leased is passed once, and looked at again when its lease ends. Ctrl-C may
strike anywhere: a walk that it strikes is begun anew. All is under the store's lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ..messages import DELIVERY_LIMIT, EXPIRED
from ..record.place import EXPIRES, ORDER, SEQ, Place

if TYPE_CHECKING:
    from .leases import Channel, DestinationState
    from .rows import Rows

LOOKED_MAX: Final = 512
"""Messages that are looked at before others get their turn."""
REMEMBERED_MAX: Final = 10_000
"""Messages that are remembered of each sort (invariant 10)."""

Owner = TypeVar("Owner")

Take = Callable[["Sequence[Channel]", Place, str], bool]
"""Lease a message for that reason; false if there is no room for a lease. One that is held stays as it is."""


def wall_ms() -> int:
    """Return the time now, in milliseconds since the epoch: what expiry goes by."""
    return time.time_ns() // 1_000_000


class Remembered(Generic[Owner]):
    """Messages, by what they belong to; each owner's have their turn beside those of others."""

    __slots__ = ("_by_owner", "_count", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_owner: OrderedDict[Owner, OrderedDict[int, Place]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, owner: Owner, place: Place) -> bool:
        """Remember a message; return False if there are too many."""
        places = self._by_owner.get(owner)
        if places is not None and place[SEQ] in places:
            return True
        if self._count >= self._most:
            return False
        if places is None:
            places = self._by_owner[owner] = OrderedDict()
        places[place[SEQ]] = place
        self._count += 1
        return True

    def next(self) -> tuple[Owner, Place] | None:
        """Return the next message, which is the last from now on."""
        while self._by_owner:
            owner, places = next(iter(self._by_owner.items()))
            if places:
                seq, place = next(iter(places.items()))
                places.move_to_end(seq)
                self._by_owner.move_to_end(owner)
                return owner, place
            self._by_owner.pop(owner, None)  # who added to it was interrupted
        self._count = 0
        return None

    def drop(self, owner: Owner, seq: int) -> None:
        """Drop a message. Idempotent."""
        places = self._by_owner.get(owner)
        if places is not None and places.pop(seq, None) is not None:
            self._count -= 1
            if not places:
                self._by_owner.pop(owner, None)

    def forget(self, owner: Owner) -> None:
        """Forget all messages of one owner. Idempotent."""
        places = self._by_owner.pop(owner, None)
        if places is not None:
            self._count -= len(places)

    def clear(self) -> None:
        self._by_owner.clear()
        self._count = 0


class _Walk:
    """A walk over what a backend finds. Each stays the current one until `advance`, so that who is interrupted meets it
    again."""

    __slots__ = ("_current", "_found", "broken", "since")

    def __init__(self, since: int, found: Iterable[tuple[Any, Place]]) -> None:
        self.since = since
        self._found: Iterator[tuple[Any, Place]] = iter(found)
        self._current: tuple[Any, Place] | None = None
        self.broken = False
        """True if who asked for the next one was interrupted: there are no others."""

    def current(self) -> tuple[Any, Place] | None:
        """Return what the walk is at; None at the end."""
        if self._current is None:
            self.broken = True
            self._current = next(self._found, None)
            self.broken = False
        return self._current

    def advance(self) -> None:
        self._current = None


class Sweep:
    """The sweep of one store."""

    def __init__(self, max_deliveries: int | None) -> None:
        self._max_deliveries = max_deliveries
        self._expired: Remembered[DestinationState] = Remembered(REMEMBERED_MAX)
        self._limited: Remembered[Channel] = Remembered(REMEMBERED_MAX)
        self._since = 0
        """The next walk over what has expired begins behind this time (ms)."""
        self._until = 0
        """The latest walk goes to here."""
        self._walk: _Walk | None = None
        self._limited_walk: _Walk | None = None
        self._look_for_limited = max_deliveries is not None
        """There may be others than those that are remembered, and those ahead in a walk."""

    # Being told

    def may_be_expired(self, state: DestinationState, place: Place) -> None:
        """Note that a message which expires has come, or is not held any more by one who held it. May be said again,
        also of one that is dead."""
        if 0 < place[EXPIRES] <= self._until and not self._expired.add(state, place):
            self._since = min(self._since, place[EXPIRES] - 1)

    def is_limited(self, channel: Channel, place: Place) -> None:
        """Note that a message that nobody holds has reached the delivery limit. May be said again, also of one that is
        dead."""
        if not self._limited.add(channel, place):
            self._look_for_limited = True

    def forget(self, channel: Channel) -> None:
        """Forget a channel that is no more, or in which all is dead."""
        self._limited.forget(channel)
        if channel.subscription is None:
            self._expired.forget(channel.state)

    # Looking

    def find(self, rows: Rows, limit: int, take: Take, taken: Sequence[object]) -> bool:
        """Take what is not to be delivered, until there are so many `taken`. Returns whether there is more to look at,
        after others have had their turn."""
        now = wall_ms()
        if now < self._until:  # the clock went back
            self._walk, self._since = None, 0
            self._until = now
            self._expired.clear()
        of_expired = partial(self._take_expired, rows, take, now)
        if self._walk_expired(rows, now, limit, taken, of_expired):
            return True
        if _look_again(self._expired, limit, taken, of_expired):
            return True
        least = self._max_deliveries
        if least is None:
            return False
        of_limited = partial(self._take_limited, rows, take)
        return self._walk_limited(rows, least, limit, taken, of_limited) or _look_again(
            self._limited, limit, taken, of_limited
        )

    def _walk_expired(self, rows: Rows, now: int, limit: int, taken: Sequence[object], take: _TakeOne) -> bool:
        walk = self._walk
        if walk is not None and walk.broken:
            self._since = min(self._since, walk.since)
            walk = None
        if walk is None and now > self._since:
            self._until = now  # first: from now on who ends a hold has it remembered
            self._walk = walk = _Walk(self._since, rows.expired(self._since, now))
            self._since = now
        if walk is None or _go_on(walk, limit, taken, take, self.may_be_expired):
            return walk is not None
        self._walk = None
        return False

    def _walk_limited(self, rows: Rows, least: int, limit: int, taken: Sequence[object], take: _TakeOne) -> bool:
        walk = self._limited_walk
        if walk is not None and walk.broken:
            self._look_for_limited = True
            walk = None
        if walk is None and self._look_for_limited:
            self._limited_walk = walk = _Walk(0, rows.limited(least))
            self._look_for_limited = False
        if walk is None or _go_on(walk, limit, taken, take, self.is_limited):
            return walk is not None
        self._limited_walk = None
        return False

    def _take_expired(self, rows: Rows, take: Take, now: int, state: DestinationState, place: Place) -> bool:
        if state.removed:
            return True
        if place[EXPIRES] > now:
            return False  # it was remembered, and the clock went back
        seq = place[SEQ]
        if not state.is_topic and seq in state.channel.held:
            return True
        row = rows.row(state, None, seq, place[ORDER])
        if row is None:
            return True  # it is dead
        return take(rows.unacked(state, seq) if state.is_topic else (state.channel,), row, EXPIRED)

    def _take_limited(self, rows: Rows, take: Take, channel: Channel, place: Place) -> bool:
        if channel.state.removed or channel not in channel.state.channels(channel.number):
            return True  # its messages are still to go
        row = rows.row(channel.state, channel.subscription, place[SEQ], place[ORDER])
        return row is None or take((channel,), row, DELIVERY_LIMIT)


_TakeOne = Callable[[Any, Place], bool]
"""Take a message of an owner, if it is still there; false: it is to be looked at again."""


def _go_on(
    walk: _Walk, limit: int, taken: Sequence[object], take: _TakeOne, remember: Callable[[Any, Place], None]
) -> bool:
    """Go on with a walk; return whether there is more."""
    for _ in range(LOOKED_MAX):
        found = walk.current()
        if found is None:
            return False
        if len(taken) >= limit:
            return True
        if not take(*found):
            remember(*found)
        walk.advance()
    return True


def _look_again(remembered: Remembered[Any], limit: int, taken: Sequence[object], take: _TakeOne) -> bool:
    """Look again at each once, or at some of many. Returns whether there were too many to take."""
    for _ in range(min(len(remembered), LOOKED_MAX)):
        if len(taken) >= limit:
            return True
        found = remembered.next()
        if found is not None and take(*found):
            remembered.drop(found[0], found[1][SEQ])
    return False
