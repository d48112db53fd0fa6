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

from typing import TYPE_CHECKING, Final, NoReturn

from ...adapters.core.messages import T
from ...adapters.core.store_types import Subscription
from .consumer import Backlog, Consumer
from .endpoint import Endpoint

if TYPE_CHECKING:
    from ...policies.names.destination import Destination
    from ..placement.registry import StoreRegistry
    from .codecs import Codec

_OF_SUBSCRIPTIONS: Final = ("consume", "listen", "listen_nowait", "receive", "receive_many")


class Subscriber(Consumer[T]):
    """A durable subscription as its user holds it. Cheap to make and keep; any thread may use it, and several may
    receive for one: each message goes to one of them. Bodies are those of its topic's codec."""

    __slots__ = ("_codec", "_key", "_registry", "destination", "subscription")

    def __init__(self, registry: StoreRegistry, subscription: Subscription, codec: Codec[T] | None = None) -> None:
        self._registry = registry
        self._codec = codec
        self.subscription: Subscription = subscription
        self.destination: Destination = subscription.topic
        """The topic."""
        self._key = subscription.key

    def __repr__(self) -> str:
        client = f" of client {self.subscription.client_id!r}" if self.subscription.client_id else ""
        return f"<Subscriber {self.subscription.name!r}{client}, {self.subscription.topic}>"

    def unsubscribe(self) -> int:
        """End the subscription; returns how many messages it had yet to ack. Raises UnknownSubscriptionError, and
        TransactionError while a transaction has claimed one of them."""
        topic, key = self.destination, self.subscription.key
        return self._registry.for_store(topic, lambda store: store.unsubscribe(topic, key))


class Topic(Endpoint[T], Backlog[T]):
    """A topic, each of whose messages goes to every durable subscription. Its codec, if it has one, is theirs too."""

    __slots__ = ()

    def subscribe(
        self,
        name: str,
        client_id: str = "",
        selector: str | None = None,
        no_local: bool = False,
        retroactive: bool = False,
    ) -> Subscriber[T]:
        """Begin the durable subscription of that name and client, or take it up again if it is there.

        The subscription keeps what is sent from now on; with `retroactive` also what the topic still holds for others.
        Raises SubscriptionError if it is there with another `selector` or `no_local`: unsubscribe first.
        """
        subscription = Subscription(self.destination, name, client_id, selector, no_local)
        self._registry.for_store(self.destination, lambda store: store.subscribe(subscription, retroactive))
        return Subscriber(self._registry, subscription, self._codec)

    def subscriptions(self) -> list[Subscriber[T]]:
        """Return the topic's durable subscriptions, in order of client and name."""
        subscriptions = sorted(self._registry.subscriptions_of(self.destination), key=lambda s: s.key)
        return [Subscriber(self._registry, subscription, self._codec) for subscription in subscriptions]

    if not TYPE_CHECKING:  # which knows that a topic has none of these

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, which names the subscriptions that messages are received from."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_SUBSCRIPTIONS:
                text = (
                    f"{self.destination} is a topic, and messages are received from its durable subscriptions: "
                    f"topic.subscribe(name).{name}(), or one of topic.subscriptions()"
                )
            raise AttributeError(text, name=name, obj=self)
