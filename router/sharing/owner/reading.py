"""Receives, also those that wait, listeners and looks. What may wait for something else than the disk runs on a thread
of the library, and holds up no other client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from ....adapters.core import Store
from ....adapters.core.messages import Message
from ....adapters.core.service.looking import LookingListener
from ....adapters.core.service.subscriptions import unknown
from ....adapters.core.store_types import Listener
from ....adapters.system.background import shared
from ....adapters.system.conditions import Thread
from ....policies.errors import AnabranchError, ClosedError
from ....policies.names.destination import Destination
from ....policies.names.pattern import Pattern
from ...api.consumer import require_count, require_timeout
from ...api.patterns import Patterns
from ...placement.registry import StoreRegistry
from .. import protocol
from .answers import Answers
from .loop import Timer
from .session import PAGE_BYTES, UNREAD_MAX, Session, slices
from .writing import Writes

log: logging.Logger = logging.getLogger(__name__)

WAITING_MAX: Final = 16_384
"""Receives of a client that may wait at once."""


class Hand(NamedTuple):
    """Hands a message to a receive that waits. No client asks for it, but it is carried out as if one did, so that a
    store that is slow then is noticed."""

    destination: Destination
    hand: Callable[[], None]


class Reads:
    """Carries out what clients read. On the serving thread, if not said otherwise."""

    def __init__(
        self,
        registry: StoreRegistry,
        answers: Answers,
        writes: Writes,
        at: Callable[[float, Callable[[], object]], Timer],
        ask: Callable[[Session, int, Hand], None],
    ) -> None:
        """`ask`, which any thread may, has a message handed over in a round of its own."""
        self._registry, self._answers, self._writes, self._at = registry, answers, writes, at
        self._ask = ask

    def receive(self, session: Session, number: int, request: protocol.Receive) -> None:
        """Receive at once, or wait."""
        require_count(request.most)
        require_timeout(request.timeout)
        if len(session.waiting) >= WAITING_MAX:
            raise ValueError(f"{WAITING_MAX} receives of this process wait already; no more may wait at once")
        if request.timeout == 0 and len(session.out) > UNREAD_MAX:
            receive = partial(_receive, session, request)
            session.make_page(partial(self._answers.work, session, number, receive, session.page_made))
            return
        destination = protocol.destination_of(request.destination)
        store = self._registry.by_destination.get(destination)
        if store is not None and self._writes.is_prompt(store):
            with suppress(ClosedError):
                messages = self._writes.promptly(store, partial(_page, store, destination, request))
                if messages or request.timeout == 0:
                    self._answers.answer(session, number, session.hold(messages))
                else:
                    self._wait(session, number, request).start_in(store)
                return
        if request.timeout == 0:
            receive = partial(_receive, session, request)
            self._answers.work(session, number, receive, partial(self._writes.slow.discard, store))
            return
        shared().lead(self._wait(session, number, request).start)

    def _wait(self, session: Session, number: int, request: protocol.Receive) -> _Waiting:
        waiting = _Waiting(session, number, request, partial(self._ask, session, number))
        if request.timeout is not None:
            waiting.timer = self._at(request.timeout, waiting.expire)
        session.waiting[number] = waiting
        if session.is_closed:  # while another thread served, and this one was held up
            waiting.cancel()
        return waiting

    def look(
        self, session: Session, number: int, call: Callable[..., Any], destination: Destination, *given: Any
    ) -> bool:
        """Answer with what `call` finds in the store of a destination, if that is open and answers promptly; returns
        whether it was."""
        store = self._registry.by_destination.get(destination)
        if store is None or not self._writes.is_prompt(store) or len(session.out) > UNREAD_MAX:
            return False
        with suppress(ClosedError):
            found = self._writes.promptly(store, partial(call, store, destination, *given))
            self._answers.answer(session, number, found)
            return True
        return False

    def hand(self, session: Session, number: int, request: Hand) -> None:
        """Hand what has come to a receive that waits."""
        store = self._registry.by_destination.get(request.destination)
        hand = partial(self._hand, request, store)
        if store is None or not self._writes.is_prompt(store):
            shared().lead(hand)
            return
        self._writes.promptly(store, hand)

    def _hand(self, request: Hand, store: Store | None) -> None:
        try:
            request.hand()
        except Exception:  # of a defect: nobody asked, who could be answered
            log.exception("a message of %s was not handed to a client that waits", request.destination)
        finally:
            if store is not None:
                self._writes.slow.discard(store)

    def cancel(self, session: Session, number: int, request: protocol.Cancel) -> None:
        """End a receive that waits, whose caller was interrupted."""
        waiting = session.waiting.get(request.number)
        if waiting is not None:
            waiting.cancel()
        session.cancel_long(request.number)
        self._answers.answer(session, number, None)

    def receive_pattern(self, session: Session, number: int, request: protocol.ReceivePattern) -> None:
        """Receive from many queues: on a thread of its own, for it may take long."""
        require_timeout(request.timeout)

        def run() -> Any:
            for left in slices(request.timeout):
                message = session.router.receive(request.pattern, left, lease=request.lease)
                if message is not None or session.is_over:
                    return session.hold([] if message is None else [message])
            return session.hold([])

        session.begin_long(number)
        if request.timeout == 0:
            shared().lead(partial(session.run_long, number, run))
        else:
            Thread(partial(session.run_long, number, run), "pattern").start()

    def listen(self, session: Session, number: int, request: protocol.Listen) -> None:
        """Begin to listen."""
        listener = request.listener
        session.granted[listener] = request.granted

        def on_message(message: Message[Any]) -> None:
            packed = session.hold([message])
            if packed is not None:
                session.send(protocol.pack(0, listener, packed))
                if len(session.out) > UNREAD_MAX:
                    session.withhold(listener)

        def on_end(error: Exception) -> None:
            session.end_listener(listener)
            session.send(protocol.pack(0, listener, None, protocol.pack_error(error)))

        def begin() -> Listener:
            credit, key, lease = request.credit, request.key, request.lease
            if request.patterns is not None:
                patterns = Patterns(map(Pattern.parse, request.patterns))
                return session.router._listen(patterns, on_message, credit, on_end, lease)
            to = protocol.destination_of(request.destination)
            return self._registry.for_store(to, lambda store: store.listen(to, on_message, credit, key, on_end, lease))

        def listen() -> None:
            try:
                begun = begin()
            except BaseException:
                session.end_listener(listener)
                raise
            granted = session.begin_listener(listener, begun)
            if granted is None:  # its client has ended it meanwhile, or has gone; or it has ended by itself
                begun.close()
            elif granted > request.granted:
                begun.add_credit(granted - request.granted)

        self._answers.work(session, number, listen)

    def credit(self, session: Session, number: int, request: protocol.Credit) -> None:
        """Grant a listener credit, which it may have got already as it began anew."""
        with session.lock:
            before = session.granted.get(request.listener, request.granted)  # of one that has ended it is nothing
            if request.granted > before:
                session.granted[request.listener] = request.granted
            begun = session.listeners.get(request.listener)  # else it is just beginning
        if begun is not None and request.granted > before:
            begun.add_credit(request.granted - before)
        self._answers.answer(session, number, None)

    def unlisten(self, session: Session, number: int, request: protocol.Unlisten) -> None:
        """End a listener."""
        with session.lock:
            session.granted.pop(request.listener, None)  # first: one that is just beginning looks at it then
            begun = session.listeners.get(request.listener)
        if isinstance(begun, LookingListener):  # it may be looking, which takes a while
            self._answers.work(session, number, partial(_end_listener, session, request.listener, begun))
            return
        if begun is not None and begun.close():  # it is just given a message, which goes before the answer
            self._at(0.0005, partial(self.unlisten, session, number, request))
            return
        session.end_listener(request.listener)
        self._answers.answer(session, number, None)


def _end_listener(session: Session, number: int, begun: Listener) -> None:
    """End a listener. What it is just given goes to the client before."""
    while begun.close():
        time.sleep(0.0005)
    session.end_listener(number)


def _receive(session: Session, request: protocol.Receive) -> list[Any] | None:
    """Return what can be received at once."""
    destination = protocol.destination_of(request.destination)
    found: list[Message[Any]] | None = session.registry.for_held(
        destination, lambda store: _page(store, destination, request), None
    )
    if found is None and request.key is not None:
        raise unknown(destination, request.key)
    return session.hold(found or ())


def _page(
    store: Any, destination: Destination, request: protocol.Receive, first: Iterable[Message[Any]] = ()
) -> list[Message[Any]]:
    """Return the messages that can be received at once, behind the first that was: as many as were asked for, until a
    page is full."""
    if request.newest and not first:
        newest = store.receive(destination, 0, request.key, request.lease, newest=True)
        return [] if newest is None else [newest]
    found = list(first) or list(store.receive_many(destination, 1, 0, request.key, request.lease))
    while found and len(found) < request.most:
        size = sum(0 if one.is_large else one.size for one in found)
        room = min((PAGE_BYTES - size) * len(found) // max(size, 1), request.most - len(found))
        more: list[Message[Any]] = []
        if room > 0:
            with suppress(AnabranchError):  # what there is goes to the client
                more = store.receive_many(destination, room, 0, request.key, request.lease)
        found += more
        if len(more) < max(room, 1):
            break
    return found


class _Waiting:
    """A receive that waits: a listener for one message, with which come all others that are there then."""

    def __init__(self, session: Session, number: int, request: protocol.Receive, ask: Callable[[Hand], None]) -> None:
        self._session, self._number, self._request, self._ask = session, number, request, ask
        self._destination = protocol.destination_of(request.destination)
        self._lock = threading.Lock()
        self._over = self._late = False
        self._listener: Listener | None = None
        self.timer: Timer | None = None
        """Ends it when its time is over; None: it has no end."""
        self._starts = 0
        """The thread that lets it stand in line just now."""

    def start(self) -> None:
        """Stand in line. On a thread of the library: the store may have to be opened."""
        try:
            listener = self._session.registry.for_store(self._destination, self._begun)
        except Exception as error:
            self._failed(error)
            return
        if listener is not None:
            self._stand(listener)

    def start_in(self, store: Store) -> None:
        """Stand in line of an open store, in which nothing was found."""
        self._starts = threading.get_ident()
        try:
            self._stand(self._listen(store))
        except ClosedError:
            shared().lead(self.start)
        except Exception as error:
            self._failed(error)
        finally:
            self._starts = 0

    def _stand(self, listener: Listener) -> None:
        with self._lock:
            self._listener = listener
            over, late = self._over, self._late
        if over:
            listener.close()
        elif late:
            self.cancel()

    def _begun(self, store: Store) -> Listener | None:
        # The serving thread has not looked. A listener waits where this is refused, and would be given the oldest.
        if self._request.newest or not store.is_prompt:
            messages = _page(store, self._destination, self._request)
            if messages:
                self._given(messages)
                return None
        return self._listen(store)

    def _listen(self, store: Store) -> Listener:
        request = self._request
        return store.listen(self._destination, self._came, 1, request.key, self._failed, request.lease, self._ask_for)

    def _ask_for(self, hand: Callable[[], None]) -> None:
        if self._starts == threading.get_ident():  # it looks for the first time
            hand()
        else:
            self._ask(Hand(self._destination, hand))

    def expire(self) -> None:
        """Answer that nothing has come, unless something has, once it was looked for."""
        with self._lock:
            self._late = True
            stands = self._listener is not None
        if stands:
            self.cancel()

    def cancel(self) -> None:
        """Answer that nothing has come, unless something has."""
        self._end([])

    def _came(self, message: Message[Any]) -> None:
        is_full = len(self._session.out) > UNREAD_MAX
        self._given([message] if is_full else _page(message._store, self._destination, self._request, [message]))

    def _given(self, messages: list[Message[Any]]) -> None:
        if not self._end(messages):
            for one in messages:
                one._store.release([one], delivered=False)

    def _end(self, messages: list[Message[Any]]) -> bool:
        """Answer, unless that is done; returns whether it was not."""
        with self._lock:
            over, self._over = self._over, True
            listener = self._listener
        if over:
            return False
        self._let_go()
        if listener is not None:
            listener.close()
        self._session.answer(self._number, self._session.hold(messages))
        return True

    def _failed(self, error: Exception) -> None:
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._let_go()
            self._session.fail(self._number, error)

    def _let_go(self) -> None:
        self._session.waiting.pop(self._number, None)
        if self.timer is not None:
            self.timer.call_off()
