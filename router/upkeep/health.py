"""The health of a router: whether each store can be used, and what it waits for.

    found = router.health()
    if not found.ok: ...

Each store is asked to put on disk what it has written, and for its statistics. One whose disk hangs does not answer:
that is told with how long it has been so, and holds up neither the others nor whoever asks again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...adapters.core.store_types import StoreStats
from ...policies.errors import StoreFailedError
from ...policies.names.destination import Destination
from .overview import dead_letter_queues, longest_waiting, oldest_ready

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry
    from ..transactions.outcomes import InDoubt


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """The health of one store."""

    name: str
    state: str
    """`ok`; `failed`: it has stopped itself, until it is reopened, or its database is away, until it is back;
    `unavailable`: it cannot be opened; `stalled`: it waits for its disk; `read-only`: its file system is."""
    reason: str | None
    """Why it is not `ok`, and what it waits for."""
    messages: int
    """Held now, as far as it tells."""
    oldest_ready_seconds: float | None
    """How long ago the oldest message was sent that comes next, dead letters aside; None: there is none, or it does not
    tell."""
    sync_seconds: float
    """How long it waits for its disk each time, lately."""
    free_bytes: int | None
    """Free on the disk of its directory; None where that cannot be told."""
    dead: int = 0
    """How many of the messages are in dead-letter queues."""


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a router: `ok` for all of it, and `stores` one by one. `in_doubt` counts the prepared transactions
    that wait, `for_operator` those of them that wait for an operator. `decision_log` says why transactions over several
    stores are refused, and is None where they are not."""

    ok: bool
    """All stores are, so is the decision log, and no transaction waits for an operator."""
    stores: tuple[StoreHealth, ...]
    in_doubt: int
    """Prepared transactions that wait: for their manager, for a store, or for an operator."""
    for_operator: int
    """Those of them that have no outcome, and wait neither for a manager nor for a store that is not `ok`."""
    decision_log: str | None
    """Why transactions over several stores are refused; None: they are not."""


def stores_health(registry: StoreRegistry) -> list[StoreHealth]:
    """Return the health of all recorded stores. Those that are not open are opened for it."""
    rows = registry.rows_by_name()
    errors: dict[str, BaseException] = {}
    answers, silent = registry.synced_stats(rows, errors)
    dead = dead_letter_queues(registry)
    return [
        _health(registry, name, registry.config.directory / row.path, answers.get(name), errors.get(name), silent, dead)
        for name, row in rows.items()
    ]


def _health(
    registry: StoreRegistry,
    name: str,
    path: Path,
    stats: StoreStats | None,
    error: BaseException | None,
    silent: Mapping[str, float],
    dead: Mapping[Destination, None],
) -> StoreHealth:
    state, reason = "ok", None
    if name in silent:
        state, reason = "stalled", f"it waits for its disk, {path}, and has not answered for {silent[name]:.1f} s"
    elif error is not None:
        state, reason = ("failed" if isinstance(error, StoreFailedError) else "unavailable"), str(error)
    elif stats is not None and stats.failed is not None:
        state, reason = "failed", f"{stats.failed}; see to the disk, then router.reopen({name!r})"
    free = None
    with suppress(OSError):
        if state == "ok" and os.statvfs(path).f_flag & os.ST_RDONLY:
            state, reason = "read-only", f"the file system of {path} is mounted read-only"
        free = shutil.disk_usage(path).free
    if stats is None:
        return StoreHealth(name, state, reason, 0, None, 0.0, free)
    oldest = oldest_ready(longest_waiting(registry, stats, dead)) if state == "ok" else None
    letters = sum(stats.destinations.get(queue, 0) for queue in dead)
    return StoreHealth(name, state, reason, stats.messages, oldest, stats.sync_seconds, free, letters)


def health(
    registry: StoreRegistry, in_doubt: Callable[[], list[InDoubt]], decision_log: BaseException | None
) -> Health:
    """Return the health of a router. `in_doubt` tells which transactions wait; it is asked only where no store
    hangs."""
    stores = stores_health(registry)
    waiting = in_doubt() if all(store.state != "stalled" for store in stores) else []
    away = {store.name for store in stores if store.state != "ok"}
    for_operator = sum(one.xid is None and one.outcome is None and away.isdisjoint(one.stores) for one in waiting)
    damage = None if decision_log is None else str(decision_log)
    ok = all(store.state == "ok" for store in stores) and not for_operator and damage is None
    return Health(ok, tuple(stores), len(waiting), for_operator, damage)
