"""A queue between a store of this router's own and a shared one, which other routers use meanwhile: nobody may copy it
there and compare, so its messages are received in one store and sent to the other, a page in each transaction. Killed
anywhere, each is in one of both.

Into a shared store go all messages; out of it those that are ready. What others hold, or send later, stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ...adapters.core.migration.copying import is_shared
from ...policies.errors import PlacementError
from ...policies.names.destination import Destination
from ...policies.text import count_of
from ..transactions.coordinator import Coordinator
from ..transactions.global_transaction import GlobalTransaction
from ..transactions.participant import Participant
from .moving import as_it_is

if TYPE_CHECKING:
    from ...adapters.core import Store

PAGE: Final = 256
"""Messages of one transaction."""


class _Target(Participant):
    """The store that a queue is brought to."""

    def destinations(self) -> list[Destination]:
        """Return none that is to have a row there: it has that of the other store until all have come."""
        return []


def drain(
    coordinator: Coordinator, source: Store, target: Store, destination: Destination, told: Callable[[int], None]
) -> int:
    """Move the messages of a queue that are ready; returns how many. `told` is called with how many have moved. Raises
    PlacementError where some stay in a store that nobody else uses, and as a commit does."""
    moved = 0
    while page := source.receive_many(destination, PAGE):
        transaction = GlobalTransaction()
        acks, sends = Participant(source.store_id, source), _Target(target.store_id, target, destination)
        for message in page:
            source.claim(message)
        acks.acks, sends.sends = page, [(destination, as_it_is(message)) for message in page]
        transaction.participants = {one.store_id: one for one in (acks, sends)}
        coordinator.commit(transaction)
        moved += len(page)
        told(moved)
    left = 0 if is_shared(source) else source.depth(destination)
    if left:
        raise PlacementError(
            f"{destination}: {count_of(left, 'message')} in store {source.name!r} cannot be received, and {moved} have "
            f"moved to {target.name!r}; see to them with the configuration until now (--restart goes back to it), and "
            "run it again"
        )
    return moved
