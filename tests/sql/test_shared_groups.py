"""Groups in a shared store, where many messages are held back: who looks for one passes them by group (rule Q19)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.sql.shared.statements import Statements

from ..contract.disk import A, assert_whole
from .server import PostgresServer
from .shared import SharedDisk, SharedTables

HOUR: Final = 3600.0


@pytest.fixture(scope="module")
def sets(postgres: PostgresServer) -> Iterator[SharedTables]:
    if postgres.pid is None:
        postgres.start()
    sets = SharedTables(postgres.new_database())
    yield sets
    sets.close()


@pytest.fixture
def disk(tmp_path: Path, sets: SharedTables) -> Iterator[SharedDisk]:
    with SharedDisk(tmp_path, sets) as disk:
        yield disk


def test_whoever_looks_finds_what_the_rules_say(disk: SharedDisk) -> None:
    """Two routers, of which one has noted that the queue has groups, beside a list of what must be found."""
    one = disk.create(lease_timeout=HOUR)
    other = disk.beside(one)
    assert other.receive(A) is None  # it was without groups then
    chance = random.Random(5)
    groups = ["hot"] * 500 + [f"g{n % 40}" for n in range(300)] + [None] * 40 + [f"s{n}" for n in range(60)]
    chance.shuffle(groups)
    one.send_many(A, [Outgoing(b"%d" % n, group=group) for n, group in enumerate(["hot"] * 200 + groups)])
    there = [(message.seq, message.group) for message in one.browse(A)]
    held: dict[int, Message[Any]] = {}
    waiting: set[int] = set()

    def ready(most: int) -> list[int]:
        first: dict[str, int] = {}
        found = [seq for seq, group in there if group is None or first.setdefault(group, seq) == seq]
        return [seq for seq in found if seq not in held and seq not in waiting][:most]

    for step in range(120):
        most = chance.choice((1, 3, 50, 500))
        expected = ready(most)
        messages = (one, other)[step % 2].receive_many(A, most)
        assert [message.seq for message in messages] == expected
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
    shared: Any = store
    prefix = shared.options.schema_prefix
    sets.run([f"INSERT INTO {prefix}shared_connections (number, last, router, made) VALUES (1, 0, 0, 0)"])
    asked = "EXPLAIN (ANALYZE, FORMAT JSON) " + Statements(prefix, False)["take_grouped"]
    with shared._database.engine.connect() as connection:
        given = 1, 1, shared._queues.number(A), 0, 100, 1, 1, 1, 500
        (((plan,),),) = psycopg.RawCursor(connection.connection.driver_connection).execute(asked, given).fetchall()
    looks = sum(node["Actual Loops"] for node in nodes(plan["Plan"]) if "member_id" in node.get("Index Name", ""))
    assert 0 < looks < count // 10
    assert store.receive(A) is None


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all parts of a plan."""
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)
