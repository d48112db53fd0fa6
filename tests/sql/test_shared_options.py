"""A shared store in a configuration, in commands, and below the owner of a directory."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

import anabranch
from anabranch.adapters.core.migration.copying import amount
from anabranch.adapters.core.store_types import Settlement
from anabranch.adapters.sql.database.connections import shown_url
from anabranch.adapters.sql.shared.statements import TABLES
from anabranch.policies.config import loads
from anabranch.policies.config.options import _OF_SHARED, SqlOptions
from anabranch.policies.errors import ConfigError, PlacementError, StoreFailedError, TransactionError

from .server import PostgresServer, free_port

FILE = """
directory: data
stores:
  - name: shop
    match: ["queue://orders.>"]
    sql: {url_env: SHOP_DATABASE, shared: true}
  - {name: local, match: [">"]}
"""
Router = anabranch.Router


def config(path: Path, url: str, **options: object) -> anabranch.Config:
    sql = SqlOptions(url=url, pool_min=0, **{"shared": True, **options})  # type: ignore[arg-type]
    return anabranch.Config(path, [anabranch.StoreConfig("shop", ["queue://orders.>"], kind="sql", options=sql),
                                   anabranch.StoreConfig("local", [">"])])  # fmt: skip


def test_a_variable_that_is_not_set_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        loads(FILE, tmp_path)
    assert "url_env: the environment has no variable 'SHOP_DATABASE'" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_url_may_name_several_hosts(tmp_path: Path, postgres: PostgresServer) -> None:
    url = make_url(postgres.new_database())
    nobody, here = f"127.0.0.1:{free_port()}", f"127.0.0.1:{url.port}"
    several = url.set(host=None, port=None, query={"host": (nobody, here)})
    with anabranch.open(config(tmp_path / "data", several.render_as_string(False))) as router:
        router.queue("orders.new").send(b"a train")
        assert router.queue("orders.new").depth() == 1
    gone = url.set(host=None, port=None, query={"host": (nobody, nobody)}).render_as_string(False)
    with anabranch.open(config(tmp_path / "gone", gone)) as router, pytest.raises(StoreFailedError) as raised:
        router.queue("orders.new").send(b"a doll")
    assert f"host={nobody}&host={nobody}" in str(raised.value)
    assert str(url.password) not in str(raised.value)


def test_what_is_shown_of_a_url_is_no_secret() -> None:
    url = make_url("postgresql+psycopg://u:p@/d?host=a:1&host=b:2&sslpassword=s&options=-cx%3Dy")
    assert shown_url(url) == "postgresql+psycopg://u:***@/d?host=a:1&host=b:2"


def test_shared_or_not_is_for_good(tmp_path: Path, postgres: PostgresServer) -> None:
    for before in (True, False):
        url = postgres.new_database()
        given = config(tmp_path / str(before), url, shared=before)
        with anabranch.open(given) as router:
            router.queue("orders.new").send(b"a train")
        other = config(tmp_path / str(before), url, shared=not before)
        with anabranch.open(other) as router, pytest.raises(PlacementError, match="was made with") as raised:
            router.queue("orders.new").send(b"a doll")
        assert "anabranch repartition" in str(raised.value)
        with anabranch.open(given) as router:
            assert router.queue("orders.new").depth() == 1


def test_how_much_it_holds(tmp_path: Path, postgres: PostgresServer) -> None:
    with anabranch.open(config(tmp_path, postgres.new_database())) as router:
        orders = router.queue("orders.new")
        orders.send(b"a train", headers={"a": 1})
        orders.send(b"a doll")
        store = router._registry.store_of(orders.destination)
        assert store is not None
        held = amount(store, orders.destination)
        assert (held.messages, held.known, held.bytes > 13) == (2, True, True)
        assert not amount(store, router.queue("orders.none").destination).known


def test_a_file_is_read_whole(tmp_path: Path, postgres: PostgresServer) -> None:
    with anabranch.open(config(tmp_path, postgres.new_database())) as router:
        orders = router.queue("orders.new")
        orders.send(io.BytesIO(b"a train"), size=7)
        orders.send(io.BytesIO(b"a doll"))
        with pytest.raises(ValueError, match="7"):
            orders.send(io.BytesIO(b"a doll"), size=7)
        orders.send_nowait(io.BytesIO(b"a ball")).result()
        assert [message.body for message in orders.browse()] == [b"a train", b"a doll", b"a ball"]


def test_below_the_owner_of_a_directory(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients send and receive there, but in no transaction; what a client held that has gone is free."""
    given = tmp_path / "stores.yaml"
    given.write_text(FILE)
    monkeypatch.setenv("SHOP_DATABASE", postgres.new_database())
    with anabranch.open(given, shared=True) as one:
        orders = one.queue("orders.new")
        orders.send(b"a train")
        with anabranch.open(given, shared=True) as other:
            message = other.queue("orders.new").receive(timeout=30.0, lease=600.0)
            assert message is not None
            other.queue("orders.new").send(b"a doll")
        bodies = set()
        for _ in range(2):
            received = orders.receive(timeout=30.0)
            assert received is not None
            bodies.add(received.body)
            received.ack()
        assert (bodies, orders.depth()) == ({b"a train", b"a doll"}, 0)
        says = "cannot send to or ack in the shared store 'shop' in a transaction; give each process a directory"
        with pytest.raises(TransactionError, match=says):
            one.send("orders.new,packed", b"a ball")
        assert (orders.depth(), one.queue("packed").depth()) == (0, 0)
    assert says in caplog.text


def test_a_token_settles_its_message_from_any_router(tmp_path: Path, postgres: PostgresServer) -> None:
    url = postgres.new_database()
    with anabranch.open(config(tmp_path / "a", url)) as one, anabranch.open(config(tmp_path / "b", url)) as other:
        one.queue("orders.new").send(b"a train")
        message = one.queue("orders.new").receive()
        assert message is not None
        assert other.queue("orders.new").depth() == 1
        other.settle(message.token, Settlement.ACK)
        assert one.queue("orders.new").depth() == 0


def test_the_page_says_all_of_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sql.md").read_text().partition("## Shared by many routers\n")[2]
    section = page.partition("\n## ")[0]
    tables = {re.split(r"[ (]", text.partition("{p}shared_")[2])[0] for text in TABLES if " TABLE " in text}
    assert set(re.findall(r"^\| `([A-Z]+)` \|", section, re.M)) == {name.upper() for name in tables}
    told = set(re.findall("`([a-z_]+)`", section.partition("| | |")[2].partition("\n\n")[0]))
    prefixes = tuple(name for name in told if name.endswith("_"))
    assert {name for name in _OF_SHARED if not name.startswith(prefixes)} == told.difference(prefixes)
    set_so = set(re.findall("autovacuum[a-z_]* = [0-9.]+", " ".join(TABLES)))
    assert set(re.findall("autovacuum[a-z_]* = [0-9.]+", section)) == set_so
