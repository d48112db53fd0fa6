"""Messages whose bytes are damaged. A store that goes on without them (`on_corruption: salvage`) writes down that one
is lost (Backend.lose), and who would receive it acks it instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Final

from ....policies.errors import CorruptionError
from ..backend import ReadError
from ..engine.engine import Engine
from ..record.place import Place
from ..state.leases import DestinationState

_record_of = itemgetter(1)
_PUT_ANEW: Final = "put another one, or restore the file from a backup to have it again"


def is_damage(error: BaseException) -> bool:
    """Return whether a message's bytes were read and are damaged. Bytes that the disk did not give may be tried
    again."""
    return isinstance(error, CorruptionError) and not isinstance(error, ReadError)


def lose(
    engine: Engine, state: DestinationState, place: Place, error: CorruptionError, message_id: str | None = None
) -> None:
    """Write down, durably, that a message is lost which raised this when it was read. Raises the error if the store
    does not go on without it."""
    write_down = engine.backend.lose
    if write_down is None or not is_damage(error):
        if state.is_map and message_id is not None and is_damage(error):
            error._say(f"the value of {message_id!r} in {state.destination}: {error.reason}", _PUT_ANEW)
        raise error
    write_down(state, place, error, message_id)


def readable(
    engine: Engine, state: DestinationState, places: Sequence[Place], message_ids: Sequence[str] = ()
) -> Iterator[bytes | None]:
    """Yield the records of these messages, in order; None for one that has died meanwhile, or is lost now, and stays
    until somebody would receive it. `message_ids` are theirs, if they are known. Raises as Backend.bodies where the
    store does not go on without them."""
    rest = places
    while rest:
        left = iter(rest)
        records = chain.from_iterable(map(engine.rows.bodies, (state,), (rest,)))  # asked for behind the first place
        try:
            yield from map(_record_of, zip(left, records, strict=True))
            return
        except CorruptionError as error:
            rest = list(left)  # those behind it
            at = len(places) - len(rest) - 1
            lose(engine, state, places[at], error, message_ids[at] if message_ids else None)
            yield None
