"""Prepared statements of one connection, by libpq's own calls (psycopg.pq): a cursor of psycopg's costs as much in
Python as all else that a send does."""

from __future__ import annotations

import select
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg import postgres
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.pq import ExecStatus, Format
from psycopg.types.array import register_all_arrays

_int4: Final = struct.Struct("!i")
_int8: Final = struct.Struct("!q")
_BINARY: Final = int(Format.BINARY)
_INT8, _TEXT, _BYTEA = 20, 25, 17
"""The numbers of types (pg_type.oid)."""
_ARRAYS: Final = {_INT8: 1016, _TEXT: 1009, _BYTEA: 1001}
_GOOD: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)

# Parameters are binary, and of one type whatever the value: else each size of number had a plan of its own.
_DUMPED: Final[dict[type, tuple[int, Callable[[Any], bytes] | None]]] = {
    int: (_INT8, _int8.pack),
    str: (_TEXT, str.encode),
    bytes: (_BYTEA, bytes),
    bool: (16, lambda value: b"\1" if value else b"\0"),
    type(None): (0, None),
}


def _array(values: Sequence[Any]) -> tuple[int, bytes | None]:
    """Return the type and the bytes of an array; NULL for one without values, which is as good for `unnest`."""
    kind = next((type(value) for value in values if value is not None), None)
    if kind is None:
        return (0, None) if values else (_ARRAYS[_INT8], struct.pack("!iii", 0, 0, _INT8))
    of, dump = _DUMPED[kind]
    if kind is int and None not in values:
        count = len(values)
        both = [part for value in values for part in (8, value)]
        return _ARRAYS[of], struct.pack("!iiiii" + "iq" * count, 1, 0, of, count, 1, *both)
    parts = [struct.pack("!iiiii", 1, 1, of, len(values), 1)]
    for value in values:
        dumped = None if value is None else dump and dump(value)
        parts += (_int4.pack(-1),) if dumped is None else (_int4.pack(len(dumped)), dumped)
    return _ARRAYS[of], b"".join(parts)


# What a program registers with psycopg for its own connections is not for these.
_TYPES: Final = AdaptersMap(types=postgres.types)
postgres.register_default_adapters(_TYPES)
register_all_arrays(_TYPES)


class Prepared:
    """The statements of one connection, which does nothing else meanwhile. After an error of any kind but psycopg's own
    the connection is good for nothing."""

    __slots__ = ("_known", "_names", "_pgconn", "_rows", "_wait")

    def __init__(self, connection: psycopg.Connection[Any], wait: Callable[[], object] | None = None) -> None:
        """`wait` waits for the connection, and raises where that is given up; None: as long as it takes."""
        self._pgconn = connection.pgconn
        self._names: dict[tuple[Any, ...], bytes] = {}
        self._known: dict[tuple[Any, ...], tuple[bytes, list[Any], list[int]]] = {}
        """Statements that were run before with values of the same kinds, none of them an array."""
        self._rows: dict[bytes, Any] = {}
        """By name, what loads the rows of each statement that has returned some: a Transformer."""
        poll = select.poll()
        poll.register(self._pgconn.socket, select.POLLIN)
        self._wait = wait or poll.poll

    def run(self, statement: str, given: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a statement with $1, $2 and so on in it. Raises psycopg.Error."""
        kinds = (statement, *map(type, given))
        known = self._known.get(kinds)
        if known is None:
            name, values = self._prepared(statement, given)
            formats = [_BINARY] * len(values)
            if list not in kinds:
                self._known[kinds] = name, [_DUMPED[type(value)][1] for value in given], formats
        else:
            name, dumps, formats = known
            values = [dump and dump(value) for dump, value in zip(dumps, given, strict=True)]
        self._pgconn.send_query_prepared(name, values, formats, _BINARY)
        result = self._result()
        count = result.ntuples
        if not count:
            return []
        rows = self._rows.get(name)
        if rows is None:
            rows = self._rows[name] = Transformer(_TYPES)
            rows.set_pgresult(result, format=Format.BINARY)
        else:
            rows.set_pgresult(result, set_loaders=False)
        found: list[tuple[Any, ...]] = rows.load_rows(0, count, tuple)
        rows.set_pgresult(None, set_loaders=False)  # else it is kept until the next one comes
        return found

    def _prepared(self, statement: str, given: Sequence[Any]) -> tuple[bytes, list[Any]]:
        """Return the name under which a statement is prepared for values of these kinds, and the values."""
        types, values = [], []
        for value in given:
            of = type(value)
            if of is list:
                kind, dumped = _array(value)
            else:
                kind, dump = _DUMPED[of]
                dumped = dump and dump(value)
            types.append(kind)
            values.append(dumped)
        key = statement, *types
        name = self._names.get(key)
        if name is None:
            name = b"anabranch_%d" % len(self._names)
            self._pgconn.send_prepare(name, statement.encode(), types)
            self._result()
            self._names[key] = name
        return name, values

    def script(self, statements: str) -> None:
        """Run statements without parameters that return nothing. Raises psycopg.Error."""
        self._pgconn.send_query(statements.encode())
        self._result()

    def notified(self) -> Iterator[str]:
        """Yield what NOTIFY has brought so far. Raises psycopg.Error."""
        self._pgconn.consume_input()
        while (notify := self._pgconn.notifies()) is not None:
            yield notify.extra.decode()

    def _result(self) -> Any:
        """Wait for the answer, and return its last result. Raises psycopg.Error."""
        pgconn, last = self._pgconn, None
        while pgconn.flush():  # the server may have to be heard before it takes more
            either = select.poll()
            either.register(pgconn.socket, select.POLLIN | select.POLLOUT)
            if either.poll()[0][1] != select.POLLOUT:
                pgconn.consume_input()
        while True:
            if pgconn.is_busy():
                self._wait()
                pgconn.consume_input()
                continue
            result = pgconn.get_result()
            if result is None:
                break
            if last is None or last.status in _GOOD:
                last = result
        if last is None:
            raise psycopg.OperationalError("the connection is lost")
        if last.status not in _GOOD:
            raise psycopg.errors.error_from_result(last)
        return last
