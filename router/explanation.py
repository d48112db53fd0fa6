"""Why a data directory takes the disk that it takes: each journal store's segments, and what the others hold.

    explain("data")                              # a router's data directory, or one journal store's

Nothing is written there, and nobody may have it open meanwhile: not even the placement record is opened in place, but a
copy of it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..adapters.directory import StoreDirectory
from ..adapters.journal.explanation import Files, StoreExplanation, explain_store
from ..adapters.reading_lock import kept_closed
from ..adapters.store_types import Progress
from ..policies.config import Config, StoreConfig
from ..policies.errors import AnabranchError, CorruptionError, PlacementError, StoreLockedError
from .destinations_table import DestinationsTable, StoreRow
from .store_directories import StoreDirectories, children

RECORD = "placement.records"
LOCK = "router.lock"


@dataclass(frozen=True, slots=True)
class OtherStore:
    """A store without segments: in a database, in memory, or somebody's own kind."""

    name: str
    kind: str
    directory: str
    destinations: tuple[str, ...]
    """As the placement record has them."""
    files: Files
    """In its directory."""


@dataclass(frozen=True, slots=True)
class UnreadableStore:
    """A store that cannot be explained, and why."""

    name: str
    directory: str
    error: str


@dataclass(frozen=True, slots=True)
class DirectoryExplanation:
    """A data directory, or one store's."""

    directory: str
    stores: tuple[StoreExplanation, ...]
    others: tuple[OtherStore, ...]
    unreadable: tuple[UnreadableStore, ...]
    decisions: Files | None
    """The segments of the decision log; None where there is none."""
    notes: tuple[str, ...]
    """What is to be said of the directory itself."""
    at_ms: int
    """When it was read: ages count from here."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        found: dict[str, Any] = asdict(self)
        for store, plain in zip(self.stores, found["stores"], strict=True):
            plain["bytes"] = store.bytes
            for segment, plain_segment in zip(store.segments, plain["segments"], strict=True):
                plain_segment["kept"] = segment.kept
        return found


def is_ours(directory: Path) -> bool:
    """Whether it is a data directory of a router, or a store's, or a part of one."""
    marks = (RECORD, "placement.mdb", LOCK, "store.id", "stores")
    return any((directory / mark).exists() for mark in marks) or _is_part(directory)


def _is_part(directory: Path) -> bool:
    """A journal's directory, or the one of all stores."""
    return _is_journal(directory) or (directory.name == "stores" and (directory.parent / RECORD).exists())


def _is_journal(directory: Path) -> bool:
    return any(directory.glob("*.seg"))


def explain(
    directory: Path, config: Config | None = None, progress: Progress | None = None, now_ms: int | None = None
) -> DirectoryExplanation:
    """Why each segment in a data directory, or in one journal store's directory, is kept.

    `config` says where indexes and archives lie that are elsewhere. A store that cannot be read is told of among the
    others. Raises PlacementError where nothing of ours is there, StoreLockedError while somebody has it open, OSError.
    """
    at_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    with tempfile.TemporaryDirectory(prefix="anabranch-explain-") as scratch, ExitStack() as locks:
        reading = _Reading(directory, config, Path(scratch), at_ms, locks, progress)
        if (directory / "store.id").exists():
            if directory.name == "decisions":
                raise PlacementError(
                    f"{directory} is a decision log, and no store; give the data directory it lies in, or see "
                    "`anabranch transactions`"
                )
            is_journal = (directory / "journal").is_dir() or (directory / "index.mdb").exists()
            reading.store(directory.name, "journal" if is_journal else "other", directory, ())
        elif _is_part(directory):
            owner = directory.parent
            raise PlacementError(f"{directory} is a part of {owner}, or a copy of one; give {owner}")
        else:
            reading.data_directory()
        return reading.explained()


class _Reading:
    """One explanation in the making."""

    def __init__(
        self,
        directory: Path,
        config: Config | None,
        scratch: Path,
        at_ms: int,
        locks: ExitStack,
        progress: Progress | None,
    ) -> None:
        self._directory, self._config, self._scratch, self._at_ms = directory, config, scratch, at_ms
        self._locks, self._progress = locks, progress
        self._stores: list[StoreExplanation] = []
        self._others: list[OtherStore] = []
        self._unreadable: list[UnreadableStore] = []
        self._notes: list[str] = []
        self._decisions: Files | None = None

    def explained(self) -> DirectoryExplanation:
        return DirectoryExplanation(
            str(self._directory), tuple(self._stores), tuple(self._others), tuple(self._unreadable), self._decisions,
            tuple(self._notes), self._at_ms,
        )  # fmt: skip

    def data_directory(self) -> None:
        self._locks.enter_context(kept_closed(self._directory / LOCK, "the router"))
        for row, destinations in self._rows():
            path = self._directory / row.path
            if not path.is_dir():
                reason = "the directory is missing; if it lies on another disk, mount that"
                self._unreadable.append(UnreadableStore(row.name, str(path), reason))
            else:
                self.store(row.name, row.kind, path, destinations)
        decisions = self._directory / "decisions" / "journal"
        if decisions.is_dir():
            self._decisions = _files(decisions, "*.seg")

    def _rows(self) -> list[tuple[StoreRow, tuple[str, ...]]]:
        """The stores as the placement record has them, each with its destinations; else those that lie here."""
        record = self._directory / RECORD
        if record.exists():
            copy = self._scratch / RECORD
            shutil.copyfile(record, copy)
            table = DestinationsTable(copy)
            try:
                table.open()
            except (CorruptionError, PlacementError) as error:
                self._notes.append(str(error).replace(str(copy), str(record)))
            else:
                rows = sorted(table.stores.values(), key=lambda row: row.name)
                found = [(row, tuple(map(str, table.destinations_in(row.store_id)))) for row in rows]
                table.close()
                return found
        else:
            self._notes.append(f"{record} is missing: the stores that lie here are shown")
        return [(row, ()) for row in self._lying_here()]

    def _lying_here(self) -> Iterator[StoreRow]:
        stores = children(self._directory / "stores")
        for path in [*stores, *(child for store in stores for child in children(store))]:
            store_id = StoreDirectory("", path).identify()
            if store_id is not None:
                kind = "journal" if (path / "journal").is_dir() else "other"
                relative = path.relative_to(self._directory)
                yield StoreRow(store_id, str(relative), kind, ":".join(relative.parts[1:]))

    def store(self, name: str, kind: str, path: Path, destinations: tuple[str, ...]) -> None:
        """One whose directory is there."""
        self._locks.enter_context(kept_closed(path / "store.lock", f"store {name!r}"))
        if kind != "journal":
            self._others.append(OtherStore(name, kind, str(path), destinations, _files(path)))
            return
        config = self._options(name, path)
        options = getattr(config, "options", None)
        # A directory of its own: what is copied of one store goes before the next is read.
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            try:
                self._stores.append(
                    explain_store(
                        name,
                        path,
                        Path(scratch),
                        self._at_ms,
                        config.index_directory if config is not None else None,
                        getattr(options, "archive_directory", None),
                        self._progress,
                    )
                )
            except StoreLockedError:
                raise
            except (AnabranchError, OSError) as error:
                self._unreadable.append(UnreadableStore(name, str(path), str(error)))

    def _options(self, name: str, path: Path) -> StoreConfig | None:
        if self._config is None:
            return None
        at = StoreDirectories(self._config).config_at(path)
        named = (store for store in self._config.stores if store.name == name.partition(":")[0])
        return at or next(named, None)


def _files(directory: Path, pattern: str = "**/*") -> Files:
    sizes = [path.stat().st_size for path in directory.glob(pattern) if path.is_file()]
    return Files(len(sizes), sum(sizes))
