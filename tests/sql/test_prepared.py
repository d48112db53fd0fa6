"""What a shared store asks by libpq's own calls, of a real server: each type there and back, and what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.adapt import Loader
from psycopg.pq import Format

from anabranch.adapters.sql.shared.prepared import Prepared

from ..contract.disk import eventually
from .server import PostgresServer

LARGE = 32 << 20
"""More than the buffers of a socket hold."""


@pytest.fixture
def connection(postgres: PostgresServer) -> Iterator[Any]:
    with postgres.connect() as connection:
        yield connection


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("bigint", [0, -1, (1 << 63) - 1, -(1 << 63), None]),
        ("integer", [0, -1, (1 << 31) - 1, -(1 << 31)]),
        ("text", ["", "x", "gr\u00fc\u00dfe \U0001f40d", "\\x00", "{}", '"', "a,b", None]),
        ("varchar", ["x"]),
        ("bytea", [b"", b"\0\xff\\", bytes(range(256)), None]),
        ("boolean", [True, False, None]),
        ("bigint[]", [[], [1], [1, -2, 1 << 62]]),
        ("integer[]", [[], [3, 2, 1]]),
    ],
)
def test_there_and_back(connection: Any, type_: str, values: list[Any]) -> None:
    prepared = Prepared(connection)
    for value in values:
        assert prepared.run(f"SELECT $1::{type_}, 1", [value]) == [(value, 1)]


def test_arrays_as_columns(connection: Any) -> None:
    """As `unnest` takes them. One without values is as good as one of NULLs."""
    columns: list[list[Any]] = [[1, 2, 3], ["a", None, "c"], [None, b"\0", None], [None, None, None]]
    found = Prepared(connection).run(
        "SELECT * FROM unnest($1::integer[], $2::text[], $3::bytea[], $4::text[])", columns
    )
    assert found == list(zip(*columns, strict=True))


def test_what_is_larger_than_a_socket_holds(connection: Any) -> None:
    """It is sent while the server answers: of two that only sent each would wait for the other."""
    prepared, body = Prepared(connection), os.urandom(LARGE)
    assert prepared.run("SELECT $1::bytea", [body]) == [(body,)]
    assert prepared.run("SELECT octet_length(x) FROM unnest($1::bytea[]) AS x", [[body, b"x"]]) == [(LARGE,), (1,)]


def test_rows_that_were_returned_are_kept_by_nobody(connection: Any) -> None:
    prepared = Prepared(connection)
    for _ in range(2):
        assert len(prepared.run("SELECT x FROM generate_series(1, $1::integer) AS x", [1000])) == 1000
        assert [rows.pgresult for rows in prepared._rows.values()] == [None]


class _Length(Loader):
    """Loads the length of a value."""

    format = Format.BINARY

    def load(self, data: Any) -> int:
        return len(data)


def test_what_a_program_registers_with_its_driver_changes_nothing(connection: Any) -> None:
    for name in ("text", "bytea", "int8"):
        connection.adapters.register_loader(name, _Length)
    assert connection.execute("SELECT 'abc'", binary=True).fetchall() == [(3,)]
    assert Prepared(connection).run("SELECT 'abc'::text, $1::bytea, 7::bigint", [b"x"]) == [("abc", b"x", 7)]


def test_after_an_error_it_goes_on(connection: Any) -> None:
    prepared = Prepared(connection)
    for _ in range(2):
        with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero"):
            prepared.run("SELECT 1 / $1::integer", [0])
        with pytest.raises(psycopg.errors.UndefinedTable, match="nowhere"):
            prepared.run("SELECT * FROM nowhere WHERE $1", [True])
        with pytest.raises(psycopg.errors.SyntaxError):
            prepared.script("BEGIN; SELEKT 1")
        assert prepared.run("SELECT 1 / $1::integer", [1]) == [(1,)]


def test_in_a_transaction(connection: Any) -> None:
    prepared = Prepared(connection)
    prepared.script("BEGIN; CREATE TABLE kept (n integer)")
    assert prepared.run("INSERT INTO kept VALUES ($1)", [1]) == []
    prepared.script("ROLLBACK")
    assert prepared.run("SELECT to_regclass('kept') IS NULL") == [(True,)]


def test_a_connection_that_the_server_ends(connection: Any, postgres: PostgresServer) -> None:
    prepared = Prepared(connection)
    ((pid,),) = prepared.run("SELECT pg_backend_pid()")
    with postgres.connect() as other:
        other.execute("SELECT pg_terminate_backend(%s)", (pid,))  # which waits for it from version 14 on alone
        eventually(lambda: not other.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchall())
    with pytest.raises(psycopg.OperationalError):
        prepared.run("SELECT 1")
    assert connection.closed
    with pytest.raises(psycopg.OperationalError):
        prepared.run("SELECT 1")


def test_notices(connection: Any, postgres: PostgresServer) -> None:
    """Also those that come in the midst of a statement."""
    prepared, heard = Prepared(connection), list[str]()
    prepared.script("LISTEN here")
    with postgres.connect() as other:
        other.execute("NOTIFY here, 'one'")
        prepared.run("SELECT 1")
        other.execute("NOTIFY here, 'two'")

    def hear() -> bool:
        heard.extend(prepared.notified())
        return len(heard) > 1

    eventually(hear)
    assert heard == ["one", "two"]
