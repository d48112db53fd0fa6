"""The numbers by which the tables of a shared store know queues, topics and durable subscriptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....policies.errors import DestinationError
from ....policies.names.destination import Destination, Kind
from ...core.service.subscriptions import require_topic, unknown
from ...core.store_types import SubscriptionKey
from ..database.columns import escaped, unescaped
from .database import SharedDatabase


class Source(NamedTuple):
    """A queue, or a topic for one of its subscriptions, or for all of them."""

    destination: Destination
    subscription: SubscriptionKey | None = None


class Queues:
    """The numbers that one router knows. Threads: all."""

    def __init__(self, name: str, database: SharedDatabase) -> None:
        self._name, self._database = name, database
        self._numbers: dict[tuple[Destination, SubscriptionKey | None], int] = {}
        self._sources: dict[int, Source] = {}
        self._declared: set[int] = set()
        """Those that were found to be declared, or were made so."""
        self._forgotten = 0
        """How often something was forgotten."""

    def number(self, destination: Destination, make: bool = True, declared: bool = True) -> int:
        """Return the number of a queue or a topic; 0 for one that is not there and is not to be made. Raises
        DestinationError."""
        number = self._numbers.get((destination, None))
        if number is not None and (not make or not declared or number in self._declared):
            return number
        if destination.kind is Kind.MAP:
            raise DestinationError(
                f"{destination}: store {self._name!r} is shared, and keeps no maps; route it to another store"
            )
        name, forgotten = text_of(destination), self._forgotten
        found = self._database.look("queue", name)
        if make and not (found and found[0][1] >= declared):
            found = self._database.look("declare", name, declared)
            found = [(*found[0], declared)]
        if not found:
            return 0
        number = int(found[0][0])
        self.note(number, Source(destination))
        if found[0][1]:
            self._declared.add(number)
        if forgotten != self._forgotten:  # it may have been deleted since the database has told this
            self.forget(number)
        return number

    def declare(self, destination: Destination) -> None:
        """Declare a queue or a topic, whatever is known of it here."""
        self._numbers.pop(Source(destination), None)
        self.number(destination)

    def receiving(self, destination: Destination, key: SubscriptionKey | None, make: bool = False) -> int:
        """Return the number of what one receives from, as `number` does; what this makes is not declared. Raises
        DestinationError, UnknownSubscriptionError."""
        if key is not None:
            return self.subscription(destination, key)
        if destination.kind is Kind.TOPIC:
            raise DestinationError(f"{destination} is a topic: receive for one of its subscriptions; say which")
        return self.number(destination, make, declared=False)

    def subscription(self, topic: Destination, key: SubscriptionKey, known: bool = True) -> int:
        """Return the number of a subscription, which may have ended elsewhere if it is taken from what is `known`.
        Raises DestinationError, UnknownSubscriptionError."""
        require_topic(topic)
        source = Source(topic, key)
        number = self._numbers.get(source) if known else None
        if number is None:
            client, name = key
            for (number,) in self._database.look("subscriber", text_of(topic), escaped(client), escaped(name)):
                self.note(number, source)
                return int(number)
            raise unknown(topic, key)
        return number

    def of(self, number: int) -> Source | None:
        """Return what has a number; None if it was a subscription's that has ended."""
        source = self._sources.get(number)
        if source is None:
            for text, client, name in self._database.look("queue_of", number):
                key = None if name is None else (unescaped(client), unescaped(name))
                self._sources[number] = source = Source(destination_of(text), key)
        return source

    def is_topic(self, number: int) -> bool:
        """Return whether it is a topic's."""
        source = self.of(number)
        return source is not None and source.destination.kind is Kind.TOPIC

    def all(self) -> list[Destination]:
        """Return the queues and topics that are declared, or hold messages."""
        return self.found(self._database.look("queues"))

    def found(self, queues: Sequence[tuple[int, str]]) -> list[Destination]:
        """Return the destinations of what the database has told of."""
        named = [(number, Source(destination_of(text))) for number, text in queues]
        for number, source in named:
            self._sources[number] = source
        return [source.destination for _, source in named]

    def note(self, number: int, source: Source) -> None:
        """Note what has a number."""
        self._sources[number] = source
        self._numbers[source] = number

    def forget(self, number: int) -> None:
        """Ask for a number once more: a queue was deleted, and who sends there declares it anew; or a subscription has
        ended."""
        self._forgotten += 1
        source = self._sources.get(number)
        self._declared.discard(number)
        if source is not None and self._numbers.get(source) == number:
            self._numbers.pop(source, None)

    def forget_declared(self) -> None:
        """Ask once more which are declared: that some were deleted may not have been heard."""
        self._forgotten += 1
        self._declared.clear()

    def forget_all(self) -> None:
        """Ask for all numbers once more."""
        self.forget_declared()
        self._numbers.clear()
        self._sources.clear()


def text_of(destination: Destination) -> str:
    """Return the name of a destination in the tables."""
    return escaped(str(destination))


def destination_of(text: str) -> Destination:
    """Return the destination of a name in the tables."""
    return Destination.restored(unescaped(text))
