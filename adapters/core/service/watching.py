"""Watches, for callers that look at many queues at once: each is told of a message in one, without waiting for it.

    found = store.receive_or_watch(destination, on_wake)    # a Message; or a Watch: there is none
    found.leave()                                           # who is not interested any more

A watch stands in the line of a channel as those who wait do, but nothing is handed to it: the first that happens there
takes it out of the line for good, tells its owner, and is passed on to who stands behind. So it costs senders what a
waiting receiver costs them, and the queue's own receivers come first. It does not keep a store open.

Y3  A watch that is in line, of a channel of which all that has returned is applied, means that nobody could be given a
    message there since: it comes in after the channel was found empty, under the store's lock, and what was taken in
    meanwhile is looked for once more.
Y4  Whoever takes a watch out of its line, but `leave`, tells its owner after that, also when struck by Ctrl-C: the
    owner may look again at once, and get another watch. It may be told twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..messages import Message
from ..state.leases import Channel, Receiver
from .damaged import is_damage

if TYPE_CHECKING:
    from ....policies.names.destination import Destination
    from ..engine.engine import Engine
    from .receiving import Receiving

OnWake = Callable[[bool], object]
"""Called in any thread, within a send too, and with the store's lock held: it must not wait. It is told whether the
store is just being closed: then there is nothing until it is opened again."""


class Watch(Receiver):
    """A watch on one channel, woken once. Threads: all."""

    __slots__ = ("_channel", "_engine", "_on_wake")

    watches = True

    def __init__(self, engine: Engine, channel: Channel, on_wake: OnWake) -> None:
        super().__init__()
        self._engine, self._channel, self._on_wake = engine, channel, on_wake

    def is_in_line(self, channel: Channel) -> bool:
        """Return whether the watch is this channel's, and was not woken."""
        return self in channel.receivers

    def wake(self) -> None:
        """Wake the watch as Receiver.wake does, and take it out of the line."""
        channel = self._channel
        if self not in channel.receivers:
            return
        try:
            channel.receivers.pop(self, None)
            self._tell()
        except BaseException:
            self._tell()
            raise
        finally:
            channel.wake()

    def _tell(self) -> None:
        engine = self._engine
        self._on_wake(engine.closed and engine.failed is None)

    def leave(self) -> None:
        """Leave the line; nobody is told. Idempotent."""
        self._channel.receivers.pop(self, None)


def receive_or_watch(
    receiving: Receiving, destination: Destination, on_wake: OnWake, watch: Watch | None, seconds: float | None
) -> Message | Watch:
    """Return a message or a watch, as Store.receive_or_watch; `seconds`: its `lease`."""
    engine, hand_out = receiving.engine, receiving.hand_out
    if seconds is not None:
        hand_out.check(seconds)
    while True:
        channel = receiving.channel(destination, None, make=True)
        assert channel is not None
        receiver = Receiver()
        in_line: Watch | None = None
        try:
            engine.check()
            if engine.delivery.next_due and engine.schedule is not None:
                engine.schedule.bring()
            if not engine.lease_ready(channel, receiver):
                engine.settle()
                with engine.lock:
                    in_line = _lease_or_watch(engine, channel, receiver, on_wake, watch)
            if receiver.lease is not None:
                message = receiving.read(receiver.lease)
                if message is not None:
                    if hand_out.needed or seconds is not None:
                        hand_out((receiver.lease,), seconds)
                    receiving.note_received(message)
                    return message
        except BaseException as error:
            if not is_damage(error):
                receiving.cancel(channel, receiver)
            raise
        if receiver.lease is not None:
            receiving.let_go(receiver.lease)  # it was purged after it had been fetched
        elif in_line is not None:
            return in_line


def _lease_or_watch(
    engine: Engine, channel: Channel, receiver: Receiver, on_wake: OnWake, watch: Watch | None
) -> Watch | None:
    """Return the watch that is in line if the receiver was not given a message. None without either: the queue is to be
    looked up anew. With the store's lock held, after `check`."""
    engine.current()
    if engine.sequencer.gates:
        engine.require_here(channel.state.destination)
    if channel.state.removed:
        return None
    delivery = engine.delivery
    if channel.receivers:
        engine.hand_over(channel)  # those who wait get theirs first
    if delivery.has_room(channel) and delivery.lease(channel, engine.rows, receiver):
        return None
    if engine.catalog.current(channel.state) is not channel.state:
        return None  # it was dropped, and is there anew
    if watch is None or not watch.is_in_line(channel):
        watch = Watch(engine, channel, on_wake)
        channel.receivers[watch] = None
    if not delivery.has_room(channel) or channel.holds_back:
        channel.state.at_limit[channel] = None  # its next ack tells
    if engine.behind:  # what was taken in before it stood in line told nobody
        engine.drain()
        if channel.state.removed or (delivery.has_room(channel) and delivery.lease(channel, engine.rows, receiver)):
            watch.leave()
            return None
    return watch
