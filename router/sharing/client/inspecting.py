"""Asks the owner for commands that look into a router which another process has open (router/inspection.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ....adapters.core.messages import Message
from ....adapters.core.store_types import SubscriptionKey
from ....policies.errors import StoreFailedError
from ....policies.names.destination import Destination
from ...api.consumer import Backlog
from ...api.queue import Queue
from ...inspection import newest_of
from ...migration.moving import move_pages
from ..protocol import PAGE
from .store import RemoteStore

if TYPE_CHECKING:
    from ...upkeep.backup import BackedUp
    from ...upkeep.explanation import DirectoryExplanation


class RemoteInspection:
    """Answers the commands' questions, as Inspection does. Threads: all."""

    is_own = False

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self.depth: Callable[[Destination], int] = store.depth
        """Returns how many messages or values a destination has."""

    @property
    def owner_pid(self) -> int:
        """Return the process that has the directory open."""
        return self._store.connection.owner_pid

    def option(self, destination: Destination, name: str) -> Any:
        """Return an option of the store that a destination is in, or would be."""
        return self._store.of("option", destination, name)

    def is_volatile(self, destination: Destination) -> bool:
        """Return False: nothing goes when this router closes."""
        return False

    def bytes_of(self, destination: Destination) -> int:
        """Return how many bytes the messages of a destination have."""
        return int(self._store.of("bytes_of", destination))

    def newer(self, backlog: Backlog, seq: int) -> list[Message]:
        """Return messages behind a seq, in order of theirs; more are there where any are returned, it may be."""
        return [self._store._message(fields) for fields in self._store.of("newer", backlog.destination, seq)]

    def newest(self, backlog: Backlog, count: int) -> list[Message]:
        """Return the last so many messages, in order of their seqs, or as many of those as go over at once."""
        if count > PAGE:  # more than the owner is to have in memory
            return newest_of(backlog.browse(), count)
        return [self._store._message(fields) for fields in self._store.of("newest", backlog.destination, count)]

    def dead_letters(self, failed: Collection[str]) -> Counter[tuple[Destination, SubscriptionKey | None]]:
        """Return the dead letters by where they come from, but for those in the `failed` stores."""
        found = self._store.call("dead_letters", list(failed))
        kind = list[tuple[Destination, SubscriptionKey | None, int]]
        return Counter({(source, key): count for source, key, count in msgspec.convert(found, kind)})

    def stores(self) -> list[dict[str, Any]]:
        """Return what each store holds and has done."""
        return self._store.call("overview")  # type: ignore[no-any-return]

    def sessions(self) -> list[dict[str, Any]]:
        """Return who else is connected, and what each holds."""
        return [one for one in self._store.call("sessions") if one["client"] != self._store.connection.client]

    def explain(self) -> DirectoryExplanation:
        """Return why the data directory takes the disk that it takes."""
        from ...upkeep.explanation import DirectoryExplanation  # which needs the journal's part

        return msgspec.convert(self._store.call("explain"), DirectoryExplanation)

    def move(self, source: Queue, target: Queue, limit: int | None, progress: Callable[[int, int], None]) -> int:
        """Move the messages of one queue into another, a page with each request: nothing more is moved once this
        process has gone."""
        move = partial(self._store.call, "move", str(source.destination), str(target.destination))
        return move_pages(move, source, target, limit, progress)

    def compact(self, names: Sequence[str], progress: Callable[[int, int], object]) -> dict[str, int]:
        """Compact all recorded stores, or those of these names. How far that is, the owner does not tell."""
        return self._store.call("compact_recorded", list(names))  # type: ignore[no-any-return]

    def backup(self, target: str) -> BackedUp:
        """Let the owner copy the data directory as it is at one moment. `target` is absolute."""
        from ...upkeep.backup import BackedUp  # which few need

        return msgspec.convert(self._store.call("backup", target), BackedUp)

    @property
    def decisions_damage(self) -> BaseException | None:
        """The reason why the decision log cannot be used; None if it can."""
        damage = self._store.call("decisions_damage")
        return None if damage is None else StoreFailedError(damage)
