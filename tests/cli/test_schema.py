"""`anabranch schema`: the tables of SQL stores, printed, made and removed; nothing is lost by mistake."""

from __future__ import annotations

import json
import sqlite3
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from anabranch.policies.config import json_schema

from ..sql.server import PostgresServer
from . import commands

TABLES = [
    "messages",
    "chunks",
    "destinations",
    "durables",
    "acks",
    "redeliveries",
    "xalog",
    "committed",
    "duplicates",
    "outbox",
    "store",
    "lease",
    "large",
]

run = partial(commands.run, "schema")


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tables(url: str, schema: str | None = None) -> set[str]:
    engine = create_engine(url)
    try:
        return set(inspect(engine).get_table_names(schema=schema))
    finally:
        engine.dispose()


def execute(url: str, *statements: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


MESSAGE = (
    "INSERT INTO {0}messages (id, queuename, destination, priority, deliverycount, expirationtime, sentat, size, parts)"
    " VALUES (1, 'a', 1, 4, 0, 0, 0, 1, 0)"
)


def test_the_configurations_schema_is_where_it_was() -> None:
    for arguments in ((), ("config",), ("--json",), ("config", "--json")):
        assert json.loads(run(*arguments).stdout) == json_schema()


def test_what_is_printed_makes_the_tables_sqlite() -> None:
    printed = run("print", "--dialect", "sqlite", "--prefix", "mq_", code=0)
    database = sqlite3.connect("printed.db")
    database.executescript(printed.stdout)
    database.executescript(printed.stdout)  # twice does no harm
    names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert names == {f"mq_{name}" for name in TABLES}
    database.executescript(run("print", "--dialect", "sqlite", "--prefix", "mq_", "--drop").stdout)
    assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    database.close()


def test_what_is_printed_makes_the_tables_postgresql(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    printed = run("print", "--dialect", "postgresql", "--prefix", "mq.")
    for _ in range(2):
        execute(url, *printed.stdout.split(";\n"))
    assert tables(url, "mq") == set(TABLES)
    execute(url, *run("print", "--dialect", "postgresql", "--prefix", "mq.", "--drop").stdout.split(";\n"))
    assert tables(url, "mq") == set()
    postgres.drop_database(url)


def test_print_as_json_and_of_a_configuration() -> None:
    Path("stores.yaml").write_text(
        "{directory: d, stores: [{name: a, match: [a], sql: {url: 'postgresql+psycopg://h/d', schema_prefix: q_,"
        " priorities: true}}]}"
    )
    document = json.loads(run("print", "--config", "stores.yaml", "--json").stdout)
    assert document["dialect"] == "postgresql"
    assert document["statements"][0].startswith("CREATE TABLE IF NOT EXISTS q_messages")
    assert any("q_messages_order" in statement for statement in document["statements"])
    plain = json.loads(run("print", "--dialect", "sqlite", "--json").stdout)
    assert not any("messages_order" in statement for statement in plain["statements"])


def test_create_and_drop(postgres_url: str) -> None:
    created = run("create", "--url", postgres_url, "--prefix", "mq_")
    assert (created.exit_code, created.stderr) == (0, "")
    assert tables(postgres_url) == {f"mq_{name}" for name in TABLES}
    assert run("create", "--url", postgres_url, "--prefix", "mq_").stdout == "All of them were there.\n"
    refused = run("drop", "--url", postgres_url, "--prefix", "mq_", stdin="n\n")
    assert refused.exit_code == 1 and "Remove the tables of postgresql+psycopg://anabranch:***@" in refused.stderr
    assert len(tables(postgres_url)) == len(TABLES)
    assert run("drop", "--url", postgres_url, "--prefix", "mq_", stdin="y\n").exit_code == 0
    assert tables(postgres_url) == set()
    assert run("drop", "--url", postgres_url, "--prefix", "mq_", "--yes").stdout == "There were none.\n"


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (MESSAGE.format(""), "hold 1 message and 0 prepared transactions"),
        ("INSERT INTO xalog (id, xid) VALUES (1, 'x')", "hold 0 messages and 1 prepared transaction"),
        ("INSERT INTO lease VALUES ('s', 'process 1 on elsewhere', 9999999999999)", "in use by process 1 on elsewhere"),
    ],
)
def test_drop_refuses_what_would_be_missed(postgres_url: str, statement: str, says: str) -> None:
    run("create", "--url", postgres_url)
    execute(postgres_url, statement)
    for answer in (("--yes",), ()):
        refused = run("drop", "--url", postgres_url, *answer, stdin="y\n")
        assert refused.exit_code == 2 and says in refused.stderr and "--force" in refused.stderr
    assert len(tables(postgres_url)) == len(TABLES)
    assert json.loads(run("drop", "--url", postgres_url, "--yes", "--force", "--json").stdout)["dropped"] == TABLES
    assert tables(postgres_url) == set()


def test_a_store_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("stores.yaml").write_text(
        "directory: d\n"
        "stores:\n"
        "  - {name: ledger, match: [a], sql: {url_env: LEDGER_URL}}\n"
        "  - {name: own, match: [b], sql: {}}\n"
        "  - {name: rest, match: ['>']}\n"
    )
    url = f"sqlite:///{tmp_path}/ledger.db"
    monkeypatch.setenv("LEDGER_URL", url)
    assert run("create", "-c", "stores.yaml", "--store", "ledger").exit_code == 0
    assert tables(url) == set(TABLES)
    for name, says in (
        ("own", "has its tables in its own directory"),
        ("rest", "its SQL stores are ledger, own"),
        ("nobody", "its SQL stores are ledger, own"),
    ):
        wrong = run("create", "-c", "stores.yaml", "--store", name)
        assert wrong.exit_code == 2 and says in wrong.stderr
    assert "--store is missing" in run("create", "-c", "stores.yaml").stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("print",), "give --dialect, --config or --url"),
        (("create",), "give --config or --url"),
        (("drop", "--yes"), "give --config or --url"),
        (("print", "--dialect", "mysql"), "'mysql' is not one of"),
        (("print", "--dialect", "sqlite", "--url", "postgresql+psycopg://h/d"), "is of the kind postgresql"),
        (("print", "--dialect", "sqlite", "--prefix", "x; DROP TABLE y"), "found 'x; DROP TABLE y'"),
        (("create", "--url", "what is this"), "is not one"),
        (("create", "--config", "nowhere.yaml"), "nowhere.yaml"),
        (("create", "--config", "c", "--url", "u"), "give either --config, or --url"),
    ],
)
def test_what_cannot_be_meant(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2) and says in result.stderr and result.stdout == ""


def test_a_database_that_is_not_there(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = postgres.url("nothing_of_this_name")
    monkeypatch.setenv("ANABRANCH_URL", url)
    result = run("create")
    assert result.exit_code == 1 and "nothing_of_this_name" in result.stderr
    assert postgres.password not in result.stderr and "Traceback" not in result.stderr
