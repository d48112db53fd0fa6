"""Delivery: which messages are held, which consumers wait, and which message comes next (rule X6, invariant 2).

H1  A message that nobody holds is in exactly one place: beyond the cursor of its level, in the level's `ready`, or in
    `returned`, or, if it is not to be delivered any more, nowhere but in the backend (it has expired) and in
    `_limited`, or, if it waits for its time, nowhere but in the backend (scheduled.py), or held back with its group
    (groups.py); in a second one after an interruption, or if it came back before it was fetched: `lease` gives it
    once. Beside that it may be in its channel's `stack` (newest.py).
H2  A message that somebody holds has a Lease in its channel's `held`: LEASED by a receiver, CLAIMED by a transaction,
    or LEAVING while its ack or its return is under way. Where its destination goes to another store it is MOVING, and
    then MOVED, with a successor there (forwarding.py), or held as before.
H3  Holds are memory alone: what a backend does to its own state, such as restoring an index, does not touch them.
H4  Of those who wait the first gets what becomes free. Who is woken hands over to all whom there is something for.

A topic's message is held for each subscription on its own.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from ....policies.errors import StoreFullError, UnknownMessageError
from ...system.acceleration import inner_loop
from ...system.conditions import RLock
from ..messages import EXPIRED, Message, require_leased
from ..record.place import DELIVERIES, EXPIRES, ORDER, OWN, SEQ, Place
from .gates import LeaseMovedError
from .leases import ACKED, CLAIMED, LEASED, LEAVING, MOVING, RELEASED, ROLLED_BACK, Channel, Lease, Receiver
from .newest import newest_first
from .priorities import Levels
from .rows import Rows
from .stack import STACK_MIN, Stack
from .sweep import Sweep, wall_ms

if TYPE_CHECKING:
    from ..messages import MessageStore
    from .gates import Gate
    from .leases import DestinationState, SubscriptionState

log: logging.Logger = logging.getLogger(__name__)

RETURNED_MAX: Final = 10_000
"""Messages of a channel that wait no longer and are kept here, for the next to receive; where there are more they are
fetched anew (invariant 10)."""

CLOCK_SECONDS: Final = 1.0
"""Seconds after which who waits where a message was skipped looks at the clock again: it may go back."""


class Added(Protocol):
    """A message as it comes into the rows: operations' Send."""

    @property
    def state(self) -> DestinationState:
        """Return the state of the message's destination."""

    @property
    def order(self) -> int:
        """Return the message's order, in its store's order of priorities."""

    @property
    def seq(self) -> int:
        """Return the message's seq in its store."""

    @property
    def expires_at_ms(self) -> int:
        """Return when the message expires (ms); 0: never."""

    @property
    def recipients(self) -> Sequence[SubscriptionState]:
        """Return a topic's subscriptions that the message is for."""


class Delivery:
    """The delivery of one store's messages. A lease's `hold`, and its time, change under `lock`; all else under the
    store's lock."""

    def __init__(self, name: str, max_leases: int, max_deliveries: int | None = None, priorities: bool = False) -> None:
        self._name = name
        self._priorities = priorities
        self._max_leases = max_leases
        self._max_deliveries = max_deliveries
        self.lock: Final = RLock()  # a signal handler may come back to it in the same thread
        self._sweep = Sweep(max_deliveries)
        self.timed = False
        """Some leases have an end."""
        self.mixed = False
        """Some messages are not persistent: what lies between two seqs is not of one kind."""
        self.next_due = 0
        """Nothing of what waits is due before this time (ms); 0: nothing waits (features/scheduled.py)."""
        self.until: Callable[[DestinationState, SubscriptionState | None, int], int] = _at_once
        """Return until when a message waits there (ms); 0: it does not. Set by who schedules messages."""
        self.epoch = 1
        """See arrivals.py."""
        self.records: dict[int, bytes] = {}
        """By seq: of messages that were passed on and are not applied yet, until they are received."""

    # Leasing

    @inner_loop
    def lease(self, channel: Channel, rows: Rows, receiver: Receiver) -> bool:
        """Give `receiver` the first message that nobody holds and that is to be delivered; False if there is none. All
        that has returned is in the rows.

        A message leaves its place only once it is held: Ctrl-C in between makes it seen twice here, not skipped.
        """
        place = self.first(channel, rows)
        if place is None:
            return False
        ready = self._fetch(channel, rows) if self._priorities else channel.first.ready
        if ready and ready[0][SEQ] == place[SEQ]:
            self._give_first(channel, ready, receiver)  # if it has returned, too, that is dropped by who meets it
        else:
            self._give(channel, place, receiver)
            heapq.heappop(channel.returned)
            channel.returned_places.pop(place[SEQ], None)
        return True

    def lease_newest(
        self, channel: Channel, rows: Rows, receiver: Receiver, highest: int, applied: int | None = None
    ) -> bool:
        """Give `receiver` the last message that nobody holds and that is to be delivered, of the most urgent ones; of
        a group one at a time, too. False if there is none. All that has returned is in the rows. `highest`: no seq is
        above it. `applied`: the number of the last plan that is in the rows, where later ones can be followed."""
        if channel.purging:
            return False
        if applied is not None and channel.subscription is None and channel.groups is None and not channel.first.ready:
            self._stack(channel, rows, highest, applied)
            if self.lease_stacked(channel, receiver):
                return True
        if channel.unsure is not None:
            channel.unsure.look_ahead(None)
        groups = channel.groups
        if groups is not None:
            groups.bring()
        for place in newest_first(channel, rows, highest, self._priorities):
            seq = place[SEQ]
            if (
                seq not in channel.held and self._deliverable(channel, place)
                and (groups is None or groups.lets(place))
            ):  # fmt: skip
                self._give(channel, place, receiver)
                channel.newest = seq
                channel.remove_fetched(seq, seq)
                channel.returned_places.pop(seq, None)
                return True
        return False

    def _stack(self, channel: Channel, rows: Rows, highest: int, applied: int) -> None:
        """Look up the last messages of a queue in a store without priorities."""
        size = channel.stack.next_size if channel.stack is not None else STACK_MIN
        channel.stack, held = None, channel.held
        free = (place for place in newest_first(channel, rows, highest, False) if place[SEQ] not in held)
        places = list(islice(free, size))
        places.reverse()
        channel.first.unfetch()
        if channel.unsure is not None and places:
            channel.unsure.look_ahead(deque(places))
        channel.stack = Stack(applied, places)

    def lease_stacked(self, channel: Channel, receiver: Receiver) -> bool:
        """Give `receiver` the last message of a channel, ahead of all who wait, if it was looked up. False where that
        does not tell which it is."""
        stack, held = channel.stack, channel.held
        if (
            stack is None or not stack.places or channel.first.ready is not None or channel.groups is not None
            or channel.purging or len(held) >= self._max_leases or (self.next_due and self.next_due <= wall_ms())
        ):  # fmt: skip
            return False
        place = stack.places[-1]
        seq = place[SEQ]
        channel.stack = None
        if seq in held or (
            (place[EXPIRES] or self._max_deliveries is not None) and not self._deliverable(channel, place)
        ):
            return False
        self._give(channel, place, receiver)
        channel.newest = seq
        channel.returned_places.pop(seq, None)
        stack.places.pop()
        stack.given += 1
        channel.stack = stack
        return True

    def first(self, channel: Channel, rows: Rows) -> Place | None:
        """Return the first message that nobody holds and that is to be delivered; it stays where it is. None if there
        is none. All that has returned is in the rows."""
        if channel.purging:
            return None  # what is free is about to go
        if channel.passed_at and wall_ms() < channel.passed_at:
            channel.rewind()
        held, returned = channel.held, channel.returned
        if channel.groups is not None:
            channel.groups.bring()
        while True:
            ready = channel.first.ready or self._fetch(channel, rows)
            groups = channel.groups
            if returned and (not ready or returned[0] < ready[0][:2]):
                seq = returned[0][1]
                back = channel.returned_places.get(seq)
                # An interrupted ack of it may have been under way when it was released.
                if (
                    back is not None and seq not in held
                    and rows.row(channel.state, channel.subscription, seq, back[ORDER]) is not None
                    and self._deliverable(channel, back)
                    and (groups is None or groups.lets(back))
                ):  # fmt: skip
                    return back
                heapq.heappop(returned)
                channel.returned_places.pop(seq, None)
                if groups is not None:
                    groups.left(seq)
            elif ready:
                place = ready[0]
                if (
                    place[SEQ] not in held
                    and ((not place[EXPIRES] and self._max_deliveries is None) or self._deliverable(channel, place))
                    and (groups is None or groups.lets(place, ready))
                ):  # fmt: skip
                    return place
                ready.popleft()
            else:
                return None

    def lease_ready(self, channel: Channel, receiver: Receiver) -> bool:
        """Give `receiver`, ahead of all who wait, the first message of a channel if it is ready: what has returned need
        not be in the rows. False where that does not tell which message is the first. In a store with priorities
        nothing does: something more urgent may come."""
        ready, held = channel.first.ready, channel.held
        if (
            not ready or channel.returned or channel.passed_at or channel.purging
            or len(held) >= self._max_leases or (self.next_due and self.next_due <= wall_ms())
        ):  # fmt: skip
            return False
        place = ready[0]
        if place[SEQ] in held or (
            (place[EXPIRES] or self._max_deliveries is not None) and not self._deliverable(channel, place)
        ):
            return False
        if channel.groups is not None and not channel.groups.lets_plainly(place):
            return False
        self._give_first(channel, ready, receiver)
        return True

    def _give_first(self, channel: Channel, ready: deque[Place], receiver: Receiver) -> None:
        """Give `receiver` the first ready message. An interruption may strike another thread than the consumer's, which
        acks it. The message must not be ready then."""
        try:
            place = ready[0]
            receiver.lease = lease = Lease((channel,), place)
            channel.held[place[SEQ]] = lease
            ready.popleft()
        except BaseException:
            channel.forget_fetched()
            raise

    def _give(self, channel: Channel, place: Place, receiver: Receiver) -> None:
        receiver.lease = lease = Lease((channel,), place)
        channel.held[place[SEQ]] = lease

    def _fetch(self, channel: Channel, rows: Rows) -> deque[Place] | None:
        """Return the first of what was never delivered, looked up ahead; None if there is nothing."""
        if not self._priorities:
            ready = channel.first.fetch(channel, rows, 0, self.epoch)
            if channel.unsure is not None and ready:
                channel.unsure.look_ahead(ready)
            return ready
        levels = channel.levels
        if levels is None:
            levels = channel.levels = Levels()
        return levels.first(channel, rows)

    def end(self, channel: Channel, seq: int) -> None:
        """End a lease: its message is dead for a subscription; others may have yet to ack it. Idempotent."""
        lease = channel.held.get(seq)
        if lease is not None:
            self._sweep.may_be_expired(channel.state, lease.place)
            channel.held.pop(seq, None)

    def added(self, send: Added) -> None:
        """Note a message in the rows which expires, or whose store has priorities. May be said again."""
        if send.expires_at_ms:
            self.may_be_expired(send.state, (send.order, send.seq, send.expires_at_ms, 0, None))
        if not self._priorities:
            return
        for channel in (
            (send.state.channel,) if not send.state.is_topic else [subscriber.channel for subscriber in send.recipients]
        ):
            if channel.levels is not None:
                channel.levels.add(send.order, send.seq)

    def may_be_expired(self, state: DestinationState, place: Place) -> None:
        """Note that a message which expires is in the rows. May be said again."""
        self._sweep.may_be_expired(state, place)

    def _deliverable(self, channel: Channel, place: Place) -> bool:
        if place[EXPIRES]:
            now = wall_ms()
            if place[EXPIRES] <= now:
                channel.passed_at = max(now, channel.passed_at)
                return False
        if self._max_deliveries is not None and place[DELIVERIES] >= self._max_deliveries:
            self._sweep.is_limited(channel, place)
            return False
        return True

    def has_room(self, channel: Channel) -> bool:
        """Return whether more messages of a channel may be leased, as far as is applied."""
        return len(channel.held) < self._max_leases

    def require_room(self, channel: Channel) -> None:
        """Raise StoreFullError if as many of its messages are leased as may be."""
        if not self.has_room(channel):
            raise StoreFullError(
                f"{len(channel.held)} messages of {channel.state.destination} in store {self._name!r} are leased; "
                f"max_leases is {self._max_leases}: ack or release some"
            )

    def hand_over(self, channel: Channel, rows: Rows) -> None:
        """Give those who wait what there is for them, in the order in which they came."""
        while channel.receivers and len(channel.held) < self._max_leases:
            try:
                receiver = next(iter(channel.receivers))
                if receiver.watches:
                    receiver = next(other for other in channel.receivers if not other.watches)
            except RuntimeError:
                continue  # another thread has just come or gone
            except StopIteration:
                break
            if receiver.lease is None and not self.lease(channel, rows, receiver):
                break
            receiver.wake()  # first: who is struck between the two leaves it in line, where whoever comes finds it
            channel.receivers.pop(receiver, None)
        if channel.receivers and (len(channel.held) >= self._max_leases or channel.holds_back):
            channel.state.at_limit[channel] = None  # its next ack makes room, or frees a group

    # Messages that are not delivered any more

    def take_undelivered(self, limit: int, rows: Rows, taken: list[tuple[Lease, str]]) -> bool:
        """Lease up to so many of those that are not to be delivered. Each is added to `taken` before it is leased, so
        that who is interrupted knows which to `unlease`. Returns whether there is more to look at, after others have
        had their turn."""
        return self._sweep.find(rows, limit, partial(self._take_one, taken), taken)

    def _take_one(self, taken: list[tuple[Lease, str]], channels: Sequence[Channel], place: Place, reason: str) -> bool:
        """Take one lease; return False if there is no room for a lease, or the message may be about to be purged."""
        seq = place[SEQ]
        if not channels or any(seq in channel.held for channel in channels):
            return True
        if any(len(channel.held) >= self._max_leases or channel.purging for channel in channels):
            return False
        lease = Lease(tuple(channels), place, LEASED, reason == EXPIRED and channels[0].subscription is not None)
        taken.append((lease, reason))
        for channel in channels:
            channel.held[seq] = lease
            channel.remove_fetched(seq, seq)  # else it is received there once it is dead and the clock goes back
        return True

    # Settling

    def move(self, lease: Lease, before: int, after: int) -> bool:
        """Move one from one hold to another; False if it is not held so, or its time is over."""
        with self.lock:
            if lease.hold != before or not lease.is_held or (self.timed and lease.is_late(monotonic())):
                return False
            lease.hold = after
            return True

    def take(self, store: MessageStore, messages: Sequence[Message], before: int, after: int) -> list[Lease]:
        """Move all from one hold to another, or none. Returns their leases. Raises UnknownMessageError."""
        taken: list[Lease] = []
        with self.lock:
            if self.timed and before == LEASED:
                _require_in_time(messages)
            for message in messages:
                lease = message._note
                if (
                    type(lease) is Lease and lease.hold == before and message._store is store and message.leased
                    and (lease.channels[0].held.get(lease.place[SEQ]) is lease or lease.is_held)
                ):  # fmt: skip
                    lease.hold = after
                    taken.append(lease)
                    continue
                for other in taken:
                    other.hold = before
                require_leased(message)
                if type(lease) is Lease and lease.hold >= MOVING:
                    raise LeaseMovedError(lease.gate)
                raise UnknownMessageError(
                    f"{message!r} is not {'leased' if before == LEASED else 'claimed'} here any more: {_why(message)}"
                )
        return taken

    def lapse(self, lease: Lease, now: float) -> bool:
        """Let a lease whose time is over be LEAVING from now on; return False if it is not leased, or not over."""
        with self.lock:
            if not lease.is_late(now):
                return False
            lease.time.lapsed = True
            lease.hold = LEAVING
            return True

    def freeze(self, channels: Iterable[Channel], gate: Gate, frozen: dict[Lease, int]) -> bool:
        """Freeze the leases of these channels: each is MOVING, and its former hold in `frozen`. False while some lease
        is LEAVING."""
        done = True
        with self.lock:
            for lease in [lease for channel in channels for lease in list(channel.held.values())]:
                if lease.hold == LEAVING:
                    done = False
                elif lease.hold < MOVING:
                    frozen[lease] = lease.hold
                    lease.gate = gate
                    lease.hold = MOVING
        return done

    def put_back(self, leases: Iterable[Lease], hold: int) -> None:
        """Hold leases again that were LEAVING and are still there: their ack has failed, or was interrupted."""
        with self.lock:
            for lease in leases:
                if lease.hold == LEAVING:
                    lease.hold = hold

    def give_back(self, leases: Iterable[Lease], rows: Rows, delivered: bool) -> None:
        """Free leases that were LEAVING, each at its old place; `delivered`: that counts as a delivery. All that is
        pending is in the rows.

        Who gave a message back cannot do anything with it any more, be it held again by somebody else: that is another
        lease.
        """
        for lease in leases:
            if lease.hold == LEAVING:
                self.unlease(lease, rows, delivered)

    def unlease(self, lease: Lease, rows: Rows, delivered: bool = False) -> None:
        """Free the message of a lease, at its old place. Idempotent."""
        lease.end = RELEASED if lease.hold == LEAVING else ROLLED_BACK
        order, seq, expires, deliveries, _ = lease.place
        if delivered and not lease.whole:
            deliveries += 1
        for channel in lease.channels:
            if channel.held.get(seq) is not lease:
                continue  # the channel is gone, or it was acked for all
            row = rows.row(channel.state, channel.subscription, seq, order)
            if row is not None:
                place = (order, seq, expires, deliveries if not lease.whole else row[DELIVERIES], row[OWN])
                self._sweep.may_be_expired(channel.state, place)
                if self._max_deliveries is not None and place[DELIVERIES] >= self._max_deliveries:
                    self._sweep.is_limited(channel, place)
                    channel.returned_places.pop(seq, None)  # it may have come from what was fetched, and be here, too
                elif self.next_due and self.until(channel.state, channel.subscription, seq):
                    channel.returned_places.pop(seq, None)
                else:
                    channel.returned_places[seq] = place
                    heapq.heappush(channel.returned, (order, seq))
            channel.stack = None
            if channel.unsure is not None:
                channel.unsure.look_ahead(None)  # it may never have been fetched
            channel.held.pop(seq, None)
            channel.wake()

    def came_due(self, channel: Channel, seq: int, rows: Rows) -> None:
        """Free a message that waits no longer, for all or for this channel: at its old place, if nobody holds it. All
        that is applied is in the rows. Idempotent."""
        place = rows.row(channel.state, channel.subscription, seq)
        if place is None or seq in channel.held or self.until(channel.state, channel.subscription, seq):
            return
        if self._max_deliveries is not None and place[DELIVERIES] >= self._max_deliveries:
            self._sweep.is_limited(channel, place)
        elif len(channel.returned) < RETURNED_MAX:
            channel.returned_places[seq] = place
            heapq.heappush(channel.returned, (place[ORDER], seq))
        else:
            self.set_back(channel, place[ORDER], seq)
        channel.stack = None
        if channel.unsure is not None:
            channel.unsure.look_ahead(None)
        if channel.groups is not None:
            channel.groups.look_at(seq)
        channel.wake()

    def claim_again(self, channels: Sequence[Channel], place: Place, whole: bool) -> Lease:
        """Claim, at open, what a prepared transaction acks, before anybody can receive (rule X6)."""
        lease = Lease(tuple(channels), place, CLAIMED, whole)
        for channel in channels:
            channel.held[place[SEQ]] = lease
        return lease

    def gone(self, channel: Channel) -> None:
        """Forget all of a channel that is no more, or in which all is dead, held or not. Idempotent."""
        channel.forget_fetched()
        channel.returned.clear()
        channel.returned_places.clear()
        if channel.subscription is not None:
            for seq in list(channel.held):
                self.end(channel, seq)
        channel.held.clear()
        if channel.groups is not None:
            channel.groups.look_at(None)
        self._sweep.forget(channel)
        channel.state.at_limit.pop(channel, None)
        channel.wake_all()

    def purged(self, channel: Channel, first: int, last: int) -> None:
        """Forget the messages of a channel between these seqs that nobody held: they are dead. Idempotent."""
        if channel.groups is not None:
            channel.groups.look_at(None)  # one that waited for its time may have held its group
            channel.wake()
        if self.mixed or channel.groups is not None:
            channel.rewind()
            return
        channel.remove_fetched(first, last)
        channel.returned = [one for one in channel.returned if not first <= one[1] <= last]
        heapq.heapify(channel.returned)
        for seq in [seq for seq in channel.returned_places if first <= seq <= last]:
            channel.returned_places.pop(seq, None)

    def set_back(self, channel: Channel, order: int, seq: int) -> None:
        """Set a level back: a message has come that may lie before what was fetched; it is next. Idempotent."""
        channel.stack = None
        if not self._priorities:
            channel.first.set_back(seq)
        elif channel.levels is not None:
            channel.levels.set_back(order, seq)


def _at_once(state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
    return 0


def _why(message: Message) -> str:
    lease = message._note
    if type(lease) is not Lease:
        return "it was not received here"
    if lease.hold == LEAVING and type(message) is message._plain and not hasattr(lease, "end"):
        return ACKED  # which may not be applied yet
    return lease.how_it_ended


def is_late(lease: Lease) -> bool:
    """Return whether the time of a lease is over."""
    return lease.is_late(monotonic())


def _require_in_time(messages: Iterable[Message]) -> None:
    now = monotonic()
    for message in messages:
        lease = message._note
        if type(lease) is Lease and lease.is_late(now):
            raise UnknownMessageError(f"{message!r} is not leased here any more: {lease.time.says_it_is_over}")
