"""Who makes the connections of a store: its URL, with role and password beside it, or a function of the user's."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from pydantic import SecretStr

from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.database.connections import database_url
from anabranch.policies.config import loads
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import AnabranchError, ConfigError, StoreFailedError

from ..contract.disk import A, assert_whole, bodies

made: list[Path] = []
"""Where `connect` connects to; nowhere: it fails."""
NUMBER = 7


def connect() -> sqlite3.Connection:
    if not made:
        raise TimeoutError("the vault does not answer")
    return sqlite3.connect(made[0], check_same_thread=False)


def used(path: Path, options: SqlOptions) -> SqlStore:
    SqlStore.create("s", path, options)
    store = SqlStore("s", path, options)
    store.open()
    store.send(A, b"1")
    assert bodies(store) == [b"1"]
    assert_whole(store)
    return store


def test_a_role_and_a_password_beside_the_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = "postgresql+psycopg://nobody@localhost/ledger"
    options = SqlOptions(url=SecretStr(url), username="app", password=SecretStr("p@ss"))
    made = database_url(options, tmp_path)
    assert (made.username, made.password, made.host) == ("app", "p@ss", "localhost")
    monkeypatch.setenv("LEDGER_ROLE", "audit")
    text = f"directory: d\nstores: [{{name: s, match: ['>'], sql: {{url: '{url}', username_env: LEDGER_ROLE}}}}]\n"
    found = loads(text, tmp_path).stores[0].options
    assert isinstance(found, SqlOptions)
    assert database_url(found, tmp_path).username == "audit"


@pytest.mark.parametrize("how", ["name", "dotted", "function"])
def test_a_function_makes_them(tmp_path: Path, how: str) -> None:
    made[:] = [tmp_path / "db"]
    creator: Any = {"name": f"{__name__}:connect", "dotted": f"{__name__}.connect", "function": connect}[how]
    options = SqlOptions(url=SecretStr(f"sqlite:///{made[0]}"), creator=creator)
    SqlStore.check_options(options)
    store = used(tmp_path / "s", options)
    with sqlite3.connect(made[0]) as connection:
        assert connection.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    connection.close()
    store.close()


def test_an_engine_brings_its_url(tmp_path: Path, postgres_url: str) -> None:
    for name, url in ("sqlite", f"sqlite:///{tmp_path / 'db'}"), ("postgresql", postgres_url):
        engine = sqlalchemy.create_engine(url)
        more: dict[str, Any] = {"pool_min": 0} if name == "postgresql" else {}
        store = used(tmp_path / name, SqlOptions(creator=engine, **more))
        with engine.begin() as connection:
            store.send_within(connection, A, [b"2"])
        assert bodies(store) == [b"1", b"2"]
        engine.dispose()
        store.send(A, b"3")
        store.close()


def test_what_it_raises_fails_the_call_alone(tmp_path: Path) -> None:
    made[:] = [tmp_path / "db"]
    options = SqlOptions(url=SecretStr(f"sqlite:///{made[0]}"), creator=connect)
    store = used(tmp_path / "s", options)
    backend: Any = store.backend
    backend._engine.dispose()
    made.clear()
    with pytest.raises(StoreFailedError, match=r"creator .*: TimeoutError: the vault does not answer; each call tries"):
        store.send(A, b"2")
    made[:] = [tmp_path / "db"]
    backend._engine.dispose()
    store.send(A, b"3")
    assert bodies(store) == [b"1", b"3"]
    store.close()


@pytest.mark.parametrize(
    ("creator", "says"),
    [
        ("no.such.module:f", "there is no no.such.module:f: No module named 'no'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:NUMBER", "is no function, but int"),
    ],
)
def test_a_name_that_names_none(tmp_path: Path, creator: str, says: str) -> None:
    options = SqlOptions(url=SecretStr(f"sqlite:///{tmp_path / 'db'}"), creator=creator)
    with pytest.raises(ConfigError, match=says):
        SqlStore.check_options(options)
    with pytest.raises(ConfigError, match=says):
        SqlStore.create("s", tmp_path / "s", options)
    assert not (tmp_path / "s").exists()


def test_what_is_no_creator() -> None:
    for wrong in ("", "connect", "a b:c", 7, ["x"]):
        with pytest.raises(ConfigError, match="is no name of a function"):
            SqlOptions(url=SecretStr("sqlite:////x"), creator=wrong)
    with pytest.raises(ConfigError, match="creator needs a url"):
        SqlOptions(creator=connect)


def test_a_function_that_makes_no_connections(tmp_path: Path) -> None:
    options = SqlOptions(url=SecretStr(f"sqlite:///{tmp_path / 'db'}"), creator=lambda: 5)
    with pytest.raises(AnabranchError, match="TypeError: it gave int, which is no connection of the driver sqlite3"):
        SqlStore.create("s", tmp_path / "s", options)


@pytest.mark.parametrize("given", [{"username": "app"}, {"password": "p@ss"}])
@pytest.mark.parametrize("url", [None, "sqlite:////x/db"])
def test_sqlite_has_no_users(given: dict[str, Any], url: str | None) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))}: SQLite has no users"):
        SqlOptions(url=SecretStr(url) if url is not None else None, **given)


def test_the_statements_of_the_lease_can_be_given(tmp_path: Path) -> None:
    renewed = (
        "UPDATE ${lease} SET expires = (julianday('now') - 2440587.5) * 86400000 + :span "
        "WHERE storeid = :owner AND holder = :node"
    )
    taken = "UPDATE ${schema-prefix}STORE SET BATCH = BATCH + 1 WHERE STOREID = :owner"
    store = used(
        tmp_path / "s",
        SqlOptions(
            schema_prefix="mq_", lease_expiration=30.0,
            statements={"update.lease.renewed": renewed, "update.store.taken": taken},
        ),
    )  # fmt: skip
    store.close()
    with pytest.raises(ConfigError, match=r"update\.lease\.renewed: the parameter :node is missing"):
        SqlStore.check_options(SqlOptions(statements={"update.lease.renewed": renewed.replace(":node", "''")}))
