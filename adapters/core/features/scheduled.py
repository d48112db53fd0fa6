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
from collections.abc import Iterable
from time import monotonic
from typing import Final

from ....policies.errors import AnabranchError, ConfigError
from ...system.background import shared
from ..backend import Settings
from ..engine.hooks import Feature
from ..operations.changes import Change, Postponed
from ..record.place import DELIVERIES, SEQ
from ..state.due import DUE_MAX_MS
from ..state.leases import DestinationState, Lease, SubscriptionState
from ..state.rows import Rows, ScheduledRows
from ..state.sweep import wall_ms
from .parts import Parts

log: logging.Logger = logging.getLogger(__name__)

PAGE: Final = 512
"""Messages that are brought back together."""
TICK_SECONDS: Final = 0.5
"""While anything waits the wall clock is looked at so often."""
RETRY_SECONDS: Final = 0.25
"""After an error it is tried again so much later."""


def backoff_ms(settings: Settings, times: int) -> int:
    """Return how long a message waits that was given back so often."""
    policy = settings.redelivery
    if policy is None:
        return 0
    seconds = policy.seconds(times) * (1 + policy.jitter * (2 * random.random() - 1))
    return max(1, round(min(seconds, policy.max_delay) * 1000))


class Waiting(Feature):
    """The scheduled messages of one open store. Threads: all; `applied` is called under the store's lock."""

    def __init__(self, parts: Parts) -> None:
        self._engine = engine = parts.engine
        self._write = parts.sending.write
        engine.schedule = self
        self._asked: Rows | None = None
        self._scheduled: ScheduledRows | None = None
        engine.hooks.follow((Postponed,), self.applied)
        self._bringing = threading.RLock()  # a signal handler may come back to it in the same thread
        """Held by who brings back what is due: two would write it twice. Taken before the store's lock."""
        self._at = 0.0
        """When the timer runs (monotonic); 0: none is set."""

    def open(self) -> None:
        """Refuse the option `redelivery` in a store in which no message can wait. Raises ConfigError."""
        if self._engine.backend.settings.redelivery is not None:
            self.require()

    def start(self) -> None:
        """Start once the store is open: what waits in it is known to the backend."""
        rows, delivery = self._rows, self._engine.delivery
        if rows is not None:
            delivery.next_due = rows.next_due()
        delivery.until = self._until
        self._set_timer()

    @property
    def _rows(self) -> ScheduledRows | None:
        rows = self._engine.rows
        if rows is not self._asked:  # once: the question is slow
            self._scheduled, self._asked = (rows if isinstance(rows, ScheduledRows) else None), rows
        return self._scheduled

    def _until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        return self._rows.until(state, subscription, seq) if self._rows is not None else 0

    def require(self) -> None:
        """Raise ConfigError for a backend that does not know messages which wait."""
        backend = self._engine.backend
        if not isinstance(backend, ScheduledRows):
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
            for channel in change.state.channels(change.number):
                delivery.came_due(channel, change.seq, engine.rows)
            return
        for channel in change.state.channels(change.number):  # it was given back before that was known
            channel.returned_places.pop(change.seq, None)
            channel.remove_fetched(change.seq, change.seq)
        if not 0 < delivery.next_due <= change.due:
            delivery.next_due = change.due
            self._set_timer()

    def postponements(self, leases: Iterable[Lease], delivered: bool, delay: int | None = None) -> list[Change]:
        """Return the changes by which leases that are given back wait: for `delay` ms, or as the store's `redelivery`
        says, if it counts as a delivery. Leases of a topic as a whole do not wait, nor messages that have reached the
        delivery limit."""
        settings, changes = self._engine.backend.settings, list[Change]()
        if not delay and (delay is not None or not delivered or settings.redelivery is None):
            return changes
        for lease in leases:
            place = lease.place
            times = place[DELIVERIES] + delivered
            if lease.whole or (settings.max_deliveries is not None and times >= settings.max_deliveries):
                continue
            ms = delay if delay is not None else backoff_ms(settings, times)
            if ms:
                channel = lease.channels[0]
                due = min(wall_ms() + ms, DUE_MAX_MS)
                changes.append(Postponed(channel.state, place[SEQ], channel.number, due, place))
        return changes

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
                rows = self._rows
                found = rows.due(now, PAGE) if rows is not None else ()
                changes = [Postponed(state, place[SEQ], number, 0, place) for state, number, place in found]
                if not changes:
                    engine.delivery.next_due = rows.next_due() if rows is not None else 0
                    return None
            self._write(changes, unsynced=True)
            engine.look_soon()  # who waits for them gets them at once
            return changes[0].number, changes[0].seq

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
