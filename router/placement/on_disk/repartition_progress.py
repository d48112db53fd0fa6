"""The progress of a repartition: `repartition.records` in the data directory, from its first move to its end.

A RecordFile (system/record_file.py) of one record, which each step replaces. While it is there no router opens the
directory: a destination may lie in two stores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from ....adapters.system.files import FILE_MODE, FULL, refused, sync_directory
from ....adapters.wal.files.record_file import DamagedError, RecordFile
from ....policies.errors import CorruptionError, PlacementError
from ....policies.names.destination import Destination, Kind

NAME: Final = "repartition.records"
VERSION: Final = 1


class Moving(msgspec.Struct, frozen=True, array_like=True):
    """The one destination that is on its way. Its row in the placement record says how far: until it is the target's,
    that copy does not count; from then on the source's does not."""

    kind: int
    name: str
    source: bytes
    """Store ids."""
    target: bytes

    @property
    def destination(self) -> Destination:
        return Destination(Kind(self.kind), self.name)


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A branch of a transaction that is to be prepared in a store, and nothing else."""

    store_id: bytes
    transaction: bytes
    payload: bytes
    """The payload, as adapters/core/operations/branches.py makes it; empty: nothing."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The record of the file, in msgpack."""

    configuration: bytes
    """Digest of where the configuration routes what."""
    path: str
    """The configuration's file, to be named; empty if there was none."""
    moving: Moving | None = None
    removing: tuple[str, bytes] | None = None
    """The path, and the id, of a store that is empty and about to be removed."""
    wanted: tuple[Wanted, ...] = ()
    """Prepared transactions of `moving` that are being rewritten."""


_decode: Final = msgspec.msgpack.Decoder(Progress).decode


class ProgressFile:
    """The file, open from `open` to `close`. Used by one thread. The constructor touches nothing."""

    def __init__(self, directory: Path, file_mode: int = FILE_MODE) -> None:
        self._path = directory / NAME
        self._file = RecordFile(self._path, VERSION, file_mode)
        self._is_open = False

    def open(self) -> Progress | None:
        """Open the file and return its progress; None if there is no file. Raises CorruptionError, PlacementError for
        another version."""
        if not self._path.exists():
            return None
        try:
            version, records = self._file.open()
            self._is_open = True
            if version != VERSION:
                raise PlacementError(
                    f"{self._path} has format version {version}; this program reads {VERSION}: use the version that "
                    "wrote it"
                )
            return _decode(records[-1]) if records else None
        except (DamagedError, msgspec.MsgspecError, ValueError) as error:
            raise CorruptionError(
                str(self._path), getattr(error, "offset", 0), f"the progress of a repartition is damaged: {error}",
                "restore the file from a backup: it says which destination was being moved",
            ) from error  # fmt: skip

    def write(self, progress: Progress) -> None:
        """Write the progress, durably; the file is made if need be. Raises StoreFullError."""
        record = msgspec.msgpack.encode(progress)
        try:
            if not self._is_open:
                self._file.create()
                self._file.open()
                self._is_open = True
            self._file.reserve(len(record))
            self._file.replace(record)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise refused(f"{self._path} cannot be written: {error.strerror}", error) from error

    def remove(self) -> None:
        """Remove the file: all is done. Durable on return. Idempotent."""
        self.close()
        for path in (self._path, self._path.with_name(NAME + ".tmp")):
            path.unlink(missing_ok=True)
        sync_directory(self._path.parent)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._is_open = False
        self._file.close()


def read_progress(directory: Path) -> Progress | None:
    """Return the progress in a directory that nobody else has open; None if there is none, or none yet. Raises as
    ProgressFile.open."""
    file = ProgressFile(directory)
    try:
        return file.open()
    finally:
        file.close()


def require_none(directory: Path) -> None:
    """Raise PlacementError if the directory is being repartitioned, and CorruptionError where that cannot be read."""
    if (directory / NAME).exists():
        found = read_progress(directory)
        raise PlacementError(f"{directory} is being repartitioned{advice(directory, found)}")


def advice(directory: Path, found: Progress | None) -> str:
    """Return where an interrupted repartition was moving to, and what to do about it: the rest of a sentence that says
    that the directory is being repartitioned."""
    known = found is not None and found.path != ""
    path = found.path if found is not None and known else "FILE"
    target, same = (f" to the configuration {path}", "") if known else ("", " with the same configuration")
    return (
        f"{target}, and that was interrupted; run `anabranch repartition --config {path} {directory}` again{same}: it "
        "goes on where it was. To move to another configuration, or back to the one before, run it with that one and "
        "--restart"
    )
