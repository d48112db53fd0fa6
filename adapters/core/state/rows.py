"""The rows of a store: the questions that the core asks about the messages which a backend holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..record.place import Place

if TYPE_CHECKING:
    from .leases import Channel, DestinationState, SubscriptionState


class Rows(Protocol):
    """The messages that a backend holds, as the core asks for them. Asked under the store's lock, but for `bodies`."""

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        """Return the least order from `order` on of which there may be a message, as in `rows`; None: there is none.
        Asked only of a store with priorities. The cost must not grow with the orders that there could be, 65,536. With
        ALSO_WAITING added to the order, as in `rows`, that is added to what is returned."""

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        """Return the first `limit` messages of this order (None: of any) by seq, from the one after seq `after`; for a
        `subscription` those that it has yet to ack, without one all. Whether somebody holds them, or they have expired,
        is not the backend's affair.

        Those that wait for their time are not among those of an order, and cost nothing there, however many there are;
        of any order (None), and where ALSO_WAITING is added to one, they are."""

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        """Return where one message is; None if it is dead, or acked by the subscription. `order`: its order, where the
        caller knows it."""

    def unacked(self, state: DestinationState, seq: int) -> Sequence[Channel]:
        """Return the channels of the subscriptions that have yet to ack a topic's message."""

    def expired(self, since: int, now: int) -> Iterable[tuple[DestinationState, Place]]:
        """Return the messages that expire behind `since` and by `now` (ms), in any order. Cheap if there are none. The
        caller goes on with the result later, when the store may have changed. Messages that have come since, or died,
        may be in it or not."""

    def limited(self, least: int) -> Iterable[tuple[Channel, Place]]:
        """Return the messages that were given back so often or more often. Asked for at open and when there are many.
        The caller goes on with the result later, as with that of `expired`."""

    def bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        """Return the records of these messages; None for one that has died meanwhile and is not there any more. Raises
        CorruptionError where one is damaged, and ReadError where the disk does not give it now. Any thread."""


@runtime_checkable
class ScheduledRows(Protocol):
    """The messages that wait for their time, of a backend in which messages can wait. Asked under the store's lock."""

    def next_due(self) -> int:
        """Return when the first of those that wait is due (ms); 0: none waits. Cheap."""

    def due(self, now: int, limit: int) -> Sequence[tuple[DestinationState, int, Place]]:
        """Return the first of those that wait and are due by now (ms), of all destinations, at most so many. They come
        by the time when they were due. Each with the number of the subscription that it waits for; 0: for all."""

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        """Return until when a message waits there (ms); 0: it does not. Without a subscription, of a topic's: for
        all."""


@runtime_checkable
class KeyedRows(Protocol):
    """The values of maps in a backend that keeps them: what is put into a map takes the place of what its key had
    before (Table.put). Asked under the store's lock."""

    def keyed(self, state: DestinationState, names: Sequence[bytes]) -> Mapping[bytes, Place]:
        """Return where the values of these keys of a map are, expired or not, by key: of those that have one."""

    def keys(self, state: DestinationState, start: bytes, limit: int) -> Sequence[tuple[bytes, Place]]:
        """Return the first `limit` keys of a map from `start` on, with their values' places. Keys come in the order of
        their bytes."""
