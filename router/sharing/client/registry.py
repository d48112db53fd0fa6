"""The places of destinations as clients see them: all are the owner's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from ....adapters.core.messages import Message
from ....adapters.core.store_types import Subscription
from ....policies.errors import ClosedError, UnknownMessageError, router_closed
from ....policies.names.destination import Destination
from ...placement.attempt import Attempt
from ...placement.routing import Routing
from ..protocol import destination_of
from .store import RemoteStore

if TYPE_CHECKING:
    from ....policies.config import Config

T = TypeVar("T")


class _Destinations:
    """The destinations that the owner has recorded."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def __contains__(self, destination: Destination) -> bool:
        return bool(self._store.of("exists", destination))

    def __iter__(self) -> Iterator[Destination]:
        return iter([destination_of(text) for text in self._store.call("destinations")])

    def __len__(self) -> int:
        return 0  # hints at slips, which are made for those that are known here, are the owner's


class RemoteRegistry:
    """The places of destinations, as clients see them: all are the owner's."""

    records_late = forked = False
    """A forked child is a client of its own, and goes on."""

    def __init__(self, config: Config, store: RemoteStore) -> None:
        self._store = store
        self.config = config
        self.table: SimpleNamespace = SimpleNamespace(destinations=_Destinations(store), stores={store.store_id: None})
        self.routing: Final = Routing(config, self.table)  # type: ignore[arg-type]
        self.route: Final = self.routing.route
        self.gates: Final = SimpleNamespace(removals=0, moves=0)
        """No destination moves as far as clients see: the owner follows it."""
        self.removal: Final = SimpleNamespace(delete=store.delete)
        self.subscriptions_of: Final = store.subscriptions_of
        self.by_destination: Final = SimpleNamespace(get=lambda destination, otherwise=None: store)
        self.deferred: Final = SimpleNamespace(send=lambda destination, call, found: self.for_store(destination, call))
        """What a router does with a send whose store was just closed; here the connection was."""
        self.opened = False

    def require_open(self) -> None:
        """Raise ClosedError if the router is closed."""
        if not self.opened:
            raise router_closed()

    def store_of(self, destination: Destination) -> RemoteStore:
        """Return the store."""
        self.require_open()
        self.route(destination)
        return self._store

    store_for = store_of
    store_to_be = store_of

    def for_store(self, destination: Destination, call: Callable[[Any], T], otherwise: T | None = None) -> T:
        """Call with the store: the owner knows whether it has the destination."""
        return call(self.store_of(destination))

    for_held = for_store

    def attempt(self, destination: Destination, find: Callable[[Destination], Any]) -> Attempt[Any]:
        """Return an attempt that is not repeated."""
        return Attempt(partial(find, destination), lambda store, error: False)

    def may_try_again(self, destination: Destination | None, store: object, error: ClosedError) -> bool:
        """Raise the error: the owner has tried again."""
        raise error

    def subscriptions(self) -> set[Subscription]:
        """Return all subscriptions."""
        return msgspec.convert(self._store.call("subscriptions"), set[Subscription])

    def option_for(self, destination: Destination, name: str) -> Any:
        """Return an option of the store that the configuration routes a destination to."""
        return getattr(self.route(destination).target.options, name, None)

    def require_own(self, message: Message[Any]) -> None:
        """Raise UnknownMessageError for a message of another router."""
        if message._store is not self._store:
            raise UnknownMessageError(f"{message!r} was received from another router; ack it there")

    def reopen(self, name: str) -> None:
        """Close a store and open it again."""
        self._store.call("reopen", name)
