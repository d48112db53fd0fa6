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

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from ..adapters.base import Counts, Listener, Message, Subscription
from ..policies.errors import DestinationError
from .consumer import Consumer
from .endpoint import Endpoint

if TYPE_CHECKING:
    from .store_registry import StoreRegistry


class Subscriber:
    """A durable subscription as its user holds it. Cheap to make and keep; any thread may use it, and several may
    receive for one: each message goes to one of them."""

    __slots__ = ("_consumer", "_registry", "subscription")

    def __init__(self, registry: StoreRegistry, subscription: Subscription) -> None:
        self._registry = registry
        self.subscription = subscription
        self._consumer = Consumer(registry, subscription.topic, subscription.key)

    def __repr__(self) -> str:
        client = f" of client {self.subscription.client_id!r}" if self.subscription.client_id else ""
        return f"<Subscriber {self.subscription.name!r}{client}, {self.subscription.topic}>"

    def receive(self, timeout: float | None = 0) -> Message | None:
        """Lease the first message that this subscription has not acked and nobody holds for it; as Queue.receive.
        Raises UnknownSubscriptionError once it is unsubscribed."""
        return self._consumer.receive(timeout)

    def listen(
        self,
        on_message: Callable[[Message], object],
        credit: int = 1,
        *,
        on_end: Callable[[Exception], object] | None = None,
    ) -> Listener:
        """Call `on_message` with each message for this subscription; as Queue.listen. Ends, too, when the subscription
        does."""
        return self._consumer.listen(on_message, credit, on_end)

    def browse(self, limit: int | None = None, after: int | Message = 0) -> Iterator[Message]:
        """Look at what this subscription has yet to ack; as Queue.browse."""
        return self._consumer.browse(limit, after)

    def purge(self) -> int:
        """Ack all that nobody holds for this subscription; returns how many."""
        return self._consumer.purge()

    def counts(self) -> Counts:
        """How many of the messages that it has yet to ack are ready, and how many leased; as Queue.counts."""
        return self._consumer.counts()

    def depth(self) -> int:
        """Messages that it has yet to ack, leased ones included."""
        return self._consumer.depth()

    def unsubscribe(self) -> int:
        """End it; returns how many messages it had yet to ack. Raises UnknownSubscriptionError, and TransactionError
        while a transaction has claimed one of them."""
        return self._registry.unsubscribe(self.subscription)


class Topic(Endpoint):
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
        self._registry.subscribe(subscription, retroactive)
        return Subscriber(self._registry, subscription)

    def subscriptions(self) -> list[Subscriber]:
        """Its durable subscriptions, in order of client and name."""
        if self._registry.store_of(self.destination) is None:
            return []
        known = self._for_store(lambda store: store.subscriptions())
        mine = sorted((s for s in known if s.topic == self.destination), key=lambda s: s.key)
        return [Subscriber(self._registry, subscription) for subscription in mine]

    def receive(self, timeout: float | None = 0) -> NoReturn:
        """Nobody receives from a topic as such, whose messages go to its subscriptions. Raises DestinationError, which
        names them."""
        self._refuse("receive")

    def listen(self, on_message: Callable[[Message], object], credit: int = 1) -> NoReturn:
        """Likewise."""
        self._refuse("listen")

    def _refuse(self, what: str) -> NoReturn:
        names = [repr(subscriber.subscription.name) for subscriber in self.subscriptions()]
        there = f"those there are: {', '.join(names)}" if names else "there is none yet, so what is sent is dropped"
        raise DestinationError(
            f"{self.destination} is a topic, and messages are received from its durable subscriptions: "
            f"topic.subscribe(name).{what}(); {there}"
        )

    def browse(self, limit: int | None = None, after: int | Message = 0) -> Iterator[Message]:
        """Look at all messages that some subscription has yet to ack; as Queue.browse."""
        return Consumer(self._registry, self.destination, None).browse(limit, after)

    def depth(self) -> int:
        """Messages that some subscription has yet to ack, each counted once."""
        return Consumer(self._registry, self.destination, None).depth()
