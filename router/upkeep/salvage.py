"""Salvage makes a new directory of what can be read of a damaged data directory, or of one journal store.

    found = salvage("data", "data.new")          # nothing is written to data

All of `directory` is copied, also from a disk that cannot read some of it. Then each journal store of the copy
is mended (adapters/journal/recovery/salvage.py), and opened, so that its content is sure. The copy has its name once it
is whole.
The losses are in `salvage.json` there, and in the `loss-*.json` of each store.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from ...adapters.journal import JournalStore
from ...adapters.journal.directory import StoreDirectory
from ...adapters.journal.recovery.salvage import LossReport, made_for_priorities, reports, store_id_of, summary
from ...adapters.journal.recovery.salvage import salvage as mend
from ...adapters.system.directory import is_empty
from ...adapters.system.files import made_whole, replace_file, sync_directory, sync_file
from ...adapters.system.reading_lock import kept_closed
from ...policies.config import Config, JournalOptions
from ...policies.config.durability import OnCorruption
from ...policies.errors import CorruptionError, PlacementError, StoreFullError
from ...policies.paths import from_home
from ...policies.text import human_bytes
from ..placement import bindings
from ..placement.record import RECORD, DestinationsTable
from .closed_directory import LOCK
from .salvaged_logs import USAGE, mend_database, mend_decisions, mend_usage, restored_id

log: logging.Logger = logging.getLogger(__name__)

REPORT: Final = "salvage.json"
CHUNK_BYTES: Final = 1 << 20
SECTOR_BYTES: Final = 4096
_SKIPPED: Final = (".lock", ".tmp")


@dataclass(frozen=True, slots=True)
class SalvagedStore:
    """One salvaged journal store."""

    directory: str
    """The store's place in the new directory."""
    messages: int
    """The number of messages that it holds now."""
    loss: dict[str, Any] | None
    """The loss, as in its own report; None: nothing is lost."""
    text: str
    """The loss in a line."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """The content of the new directory, and what is lost."""

    directory: str
    stores: tuple[SalvagedStore, ...]
    unreadable: dict[str, int]
    """Files that the disk could not read whole: how many bytes are zeros now."""
    notes: tuple[str, ...]
    """Further facts, and what is to be done."""

    @property
    def is_whole(self) -> bool:
        """True if nothing of the journal stores is lost, and all files were read."""
        return not self.unreadable and not any(store.loss for store in self.stores)


def salvage(directory: Path | str, target: Path | str, config: Config | None = None) -> Salvaged:
    """Copy what can be read of `directory`, a data directory or one journal store's, to `target`, which must not exist.

    `config` says where indexes lie that are elsewhere. Nobody may have the directory open. Raises PlacementError for a
    directory that is neither, and where something is at `target`; StoreLockedError; StoreFullError and OSError, and
    then there is nothing at `target`; CorruptionError for stores of another version.
    """
    source, target = from_home(directory), from_home(target)
    _require_places(source, target)
    with made_whole(target, "salvage") as making:
        with ExitStack() as locks:
            for path in [source / LOCK, *sorted(source.rglob("store.lock"))]:
                locks.enter_context(kept_closed(path, "the router" if path.name == LOCK else "a store"))
            _require_room(source, target)
            unreadable = _copy(source, making)
        found = _Salvaging(source, making, target, config, unreadable).run()
        replace_file(making / REPORT, msgspec.json.format(msgspec.json.encode(asdict(found)), indent=2) + b"\n")
    return found


def _require_places(source: Path, target: Path) -> None:
    """Raise PlacementError where there is nothing to salvage, or something where it would go."""
    if not source.exists():
        raise PlacementError(f"{source} does not exist; give the data directory, or that of one store")
    if not (source / RECORD).exists() and not (source / "stores").is_dir() and not (source / "journal").is_dir():
        raise PlacementError(
            f"{source} is no data directory, and no journal store: give the directory with {RECORD} in it, or the "
            "directory of one store, with journal/ in it"
        )
    if target.exists() and not is_empty(target):
        raise PlacementError(f"{target} is there already; name a new directory")
    if source.resolve() in [target.resolve(), *target.resolve().parents]:
        raise PlacementError(f"{target} lies in {source}, which is only read; name a directory elsewhere")


def _require_room(source: Path, target: Path) -> None:
    """Raise StoreFullError if the disk of `target` has no room for a copy of `source`, before anything is read."""
    needed = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    free = shutil.disk_usage(target.absolute().parent).free
    if needed > free:
        raise StoreFullError(
            f"{target} would take {human_bytes(needed)}, and {human_bytes(free)} are free there; name a directory "
            "on another disk"
        )


def _copy(source: Path, made: Path) -> dict[str, int]:
    """Copy a directory with all that is in it, as far as the disk reads it. Returns the files that it does not read
    whole, and how many bytes of them are lost. Raises OSError."""
    unreadable: dict[str, int] = {}
    made.mkdir(mode=0o700)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            unreadable |= {f"{path.name}/{file}": lost for file, lost in _copy(path, made / path.name).items()}
        elif path.is_file() and path.suffix not in _SKIPPED and (lost := _copy_file(path, made / path.name)):
            unreadable[path.name] = lost
    sync_directory(made)
    return unreadable


def _copy_file(path: Path, copy: Path) -> int:
    lost = 0
    with path.open("rb", buffering=0) as original, copy.open("xb", buffering=0) as made:
        size, mode = os.fstat(original.fileno()).st_size, path.stat().st_mode & 0o777
        os.fchmod(made.fileno(), mode)
        for offset in range(0, size, CHUNK_BYTES):
            data, missing = _read(original.fileno(), offset, min(CHUNK_BYTES, size - offset))
            lost += missing
            view = memoryview(data)
            while view:
                view = view[made.write(view) :]
        sync_file(made.fileno())
    return lost


def _read(fd: int, offset: int, size: int) -> tuple[bytes, int]:
    """Return so many bytes, zeros where the disk does not give them, and how many these zeros are."""
    try:
        data = os.pread(fd, size, offset)
        return data + bytes(size - len(data)), 0
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    if size <= SECTOR_BYTES:
        return bytes(size), size
    parts = [_read(fd, at, min(SECTOR_BYTES, offset + size - at)) for at in range(offset, offset + size, SECTOR_BYTES)]
    return b"".join(data for data, _ in parts), sum(lost for _, lost in parts)


@dataclass(slots=True)
class _Salvaging:
    """Makes a copy whole."""

    source: Path
    copy: Path
    target: Path
    """Where the copy will be."""
    config: Config | None
    unreadable: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def run(self) -> Salvaged:
        paths = [path.parent for path in sorted(self.copy.rglob("journal")) if path.is_dir()]
        logs = [self.copy / bindings.DECISIONS, self.copy / USAGE]
        stores = [self._store(path) for path in paths if path not in logs]
        self._record()
        for name, mend_log in ((bindings.DECISIONS, mend_decisions), (USAGE, mend_usage)):
            if (self.copy / name / "journal").is_dir():
                self.notes += mend_log(self.copy / name)
        for path in sorted(self.copy.rglob("store.db")):
            self.notes += mend_database(path, str(path.parent.relative_to(self.copy)))
        return Salvaged(str(self.target), tuple(stores), self.unreadable, tuple(self.notes))

    def _store(self, path: Path) -> SalvagedStore:
        """Mend a store, and see that it opens."""
        relative = path.relative_to(self.copy)
        name = path.name if str(relative) == "." else str(relative)
        directory = StoreDirectory(name, path, None)
        store_id = directory.identify()
        written = store_id_of(path / "journal")
        if written is not None:
            self.notes += restored_id(path, written, "the segments say", str(relative))
            store_id = written
        if store_id is None:
            self.notes.append(f"{relative}: nothing of its journal reads, and it has no store.id; it is as it was")
            return SalvagedStore(str(relative), 0, None, "nothing of it can be read")
        self._fetch_index(path, store_id)
        earlier = {where for where, _ in reports(path)}
        is_ordered = made_for_priorities(path / "index.mdb", store_id)
        mend(name, path, path / "journal", path / "index.mdb", store_id, keep=False)
        options = JournalOptions(
            on_corruption=OnCorruption.SALVAGE, priorities=is_ordered, duplicate_window=10_000_000,
        )  # fmt: skip
        store = JournalStore(name, path, options)
        store.open()
        try:
            messages = store.stats().messages
            violations = list(store.check())
        finally:
            store.close()
        self.notes += [f"{relative}: {violation}".replace(str(self.copy), str(self.target)) for violation in violations]
        told = [report for where, report in reports(path) if where not in earlier]
        report: LossReport | None = told[-1] if told else None
        loss = None if report is None or report.is_empty else msgspec.to_builtins(report)
        nothing = (
            "nothing is lost" if not violations else "none of them is lost, but all is not well with it: see below"
        )
        return SalvagedStore(str(relative), messages, loss, summary(report) if report is not None else nothing)

    def _fetch_index(self, path: Path, store_id: bytes) -> None:
        """Copy an index that lies elsewhere into the store's directory: there the copy needs no configuration."""
        for store in self.config.stores if self.config is not None else ():
            if store.index_directory is not None and not (path / "index.mdb").exists():
                for suffix in (".mdb", ".sums"):
                    there = store.index_directory / f"{store_id.hex()}{suffix}"
                    if there.exists():
                        shutil.copyfile(there, path / f"index{suffix}")

    def _record(self) -> None:
        """Check the placement record: it is of use, or put out of the way."""
        if (there := bindings.place_of(self.source)) != self.source:
            self.notes.append(
                f"{RECORD} and {bindings.DECISIONS}/ lie in {there}, and were not copied: put the new directory where "
                "the old one was, under the same configuration"
            )
        record = self.copy / RECORD
        if not record.exists():
            return
        table = DestinationsTable(record)
        try:
            table.open()
        except (CorruptionError, PlacementError) as error:
            record.rename(record.with_name(f"{RECORD}.damaged"))
            self.notes.append(
                f"{RECORD} is damaged, and was set apart ({error.__class__.__name__}): opening the new directory with "
                "the configuration that the stores were written under records them anew"
            )
            return
        rows = list(table.stores.values())
        table.close()
        for row in rows:
            if Path(row.path).is_absolute():
                self.notes.append(
                    f"store {row.name!r} lies in {row.path}, outside {self.source}, and was not copied: it is opened "
                    "where it is. Salvage it by itself, if it is damaged"
                )
