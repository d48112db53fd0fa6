"""The place of a message, as a backend tells the core, and the order in which messages are delivered."""

from __future__ import annotations

from typing import Any, Final

from ..messages import PRIORITY_MAX

Place = tuple[int, int, int, int, Any]
"""The place of a message: order, seq, when it expires (ms, 0: never), how often it has been given back, what its
backend needs to find it."""
ORDER: Final = 0
SEQ: Final = 1
EXPIRES: Final = 2
DELIVERIES: Final = 3
OWN: Final = 4


class TransientSlot(tuple[Any, int]):
    """The last field of a Place whose message is not persistent: where it is in memory."""

    __slots__ = ()


def is_volatile(place: Place) -> bool:
    """Return whether the message at a place is transient."""
    return type(place[OWN]) is TransientSlot


ALSO_WAITING: Final = 1 << 20
"""Added to an order where the rows are asked for: those too that wait for their time."""

ORDER_MAX: Final = PRIORITY_MAX
"""The order of the least urgent messages."""


def order_of(priority: int, priorities: bool) -> int:
    """Return the number that comes before the seq in the order of delivery; 0 in a store that does not order by
    priority."""
    return PRIORITY_MAX - priority if priorities else 0


def priority_of(order: int) -> int:
    """Return the priority of the messages of an order, in a store that orders by it."""
    return PRIORITY_MAX - order
