"""Destinations and subscriptions, the channels of both, and the leases of what is received there. They refer to each
other, so they stand together. Delivery (delivery.py) has the rules."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ....policies.errors import UnknownMessageError
from ....policies.names.destination import Destination, Kind
from ..record.place import SEQ, Place
from ..store_types import Subscription, SubscriptionKey
from .priorities import Level, Levels

if TYPE_CHECKING:
    from ..messages import MessageStore
    from .gates import Gate
    from .stack import Stack

LEASED: Final = 1
CLAIMED: Final = 2
LEAVING: Final = 3
MOVING: Final = 4
MOVED: Final = 5

ACKED: Final = "it was acked"
RELEASED: Final = "it was released"
REJECTED: Final = "it was rejected"
ROLLED_BACK: Final = "a transaction that had it was rolled back, or has released it"
LEFT_BEHIND: Final = "its destination has moved to another store, or may have, where others may receive it again"
UNKNOWN: Final = (
    "it was acked or released, its lease ran out, its queue is gone, or its store was opened anew since, by the next "
    "process that owns the directory say"
)


def unknown_lease(token: str, why: str | None = None) -> UnknownMessageError:
    """Return the error of a token that stands for no lease here."""
    return UnknownMessageError(f"the message of token {token} is not leased here any more: {why or UNKNOWN}")


class _Counted:
    """The messages of a destination, or those that a subscription has yet to ack, with the transient ones of its
    mirror."""

    __slots__ = ()
    count: int
    delayed: int
    volatile: Any

    @property
    def total(self) -> int:
        """Return how many there are, persistent or not."""
        return self.count + (self.volatile.count if self.volatile is not None else 0)

    @property
    def total_delayed(self) -> int:
        """Return how many of them wait for their time."""
        return self.delayed + (self.volatile.delayed if self.volatile is not None else 0)


class SubscriptionState(_Counted):
    """One durable subscription of a topic. All fields belong to the store's lock."""

    __slots__ = (
        "channel",
        "count",
        "delayed",
        "expired",
        "number",
        "own",
        "start",
        "subscription",
        "topic",
        "volatile",
    )

    def __init__(self, number: int, topic: DestinationState, subscription: Subscription, start: int) -> None:
        self.number: int = number
        """In this store, for life."""
        self.topic: Final = topic
        self.subscription: Subscription = subscription
        self.start: Final = start
        """Messages from the one after this seq on are for it; of those before, none."""
        self.count: int = 0
        """Messages that it has yet to ack. The backend counts them."""
        self.delayed: int = 0
        """Messages among them that wait for their time, for the subscription alone or for all. The backend counts
        them."""
        self.expired: int = 0
        """Messages that it never acked, for their time was over; since open."""
        self.volatile: SubscriptionState | None = None
        """The mirror, as of its topic."""
        self.channel: Channel = Channel(topic, self)
        self.own: Any = None
        """The backend's."""


class DestinationState(_Counted):
    """One queue, topic or map. All fields belong to the store's lock, but `declared`, which is the writer's."""

    __slots__ = (
        "at_limit",
        "bytes",
        "channel",
        "count",
        "declared",
        "delayed",
        "destination",
        "expired",
        "is_map",
        "is_topic",
        "number",
        "own",
        "removed",
        "room",
        "subscriptions",
        "volatile",
    )  # fmt: skip

    def __init__(self, number: int, destination: Destination) -> None:
        self.number: int = number
        """In this store, for life."""
        self.destination: Destination = destination
        self.is_topic: Final = destination.kind is Kind.TOPIC
        self.is_map: Final = destination.kind is Kind.MAP
        """Its messages are values, and their ids the keys (keyed.py)."""
        self.declared: bool = False
        """True if what is written gives the number its name already."""
        self.removed: bool = False
        """True if the destination was removed, and its number is never used again: a destination of its name is another
        state."""
        self.count: int = 0
        """Messages held, and their bytes. The backend counts them: `Catalog.count`."""
        self.bytes: int = 0
        self.delayed: int = 0
        """Messages that wait for their time, of a topic those that do so for all. The backend counts them."""
        self.expired: int = 0
        """Messages that are gone since their time was over; since open."""
        self.at_limit: dict[Channel, None] = {}
        """Its channels where somebody waits who got nothing, since as many messages are leased as may be."""
        self.channel: Channel = Channel(self)
        """The channel of a queue."""
        self.subscriptions: dict[SubscriptionKey, SubscriptionState] = {}
        """Replaced, not changed, so that other threads may walk it."""
        self.own: Any = None
        """The backend's."""
        self.room: Any = None
        """The quotas': its limit, once one is sent to it that has one (rooms.py)."""
        self.volatile: DestinationState | None = None
        """The mirror for transient messages; None before the first (transient/messages.py)."""

    def recipients(self, seq: int) -> list[SubscriptionState]:
        """Return the subscriptions that a message of this seq is for."""
        return [subscriber for subscriber in self.subscriptions.values() if subscriber.start < seq]

    def channels(self, number: int = 0) -> tuple[Channel, ...]:
        """Return a queue's channel; of a topic those of all its subscriptions, or of the one with this number."""
        if not self.is_topic:
            return (self.channel,)
        return tuple(
            subscriber.channel for subscriber in self.subscriptions.values() if number in (0, subscriber.number)
        )

    def join(self, subscriber: SubscriptionState) -> None:
        """Add a subscription. Idempotent."""
        self.subscriptions = {**self.subscriptions, subscriber.subscription.key: subscriber}

    def leave(self, subscriber: SubscriptionState) -> None:
        """Remove a subscription. Idempotent."""
        self.subscriptions = {key: other for key, other in self.subscriptions.items() if other is not subscriber}


class Groups(Protocol):
    """The groups of a channel's messages (features/groups.py), as delivery asks of them. Under the store's lock."""

    @property
    def holds_back(self) -> bool:
        """Return whether a message may be held back, since another of its group is held."""

    def bring(self) -> None:
        """Put the next message of each group that has become free among those that have returned."""

    def lets(self, place: Place, ready: deque[Place] | None = None) -> bool:
        """Return whether a message may be leased. If not it is held back from now on, and may leave its place. `ready`:
        what was fetched, if it is the first of that."""

    def lets_plainly(self, place: Place) -> bool:
        """Return whether it is known, whatever is not applied yet, that a message has no group and that none held back
        comes before it."""

    def left(self, seq: int) -> None:
        """Note that a message has left those that have returned, and was not leased."""

    def look_at(self, seq: int | None) -> None:
        """Look, with the next `bring`, whether this message still holds its group; None: whether any does that."""

    def look_ahead(self, ready: deque[Place] | None) -> None:
        """Look at what was just fetched, of which nothing is leased yet. If it may have groups, or is None, the channel
        has `groups` from now on."""

    def forget(self) -> None:
        """Forget what is held back: all is fetched anew."""

    def share(self, channel: Channel) -> None:
        """Have another channel of the same topic look for groups, too."""


class Channel:
    """The source that a consumer draws from: a queue, or one subscription of a topic. All fields belong to the store's
    lock (the one under which Delivery's methods are called)."""

    __slots__ = (
        "first",
        "groups",
        "held",
        "levels",
        "listeners",
        "newest",
        "passed_at",
        "purging",
        "receivers",
        "returned",
        "returned_places",
        "stack",
        "state",
        "subscription",
        "unsure",
    )  # fmt: skip

    def __init__(self, state: DestinationState, subscription: SubscriptionState | None = None) -> None:
        self.state: DestinationState = state
        self.subscription: SubscriptionState | None = subscription
        """None for a queue."""
        self.first: Level = Level()
        """The level of what was fetched in a store without priorities."""
        self.levels: Levels | None = None
        """The levels of what was fetched in a store with priorities. None: nothing."""
        self.held: dict[int, Lease] = {}
        """By seq."""
        self.returned: list[tuple[int, int]] = []
        """A heap of what was released: order and seq."""
        self.returned_places: dict[int, Place] = {}
        """Places of what was released, by seq."""
        self.newest: int = 0
        """The seq of the message that was leased last as the newest."""
        self.stack: Stack | None = None
        """The last messages, looked up ahead; None: the rows tell which is the last."""
        self.purging: set[object] = set()
        """Purges under way: nothing is delivered meanwhile."""
        self.passed_at: int = 0
        """The latest time (ms) by which a message was skipped because it had expired; 0: none was."""
        self.receivers: dict[Receiver, None] = {}
        """Receivers that wait for a message, in the order in which they came."""
        self.listeners: dict[Receiver, None] = {}
        """Listeners, which come again, in that line or not: they hear that the store stops."""
        self.groups: Groups | None = None
        """None: none of its messages has a group. Also set by who plans the first one that has, before it is seen."""
        self.unsure: Groups | None = None
        """Looks at what is fetched, as long as that may have groups: what the store held at open."""
        of_topic = state.channel.groups or state.channel.unsure if subscription is not None else None
        if of_topic is not None:
            of_topic.share(self)

    @property
    def holds_back(self) -> bool:
        """Return whether there may be a message that becomes free by an ack of another."""
        return self.groups is not None and self.groups.holds_back

    @property
    def number(self) -> int:
        """Return the number of the subscription in its store; 0 for a queue."""
        return self.subscription.number if self.subscription is not None else 0

    @property
    def key(self) -> SubscriptionKey | None:
        """Return the key of the subscription; None for a queue."""
        return self.subscription.subscription.key if self.subscription is not None else None

    @property
    def is_used(self) -> bool:
        """Return whether somebody waits, watches, listens, or holds a message."""
        return bool(self.receivers or self.listeners or self.held)

    @property
    def is_needed(self) -> bool:
        """Return whether somebody waits, listens, or holds a message. Watches do not count: they hear of it when the
        store is opened again."""
        return bool(self.listeners or self.held or self.waiting)

    @property
    def waiting(self) -> int:
        """Return how many wait or listen, and would take a message."""
        return sum(not receiver.watches for receiver in list(self.receivers)) if self.receivers else 0

    def rewind(self) -> None:
        """Fetch everything anew. Wherever Ctrl-C strikes nothing is out of sight: cursors go first."""
        self.forget_fetched()
        self.returned.clear()
        self.returned_places.clear()
        self.passed_at = 0

    def forget_fetched(self) -> None:
        """Forget what was fetched; what is still there is fetched anew."""
        self.first.forget()
        self.levels = self.stack = None
        if self.groups is not None:
            self.groups.forget()

    def remove_fetched(self, first: int, last: int) -> None:
        """Remove from what was fetched the messages between these seqs, which are dead, or held. Idempotent."""
        self.stack = None
        self.first.remove(first, last)
        if self.levels is not None:
            self.levels.remove(first, last)

    def wake(self) -> None:
        """Tell the first who waits: a message may have become free. Any thread may."""
        while self.receivers:
            try:
                next(iter(self.receivers)).wake()
                break
            except (RuntimeError, StopIteration):
                pass  # another thread has just come or gone

    def is_next(self, receiver: Receiver) -> bool:
        """Return whether nobody waits, or this one is the first who does."""
        try:
            return next(iter(self.receivers), receiver) is receiver
        except RuntimeError:
            return False  # another thread has just come or gone

    def wake_all(self) -> None:
        """Tell all who wait that the store stops."""
        for receiver in [*self.receivers, *self.listeners]:
            receiver.wake()


_numbers = itertools.count(time.time_ns())
"""Of leases: none that any process has had for the same directory before."""


def _renumber() -> None:
    global _numbers
    _numbers = itertools.count(time.time_ns())


os.register_at_fork(after_in_child=_renumber)


class LeaseTime:
    """The time for which a lease lasts (lease_times.py)."""

    __slots__ = ("lapsed", "queued", "seconds", "until")

    def __init__(self, seconds: float, until: float) -> None:
        self.seconds: float = seconds
        """Seconds, as the lease's holder was told last."""
        self.until: float = until
        """When it ends (monotonic)."""
        self.queued: float = until
        """When it is looked at next (likewise)."""
        self.lapsed: bool = False
        """True if the time is over, and the message was given back."""

    @property
    def says_it_is_over(self) -> str:
        return (
            f"its lease of {self.seconds:g} s ran out, and others may receive it again; give it more time (`lease=`, "
            "`lease_timeout`), or extend() it while you work"
        )


class Lease:
    """The hold that somebody has on a message."""

    __slots__ = ("channels", "counted", "end", "gate", "hold", "kept", "number", "place", "successor", "time", "whole")

    gate: Gate
    """Set before its hold is MOVING."""
    successor: tuple[MessageStore, Lease]
    """Set before its hold is MOVED: the store that its message is in now, and the lease there."""
    time: LeaseTime
    """Set where it has an end: see `time_limit`."""
    kept: bool
    """Set where somebody has its token: see `is_kept`."""
    counted: bool
    """Set where this delivery was written when it began: see `is_counted`."""
    end: str
    """Set once it is over, but by an ack: see `how_it_ended`."""

    def __init__(self, channels: tuple[Channel, ...], place: Place, hold: int = LEASED, whole: bool = False) -> None:
        self.number: int = next(_numbers)
        """No other lease of this process has it, nor one of a process before."""
        self.channels: Final = channels
        """For whom it is held: one channel; of an expired message of a topic, all that have yet to ack it."""
        self.place: Place = place
        self.hold: int = hold
        self.whole: Final = whole
        """Its ack is for all."""

    @property
    def seq(self) -> int:
        return self.place[SEQ]

    @property
    def is_held(self) -> bool:
        """Return whether the lease still counts: not so once the message is acked, given back, or its channels are
        gone."""
        channels, seq = self.channels, self.place[SEQ]
        if len(channels) == 1:
            return channels[0].held.get(seq) is self
        return any(channel.held.get(seq) is self for channel in channels)

    @property
    def is_kept(self) -> bool:
        """Return whether the lease may be settled by somebody who does not hold its message."""
        return getattr(self, "kept", False)

    @property
    def is_counted(self) -> bool:
        """Return whether the backend has this delivery counted already; `place` says it without."""
        return getattr(self, "counted", False)

    @property
    def how_it_ended(self) -> str:
        """Return in words why a lease is not held as its holder thinks."""
        limit = self.time_limit
        if limit is not None and limit.lapsed:
            return limit.says_it_is_over
        end: str | None = getattr(self, "end", None)
        if end is not None:
            return end
        if self.hold == CLAIMED:
            return "a transaction has claimed it, or acked it"
        if self.hold == LEAVING:
            return "it is just being acked or released" if self.is_held else ACKED
        return "its queue or subscription was removed, or its store was closed since, which frees what is leased there"

    @property
    def time_limit(self) -> LeaseTime | None:
        """Return the lease's time; None: it has no end."""
        return getattr(self, "time", None)

    @property
    def is_settled(self) -> bool:
        """Return whether the lease's holder has done with it, or a transaction has it: not so if its time ran out."""
        if self.hold == MOVED:
            return self.successor[1].is_settled
        time = self.time_limit
        return self.hold in (CLAIMED, LEAVING) and not (time is not None and time.lapsed)

    def is_late(self, now: float) -> bool:
        """Return whether the lease's time is over (`now` is monotonic), though its message was not given back yet."""
        time = self.time_limit
        return time is not None and time.until <= now and self.hold == LEASED and self.is_held


class Receiver:
    """A place in the line for one message of a channel."""

    __slots__ = ("_waiter", "lease")

    watches: ClassVar[bool] = False
    """Nothing is handed to it, and whatever happens in its channel wakes it (watching.py)."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        """The lease that the receiver was given. Set before the message counts as held, so that who is interrupted can
        give it back."""
        self._waiter: Any = None

    def prepare(self) -> None:
        """Get ready: from now on `wake` ends a `wait`."""
        if self._waiter is None:
            self._waiter = threading.Lock()
            self._waiter.acquire()

    def wake(self) -> None:
        """Let it look whether there is something for it. Any thread may."""
        try:
            self._waiter.release()
        except (RuntimeError, AttributeError):
            pass  # it is awake

    def wait(self, seconds: float | None) -> bool:
        """Wait for a wake; return False if the time is over."""
        return bool(self._waiter.acquire(timeout=-1 if seconds is None else max(seconds, 0)))


def claimed(channel: Channel) -> int:
    """Return how many of a channel's messages transactions have claimed."""
    return sum(lease.hold == CLAIMED for lease in list(channel.held.values()))
