"""What can be wrong with the database of a shared store, and around it: one error says it, nothing is half made.
PostgreSQL has no right to LISTEN that a role could lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.shared import SharedStore
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import ClosedError, ConfigError, StoreFailedError

from ..contract.children import forked, reaped
from ..contract.disk import PATIENCE, A, B, Parallel, bodies, drain, eventually, take
from .pooler import pooler
from .server import PostgresServer


class Role:
    """A role that may use one schema, and a store as it."""

    def __init__(self, path: Path, server: PostgresServer, url: str) -> None:
        self.path, self.server, self.url = path, server, make_url(url)
        self.schema = str(self.url.query["options"]).rpartition("=")[2]
        self.name = f"role_{self.schema}"
        self.stack = ExitStack()
        self.run(
            f"CREATE ROLE {self.name} LOGIN PASSWORD 'secret'", f"GRANT USAGE ON SCHEMA {self.schema} TO {self.name}"
        )
        self.stack.callback(self._drop)

    def _drop(self) -> None:
        self.run(f"DROP OWNED BY {self.name}", f"DROP ROLE {self.name}")

    def run(self, *statements: str) -> None:
        """Run statements as the server's owner, in the schema."""
        with self.server.connect(str(self.url.database)) as connection:
            connection.execute(f"SET search_path = {self.schema}")
            for statement in statements:
                connection.execute(statement)

    def options(self, owner: bool = False, port: int | None = None, **more: Any) -> SqlOptions:
        """Return those of a store as the role, or as the `owner`."""
        url = self.url if owner else self.url.set(username=self.name, password="secret")
        if port is not None:
            url = url.set(port=port, query={})
        given: dict[str, Any] = {
            "url": url.render_as_string(hide_password=False),
            "shared": True,
            "pool_min": 0,
            "pool_timeout": 1.0,
        }
        return SqlOptions(**given | more)

    def make(self, name: str = "s", **options: Any) -> Path:
        """Create a store, and return its directory."""
        SqlStore.create(name, self.path / name, self.options(**options))
        return self.path / name

    def open(self, name: str = "s", **options: Any) -> Any:
        """Open one that was made."""
        store = SqlStore(name, self.path / name, self.options(**options))
        assert isinstance(store, SharedStore)
        store.open()
        self.stack.callback(store.close)
        return store

    def tables(self) -> list[str]:
        """Return the tables of the schema."""
        with self.server.connect(str(self.url.database)) as connection:
            found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (self.schema,))
            return [name for (name,) in found]


@pytest.fixture
def role(tmp_path: Path, postgres: PostgresServer, postgres_url: str) -> Iterator[Role]:
    role = Role(tmp_path, postgres, postgres_url)
    with role.stack:
        yield role


GRANTS = (
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {s} TO {r}",
    "GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {s} TO {r}",
)


def granted(role: Role, *more: str) -> None:
    """Let the owner make the tables, and the role use them."""
    role.make(owner=True)
    role.run(*(text.format(s=role.schema, r=role.name) for text in (*GRANTS, *more)))


# Rights and tables ---------------------------------------------------------------------------------------------------


def test_a_role_that_may_not_create_tables(role: Role) -> None:
    with pytest.raises(StoreFailedError, match=f"'s'.*permission denied for schema {role.schema}.*nothing was changed"):
        role.make()
    assert not (role.path / "s").exists() and role.tables() == []
    role.run(f"GRANT CREATE ON SCHEMA {role.schema} TO {role.name}")
    role.make()
    role.open().send(A, b"1")


def test_a_role_that_may_not_create_may_use_what_is_there(role: Role) -> None:
    """It can neither empty WAITING nor lock it, which is done if it can be."""
    granted(role)
    role.make("other")
    store = role.open("other")
    store.send(A, b"1")
    assert drain(store) == [b"1"]


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_a_role_that_lacks_a_right(role: Role, right: str) -> None:
    granted(role, f"REVOKE {right} ON shared_messages FROM {{r}}")
    store = role.open()
    calls: list[Callable[[], object]] = [lambda: store.send(A, b"1"), lambda: store.receive(A), lambda: store.purge(A)]
    wrong = []
    for call in calls:
        try:
            call()
        except StoreFailedError as error:
            wrong.append(str(error))
    assert wrong
    for text in wrong:
        assert "permission denied for table shared_messages" in text and "nothing was changed" in text
        assert "secret" not in text


def test_a_role_that_may_not_enter(role: Role) -> None:
    granted(role, "REVOKE INSERT ON shared_routers FROM {r}")
    with pytest.raises(StoreFailedError, match="permission denied for table shared_routers"):
        role.open()
    role.run(f"GRANT INSERT ON shared_routers TO {role.name}")
    role.open().send(A, b"1")


def test_tables_of_another_version(role: Role) -> None:
    role.make(owner=True)
    role.run("UPDATE shared_store SET version = 3")
    for call in (lambda: role.open(owner=True), lambda: role.make("other", owner=True)):
        with pytest.raises(ConfigError, match=r"are of version 3, this is version 2; use the other release"):
            call()
    assert not (role.path / "other").exists()
    role.run("UPDATE shared_store SET version = 2")
    role.open(owner=True).send(A, b"1")


@pytest.mark.parametrize(
    ("altered", "named"),
    [
        ("ALTER TABLE shared_messages DROP COLUMN take", 'column "?[a-z.]*take"? .*does not exist'),
        ("ALTER TABLE shared_messages RENAME TO elsewhere", 'relation "shared_messages" does not exist'),
        ("DROP TABLE shared_queues", 'relation "shared_queues" does not exist'),
        ("ALTER TABLE shared_messages ADD COLUMN more text NOT NULL", 'null value in column "more"'),
    ],
)
def test_a_table_that_somebody_has_altered(role: Role, altered: str, named: str) -> None:
    """Whoever uses it first is told what is missing."""
    role.make(owner=True)
    role.run(altered)
    with pytest.raises(StoreFailedError, match=named):
        store = role.open(owner=True)
        store.send(A, b"1")
        store.receive(A)


def test_tables_that_are_gone(role: Role) -> None:
    role.make(owner=True)
    store = role.open(owner=True)
    store.send(A, b"1")
    role.run("DROP TABLE shared_messages")
    with pytest.raises(StoreFailedError, match='relation "shared_messages" does not exist'):
        store.send(A, b"2")


def test_rows_of_connections_that_are_gone(role: Role) -> None:
    """Nothing is taken for done that was not."""
    role.make(owner=True)
    store = role.open(owner=True)
    store.send_many(A, [b"1", b"2"])
    message = take(store)
    for call in (
        lambda: store.send(A, b"3"), lambda: store.send(A, b"4", message_id="4"), message.ack,
        lambda: store.send_many(A, [b"5", b"6"]),
    ):  # fmt: skip
        role.run("DELETE FROM shared_connections")
        call()
    assert bodies(store) == [b"2", b"3", b"4", b"5", b"6"]


def test_one_that_others_took_for_dead_a_day_ago(role: Role) -> None:
    """It enters anew, and so do its connections, whose rows are removed after a day."""
    role.make(owner=True)
    store = role.open(owner=True, router_timeout=0.5)
    store.send(A, b"1")
    before = store.waiting.router
    role.run("UPDATE shared_connections SET made = 0", f"DELETE FROM shared_routers WHERE number = {before}")
    eventually(lambda: store.waiting.router != before)
    assert take(store).body == b"1"
    store.send(A, b"2")
    assert bodies(store) == [b"1", b"2"]


# Connections ---------------------------------------------------------------------------------------------------------


def test_no_connection_left(role: Role) -> None:
    granted(role, "ALTER ROLE {r} CONNECTION LIMIT 0")
    with pytest.raises(StoreFailedError, match="too many connections for role"):
        role.open()
    role.run(f"ALTER ROLE {role.name} CONNECTION LIMIT 2")
    store = role.open(pool_max=2)
    with Parallel(lambda: store.receive(A, PATIENCE)) as waiting:
        try:
            for _ in range(20):
                store.send(A, b"1")
        except StoreFailedError as error:
            assert "too many connections for role" in str(error)
            role.run(f"ALTER ROLE {role.name} CONNECTION LIMIT -1")
            store.send(A, b"1")
        assert waiting.result() is not None


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_a_role_whose_transactions_are_isolated(role: Role, level: str) -> None:
    granted(role, f"ALTER ROLE {{r}} SET default_transaction_isolation = '{level}'")
    role.make("other")
    first, second = role.open(), role.open("other")

    def work(store: Any) -> int:
        count = 0
        for number in range(30):
            store.send_many(A, [b"%d" % number, b"x"])
            for message in store.receive_many(A, 3):
                message._note.kept = True
                message.ack()
                count += 1
        return count

    with Parallel(lambda: work(first)) as one, Parallel(lambda: work(second)) as other:
        done = one.result() + other.result()
    assert done + len(drain(first)) == 120


def test_calls_that_meet_in_a_deadlock(role: Role) -> None:
    """The one that the server gives up is begun anew."""
    granted(role)
    role.run(f"ALTER ROLE {role.name} SET deadlock_timeout = '10ms'")
    role.make("other")
    first, second = role.open(), role.open("other")

    def work(store: Any, step: int) -> None:
        for number in range(40):
            names = [f"{number}.{part}" for part in range(4)][::step]
            store.send_many(A, [Outgoing(name.encode(), message_id=name) for name in names])

    with Parallel(lambda: work(first, 1)) as one, Parallel(lambda: work(second, -1)) as other:
        one.result()
        other.result()
    found = bodies(first)
    assert len(found) == len(set(found)) == 160


def test_a_role_that_may_only_read(role: Role) -> None:
    granted(role, "ALTER ROLE {r} SET default_transaction_read_only = on")
    with pytest.raises(StoreFailedError, match="session is read-only"):
        role.open()


@pytest.mark.parametrize("pool_mode", ["transaction"])
def test_a_pooler_of_transactions(role: Role, postgres: PostgresServer, pool_mode: str) -> None:
    """No LISTEN is heard over it, and a session's settings are anybody's."""
    granted(role, "ALTER ROLE {r} SET search_path = {s}")
    with pooler(role.path / "pooler", postgres.port, pool_mode, role.name, "secret") as port:
        for call in (lambda: role.open(port=port), lambda: role.make("other", port=port)):
            with pytest.raises(ConfigError, match=r"'(s|other)': .*is a pooler that gives each transaction another"):
                call()
        assert not (role.path / "other").exists()


@pytest.mark.parametrize("pool_mode", ["session"])
def test_a_pooler_of_sessions(role: Role, postgres: PostgresServer, pool_mode: str) -> None:
    granted(role, "ALTER ROLE {r} SET search_path = {s}")
    role.make("other")
    second = role.open("other")
    with pooler(role.path / "pooler", postgres.port, pool_mode, role.name, "secret") as port:
        store = role.open(port=port)
        with Parallel(lambda: store.receive(A, PATIENCE)) as waiting:
            eventually(store.waiting.count)
            second.send(A, b"1")
            message = waiting.result()
        message.ack()
        store.send_many(A, [b"%d" % number for number in range(20)])
        assert len(drain(store)) == 20
        store.close()


# Processes -----------------------------------------------------------------------------------------------------------


def test_a_fork_has_no_part_in_it(role: Role) -> None:
    role.make(owner=True)
    store = role.open(owner=True)
    store.send_many(A, [b"1", b"2"])
    message = take(store)

    def child() -> None:
        for call in (lambda: store.send(A, b"x"), lambda: store.receive(A), message.ack, lambda: store.depth(A)):
            with pytest.raises(ClosedError):
                call()
        store.close()

    assert reaped(forked(child)) == 0
    message.ack()
    store.send(A, b"3")
    assert drain(store) == [b"2", b"3"]


def test_closed_while_others_wait(role: Role) -> None:
    role.make(owner=True)
    store = role.open(owner=True)
    ended: list[Exception] = []
    store.listen(B, lambda message: None, on_end=ended.append)
    with Parallel(lambda: store.receive(A, None)) as one, Parallel(lambda: store.receive(A, PATIENCE)) as other:
        eventually(lambda: store.waiting.count() == 3)
        store.close()
        for waiting in (one, other):
            with pytest.raises(ClosedError):
                waiting.result()
    eventually(lambda: [type(error) for error in ended] == [ClosedError])
    with pytest.raises(ClosedError):
        store.send(A, b"1")
