"""Durable subscriptions, each a queue of its own (rules Q16 and Q17), and the end of what is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....policies.names.destination import Destination, Kind
from ...core.service.subscriptions import checked, require_same, require_topic, require_unclaimed, shown, unknown
from ...core.state.leases import CLAIMED
from ...core.store_types import Change, Subscription, SubscriptionKey
from ..database.columns import escaped, unescaped
from .database import Ask, SharedDatabase
from .leases import Leases
from .queues import Queues, destination_of, text_of
from .waiting import Waiting

DELETED = "its queue, or its subscription, is gone"
"""How a lease has ended then."""


class Topics:
    """The topics of one open store. Threads: all."""

    def __init__(self, database: SharedDatabase, queues: Queues, leases: Leases, waiting: Waiting) -> None:
        self._database, self._queues, self._leases, self._waiting = database, queues, leases, waiting

    def subscriptions(self) -> dict[int, Subscription]:
        """Return all subscriptions, by number."""
        return {
            number: _subscription(destination_of(topic), fields)
            for number, topic, *fields in self._database.look("subscriptions")
        }

    def subscribe(self, subscription: Subscription, retroactive: bool) -> bool:
        """Begin a subscription, as Store.subscribe."""
        checked(subscription)
        there = self._database.change(lambda ask: self._begin(ask, subscription, retroactive))
        if there is not None:
            require_same(there, subscription)
        return there is None

    def _begin(self, ask: Ask, subscription: Subscription, retroactive: bool) -> Subscription | None:
        """Begin a subscription; returns the one of that client and name, if it is there."""
        ((topic,),) = ask("declare", text_of(subscription.topic), True)  # locks its row
        client, name = map(escaped, subscription.key)
        for found in ask("subscription", topic, client, name):
            return _subscription(subscription.topic, found)
        selector = None if subscription.selector is None else escaped(subscription.selector)
        ((number,),) = ask("subscribe", topic, client, name, selector, bool(subscription.no_local))
        if retroactive:
            ask("copy_held", number, topic)
        return None

    def unsubscribe(self, topic: Destination, key: SubscriptionKey) -> int:
        """End a subscription, as Store.unsubscribe."""
        require_topic(topic)

        def end(ask: Ask) -> tuple[int, int]:
            number = self._end(ask, topic, key)
            if not number:
                raise unknown(topic, key)
            self._require_unclaimed(ask, [number], f"the {shown(topic, key)}", "removed")
            ((count,),) = ask("depth", number)
            self.remove(ask, [number])
            return number, count

        number, count = self._database.change(end)
        self.ended([number])
        return count

    def _end(self, ask: Ask, topic: Destination, key: SubscriptionKey) -> int:
        """End a subscription, whose messages are still there; returns its number, 0 if there is none."""
        ask("lock_topic", text_of(topic))
        for (number,) in ask("subscriber", text_of(topic), *map(escaped, key)):
            ask("unsubscribe", number)
            return int(number)
        return 0

    def change(self, ask: Ask, changes: Sequence[Change]) -> list[int]:
        """Carry out those changes that are still some, in order; returns the numbers of subscriptions that have ended,
        whose messages are to be removed."""
        ended = []
        for subscription, begins, retroactive in changes:
            if begins:
                self._begin(ask, subscription, retroactive)
            elif number := self._end(ask, subscription.topic, subscription.key):
                ended.append(number)
        return ended

    def remove(self, ask: Ask, numbers: Sequence[int]) -> None:
        """Remove the messages of what has ended, and tell other routers."""
        if numbers:
            ask("delete", list(numbers))
            for number in numbers:
                self._waiting.tell_deleted(ask, number)

    def ended(self, numbers: Sequence[int]) -> None:
        """Note that these are gone, once they are: leases end, and who waits for a subscription hears of it."""
        for number in numbers:
            self.forget(number)
        self._leases.ended([one for one in list(self._leases.held.values()) if one.place.queue in numbers], DELETED)

    def forget(self, number: int) -> None:
        """Ask anew what has this number."""
        self._queues.forget(number)
        self._waiting.heads.forget(number)
        self._waiting.wake([number])

    def delete(self, destination: Destination) -> int:
        """Remove a queue, or a topic with its subscriptions, as Store.delete."""
        number = self._queues.number(destination, make=False)
        if not number:
            return 0

        def delete(ask: Ask) -> tuple[list[int], int]:
            numbers = [number]
            if destination.kind is Kind.TOPIC:
                ask("lock_topic", text_of(destination))
                ((count,),) = ask("depth_of_topic", number, number)
                numbers += [one for (one,) in ask("unsubscribe_all", number)]
            else:
                ((count,),) = ask("depth", number)
            self._require_unclaimed(ask, numbers, str(destination), "deleted")
            ask("delete_ids", number)
            ask("undeclare", number)
            self.remove(ask, numbers)
            return numbers, count

        numbers, count = self._database.change(delete)
        self.ended(numbers)
        return count

    def _require_unclaimed(self, ask: Ask, numbers: list[int], what: str, done: str) -> None:
        held = [one for one in list(self._leases.held.values()) if one.hold == CLAIMED and one.place.queue in numbers]
        ((prepared,),) = ask("claimed", numbers)
        require_unclaimed(what, done, len(held) + prepared)


def _subscription(topic: Destination, fields: Sequence[Any]) -> Subscription:
    """Return a subscription with the fields that the tables have."""
    client, name, selector, no_local = fields
    return Subscription(
        topic, unescaped(name), unescaped(client), None if selector is None else unescaped(selector), no_local
    )
