"""A live repartition moves destinations to where a new configuration routes them, while the router is in use
(`Router.repartition`).

    done = LiveRepartition(registry, coordinator, config, ...).run()

Plan, refusals, progress, and the state that a crash leaves are as in repartition.py (rule J11). Otherwise is:

1. Once the plan stands and the progress says so, what has no place yet is routed by the new configuration.
2. Each destination is copied while it is used (core/migration/live_copy.py). For it alone, a gate is closed in the
   registry and in its old store; transactions on their way into stores get there; the last of it is copied, the record
   says the new store, and the gate is opened. Leases, listeners and open transactions go on.
3. One that cannot be moved now is named at the end, and the others go on.

All of it is done by a thread of its own, in which no signal strikes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...adapters.core.migration.copying import Amount
from ...adapters.core.migration.live_copy import GivenUpError, LiveCopy, nonpersistent, volatile_count
from ...adapters.core.operations.branches import Branch
from ...adapters.core.state.gates import Gate
from ...adapters.system.conditions import Event, Thread
from ...adapters.system.files import disk_errors
from ...policies import config as configs
from ...policies.errors import AnabranchError, ClosedError, PlacementError, StoreFailedError, TransactionError
from ...policies.names.destination import Destination
from ...policies.names.routes import Match
from ..placement.on_disk.directories import StoreDirectories
from ..placement.on_disk.in_force import write_in_force
from ..placement.on_disk.repartition_progress import Moving
from ..placement.record import DestinationRow, StoreRow
from ..placement.registry import StoreRegistry
from ..transactions.coordinator import Coordinator
from .plan import Move, move_of, require_directory
from .repartition import Planned, Repartitioned, Repartitioning, Told, in_the_way, looked_at

if TYPE_CHECKING:
    from ...policies.config import Config, StoreConfig

log: logging.Logger = logging.getLogger(__name__)

PASSING_SECONDS: Final = 10.0
"""Seconds that transactions on their way into stores have to get there, at the gate."""
LOOK_SECONDS: Final = 0.005
TRIES_MAX: Final = 10
"""How often the gate of a destination is closed and opened again, if something comes between."""
ROUNDS_MAX: Final = 5
"""How often a run looks whether destinations were given a place by the old configuration meanwhile."""


class StoppedError(ClosedError):
    """The router is being closed, or the caller was interrupted."""


class _GoneError(Exception):
    """The destination was deleted while it was copied."""


class LiveRepartition(Repartitioning):
    """One call of `Router.repartition`. Threads: `run` by one; `stop` by all; all else is done in its own."""

    _live = True

    def __init__(
        self,
        registry: StoreRegistry,
        coordinator: Coordinator,
        config: Config,
        restart: bool,
        path: str,
        prepared_seconds: float,
        told: Told,
    ) -> None:
        super().__init__(registry, coordinator, config, restart, path, told)
        self._directories = StoreDirectories(config)
        self._directories.before = registry.config
        self._prepared_seconds = prepared_seconds
        self._left_behind: dict[Destination, str] = {}
        """The destinations that could not be moved, and why."""
        self._ahead: list[Move] = []
        """The planned moves."""
        self._stopped = Event()
        self._ended = Event()
        self._thread = Thread(self._work, "repartition")
        self._result: Repartitioned | None = None
        self._error: BaseException | None = None

    def run(self) -> Repartitioned:
        """Run in a thread of its own. Interrupted, the run stops soon; the error is raised once it has."""
        self._thread.start()
        try:
            self._ended.wait()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @property
    def ended(self) -> bool:
        """True if its thread does nothing any more."""
        return self._ended.is_set()

    def stop(self) -> None:
        """Stop, and leave the destination that is on its way where it was. Waits for the end, but in the run's own
        thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._ended.wait()

    def _go_on(self) -> None:
        if self._stopped.is_set() or not self._registry.opened:
            raise StoppedError("the repartition was stopped; call it again, and it goes on where it was")

    def _work(self) -> None:
        try:
            with disk_errors(f"{self._config.directory} cannot be repartitioned"):
                self._result = super().run()
            write_in_force(self._config)
        except BaseException as error:
            error.add_note(self._summary())
            self._error = error
        finally:
            self._ended.set()

    def _summary(self) -> str:
        """Return a text that says what has moved, and what has not."""
        done = {str(move.destination) for move in self.moves}
        rest = [str(move.destination) for move in self._ahead if str(move.destination) not in done]
        return (
            f"moved: {', '.join(sorted(done)) or 'nothing'}; where they were: {', '.join(rest) or 'none'}. Call it "
            "again: it goes on where it was"
        )

    # Differences to a closed directory

    def _elsewhere(self) -> list[tuple[StoreRow, Destination, Match[StoreConfig] | None]]:
        return self._registry.elsewhere_by(self._config)

    def _planned(self) -> list[Planned]:
        planned = super()._planned()
        wrong = []
        for row, destination, _, _ in planned:
            count = self._registry.with_row(row, partial(volatile_count, destination=destination))
            if count:
                wrong.append(destination)
                self._left_behind[destination] = str(
                    nonpersistent(destination, self._registry.with_row(row, lambda store: store), count)
                )
        return [one for one in planned if one[1] not in wrong]

    def _move_all(self, planned: Sequence[Planned]) -> list[str]:
        self._go_on()
        self._registry.reroute(self._config)
        removed: list[str] = []
        for _ in range(ROUNDS_MAX):
            self._ahead += [
                move_of(destination, row, self._directories.name(match.target, destination), match.target.kind, amount)
                for row, destination, match, amount in planned
            ]
            removed += super()._move_all(planned)
            planned = [one for one in self._planned() if one[1] not in self._left_behind]
            if not planned:
                break
        if self._left_behind:
            raise PlacementError(
                "\n".join(["These destinations have not moved:", *(f"  {s}" for s in self._left_behind.values())])
            )
        return removed

    def _left(self, row: StoreRow) -> list[str]:
        self._coordinator.cleanup.run()  # decisions that were made meanwhile name stores
        return super()._left(row)

    def _discard(self, row: StoreRow) -> bool:
        if self._registry.discard_idle(row, partial(self._remove, row)):
            return True
        log.info("store %s is empty, and stays until it is not needed open", row.name)
        self._write(None)
        return False

    def _move(
        self, source: StoreRow, target: StoreRow, destination: Destination, match: Match[StoreConfig], amount: Amount
    ) -> None:
        self._go_on()
        self._settle_record(destination)
        self._write(Moving(destination.kind.value, destination.name, source.store_id, target.store_id))
        row = DestinationRow(destination.kind.value, destination.name, target.store_id, match.pattern.text)
        try:
            for number in range(TRIES_MAX):
                if self._moved(source, target, destination, row):
                    return
                log.debug("%s: its move was disturbed, the %dth time", destination, number + 1)
            raise GivenUpError(f"{destination}: its move was disturbed {TRIES_MAX} times; try again later")
        except GivenUpError as error:
            self._left_behind[destination] = str(error)
            log.warning("not moved: %s", error)

    def _moved(self, source: StoreRow, target: StoreRow, destination: Destination, row: DestinationRow) -> bool:
        """Move a destination; returns False if that has to be done once more."""
        if not self._is_in(source, destination):
            return True  # it was deleted meanwhile
        self._await_prepared(source, destination)
        copy = LiveCopy(*self._both(source, target), destination)
        done = self._done
        try:
            copy.reserve()
            if not self._is_in(source, destination):  # it was deleted, and what is in the target now is another's
                return True
            copy.begin()
            copy.follow(
                lambda count: self._told(done + count, max(self._total, done + count)),
                partial(self._go_on_with, source, destination),
            )
            if not self._switched(copy, source, destination, row):
                return False
        except _GoneError:
            return True
        except ClosedError:
            self._go_on()
            if not self._is_in(target, destination):
                return False  # a store was closed, and is opened again: for being idle just before, or by `reopen`
        finally:
            self._abandon(copy)
        self._done = done + copy.count
        self._delete(source, destination)
        copy.source_deleted()
        log.info("%s: %d messages moved from store %s to %s", destination, copy.count, source.name, target.name)
        return True

    def _go_on_with(self, source: StoreRow, destination: Destination) -> None:
        self._go_on()
        if not self._is_in(source, destination):
            raise _GoneError

    def _abandon(self, copy: LiveCopy, keep: bool = False) -> None:
        """Abandon a copy. Does nothing after the switch."""
        try:
            copy.abandon(keep)
        except AnabranchError as error:  # nobody is given anything of it, and the next run deletes it
            log.warning("an unfinished copy is not deleted yet: %s", error)

    def _is_in(self, row: StoreRow, destination: Destination) -> bool:
        known = self._table.destinations.get(destination)
        return known is not None and known.store_id == row.store_id

    def _switched(self, copy: LiveCopy, source: StoreRow, destination: Destination, row: DestinationRow) -> bool:
        closed = time.monotonic()
        gate = self._registry.gates.close(destination, source)
        try:
            self._await_passing(destination)
            if not self._is_in(source, destination) or self._prepared(source, destination):
                return False
            copy.close(gate)
            if self._is_enlisted(source, destination):  # by who had passed the gate: nobody else is from here on
                return False
            if not copy.finish():
                return False
            self._go_on()
            self._record(row, source, gate)
            self._registry.gates.note_moved(copy.target, copy.switch())
            return True
        finally:
            self._abandon(copy, keep=gate.error is not None)  # the record may say that this is the copy that counts
            self._registry.gates.open(gate)
            log.debug("%s: its gate was closed for %.3f s", destination, time.monotonic() - closed)

    def _record(self, row: DestinationRow, source: StoreRow, gate: Gate) -> None:
        """Record the new store, the commit point. If it fails nobody can tell what the record says, unless the former
        row can be written again: else nobody uses the destination any more."""
        before = self._table.destinations[row.destination]
        try:
            self._table.record_destinations([row])
        except (AnabranchError, OSError):
            try:
                self._table.record_destinations([before])
            except (AnabranchError, OSError) as error:
                gate.error = StoreFailedError(
                    f"{row.destination} may be in store {source.name!r} or in {row.store_id.hex()}: the placement "
                    f"record cannot be written ({error}); see to the disk, close the router and run `anabranch "
                    "repartition`"
                )
            raise

    def _settle_record(self, destination: Destination) -> None:
        """Record again where a destination is, first of all, if `_record` failed the last time."""
        known = self._table.destinations.get(destination)
        if self._registry.gates.is_stuck(destination) and known is not None:
            self._table.record_destinations([known])
            self._registry.gates.drop(destination)

    # Transactions

    def _prepared(self, row: StoreRow, destination: Destination) -> list[Branch]:
        return self._registry.with_row(row, partial(looked_at, destination=destination))[1]

    def _wait_while(self, held: Callable[[], str], seconds: float) -> None:
        """Wait until `held` returns an empty text. Raises GivenUpError with that text once so many seconds are over."""
        deadline = time.monotonic() + seconds
        while text := held():
            if time.monotonic() >= deadline:
                raise GivenUpError(text)
            self._go_on()
            time.sleep(LOOK_SECONDS)

    def _await_prepared(self, row: StoreRow, destination: Destination) -> None:
        """Wait until no prepared transaction would change a destination. Raises GivenUpError, which names them."""
        waited = f"still so after {self._prepared_seconds:g} s"

        def held() -> str:
            if prepared := self._prepared(row, destination):
                step = "give its outcome first (router.commit or rollback, router.in_doubt)"
                return f"{in_the_way(destination, row, prepared)}; {waited}: {step}"
            if self._is_enlisted(row, destination):
                what = "transactions on connections of your own send to it or ack there"
                return f"{destination}: {what}; {waited}: end them first"
            return ""

        self._wait_while(held, self._prepared_seconds)

    def _is_enlisted(self, row: StoreRow, destination: Destination) -> bool:
        return self._registry.with_row(row, lambda store: store.is_enlisted(destination))

    def _await_passing(self, destination: Destination) -> None:
        """Wait until all transactions that looked at the gate before it was closed are in their stores. Raises
        GivenUpError."""
        begun = self._coordinator.table.begun
        before = list(begun)

        def held() -> str:
            for transaction in before:
                if transaction in begun and transaction.passing and transaction.concerns(destination):
                    return (
                        f"{destination}: a transaction that changes it has been on its way into its stores for "
                        f"{PASSING_SECONDS:g} s; try again when it has ended"
                    )
            return ""

        self._wait_while(held, PASSING_SECONDS)


class LiveRuns:
    """Runs repartitions, one at a time. Threads: all. `_lock` guards the run."""

    def __init__(self, registry: StoreRegistry, coordinator: Coordinator) -> None:
        self._registry, self._coordinator = registry, coordinator
        self._lock = threading.RLock()
        self._run: LiveRepartition | None = None

    def run(
        self,
        config: str | Path | Config,
        progress: Callable[[int, int], None] | None,
        restart: bool,
        prepared_seconds: float,
    ) -> Repartitioned:
        """Move all destinations to where a configuration routes them. Raises as Router.repartition."""
        if not isinstance(prepared_seconds, int | float) or isinstance(prepared_seconds, bool):
            kind = type(prepared_seconds).__name__
            raise TypeError(f"prepared_seconds is a number of seconds, not {kind}: {prepared_seconds!r}")
        if not prepared_seconds >= 0:  # not so of nan either
            raise ValueError(f"prepared_seconds is a number of seconds, 0 or more, not {prepared_seconds!r}")
        new, path = (config, "") if isinstance(config, configs.Config) else (configs.load(config), str(config))
        require_directory(new, self._registry.config)
        told = progress or (lambda done, total: None)
        live = LiveRepartition(self._registry, self._coordinator, new, restart, path, prepared_seconds, told)
        with self._lock:
            self._registry.require_open()
            if self._run is not None and not self._run.ended:
                raise TransactionError("this router is being repartitioned already; wait until that is done")
            self._run = live
        return live.run()

    def stop(self) -> None:
        """Stop what runs, which leaves the destination that is on its way where it was. Waits for the end."""
        run = self._run
        if run is not None:
            run.stop()
