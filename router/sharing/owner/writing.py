"""Sends and ends of leases. Those of a round are begun together, and waited for with one sync of each store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

from ....adapters.core import Store
from ....adapters.core.messages import LargeBody, Outgoing
from ....adapters.core.store_types import Pending
from ....policies.errors import ClosedError, StoreFullError, UnknownMessageError
from ....policies.names.destination import Destination
from ...api.endpoint import Endpoint, kept
from ...router import Router
from ..protocol import Ack, Commit, Send, SendMany, Settle, destination_of, pack_error, pack_sent
from .answers import Answers
from .commits import commit, reason_of, store_of_lease
from .session import Session

T = TypeVar("T")

Written = tuple[Session, int, Any]
"""A Send or an Ack, whose it is, and its number."""
Begun = tuple[list[Written], int, Pending[Any], Store]
"""A write that is not waited for yet: its requests, how many destinations had been removed before, and where it is."""


class Group:
    """The sends of a round, or the acks, that go into a store with one call."""

    def __init__(self) -> None:
        self.requests: list[Written] = []
        self.messages: list[tuple[Destination, Outgoing]] = []
        self.tokens: list[str] = []
        self.sync = False
        """One of them is to be synced, and so are all: the others of its sender stay in order."""


class Gathered:
    """The sends and acks of a round."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[Destination, Group | None]] = {}
        """By a destination's text: the destination, and the group of the sends. None: they may have to wait for more
        than the disk."""
        self.groups: dict[Store, Group] = {}
        self.acks: dict[Store, Group] = {}


class Writes:
    """Carries out what clients write. On the serving thread, if not said otherwise."""

    def __init__(self, router: Router, answers: Answers) -> None:
        self._router, self._registry, self._answers = router, router._registry, answers
        self.begun: deque[Begun] = deque()
        """The writes of the round that are not waited for yet."""
        self.waited_for: Store | None = None
        """The store that is waited for just now."""
        self.slow: set[Store] = set()
        """Stores that have held up a round, and are not waited for here until they answer."""

    def is_prompt(self, store: Store) -> bool:
        """Return whether a store may be waited for here."""
        return store.is_prompt and store not in self.slow

    def promptly(self, store: Store, call: Callable[[], T]) -> T:
        """Return what a call returns, for which such a store is waited for."""
        self.waited_for = store
        try:
            return call()
        finally:
            self.waited_for = None
            self.slow.discard(store)  # by now it has answered

    def finish(self, begun: deque[Begun]) -> None:
        """Wait for writes, and answer each. Any thread may take some out meanwhile."""
        while True:
            try:
                requests, removals, pending, store = begun.popleft()
            except IndexError:
                return
            self.waited_for = store
            try:
                results = pending.wait()
                if type(requests[0][2]) is Ack:
                    self._acked(requests, results)
                else:
                    self._sent(requests, removals, results)
            except Exception as error:
                for one in requests:
                    self._failed(one, error)
            finally:
                self.waited_for = None
                self.slow.discard(store)

    def _sent(self, requests: list[Written], removals: int, results: list[tuple[int, bool] | Exception]) -> None:
        if self._registry.gates.removals != removals:
            for text in {request.destination for _, _, request in requests}:
                self._registry.record_again(destination_of(text))
        frames = []
        for one, result in zip(requests, results, strict=True):
            session, number, request = one
            if not isinstance(result, Exception):
                if session.large:
                    session.note_answered(number)
                frames.append((session, pack_sent(number, result)))
            elif isinstance(result, StoreFullError) and len(requests) > 1:  # there may be room for it alone
                self._send_nowait(session, number, request)
            else:
                self._failed(one, result)
        self._answers.put(frames)

    def _failed(self, written: Written, error: Exception) -> None:
        session, number, request = written
        try:
            if not isinstance(error, ClosedError):
                self._answers.refuse(session, number, error)
            elif type(request) is Ack:  # the store was closed just now, or its destination moves
                self.settle(session, number, Settle(request.tokens))
            else:
                self._send_nowait(session, number, request)
        except Exception as wrong:
            self._answers.refuse(session, number, wrong)

    # Sends

    def send(self, session: Session, number: int, request: Send, gathered: Gathered, begun: deque[Begun]) -> None:
        """Add a send to those of its round; begin it where it may have to wait for more than the disk."""
        message, text = request.message, request.destination
        destination, group = gathered.places.get(text) or self._look_up(text, gathered)
        if type(message.body) is not bytes:
            self.begin(gathered, begun)  # what came before it comes first
            self._send_large(session, number, request)
        elif group is None or not message.persistent:
            self.begin(gathered, begun)
            self._send_nowait(session, number, request)
        else:
            group.messages.append((destination, session.outgoing_of(message, number)))
            group.requests.append((session, number, request))
            group.sync |= request.sync

    def _look_up(self, text: str, gathered: Gathered) -> tuple[Destination, Group | None]:
        """Return a destination, and the group for its sends, as they are among the places from then on."""
        destination, group = destination_of(text), None
        store = self._registry.by_destination.get(destination)
        if store is not None and self.is_prompt(store) and not store.limited:
            group = gathered.groups.setdefault(store, Group())
        gathered.places[text] = found = destination, group
        return found

    def begin(self, gathered: Gathered, begun: deque[Begun]) -> None:
        """Begin the sends of a round, which are added to its writes."""
        groups, gathered.groups = gathered.groups, {}
        gathered.places.clear()
        for store, group in groups.items():
            removals = self._registry.gates.removals
            try:
                pending = store.begin_sends(group.messages, group.sync)
            except Exception as error:
                for one in group.requests:
                    self._failed(one, error)
            else:
                if group.requests:
                    begun.append((group.requests, removals, pending, store))

    def _send_nowait(self, session: Session, number: int, request: Send) -> None:
        destination = destination_of(request.destination)
        body, headers, name, priority, expires_at_ms, persistent, _, deliver_at_ms, _ = session.outgoing_of(
            request.message, number
        )
        registry = self._registry
        registry.require_open()
        registry.route(destination)

        def call(store: Store) -> Future[Any]:
            return store.send_nowait(
                destination, body, headers, name, request.sync, priority, expires_at_ms, persistent,
                deliver_at_ms,
            )  # fmt: skip

        removals = registry.gates.removals
        store = registry.by_destination.get(destination)
        again = partial(registry.deferred.send, destination, call, store)
        sent: Future[Any] | None = None
        if store is not None:
            with suppress(ClosedError):
                sent = call(store)
        future = again() if sent is None else registry.deferred.known(destination, sent, removals, again)
        if store in self.slow:
            future.add_done_callback(lambda _: self.slow.discard(store))
        self._answers.answer_with(session, number, future, _receipt)

    def _send_large(self, session: Session, number: int, request: Send) -> None:
        destination, message = destination_of(request.destination), session.outgoing_of(request.message, number)

        def send() -> Any:
            body: Any = message.body
            if not isinstance(body, LargeBody):
                body = kept(self._registry, destination, body, None, message.persistent)
            _, headers, name, priority, expires_at_ms, lasts, _, deliver_at_ms, _ = message
            options = (body, headers, name, request.sync, priority, expires_at_ms, lasts, deliver_at_ms)
            return _receipt(self._registry.for_store(destination, methodcaller("send", destination, *options)))

        self._answers.work(session, number, send)

    def send_many(self, session: Session, number: int, request: SendMany) -> None:
        """Send many messages."""
        queue: Endpoint[Any] = Endpoint(self._registry, destination_of(request.destination))
        outgoing = [session.outgoing_of(fields, number, at) for at, fields in enumerate(request.messages)]
        self._answers.work(session, number, lambda: [_receipt(one) for one in queue.send_many(outgoing, request.sync)])

    # Ends of leases

    def ack(self, session: Session, number: int, request: Ack, gathered: Gathered, begun: deque[Begun]) -> None:
        """Add an ack to those of its round; begin it where it may have to wait for more than the disk."""
        if not session.begin_ending(number):
            return
        tokens = _tokens(session, request.tokens)
        if len(tokens) > 1:
            self.begin_acks(gathered, begun)  # which may be of the same messages
            self._require(tokens)
        first = tokens[0][:32] if tokens else ""
        alike = all(token[:32] == first for token in tokens)
        store = self._registry.open_store(bytes.fromhex(first)) if alike and first else None
        if store is not None and self.is_prompt(store) and not self._registry.gates.moves:
            group = gathered.acks.setdefault(store, Group())
            group.requests.append((session, number, request))
            group.tokens += tokens
        else:
            self.settle(session, number, Settle(request.tokens))

    def begin_acks(self, gathered: Gathered, begun: deque[Begun]) -> None:
        """Begin the acks of a round, which are added to its writes."""
        groups, gathered.acks = gathered.acks, {}
        for store, group in groups.items():
            try:
                begun.append((group.requests, 0, store.begin_ack(group.tokens), store))
            except Exception as error:
                for one in group.requests:
                    self._failed(one, error)

    def _acked(self, requests: list[Written], results: list[Any]) -> None:
        frames, at = [], 0
        for session, number, request in requests:
            end = at + len(request.tokens)
            frames.append((session, session.answering(number, _ends(session, request.tokens, results[at:end]))))
            at = end
        self._answers.put(frames)

    def settle(self, session: Session, number: int, request: Settle) -> None:
        """End leases in any way."""
        if not session.begin_ending(number):
            return
        tokens = _tokens(session, request.tokens)
        if request.whole and len(tokens) > 1:
            self._require(tokens)
        reason = None if request.reason is None else reason_of(*request.reason)
        future = self._router.settle_nowait(
            tokens, request.how, reason, delivered=request.delivered, delay=request.delay
        )
        self._answers.answer_with(session, number, future, partial(_ends, session, request.tokens))

    def _require(self, tokens: list[str]) -> None:
        """Raise UnknownMessageError unless all of these can be settled: they are, or none of them. What an owner before
        had settled is."""
        for token in filter(None, tokens):
            store_of_lease(self._registry, token).require_leased([token])

    def commit(self, session: Session, number: int, request: Commit) -> None:
        """Carry out a whole transaction."""
        self._answers.work(session, number, partial(commit, session, number, request))


def _receipt(receipt: Any) -> tuple[int, bool]:
    return receipt.seq, receipt.duplicate


def _tokens(session: Session, given: list[str]) -> list[str]:
    """Return the tokens as they are now. Those that are gone are none that any store knows."""
    return [session.now(token) or "" for token in given] if session.aliases else given


def _ends(session: Session, given: list[str], results: list[Any]) -> list[Any] | None:
    """Return what was wrong with each, None where nothing was with any. What an owner before had in hand, and is gone,
    was settled there."""
    if session.aliases:
        results = [
            None if isinstance(wrong, UnknownMessageError) and session.now(token) is None else wrong
            for token, wrong in zip(given, results, strict=True)
        ]
    if not any(results):
        session.let_go(given)
        return None
    session.let_go(t for t, wrong in zip(given, results, strict=True) if isinstance(wrong, UnknownMessageError | None))
    return [None if wrong is None else pack_error(wrong) for wrong in results]
