"""Large messages through the router: transactions over stores of all kinds, dead letters, moving, idle stores."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch import LargeMessageError, Outgoing, Router, TransactionError, TransactionOptions
from anabranch.policies.config import loads

from ..contract.large import body, kept
from ..router.disk import take

CONFIG = """
directory: data
stores:
  - name: films
    match: ["films.>"]
    journal: {large_message_size: 1KiB, dead_letter: "dead.{name}"}
  - name: tables
    match: ["tables.>"]
    sql: {large_message_size: 1KiB, dead_letter: "dead.{name}"}
  - name: memory
    match: ["memory.>"]
    memory: {large_message_size: 1KiB}
  - name: rest
    match: [">"]
    journal: {large_message_size: 1KiB}
"""
PLACES = ("films.a", "tables.a", "rest")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    with anabranch.open(loads(CONFIG, tmp_path)) as it:
        yield it


def count(router: Router) -> int:
    """Bodies in all stores that are open."""
    gc.collect()
    return sum(kept(store) for store in router._registry.open_stores())


def test_a_transaction_over_three_stores_sends_and_acks(router: Router) -> None:
    router.queue("films.a").send(io.BytesIO(body()))
    with router.transaction() as transaction:
        message = take(router, "films.a")
        transaction.ack(message)
        transaction.send("tables.a", message.content)
        transaction.send("rest", io.BytesIO(body(seed=2)), size=2000)
        transaction.send("memory.a", io.BytesIO(body(seed=3)))
        assert router.queue("rest").receive() is None
    del message, transaction
    for name, seed in (("tables.a", 1), ("rest", 2), ("memory.a", 3)):
        found = take(router, name)
        assert found.read() == body(seed=seed)
        with pytest.raises(LargeMessageError):
            found.body  # noqa: B018
        found.ack()
        del found
    assert count(router) == 0


def test_a_transaction_that_is_rolled_back_leaves_nothing(router: Router) -> None:
    with pytest.raises(ZeroDivisionError), router.transaction() as transaction:
        for name in PLACES:
            transaction.send(name, io.BytesIO(body()))
        assert count(router) == 3
        raise ZeroDivisionError
    del transaction
    assert count(router) == 0


def test_a_savepoint_lets_go_of_what_came_after(router: Router) -> None:
    with router.transaction() as transaction:
        transaction.send("rest", io.BytesIO(body()))
        point = transaction.savepoint()
        transaction.send("rest", io.BytesIO(body(seed=2)))
        point.rollback()
        assert count(router) == 1
    assert take(router, "rest").read() == body()


def test_what_a_transaction_refuses_leaves_nothing(router: Router) -> None:
    transaction = router.transaction()
    with pytest.raises(ValueError, match="size says 3"):
        transaction.send("rest", io.BytesIO(body()), size=3)
    transaction.rollback()
    with pytest.raises(TransactionError):
        transaction.send("rest", io.BytesIO(body()))
    assert count(router) == 0


def test_a_large_body_is_not_what_limits_a_transaction(tmp_path: Path) -> None:
    """Its memory is what `max_bytes` bounds."""
    config = loads("directory: data\nstores: [{name: a, match: ['>'], journal: {large_message_size: 1KiB}}]", tmp_path)
    assert TransactionOptions().max_bytes > 0
    with anabranch.open(config) as router, router.transaction() as transaction:
        transaction.send("a", io.BytesIO(body(5 << 20)))
        assert transaction._operations.bytes < 100


def test_a_composite_is_read_once(router: Router) -> None:
    sent = io.BytesIO(body())
    router.send("queue://films.a,queue://films.b,queue://tables.a,topic://nobody", sent)
    assert sent.read() == b""
    for name in ("films.a", "films.b", "tables.a"):
        assert take(router, name).read() == body()
    assert count(router) == 2


def test_many_with_files_among_them(router: Router) -> None:
    queue = router.queue("tables.a")
    queue.send_many([b"1", Outgoing(io.BytesIO(body())), io.BytesIO(b"3")])
    assert [message.read() for message in queue.browse()] == [b"1", body(), b"3"]
    assert queue.send_nowait(io.BytesIO(body(seed=2)), size=2000).result(60).seq


@pytest.mark.parametrize("name", ["films.a", "tables.a"])
def test_a_dead_letter_goes_and_comes_back_with_its_body(router: Router, name: str) -> None:
    queue = router.queue(name)
    queue.send(io.BytesIO(body()), {"h": 1}, "id")
    take(router, name).reject("on purpose")
    letter = take(router, f"dead.{name}")
    assert (letter.read(), letter.headers["dead_letter_reason"]) == (body(), "on purpose")
    letter.release()
    del letter
    assert count(router) == 1
    assert router.requeue(f"dead.{name}") == 1
    again = take(router, name)
    assert (again.read(), again.headers["h"], again.message_id) == (body(), 1, "id")
    again.ack()
    del again
    assert count(router) == 0


def test_what_expires_goes_to_the_dead_letters(router: Router) -> None:
    queue = router.queue("films.a")
    queue.send(io.BytesIO(body()), expires_in=0.001)
    while not router.sweep():
        pass
    assert take(router, "dead.films.a").read() == body()
    assert count(router) == 1


def test_a_destination_moves_with_its_bodies_while_it_is_used(tmp_path: Path) -> None:
    before = "directory: data\nstores:\n- {name: a, match: ['>'], journal: {large_message_size: 1KiB}}\n"
    after = before + "- {name: b, match: ['films.>'], sql: {large_message_size: 1KiB}}\n"
    with anabranch.open(loads(before, tmp_path)) as router:
        queue = router.queue("films.a")
        for seed in (1, 2, 3):
            queue.send(io.BytesIO(body(seed=seed)), None, str(seed))
        held = take(router, "films.a")
        stream = held.open()
        start = stream.read(100)
        router.repartition(loads(after, tmp_path))
        assert start + stream.read() == body(seed=1)
        stream.close()
        assert held.read() == body(seed=1)
        held.ack()
        del held, stream
        assert [message.read() for message in queue.browse()] == [body(seed=2), body(seed=3)]
        assert count(router) == 2
    with anabranch.open(loads(after, tmp_path)) as router:
        assert [message.read() for message in router.queue("films.a").browse()] == [body(seed=2), body(seed=3)]
        assert count(router) == 2


def test_a_destination_moves_with_its_bodies_while_nobody_is_there(tmp_path: Path) -> None:
    before = "directory: data\nstores:\n- {name: a, match: ['>'], sql: {large_message_size: 1KiB}}\n"
    after = before + "- {name: b, match: ['films.>'], journal: {large_message_size: 1KiB}}\n"
    with anabranch.open(loads(before, tmp_path)) as router:
        router.queue("films.a").send(io.BytesIO(body()))
        router.queue("films.b").send(io.BytesIO(body(seed=2)))
    with anabranch.open(loads(before, tmp_path)) as router:
        router.repartition(loads(after, tmp_path))
    with anabranch.open(loads(after, tmp_path)) as router:
        assert take(router, "films.a").read() == body()
        assert take(router, "films.b").read() == body(seed=2)
        assert count(router) == 2


def test_a_transaction_goes_on_though_its_destination_has_moved(tmp_path: Path) -> None:
    before = "directory: data\nstores:\n- {name: a, match: ['>'], journal: {large_message_size: 1KiB}}\n"
    after = before + "- {name: b, match: ['films.>'], sql: {large_message_size: 1KiB}}\n"
    with anabranch.open(loads(before, tmp_path)) as router:
        router.queue("films.a").send(b"first")
        transaction = router.transaction()
        transaction.send("films.a", io.BytesIO(body()))
        router.repartition(loads(after, tmp_path))
        transaction.commit()
        del transaction
        assert [message.read() for message in router.queue("films.a").browse()] == [b"first", body()]
        assert count(router) == 1
