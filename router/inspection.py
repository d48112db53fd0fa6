"""Inspection is what the commands ask of a router beyond what its users do.

    with anabranch.open("data") as router:
        inspection_of(router).bytes_of(destination)         # router.inspection_of

The commands use this and the public methods, nothing else of a router. The router of a shared directory has one that
asks the owner (sharing/client/inspecting.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING, Any

from ..adapters.core.messages import Message
from ..adapters.core.migration.copying import amount
from ..adapters.core.store_types import SubscriptionKey
from ..policies.config.adapters import load_adapter
from ..policies.names.destination import Destination
from .api.consumer import Backlog
from .api.queue import Queue
from .api.transaction import Transaction
from .migration.moving import move_messages
from .placement.registry import StoreRegistry
from .transactions.decision_log import DecisionLog
from .upkeep import overview, space

if TYPE_CHECKING:
    from .upkeep.backup import BackedUp
    from .upkeep.explanation import DirectoryExplanation


class Inspection:
    """Answers the commands' questions. Threads: all."""

    is_own = True
    """The stores are this process's, and go with it."""

    def __init__(
        self,
        registry: StoreRegistry,
        decisions: DecisionLog,
        begin: Callable[[], Transaction],
        sessions: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """`begin` begins a transaction that holds what it must, whatever the limits of transactions."""
        self._registry, self._decisions, self._begin = registry, decisions, begin
        self.sessions = sessions
        """Returns who is connected, and what each holds: plain values."""

    @property
    def owner_pid(self) -> int:
        """Return the process that has the directory open."""
        return os.getpid()

    def option(self, destination: Destination, name: str) -> Any:
        """Return an option of the store that a destination is in, or would be; None if its kind has none of that
        name."""
        return self._registry.option_for(destination, name)

    def is_volatile(self, destination: Destination) -> bool:
        """Return whether a destination is, or would be, in memory alone, so that it goes when the router closes."""
        volatile = self._registry.for_held(destination, lambda store: store.volatile, None)
        if volatile is None:
            volatile = load_adapter(self._registry.route(destination).target.kind).backend_type.volatile
        return volatile

    def bytes_of(self, destination: Destination) -> int:
        """Return how many bytes the messages of a destination have."""
        return self._registry.for_held(destination, lambda store: amount(store, destination).bytes, 0)

    def depth(self, destination: Destination) -> int:
        """Return how many messages or values a destination has, of whatever kind it is."""
        return self._registry.for_held(destination, lambda store: store.depth(destination), 0)

    def newer(self, backlog: Backlog, seq: int) -> list[Message]:
        """Return the messages behind a seq, in order of theirs, also where others are in another order."""
        return sorted((one for one in backlog.browse() if one.seq > seq), key=lambda one: one.seq)

    def newest(self, backlog: Backlog, count: int) -> list[Message]:
        """Return the last so many messages, in order of their seqs."""
        return newest_of(backlog.browse(), count)

    def dead_letters(self, failed: Collection[str]) -> Counter[tuple[Destination, SubscriptionKey | None]]:
        """Return the dead letters by where they come from, but for those in the `failed` stores."""
        return overview.dead_letters(self._registry, failed)

    def stores(self) -> list[dict[str, Any]]:
        """Return what each store holds and has done: plain values."""
        return list(overview.overview(self._registry, self._registry.stats()[0]))

    def explain(self) -> DirectoryExplanation:
        """Return why the data directory takes the disk that it takes; see upkeep/explanation.py."""
        from .upkeep.explanation import explain_open  # which needs the journal's part

        return explain_open(self._registry)

    def move(self, source: Queue, target: Queue, limit: int | None, progress: Callable[[int, int], None]) -> int:
        """Move the messages of one queue into another; see moving.py."""
        return move_messages(self._begin, source, target, limit, progress)

    def compact(self, names: Sequence[str], progress: Callable[[int, int], object]) -> dict[str, int]:
        """Compact all recorded stores, or those of these names; see space.compact_recorded."""
        return space.compact_recorded(self._registry, names, progress)

    def backup(self, target: str) -> BackedUp:
        """Copy the data directory as it is at one moment; see upkeep/backup.py."""
        from .upkeep.backup import backup  # which few need

        return backup(self._registry, self._decisions, target)

    @property
    def decisions_damage(self) -> BaseException | None:
        """The reason why the decision log cannot be used; None if it can."""
        return self._decisions.unusable


def newest_of(messages: Iterable[Message], count: int) -> list[Message]:
    """Return the last so many of messages, in order of their seqs."""
    return nlargest(count, messages, key=lambda one: one.seq)[::-1]
