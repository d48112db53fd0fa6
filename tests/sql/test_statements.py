"""Statements given by the configuration, and the names of tables: right ones are used, wrong ones refused at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.database.schema import TABLES, schema
from anabranch.adapters.sql.database.statements import Statements, parameters
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import ConfigError

from ..contract.disk import A, assert_whole, bodies, drain, take
from .disk import SqliteDisk, directory_of

DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()

INSERT = (
    "INSERT INTO ${schema-prefix}MESSAGES (ID, QUEUENAME, DESTINATION, PRIORITY, DELIVERYCOUNT, EXPIRATIONTIME, "
    "SENTAT, SIZE, PARTS, MESSAGEID, HEADERS, CONTENT, MAPKEY, DUE) VALUES (:id, upper(:queuename), "
    ":destination, :priority, :deliverycount, :expirationtime, :sentat, :size, :parts, :messageid, :headers, :content, "
    ":mapkey, :due)"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SqliteDisk]:
    with SqliteDisk(tmp_path) as disk:
        yield disk


def rows(store: SqlStore, query: str) -> list[Any]:
    connection = sqlite3.connect(directory_of(store) / "store.db")
    found = connection.execute(query).fetchall()
    connection.close()
    return found


def test_a_statement_that_is_given_is_used(disk: SqliteDisk) -> None:
    store = disk.create(
        schema_prefix="Mq_",
        statements={"insert.message": INSERT, "delete.message": "DELETE FROM ${messages} WHERE ID = :message"},
    )
    store.send_many(A, [b"1", b"2"])
    take(store).ack()
    assert rows(store, "SELECT QUEUENAME FROM MQ_MESSAGES") == [("QUEUE://A",)]
    assert bodies(disk.crash(store)) == [b"2"]
    assert_whole(store)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"insert.mesage": "SELECT 1"}, "no statement 'insert.mesage'; did you mean 'insert.message'\\?"),
        ({"delete.message": "DELETE FROM ${schema_prefix}MESSAGES WHERE ID = :message"}, "unknown variable"),
        ({"delete.message": "DELETE FROM ${}MESSAGES WHERE ID = :message"}, "unknown variable"),
        ({"delete.message": "DELETE FROM MESSAGES"}, "parameter :message is missing"),
        ({"delete.message": "DELETE FROM MESSAGES WHERE ID = :message OR ID = :other"}, "unknown parameter :other"),
    ],
)
def test_a_statement_that_is_wrong_is_refused(tmp_path: Path, given: dict[str, str], says: str) -> None:
    """Before anything is made, and at open."""
    options = SqlOptions(statements=given)
    with pytest.raises(ConfigError, match=says):
        SqlStore.create("s", tmp_path / "s", options)
    assert not (tmp_path / "s").exists()
    SqlStore.create("s", tmp_path / "s", SqlOptions())
    with pytest.raises(ConfigError, match=says):
        SqlStore("s", tmp_path / "s", options).open()
    SqlStore("s", tmp_path / "s", SqlOptions()).open()


@pytest.mark.parametrize(
    ("given", "says"),
    [("SELECT ${schema_prefix}", r"keepalive_statement: unknown variable \$\{schema_prefix\}")],
)
def test_a_keepalive_statement_with_an_unknown_variable_is_refused(tmp_path: Path, given: str, says: str) -> None:
    """On SQLite too, which runs none, and before anything is made."""
    options = SqlOptions(keepalive_statement=given)
    for refuse in (
        lambda: SqlStore.check_options(options),
        lambda: SqlStore.create("s", tmp_path / "s", options),
    ):
        with pytest.raises(ConfigError, match=says):
            refuse()
    assert not (tmp_path / "s").exists()
    SqlStore.create("s", tmp_path / "s", SqlOptions())
    with pytest.raises(ConfigError, match=says):
        SqlStore("s", tmp_path / "s", options).open()


def test_a_keepalive_statement_that_the_server_takes_for_wrong_is_refused(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"url": postgres_url, "schema_prefix": "mq_", "pool_min": 0}
    wrong = SqlOptions(**given, keepalive_statement="SELEKT 1 FROM ${messages} -- %s")
    says = r"keepalive_statement 'SELEKT 1 FROM mq_messages -- %s' is wrong, .* says: syntax error"
    with pytest.raises(ConfigError, match=says) as raised:
        SqlStore.create("s", tmp_path / "s", wrong)
    assert postgres_url.split("@")[0].split(":")[-1] not in f"{raised.value!r} {caplog.text}"
    right = SqlOptions(**given, keepalive_statement="SELECT COUNT(*) FROM ${schema-prefix}STORE -- 100%")
    SqlStore.create("s", tmp_path / "s", right)
    with pytest.raises(ConfigError, match=says):
        SqlStore("s", tmp_path / "s", wrong).open()
    store = SqlStore("s", tmp_path / "s", right)
    store.open()
    store.send(A, b"x")
    store.close()


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Statements(schema(), {"a": "SELECT 1", "b": "SELECT 2", "delete.message": "SELECT ${x}"})
    assert len(caught.value.problems) == 3


def test_the_page_lists_every_statement_with_its_parameters() -> None:
    found = Statements(schema())
    lines = DOCUMENTATION.splitlines()
    for name in found:
        listed = " ".join(f"`:{parameter}`" for parameter in sorted(parameters(found[name])))
        assert f"| `{name}` | {listed} |" in lines, f"| `{name}` | {listed} |"


def test_the_page_explains_every_column() -> None:
    for name in TABLES:
        section = DOCUMENTATION.split(f"### {name.upper()}\n")[1].split("###")[0]
        for column in getattr(schema(), name).columns:
            assert f"`{column.name.upper()}`" in section, f"{name}.{column.name}"


@pytest.mark.parametrize("prefix", ["", "mq_", "MQ_", "a" * 48])
def test_prefixes(disk: SqliteDisk, prefix: str) -> None:
    store = disk.create(schema_prefix=prefix)
    store.send(A, b"x")
    assert rows(store, f"SELECT CONTENT FROM {prefix}MESSAGES") == [(b"x",)]
    store.close()
    assert drain(disk.reopen(store)) == [b"x"]


@pytest.mark.parametrize("prefix", ["mq;", "mq' --", 'mq"', "m q", "1", "mq.x.", "mq..", "ü", "x" * 49, "mq_\n"])
def test_a_prefix_that_is_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="schema_prefix"):
        SqlOptions(schema_prefix=prefix)
    with pytest.raises(ConfigError, match="table_names"):
        SqlOptions(table_names={"messages": prefix})


def test_tables_of_other_names(disk: SqliteDisk) -> None:
    store = disk.create(schema_prefix="p_", table_names={"messages": "JMS", "XALOG": "journal", "store": "ORDER"})
    store.send(A, b"x")
    assert rows(store, "SELECT CONTENT FROM P_JMS") == [(b"x",)]
    store.close()
    assert drain(disk.reopen(store)) == [b"x"]
    with pytest.raises(ConfigError, match="no table mesages"):
        schema("", {"mesages": "x"})
    with pytest.raises(ConfigError, match="two tables"):
        schema("", {"messages": "xalog"})


def test_names_that_are_words_of_sql(disk: SqliteDisk) -> None:
    store = disk.create(table_names={"messages": "select", "store": "order", "acks": "group"})
    store.send(A, b"x")
    assert drain(store) == [b"x"]
    assert_whole(store)
