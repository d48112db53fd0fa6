"""What the commands ask of a router that another process has open (router/inspection.py): what the owner answers, and
who asks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...adapters.core import Store
from ...adapters.core.messages import Message
from ...adapters.core.store_types import SubscriptionKey
from ...policies.errors import StoreFailedError
from ...policies.names.destination import Destination
from ..api.consumer import Backlog
from ..api.queue import Queue
from ..migration.moving import move_page, move_pages
from ..router import inspection_of
from .protocol import Op
from .session import Session, consumer_key, destination_of

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry
    from ..router import Router
    from ..upkeep.explanation import DirectoryExplanation
    from .remote_store import RemoteStore


def _newer(registry: StoreRegistry, session: Session, text: str, seq: int) -> list[Any]:
    """Return the first of the messages behind a seq, in order of theirs."""
    destination = destination_of(text)

    def of_store(store: Store) -> list[Any]:
        found = [one for one in store.browse(destination) if one.seq > seq]
        return session.page(sorted(found, key=lambda one: one.seq))

    return registry.for_held(destination, of_store, [])


def _move(router: Router, registry: StoreRegistry, source: str, target: str, most: int) -> int:
    """Move one page: who asks shows how far it is, and asks for the next one."""
    origin, destination = (router.queue(destination_of(text)) for text in (source, target))
    return move_page(router._unlimited, origin, destination, most)


def _dead_letters(router: Router, registry: StoreRegistry) -> list[Any]:
    return [[str(source), key, count] for (source, key), count in inspection_of(router).dead_letters().items()]


def _damage(router: Router, registry: StoreRegistry) -> str | None:
    damage = inspection_of(router).decisions_damage
    return None if damage is None else str(damage)


def _asked(name: str) -> Callable[..., Any]:
    """Return a call of what has plain arguments and results."""
    return lambda router, registry, *given: getattr(inspection_of(router), name)(*given)


def _of_destination(name: str) -> Callable[..., Any]:
    """Return a call that takes a destination first."""
    return lambda router, registry, text, *given: msgspec.to_builtins(
        getattr(inspection_of(router), name)(destination_of(text), *given)
    )


INSPECTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "option": _of_destination("option"),
    "bytes_of": _of_destination("bytes_of"),
    "overview": _asked("stores"),
    "sessions": _asked("sessions"),
    "dead_letters": _dead_letters,
    "decisions_damage": _damage,
    "explain": lambda router, registry: msgspec.to_builtins(inspection_of(router).explain()),
    "move": _move,
    "compact_recorded": lambda router, registry, names: inspection_of(router).compact(names, lambda done, total: None),
}
"""By name: functions of the router, its registry and the arguments."""

INSPECTIONS_OF_SESSION: Final[Mapping[str, Callable[..., Any]]] = {"newer": _newer}
"""By name: functions of the registry, the client's session and the arguments."""

LONG_INSPECTIONS: Final = frozenset({"move", "explain", "compact_recorded", "dead_letters", "newer"})
"""Those that may take long, which have a thread of their own."""


class RemoteInspection:
    """Answers the commands' questions, as Inspection does. Threads: all."""

    is_own = False

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def _ask(self, name: str, *given: Any) -> Any:
        return self._store.ask(Op.CALL, name, *given)

    @property
    def owner_pid(self) -> int:
        """Return the process that has the directory open."""
        return self._store.connection.owner_pid

    def option(self, destination: Destination, name: str) -> Any:
        """Return an option of the store that a destination is in, or would be."""
        return self._ask("option", str(destination), name)

    def is_volatile(self, destination: Destination) -> bool:
        """Return False: nothing goes when this router closes."""
        return False

    def bytes_of(self, destination: Destination) -> int:
        """Return how many bytes the messages of a destination have."""
        return int(self._ask("bytes_of", str(destination)))

    def depth(self, destination: Destination) -> int:
        """Return how many messages or values a destination has."""
        return self._store.depth(destination)

    def newer(self, backlog: Backlog, seq: int) -> list[Message]:
        """Return messages behind a seq, in order of theirs; more are there where any are returned, it may be."""
        return [self._store._message(fields) for fields in self._ask("newer", str(backlog.destination), seq)]

    def dead_letters(self) -> Counter[tuple[Destination, SubscriptionKey | None]]:
        """Return the dead letters by where they come from."""
        return Counter({(destination_of(text), consumer_key(key)): n for text, key, n in self._ask("dead_letters")})

    def stores(self) -> list[dict[str, Any]]:
        """Return what each store holds and has done."""
        return self._ask("overview")  # type: ignore[no-any-return]

    def sessions(self) -> list[dict[str, Any]]:
        """Return who else is connected, and what each holds."""
        return [one for one in self._ask("sessions") if one["client"] != self._store.connection.client]

    def explain(self) -> DirectoryExplanation:
        """Return why the data directory takes the disk that it takes."""
        from ..upkeep.explanation import DirectoryExplanation  # which needs the journal's part

        return msgspec.convert(self._ask("explain"), DirectoryExplanation)

    def move(self, source: Queue, target: Queue, limit: int | None, progress: Callable[[int, int], None]) -> int:
        """Move the messages of one queue into another, a page with each request: nothing more is moved once this
        process has gone."""

        def move(most: int) -> int:
            return int(self._ask("move", str(source.destination), str(target.destination), most))

        return move_pages(move, source, target, limit, progress)

    def compact(self, names: Sequence[str], progress: Callable[[int, int], object]) -> dict[str, int]:
        """Compact all recorded stores, or those of these names. How far that is, the owner does not tell."""
        return self._ask("compact_recorded", list(names))  # type: ignore[no-any-return]

    @property
    def decisions_damage(self) -> BaseException | None:
        """The reason why the decision log cannot be used; None if it can."""
        damage = self._ask("decisions_damage")
        return None if damage is None else StoreFailedError(damage)
