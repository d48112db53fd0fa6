"""What tasks ask for in one turn of their loop, asked for together: receives of one queue, and acks.

The first goes by itself, at once; those that come until it has gone to the owner are gathered, and go behind it.
Whatever one of them cannot have so it asks for by itself, and hears its own error. Who receives while others of the
queue do is gathered too, and asked for once they have been answered: none of them waits in line before those.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ...adapters.core.messages import Message, note_settled
from ...adapters.core.state.leases import ACKED, LEASED
from ...policies.errors import OutcomeUnknownError
from ...policies.names.destination import Destination
from ..api.consumer import Consumer
from ..sharing.client.leases import RemoteLease
from .workers import GreenletExit, is_awaited, start

_ALONE: Final = object()
"""The outcome of what is to be asked for by itself."""
Waiting = list[asyncio.Future[Any]]


class Together:
    """Those of one connection. On the thread of its loop."""

    def __init__(self, begin_soon: Callable[[], None]) -> None:
        """`begin_soon` lets `begin` be called with this turn of the loop."""
        self._begin_soon = begin_soon
        self.ack_all: Callable[[list[Message[Any]]], None]
        """Router.ack of the router."""
        self.receiving: Counter[Destination] = Counter()
        """How many are in `receive`."""
        self._receives: dict[tuple[Consumer[Any], float | None], Waiting] = {}
        self._asking: set[tuple[Consumer[Any], float | None]] = set()
        """Those that a worker receives for."""
        self._acks: dict[Destination, list[tuple[Message[Any], asyncio.Future[Any]]]] = {}

    async def receive(self, consumer: Consumer[Any], lease: float | None) -> tuple[Message[Any] | None, bool]:
        """Return a message that is there, or None, and whether that is so. Cancelled, it has leased nothing."""
        key, destination, future = (consumer, lease), consumer.destination, asyncio.get_running_loop().create_future()
        self._receives.setdefault(key, []).append(future)
        if key not in self._asking:
            self._begin_soon()
        self.receiving[destination] += 1
        try:
            found = await future
        except asyncio.CancelledError:
            if not future.cancelled():
                give_back(future.result())
            raise
        finally:
            self.receiving[destination] -= 1
            if not self.receiving[destination]:
                del self.receiving[destination]
        return (None, False) if found is _ALONE else (found, True)

    async def ack(self, message: Message[Any]) -> None:
        """Ack a message. Cancelled, it takes effect all the same."""
        future = asyncio.get_running_loop().create_future()
        self._acks.setdefault(message.destination, []).append((message, future))
        await future

    def begin(self) -> None:
        """Ask for what was gathered. Once more where an interrupt strikes, which does what is left."""
        for key in list(self._receives):
            if key not in self._asking:
                start(partial(self._receive, *key))
        while self._acks:
            start(partial(self._acked, self._acks.pop(next(iter(self._acks)))))

    def _receive(self, consumer: Consumer[Any], lease: float | None) -> None:
        key = consumer, lease
        waiting: Waiting = []
        self._asking.add(key)
        try:
            while waiting := self._receives.pop(key, []):
                _hand_out(consumer, lease, waiting)
        except GreenletExit:  # the loop has ended
            raise
        except BaseException as error:
            _tell(waiting + self._receives.pop(key, []), _ALONE)
            if not isinstance(error, Exception):
                raise
        finally:
            self._asking.discard(key)

    def _acked(self, asked: list[tuple[Message[Any], asyncio.Future[Any]]]) -> None:
        held = {message for message, _ in asked if _is_held(message)}
        try:
            self.ack_all([message for message, _ in asked])
        except GreenletExit:  # the loop has ended
            raise
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception)
            wrong = OutcomeUnknownError(f"{error!r} has struck an ack; do it again") if is_interrupt else error
            for message, one in asked:
                if message in held and message._note.end == ACKED:  # of several some may be acked nevertheless
                    _tell([one], None)
                elif len(asked) > 1 and not isinstance(wrong, OutcomeUnknownError):
                    start(partial(self._acked, [(message, one)]))
                elif is_awaited(one):
                    one.set_exception(copy.copy(wrong) if len(asked) > 1 else wrong)
            if is_interrupt:
                raise
        else:
            _tell([one for _, one in asked], None)


def _is_held(message: Message[Any]) -> bool:
    return isinstance(message._note, RemoteLease) and message._note.hold == LEASED


def _hand_out(consumer: Consumer[Any], lease: float | None, waiting: Waiting) -> None:
    while waiting := [one for one in waiting if not one.done()]:
        found = consumer.receive_many(len(waiting), lease=lease)
        if not found:
            _tell(waiting, None)
        left = iter([one for one in waiting if not one.done()])  # some were cancelled meanwhile
        for message in found:
            one = next(left, None)
            if one is None:
                give_back(message)
            else:
                one.set_result(message)


def _tell(waiting: Waiting, outcome: object) -> None:
    for one in waiting:
        if is_awaited(one):
            one.set_result(outcome)


def give_back(found: Any) -> None:
    """Give back the messages that a receive has found, if any: it was cancelled, and nobody has seen them."""
    for message in found if isinstance(found, list) else [found]:
        if isinstance(message, Message):
            note_settled([message])
            message._store.give_back(message._note)
