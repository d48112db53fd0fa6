"""Import of an ActiveMQ broker's pending messages into the stores of a configuration: `anabranch import --from-kahadb`.

    report = survey(config, pending)          # reads every pending message; writes nothing
    report.require_importable(force=False)    # raises for all that stands in the way, at once
    bring_in(config, pending, report)

K8  Nothing is written before all is known: every destination has a route to a store that keeps what it holds, nobody
     has used one of them here, every message can be decoded and is small enough (but for those that `force` leaves
     out).
K9  `import-kahadb.json` in the data directory names the source and the destinations from before the first message
     until all is durable and counted. Where it is left, the same command goes on with its import; another one is
     refused, and so is a router: what were received meanwhile could be brought again.
K10  Going on, a destination that holds the first of the source's messages, as they are there, is gone on with behind
     them; one that lacks what has happened to them is begun anew (rule K6). One that holds anything else has been used
     meanwhile, and is left alone: the import is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ...adapters.core import Store
from ...adapters.core.migration import copying
from ...adapters.core.store_types import Progress, Subscription
from ...adapters.kahadb.commands import TEMP_QUEUE
from ...adapters.kahadb.content import NotCarriedError, carried
from ...adapters.kahadb.openwire import SubscriptionInfo
from ...adapters.kahadb.pending import Pending, PendingDestination
from ...adapters.system.files import disk_errors, sync_directory
from ...adapters.system.locking import owner_of
from ...policies.config import Config, StoreConfig
from ...policies.errors import (
    ConfigError,
    DestinationError,
    PlacementError,
    StoreFailedError,
    StoreLockedError,
    TraceError,
)
from ...policies.names.destination import Destination
from ...policies.names.routes import Match
from ...policies.outputs import write_files
from ...policies.text import count_of
from ..migration.plan import is_volatile
from ..placement.on_disk.import_marker import MARKER
from ..router import Router

TEMPORARY: Final = "messages of temporary queues and topics, whose connections are gone"
NAMELESS: Final = "messages of destinations whose names are none here"
UNWANTED: Final = "messages that only durable subscriptions wait for which cannot be decoded"
SUBSCRIPTIONS: Final = "durable subscriptions that cannot be decoded"


def untold(what: str, done: int, total: int) -> None:
    """Do nothing: nobody looks at the progress."""


@dataclass(frozen=True, slots=True)
class PlannedDestination:
    """The plan for one destination."""

    destination: Destination
    store: str
    kind: str
    messages: int
    bytes: int
    """The size of the messages as they will be stored."""
    subscriptions: tuple[Subscription, ...]
    source: PendingDestination
    limit: int
    """The store's message_bytes_max."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """An XA transaction that waits for its outcome: its sends are not imported, what it acks is."""

    id: str
    operations: int


@dataclass(frozen=True, slots=True)
class Report:
    """The plan or the result of an import: what it brings, and what it does not."""

    directory: Path
    destinations: tuple[PlannedDestination, ...]
    not_carried: Mapping[str, int] = field(default_factory=dict)
    """The number of each thing."""
    prepared: tuple[Unsettled, ...] = ()
    open_transactions: int = 0
    """The number of transactions that a broker discards when it starts."""
    damages: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()
    """The unfinished ends of files that were being written: normal after a crash."""
    problems: tuple[str, ...] = ()
    """The reasons why the configuration cannot take the messages."""

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.destinations)

    def require_importable(self, force: bool) -> None:
        """Raise ConfigError for what the configuration lacks, TraceError for what would be lost unless `force`."""
        if self.problems:
            raise ConfigError(list(self.problems))
        lost = [*self.damages, *(f"{count} {what}" for what, count in self.not_carried.items())]
        if lost and not force:
            raise TraceError(
                f"{self.directory} cannot be imported as a whole, so nothing was: {'; '.join(lost)}. To import all the "
                "rest, give --force"
            )


def survey(config: Config, pending: Pending, progress: Progress = untold) -> Report:
    """Read every pending message once: what there is, where it would go, and what cannot be carried over."""
    routes, left, problems, planned = config.routes(), Counter[str](), list[str](), list[PlannedDestination]()
    done, total = 0, sum(one.bytes for one in pending.destinations)
    for source in pending.destinations:
        if source.destination.type >= TEMP_QUEUE:
            left[TEMPORARY] += source.count
            continue
        try:
            destination = _named(source)
        except DestinationError:
            left[NAMELESS] += source.count
            continue
        left[SUBSCRIPTIONS] += source.subscriptions_unreadable
        match = routes.route(destination)
        if match is None:
            near = ", ".join(routes.nearest(destination))
            problems.append(
                f"no pattern matches {destination}, which has {count_of(source.count, 'message')}; the closest are "
                f'{near}. Add one, or a store that matches ">"'
            )
            continue
        if is_volatile(match):
            problems.append(
                f"{destination} goes to store {match.target.name!r}, of kind {match.target.kind}, which keeps nothing "
                "over a restart; route it to another kind of store"
            )
        one = _planned(destination, source, match)
        count = size = 0
        for item in _items(one, left):
            count, size = count + 1, size + len(item.record)
            if count % 1000 == 0:
                progress("Reading messages", done + int(source.bytes * count / source.count), total)
        done += source.bytes
        progress("Reading messages", done, total)
        planned.append(replace(one, messages=count, bytes=size))
    return _report(pending, planned, left, problems)


def _report(
    pending: Pending, planned: Sequence[PlannedDestination], left: Counter[str], problems: Sequence[str]
) -> Report:
    return Report(
        pending.directory,
        tuple(planned),
        {what: count for what, count in sorted(left.items()) if count},
        tuple(Unsettled(one.id.text, one.operations) for one in pending.prepared),
        len(pending.unfinished) - len(pending.prepared),
        tuple(str(damage) for damage in pending.damages if damage.kind != "torn"),
        tuple(str(damage) for damage in pending.damages if damage.kind == "torn"),
        tuple(problems),
    )


def _named(source: PendingDestination) -> Destination:
    name = source.destination.name
    return Destination.topic(name) if source.destination.is_topic else Destination.queue(name)


def _planned(destination: Destination, source: PendingDestination, match: Match[StoreConfig]) -> PlannedDestination:
    store = match.target
    subscriptions = tuple(_subscription(destination, info) for _, info in sorted(source.subscriptions.items()))
    limit: int = getattr(store.options, "message_bytes_max", 1 << 30)
    return PlannedDestination(destination, store.name, store.kind, 0, 0, subscriptions, source, limit)


def _subscription(topic: Destination, info: SubscriptionInfo) -> Subscription:
    return Subscription(topic, info.name or "", info.client_id or "", info.selector, info.no_local)


def _items(one: PlannedDestination, left: Counter[str] | None = None) -> Iterator[copying.Stored]:
    """Yield the messages of a destination as they are to be stored; the others are counted in `left`."""
    keys = {key: _subscription(one.destination, info).key for key, info in one.source.subscriptions.items()}
    for message in one.source.messages():
        try:
            record, deliveries = carried(message.command, one.limit)
        except NotCarriedError as error:
            if left is not None:
                left[str(error)] += 1
            continue
        if not one.source.destination.is_topic:
            yield copying.Stored(record, deliveries)
        elif waiting := {keys[key]: deliveries for key in message.waiting if key in keys}:
            yield copying.Stored(record, 0, waiting)
        elif left is not None:
            left[UNWANTED] += 1


# Writing


def bring_in(config: Config, pending: Pending, report: Report, progress: Progress = untold) -> None:
    """Write the surveyed messages; all of them are durable on return, and counted.

    Raises PlacementError, having written nothing, for destinations that are in use here, and for an import of another
    directory that was cut short; StoreFullError and whatever else a store raises: the same call then goes on with it.
    """
    with quiet_router(config, progress) as router:
        marker = config.directory / MARKER
        source = str(pending.directory.resolve())
        begun = _begun(marker, source)
        held = _require_unused(router, report, begun)
        names = sorted({str(one.destination) for one in report.destinations} | set(map(str, begun)))
        text = json.dumps({"source": source, "destinations": names}, indent=1, ensure_ascii=False)
        write_files(config.directory, {MARKER: text + "\n"}, overwrite=True)
        marker.chmod(config.file_mode)
        done, total = 0, sum(one.bytes for one in report.destinations)
        for one in report.destinations:
            if not held[one.destination].whole:
                router._registry.removal.delete(one.destination)
            _bring(router, one, progress, done, total)
            done += one.bytes
        with disk_errors(f"{marker} cannot be removed; all is imported: remove it by hand, or run the command again"):
            marker.unlink()
            sync_directory(config.directory)


def in_use(config: Config, pending: Pending, report: Report) -> str | None:
    """Return why `bring_in` would be refused, given what is here already; None if it would not. Looks into a data
    directory that is there, and makes none."""
    if not config.directory.is_dir():
        return None
    with quiet_router(config) as router:
        try:
            _require_unused(router, report, _begun(config.directory / MARKER, str(pending.directory.resolve())))
        except PlacementError as error:
            return str(error)
    return None


def quiet_router(config: Config, progress: Progress = untold) -> Router:
    """Open a router of which nothing happens by itself: no sweep, no usage log, no other processes. Raises as
    Router.open; StoreLockedError names no way to share, which this does not."""
    router = Router(config)
    # An expired message is imported as it is, and counted, before it is dropped or dead-lettered.
    router._registry.importing = True
    try:
        return router.open(progress)
    except StoreLockedError as error:
        lock = config.directory / "router.lock"
        if error.path != str(lock):
            raise
        raise StoreLockedError(
            f"{config.directory} is open already, by {owner_of(lock)}; end that process first"
        ) from error


def _begun(marker: Path, source: str) -> frozenset[Destination]:
    """Return the destinations of an import that was cut short; none if there was none. Raises PlacementError."""
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
        begun = frozenset(Destination.restored(name) for name in found["destinations"])
        whence = found["source"]
    except FileNotFoundError:
        return frozenset()
    except (ValueError, KeyError, TypeError) as error:
        raise PlacementError(
            f"{marker} is damaged ({error}): an import was cut short. Delete that file and the import's destinations, "
            "or the data directory if there is nothing else in it. Then begin again"
        ) from error
    if whence != source:
        raise PlacementError(
            f"an import of {whence} was cut short: end that first, with --from-kahadb {whence}; or, if it is not "
            f"wanted any more, delete its destinations and {marker}"
        )
    return begun


def _require_unused(router: Router, report: Report, begun: frozenset[Destination]) -> dict[Destination, copying.Prefix]:
    """Return how much of each destination is here already. Raises PlacementError for those that somebody has used."""
    held: dict[Destination, copying.Prefix] = {}
    fresh: list[str] = []
    since: list[str] = []
    for one in report.destinations:
        found = _held(router, one, one.destination in begun)
        if found is not None:
            held[one.destination] = found
        else:
            (since if one.destination in begun else fresh).append(f"{one.destination} (store {one.store!r})")
    # Destinations that the source had when the import was begun, and has no longer:
    gone = sorted(begun.difference(one.destination for one in report.destinations), key=str)
    since += [str(name) for name in gone if _is_used(router._registry.store_of(name), name)]
    lines = []
    if fresh:
        lines.append(
            f"these have messages, subscriptions or remembered message ids here already: {', '.join(fresh)}; nothing "
            "was imported. Delete them here first, or import into another data directory"
        )
    if since:
        lines.append(
            f"these, or their source, have been used since their import was cut short: {', '.join(since)}; nothing "
            "more was imported. Delete them here to import them anew; or, if the import is not wanted any more, delete "
            f"{router.config.directory / MARKER}"
        )
    if lines:
        raise PlacementError("\n".join(lines))
    return held


def _held(router: Router, one: PlannedDestination, begun: bool) -> copying.Prefix | None:
    """Return how much of a destination is here; None if somebody has used it."""
    store = router._registry.store_of(one.destination)
    if store is not None and begun:
        return copying.prefix(_items(one), store, one.destination)
    return None if _is_used(store, one.destination) else copying.Prefix(0, True)


def _is_used(store: Store | None, destination: Destination) -> bool:
    if store is None:
        return False
    remembered = next(copying.read(store, destination), None) is not None
    return remembered or bool(copying.amount(store, destination).subscriptions)


def _bring(router: Router, one: PlannedDestination, progress: Progress, before: int, total: int) -> None:
    """Write the messages of a destination, behind those that are there. `before`: the bytes of the destinations before
    it."""

    def counted(items: Iterator[copying.Stored]) -> Iterator[copying.Stored]:
        size = 0
        for count, item in enumerate(items):
            size += len(item.record)
            if count % 1000 == 0:
                progress("Importing", before + size, total)
            yield item

    def write(store: Store) -> int:
        there = copying.amount(store, one.destination).messages
        copying.bring(store, one.destination, counted(islice(_items(one), there, None)), one.subscriptions)
        return copying.amount(store, one.destination).messages

    found = router._registry.for_store(one.destination, write)
    if found != one.messages:
        raise StoreFailedError(
            f"store {one.store!r} holds {count_of(found, 'message')} of {one.destination}, not the {one.messages:,} "
            "that were to be imported: run the same command again; it goes on, or says what is wrong"
        )


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as plain values."""
    return {
        "directory": str(report.directory),
        "messages": report.messages,
        "destinations": [
            {
                "destination": str(one.destination),
                "store": one.store,
                "kind": one.kind,
                "messages": one.messages,
                "bytes": one.bytes,
                "subscriptions": [
                    {"client": s.client_id, "name": s.name, "selector": s.selector} for s in one.subscriptions
                ],
            }
            for one in report.destinations
        ],
        "not_carried": dict(report.not_carried),
        "prepared": [{"transaction": one.id, "operations": one.operations} for one in report.prepared],
        "open_transactions": report.open_transactions,
        "damages": [*report.damages, *report.torn],
        "problems": list(report.problems),
    }


def warnings(report: Report) -> Sequence[str]:
    """Return what a user should know of what was or will be imported, a sentence each."""
    lines = [*report.damages, *report.torn]
    lines += [f"not carried over: {count} {what}" for what, count in report.not_carried.items()]
    lines += [
        f"transaction {one.id} was left prepared: its sends ({one.operations} operations in all) are not carried over, "
        "and what it would have acked is; resolve it in the broker before, or by hand"
        for one in report.prepared
    ]
    if report.open_transactions:
        lines.append(f"{report.open_transactions} transactions were open, as a broker that starts discards them too")
    return lines
