"""Settling of messages from any thread: messages in hand, and those of which only the token was kept.

    token = message.token                           # a str: into a table, into a frame to a client
    router.settle(token, Settlement.ACK)            # from any thread, later

Nothing here opens a store: in one that is closed nothing is leased.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ...adapters.core import Store
from ...adapters.core.messages import REJECTED, Message, Reason
from ...adapters.core.service.failures import failure_of
from ...adapters.core.state.due import delay_ms
from ...adapters.core.state.gates import LeaseMovedError
from ...adapters.core.store_types import Settlement
from ...adapters.system.background import shared
from ...adapters.system.conditions import Promise
from ...policies.errors import AnabranchError, ClosedError, UnknownMessageError
from ..transactions.participant import by_store

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

T = TypeVar("T")

Results = list[AnabranchError | None]
"""The error of each token; None where there was none."""

_STORE_ID_DIGITS = 32


class Way(NamedTuple):
    """How messages are settled."""

    how: Settlement
    reason: Reason | None
    """The reason of a rejection or a release; None: none is said."""
    delivered: bool
    """True if a release counts as a delivery."""
    delay: float | None
    """For how many seconds a released message waits; None: as its store's `redelivery` says."""

    @property
    def is_each_on_its_own(self) -> bool:
        """True if settling needs the message itself."""
        return self.how is Settlement.REJECT or (self.how is Settlement.RELEASE and self.reason is not None)


def settle_nowait(
    messages: Message[Any] | Iterable[Message[Any]], call: Callable[[Store, list[Message]], Future[None]]
) -> Future[None]:
    """Begin `call` with the messages of each store; the future resolves once all have ended, with the first error."""
    futures = []
    for store, of_store in by_store(messages):
        try:
            futures.append(call(store, of_store))
        except AnabranchError as error:
            refused: Future[None] = Promise()
            refused.set_exception(error)
            futures.append(refused)
    return _all(futures, lambda: None)


class TokenSettler:
    """Settles messages of one router by their tokens. Threads: all."""

    def __init__(self, registry: StoreRegistry, reject: Callable[[Message, Reason], None]) -> None:
        self._registry, self._reject = registry, reject

    def settle(self, given: str | Iterable[str], way: Way) -> Results | None:
        """Settle each token; returns the errors. Returns None for a single token, whose error is raised."""
        results = self._settled(listed(given), way)
        if not isinstance(given, str):
            return results
        if results[0] is not None:
            raise results[0]
        return None

    def _settled(self, tokens: Sequence[str], way: Way) -> Results:
        """Settle tokens. Those of one store are settled together, but each rejected one on its own. Messages that are
        moving to another store just then, or have moved, are settled there."""
        results = self._settle(tokens, way)
        if self._registry.gates.moves:
            self._settle_moved(tokens, results, way)
        return results

    def _settle_moved(self, tokens: Sequence[str], results: Results, way: Way) -> None:
        moved: dict[int, str] = {}
        while moved := self._moved(tokens, results, moved):
            again = self._settle(list(moved.values()), way)
            for place, wrong in zip(moved, again, strict=True):
                results[place] = wrong

    def _moved(self, tokens: Sequence[str], results: Results, before: dict[int, str]) -> dict[int, str]:
        """Return the tokens of messages that may be settled elsewhere, by their places, once that is known."""
        found: dict[int, str] = {}
        for place, wrong in enumerate(results):
            if not isinstance(wrong, LeaseMovedError | UnknownMessageError | ClosedError):
                continue  # ClosedError: its store was removed, empty, when it had just been found
            try:
                if isinstance(wrong, LeaseMovedError):
                    wrong.gate.wait()
                token = self._registry.gates.moved_token(tokens[place]) or tokens[place]
                if isinstance(wrong, LeaseMovedError) or token != before.get(place, tokens[place]):
                    found[place] = token
            except AnabranchError as error:
                results[place] = error
        return found

    def _settle(self, tokens: Sequence[str], way: Way) -> Results:
        results: Results = [None] * len(tokens)
        for store, places in self._by_store(tokens, results):
            if way.is_each_on_its_own:
                for place in places:
                    results[place] = self._settled_alone(store, tokens[place], way)
                continue
            try:
                outcomes = store.settle([tokens[place] for place in places], way.how, way.delivered, way.delay)
            except AnabranchError as error:
                outcomes = [error] * len(places)
            for place, wrong in zip(places, outcomes, strict=True):
                results[place] = wrong
        return results

    def settle_nowait(self, given: str | Iterable[str], way: Way) -> Future[Results]:
        """Settle without waiting. A rejection, or a release with a reason, runs on a thread of ours."""
        tokens = listed(given)
        if way.is_each_on_its_own:
            return shared().call(lambda: self._settled(tokens, way))
        future = self._settle_nowait(tokens, way)
        if not self._registry.gates.moves:
            return future  # nothing has moved by now

        # Settle moved ones as `settle` does, on a thread of ours.
        def moved(results: Results) -> Results:
            self._settle_moved(tokens, results, way)
            return results

        return _then(future, lambda results: shared().call(lambda: moved(results)))

    def _settle_nowait(self, tokens: Sequence[str], way: Way) -> Future[Results]:
        results: Results = [None] * len(tokens)
        futures: list[Future[None]] = []
        for store, places in self._by_store(tokens, results):
            try:
                some = [tokens[place] for place in places]
                future = store.settle_nowait(some, way.how, way.delivered, way.delay)
            except AnabranchError as error:
                for place in places:
                    results[place] = error
                continue
            futures.append(_noted(future, places, results))
        return _all(futures, lambda: results)

    def _by_store(self, tokens: Sequence[str], results: Results) -> list[tuple[Store, list[int]]]:
        """Return the stores that are open, each with the places of its tokens. Errors of the others go into `results`.
        Raises TypeError."""
        found: dict[bytes, tuple[Store, list[int]]] = {}
        for place, token in enumerate(tokens):
            if not isinstance(token, str):
                raise TypeError(f"a token is a str, not {type(token).__name__}: {token!r}")
            try:
                store = self._store(token)
            except UnknownMessageError as error:
                results[place] = error
            else:
                found.setdefault(store.store_id, (store, []))[1].append(place)
        return list(found.values())

    def _store(self, token: str) -> Store:
        """Return the open store of a token. Raises UnknownMessageError, which names the token."""
        try:
            store_id = bytes.fromhex(token.partition(".")[0])
        except ValueError:
            store_id = b""
        if 2 * len(store_id) != _STORE_ID_DIGITS:
            raise UnknownMessageError(f"{token!r} is no token of a message: take one from message.token")
        if store_id not in self._registry.table.stores:
            raise UnknownMessageError(
                f"token {token} is of store {store_id.hex()}, which this router lacks; settle it where its message "
                "was received"
            )
        store = self._registry.open_store(store_id)
        if store is None:
            raise UnknownMessageError(
                f"token {token} is of store {self._registry.name_of(store_id)!r}, which was closed since: its "
                "leased messages are free, receive them again"
            )
        return store

    def _settled_alone(self, store: Store, token: str, way: Way) -> AnabranchError | None:
        try:
            message = store.leased(token)
            if way.how is Settlement.REJECT:
                self._reject(message, REJECTED if way.reason is None else way.reason)
            else:
                store.release([message], way.delivered, way.delay, way.reason)
        except AnabranchError as error:
            return error
        return None


def way_of(how: Settlement, reason: Reason | None, delivered: bool, delay: float | None) -> Way:
    """Return the way to settle. Raises TypeError and ValueError."""
    if not isinstance(how, Settlement):
        raise TypeError(
            f"how to settle is a Settlement, not {type(how).__name__}: {how!r}; there are "
            f"{', '.join(map(str, Settlement))}"
        )
    if delay is not None:
        delay_ms(delay)
    if reason is not None:
        failure_of(reason)
    if how is not Settlement.RELEASE and not (delivered and delay is None):
        raise ValueError(f"delay and delivered are for what is released, not for {how}")
    return Way(how, reason, delivered, delay)


def listed(given: str | Iterable[str]) -> list[str]:
    """Return tokens that were given as one or many. Raises TypeError."""
    if not isinstance(given, Iterable):
        raise TypeError(f"a token is a str, not {type(given).__name__}: {given!r}")
    return [given] if isinstance(given, str) else list(given)


def _noted(future: Future[Results], places: Sequence[int], results: Results) -> Future[None]:
    """Return a future that resolves once the outcome of these tokens is in `results`."""
    noted: Future[None] = Promise()

    def note(done: Future[Results]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, AnabranchError):
            noted.set_exception(error)
            return
        for at, place in enumerate(places):
            results[place] = error if error is not None else done.result()[at]
        noted.set_result(None)

    future.add_done_callback(note)
    return noted


def _then(future: Future[T], go_on: Callable[[T], Future[T]]) -> Future[T]:
    """Return a future with the result of the future that `go_on` makes of this one's result."""
    last: Future[T] = Promise()
    last.set_running_or_notify_cancel()

    def resolve(done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            last.set_exception(error)
        else:
            last.set_result(done.result())

    def begin(done: Future[T]) -> None:
        if done.exception() is not None:
            resolve(done)
        else:
            go_on(done.result()).add_done_callback(resolve)

    future.add_done_callback(begin)
    return last


def _all(futures: Sequence[Future[None]], result: Callable[[], T]) -> Future[T]:
    """Return a future that resolves once all these have: with their first error, else with the result."""
    future: Future[T] = Promise()
    future.set_running_or_notify_cancel()
    numbers = itertools.count(1)

    def ended(_: Future[None]) -> None:
        if next(numbers) < len(futures):
            return
        error = next((error for done in futures if (error := done.exception()) is not None), None)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result())

    if not futures:
        future.set_result(result())
    for done in futures:
        done.add_done_callback(ended)
    return future
