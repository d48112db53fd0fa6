"""Pattern consumers receive from all queues that a pattern names: `router.receive("orders.>")`.

Each queue has its turn: queues in which there may be something stand in a ring. A receiver looks at the first of them,
takes one message, and puts the queue at the ring's end. A queue that has none leaves the ring, and a watch
(adapters/core/watching.py) brings it back. So a receive costs the same however many queues match. A queue that is
recorded later, by whoever sends there first, comes into the ring then.

A queue whose store is not open is looked at like the others, when it is its turn, which opens that store. From then on
the store may be closed for being idle: it had nothing for us, and what is sent there opens it, which brings its queues
back. So of thousands of stores no more are open than the router keeps open anyway.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from ...adapters.core import Store
from ...adapters.core.engine.lease_times import require_seconds
from ...adapters.core.messages import Message
from ...adapters.core.service.damaged import is_damage
from ...adapters.core.service.watching import Watch
from ...adapters.core.state.gates import MovedError
from ...policies.errors import AnabranchError, ClosedError, NoRouteError, router_closed
from ...policies.names.destination import Destination, Kind
from ...policies.names.pattern import Pattern
from ..placement.near_names import near_pattern
from .addresses import Address, queue_of
from .codecs import Codec, codec_of, wrap_any
from .consumer import require_timeout
from .endpoint import Endpoint
from .patterns import Patterns, parsed_queues
from .queue import Queue

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

log: logging.Logger = logging.getLogger(__name__)

PATTERNS_MAX: Final = 64
"""The number of patterns that are kept ready. One more takes the place of the one used least recently, among those that
nobody receives from now."""
MOVING_SECONDS: Final = 0.02
"""Time until a queue that moves to another store is looked at again."""
RETRY_SECONDS: Final = 5.0
"""Time until a queue is looked at again whose store could not be opened, or has no database."""


class _Place:
    """One queue among those of a pattern."""

    __slots__ = ("destination", "watch")

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.watch: Watch | None = None
        """The last watch that stood in line for it."""


class _ToldRing(SimpleQueue["_Place | None"]):
    """A ring that tells of each place that has come."""

    def __init__(self, on_put: Callable[[], object]) -> None:
        self._on_put = on_put

    def put(self, place: _Place | None, block: bool = True, timeout: float | None = None) -> None:
        """Add one."""
        super().put(place)
        self._on_put()


class PatternConsumer:
    """Receives from the queues of one pattern, in one router. Threads: all.

    A place is in the ring, in the hands of who looks there, in `_later`, in `_dormant`, or has a watch in line. A
    thread struck by Ctrl-C may have lost one: `_lost` says so, and the next thread puts all into the ring.
    """

    def __init__(
        self, registry: StoreRegistry, pattern: Pattern | Patterns, on_put: Callable[[], object] | None = None
    ) -> None:
        """`on_put` is called when a queue has come in which there may be something, in any thread, within a send too:
        it must not wait."""
        self._registry = registry
        self.pattern = pattern
        self._ring: SimpleQueue[_Place | None] = SimpleQueue() if on_put is None else _ToldRing(on_put)
        """None: the router was closed."""
        self._places: dict[Destination, _Place] = {}
        self._dormant: dict[bytes, dict[_Place, None]] = {}
        """Places with nothing, by their store's id, which is closed or has failed."""
        self._away: dict[bytes, float] = {}
        """Until when (monotonic) stores are left alone that could not be used, by their id."""
        self._lock = threading.RLock()
        """Guards `_later` and `users`."""
        self._later: list[tuple[float, int, _Place]] = []
        """A heap of what is looked at again at a time (monotonic)."""
        self._numbers = itertools.count()
        self._lost = True
        self._told = False
        """True once somebody has heard that the pattern matches nothing, or it has matched something."""
        self.users: int = 0
        """The number of threads that receive now; after Ctrl-C perhaps more."""

    # Queues come into the ring; none of this waits

    def recorded(self, destinations: Iterable[Destination]) -> None:
        """Add those of these destinations that match. The destinations have just been recorded, or are about to be."""
        for destination in destinations:
            if destination.kind is Kind.QUEUE and self.pattern.matches(destination):
                self._add(destination)

    def _add(self, destination: Destination) -> None:
        place = self._places.get(destination)
        self._ring.put(self._places.setdefault(destination, _Place(destination)) if place is None else place)

    def opened(self, store_id: bytes) -> None:
        """Bring back the queues of a store that was opened again: by a sender, or to read it anew."""
        for place in list(self._dormant.get(store_id, ())):
            self._ring.put(place)  # first: who is struck leaves it in both
        self._dormant.pop(store_id, None)

    def _woken(self, place: _Place, store_id: bytes, closing: bool) -> None:
        if closing:
            self._dormant.setdefault(store_id, {})[place] = None
            place.watch = None  # which would keep the store in memory
        else:
            self._ring.put(place)

    def close(self) -> None:
        """Tell all who wait that the router was closed; no store knows of this consumer any more."""
        self._ring.put(None)
        for place in list(self._places.values()):
            if place.watch is not None:
                place.watch.leave()

    # Receiving

    def receive(self, timeout: float | None, lease: float | None) -> Message | None:
        """Return the next message; None if none comes in so many seconds. `lease` as in Store.receive. Call once for
        each `PatternConsumers._of`."""
        try:
            return self.look(timeout, lease)
        finally:
            with self._lock:
                self.users -= 1

    def look(self, timeout: float | None, lease: float | None) -> Message | None:
        """Do as `receive`, for whoever has this consumer alone."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                self._registry.require_open()
                if self._lost:
                    self._put_all()
                if not self._told:
                    self._tell(timeout)
                place = self._next(deadline)
                if place is None:
                    return None
                message = self._look(place, lease)
                if message is not None:
                    return message
        except AnabranchError:
            raise
        except BaseException:
            self._lost = True
            raise

    def _tell(self, timeout: float | None) -> None:
        """Tell once of a consumer that waits for ever where nothing matches yet, since the pattern may be a slip."""
        if self._places:
            self._told = True
        elif timeout is None:
            self._told = True
            known = list(self._registry.table.destinations)
            near = near_pattern(self.pattern, known) if isinstance(self.pattern, Pattern) else None
            hint = f"; did you mean {near}?" if near is not None else ""
            log.warning("no queue matches %s yet, of which somebody waits for messages%s", self.pattern, hint)

    def _put_all(self) -> None:
        """Put each queue into the ring once; those whose stores are open come first."""
        self._lost = False  # first: what is lost meanwhile is looked for again
        with suppress(Empty):
            while True:
                self._ring.get_nowait()
        table = self._registry.table
        closed: list[Destination] = []
        for destination, row in list(table.destinations.items()):
            if destination.kind is Kind.QUEUE and self.pattern.matches(destination):
                if self._registry.open_store(row.store_id) is None:
                    closed.append(destination)
                else:
                    self._add(destination)
        for destination in closed:
            self._add(destination)

    def _next(self, deadline: float | None) -> _Place | None:
        """Return the place whose turn it is; None if the time is over. Raises ClosedError."""
        while True:
            due = self.due()
            now = time.monotonic()
            left = None if deadline is None else max(deadline - now, 0)
            try:
                place = self._ring.get(timeout=_least(left, None if due is None else max(due - now, 0)))
            except Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                continue
            if place is not None:
                return place
            self._ring.put(None)  # for the others
            self._registry.require_open()
            raise ClosedError("the router was closed; open it with anabranch.open(...)")

    def due(self) -> float | None:
        """Put the places that are due to be looked at again into the ring; returns when more are (monotonic), None if
        none is."""
        while self._later:
            with self._lock:
                if self._later and self._later[0][0] > time.monotonic():
                    return self._later[0][0]
                if self._later:
                    self._ring.put(self._later[0][2])  # first: who is struck leaves it in both
                    heapq.heappop(self._later)
        return None

    def _look_later(self, place: _Place, seconds: float) -> None:
        with self._lock:
            heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), place))

    def _look(self, place: _Place, lease: float | None) -> Message | None:
        """Return the first message of a place. Without one the place is where it comes back from. Raises
        CorruptionError for a damaged message, which stays leased."""
        destination, registry = place.destination, self._registry
        row = registry.table.destinations.get(destination)
        if row is None:  # it was deleted; or is about to be recorded, and then added
            if self._places.get(destination) is place:
                self._places.pop(destination, None)
            return None
        self._places.setdefault(destination, place)
        store: Store | None = None
        try:
            if destination in registry.gates:
                self._look_later(place, RETRY_SECONDS if registry.gates.is_stuck(destination) else MOVING_SECONDS)
                return None
            away = self._away.get(row.store_id) if self._away else None
            if away is not None and away > time.monotonic():
                self._look_later(place, away - time.monotonic())
                return None
            store = registry.by_destination.get(destination) or registry.store_of(destination)
            if store is None:
                self._ring.put(place)  # it has just been deleted
                return None
            found = store.receive_or_watch(destination, partial(self._woken, place, store.store_id), place.watch, lease)
        except MovedError:
            self._look_later(place, MOVING_SECONDS)
            return None
        except ClosedError as error:
            self._ring.put(place)
            registry.require_open()
            if store is not None:
                registry.may_try_again(destination, store, error)
            return None
        except AnabranchError as error:
            self._pass_over(place, store, error)
            return None
        if isinstance(found, Message):
            self._ring.put(place)
            return found
        place.watch = found
        return None

    def _pass_over(self, place: _Place, store: Store | None, error: AnabranchError) -> None:
        """Pass over a store that has trouble, which holds up no other (invariant 7). Raises the error of one
        message."""
        if store is not None and is_damage(error):
            self._ring.put(place)
            raise error
        row = self._registry.table.destinations.get(place.destination)
        if row is not None and store is not None and store.failed is not None:
            dormant = self._dormant.setdefault(row.store_id, {})
            level = logging.DEBUG if dormant else logging.WARNING
            dormant[place] = None  # until it is opened again
        else:
            level = logging.WARNING
            if row is not None and not isinstance(error, NoRouteError):
                self._away[row.store_id] = time.monotonic() + RETRY_SECONDS
            self._look_later(place, RETRY_SECONDS)
        log.log(level, "%s is skipped by those who receive from %s: %s", place.destination, self.pattern, error)


def _least(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else min(one, other)


class PatternConsumers:
    """The pattern consumers of one router. `_lock` guards the table."""

    def __init__(self, registry: StoreRegistry) -> None:
        self._registry = registry
        self._lock = threading.RLock()
        self._listening: dict[PatternConsumer, Callable[[Exception], object]] = {}
        """Those of listeners, and what tells each listener of the end."""
        self._consumers: OrderedDict[Pattern, PatternConsumer] = OrderedDict()
        registry.table.on_record = self._recorded

    def receiver(
        self, pattern: Address, timeout: float | None, lease: float | None, codec: str | Codec[Any] | None
    ) -> Callable[[], Message[Any] | None]:
        """Return a function that receives the next message of a pattern, or of one queue. Raises as Router.receive."""
        self._registry.require_open()
        require_timeout(timeout)
        if lease is not None:
            require_seconds(lease, "lease")
        decoder = codec_of(codec)
        many = parsed_queues(pattern) if isinstance(pattern, str) else None
        if many is not None:
            return lambda: wrap_any(decoder, self._of(many).receive(timeout, lease))
        destination = queue_of(pattern)
        self._registry.route(destination)
        if decoder is None and isinstance(pattern, Endpoint):
            decoder = pattern._codec
        return partial(Queue(self._registry, destination, decoder).receive, timeout, lease=lease)

    def enter(self, consumer: PatternConsumer, end: Callable[[Exception], object]) -> None:
        """Let the consumer of a listener hear of queues and stores from now on; `end` is called when the router is
        closed."""
        self._listening[consumer] = end

    def leave(self, consumer: PatternConsumer) -> None:
        """Let it hear no more. Idempotent."""
        if self._listening.pop(consumer, None) is not None:
            consumer.close()

    def _of(self, pattern: Pattern) -> PatternConsumer:
        """Return the consumer of a pattern, for one `receive`. Consumers that are asked for again and again are
        kept."""
        with self._lock:
            consumer = self._consumers.get(pattern)
            if consumer is None:
                self._registry.routing.require_queues(pattern)
                while len(self._consumers) >= PATTERNS_MAX and self._drop_one():
                    pass
                consumer = self._consumers[pattern] = PatternConsumer(self._registry, pattern)
            self._consumers.move_to_end(pattern)
            with consumer._lock:
                consumer.users += 1
            return consumer

    def _drop_one(self) -> bool:
        idle = next((pattern for pattern, consumer in self._consumers.items() if not consumer.users), None)
        if idle is not None:
            self._consumers.pop(idle).close()
        return idle is not None

    def _recorded(self, destinations: Iterable[Destination]) -> None:
        for consumer in [*self._consumers.values(), *self._listening]:
            consumer.recorded(destinations)

    def opened(self, store: Store) -> None:
        """Tell the consumers that a store was opened. Nobody has it yet."""
        for consumer in [*self._consumers.values(), *self._listening]:
            consumer.opened(store.store_id)

    def close(self) -> None:
        """Tell all who wait. Idempotent."""
        with self._lock:
            while self._consumers:
                next(iter(self._consumers.values())).close()
                self._consumers.popitem(last=False)
        for end in list(self._listening.values()):
            end(self._error_of_end())

    def _error_of_end(self) -> Exception:
        try:
            self._registry.require_open()
        except AnabranchError as error:
            return error
        return router_closed()
