"""Durable subscriptions, each a queue of its own (rules Q16 and Q17), and the end of what is deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from ....policies.errors import AnabranchError
from ....policies.names.destination import Destination, Kind
from ...core.service.subscriptions import checked, require_same, require_topic, require_unclaimed, shown, unknown
from ...core.state.leases import CLAIMED
from ...core.store_types import Change, Subscription, SubscriptionKey
from ..database.columns import escaped, unescaped
from .database import Ask, SharedDatabase
from .leases import Leases, Place
from .queues import Queues, Source, destination_of, text_of
from .usage import Usage
from .waiting import Waiting

DELETED = "its queue, or its subscription, is gone"
"""How a lease has ended then."""
PAGE: Final = 500
"""Messages that are browsed or removed at once."""
PAGES_LEFT: Final = 20
"""So many pages of what others have left are removed at a time."""


class Topics:
    """The topics of one open store. Threads: all."""

    def __init__(
        self, database: SharedDatabase, queues: Queues, leases: Leases, waiting: Waiting, usage: Usage
    ) -> None:
        self._database, self._queues, self._leases, self._waiting = database, queues, leases, waiting
        self._usage = usage
        self.prepared: Callable[[Ask, Sequence[int]], int] = lambda ask, numbers: 0
        """Returns how many messages of some queues branches have claimed."""
        self._removing: set[int] = set()
        """Queues and subscriptions whose messages a call removes."""

    def subscriptions(self) -> dict[int, Subscription]:
        """Return all subscriptions, by number."""
        return {
            number: _subscription(destination_of(topic), fields)
            for number, topic, *fields in self._database.look("subscriptions")
        }

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
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
        """End a subscription, as Store.unsubscribe. What another router has leased for it is not leased any more."""
        require_topic(topic)

        def end(ask: Ask) -> int:
            number = self._end(ask, topic, key)
            if not number:
                raise unknown(topic, key)
            self._require_unclaimed(ask, [number], f"the {shown(topic, key)}", "removed")
            return number

        return self.ended([self._database.change(end)])

    def _end(self, ask: Ask, topic: Destination, key: SubscriptionKey) -> int:
        """End a subscription, and tell other routers; its messages are still there. Returns its number, 0 if there is
        none."""
        ask("lock_topic", text_of(topic))
        for (number,) in ask("subscriber", text_of(topic), *map(escaped, key)):
            self._queues.note(number, Source(topic, key))
            ask("unsubscribe", number)
            self._waiting.tell_deleted(ask, number)
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

    def ended(self, numbers: Sequence[int]) -> int:
        """Note that these are gone, once they are: leases end, and who waits for a subscription hears of it. Remove
        their messages, and return how many this has removed. What it cannot remove now goes later (`remove_left`)."""
        for number in numbers:
            self.forget(number)
        self._leases.ended([one for one in list(self._leases.held.values()) if one.place.queue in numbers], DELETED)
        count = 0
        self._removing.update(numbers)
        try:
            with suppress(AnabranchError):
                for some in self.removed("delete", numbers):
                    count += some
        finally:
            self._removing.difference_update(numbers)
            self._waiting.has_orphans |= bool(numbers)
        return count

    def removed(self, how: str, numbers: Sequence[int]) -> Iterator[int]:
        """Remove what is there now, each page in a transaction of its own: `purge` what nobody holds, or `delete` all.
        Yields how many messages are in none of the queues any more."""
        for number in numbers:
            ((last,),) = self._database.look("highest_in", number)
            page = [0] * PAGE
            while last is not None and len(page) == PAGE:
                given = how, number, max(page), last, PAGE  # not past those that were removed
                page = self._database.change(lambda ask, given=given: [one for (one,) in ask(*given)])  # type: ignore[misc]
                self._usage.tell((), [Place(number, one, 0) for one in page])
                yield len(page) if len(numbers) == 1 else self._database.look("gone", page, list(numbers))[0][0]

    def remove_left(self) -> bool:
        """Remove some of the messages of subscriptions that have ended, which another router has left, or this one
        after an error. Returns whether there may be more. Raises StoreFailedError."""
        left = {number for (number,) in self._database.look("orphans")} - self._removing
        for number in left:
            for _ in islice(self.removed("delete", [number]), PAGES_LEFT):
                pass
        return bool(left)

    def forget(self, number: int) -> None:
        """Ask anew what has this number."""
        self._queues.forget(number)
        self._waiting.heads.forget(number)
        self._waiting.wake([number])

    def delete(self, destination: Destination) -> int:
        """Remove a queue, or a topic with its subscriptions, as Store.delete. A queue keeps its number (Q15), and with
        it what was sent: so that is removed first, and a delete that is interrupted has removed some of it."""
        number = self._queues.number(destination, make=False)
        if not number:
            return 0
        self._require_unclaimed(self._database.look, [number], str(destination), "deleted")
        count = 0 if destination.kind is Kind.TOPIC else sum(self.removed("delete", [number]))

        def delete(ask: Ask) -> list[int]:
            numbers = [number]
            ask("lock_topic", text_of(destination))
            for one, client, name in ask("unsubscribe_all", number):
                self._queues.note(one, Source(destination, (unescaped(client), unescaped(name))))
                numbers.append(one)
            self._require_unclaimed(ask, numbers[1:], str(destination), "deleted")
            ask("delete_ids", number)
            ask("undeclare", number)
            for one in numbers:
                self._waiting.tell_deleted(ask, one)
            return numbers

        return count + self.ended(self._database.change(delete))

    def _require_unclaimed(self, ask: Ask, numbers: Sequence[int], what: str, done: str) -> None:
        held = [one for one in list(self._leases.held.values()) if one.hold == CLAIMED and one.place.queue in numbers]
        require_unclaimed(what, done, len(held) + self.prepared(ask, numbers))


def _subscription(topic: Destination, fields: Sequence[Any]) -> Subscription:
    """Return a subscription with the fields that the tables have."""
    client, name, selector, no_local = fields
    return Subscription(
        topic, unescaped(name), unescaped(client), None if selector is None else unescaped(selector), no_local
    )
