"""Messages that are handed to a callback: what blocking receive is to a thread, this is to an event loop.

A listener stands in the same line as those who wait in `receive`. Its callback runs on a thread of ours, one message at
a time, in order; never inside a sender's `send`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ....policies.errors import AnabranchError
from ....policies.names.destination import Destination
from ...system.background import Job, shared
from ...system.conditions import unless_busy
from ..engine.forwarding import give_back
from ..messages import Message
from ..state.gates import MovedError
from ..state.leases import Channel, Lease, Receiver
from ..store_types import SubscriptionKey
from .damaged import is_damage
from .receiving import Receiving
from .subscriptions import unknown

log: logging.Logger = logging.getLogger(__name__)


def call(on_message: Callable[[Message], object], message: Message, source: object) -> None:
    """Call back with a message of what is listened to. That of a callback which raises is free again, unless it
    is settled already, or the store has stopped. A SystemExit too ends nothing else."""
    try:
        on_message(message)
    except BaseException as error:
        log.exception("who listens to %s raised an error; its message is free again", source)
        try:
            message.release(reason=error)
        except AnabranchError as wrong:
            log.debug("it could not be given back: %s", wrong)


def tell_end(on_end: Callable[[Exception], object] | None, error: Exception, source: object) -> None:
    """Tell whoever listens, if it wants to know, that this has ended it."""
    if on_end is not None:
        try:
            on_end(error)
        except BaseException:
            log.exception("who listens to %s raised an error when told of the end", source)


class Listener(Receiver):
    """Threads: all. `close` may be called from the callback.

    `_run` is at work in one thread at a time. `_gate` is held while it is settled whether a callback begins: before
    `close`, or not at all.
    """

    __slots__ = (
        "_calling",
        "_channel",
        "_credit",
        "_due",
        "_ended",
        "_gate",
        "_home",
        "_on_end",
        "_on_message",
        "_receiving",
        "_run_by",
        "_seconds",
        "_stands",
        "_work",
    )  # fmt: skip

    def __init__(
        self,
        receiving: Receiving,
        channel: Channel,
        on_message: Callable[[Message], object],
        credit: int,
        on_end: Callable[[Exception], object] | None = None,
        seconds: float | None = None,
        run_by: Callable[[Job], object] | None = None,
    ) -> None:
        """`seconds`: for so long each message is leased; None: as its store says. `run_by` has the work done, by a
        thread of ours if it is None."""
        super().__init__()
        self._run_by = run_by or shared().lead
        self._receiving, self._channel, self._on_message, self._on_end = receiving, channel, on_message, on_end
        self._seconds = seconds
        self._credit = credit
        """How many messages it still wants. Belongs to the store's lock."""
        self._stands = False
        """True once it has entered the line: a lease that it was given there is not taken off the credit yet."""
        self._work = threading.Lock()
        self._gate = threading.RLock()  # a signal handler may come back to it in the same thread
        self._due = False
        self._calling = False
        self._ended = False
        self._home: tuple[Receiving, Channel] | None = None
        """The place where the listener goes on, since its destination has moved to another store."""

    def start(self) -> None:
        """Start: from now on the channel stays, and the listener hears of the end of its store."""
        self._channel.listeners[self] = None

    def wake(self) -> None:
        """Have it looked for: there may be something."""
        if not self._due and not self._ended:
            self._due = True
            try:
                self._run_by(self._run)
            except BaseException:  # else nobody would ever look
                self._run_by(self._run)
                raise

    def add_credit(self, more: int) -> None:
        """Add credit, as the contract says."""
        require_credit(more)
        receiving: Receiving | None = None
        while receiving is not self._receiving:  # it may just be on its way to another store
            receiving = self._receiving
            with receiving.engine.lock:
                if receiving is self._receiving:
                    self._credit += more
        self.wake()

    def withdraw_credit(self, most: int) -> int:
        """Take back credit, as the contract says."""
        require_credit(most)
        if self._ended or self._receiving.engine.forked:
            return 0
        receiving: Receiving | None = None
        taken = 0
        while receiving is not self._receiving:  # it may just be on its way to another store
            receiving = self._receiving
            with receiving.engine.lock:
                if receiving is self._receiving:
                    used = self._stands and self.lease is not None
                    taken = min(most, self._credit - used)
                    self._credit -= taken
                    if not self._credit:
                        self._channel.receivers.pop(self, None)
                        self._channel.wake()  # who stands behind it may have been about to hear of a message
        return taken

    def move(self, receiving: Receiving, channel: Channel) -> None:
        """Move to another store, where the destination is from now on; nobody hears of it."""
        channel.listeners[self] = None  # first: that store stays open
        self._home = receiving, channel
        self.wake()
        if self._ended:
            self._leave()

    def close(self) -> bool:
        """End the listener, as the contract says."""
        if self._receiving.engine.forked:
            return False  # it is the parent's
        with self._gate:
            self._ended = True
            calling = self._calling
        self._leave()
        return calling

    def _leave(self) -> None:
        """Leave every line, and free the message that was given. Idempotent."""
        left: Channel | None = None
        while left is not self._channel:  # it may just be on its way to another
            left = self._channel
            left.listeners.pop(self, None)
            self._receiving.cancel(left, self)
            self._receiving.left(left)
            if self._home is not None:
                self._home[1].listeners.pop(self, None)

    def _run(self) -> None:
        if unless_busy(self._work, self._hand_all) and self._due and not self._ended:  # who is at work looks once more
            self._run_by(self._run)

    def _hand_all(self) -> bool:
        while self._due and not self._ended:
            self._due = False
            try:
                while (lease := self._next()) is not None:
                    self._hand(lease)
            except Exception as error:  # the store has stopped, its subscription is gone, its disk does not read
                if isinstance(error, MovedError) or self._home is not None:
                    self._move_on()
                else:
                    self._end(error)
        return True

    def _move_on(self) -> None:
        """Move on, at work: the destination has moved before the message that was given was read. Or it is about to
        move, and the listener is told when that is over."""
        old, lease = self._receiving.engine, self.lease
        if lease is not None:
            give_back(lease)
        with old.lock:
            if self.lease is not None:
                self.lease: Lease | None = None
                self._credit += not self._stands
                self._stands = False
            if self._home is not None:
                self._channel.receivers.pop(self, None)
                self._channel.listeners.pop(self, None)
                (self._receiving, self._channel), self._home = self._home, None
                self._due = True

    def _end(self, error: Exception) -> None:
        """End by itself: tell of it, unless the listener was closed before."""
        with self._gate:
            ended, self._ended = self._ended, True
        self._leave()
        if ended:
            return
        unexpected = error if not isinstance(error, AnabranchError) else None
        level = logging.DEBUG if unexpected is None else logging.ERROR
        log.log(level, "a listener of %s ends: %s", self._channel.state.destination, error, exc_info=unexpected)
        tell_end(self._on_end, error, self._channel.state.destination)

    def _next(self) -> Lease | None:
        """Return the lease that the listener is given now; None if there is nothing, or no more is wanted. Until the
        callback begins `lease` holds it, and `close` gives it back."""
        if self._home is not None and self.lease is None:
            self._move_on()
        engine = self._receiving.engine
        engine.check()
        with engine.lock:
            channel = self._channel
            if self.lease is None and self._credit > 0 and not self._ended and engine.lease_in_line(channel, self):
                self._credit -= 1
                self._stands = False
                return self.lease
            engine.current()
            if engine.sequencer.gates and self.lease is None:
                engine.require_here(channel.state.destination)
            if engine.is_gone(channel):
                raise unknown(channel.state.destination, channel.key or ("", ""))
            if self._ended:
                return None  # `close` gives back what it has
            if channel.state.removed and self.lease is None:
                channel = self._follow(channel)
            if self.lease is None and self._credit > 0:
                self._stands = True
                channel.receivers.setdefault(self)
                engine.hand_over(channel)
            if self.lease is not None:
                channel.receivers.pop(self, None)  # Ctrl-C may have struck who gave it
                self._credit -= 1
                self._stands = False
            return self.lease

    def _follow(self, removed: Channel) -> Channel:
        """Follow the queue's name to its new channel: the queue was removed."""
        channel = self._receiving.channel(removed.state.destination, None, make=True)
        assert channel is not None
        self._channel = channel
        channel.listeners[self] = None
        removed.listeners.pop(self, None)
        removed.receivers.pop(self, None)
        self._receiving.left(removed)
        return channel

    def _hand(self, lease: Lease) -> None:
        message = self._read(lease)
        if message is None:
            self.lease = None
            self.add_credit(1)
            return
        with self._gate:
            if self._ended:
                return
            self._calling = True
            self._receiving.note_received(message)
            self.lease = None
        try:
            call(self._on_message, message, self._channel.state.destination)
        finally:
            self._calling = False

    def _read(self, lease: Lease) -> Message | None:
        """Read the message that was given; None if it has been purged meanwhile, or is damaged, and stays leased.
        Raises any other error of reading: the next try would find the same message."""
        receiving = self._receiving
        try:
            message = receiving.read(lease)
        except AnabranchError as error:
            if not is_damage(error):
                raise
            log.error("store %s: a message is damaged, and stays leased: %s", receiving.engine.name, error)
            return None
        if message is None:
            receiving.let_go(lease)
        elif receiving.hand_out.needed or self._seconds is not None:
            receiving.hand_out((lease,), self._seconds)
        return message


def listen(
    receiving: Receiving,
    destination: Destination,
    on_message: Callable[[Message], object],
    credit: int,
    subscription: SubscriptionKey | None,
    on_end: Callable[[Exception], object] | None,
    seconds: float | None,
    run_by: Callable[[Job], object] | None,
) -> Listener:
    """Return a listener, as Store.listen; `seconds`: its `lease`."""
    require_credit(credit)
    receiving.hand_out.check(seconds)
    receiving.engine.ensure_usable()
    while True:
        channel = receiving.channel(destination, subscription, make=True)
        assert channel is not None
        listener = Listener(receiving, channel, on_message, credit, on_end, seconds, run_by)
        try:
            listener.start()
            if receiving.engine.catalog.current(channel.state) is channel.state:
                listener.wake()
                return listener
        except BaseException:
            listener.close()
            raise
        listener.close()  # its queue was dropped, and is there anew


def require_credit(credit: object) -> None:
    """Raise TypeError or ValueError for what is no number of messages."""
    if not isinstance(credit, int) or isinstance(credit, bool):
        raise TypeError(f"credit is a number of messages, not {type(credit).__name__}: {credit!r}")
    if credit < 0:
        raise ValueError(f"credit is a number of messages, 0 or more, not {credit}")
