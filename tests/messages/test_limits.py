"""Limits through the router: transactions over several full stores, moves, dead letters."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import anabranch
from anabranch import Config, LimitOptions, MemoryOptions, StoreConfig, Sync, WhenFull

from ..contract.disk import PATIENCE, Parallel, eventually
from ..contract.features import limits_of
from ..taking import take

LONG = 1000.0


def two(tmp_path: Path, when_full: WhenFull = WhenFull.BLOCK, **options: float) -> Config:
    """A store for a.>, one for b.>, each full with two messages."""
    if when_full is WhenFull.BLOCK:
        options = {"block_timeout": LONG, **options}
    journal = {"max_messages": 2, "when_full": when_full, "sync": Sync.NEVER, "segment_size": 64 * 1024, **options}
    return Config(
        tmp_path / "data",
        [StoreConfig("one", ["a.>"], journal=journal), StoreConfig("two", ["b.>"], journal=journal)],
    )


def waiting(router: anabranch.Router) -> int:
    return sum(len(limits_of(store)._line) for store in router._registry.open_stores())


def test_a_transaction_over_two_stores_waits_for_room_in_both(tmp_path: Path) -> None:
    with anabranch.open(two(tmp_path)) as router:
        one, other = router.queue("a.x"), router.queue("b.x")
        for queue in (one, other):
            queue.send_many([b"1", b"2"])

        def commit() -> list[anabranch.Receipt]:
            with router.transaction() as transaction:
                transaction.send("a.x", b"3")
                transaction.send("b.x", b"3")
            return transaction.receipts

        with Parallel(commit) as committing:
            eventually(lambda: waiting(router) == 1)
            one.receive().ack()  # type: ignore[union-attr]
            eventually(lambda: [queue.depth() for queue in (one, other)] == [1, 2])
            one.send(b"between")  # nothing is reserved there while it waits for the other
            other.receive().ack()  # type: ignore[union-attr]
            one.receive().ack()  # type: ignore[union-attr]
            assert len(committing.result()) == 2
        assert [message.body for message in one.browse()] == [b"between", b"3"]
        assert [message.body for message in other.browse()] == [b"2", b"3"]


def test_transactions_that_wait_for_each_others_stores_get_through_once_one_does(tmp_path: Path) -> None:
    """Each would move a message from one full store to the other: neither holds room that the other one waits for."""
    with anabranch.open(two(tmp_path)) as router:
        one, other = router.queue("a.x"), router.queue("b.x")
        for queue in (one, other):
            queue.send_many([b"1", b"2"])

        def move(source: anabranch.Queue, target: anabranch.Queue) -> None:
            with router.transaction() as transaction:
                message = take(source)
                transaction.ack(message)
                transaction.send(target.destination.name, b"moved")

        with Parallel(lambda: move(one, other)) as there, Parallel(lambda: move(other, one)) as back:
            eventually(lambda: waiting(router) == 2)
            one.receive().ack()  # type: ignore[union-attr]
            there.result()
            back.result()
        assert [message.body for message in one.browse()] == [b"moved"]
        assert [message.body for message in other.browse()] == [b"2", b"moved"]


def test_one_that_finds_no_room_in_time_is_rolled_back(tmp_path: Path) -> None:
    with anabranch.open(two(tmp_path, block_timeout=0.05)) as router:
        one, other = router.queue("a.x"), router.queue("b.x")
        one.send(b"1")
        other.send_many([b"1", b"2"])
        message = one.receive()
        transaction = router.transaction()
        transaction.ack(message)  # type: ignore[arg-type]
        transaction.send("a.x", b"2")
        transaction.send("b.x", b"3")
        with pytest.raises(anabranch.StoreFullError, match="no room came in time"):
            transaction.commit()
        assert (one.depth(), other.depth()) == (1, 2)
        one.send(b"3")  # what it had reserved is free
        assert [message.body for message in one.browse()] == [b"1", b"3"]


def test_receipts_of_a_transaction_over_two_stores_say_what_was_dropped(tmp_path: Path) -> None:
    with anabranch.open(two(tmp_path, when_full=WhenFull.DROP_NEW)) as router:
        router.queue("b.x").send_many([b"1"])
        with router.transaction() as transaction:
            for name in ("a.x", "b.x", "b.x", "a.y"):
                transaction.send(name, b"2")
        assert [receipt.dropped for receipt in transaction.receipts] == [False, False, True, False]
        assert router.stats().stores["two"].dropped == 1


def test_a_ring_over_two_stores(tmp_path: Path) -> None:
    with anabranch.open(two(tmp_path, when_full=WhenFull.DROP_OLD)) as router:
        for number in range(5):
            with router.transaction() as transaction:
                transaction.send("a.x", b"%d" % number)
                transaction.send("b.x", b"%d" % number)
        for name in ("a.x", "b.x"):
            assert [message.body for message in router.queue(name).browse()] == [b"3", b"4"]
        with pytest.raises(ValueError, match="stop"), router.transaction() as transaction:
            transaction.send("a.x", b"5")
            raise ValueError("stop")
        assert router.queue("a.x").depth() == 2


def test_closing_the_router_wakes_who_waits(tmp_path: Path) -> None:
    router = anabranch.open(two(tmp_path))
    router.queue("a.x").send_many([b"1", b"2"])
    with Parallel(lambda: router.queue("a.x").send(b"3")) as sender:
        eventually(lambda: waiting(router))
        router.close()
        with pytest.raises(anabranch.ClosedError):
            sender.result()


@pytest.mark.parametrize("nowait", [False, True])
def test_who_waits_goes_on_in_the_store_that_its_destination_has_moved_to(tmp_path: Path, nowait: bool) -> None:
    limits = [LimitOptions(match=("a.x",), max_messages=1)]
    before = {"limits": limits, "when_full": WhenFull.BLOCK, "block_timeout": LONG, "sync": Sync.NEVER}
    stores = [StoreConfig("one", ["a.>"], journal=before)]
    moved = [*stores, StoreConfig("new", ["a.x"], journal={"sync": Sync.NEVER})]
    with anabranch.open(Config(tmp_path / "data", stores)) as router:
        queue = router.queue("a.x")
        queue.send(b"1")
        with Parallel(lambda: queue.send_nowait(b"2").result(PATIENCE) if nowait else queue.send(b"2")) as sender:
            eventually(lambda: waiting(router) == 1)
            router.repartition(Config(tmp_path / "data", moved))
            sender.result()
        assert [message.body for message in queue.browse()] == [b"1", b"2"]
        assert router.stats().stores["new"].messages == 2


def test_dead_letters_do_not_hold_up_the_sweeper(tmp_path: Path) -> None:
    """Their queue is full, and waits: they wait where they are, and others are dead-lettered."""
    options = MemoryOptions(dead_letter="dlq.{name}", max_deliveries=1, when_full=WhenFull.BLOCK, block_timeout=LONG,
                            limits=(LimitOptions(match=("dlq.a",), max_messages=1),))  # fmt: skip
    with anabranch.open(Config(tmp_path / "data", [StoreConfig("all", [">"], memory=options)])) as router:
        for name in ("a", "a", "b"):
            router.queue(name).send(b"x")
            router.queue(name).receive().release()  # type: ignore[union-attr]
        router._sweeper.run()
        assert router.queue("dlq.b").depth() == 1
        assert (router.queue("a").depth(), router.queue("dlq.a").depth()) == (1, 1)
        router.queue("dlq.a").receive().ack()  # type: ignore[union-attr]
        router._sweeper.run()
        assert (router.queue("a").depth(), router.queue("dlq.a").depth()) == (0, 1)


def test_a_consumer_that_acks_in_its_thread_is_told_in_time(tmp_path: Path) -> None:
    with anabranch.open(two(tmp_path, block_timeout=0.05)) as router:
        queue = router.queue("a.x")
        queue.send_many([b"1", b"2"])
        message = queue.receive()
        with pytest.raises(anabranch.StoreFullError):
            queue.send(b"3")  # nobody else acks
        assert message is not None
        with router.transaction() as transaction:
            transaction.ack(message)
            transaction.send("a.x", b"3")
        assert [message.body for message in queue.browse()] == [b"2", b"3"]


def test_producers_and_consumers_of_a_store_that_is_always_full(tmp_path: Path) -> None:
    with anabranch.open(two(tmp_path)) as router:
        queue = router.queue("a.x")
        found: list[bytes] = []

        def consume() -> None:
            for _ in range(50):
                message = take(queue, PATIENCE)
                found.append(message.body)
                message.ack()

        def produce(name: int) -> None:
            for number in range(25):
                queue.send(b"%d %d" % (name, number))

        threads = [threading.Thread(target=consume) for _ in range(2)]
        threads += [threading.Thread(target=produce, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(found) == len(set(found)) == 100


@pytest.mark.parametrize("frees", ["the transaction", "the disk"])
def test_two_stores_on_one_disk_do_not_take_the_same_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frees: str
) -> None:
    free = [1000 * 1024]
    monkeypatch.setattr("anabranch.adapters.system.volumes._volumes", {})
    monkeypatch.setattr("anabranch.adapters.system.volumes.KNOWN_SECONDS", 0.0)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=free[0], f_frsize=1))
    with anabranch.open(two(tmp_path, min_free_disk=900 * 1024, max_messages=100)) as router:
        body = b"x" * 60 * 1024
        transaction = router.transaction()
        transaction.send("a.x", body)
        transaction.vote()  # it has room for it until it is over
        with Parallel(lambda: router.queue("b.x").send(body)) as sender:
            eventually(lambda: waiting(router) == 1)
            if frees == "the disk":
                free[0] += 60 * 1024  # which tells nobody
            else:
                transaction.rollback()
            sender.result()
        if frees == "the disk":
            transaction.commit()
        free[0] = 0
        message = take(router.queue("b.x"))
        with router.transaction() as transaction:  # what makes a store hold no more goes on
            transaction.ack(message)
            transaction.send("b.x", body)
        router.queue("b.x").receive().ack()  # type: ignore[union-attr]


@pytest.mark.parametrize("when_full", [WhenFull.DROP_OLD, WhenFull.DROP_NEW, WhenFull.FAIL])
def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_full: WhenFull) -> None:
    free = [1000 * 1024]
    monkeypatch.setattr("anabranch.adapters.system.volumes._volumes", {})
    monkeypatch.setattr("anabranch.adapters.system.volumes.KNOWN_SECONDS", 0.0)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=free[0], f_frsize=1))
    with anabranch.open(two(tmp_path, when_full, min_free_disk=900 * 1024, max_messages=100)) as router:
        queue = router.queue("a.x")
        queue.send_many([b"1" * 100, b"2" * 100, b"3" * 100])
        free[0] = 0
        if when_full is WhenFull.FAIL:
            with pytest.raises(anabranch.StoreFullError, match=r"are free on the disk of .*min_free_disk is 921600"):
                queue.send(b"4" * 100)
        else:
            assert queue.send(b"4" * 100).dropped is (when_full is WhenFull.DROP_NEW)
        first, last = (b"2", b"4") if when_full is WhenFull.DROP_OLD else (b"1", b"3")
        bodies = [message.body[:1] for message in queue.browse()]
        assert (bodies[0], bodies[-1]) == (first, last)
