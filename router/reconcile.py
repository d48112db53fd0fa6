"""What to say when a changed configuration would hide messages (invariant 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..policies.config import StoreConfig
from ..policies.destination import Destination
from ..policies.errors import PlacementError
from ..policies.wildcard import Match, escape

SHOWN_MAX = 20


class Misplaced(NamedTuple):
    """A destination whose messages lie in another store than the configuration routes it to."""

    destination: Destination
    messages: int
    store: str
    match: Match[StoreConfig] | None


def misplaced_error(found: Sequence[Misplaced]) -> PlacementError:
    """The refusal: every destination, how many messages, from where, to where, and the way out."""
    lines = [
        f"the configuration would hide messages of {len(found)} destination(s); nothing was changed. Either leave them "
        "where they are with the patterns below, or empty them under the old configuration first:"
    ]
    for item in found[:SHOWN_MAX]:
        target = f"store {item.match.target.name!r}" if item.match is not None else "no store"
        store = item.store.partition(":")[0]
        lines.append(
            f"  {item.destination}: {item.messages} message(s) in store {item.store!r}, routed to {target}; "
            f'to leave it there add "{item.destination.kind.scheme}{escape(item.destination.name)}" to the match of '
            f"store {store!r}"
        )
    if len(found) > SHOWN_MAX:
        lines.append(f"  and {len(found) - SHOWN_MAX} more")
    return PlacementError("\n".join(lines))
