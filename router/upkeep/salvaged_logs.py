"""Mends a data directory's own logs in the copy that `anabranch salvage` makes, and looks at SQLite's databases.

The decision log says which transactions over several stores are committed, and by what it does not say which are rolled
back. So if a record of it is lost nothing may be rolled back for want of a decision. The log is written anew with the
decisions that read, and without the times of which it knew. Whatever else is prepared waits for an operator's outcome
(resolver.py). Where only the header of a file or a batch is damaged nothing is lost.

The usage log is of the advisor alone: a damaged one is put aside, and still read by `anabranch recommend --usage`.
"""

from __future__ import annotations

import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Final

from ...adapters.journal.recovery.salvage import store_id_of
from ...adapters.system.directory import StoreDirectory
from ...adapters.system.files import FILE_MODE, replace_file, sync_directory
from ...adapters.wal import create_log
from ...adapters.wal.recovery.mending import Hints, Mender
from ...policies.config.durability import Sync
from ...policies.errors import AnabranchError, CorruptionError
from ...policies.text import count_of
from ..transactions.decision_log import SEGMENT_BYTES, Decision, DecisionLog, External, needed_by

ID_FILE: Final = "store.id"
USAGE: Final = "usage"
"""The usage log's directory."""


def mend_decisions(path: Path) -> list[str]:
    """Mend the decision log in a directory that nobody has open; returns what is to be known of that, nothing if it is
    whole. Raises OSError."""
    where = path.name
    log_id = store_id_of(path / "journal") or StoreDirectory(where, path).identify()
    if log_id is None:
        return [_put_aside(path, f"no file of {where}/ reads", _ALL_WAIT)]
    notes = restored_id(path, log_id, "the segments say")
    try:
        mender = Mender(path / "journal", log_id, Hints(needed_by=needed_by))
        lost = mender.look()
        mender.write()
        records = sum(loss.last_lsn - loss.first_lsn + 1 for loss in lost)
        if not records:
            if lost:
                notes.append(f"{where}: {count_of(len(lost), 'damaged header')} made anew; no decision is lost")
            _read(path)
            return notes
        decisions, externals = _read(path)
        shutil.rmtree(path)
        _write(path, log_id, decisions)
    except (AnabranchError, ValueError) as error:
        return [*notes, _put_aside(path, f"{where} does not read: {error}", _ALL_WAIT)]
    notes.append(
        f"{where}: {count_of(records, 'record')} of the decision log cannot be read, and may have been decisions. The "
        f"{count_of(len(decisions), 'decision')} that can be read still hold; whatever else is prepared waits for your "
        "outcome: see `anabranch transactions`"
    )
    notes += [
        f"{where}: the external transaction {external.xid} was prepared when it was written: it waits for your outcome "
        f"as {external.transaction.hex()}"
        for external in externals
    ]
    return notes


_ALL_WAIT = "all that is prepared waits for your outcome: see `anabranch transactions`"


def _put_aside(path: Path, reason: str, then: str) -> str:
    path.rename(path.with_name(f"{path.name}.damaged"))
    sync_directory(path.parent)
    return f"{reason}; it was renamed to {path.name}.damaged: {then}"


def _read(path: Path) -> tuple[list[Decision], list[External]]:
    """Return the records in force in a log that was mended."""
    log = DecisionLog(path, Sync.ALWAYS, is_mended=True)
    try:
        log.open()
        return list(log.decisions.values()), list(log.externals.values())
    finally:
        log.close()


def _write(path: Path, log_id: bytes, decisions: list[Decision]) -> None:
    """Write a log of this id with these decisions, which knows of no time before."""

    def fill(made: Path, _: bytes) -> bytes:
        create_log(made / "journal", log_id, SEGMENT_BYTES)
        return log_id

    StoreDirectory(path.name, path).create(fill)
    log = DecisionLog(path, Sync.ALWAYS)
    try:
        log.open()
        for decision in decisions:
            log.decide(decision)
    finally:
        log.close()


def mend_usage(path: Path) -> list[str]:
    """Mend the usage log in a directory; returns what is to be known of that."""
    log_id = store_id_of(path / "journal") or StoreDirectory(path.name, path).identify()
    try:
        is_whole = log_id is not None and not Mender(path / "journal", log_id).look()
    except CorruptionError:
        is_whole = False
    if is_whole and log_id is not None:
        return restored_id(path, log_id, "the segments say")
    return [
        _put_aside(
            path,
            f"{path.name}/ is damaged",
            "it is recorded anew from now on, and `anabranch recommend --usage` reads what is left of the old one",
        )
    ]


def mend_database(path: Path, name: str) -> list[str]:
    """Return what SQLite says of the database of a store, whose directory has the name. The store.id is made that of
    the database."""
    cut = frames_cut(path.with_name(f"{path.name}-wal"))
    notes = []
    if cut:
        notes.append(
            f"{name}/{path.name}-wal: {count_of(cut, 'frame')} behind a damaged one, which SQLite takes for torn: it "
            "reads no further, and unless it was, the database is that of an earlier moment"
        )
    try:
        with closing(sqlite3.connect(path)) as database:
            found = [row[0] for row in database.execute("PRAGMA integrity_check(1)")]
            tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            ids = [
                row[0]
                for table in tables
                if table.endswith("store")
                for row in database.execute(f'SELECT storeid FROM "{table}"')
            ]
    except sqlite3.Error as error:
        found, ids = [str(error)], []
    if found != ["ok"]:
        return [
            *notes,
            f"{name}/{path.name} is damaged, and was copied as it is: {found[0]}. Restore it from a backup of the "
            "database",
        ]
    notes.append(f"{name} is a database: it was copied as it is, and SQLite finds nothing wrong with it")
    try:
        (written,) = ids
        return [*notes, *restored_id(path.parent, bytes.fromhex(written), "the database says", name)]
    except ValueError:
        return notes


def frames_cut(path: Path) -> int:
    """Return how many frames of the latest writes to a log of SQLite's lie behind one whose checksum does not match; 0
    without the file. The format is that of https://www.sqlite.org/fileformat2.html#walformat."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    if len(data) < _WAL.size:
        return 0
    magic, _, page_bytes, _, *salts, first, second = _WAL.unpack_from(data)
    words_of = struct.Struct(f"{'>' if magic & 1 else '<'}{(8 + page_bytes) // 4}I")
    size = _FRAME.size + page_bytes
    for at in range(_WAL.size, len(data) - size + 1, size):
        _, _, *its_salts, one, two = _FRAME.unpack_from(data, at)
        if its_salts != salts:
            return 0  # of an earlier use of the file
        words = iter(words_of.unpack(data[at : at + 8] + data[at + _FRAME.size : at + size]))
        for word, next_word in zip(words, words, strict=True):
            first = first + word + second & _WORD
            second = second + next_word + first & _WORD
        if (first, second) != (one, two):
            behind = range(at + size, len(data) - size + 1, size)
            return sum(list(_FRAME.unpack_from(data, place)[2:4]) == salts for place in behind)
    return 0


_WAL: Final = struct.Struct(">8I")
"""Magic, version, bytes of a page, number of the checkpoint, two salts, two halves of the checksum."""
_FRAME: Final = struct.Struct(">6I")
"""Page, pages of the database after a commit, two salts, two halves of the checksum. Then the page."""
_WORD: Final = (1 << 32) - 1


def restored_id(path: Path, written: bytes, by: str, name: str | None = None) -> list[str]:
    """Set store.id to the id that the data there has; returns what is to be known of that."""
    file = path / ID_FILE
    if file.exists() and file.read_bytes().strip() == written.hex().encode():
        return []
    replace_file(file, f"{written.hex()}\n".encode(), FILE_MODE)
    return [f"{name or path.name}/{ID_FILE} was damaged or missing: it holds now what {by}"]
