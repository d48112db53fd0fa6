"""What is recorded: of each kind of store, of transactions, of what ends messages in other ways than an ack."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

import anabranch
from anabranch.policies.advisor.trace.events import UsageEvent
from anabranch.router.usage.reading import usage_trace

from ..taking import take
from .conftest import config

QUEUES = ("j.a", "s.a", "m.a")


def events(directory: Path) -> list[UsageEvent]:
    trace = usage_trace([directory])
    found = list(trace)
    assert trace.warnings == ()
    assert [event.seq for event in found] == list(range(len(found)))
    assert all(before.ts <= after.ts for before, after in itertools.pairwise(found))
    return found


def lives(found: list[UsageEvent], name: str) -> list[tuple[int | None, int]]:
    """Of each message of a destination, in order: its bytes, and how often it was acked."""
    sent = {event.message_id: event for event in found if event.op == "send" and event.destination.endswith(name)}
    acked = [event.message_id for event in found if event.op == "ack" and event.destination.endswith(name)]
    assert set(acked) <= set(sent)
    return [(event.body_size, acked.count(number)) for number, event in sent.items()]


@pytest.mark.parametrize("name", QUEUES)
def test_sends_and_acks_of_each_kind(tmp_path: Path, name: str) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue(name)
        queue.send(b"123")
        queue.send_many([b"1", b"22", b"4444"])
        queue.send(b"12345", message_id="twice")
        assert queue.send(b"12345", message_id="twice").duplicate
        queue.send_nowait(b"").result()
        for _ in range(2):
            take(queue).ack()
        take(queue).release()
    found = events(tmp_path)
    assert lives(found, name) == [(3, 1), (1, 1), (2, 0), (4, 0), (5 + len("twice"), 0), (0, 0)]
    first = next(event for event in found if event.op == "send")
    assert (first.destination, first.acks_needed, first.tx, first.size) == (f"queue://{name}", 1, None, 3 + 26 + 32)
    assert abs(first.ts - time.time()) < 3600
    assert {event.size for event in found if event.op == "ack"} == {36}


def test_transactions_have_one_name_in_all_stores(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        for name in QUEUES:
            router.queue(name).send(b"old")
        for _ in range(2):
            with router.transaction() as tx:  # over all kinds
                for name in QUEUES:
                    tx.send(name, b"new")
                if message := router.queue("s.a").receive(timeout=0):
                    tx.ack(message)
        with router.transaction() as tx:  # in one store
            tx.send("j.a", b"new")
            tx.send("j.b", b"new")
        with router.transaction() as tx:
            tx.ack(take(router.queue("j.a")))
            tx.ack(take(router.queue("j.b")))
        with router.transaction() as tx:  # of one operation
            tx.send("j.b", b"alone")
        with pytest.raises(ZeroDivisionError), router.transaction() as tx:
            for name in QUEUES:
                tx.send(name, b"never")
            raise ZeroDivisionError
        router.ack([take(router.queue("j.a")), take(router.queue("j.b"))])  # none
    found = [(event.tx, event.destination[8:], event.op) for event in events(tmp_path)]
    named = list(dict.fromkeys(tx for tx, _, _ in found if tx is not None))
    content = [sorted((name, op) for tx, name, op in found if tx == wanted) for wanted in named]
    sends = [("j.a", "send"), ("m.a", "send"), ("s.a", "send")]
    over = sorted([*sends, ("s.a", "ack")])
    assert content == [over, over, [("j.a", "send"), ("j.b", "send")], [("j.a", "ack"), ("j.b", "ack")]]
    assert [row for row in found if row[0] is None][-2:] == [(None, "j.a", "ack"), (None, "j.b", "ack")]


def test_an_external_transaction_counts_once_it_is_committed(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        transaction = router.transaction(anabranch.Xid(1, "global", "branch"))
        transaction.send("j.a", b"x")
        transaction.send("s.a", b"y")
        transaction.prepare()
    with anabranch.open(config(tmp_path)) as router:
        router.queue("m.a").send(b"between")
        router.commit(anabranch.Xid(1, "global", "branch"))
    found = events(tmp_path)
    assert sorted(event.destination for event in found) == ["queue://j.a", "queue://m.a", "queue://s.a"]
    assert len({event.tx for event in found if event.destination != "queue://m.a"}) == 1


def test_topics(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        topic = router.topic("prices")
        topic.send(b"nobody")
        desks = [topic.subscribe(client_id="c", name=name) for name in ("one", "two")]
        topic.send_many([b"1", b"2", b"3"])
        assert take(desks[0]).body == b"1"
        take(desks[0]).ack()
        take(desks[1]).ack()
        desks[1].unsubscribe()
    found = events(tmp_path)
    sent = [event for event in found if event.op == "send"]
    assert [event.acks_needed for event in sent] == [0, 2, 2, 2]
    bodies = {event.message_id: number for number, event in enumerate(sent)}
    acks = [(bodies[event.message_id], event.subscription) for event in found if event.op == "ack"]
    assert acks == [(2, "c:one"), (1, "c:two"), (2, "c:two"), (3, "c:two")]


@pytest.mark.parametrize("name", QUEUES)
def test_what_is_purged_or_deleted_has_ended(tmp_path: Path, name: str) -> None:
    with anabranch.open(config(tmp_path)) as router:
        purged, deleted = router.queue(name), router.queue(f"{name}.b")
        for queue in (purged, deleted):
            queue.send_many([b"1", b"22", b"333"])
        held = take(purged)
        assert purged.purge() == 2
        purged.send(b"4444")
        held.release()
        assert deleted.delete() == 3
        deleted.send(b"4444")
    found = events(tmp_path)
    assert lives(found, name) == [(1, 0), (2, 1), (3, 1), (4, 0)]
    assert lives(found, f"{name}.b") == [(1, 1), (2, 1), (3, 1), (4, 0)]


def test_what_expires_or_is_rejected_has_ended(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        gone, kept = router.queue("s.a"), router.queue("j.a")
        gone.send(b"1", expires_in=0.001)
        kept.send(b"1")
        take(kept).reject("no good")
        while not router.sweep() and gone.depth():
            pass
    found = events(tmp_path)
    assert lives(found, "s.a") == [(1, 1)]
    assert [ended for _, ended in lives(found, "j.a")] == [1]
    assert [ended for _, ended in lives(found, "j.dead")] == [0]
    moved = [event for event in found if event.destination in ("queue://j.a", "queue://j.dead")]
    assert moved[0].tx is None
    assert moved[1].tx == moved[2].tx is not None


def test_what_is_not_persistent_is_in_no_journal(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("j.a")
        queue.send(b"1", persistent=False)
        queue.send(b"22")
        with router.transaction() as tx:
            tx.send("j.a", b"333", persistent=False)
            tx.send("j.a", b"4444")
        for _ in range(4):
            take(queue).ack()
    assert lives(events(tmp_path), "j.a") == [(2, 1), (4, 1)]


def test_a_message_is_the_same_after_a_restart_but_in_memory(tmp_path: Path) -> None:
    for body in (b"1", b"22"):
        with anabranch.open(config(tmp_path)) as router:
            for name in QUEUES:
                router.queue(name).send(body)
            if body == b"22":
                for name in QUEUES[:2]:
                    take(router.queue(name)).ack()
    found = events(tmp_path)
    for name in QUEUES:
        assert lives(found, name) == [(1, 1), (2, 0)]
    (ended,) = (event for event in found if event.destination == "queue://m.a" and event.op == "ack")
    assert ended.size == 0


def test_it_is_switched_while_the_router_runs(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, usage=None)) as router:
        queue = router.queue("j.a")
        queue.send(b"1")
        assert router.usage_stats() is None
        router.start_usage_log()
        queue.send(b"22")
        router.queue("s.a").send(b"22")  # a store that opens meanwhile
        take(queue).ack()
        router.stop_usage_log()
        assert router.usage_stats() is None
        queue.send(b"333")
        router.start_usage_log(anabranch.UsageOptions(destinations=("queue://s.>",)))
        for name in QUEUES:
            router.queue(name).send(b"4444")
        router.start_usage_log(anabranch.UsageOptions(directory=tmp_path / "elsewhere"))
        queue.send(b"55555")
        router.stop_usage_log()
        router.stop_usage_log()
        assert all(store.usage is None for store in router._registry.open_stores())
    found = [(event.op, event.destination[8:], event.body_size) for event in usage_trace([tmp_path])]
    assert found == [("send", "j.a", 2), ("send", "s.a", 2), ("ack", "j.a", None), ("send", "s.a", 4)]
    assert [event.body_size for event in usage_trace([tmp_path / "elsewhere"])] == [5]


def test_a_sample_keeps_messages_whole_and_scales_their_sizes(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, usage={"sample": 0.25})) as router:
        queue = router.queue("j.a")
        for _ in range(20):
            queue.send_many([bytes(1000)] * 50)
        while message := queue.receive(timeout=0):
            message.ack()
    trace = usage_trace([tmp_path])
    found = list(trace)
    sent = {event.message_id for event in found if event.op == "send"}
    assert sent == {event.message_id for event in found if event.op == "ack"}
    assert 150 < len(sent) < 350
    assert trace.warnings == (
        f"0.25 of the messages of {tmp_path / 'usage'} were recorded; sizes are scaled up by that",
    )
    (body,) = {event.body_size for event in found if event.op == "send"}
    assert body is not None
    assert body + 94 == 4 * (1000 + 94)  # with the records of a send and an ack
