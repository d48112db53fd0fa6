"""Clients that come, come again and go: what they hold is leased to them again, or given back."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, Final, NamedTuple

from ....adapters.core.store_types import Settlement, SubscriptionKey
from ....adapters.system.background import shared
from ....policies.errors import AnabranchError, ClosedError
from ...router import Router
from ..clients import GRACE_SECONDS, is_living, living
from ..protocol import VERSION, Held, Hello, ProtocolError, destination_of
from .loop import Loop
from .rounds import Asked
from .session import Session

log: logging.Logger = logging.getLogger(__name__)

DEATH_SECONDS: Final = 0.02
"""A process that was killed has its socket closed before its file, or the other way round, this much apart at most."""
CLIENT: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")
"""The id of a client, which is also its file's name."""
_process = os.urandom(8).hex()
Tokens = dict[str, SubscriptionKey | None]


class _Left(NamedTuple):
    """The leases of a client that lives and has lost its connection."""

    held: Tokens
    session: Session
    """Its session, whose aliases hold: it may not have heard yet that this owner knows it."""
    until: float
    """It is kept until then (monotonic)."""


class Presence:
    """The clients that are there, and what is kept for each. On the serving thread, if not said otherwise."""

    def __init__(self, router: Router, loop: Loop, on_parked: Callable[[list[Asked]], None]) -> None:
        """`on_parked` is called with the requests that have waited for the grace to end."""
        self._router, self._registry, self._loop = router, router._registry, loop
        self._on_parked = on_parked
        self._directory = router.config.directory
        self._process = f"{_process}."
        self.generation: Final = self._process + os.urandom(8).hex()
        """Tells this owner from those before and after it, and its process from others."""
        self.sessions: dict[socket.socket, Session] = {}
        self.idle_since: float | None = time.monotonic()
        """Since when nobody is there (monotonic)."""
        self._left: dict[str, _Left] = {}
        """By client."""
        self._under_way: dict[str, list[Future[None]]] = {}
        """By client: what tells that its leases were taken up again, or its votes rolled back."""
        self._expected: set[str] = set()
        """Clients of the owner before that have yet to tell what they hold."""
        self._parked: list[Asked] | None = None
        """Requests that wait until all of them have."""
        self.grace_over: Final = threading.Event()
        """Set once all of them have, or have had the time."""

    def begin(self) -> None:
        """Wait for the clients of the owner before."""
        self._expected = set(living(self._directory))
        if self._expected:
            self._parked = []
            self._loop.at(GRACE_SECONDS, self._end_grace)
        else:
            self.grace_over.set()

    def admitted(self, requests: list[Asked]) -> list[Asked]:
        """Return those requests that need not wait for the grace to end."""
        if self._parked is None:
            return requests
        self._parked += [one for one in requests if type(one[2]) is not Hello]
        return [one for one in requests if type(one[2]) is Hello]

    def _end_grace(self) -> None:
        """Do what was asked for meanwhile."""
        parked, self._parked = self._parked, None
        self._expected.clear()
        self.grace_over.set()
        if parked:
            self._on_parked(parked)

    def hello(self, session: Session, number: int, request: Hello) -> None:
        """Greet a client."""
        if request.version != VERSION:
            raise ClosedError(
                f"{self._directory} is served by process {os.getpid()}, which speaks version {VERSION} of the "
                f"protocol, and this process version {request.version}: run the same version of Anabranch in both, or "
                "stop the server"
            )
        client, generation, held = request.client, request.owner, request.held
        if session.client or not CLIENT.fullmatch(client):
            raise ProtocolError("a client greets once, by its id")
        for other in list(self.sessions.values()):
            if other.client == client:
                self.gone(other)  # its connection was lost, and the end of it is not read yet
        session.greeted(client, request.pid)
        left, old, _until = self._left.pop(client, _Left({}, session, 0.0))
        kept: dict[str, str] = {}
        others: list[Held] = []
        with session.lock:
            for one in held:
                now = old.aliases.get(one.token, one.token)
                if now is None or now not in left:
                    others.append(one)
                    continue
                session.held[now] = left.pop(now)
                kept[one.token] = now
                if now != one.token:
                    session.aliases[one.token] = now
        was_here = generation != self.generation and generation.startswith(self._process)
        before = list(self._under_way.get(client, ()))

        def take_up() -> None:
            wait(before)  # of connections that were lost: what they have leased meanwhile is given back
            self._note_settled(session, kept, old)
            wait(self.give_back(left))  # first: what it asks for again finds them at their places
            self._lease_again(session, others, was_here)

        taking_up = shared().call(take_up)
        self._begin(client, taking_up)
        taking_up.add_done_callback(lambda _: self._loop.later(partial(self._greeted, session, number)))

    def _note_settled(self, session: Session, kept: dict[str, str], old: Session) -> None:
        """Note what was settled over a connection that was lost, once that is over: its client comes with it again."""
        while old.ending:
            time.sleep(0.001)
        for given, now in kept.items():
            if now in old.ended_late:
                session.let_go([given])
                session.aliases[given] = None

    def _begin(self, client: str, done: Future[None]) -> None:
        """Note what is under way for a client."""
        self._under_way.setdefault(client, []).append(done)
        done.add_done_callback(lambda done: self._loop.later(partial(self._done, client, done)))

    def _done(self, client: str, done: Future[None]) -> None:
        if done.exception() is not None:
            log.error(
                "a client's leases could not be taken up again, or its vote rolled back", exc_info=done.exception()
            )
        self._under_way[client].remove(done)
        if not self._under_way[client]:
            del self._under_way[client]

    def _lease_again(self, session: Session, held: list[Held], was_here: bool) -> None:
        """Lease again what a client held. What is gone was settled, and its client does not know it: but not where the
        server before `was_here`, in this process, since others may have received it meanwhile."""
        for given, text, key, seq, lease in held:
            destination = destination_of(text)
            lease_again = methodcaller("lease_again", destination, seq, key, lease)
            try:
                again: str | None = self._registry.for_held(destination, lease_again, None)
            except AnabranchError as error:
                log.warning("message %d of %s cannot be leased again: %s", seq, destination, error)
                continue  # its holder hears that it is not leased any more
            with session.lock:
                if not session.is_closed:
                    if again is not None or not was_here:
                        session.aliases[given] = again
                    if again is not None:
                        session.held[again] = key
                    continue
            if again is not None:  # its client has gone meanwhile, or comes again
                wait(self.give_back({again: key}))
            return

    def _greeted(self, session: Session, number: int) -> None:
        session.answer(number, [self.generation, os.getpid()])
        self._expected.discard(session.client)
        if not self._expected:
            self._end_grace()

    def gone(self, session: Session) -> None:
        """Close the connection of a client. What it held is given back; not yet if it lives, and may come again."""
        held = self._drop(session)
        self._expected.discard(session.client)
        if session.client and held and is_living(self._directory, session.client):
            self._left[session.client] = _Left(held, session, time.monotonic() + GRACE_SECONDS)
            self._loop.at(DEATH_SECONDS, partial(self._forget, session.client))
        else:
            self.give_back(held)

    def _drop(self, session: Session) -> Tokens:
        if self.sessions.pop(session.sock, None) is None:
            return {}
        self._loop.watch(session.sock, 0, session.watched, session)
        if not self.sessions:
            self.idle_since = time.monotonic()
        held, rolled_back = session.close()
        for one in rolled_back:
            self._begin(session.client, one)
        return held

    def _forget(self, client: str) -> None:
        left = self._left.get(client)
        if left is None:
            return
        if left.until <= time.monotonic() or not is_living(self._directory, client):
            del self._left[client]
            self.give_back(left.held)
        else:
            self._loop.at(DEATH_SECONDS, partial(self._forget, client))

    def give_back(self, held: Tokens) -> list[Future[Any]]:
        """Give back what a client held that is gone, to its old places; returns what tells the end of it. It counts as
        a delivery where the store counts when it hands out."""
        given: list[Future[Any]] = []
        by_store: dict[str, list[str]] = {}
        for token in held:
            by_store.setdefault(token[:32], []).append(token)
        for store_id, tokens in by_store.items():
            store = self._registry.open_store(bytes.fromhex(store_id))
            if store is not None:
                counted = store.settings.count_on_receive
                with suppress(AnabranchError):
                    given.append(self._router.settle_nowait(tokens, Settlement.RELEASE, delivered=counted, delay=0))
        return given

    def end(self) -> list[Future[Any]]:
        """Let all go; returns what tells that what they held is given back."""
        for session in list(self.sessions.values()):
            with suppress(OSError):
                session.sock.setblocking(True)
                session.sock.settimeout(1.0)
                session.flush()
            self._left[session.client] = _Left(self._drop(session), session, 0.0)
        given_back = [future for left in self._left.values() for future in self.give_back(left.held)]
        self._left.clear()
        return given_back + [one for some in self._under_way.values() for one in some]


def _name_anew() -> None:
    global _process
    _process = os.urandom(8).hex()


os.register_at_fork(after_in_child=_name_anew)
