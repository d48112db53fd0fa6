"""Messages that come out of a store: received, looked at, or taken because they are not delivered any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from ....policies.errors import AnabranchError, CorruptionError, DestinationError, UnknownMessageError
from ....policies.names.destination import Destination, Kind
from ..engine.engine import Engine
from ..engine.forwarding import give_back
from ..engine.handing_out import HandingOut
from ..messages import Message, Undelivered, note_received
from ..operations.changes import Change, acks_of
from ..record.place import ALSO_WAITING, ORDER, ORDER_MAX, SEQ, Place, order_of
from ..state.decoding import decode
from ..state.delivery import CLOCK_SECONDS
from ..state.gates import MovedError
from ..state.leases import Channel, DestinationState, Lease, Receiver, SubscriptionState
from ..state.rows import Rows
from ..state.sweep import wall_ms
from ..store_types import SubscriptionKey
from .damaged import is_damage, lose, readable
from .subscriptions import require_topic, unknown

if TYPE_CHECKING:
    from ..messages import MessageStore

log: logging.Logger = logging.getLogger(__name__)

PAGE: Final = 512
"""Messages that browse looks up at once."""

Position = tuple[int, int]
"""In the order of delivery: an order, and a seq."""


class Receiving:
    """The receiving from one open store. Threads: all."""

    def __init__(
        self,
        store: MessageStore,
        engine: Engine,
        hand_out: HandingOut,
        write: Callable[[Sequence[Change]], object],
    ) -> None:
        self._write = write
        self._store = store
        self.engine = engine
        self.hand_out = hand_out
        self._hands_out = hand_out.needed  # asked for each message

    def receive(
        self,
        destination: Destination,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        seconds: float | None = None,
        newest: bool = False,
    ) -> Message | None:
        engine = self.engine
        if seconds is not None:
            self.hand_out.check(seconds)
        deadline = time.monotonic() + timeout if timeout else None  # without one and not to wait: it is not asked for
        while True:
            channel = self.channel(destination, subscription, make=timeout != 0)
            if channel is None:
                return None
            receiver = Receiver()
            try:
                if not (engine.lease_stacked if newest else engine.lease_ready)(channel, receiver):
                    leased = self._lease(channel, receiver, wait=timeout != 0, newest=newest)
                    if leased is False:
                        leased = self._wait(channel, receiver, deadline)
                    if leased is None:
                        continue
                    if not leased:
                        return None
                lease = receiver.lease
                assert lease is not None
                message = self.read(lease)
                if message is not None:
                    if seconds is not None or self._hands_out:
                        self.hand_out((lease,), seconds)
                    message.__class__ = message._received  # as note_received
                    if message.deliveries > 1:
                        engine.redelivered += 1
                    return message
            except BaseException as error:
                if not is_damage(error):
                    self.cancel(channel, receiver)
                raise
            self.let_go(lease)  # it was purged after it had been fetched

    def receive_many(
        self,
        destination: Destination,
        most: int,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        seconds: float | None = None,
    ) -> list[Message]:
        """Receive many messages, as Store.receive_many."""
        messages: list[Message] = []
        try:
            first = self.receive(destination, timeout, subscription, seconds)
            if first is not None:
                messages.append(first)
                while len(messages) < most and self._receive_more(destination, subscription, most, messages, seconds):
                    pass
        except AnabranchError as error:
            if not messages:
                raise
            level = logging.ERROR if is_damage(error) else logging.DEBUG  # else the next call meets it again
            log.log(level, "store %s: no more is received at once: %s", self.engine.name, error)
        except BaseException:
            for message in messages:
                with suppress(AnabranchError, RuntimeError):
                    self._store.release([message], delivered=False)
            raise
        return messages

    def _receive_more(
        self,
        destination: Destination,
        key: SubscriptionKey | None,
        most: int,
        messages: list[Message],
        seconds: float | None,
    ) -> bool:
        """Receive what is there without waiting, up to so many in all and a page at a time. Returns whether there may
        be more."""
        channel = self.channel(destination, key, make=False)
        if channel is None:
            return False
        receivers: list[Receiver] = []
        try:
            self._lease_page(channel, min(most - len(messages), PAGE), receivers)
            leases = [receiver.lease for receiver in receivers if receiver.lease is not None]
            if leases and (seconds is not None or self._hands_out):
                self.hand_out(leases, seconds)
            for number, record in enumerate(self._bodies(channel.state, leases)):
                lease = leases[number]
                if record is not None:
                    message = decode(self._store, destination, lease.place, record, lease)
                    messages.append(message)
                    message.__class__ = message._received  # likewise
                    if message.deliveries > 1:
                        self.engine.redelivered += 1
                else:
                    self.let_go(lease)  # it was purged after it had been fetched
                receivers[number].lease = None
            return bool(leases)
        except BaseException as error:
            for receiver in receivers:
                self.cancel(channel, receiver)
            if not is_damage(error):
                raise
        next_one = self.receive(destination, 0, key, seconds)  # which tells whether it is the first one that is damaged
        if next_one is not None:
            messages.append(next_one)
        return next_one is not None

    def _lease_page(self, channel: Channel, count: int, receivers: list[Receiver]) -> None:
        """Lease so many, unless others wait for them; each has its receiver, in order."""
        engine = self.engine
        engine.check()
        with engine.lock:
            engine.current()
            if engine.sequencer.gates:
                engine.require_here(channel.state.destination)
            if channel.state.removed or engine.is_gone(channel):
                return
            while len(receivers) < count and not channel.receivers and engine.delivery.has_room(channel):
                receivers.append(Receiver())
                if not engine.delivery.lease(channel, engine.rows, receivers[-1]):
                    return

    def _bodies(self, state: DestinationState, leases: Sequence[Lease]) -> Iterable[bytes | None]:
        """Return the records of these messages, in order; None for one that has died meanwhile."""
        return self.engine.rows.bodies(state, [lease.place for lease in leases]) if leases else ()

    def _lease(
        self, channel: Channel, receiver: Receiver, wait: bool, newest: bool = False, bring: bool = True
    ) -> bool | None:
        """Give the receiver a message; if there is none and it wants to wait, put it behind those who wait already.
        None if its queue is to be looked up anew. After `check`."""
        engine = self.engine
        engine.settle()
        with engine.lock:
            engine.current()
            delivery, rows = engine.delivery, engine.rows
            if not bring or not delivery.next_due or delivery.next_due > wall_ms():
                if engine.sequencer.gates:
                    engine.require_here(channel.state.destination)
                if engine.is_gone(channel):
                    raise unknown(channel.state.destination, channel.key or ("", ""))
                if channel.state.removed:
                    return None
                delivery.require_room(channel)
                lease: Callable[[Channel, Rows, Receiver], bool] = delivery.lease
                if newest:
                    highest = engine.sequencer.highest_seq
                    lease = partial(delivery.lease_newest, highest=highest, applied=engine.followed)
                if not channel.receivers and lease(channel, rows, receiver):
                    return True
                if wait and engine.catalog.current(channel.state) is not channel.state:
                    return None  # it was dropped, and is there anew
                if wait:
                    receiver.prepare()
                    channel.receivers[receiver] = None
                if channel.receivers:  # those who came before get theirs first
                    engine.hand_over(channel)
                    return receiver.lease is not None or (not wait and lease(channel, rows, receiver))
                return False
        if engine.schedule is not None:
            engine.schedule.bring()  # is written, so not under the lock
        return self._lease(channel, receiver, wait, newest, bring=False)

    def _wait(self, channel: Channel, receiver: Receiver, deadline: float | None) -> bool | None:
        """Wait until the receiver has a message; return False when the time (monotonic, in seconds) is over. None if
        its queue was removed, and is to be looked up anew."""
        engine = self.engine
        if receiver not in channel.receivers and receiver.lease is None:
            return False
        try:
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                over = left is not None and left <= 0
                if not over:
                    short = channel.passed_at and (left is None or left > CLOCK_SECONDS)
                    receiver.wait(CLOCK_SECONDS if short else left)
                engine.check()
                with engine.lock:
                    if receiver.lease is None and not engine.lease_in_line(channel, receiver):
                        engine.current()
                        if engine.sequencer.gates:
                            engine.require_here(channel.state.destination)
                        if engine.is_gone(channel):
                            raise unknown(channel.state.destination, channel.key or ("", ""))
                        if channel.state.removed:
                            return None
                        engine.hand_over(channel)
                    if receiver.lease is not None:
                        return True
                    if over:
                        channel.receivers.pop(receiver, None)  # under the lock: nobody gives it anything from now on
                        return False
        finally:
            channel.receivers.pop(receiver, None)
            self.left(channel)

    def left(self, channel: Channel) -> None:
        """Note that somebody waits there no longer."""
        engine = self.engine
        if channel.receivers:
            channel.wake()  # who was woken and did not hand over passes it on
        elif not channel.state.declared and not engine.closed and not engine.forked:
            with engine.lock:
                engine.catalog.drop(channel.state)

    def cancel(self, channel: Channel, receiver: Receiver) -> None:
        """End a consumer's wait and free what it was given. In a store that has stopped nobody holds anything.
        Idempotent."""
        channel.receivers.pop(receiver, None)
        if receiver.lease is not None and give_back(receiver.lease):
            receiver.lease = None
        with suppress(AnabranchError, RuntimeError):
            engine = self.engine
            engine.check()
            with engine.lock:  # who was just giving it something has given it
                if receiver.lease is not None:
                    engine.current()
                    engine.delivery.unlease(receiver.lease, engine.rows)
                    receiver.lease = None
            channel.wake()  # who was struck may have been about to hand over to another

    def read(self, lease: Lease) -> Message | None:
        """Return the message; None if it has died meanwhile, or is damaged where the store salvages: that is written
        down, and it is dead."""
        state = lease.channels[0].state
        try:
            engine, place = self.engine, lease.place
            record = engine.delivery.records.pop(place[SEQ], None)
            if record is None:
                (record,) = engine.rows.bodies(state, [place])
            return None if record is None else decode(self._store, state.destination, place, record, lease)
        except CorruptionError as error:
            lose(self.engine, state, lease.place, error)
        self._write(acks_of([lease]))
        return None

    def note_received(self, message: Message) -> None:
        """Note that a message is handed to its consumer."""
        note_received(message)
        if message.deliveries > 1:
            self.engine.redelivered += 1

    def let_go(self, lease: Lease) -> None:
        """Let go of a lease whose message is dead. Raises MovedError if the message has moved to another store before
        it was read here."""
        if give_back(lease):
            raise MovedError(lease.gate)
        engine = self.engine
        engine.check()
        with engine.lock:
            for channel in lease.channels:
                if channel.held.get(lease.seq) is lease:
                    engine.delivery.end(channel, lease.seq)
                    engine.wake_at_limit(channel.state, channel.number)

    def channel(self, destination: Destination, key: SubscriptionKey | None, make: bool) -> Channel | None:
        """Return the channel that consumers of a destination draw from; None for a queue that is new here, unless
        `make`. Raises DestinationError, UnknownSubscriptionError."""
        engine = self.engine
        if key is not None:
            return self.subscription(destination, key).channel
        if destination.kind is Kind.TOPIC:
            raise DestinationError(f"{destination} is a topic: receive for one of its subscriptions; say which")
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.require_here(destination)
            if not make:
                return None
            state = engine.catalog.state(destination)
        return state.channel

    def subscription(self, topic: Destination, key: SubscriptionKey) -> SubscriptionState:
        """Return a subscription, with all that has returned applied. Raises DestinationError,
        UnknownSubscriptionError."""
        require_topic(topic)
        engine = self.engine
        state = engine.catalog.destinations.get(topic)
        subscriber = state.subscriptions.get(key) if state is not None and not engine.unsubscribing else None
        if subscriber is None:
            subscriber = engine.asked(lambda: self._subscription(topic, key))
        if subscriber is None:
            engine.require_here(topic)
            raise unknown(topic, key)
        return subscriber

    def _subscription(self, topic: Destination, key: SubscriptionKey) -> SubscriptionState | None:
        state = self.engine.catalog.destinations.get(topic)
        return state.subscriptions.get(key) if state is not None else None

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        engine = self.engine
        taken: list[tuple[Lease, str]] = []
        undelivered: list[Undelivered] = []
        engine.check()
        try:
            more = True
            while more and len(taken) < limit:
                engine.check()
                with engine.lock:
                    engine.current()
                    more = engine.delivery.take_undelivered(limit, engine.rows, taken)
                if any(lease.channels[0].state.is_map for lease, _ in taken):
                    more |= len(taken) == limit
                    self._remove_values(taken)
            for lease, reason in taken:
                try:
                    message = self.read(lease)
                except CorruptionError as error:  # others go on
                    log.error("store %s: %s", engine.name, error)
                    if not is_damage(error):
                        self.give_back(lease)
                    continue
                if message is not None:
                    undelivered.append(Undelivered(message, reason))
                else:
                    self.let_go(lease)
            return undelivered
        except BaseException:
            for lease, _ in taken:  # the caller knows of none of them
                self.give_back(lease)
            raise

    def _remove_values(self, taken: list[tuple[Lease, str]]) -> None:
        """Remove the expired values of maps at once; they are nobody's dead letters. Leaves the others in `taken`."""
        values = [lease for lease, _ in taken if lease.channels[0].state.is_map]
        self._write(acks_of(values))
        taken[:] = [one for one in taken if not one[0].channels[0].state.is_map]

    def lease_again(
        self, destination: Destination, seq: int, key: SubscriptionKey | None, seconds: float | None
    ) -> Lease | None:
        """Lease one message that nobody holds, as Store.lease_again."""
        self.hand_out.check(seconds)
        channel = self.channel(destination, key, make=False)
        if channel is None:
            return None
        engine = self.engine
        engine.settle()
        with engine.lock:
            engine.current()
            if engine.sequencer.gates:
                engine.require_here(destination)
            if channel.state.removed:
                return None
            place = engine.rows.row(channel.state, channel.subscription, seq)
            if place is None:
                return None
            if seq in channel.held:
                raise UnknownMessageError("somebody else has leased it meanwhile")
            if channel.unsure is not None:
                channel.unsure.look_ahead(None)
            if channel.groups is not None:
                channel.groups.bring()
                if not channel.groups.lets(place):
                    raise UnknownMessageError("somebody else has leased another message of its group meanwhile")
            lease = channel.held[seq] = Lease((channel,), place)
            channel.remove_fetched(seq, seq)  # else it is received there once it is acked
        self.hand_out.begin([lease], seconds)
        return lease

    def give_back(self, lease: Lease) -> None:
        """Free a lease's message, at its old place; in a store that has stopped nobody holds anything."""
        if give_back(lease):
            return
        with suppress(AnabranchError, RuntimeError):
            engine = self.engine
            engine.check()
            with engine.lock:
                engine.current()
                engine.delivery.unlease(lease, engine.rows)

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
        leased: bool = True,
    ) -> Iterator[Message]:
        priorities = self.engine.backend.settings.priorities
        if isinstance(after, Message):
            position = (order_of(after.priority, priorities), after.seq)
        elif after and priorities:
            raise ValueError(
                f"store {self.engine.name!r} orders by priority: the seq {after} is no place in its order; give the "
                "message"
            )
        else:
            position = (0, after)
        return islice(self._browse(destination, min(PAGE, limit or PAGE), position, subscription, leased), limit)

    def _browse(
        self, destination: Destination, count: int, after: Position | None, key: SubscriptionKey | None, leased: bool
    ) -> Iterator[Message]:
        """Yield messages, so many looked up at once."""
        engine, store = self.engine, self._store
        engine.ensure_usable()
        engine.settle()
        subscriber = None if key is None else self.subscription(destination, key)
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.require_here(destination)
        while state is not None and after is not None:
            # First: what is taken in from now on has a higher number. By none a subscription acks a transient message.
            taken = engine.taken if subscriber is None or not engine.delivery.mixed else -1
            engine.check()
            with engine.lock:
                engine.current()
                if state.removed or (subscriber is not None and engine.is_gone(subscriber.channel)):
                    engine.require_here(destination)
                    return
                places, after = self._page(state, subscriber, after, count)
            if not leased:
                places = [place for place in places if not _is_held(state, subscriber, place)]
            for place, record in zip(places, readable(engine, state, places), strict=True):
                if not leased and _is_held(state, subscriber, place):  # since it was looked up
                    continue
                if record is None or (engine.taken != taken and not self._lives(state, subscriber, place)):
                    continue
                message = decode(store, destination, place, record, None)
                if key is not None:
                    message.subscription = key
                yield message

    def _page(
        self, state: DestinationState, subscriber: SubscriptionState | None, after: Position, count: int
    ) -> tuple[Sequence[Place], Position | None]:
        """Return the next messages in order, and the position to go on behind; None at the end."""
        rows = self.engine.rows
        if not self.engine.backend.settings.priorities:
            found = rows.rows(state, subscriber, ALSO_WAITING, after[1], count)
            return found, found[-1][:2] if found else None
        places: list[Place] = []
        for _ in range(PAGE):  # orders, of which there may be many with nothing for this subscription
            order = rows.next_order(state, subscriber, ALSO_WAITING + after[0]) if after[0] <= ORDER_MAX else None
            if order is None:
                return places, places[-1][:2] if places else None
            order -= ALSO_WAITING
            behind = after[1] if order == after[0] else 0
            places += rows.rows(state, subscriber, ALSO_WAITING + order, behind, count - len(places))
            if len(places) == count:
                return places, places[-1][:2]
            after = (order + 1, 0)
        return places, after

    def _lives(self, state: DestinationState, subscriber: SubscriptionState | None, place: Place) -> bool:
        """Return whether a message is there still, and the subscription has yet to ack it, with all that has returned
        applied."""
        engine = self.engine
        engine.check()
        with engine.lock:
            engine.current()
            return not state.removed and engine.rows.row(state, subscriber, place[SEQ], place[ORDER]) is not None


def _is_held(state: DestinationState, subscriber: SubscriptionState | None, place: Place) -> bool:
    """Return whether somebody has leased or claimed a message of a queue or a subscription."""
    return (subscriber is not None or not state.is_topic) and place[SEQ] in (subscriber or state).channel.held
