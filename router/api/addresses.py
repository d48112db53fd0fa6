"""Addresses: users name a destination by its text, a Destination, or the Queue or Topic that they hold.

A text holds no wildcards: it names destinations one by one. A destination whose name really holds one, from before
that was refused or by another's choice, is given as a Destination, which is taken as it is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...policies.errors import DestinationError
from ...policies.names.destination import Destination, Kind, mistyped_scheme, wildcard_in
from ...policies.names.pattern import escape
from .endpoint import Endpoint

Address = str | Destination | Endpoint[Any]


def resolve(address: Address) -> Destination:
    """Return the one destination that is meant; a bare name is a queue. Raises DestinationError, for a pattern too, and
    TypeError for what names no destination."""
    if isinstance(address, str):
        return _parsed_one(address)
    return _named(address)


def resolve_all(address: Address) -> tuple[Destination, ...]:
    """Return the parts of a composite, `queue://a,topic://b`, to be sent to. Raises as `resolve`, and DestinationError
    for a map."""
    if isinstance(address, str):
        return _parsed(address)
    return (_no_map(address if isinstance(address, Destination) else _named(address)),)


def map_of(address: Address) -> Destination:
    """Return the map that is meant; a bare name is one here. Raises DestinationError for a queue and a topic."""
    return _of_kind(Kind.MAP, address)


def topic_of(address: Address) -> Destination:
    """Return the topic that is meant; a bare name is one here. Raises DestinationError for a queue."""
    return _of_kind(Kind.TOPIC, address)


def queue_of(address: Address) -> Destination:
    """Return the queue that is meant. Raises DestinationError for a topic."""
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
def _parsed_one(text: str) -> Destination:
    return _plain(Destination.parse(text))


@lru_cache(maxsize=16384)
def _parsed(text: str) -> tuple[Destination, ...]:
    return tuple(_no_map(_plain(destination)) for destination in Destination.parse_composite(text))


def _no_map(destination: Destination) -> Destination:
    if destination.kind is Kind.MAP:
        raise DestinationError(
            f"{destination} is a map: nothing is sent there; put values with router.map() or Transaction.put"
        )
    return destination


def _plain(destination: Destination) -> Destination:
    """Return the destination. Raises DestinationError for a name that holds a wildcard."""
    wildcard = wildcard_in(destination.name)
    if wildcard is None:
        return destination
    literal = f"Destination.{destination.kind.name.lower()}({destination.name!r})"
    raise DestinationError(
        f"{destination} holds the wildcard {wildcard}, which only the patterns of a configuration have: name one "
        f"destination, or several with commas between. If one is really named so, give it as "
        f"{literal}, and write its pattern as {escape(destination.name)}"
    )


def _named(address: Destination | Endpoint[Any]) -> Destination:
    if isinstance(address, Endpoint):
        return address.destination
    if isinstance(address, Destination):
        return address
    raise TypeError(
        "a destination is given as text, as a Destination, a Queue or a Topic, "
        f"not as {type(address).__name__}: {address!r}"
    )
