"""A send and an ack in a transaction of the ORM's, over PostgreSQL: `connection=django.db.connection`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import django.db
import pytest
from django.db import connections, transaction
from sqlalchemy.engine import make_url

import anabranch
from anabranch.hosts.django import AnabranchBackend

from ...sql.server import LEFT_OUT, PostgresServer, binaries
from . import tasks

pytestmark = pytest.mark.skipif(binaries() is None, reason=LEFT_OUT)

PATIENCE = 60.0


@dataclass(frozen=True)
class Shop:
    """The database of an application, with a table of its own, and a router whose store is there."""

    server: PostgresServer
    connection: Any
    router: anabranch.Router
    queue: anabranch.Queue

    @property
    def name(self) -> str:
        """Return the name of the database."""
        return str(self.connection.settings_dict["NAME"])

    def sell(self, name: str) -> None:
        """Change the application's table."""
        with self.connection.cursor() as cursor:
            cursor.execute("insert into sold values (%s)", [name])

    def sold(self) -> list[str]:
        """Return what is in the table."""
        with self.connection.cursor() as cursor:
            cursor.execute("select name from sold order by name")
            return [name for (name,) in cursor.fetchall()]

    def received(self) -> list[bytes]:
        """Return what can be received, and ack it."""
        found = []
        while (message := self.queue.receive(0)) is not None:
            found.append(message.body)
            message.ack()
        return found


@contextmanager
def connected(alias: str, url: str) -> Iterator[Any]:
    """Give Django's connection to one more of DATABASES."""
    at = make_url(url)
    place = {"NAME": at.database, "USER": at.username, "PASSWORD": at.password, "HOST": at.host, "PORT": at.port}
    connections.settings[alias] = connections.settings["default"] | {"ENGINE": "django.db.backends.postgresql"} | place
    yield connections[alias]
    connections[alias].close()
    del connections[alias], connections.settings[alias]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with PostgresServer() as server:
        url = server.new_database()
        everything = anabranch.StoreConfig("all", [">"], sql=anabranch.SqlOptions(url=url))
        config = anabranch.Config(tmp_path_factory.mktemp("data"), [everything])
        with connected("shop", url) as connection, anabranch.open(config) as router:
            with connection.cursor() as cursor:
                cursor.execute("create table sold (name text primary key)")
            yield Shop(server, connection, router, router.queue("orders"))


@pytest.fixture
def shop(opened: Shop) -> Shop:
    with opened.connection.cursor() as cursor:
        cursor.execute("truncate sold")
    opened.queue.purge()
    return opened


def test_what_is_sent_is_there_once_the_transaction_is_committed(shop: Shop) -> None:
    with transaction.atomic("shop"):
        shop.sell("hat")
        shop.queue.send(b"hat", connection=shop.connection)
        shop.queue.send_many([b"one", b"two"], connection=shop.connection)
        assert shop.received() == []
    assert (shop.sold(), shop.received()) == (["hat"], [b"hat", b"one", b"two"])


def test_nothing_is_sent_by_a_transaction_that_is_rolled_back(shop: Shop) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic("shop"):
        shop.sell("hat")
        shop.queue.send(b"hat", connection=shop.connection)
        1 / 0  # noqa: B018
    with transaction.atomic("shop"):
        shop.queue.send(b"cap", connection=shop.connection)
        transaction.set_rollback(True, using="shop")
    assert (shop.sold(), shop.received()) == ([], [])


def test_nothing_is_sent_by_a_savepoint_that_is_rolled_back(shop: Shop) -> None:
    with transaction.atomic("shop"):
        shop.queue.send(b"first", connection=shop.connection)
        with pytest.raises(ZeroDivisionError), transaction.atomic("shop"):
            shop.sell("hat")
            shop.queue.send(b"hat", connection=shop.connection)
            1 / 0  # noqa: B018
        with transaction.atomic("shop"):
            shop.sell("cap")
            shop.queue.send(b"cap", connection=shop.connection)
        with pytest.raises(django.db.IntegrityError), transaction.atomic("shop"):
            shop.queue.send(b"once more", connection=shop.connection)
            shop.sell("cap")
    assert (shop.sold(), shop.received()) == (["cap"], [b"first", b"cap"])


def test_an_ack_counts_once_the_transaction_is_committed(shop: Shop) -> None:
    shop.queue.send(b"hat")
    message = shop.queue.receive(PATIENCE)
    assert message is not None
    with pytest.raises(ZeroDivisionError), transaction.atomic("shop"):
        shop.sell("hat")
        message.ack(connection=shop.connection)
        assert shop.queue.receive(0) is None
        1 / 0  # noqa: B018
    message = shop.queue.receive(PATIENCE)
    assert message is not None and message.deliveries == 2
    with transaction.atomic("shop"):
        shop.sell("hat")
        message.ack(connection=shop.connection)
        shop.queue.send(b"sold", connection=shop.connection)
    assert (shop.sold(), shop.received(), shop.queue.depth()) == (["hat"], [b"sold"], 0)


def test_a_transaction_without_an_atomic_block(shop: Shop) -> None:
    """It is Django's own, but it tells nobody of its end: the message is found within a second."""
    shop.connection.set_autocommit(False)
    try:
        shop.sell("hat")
        shop.queue.send(b"hat", connection=shop.connection)
        shop.connection.rollback()
        shop.queue.send(b"cap", connection=shop.connection)
        shop.connection.commit()
    finally:
        shop.connection.set_autocommit(True)
    message = shop.queue.receive(PATIENCE)
    assert message is not None and (shop.sold(), message.body) == ([], b"cap")
    message.ack()


def test_autocommit_is_refused(shop: Shop) -> None:
    told = rf"/{shop.name} commits each statement at once .*; call it within django.db.transaction.atomic\('shop'\)"
    with pytest.raises(anabranch.TransactionError, match=told):
        shop.queue.send(b"hat", connection=shop.connection)
    shop.queue.send(b"hat")
    message = shop.queue.receive(PATIENCE)
    assert message is not None
    with pytest.raises(anabranch.TransactionError, match=told):
        message.ack(connection=shop.connection)
    message.ack()


def test_a_connection_to_another_database_is_refused(shop: Shop) -> None:
    url = shop.server.new_database()
    told = rf"store 'all' is in .*/{shop.name}, and the connection to .*/{make_url(url).database} does not find"
    refused = pytest.raises(anabranch.TransactionError, match=told)
    with connected("other", url) as other, refused, transaction.atomic("other"):
        shop.queue.send(b"hat", connection=other)
    told = rf"store 'all' is in .*/{shop.name}, and the connection to sqlite:///.*/pages is sqlite"
    with pytest.raises(anabranch.TransactionError, match=told), transaction.atomic():
        shop.queue.send(b"hat", connection=django.db.connection)
    assert shop.received() == []


def test_an_error_is_djangos(shop: Shop) -> None:
    with pytest.raises(django.db.InternalError, match="transaction is aborted"), transaction.atomic("shop"):
        shop.sell("hat")
        with pytest.raises(django.db.IntegrityError):
            shop.sell("hat")
        shop.queue.send(b"hat", connection=shop.connection)
    assert (shop.sold(), shop.received()) == ([], [])


def test_the_connection_is_left_as_it_was(shop: Shop) -> None:
    """What Django has made of it: of what types its rows are."""

    def types() -> list[type]:
        with shop.connection.cursor() as cursor:
            cursor.execute("""select '{"a": 1}'::jsonb, now(), 1.5::numeric, '1 day'::interval, array[1], inet '::1'""")
            return [type(value) for value in cursor.fetchone()]

    before = types()
    with transaction.atomic("shop"):
        shop.queue.send(b"hat", connection=shop.connection)
        assert types() == before
    assert types() == before


def test_a_task_is_part_of_the_transaction(shop: Shop) -> None:
    options = {"router": shop.router, "database": "shop", "in_transaction": True}
    backend = AnabranchBackend("shop", {"OPTIONS": options})
    with transaction.atomic("shop"):
        shop.sell("hat")
        kept = backend.enqueue(tasks.double, [1], {})
        with pytest.raises(ZeroDivisionError), transaction.atomic("shop"):
            backend.enqueue(tasks.double, [2], {})
            1 / 0  # noqa: B018
    message = backend.queue("default").receive(PATIENCE)
    assert message is not None and backend.queue("default").depth() == 1
    backend.run(message, "worker")
    assert (backend.get_result(kept.id).return_value, shop.sold()) == (2, ["hat"])
