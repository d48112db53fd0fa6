"""Verification compares every byte of a data directory that has a checksum with it, while nobody has it open.

    found = verify("data")                     # nothing is written to data, nor mended

Journals, indexes and large bodies are read where they lie (adapters/journal/verification.py), and so are the decision
log, the usage log and the placement record. A store of another kind that has all its files in its directory is opened
as a copy, in the directory for temporary files, and checks itself there. What lies in a database elsewhere is not read.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ...adapters.core.store_types import Progress
from ...adapters.journal.verification import NOTHING, Damage, log_id_of, verify_log, verify_store
from ...adapters.system.reading_lock import kept_closed
from ...adapters.wal.files.record_file import damages as record_damages
from ...adapters.wal.recovery.mending import Hints, Mender
from ...policies.config import Config, StoreConfig
from ...policies.config.adapters import DEFAULT_KIND, load_adapter
from ...policies.errors import AnabranchError, ConfigError, PlacementError
from ...policies.text import count_of
from ..placement import bindings
from ..placement.on_disk import in_force
from ..placement.on_disk.repartition_progress import NAME as PROGRESS
from ..placement.record import RECORD, StoreRow
from ..transactions.decision_log import needed_by
from ..upkeep.closed_directory import LOCK, config_of, lying_in, recorded
from ..upkeep.salvaged_logs import USAGE, frames_cut

SQLITE: Final = "store.db-wal"


@dataclass(slots=True)
class Verified:
    """The result of a verification."""

    directory: str
    damages: list[Damage] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    """Names of the stores that were verified."""
    notes: list[str] = field(default_factory=list)
    """What was not verified, and why."""


def verify(directory: Path, config: Config | None = None, progress: Progress | None = None) -> Verified:
    """Verify a data directory, or one journal store's.

    `config` says where indexes lie that are elsewhere, and how stores of other kinds are opened. Raises PlacementError
    where there is nothing of ours, StoreLockedError while somebody has it open, and OSError: a disk that cannot read.
    """
    if not any((directory / mark).exists() for mark in (RECORD, bindings.MARK, "stores", "journal")):
        what = "is no data directory, and no journal store" if directory.exists() else "does not exist"
        raise PlacementError(f"{directory} {what}; give the directory with {RECORD} in it, or that of one store")
    with tempfile.TemporaryDirectory(prefix="anabranch-verify-") as scratch, ExitStack() as locks:
        found = _Verifying(directory, config, Path(scratch), locks, progress)
        if (directory / "journal").is_dir():
            found.store(StoreRow(b"", str(directory.absolute()), DEFAULT_KIND, directory.name))
        else:
            found.data_directory()
    return found.result


class _Verifying:
    def __init__(
        self, directory: Path, config: Config | None, scratch: Path, locks: ExitStack, progress: Progress | None
    ) -> None:
        self._directory, self._config, self._scratch = directory, config, scratch
        self._locks, self._progress = locks, progress
        self.result = Verified(str(directory))

    def data_directory(self) -> None:
        """Verify all that is in a data directory."""
        directory, place = self._directory, bindings.place_of(self._directory)
        self._locks.enter_context(kept_closed(directory / LOCK, "the router"))
        self._records(place / RECORD, "which store holds what: the stores are recorded anew from where they lie")
        self._records(directory / PROGRESS, "how far a repartition has come")
        with recorded(directory, self._scratch, self.result.notes) as table:
            rows = sorted(table.stores.values(), key=lambda row: row.name) if table is not None else lying_in(directory)
            for row in rows:
                self.store(row)
        try:
            if (text := in_force.text_of(directory)) is not None:
                in_force.parsed(text, directory, names_suffice=True)
        except ConfigError as error:
            self.result.notes.append(str(error))
        self._log(place / bindings.DECISIONS, "the outcome of transactions", Hints(needed_by=needed_by))
        usage = directory / USAGE
        if self._config is not None and self._config.usage is not None:
            usage = self._config.usage.directory or usage
        self._log(usage, "what the advisor has recorded", Hints())

    def store(self, row: StoreRow) -> None:
        """Verify a store."""
        path, name = self._directory / row.path, row.name
        if not path.is_dir():
            self._add([Damage(str(path), 0, "the directory of the store is missing", "all of the store")])
            return
        self._locks.enter_context(kept_closed(path / "store.lock", f"store {name!r}"))
        config = config_of(self._config, name, path)
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            if row.kind == DEFAULT_KIND:
                index = config.index_directory if config is not None else None
                self._add(_told(lambda: verify_store(name, path, Path(scratch), index, self._progress), path))
            elif not self._copied(row, path, config, Path(scratch)):
                return
        self.result.stores.append(name)

    def _copied(self, row: StoreRow, path: Path, config: StoreConfig | None, scratch: Path) -> bool:
        """Let a copy of a store check itself; return whether that is possible."""
        kind = load_adapter(row.kind) if row.kind != "other" else None
        if kind is None or (config is not None and config.kind != row.kind):
            self.result.notes.append(f"store {row.name!r}: its kind is not known here; give the configuration by -c")
            return False
        options: Any = config.options if config is not None else kind.options_model()
        if kind.backend_type.volatile:
            return False
        if not kind.backend_type.is_contained(options):
            self.result.notes.append(
                f"store {row.name!r} is in a database, and was not read: use the database's own means"
            )
            return False
        cut = frames_cut(path / SQLITE)
        if cut:
            reason = f"a frame is damaged, with {count_of(cut, 'frame')} behind it"
            self._add([Damage(str(path / SQLITE), 0, reason, "what they have written: SQLite reads no further")])
        copy = scratch / "store"
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.lock"))
        if hasattr(options, "lease_expiration"):
            options = options.model_copy(update={"lease_expiration": None})  # of the copy nobody else has one

        def checked() -> Iterator[Damage]:
            store = kind(row.name, copy, options)
            store.open()
            try:
                for violation in store.check():
                    yield Damage(str(path), 0, violation.replace(str(copy), str(path)), "what it says")
            finally:
                store.close()

        self._add(_told(checked, path, copy))
        return True

    def _log(self, path: Path, what: str, hints: Hints) -> None:
        """Verify a log of the router's own."""
        if not (path / "journal").is_dir():
            return
        log_id = log_id_of(path)

        def lost() -> Iterator[Damage]:
            if log_id is None:
                yield Damage(str(path), 0, "no file of the log reads", what)
                return
            yield from verify_log(path, log_id)
            for loss in Mender(path / "journal", log_id, hints).look():
                records = loss.last_lsn - loss.first_lsn + 1
                gone = f"{count_of(records, 'record')} of {what}" if records else NOTHING
                yield Damage(loss.path, loss.offset, loss.reason, gone)

        self._add(_told(lost, path))

    def _records(self, path: Path, lost: str) -> None:
        if path.exists():
            for damage in record_damages(path):
                is_copy = "slot" in str(damage)
                self._add([Damage(str(path), damage.offset, str(damage), NOTHING if is_copy else lost)])

    def _add(self, damages: Iterable[Damage]) -> None:
        self.result.damages += damages


def _told(damages: Callable[[], Iterable[Damage]], path: Path, copy: Path | None = None) -> Iterator[Damage]:
    """Yield these damages, the last of which may be the error that ends them."""
    try:
        yield from damages()
    except AnabranchError as error:
        where, offset = getattr(error, "path", path), getattr(error, "offset", 0)
        reason, where = str(error), str(where)
        if copy is not None:
            reason, where = reason.replace(str(copy), str(path)), where.replace(str(copy), str(path))
        yield Damage(where, offset, reason, "what is in it cannot be told")
