"""Messages that wait for their time: sent to be delivered later, or given back with a delay.

A backend keeps them apart from those that are fetched, and says which are due (`Rows.due`). Once one is, that is
written down (a Postponed whose time is 0), so that it stays due whatever the clock does: only then it is free, at its
old place.

H8  `Delivery.next_due` is not later than the time of anything that waits in the rows.
H9  While anything waits a timer is set, for `next_due` or for TICK_SECONDS from now, whichever comes first: the wall
    clock may jump. Who receives looks too, so that nothing depends on the timer but those who wait for a message.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from ....policies.errors import AnabranchError, ConfigError
from ...system.background import shared
from ..operations.changes import Change, Postponed, VolatileChange
from ..record.place import DELIVERIES, SEQ, is_volatile
from ..state.sweep import wall_ms

if TYPE_CHECKING:
    from ..backend import Settings
    from ..engine.engine import Engine
    from ..state.leases import Lease

log = logging.getLogger(__name__)

PAGE: Final = 512
"""Messages that are brought back together."""
TICK_SECONDS: Final = 0.5
"""While anything waits the wall clock is looked at so often."""
RETRY_SECONDS: Final = 0.25
"""After an error it is tried again so much later."""
DUE_MAX_MS: Final = (1 << 63) - 1


def delay_ms(seconds: float, what: str = "delay") -> int:
    """Return seconds as milliseconds, rounded up. Raises TypeError, and ValueError for what is no time to wait."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"{what} is a number of seconds, not {type(seconds).__name__}: {seconds!r}")
    if not 0 <= seconds <= (DUE_MAX_MS - wall_ms()) / 1000 - 1:  # not so of nan either
        raise ValueError(f"{what} is a number of seconds from 0 to 2**63 ms from now, not {seconds!r}")
    return -int(-seconds * 1000 // 1)


def postponements(
    leases: Iterable[Lease], settings: Settings, delivered: bool, delay: int | None = None
) -> list[Change]:
    """Return the changes by which leases that are given back wait: for `delay` ms, or as the store's `redelivery` says.
    Leases of a topic as a whole do not wait, nor messages that have reached the delivery limit."""
    changes: list[Change] = []
    for lease in leases:
        place = lease.place
        times = place[DELIVERIES] + delivered
        if lease.whole or (settings.max_deliveries is not None and times >= settings.max_deliveries):
            continue
        ms = delay if delay is not None else backoff_ms(settings, times)
        if ms:
            feed = lease.feeds[0]
            postponed = Postponed(feed.state, place[SEQ], feed.number, min(wall_ms() + ms, DUE_MAX_MS), place)
            changes.append(VolatileChange(postponed) if is_volatile(place) else postponed)
    return changes


def backoff_ms(settings: Settings, times: int) -> int:
    """Return how long a message waits that was given back so often."""
    policy = settings.redelivery
    if policy is None:
        return 0
    seconds = policy.seconds(times) * (1 + policy.jitter * (2 * random.random() - 1))
    return max(1, round(min(seconds, policy.max_delay) * 1000))


class Waiting:
    """The scheduled messages of one open store. Threads: all; `applied` is called under the store's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bringing = threading.RLock()  # a signal handler may come back to it in the same thread
        """Held by who brings back what is due: two would write it twice. Taken before the store's lock."""
        self.write: Callable[[Sequence[Change]], object] = lambda changes: None
        """Until changes are written, which nobody waits for the disk for. Set by the store."""
        self._at = 0.0
        """When the timer runs (monotonic); 0: none is set."""

    def start(self) -> None:
        """Start once the store is open: what waits in it is known to the backend."""
        engine = self._engine
        engine.delivery.next_due = engine.rows.next_due()
        self._set_timer()

    def require(self) -> None:
        """Raise ConfigError for a backend that does not know messages which wait."""
        backend = self._engine.backend
        if not backend.postpones:
            raise ConfigError(
                [
                    f"store {self._engine.name!r} is of kind {backend.kind!r}, in which no message can wait for its "
                    "time; use no delay and no `redelivery` there, or a store of another kind"
                ]
            )

    def applied(self, change: Postponed) -> None:
        """Follow a change that is in the rows. May be done again."""
        engine = self._engine
        delivery = engine.delivery
        if not change.due:
            for feed in change.state.feeds(change.number):
                delivery.came_due(feed, change.seq, engine.rows)
            return
        for feed in change.state.feeds(change.number):  # it was given back before that was known
            feed.returned_places.pop(change.seq, None)
            feed.remove_fetched(change.seq, change.seq)
        if not 0 < delivery.next_due <= change.due:
            delivery.next_due = change.due
            self._set_timer()

    def bring(self, whole: bool = False) -> None:
        """Bring back what is due: the first of it, or the whole, which takes long if a clock has jumped and very many
        are due at once. Errors are logged: what is due comes later, then."""
        if self._engine.delivery.next_due > wall_ms():
            return
        first = None
        try:
            while (found := self._bring_page()) is not None and whole and found != first:
                first = found  # twice the same: a backend that forgets nothing
        except AnabranchError as error:
            log.debug("store %s: what is due does not come back yet: %s", self._engine.name, error)

    def _bring_page(self) -> tuple[int, int] | None:
        """Bring back a page; return subscription and seq of its first message, None if nothing was due. Raises
        AnabranchError."""
        engine = self._engine
        engine.check()
        with self._bringing:
            with engine.lock:
                engine.current()
                now = wall_ms()
                changes: list[Change] = []
                for state, number, place in engine.rows.due(now, PAGE):
                    change = Postponed(state, place[SEQ], number, 0, place)
                    changes.append(VolatileChange(change) if is_volatile(place) else change)
                if not changes:
                    engine.delivery.next_due = engine.rows.next_due()
                    return None
            self.write(changes)
            engine.asked(lambda: None)  # who waits for them gets them at once
            first = changes[0]
            postponed = first.change if type(first) is VolatileChange else first
            assert type(postponed) is Postponed
            return postponed.number, postponed.seq

    def _set_timer(self) -> None:
        """Set a timer for what is due next, if none is set that runs before."""
        due = self._engine.delivery.next_due
        if due:
            self._run_in(min(max(due - wall_ms(), 0) / 1000, TICK_SECONDS))

    def _run_in(self, seconds: float) -> None:
        now = monotonic()
        if not now - RETRY_SECONDS < self._at <= now + seconds:
            # Set behind it: who is interrupted between the two leaves one timer too many, never none.
            shared().schedule_while_alive(seconds, self._look)
            self._at = now + seconds

    def _look(self) -> None:
        """Look for what is due, on a background thread."""
        engine = self._engine
        if monotonic() < self._at or engine.closed or engine.forked or engine.failed is not None:
            return  # another runs later
        self._at = 0.0
        self.bring(whole=True)
        if 0 < engine.delivery.next_due <= wall_ms():
            self._run_in(RETRY_SECONDS)  # it could not be written, say
        else:
            self._set_timer()
