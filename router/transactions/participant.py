"""Participants: the part of a transaction in one store, and its first phase there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from time import monotonic
from typing import Any, Final, TypeVar, cast

from ...adapters.core import Store
from ...adapters.core.messages import Message, Outgoing, Receipt
from ...adapters.core.state.gates import MovedError
from ...adapters.core.state.limits import NoRoomYetError, cancel, may_wait
from ...adapters.core.store_types import Change, Pending
from ...policies.errors import AnabranchError, ClosedError, StoreFailedError, UnknownMessageError
from ...policies.names.destination import Destination
from ..placement.registry import StoreRegistry

log: logging.Logger = logging.getLogger(__name__)

is_limited: Final = attrgetter("store.limited")
"""Whether a participant's store has quotas."""

T = TypeVar("T")


class Participant:
    """One store of a transaction. Only the id is known of a participant that was found after a restart: its branch is
    in the store."""

    room: Any = None
    """The room that it has reserved for its sends, until it has prepared them."""
    room_in: Store | None = None
    """The store that has that room. A store that was closed since, for being idle, has none for it any more."""
    carried_out = False
    """True once it has carried the outcome out."""
    receipts: Sequence[Receipt] = ()
    """A receipt for each send, once it has committed them."""
    rolled_back = False
    """True once it has rolled back what was prepared there."""

    def __init__(self, store_id: bytes, store: Store | None = None, first: Destination | None = None) -> None:
        self.store_id = store_id
        self.store: Store | None = store
        """The store when the transaction came to it; it may have been closed since, or have failed."""
        self.first = first
        """A destination in the store, which opens the store again if it was closed for being idle."""
        self.volatile: bool = store is not None and store.volatile
        """True if it takes part in visibility only, and no decision names it (rule T7): a memory store, or one that is
        concerned with transient messages alone."""
        self.sends: list[tuple[Destination, Outgoing]] = []
        self.acks: list[Message] = []
        self.changes: list[Change] = []

    def call(self, registry: StoreRegistry, call: Callable[..., T], *arguments: Any) -> T:
        """Call with its store, and the arguments, before anything is prepared there, once all its destinations have a
        row; also if one of them is deleted meanwhile. A store that is held by sends alone may have been closed for
        being idle; it is opened again."""
        gates = registry.gates
        while True:  # as an Attempt, less its steps: each transaction comes here for each of its stores
            store: Store = self.store  # type: ignore[assignment]
            removals = gates.removals
            try:
                if removals or registry.records_late:
                    registry.record_missing(store, self.destinations())
                result = call(store, *arguments)
                break
            except ClosedError as error:
                if not self._open_again(registry, store, error):
                    raise
        if gates.removals != removals:
            try:
                registry.record_missing(store, self.destinations(), late=True)
            except MovedError:
                pass  # since then, with what came of this
            except (AnabranchError, OSError) as error:  # it has taken effect: the next opening finds them
                log.warning("store %s: destinations have no row in the record: %s", store.name, error)
        return result

    def _open_again(self, registry: StoreRegistry, store: Store, error: ClosedError) -> bool:
        if isinstance(error, MovedError) or self.acks or self.first is None:
            return False
        if registry.may_try_again(self.first, store, error):
            self.store = registry.store_for(self.first)
        return True

    def reserve(self, store: Store, since: float, wait: bool) -> None:
        """Reserve room for its sends; `since` and `wait` are as in Store.reserve. By `call`."""
        self.room = store.reserve(self.sends, self.acks, since, wait)
        self.room_in = store

    def prepare(
        self, store: Store, transaction: bytes, remembering: Sequence[bytes], sync: bool, mark: str | None, note: bytes
    ) -> Pending[None]:
        """Begin to prepare in its store, which has its room from here on. By `call`."""
        if store.limited and self.room_in is not store:
            self.let_go_of_room()
            self.reserve(store, monotonic(), False)  # it waits for none while others have room, or are prepared
        step = store.prepare(transaction, remembering, self.sends, self.acks, sync, self.room, self.changes, mark, note)
        self.room = None
        return step

    def destinations(self) -> list[Destination]:
        """Return the destinations that it sends to, or subscribes to."""
        names = {destination: None for destination, _ in self.sends}
        names |= {change.subscription.topic: None for change in self.changes if change.subscribe}
        return list(names)

    def concerns(self, destination: Destination) -> bool:
        """Return whether the transaction does anything to a destination."""
        return (
            any(one == destination for one, _ in list(self.sends))
            or any(message.destination == destination for message in list(self.acks))
            or any(change.subscription.topic == destination for change in list(self.changes))
        )

    def unclaim(self) -> None:
        """Free the claimed messages: nothing is prepared there, or nothing any more."""
        unclaim(self.acks)

    def let_go_of_room(self) -> None:
        """Release the room that it has reserved and not prepared."""
        room, self.room = self.room, None
        cancel(room)


def reserve_all(participants: Iterable[Participant], registry: StoreRegistry) -> None:
    """Reserve room in all these stores that have quotas, or in none (rule T1). While one store's room is waited for,
    nothing is reserved in the others: so no two transactions wait for each other."""
    limited = list(filter(is_limited, participants))
    full, order, since = None, limited, monotonic()
    while True:
        try:
            for participant in order:
                participant.call(registry, participant.reserve, since, participant is full)
            return
        except NoRoomYetError:
            if not may_wait() or participant is full:
                raise
            full = participant
            order = [full, *[other for other in limited if other is not full]]
            for other in limited:
                other.let_go_of_room()


def unclaim(messages: Iterable[Message], delivered: bool = True, delay: float | None = None) -> None:
    """Free those of these messages that are claimed still, each in the store that holds it now."""
    for store, some in by_store(messages):
        try:
            store.unclaim(some, delivered, delay)
        except UnknownMessageError:  # some were freed before, by a failed commit or a rollback to a savepoint
            for message in some:
                with suppress(StoreFailedError, ClosedError, UnknownMessageError):
                    store.unclaim([message], delivered, delay)
        except (StoreFailedError, ClosedError):
            pass  # the store's leases and claims are gone with it; a shared one does it later


def by_store(messages: Message[Any] | Iterable[Message[Any]]) -> list[tuple[Store, list[Message]]]:
    """Return messages that are settled together by their stores, in the order in which these first occur. Raises
    TypeError."""
    found: dict[int, tuple[Store, list[Message]]] = {}
    if not isinstance(messages, Message | Iterable):
        raise TypeError(
            f"messages that were received can be acked or released, not {type(messages).__name__}: {messages!r}"
        )
    for message in [messages] if isinstance(messages, Message) else messages:
        if not isinstance(message, Message):
            raise TypeError(
                f"messages that were received can be acked or released, not {type(message).__name__}: {message!r}"
            )
        store = cast(Store, message._store)
        found.setdefault(id(store), (store, []))[1].append(message)
    return list(found.values())
