"""Warnings that would come too often: the log tells of each thing at once, and then once a minute how many came since.

    warnings = RareWarnings(lambda queue, count: log.warning("%d messages of %s are lost", count, queue))
    warnings.count([queue, queue])       # "2 messages of ... are lost"
    warnings.count([queue])              # nothing yet
    if warnings.is_due:                  # whoever comes by now and then
        warnings.count()                 # a minute later: "1 messages of ..."
    warnings.close()                     # what is not told yet

Threads: all; a signal handler may come back to it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from time import monotonic
from typing import Final, Generic, TypeVar

TELL_SECONDS: Final = 60.0
"""The log tells of one thing no more often."""
LOGGED_MAX: Final = 1000
"""Things that are remembered with the time when they were told last; with more the log tells more often."""

Thing = TypeVar("Thing", bound=Hashable)


class RareWarnings(Generic[Thing]):
    """Counts what happens to each thing, and warns of it now and then."""

    def __init__(self, warn: Callable[[Thing, int], None]) -> None:
        """`warn` logs how often it happened to a thing since it was told last."""
        self._warn = warn
        self._lock = threading.RLock()
        self._logged: dict[Thing, tuple[float, int]] = {}
        """By thing: when the log may tell of it again (monotonic), and how many it has yet to tell of."""
        self._due = math.inf
        """When some are to be told of."""

    @property
    def is_due(self) -> bool:
        """Return whether there is something to tell now."""
        return self._due <= monotonic()

    def count(self, things: Iterable[Thing] = ()) -> None:
        """Count it once for each of these, and tell what is due."""
        self._count(things, False)

    def close(self) -> None:
        """Tell what is not told yet."""
        self._count((), True)

    def _count(self, things: Iterable[Thing], all_of_it: bool) -> None:
        now, logged = monotonic(), self._logged
        with self._lock:
            for thing, count in Counter(things).items():
                until, unlogged = logged.get(thing, (now, 0))
                logged[thing] = until, unlogged + count
            all_of_it = all_of_it or len(logged) > LOGGED_MAX
            for thing, (until, unlogged) in list(logged.items()):
                if until > now and not all_of_it:
                    continue
                del logged[thing]
                if unlogged:
                    logged[thing] = now + TELL_SECONDS, 0
                    self._warn(thing, unlogged)
            if len(logged) > LOGGED_MAX:
                logged.clear()
            self._due = min((until for until, unlogged in logged.values() if unlogged), default=math.inf)
