"""Removing many at once: purge and delete."""

from __future__ import annotations

from collections.abc import Callable

from ..delivery import Delivery
from .changes import Change
from .chunks import Chunk
from .contents import DESTINATION_COST, Contents, DestinationState, SubscriptionState
from .residence import Residence


def purge(
    change: Change, state: DestinationState, only: SubscriptionState | None, delivery: Delivery, residence: Residence
) -> int:
    """Work out what nobody holds, of one subscription or of all; returns how many messages that is. Raises
    CorruptionError and StoreFailedError: of a chunk of which some stay, the others are read to know their sizes."""
    feeds = [only.feed] if only is not None else state.feeds
    held: dict[Chunk, int] = {}
    for key, (feed, _) in list(delivery.held.items()):
        if feed in feeds and (found := state.find(key - feed.base)) is not None:
            held[found[0]] = held.get(found[0], 0) | 1 << found[1]
    count = 0
    for chunk in state.chunks():
        mask = state.pending(only, chunk) & ~held.get(chunk, 0)
        if mask:
            count += mask.bit_count()
            change.purge(only, chunk, mask, residence.records)
    return count


def purged(state: DestinationState, delivery: Delivery, contents: Contents) -> None:
    """After that. May be done again."""
    for feed in state.feeds:
        delivery.purged(feed, contents)


def deletion(
    state: DestinationState, contents: Contents, delivery: Delivery, residence: Residence
) -> Callable[[], None]:
    """A step (changes.py): the destination goes with all that it holds. Reads nothing, so damage does not hinder it."""
    chunks, feeds = list(state.chunks()), [state.feed, *state.feeds]
    memory = contents.memory - sum(chunk.charge + chunk.resident for chunk in chunks)
    memory -= DESTINATION_COST * (1 + len(state.subscriptions))
    messages, live_bytes = contents.messages - state.count, contents.live_bytes - state.live_bytes

    def delete() -> None:
        contents.states.pop(state.destination, None)
        for feed in feeds:
            delivery.gone(feed)
        for chunk in chunks:
            chunk.dead |= chunk.live  # for who is browsing it
            contents.expiring.pop(chunk, None)
            residence.forget(chunk)
        contents.memory, contents.messages, contents.live_bytes = memory, messages, live_bytes
        contents.window.forget(state.number)

    return delete
