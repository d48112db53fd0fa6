"""`native_two_phase`: what a branch sends is in the tables from its prepare on, in a transaction of PostgreSQL's own
that is prepared there (PREPARE TRANSACTION). The commit moves it to its place, and need not write it once more.

    prepare     the messages, under ids below 0; PREPARE TRANSACTION 'anabranch:<store>:<table>:<transaction>'; then,
                in a batch as always, the row of XALOG, which says all but the bodies and the headers
    commit      COMMIT PREPARED; then the batch as always, which gives the messages their ids
    rollback    ROLLBACK PREPARED; then the batch as always

A branch has a range of ids below 0 (BRANCH_BITS), whether it is prepared natively or not: the first is that of its row
in XALOG, and of that row's CHUNKS, the others those of what it sends until it is committed.

N1  The row of XALOG makes a branch, and is written last: without one, what is prepared natively is nobody's and is
    rolled back, by who prepared it or by the next open. With one, what is sent is there.
N2  The prepared transaction has locked nothing that others wait for: rows of its own, under ids that nobody else takes,
    and the name of its branch (an advisory lock).
N3  Between COMMIT PREPARED and the batch the messages are of destination 0, which is none: no statement finds them.
N4  The name says whose it is: the store's id, and the OID of MESSAGES, since a copy of the tables has the same id.
N5  All here may be done twice. Cut off, COMMIT PREPARED and ROLLBACK PREPARED are done again; what a cut off PREPARE
    TRANSACTION has left is removed, once its session at the server is over.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import Table, bindparam, func, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from ...policies.errors import AnabranchError, ConfigError
from ..core.operations.branches import Branch
from ..core.operations.changes import Send
from ..core.record.encoding import kept_head
from ..system.background import shared
from . import dialects
from .columns import chunk_rows, message_row
from .connections import on_connection, shown_url
from .database import Database, is_cut_off
from .statements import Statements

log = logging.getLogger(__name__)

GONE: Final = "42704"
"""PostgreSQL's SQLSTATE: there is no such prepared transaction."""
BUSY: Final = "55000"
"""Somebody is at it already: a session of ours that was cut off."""
NO_MORE: Final = "53200"
"""As many are prepared at the server as it allows."""
PATIENCE: Final = 5.0
"""Seconds that a session which was cut off gets to end."""
PAUSE: Final = 0.02
RETRY: Final = 1.0
"""Seconds until what could not be removed is tried again."""
BRANCH_BITS: Final = 24
"""A branch that is prepared natively sends less than 2 to the power of this."""
_STARTS: Final = 1 << 38
_31_BITS: Final = 0x7FFFFFFF

_lock: Final = select(func.pg_advisory_xact_lock(bindparam("store"), bindparam("branch")))
_end_sessions: Final = text(
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND pid IS NOT NULL "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND CAST(CAST(classid AS TEXT) AS BIGINT) = :store "
    "AND CAST(CAST(objid AS TEXT) AS BIGINT) BETWEEN :first AND :last"
)
_oid: Final = text("SELECT CAST(to_regclass(:name) AS OID)")
_prepared: Final = text(
    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, :beginning)"
)


def is_possible(database: Database) -> bool:
    return database.engine.dialect.name == "postgresql"


def require(database: Database) -> None:
    """The server prepares transactions. Raises ConfigError, StoreFailedError."""
    where = f"store {database.name!r}: native_two_phase: {shown_url(database.engine.url)}"
    if not is_possible(database):
        raise ConfigError([f"{where} is not PostgreSQL, which alone has it; leave the option out"])
    most = database.read(lambda connection: connection.execute(text("SHOW max_prepared_transactions")).scalar_one())
    if int(most) < 1:
        raise ConfigError(
            [
                f"{where} has max_prepared_transactions = 0, so that it prepares none; give it there as many as there "
                "may be transactions at one time, and restart it, or leave the option out"
            ]
        )


class BranchRows:
    """Gives each branch that is prepared the ID of its row in XALOG. Starts at random, since a process before this one
    may have left something of branches that nobody knows of. Threads: all."""

    def __init__(self) -> None:
        self._numbers = itertools.count(secrets.randbelow(_STARTS) + 1)
        self.taken: dict[bytes, int] = {}
        """By transaction: those of branches that are prepared."""

    def next(self) -> int:
        """An ID that no row has."""
        taken = list(self.taken.values())
        return next(row for number in self._numbers if (row := -(number << BRANCH_BITS)) not in taken)


def is_staged(branch: Branch) -> bool:
    """Whether what it sends is in MESSAGES already, so that their records need not be whole."""
    return any(len(send.record) != send.record_bytes for send in branch.sends)


def staged_rows(row: int) -> dict[str, int]:
    """Between which IDs what a branch has staged is; `row` is that of its row in XALOG."""
    return {"first": row - (1 << BRANCH_BITS) + 1, "last": row - 1}


class Native:
    """Of one store that is open on PostgreSQL, whether or not it prepares more. Threads: all."""

    def __init__(
        self,
        database: Database,
        statements: Statements,
        messages: Table,
        store_id: bytes,
        chunk_size: int,
    ) -> None:
        """Raises StoreFailedError."""
        self._database, self._statements, self._chunk_size = database, statements, chunk_size
        preparer = database.engine.dialect.identifier_preparer
        named = {"name": preparer.format_table(messages)}
        table = database.read(lambda connection: connection.execute(_oid, named).scalar_one())
        self._beginning = f"anabranch:{store_id.hex()}:{table}:"
        self._store = _number_of(self._beginning)
        self._loose: dict[bytes, None] = {}
        """Prepared natively or about to be, by us, without an outcome."""
        self._left: dict[bytes, None] = {}
        """To be removed, when the database is there again."""
        self._left_prepared: set[bytes] = set()
        """What a process before us has prepared natively of branches that have no outcome yet."""
        self._removing = threading.RLock()
        self._closed = False

    def _name(self, transaction: bytes) -> str:
        return f"{self._beginning}{transaction.hex()}"

    # What branches do

    def stage(self, branch: Branch, row: int) -> None:
        """Prepare what a branch sends natively, and cut the records down to what its commit needs. It stays as it is if
        there is nothing to be cut, or the server has no place for one more. Raises StoreFailedError or StoreFullError,
        and then there is nothing."""
        transaction, sends = branch.transaction, branch.sends
        heads = [kept_head(send.record) for send in sends]
        if len(sends) >= 1 << BRANCH_BITS or all(map(_same_length, heads, sends)):
            return
        if transaction in self._left:
            self._remove_left(transaction)
        rows, parts = self._rows(sends, row)
        self._loose[transaction] = None
        if not self._prepare_again(transaction, rows, parts):
            return
        branch.own = row
        for send, head in zip(sends, heads, strict=True):
            send.record = head

    def _prepare_again(self, transaction: bytes, rows: list[dict[str, Any]], parts: list[dict[str, Any]]) -> bool:
        """Prepare it, twice if it is cut off; False if the server has no place for it."""
        for last in (False, True):
            try:
                self._prepare(transaction, rows, parts)
                return True
            except SQLAlchemyError as error:
                if dialects.state_of(error) == NO_MORE:
                    self._loose.pop(transaction, None)
                    log.warning(
                        "store %s: as many transactions are prepared at the server as max_prepared_transactions "
                        "allows: %s is prepared in XALOG",
                        self._database.name, transaction.hex(),
                    )  # fmt: skip
                    return False
                if not is_cut_off(error):
                    self._loose.pop(transaction, None)
                    raise self._database.error(error) from None
                removed = self.abandon(transaction)
                if last or not removed:
                    raise self._database.error(error) from None
                self._loose[transaction] = None
            except BaseException:
                self.abandon(transaction)
                raise
        raise AssertionError

    def _prepare(self, transaction: bytes, rows: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
        def prepare(connection: Connection) -> None:
            connection.execute(_lock, {"store": self._store, "branch": _number_of(transaction.hex())})
            connection.execute(self._statements["insert.message"], rows)
            if parts:
                connection.execute(self._statements["insert.chunk"], parts)
            connection.exec_driver_sql(f"PREPARE TRANSACTION '{self._name(transaction)}'")

        self._database.write(prepare)

    def _rows(self, sends: Sequence[Send], row: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Those in MESSAGES and those in CHUNKS."""
        rows: list[dict[str, Any]] = []
        parts: list[dict[str, Any]] = []
        for place, send in enumerate(sends):
            staged = row - 1 - place
            values, body = message_row(send, staged, 0, str(send.state.destination), self._chunk_size)
            # What looks for messages that have expired must not find this one.
            rows.append({**values, "expirationtime": 0})
            parts += chunk_rows(staged, body, self._chunk_size)
        return rows, parts

    def end(self, branch: Branch, committed: bool) -> None:
        """Before the batch that writes its outcome. Raises StoreFailedError; it is prepared still."""
        transaction = branch.transaction
        if is_staged(branch):
            self._end("COMMIT" if committed else "ROLLBACK", transaction)
            self._loose.pop(transaction, None)
        elif transaction in self._left_prepared:
            self._end("ROLLBACK", transaction)  # a try that was cut off, before it was prepared in XALOG
        self._left_prepared.discard(transaction)

    def abandon(self, transaction: bytes) -> bool:
        """It has got no row in XALOG: whatever is there of it is removed, if not now, then later. Whether now."""
        if transaction not in self._loose and transaction not in self._left:
            return True
        self._left[transaction] = None
        self._loose.pop(transaction, None)
        try:
            self._remove_left(transaction)
            return True
        except AnabranchError as error:
            log.warning(
                "store %s: what %s has prepared natively is removed when the database is back: %s",
                self._database.name, transaction.hex(), error,
            )  # fmt: skip
            shared().schedule(RETRY, partial(_try_again, weakref.ref(self)))
            return False

    def _remove_left(self, transaction: bytes) -> None:
        """Raises StoreFailedError."""
        with self._removing:
            if transaction in self._left:
                self._end_sessions(_number_of(transaction.hex()))
                self._end("ROLLBACK", transaction)
                del self._left[transaction]

    def _remove_all_left(self) -> None:
        try:
            for transaction in list(self._left):
                self._remove_left(transaction)
        except AnabranchError as error:
            log.debug("store %s: %s", self._database.name, error)
            if not self._closed:
                shared().schedule(RETRY, partial(_try_again, weakref.ref(self)))

    # Opening and closing

    def recover(self, transactions: Iterable[bytes]) -> None:
        """At open: what a process before us has left that is none of these branches' is removed (N1). Raises
        StoreFailedError."""
        self._end_sessions(None)
        by_name = {self._name(transaction): transaction for transaction in transactions}
        names = self._database.read(
            lambda connection: connection.execute(_prepared, {"beginning": self._beginning}).scalars().all()
        )
        self._left_prepared = {by_name[name] for name in names if name in by_name}
        for name in sorted(set(names) - by_name.keys()):
            try:
                self._end("ROLLBACK", bytes.fromhex(name.removeprefix(self._beginning)))
                log.info("store %s: %s was never prepared whole, it is rolled back", self._database.name, name)
            except (AnabranchError, ValueError) as error:
                log.warning("store %s: ROLLBACK PREPARED '%s' fails: %s", self._database.name, name, error)

    def close(self, transactions: Iterable[bytes]) -> None:
        """Nothing is written any more: what is none of these branches' is removed, as far as that goes now."""
        self._closed = True
        whole = set(transactions)
        self._left.update((transaction, None) for transaction in list(self._loose) if transaction not in whole)
        self._remove_all_left()

    # At the server

    def _end(self, how: str, transaction: bytes) -> None:
        """COMMIT or ROLLBACK what is prepared natively, if it is. Raises StoreFailedError."""
        deadline = time.monotonic() + PATIENCE
        cut_off = False

        def end(connection: Connection) -> None:
            connection.exec_driver_sql(f"{how} PREPARED '{self._name(transaction)}'")

        while True:
            try:
                # No part of a transaction.
                on_connection(self._database.engine, end, isolation_level="AUTOCOMMIT")
                return
            except SQLAlchemyError as error:
                state = dialects.state_of(error)
                if state == GONE:
                    return
                if state == BUSY and time.monotonic() < deadline:
                    time.sleep(PAUSE)
                elif is_cut_off(error) and not cut_off:  # a connection that had lain idle may be dead
                    cut_off = True
                else:
                    raise self._database.error(error) from None

    def _end_sessions(self, branch: int | None) -> None:
        """Those that were cut off while they prepared one branch, or any: the server may not have noticed, and still be
        at it. Raises StoreFailedError."""
        limits = {"first": 0, "last": _31_BITS} if branch is None else {"first": branch, "last": branch}
        deadline = time.monotonic() + PATIENCE

        def ended(connection: Connection) -> bool:
            return not connection.execute(_end_sessions, {"store": self._store, **limits}).all()

        while not self._database.read(ended) and time.monotonic() < deadline:
            time.sleep(PAUSE)


def _same_length(head: bytes, send: Send) -> bool:
    return len(head) == len(send.record)


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) & _31_BITS


def _try_again(reference: weakref.ref[Native]) -> None:
    """What may wait for the database has a thread of its own."""
    native = reference()
    if native is not None and native._left and not native._closed:
        threading.Thread(target=native._remove_all_left, name="anabranch-native", daemon=True).start()
