"""What users may name a destination by, everywhere: its text, a Destination, or the Queue that they hold."""

from __future__ import annotations

from functools import lru_cache

from ..policies.destination import Destination, Kind
from ..policies.errors import DestinationError
from .queue import Queue

Address = str | Destination | Queue


def resolve(address: Address) -> Destination:
    """The one queue that is meant. Raises DestinationError, and TypeError for what names no destination."""
    if isinstance(address, str):
        return _queue(Destination.parse(address))
    return _named(address)


def resolve_all(address: Address) -> tuple[Destination, ...]:
    """The queues of a composite, `queue://a,queue://b`; likewise."""
    if isinstance(address, str):
        return _parsed(address)
    return (_named(address),)


@lru_cache(maxsize=16384)
def _parsed(text: str) -> tuple[Destination, ...]:
    return tuple(_queue(part) for part in Destination.parse_composite(text))


def _named(address: Destination | Queue) -> Destination:
    if isinstance(address, Queue):
        return address.destination
    if isinstance(address, Destination):
        return _queue(address)
    raise TypeError(
        f"a destination is given as text, as a Destination or as a Queue, not as {type(address).__name__}: {address!r}"
    )


def _queue(destination: Destination) -> Destination:
    if destination.kind is not Kind.QUEUE:
        raise DestinationError(f"{destination} is a topic; this version stores messages in queues only")
    return destination
