"""A topic as its users hold it, and a durable subscription: each keeps its own backlog of what is sent to the topic.

    prices = router.topic("prices.eu")
    audit = prices.subscribe("audit")           # from now on all is kept for it, whether or not anybody receives
    prices.send(b"...")
    message = audit.receive(timeout=1.0)
    message.ack()                               # for this subscription alone

A message is stored once, however many subscriptions there are, and gone when the last of them has acked it; without
any it is gone at once. Selectors are kept for who evaluates them, not evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ..adapters.messages import Message
from ..adapters.store_types import Subscription
from ..policies.errors import DestinationError
from .consumer import Backlog, Consumer
from .endpoint import Endpoint

if TYPE_CHECKING:
    from .store_registry import StoreRegistry


class Subscriber(Consumer):
    """A durable subscription as its user holds it. Cheap to make and keep; any thread may use it, and several may
    receive for one: each message goes to one of them."""

    __slots__ = ("_key", "_registry", "destination", "subscription")

    def __init__(self, registry: StoreRegistry, subscription: Subscription) -> None:
        self._registry = registry
        self.subscription = subscription
        self.destination = subscription.topic
        """The topic."""
        self._key = subscription.key

    def __repr__(self) -> str:
        client = f" of client {self.subscription.client_id!r}" if self.subscription.client_id else ""
        return f"<Subscriber {self.subscription.name!r}{client}, {self.subscription.topic}>"

    def unsubscribe(self) -> int:
        """End it; returns how many messages it had yet to ack. Raises UnknownSubscriptionError, and TransactionError
        while a transaction has claimed one of them."""
        topic, key = self.destination, self.subscription.key
        return self._registry.for_store(topic, lambda store: store.unsubscribe(topic, key))


class Topic(Endpoint, Backlog):
    """Each message goes to every durable subscription."""

    __slots__ = ()

    def subscribe(
        self,
        name: str,
        client_id: str = "",
        selector: str | None = None,
        no_local: bool = False,
        retroactive: bool = False,
    ) -> Subscriber:
        """Begin the durable subscription of that name and client, or take it up again if it is there.

        It keeps what is sent from now on; with `retroactive` also what the topic still holds for others. Raises
        SubscriptionError if it is there with another `selector` or `no_local`: unsubscribe first.
        """
        subscription = Subscription(self.destination, name, client_id, selector, no_local)
        self._registry.for_store(self.destination, lambda store: store.subscribe(subscription, retroactive))
        return self._subscriber(subscription)

    def subscriptions(self) -> list[Subscriber]:
        """Its durable subscriptions, in order of client and name."""
        subscriptions = sorted(self._registry.subscriptions_of(self.destination), key=lambda s: s.key)
        return [self._subscriber(subscription) for subscription in subscriptions]

    def _subscriber(self, subscription: Subscription) -> Subscriber:
        return Subscriber(self._registry, subscription)

    def receive(self, timeout: float | None = 0, *, lease: float | None = None) -> NoReturn:
        """Nobody receives from a topic as such, whose messages go to its subscriptions. Raises DestinationError, which
        names them."""
        self._refuse("receive")

    def receive_many(self, n: int, timeout: float | None = 0, *, lease: float | None = None) -> NoReturn:
        """Likewise."""
        self._refuse("receive_many")

    def consume(self, timeout: float | None = None, *, lease: float | None = None) -> NoReturn:
        """Likewise."""
        self._refuse("consume")

    def listen(
        self,
        on_message: Callable[[Message], object],
        credit: int = 1,
        *,
        on_end: Callable[[Exception], object] | None = None,
        lease: float | None = None,
    ) -> NoReturn:
        """Likewise."""
        self._refuse("listen")

    def _refuse(self, what: str) -> NoReturn:
        names = [repr(subscriber.subscription.name) for subscriber in self.subscriptions()]
        there = f"those there are: {', '.join(names)}" if names else "there is none yet, so what is sent is dropped"
        raise DestinationError(
            f"{self.destination} is a topic, and messages are received from its durable subscriptions: "
            f"topic.subscribe(name).{what}(); {there}"
        )
