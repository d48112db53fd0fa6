"""What users may name a destination by, everywhere: its text, a Destination, or the Queue or Topic that they hold."""

from __future__ import annotations

from functools import lru_cache

from ..policies.destination import Destination, Kind, mistyped_scheme
from ..policies.errors import DestinationError
from .endpoint import Endpoint

Address = str | Destination | Endpoint


def resolve(address: Address) -> Destination:
    """The one destination that is meant; a bare name is a queue. Raises DestinationError, and TypeError for what names
    no destination."""
    if isinstance(address, str):
        return Destination.parse(address)
    return _named(address)


def resolve_all(address: Address) -> tuple[Destination, ...]:
    """The parts of a composite, `queue://a,topic://b`; likewise."""
    if isinstance(address, str):
        return _parsed(address)
    return (_named(address),)


def topic_of(address: Address) -> Destination:
    """The topic that is meant; a bare name is one here. Raises DestinationError for a queue."""
    return _of_kind(Kind.TOPIC, address)


def queue_of(address: Address) -> Destination:
    """The queue that is meant. Raises DestinationError for a topic."""
    return _of_kind(Kind.QUEUE, address)


def _of_kind(kind: Kind, address: Address) -> Destination:
    if isinstance(address, str) and "://" not in address and not mistyped_scheme(address):
        address = f"{kind.scheme}{address}"
    destination = resolve(address)
    if destination.kind is not kind:
        other = destination.kind.name.lower()
        raise DestinationError(f"{destination} is a {other}, not a {kind.name.lower()}; use router.{other}() for it")
    return destination


@lru_cache(maxsize=16384)
def _parsed(text: str) -> tuple[Destination, ...]:
    return Destination.parse_composite(text)


def _named(address: Destination | Endpoint) -> Destination:
    if isinstance(address, Endpoint):
        return address.destination
    if isinstance(address, Destination):
        return address
    raise TypeError(
        "a destination is given as text, as a Destination, a Queue or a Topic, "
        f"not as {type(address).__name__}: {address!r}"
    )
