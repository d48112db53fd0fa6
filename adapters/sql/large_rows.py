"""Large bodies as rows of LARGE (core/large.py says what is in them): part 0 is the start, with which a body is whole,
part n + 1 its chunk n. Each row is a database transaction of its own; what a crash leaves without a start is nobody's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from ...policies.errors import AnabranchError
from ..core.record.large import CHUNK_BYTES, CRC, NAMED_AT, START_BYTES
from .database import dialects
from .database.connections import shown_url
from .database.errors import Database, is_cut_off
from .database.statements import Statements

log: logging.Logger = logging.getLogger(__name__)

AT_ONCE: Final = 64
"""Rows that are deleted in one transaction: others write meanwhile."""
TRIES: Final = 3
PAUSE: Final = 0.05
"""Seconds between two tries."""

Steps = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of statements, and their parameters."""


class LargeRows:
    """The large bodies of one store that is open."""

    def __init__(self, database: Database, statements: Statements, table: str) -> None:
        self._database, self._statements, self._table = database, statements, table
        self._lock = threading.RLock()
        """The lock by which one thread writes at a time. Each write is a transaction that takes its turn with the
        store's."""
        self._starts: dict[bytes, bytes] = {}
        """The starts of bodies that are begun."""

    def _run(self, steps: Steps) -> None:
        """Run the steps in one transaction. It may be done again: who was cut off cannot tell whether it was."""

        def run(connection: Connection) -> None:
            for name, parameters in steps:
                connection.execute(self._statements[name], parameters)
            connection.commit()

        for left in reversed(range(TRIES)):
            try:
                with self._lock:
                    self._database.write(run)
                return
            except SQLAlchemyError as error:
                if not left or not (is_cut_off(error) or dialects.is_collision(error) or dialects.is_locked(error)):
                    raise self._database.error(error) from None
                time.sleep(PAUSE)

    def _put(self, name: bytes, part: int, content: bytes) -> None:
        where = {"body": name.hex(), "which": part}
        self._run(
            [("delete.large.part", where), ("insert.large", {"bodyid": name.hex(), "part": part, "content": content})]
        )

    def begin(self, name: bytes, start: bytes) -> None:
        self._starts[name] = start

    def append(self, name: bytes, number: int, chunk: bytes, chunk_bytes: int) -> None:
        self._put(name, number + 1, chunk)

    def publish(self, name: bytes, sync: bool) -> None:
        self._put(name, 0, self._starts[name])
        self._starts.pop(name, None)

    def read(self, name: bytes, number: int, chunk_bytes: int) -> bytes:
        return self._part(name, number + 1) or b""

    def _part(self, name: bytes, part: int) -> bytes | None:
        def found(connection: Connection) -> Any:
            where = {"body": name.hex(), "which": part}
            return connection.execute(self._statements["select.large"], where).scalar_one_or_none()

        content = self._database.read(found)
        return None if content is None else bytes(content)

    def note(self, name: bytes, named: bytes, sync: bool) -> None:
        try:
            start = self._part(name, 0)
            if start is not None:
                start = start[:NAMED_AT] + named + start[NAMED_AT + len(named) :]
                self._run([("update.large.start", {"body": name.hex(), "start": start})])
        except AnabranchError as error:
            if sync:
                raise
            log.debug("%s: which message names body %s is not noted: %s", self._table, name.hex(), error)

    def remove(self, name: bytes) -> None:
        self._starts.pop(name, None)
        where = {"body": name.hex()}
        last = self._database.read(
            lambda connection: connection.execute(self._statements["select.large.last"], where).scalar_one()
        )
        for first in range(0, (-1 if last is None else last) + 1, AT_ONCE):  # the start first: it is not whole then
            self._run([("delete.large", {**where, "first": first, "last": first + AT_ONCE - 1})])

    def kept(self) -> Iterator[tuple[bytes, bytes | None]]:
        rows = self._database.read(lambda connection: connection.execute(self._statements["select.large.starts"]).all())
        starts = {bodyid: bytes(content) for bodyid, content in rows}
        bodies = self._database.read(
            lambda connection: connection.execute(self._statements["select.large.bodies"]).all()
        )
        for (bodyid,) in bodies:
            yield bytes.fromhex(bodyid), starts.get(bodyid)

    def place(self, name: bytes, number: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, int]:
        where = f"{self._table} in {shown_url(self._database.engine.url)}: BODYID {name.hex()}, PART {number + 1}"
        return where, START_BYTES + number * (CRC.size + chunk_bytes)

    def close(self) -> None:
        self._starts.clear()
