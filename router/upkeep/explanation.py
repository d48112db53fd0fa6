"""Explains why a data directory takes the disk that it takes: each journal store's segments, and what the others hold.

    explain("data")                              # a router's data directory, or one journal store's

Nothing is written there, and nobody may have it open meanwhile: not even the placement record is opened in place, but a
copy of it. A router that is open explains its own directory (explain_open): each journal store waits meanwhile.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...adapters.core import Store
from ...adapters.core.store_types import Progress
from ...adapters.journal.backend import JournalBackend
from ...adapters.journal.explanation import Files, StoreExplanation, explain_store
from ...adapters.system.reading_lock import kept_closed
from ...policies.config import Config
from ...policies.errors import AnabranchError, ConfigError, CorruptionError, PlacementError, StoreLockedError
from ..placement import bindings
from ..placement.on_disk.repartition_progress import NAME as PROGRESS
from ..placement.on_disk.repartition_progress import Progress as Repartition
from ..placement.on_disk.repartition_progress import advice, read_progress
from ..placement.record import RECORD, DestinationsTable, StoreRow
from ..usage.blocks import VERSION_FILE as USAGE
from .closed_directory import LOCK, config_at, config_of, lying_in, recorded

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry


@dataclass(frozen=True, slots=True)
class OtherStore:
    """A store without segments: in a database, in memory, or somebody's own kind."""

    name: str
    kind: str
    directory: str
    destinations: tuple[str, ...]
    """The destinations, as the placement record has them."""
    files: Files
    """The files in its directory."""


@dataclass(frozen=True, slots=True)
class UnreadableStore:
    """A store that cannot be explained, and why."""

    name: str
    directory: str
    error: str


@dataclass(frozen=True, slots=True)
class UnfinishedCopy:
    """The remains of an interrupted repartition: messages of a destination that do not count."""

    destination: str
    store: str
    """The name of the store that they lie in."""
    original: str
    """The store that holds the messages that count."""


@dataclass(frozen=True, slots=True)
class DirectoryExplanation:
    """A data directory, or one store's."""

    directory: str
    stores: tuple[StoreExplanation, ...]
    others: tuple[OtherStore, ...]
    unreadable: tuple[UnreadableStore, ...]
    decisions: Files | None
    """The segments of the decision log; None where there is none."""
    usage: Files | None
    """The segments of the usage log."""
    copy: UnfinishedCopy | None
    """The copy that does not count though it lies in a store."""
    notes: tuple[str, ...]
    """Notes on the directory itself."""
    at_ms: int
    """When it was read: ages count from here."""

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers."""
        found: dict[str, Any] = asdict(self)
        for store, plain in zip(self.stores, found["stores"], strict=True):
            plain["bytes"] = store.bytes
            for segment, plain_segment in zip(store.segments, plain["segments"], strict=True):
                plain_segment["kept"] = segment.kept
        return found


def is_ours(directory: Path) -> bool:
    """Return whether a directory is a data directory of a router, or a store's, or a part of one."""
    marks = (RECORD, "placement.mdb", LOCK, "store.id", "stores")
    return any((directory / mark).exists() for mark in marks) or _is_part(directory)


def _is_part(directory: Path) -> bool:
    """Return whether a directory is a journal's, or the one of all stores."""
    is_all = directory.name == "stores" and (directory.parent / RECORD).exists()
    return is_all or any(directory.glob("*.seg"))


def explain(
    directory: Path, config: Config | None = None, progress: Progress | None = None, now_ms: int | None = None
) -> DirectoryExplanation:
    """Explain why each segment in a data directory, or in one journal store's directory, is kept.

    `config` says where indexes and archives lie that are elsewhere. The explanation names a store that cannot be read.
    Raises PlacementError where nothing of ours is there, ConfigError for the configuration of another directory,
    StoreLockedError while somebody has it open, OSError.
    """
    at_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    with tempfile.TemporaryDirectory(prefix="anabranch-explain-") as scratch, ExitStack() as locks:
        reading = _Reading(directory, config, Path(scratch), at_ms, locks, progress)
        _require_explainable(directory, config)
        if (directory / "store.id").exists():
            is_journal = (directory / "journal").is_dir() or (directory / "index.mdb").exists()
            reading.store(directory.name, "journal" if is_journal else "other", directory, ())
            reading.repartition_above(directory)
        else:
            reading.data_directory()
        return reading.explained()


def explain_open(registry: StoreRegistry) -> DirectoryExplanation:
    """Explain the data directory of a router that is open, as `explain`; stores that are not open are opened for it."""
    config, at_ms = registry.config, time.time_ns() // 1_000_000
    with tempfile.TemporaryDirectory(prefix="anabranch-explain-") as scratch, ExitStack() as locks:
        reading = _Reading(config.directory, config, Path(scratch), at_ms, locks, None)
        table = registry.table
        for name, row in registry.rows_by_name().items():
            path = config.directory / row.path
            if row.kind != "journal":
                destinations = tuple(map(str, table.destinations_in(row.store_id)))
                reading.others.append(OtherStore(name, row.kind, str(path), destinations, _files(path)))
                continue
            try:
                reading.stores.append(registry.with_row(row, lambda store: _explained(store, at_ms)))
            except (AnabranchError, OSError) as error:
                reading.unreadable.append(UnreadableStore(name, str(path), str(error)))
        reading.logs()
        return reading.explained()


def _explained(store: Store, at_ms: int) -> StoreExplanation:
    backend = store.backend
    assert isinstance(backend, JournalBackend)
    return store.undisturbed(lambda: backend.explained(at_ms))


def _require_explainable(directory: Path, config: Config | None) -> None:
    """Raise PlacementError for what is neither a data directory nor a store's, ConfigError for another's
    configuration."""
    usage = next((one for one in (directory, directory.parent) if (one / USAGE).exists()), None)
    if usage is not None:
        what = "a usage log" if usage == directory else f"a part of the usage log {usage}"
        raise PlacementError(
            f"{directory} is {what}, and no store: `anabranch recommend --usage {usage} --out DIR` reads it, and "
            f"`anabranch trace --usage {usage} --out FILE` makes a trace of it"
        )
    if (directory / "store.id").exists():
        if directory.name == "decisions":
            raise PlacementError(
                f"{directory} is a decision log, and no store; give the data directory it lies in, or see "
                "`anabranch transactions`"
            )
        if config is not None and config_at(config, directory) is None:
            places = ", ".join(str(config.directory_of(store)) for store in config.stores)
            raise ConfigError([f"the configuration has no store in {directory}; it has those in {places}"])
    elif _is_part(directory):
        owner = directory.parent
        raise PlacementError(f"{directory} is a part of {owner}, or a copy of one; give {owner}")
    elif config is not None and config.directory.resolve() != directory.resolve():
        raise ConfigError(
            [
                f"the configuration has the data directory {config.directory}, and not {directory.absolute()}, "
                "which is to be explained; give the configuration of the latter"
            ]
        )


@dataclass(slots=True)
class _Reading:
    """One explanation in the making."""

    directory: Path
    config: Config | None
    scratch: Path
    at_ms: int
    locks: ExitStack
    progress: Progress | None
    stores: list[StoreExplanation] = field(default_factory=list)
    others: list[OtherStore] = field(default_factory=list)
    unreadable: list[UnreadableStore] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    decisions: Files | None = None
    usage: Files | None = None
    copy: UnfinishedCopy | None = None

    def explained(self) -> DirectoryExplanation:
        return DirectoryExplanation(
            str(self.directory), tuple(self.stores), tuple(self.others), tuple(self.unreadable), self.decisions,
            self.usage, self.copy, tuple(self.notes), self.at_ms,
        )  # fmt: skip

    def data_directory(self) -> None:
        self.locks.enter_context(kept_closed(self.directory / LOCK, "the router"))
        for row, destinations in self._rows():
            path = self.directory / row.path
            if not path.is_dir():
                reason = "the directory is missing; if it lies on another disk, mount that"
                self.unreadable.append(UnreadableStore(row.name, str(path), reason))
            else:
                self.store(row.name, row.kind, path, destinations)
        self.logs()

    def logs(self) -> None:
        """Count the files of the decision log and of the usage log."""
        decisions = bindings.place_of(self.directory) / bindings.DECISIONS / "journal"
        if decisions.is_dir():
            self.decisions = _files(decisions, "*.seg")
        usage = self.directory / "usage"
        if self.config is not None and self.config.usage is not None:
            usage = self.config.usage.directory or usage
        if (usage / USAGE).exists():
            self.usage = _files(usage / "journal", "*.seg")

    def repartition_above(self, directory: Path) -> None:
        """Note an interrupted repartition of the data directory that a store lies in."""
        for above in list(directory.absolute().parents)[:3]:
            if (above / PROGRESS).exists():
                self.notes.append(
                    f"{above} is being repartitioned, and that was interrupted: what is here may be an unfinished "
                    f"copy; `anabranch explain {above}` says of what."
                )

    def _unfinished_copy(self, table: DestinationsTable) -> None:
        """Note a repartition that was interrupted."""
        if not (self.directory / PROGRESS).exists():
            return
        shutil.copyfile(self.directory / PROGRESS, self.scratch / PROGRESS)
        try:
            found = read_progress(self.scratch)
        except (CorruptionError, PlacementError) as error:
            self.notes.append(str(error).replace(str(self.scratch), str(self.directory)))
            return
        self.notes.append(f"{self.directory} is being repartitioned{advice(self.directory, found)}.")
        self.copy = _copy_of(found, table)
        if self.copy is not None:
            one = self.copy
            self.notes.append(
                f"The messages of {one.destination} in store {one.store} are an unfinished copy, or the rest of it "
                f"once it has moved. They do not count: store {one.original} holds its messages."
            )

    def _rows(self) -> list[tuple[StoreRow, tuple[str, ...]]]:
        """Return the stores as the placement record has them, each with its destinations; else those that lie here."""
        with recorded(self.directory, self.scratch, self.notes) as table:
            if table is None:
                return [(row, ()) for row in lying_in(self.directory)]
            self._unfinished_copy(table)
            rows = sorted(table.stores.values(), key=lambda row: row.name)
            return [(row, tuple(map(str, table.destinations_in(row.store_id)))) for row in rows]

    def store(self, name: str, kind: str, path: Path, destinations: tuple[str, ...]) -> None:
        """Explain a store whose directory is there."""
        self.locks.enter_context(kept_closed(path / "store.lock", f"store {name!r}"))
        if kind != "journal":
            self.others.append(OtherStore(name, kind, str(path), destinations, _files(path)))
            return
        config = config_of(self.config, name, path)
        options = getattr(config, "options", None)
        # A directory of its own: what is copied of one store goes before the next is read.
        with tempfile.TemporaryDirectory(dir=self.scratch) as scratch:
            try:
                self.stores.append(
                    explain_store(
                        name,
                        path,
                        Path(scratch),
                        self.at_ms,
                        config.index_directory if config is not None else None,
                        getattr(options, "archive_directory", None),
                        self.progress,
                    )
                )
            except StoreLockedError:
                raise
            except (AnabranchError, OSError) as error:
                self.unreadable.append(UnreadableStore(name, str(path), str(error)))


def _copy_of(progress: Repartition | None, table: DestinationsTable) -> UnfinishedCopy | None:
    moving = None if progress is None else progress.moving
    if moving is None:
        return None
    row = table.destinations.get(moving.destination)
    has_moved = row is not None and row.store_id == moving.target
    original, copy = (moving.target, moving.source) if has_moved else (moving.source, moving.target)
    if original not in table.stores or copy not in table.stores:
        return None  # not made yet, or removed already
    return UnfinishedCopy(str(moving.destination), table.stores[copy].name, table.stores[original].name)


def _files(directory: Path, pattern: str = "**/*") -> Files:
    sizes = [path.stat().st_size for path in directory.glob(pattern) if path.is_file()]
    return Files(len(sizes), sum(sizes))
