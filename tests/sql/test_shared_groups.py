"""Groups in a shared store, where many messages are held back: who looks for one passes them by group (rule Q19)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.store_types import Settlement
from anabranch.adapters.sql.shared.statements import Statements
from anabranch.policies.errors import UnknownMessageError

from ..contract.disk import A, assert_whole, drain, take
from ..contract.expiring import HOUR as HOUR_MS
from ..contract.expiring import undelivered
from .shared import CLOCK, SharedDisk, SharedTables, shared_tables
from .test_shared_times import now_ms

HOUR: Final = 3600.0


sets = pytest.fixture(scope="module")(shared_tables)


@pytest.fixture
def disk(tmp_path: Path, sets: SharedTables) -> Iterator[SharedDisk]:
    with SharedDisk(tmp_path, sets) as disk:
        yield disk


def test_whoever_looks_finds_what_the_rules_say(disk: SharedDisk) -> None:
    """Two routers, of which one has noted that the queue has groups, beside a list of what must be found."""
    one: Any = disk.create(lease_timeout=HOUR)
    other: Any = disk.beside(one)
    assert other.receive(A) is None  # it was without groups then
    chance = random.Random(5)
    groups = ["hot"] * 500 + [f"g{n % 40}" for n in range(300)] + [None] * 40 + [f"s{n}" for n in range(60)]
    chance.shuffle(groups)
    one.send_many(A, [Outgoing(b"%d" % n, group=group) for n, group in enumerate(["hot"] * 200 + groups)])
    there = [(message.seq, message.group) for message in one.browse(A)]
    held: dict[int, Message[Any]] = {}
    waiting: set[int] = set()

    def ready(most: int) -> list[int]:
        """The newest first, for less than 0."""
        first: dict[str, int] = {}
        found = [seq for seq, group in there if group is None or first.setdefault(group, seq) == seq]
        free = [seq for seq in found if seq not in held and seq not in waiting]
        return free[:most] if most > 0 else free[: most - 1 : -1]

    for step in range(120):
        most = chance.choice((1, 3, 50, 500, -1, -1, -50))
        expected = ready(most)
        messages = (one, other)[step % 2].receive_many(A, abs(most), newest=most < 0)
        assert [message.seq for message in messages] == sorted(expected)
        held.update({message.seq: message for message in messages})
        for seq in chance.sample(sorted(held), len(held) // 2):
            message = held.pop(seq)
            if chance.random() < 0.8:
                message.ack()
                there.remove((seq, message.group))
            else:
                is_late = chance.random() < 0.3
                message.release(delivered=False, delay=HOUR if is_late else None)
                waiting.update([seq] if is_late else [])
    assert len(there) < len(groups) and waiting
    for message in held.values():
        message.ack()
    assert_whole(one)


def test_messages_that_are_held_back_are_not_looked_up_one_by_one(disk: SharedDisk, sets: SharedTables) -> None:
    store = disk.create()
    count = 3000
    store.send_many(A, [Outgoing(b"%d" % n, group=f"g{n % 20}") for n in range(count)])
    assert len(store.receive_many(A, count)) == 20
    with asking(store, sets) as (database, statements, given):
        asked = f"EXPLAIN (ANALYZE, FORMAT JSON) {statements['take_grouped']}"
        (((plan,),),) = database.execute(asked, given).fetchall()
    looks = sum(node["Actual Loops"] for node in nodes(plan["Plan"]) if "member_id" in node.get("Index Name", ""))
    assert 0 < looks < count // 10
    assert store.receive(A) is None


@pytest.fixture
def clock(sets: SharedTables) -> Iterator[None]:
    """A clock that each question puts forward by a second; `setval` says how far it is."""
    sets.run(
        [
            "CREATE SEQUENCE asked MINVALUE 0",
            "CREATE OR REPLACE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
            "'SELECT to_timestamp(nextval(''asked''))'",
        ]
    )
    yield
    sets.run([CLOCK[-1].replace("CREATE", "CREATE OR REPLACE"), "DROP SEQUENCE asked"])


@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("name", ["take", "take_grouped"])
def test_one_that_expires_as_it_is_leased_holds_its_group(
    disk: SharedDisk, sets: SharedTables, name: str, ends: str
) -> None:
    """Rule Q14: until that is committed, too; or until it is swept, if it is rolled back."""
    store = disk.create()
    store.send_many(A, [Outgoing(b"1", group="g", expires_at_ms=now_ms() + HOUR_MS), Outgoing(b"2", group="g")])
    with asking(store, sets) as (database, statements, given):
        database.execute("BEGIN")
        ((*_, body, _),) = database.execute(statements[name], given).fetchall()
        assert body == b"1"
        try:
            sets.set_clock(2 * HOUR_MS)
            assert store.receive(A) is None
            database.execute(ends)
            assert store.receive(A) is None
            for message, _ in undelivered(store):
                message.ack()
            assert drain(store) == ([] if ends == "COMMIT" else [b"2"])
        finally:
            sets.set_clock(0)


@pytest.mark.usefixtures("clock")
def test_one_that_expires_while_a_statement_is_at_it_is_leased_with_no_other_of_its_group(
    disk: SharedDisk, sets: SharedTables
) -> None:
    store: Any = disk.create(router_timeout=HOUR)
    leased = set()
    for second in range(100, 120):
        store.send_many(A, [Outgoing(b"1", group="g"), Outgoing(b"2", group="g")])
        sets.run(
            [
                f"UPDATE {store.options.schema_prefix}shared_messages SET due = 0, sent = 0, expires = CASE content "
                f"WHEN '1' THEN {second} * 1000 - 500 ELSE 0 END",
                "SELECT setval('asked', 100)",
            ]
        )
        found = [message.body for message in store.receive_many(A, 2)]
        assert len(found) <= 1
        leased.update(found)
        store.delete(A)
    assert leased == {b"1", b"2"}


def test_one_that_is_leased_again_waits_for_its_group(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [Outgoing(b"%d" % n, group="g") for n in range(2)])
    first, second = (message.seq for message in store.browse(A))

    def refused(seq: int) -> None:
        with pytest.raises(UnknownMessageError, match="another of its group"):
            other.lease_again(A, seq)

    refused(second)
    message = take(store)
    refused(first)
    refused(second)
    message.ack()
    token = other.lease_again(A, second)
    assert token is not None and other.settle([token], Settlement.ACK) == [None]


def test_one_that_had_expired_is_not_leased_again_beside_one_behind_it(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [Outgoing(b"1", group="g", expires_at_ms=1), Outgoing(b"2", group="g")])
    first, _ = (message.seq for message in store.browse(A))
    second = take(store)
    with pytest.raises(UnknownMessageError, match="another of its group"):
        other.lease_again(A, first)
    second.ack()
    assert other.lease_again(A, first) is not None


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all parts of a plan."""
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


@contextmanager
def asking(store: Any, sets: SharedTables) -> Iterator[tuple[Any, Statements, tuple[int, ...]]]:
    """Yield a cursor of a connection of its own, the statements of a store, and what those that take are given."""
    prefix = store.options.schema_prefix
    sets.run([f"INSERT INTO {prefix}shared_connections (number, last, router, made) VALUES (1, 0, 0, 0)"])
    with store._database.engine.connect() as connection:
        given = 1, 1, store._queues.number(A), 0, 100, 0, store.waiting.router, 1, 500
        yield psycopg.RawCursor(connection.connection.driver_connection), Statements(prefix, False), given
