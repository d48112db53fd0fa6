"""Transactions over several stores, as their users see them (invariants 2, 3, 4; rules X6, T1)."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.wal import log
from anabranch.policies.errors import ClosedError, StoreFullError, TransactionError, UnknownMessageError
from anabranch.router.placement import open_stores as stores_module
from anabranch.router.transactions import decision_cleanup

from ..contract.disk import PATIENCE, Parallel, eventually
from ..router.disk import (
    NEVER,
    OPTIONS,
    SYNCED,
    bodies,
    config,
    drain,
    in_time,
    said_in_a_child,
    take,
    with_time_enough,
)


class TestManyStores:
    def test_sends_and_acks_take_effect_together(self, cross: anabranch.Router) -> None:
        cross.queue("a.in").send_many([b"1", b"2"])
        with cross.transaction() as tx:
            tx.ack(take(cross, "a.in"))
            tx.send("b.out", b"3", {"h": 1}, "id")
            tx.send("c.out", b"4")
            tx.send("each.x", b"5")
            assert bodies(cross, "a.in", "b.out", "c.out", "each.x") == [[b"1", b"2"], [], [], []]
        assert bodies(cross, "a.in", "b.out", "c.out", "each.x") == [[b"2"], [b"3"], [b"4"], [b"5"]]
        message = take(cross, "b.out")
        assert (message.headers, message.message_id) == ({"h": 1}, "id")
        assert cross.in_doubt() == []

    def test_it_is_all_there_after_reopening(self, cross: anabranch.Router) -> None:
        cross.queue("a.in").send_many([b"1", b"2"])
        with cross.transaction() as tx:
            tx.ack(take(cross, "a.in"))
            tx.send("b.out", b"3")
        cross.close()
        with anabranch.open(cross.config) as again:
            assert bodies(again, "a.in", "b.out") == [[b"2"], [b"3"]]
            assert again.in_doubt() == []

    def test_order_is_that_of_commits(self, cross: anabranch.Router) -> None:
        """Rule I2: what a transaction sends is placed when it commits; within it, as it was sent."""
        first, second = cross.transaction(), cross.transaction()
        for number in range(3):
            first.send("a.q", f"first {number}".encode())
            second.send("a.q", f"second {number}".encode())
            first.send("b.q", f"first {number}".encode())
            second.send("b.q", f"second {number}".encode())
        cross.queue("a.q").send(b"plain")
        second.commit()
        cross.queue("b.q").send(b"plain")
        first.commit()
        one, two = ([f"{name} {n}".encode() for n in range(3)] for name in ("first", "second"))
        assert bodies(cross, "a.q", "b.q") == [[b"plain", *two, *one], [*two, b"plain", *one]]

    def test_receipts_are_in_the_order_of_the_sends(self, cross: anabranch.Router) -> None:
        tx = cross.transaction()
        names = ["b.q", "a.q", "each.x", "b.r", "a.q", "each.y"]
        for number, name in enumerate(names):
            tx.send(name, f"{number}".encode())
        receipts = tx.commit()
        assert [receipt.destination.name for receipt in receipts] == names
        for number, receipt in enumerate(receipts):
            assert not receipt.duplicate
            (message,) = cross.queue(receipt.destination.name).browse(limit=1, after=receipt.seq - 1)
            assert (message.seq, message.body) == (receipt.seq, f"{number}".encode())

    def test_duplicates_are_stored_once(self, cross: anabranch.Router) -> None:
        """Invariant 3, in a store's window, and twice in one transaction."""
        known = cross.queue("a.q").send(b"1", None, "id")
        tx = cross.transaction()
        for _ in range(2):
            tx.send("a.q", b"again", None, "id")
            tx.send("b.q", b"new", None, "id")
        a, b, *later = tx.commit()
        assert (a.seq, a.duplicate, b.duplicate) == (known.seq, True, False)
        assert later == [a, b._replace(duplicate=True)]
        assert bodies(cross, "a.q", "b.q") == [[b"1"], [b"new"]]

    def test_a_composite_over_several_stores_is_one_send(self, cross: anabranch.Router) -> None:
        receipts = cross.send("queue://a.q,b.q, each.x,a.q", b"x", {"h": 1}, "id")
        assert [receipt.destination.name for receipt in receipts] == ["a.q", "b.q", "each.x"]
        assert bodies(cross, "a.q", "b.q", "each.x") == [[b"x"]] * 3
        assert all(receipt.duplicate for receipt in cross.send("a.q,b.q,each.x", b"x", None, "id"))
        with pytest.raises(anabranch.NoRouteError):
            cross.send("a.q,nowhere", b"y")
        assert bodies(cross, "a.q") == [[b"x"]]

    def test_empty_and_large_bodies(self, cross: anabranch.Router) -> None:
        large = os.urandom(300_000)  # more than four segments
        with cross.transaction() as tx:
            for name in ("a.q", "b.q"):
                tx.send(name, b"")
                tx.send(name, large)
        cross.close()
        with anabranch.open(cross.config) as again:
            assert bodies(again, "a.q", "b.q") == [[b"", large]] * 2

    @pytest.mark.parametrize("options", [OPTIONS, SYNCED, anabranch.JournalOptions(sync=anabranch.Sync.PERIODIC)])
    def test_stores_of_different_policy(self, tmp_path: Path, options: anabranch.JournalOptions) -> None:
        for sync in (anabranch.Sync.ALWAYS, NEVER):
            with anabranch.open(config(tmp_path / sync.value, OPTIONS, options, sync=sync)) as router:
                for _ in range(3):
                    router.send("a.q,b.q", b"x")
                assert bodies(router, "a.q", "b.q") == [[b"x"] * 3] * 2

    def test_one_store_needs_no_decision_log(self, cross: anabranch.Router) -> None:
        cross.queue("a.q").send(b"1")
        with cross.transaction() as tx:
            tx.ack(take(cross, "a.q"))
            tx.send("a.q", b"2")
            tx.send("a.r", b"3")
        assert not (cross.config.directory / "decisions").exists()
        cross.send("a.q,b.q", b"4")
        assert (cross.config.directory / "decisions").exists()


class TestIsolation:
    """Others see nothing of it before it commits (rule X6)."""

    def test_acked_messages_belong_to_it(self, cross: anabranch.Router) -> None:
        for name in ("a.q", "b.q"):
            cross.queue(name).send_many([b"1", b"2"])
        tx = cross.transaction()
        held = [take(cross, "a.q"), take(cross, "b.q")]
        for message in held:
            tx.ack(message)
        for message in held:
            other = cross.transaction()
            for call in (message.ack, message.release, lambda message=message, other=other: other.ack(message)):
                with pytest.raises(UnknownMessageError):
                    call()
            assert message.body == b"1"
        assert [drain(cross, "a.q"), drain(cross, "b.q")] == [[b"2"], [b"2"]]
        assert [cross.queue(name).purge() for name in ("a.q", "b.q")] == [0, 0]
        with pytest.raises(TransactionError, match="has claimed 1"):
            cross.queue("a.q").delete()
        tx.commit()
        assert bodies(cross, "a.q", "b.q") == [[], []]

    def test_rollback_gives_messages_back_in_order(self, cross: anabranch.Router) -> None:
        """Invariant 2."""
        for name in ("a.q", "b.q"):
            cross.queue(name).send_many([b"1", b"2", b"3", b"4"])
        tx = cross.transaction()
        held = {name: [take(cross, name) for _ in range(4)] for name in ("a.q", "b.q")}
        for name in ("a.q", "b.q"):
            for place in (2, 0):
                tx.ack(held[name][place])
        tx.send("c.q", b"never")
        tx.rollback()
        assert [drain(cross, "a.q"), drain(cross, "b.q")] == [[b"1", b"3"]] * 2
        for name in ("a.q", "b.q"):
            for place in (3, 1):
                held[name][place].release()
        assert [drain(cross, "a.q"), drain(cross, "b.q")] == [[b"2", b"4"]] * 2
        assert bodies(cross, "c.q") == [[]]

    @pytest.mark.parametrize("target", ["a.r", "b.q"])
    def test_an_exception_rolls_back(self, cross: anabranch.Router, target: str) -> None:
        cross.queue("a.q").send(b"1")
        with pytest.raises(ZeroDivisionError), cross.transaction() as tx:
            tx.ack(take(cross, "a.q"))
            tx.send(target, b"2")
            raise ZeroDivisionError
        assert take(cross, "a.q").body == b"1"
        assert bodies(cross, target) == [[]]
        assert tx.state == "rolled back"


class TestIdleStores:
    def test_stores_that_close_for_being_idle(self, cross: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 2)
        cross.queue("each.0").send(b"held")
        for round_ in range(3):
            with cross.transaction() as tx:
                if not round_:
                    tx.ack(take(cross, "each.0"))
                for number in range(1, 6):
                    tx.send(f"each.{number}", f"{round_}".encode())
        assert bodies(cross, *(f"each.{n}" for n in range(6))) == [[], *[[b"0", b"1", b"2"]] * 5]
        assert cross.in_doubt() == []

    def test_prepared_ones_come_back(self, cross: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 2)
        xid = anabranch.Xid(1, "x")
        tx = cross.transaction(xid)
        for number in range(5):
            tx.send(f"each.{number}", b"x")
        tx.prepare()
        for number in range(5, 10):
            cross.queue(f"each.{number}").send(b"y")
        cross.commit(xid)
        assert bodies(cross, *(f"each.{n}" for n in range(5))) == [[b"x"]] * 5


class TestThreads:
    def test_opposite_orders_do_not_deadlock(self, cross: anabranch.Router) -> None:
        """8 threads, each over all stores in another order, acking what the others sent."""
        names = ["a.q", "b.q", "c.q", "each.x"]
        orders = list(itertools.permutations(names))[::3]
        barrier = threading.Barrier(8)
        rounds = 15

        def work(worker: int) -> int:
            acked = 0
            barrier.wait(PATIENCE)
            for number in range(rounds):
                with cross.transaction() as tx:
                    for name in orders[worker]:
                        tx.send(name, f"{worker}.{number}".encode())
                        if number % 3 == 2 and (message := cross.queue(name).receive()) is not None:
                            tx.ack(message)
                            acked += 1
                    if number % 5 == 4:
                        tx.send("each.y", f"{worker}.{number}".encode())
            return acked

        with ThreadPoolExecutor(8) as pool:
            acked = sum(pool.map(work, range(8)))
        assert sum(map(len, bodies(cross, *names))) + acked == 8 * rounds * 4
        for name in names:
            left = [body.decode() for body in drain(cross, name)]
            for worker in range(8):
                mine = [int(text.partition(".")[2]) for text in left if text.startswith(f"{worker}.")]
                assert mine == sorted(mine), "a worker's transactions are in order in each store"
        assert len(drain(cross, "each.y")) == 8 * 3
        assert cross.in_doubt() == []

    def test_two_threads_on_one_transaction(self, cross: anabranch.Router) -> None:
        """They take turns; whatever was done before the commit is in it, what comes later is refused."""
        tx = cross.transaction()
        barrier = threading.Barrier(4)

        def work(name: str) -> int:
            barrier.wait(PATIENCE)
            for number in range(100):
                try:
                    tx.send(name, b"x")
                except TransactionError:
                    return number
                if name == "c.q" and number == 50:
                    tx.commit()
            return 100

        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(work, ["a.q", "b.q", "c.q", "each.x"]))
        assert [len(found) for found in bodies(cross, "a.q", "b.q", "c.q", "each.x")] == done
        assert done[2] == 51


class TestMisuse:
    @pytest.mark.parametrize("names", ["a.q,a.s", "a.q,b.q"])
    def test_it_ends_once(self, cross: anabranch.Router, names: str) -> None:
        cross.queue("a.r").send(b"x")
        message = take(cross, "a.r")
        for end, state in (("commit", "committed"), ("rollback", "rolled back")):
            tx = cross.transaction()
            tx.send(names, b"x")
            getattr(tx, end)()
            assert tx.state == state
            for call in (tx.commit, tx.rollback, partial(tx.send, "a.q", b"x"), partial(tx.ack, message), tx.__enter__):
                with pytest.raises(TransactionError, match=f"this transaction is {state}; begin another"):
                    call()
        assert bodies(cross, *names.split(",")) == [[b"x"], [b"x"]]
        message.ack()

    def test_one_that_is_in_between_says_how_to_go_on(self, cross: anabranch.Router) -> None:
        tx = cross.transaction(anabranch.Xid(1, "a", "b"))
        tx.send("a.q,b.q", b"x")
        assert repr(tx) == "<Transaction 1:a:b, open, 2 operations>"
        tx.prepare()
        assert repr(tx) == "<Transaction 1:a:b, prepared, 2 operations>"
        with pytest.raises(TransactionError, match=r"is prepared; say its outcome with router.commit\(xid\)"):
            tx.commit()
        cross.commit(anabranch.Xid(1, "a", "b"))
        tx = cross.transaction()
        tx.send("a.q,b.q", b"y")
        tx.vote()
        with pytest.raises(TransactionError, match="has voted; commit it or roll it back"):
            tx.send("a.q", b"z")
        tx.commit()
        assert bodies(cross, "a.q", "b.q") == [[b"x", b"y"], [b"x", b"y"]]

    def test_it_is_not_entered_twice(self, cross: anabranch.Router) -> None:
        """The inner block would commit what the outer one is not done with."""
        with pytest.raises(TransactionError, match="is entered already"), cross.transaction() as tx:
            tx.send("a.q", b"x")
            tx.send("b.q", b"x")
            with tx:
                pass
        assert bodies(cross, "a.q", "b.q") == [[], []]

    def test_a_block_may_end_it_itself(self, cross: anabranch.Router) -> None:
        with cross.transaction() as tx:
            tx.send("a.q,b.q", b"1")
            tx.commit()
        with cross.transaction() as tx:
            tx.send("a.q,b.q", b"2")
            tx.rollback()
        assert bodies(cross, "a.q", "b.q") == [[b"1"], [b"1"]]

    def test_what_is_refused_leaves_it_as_it_was(self, cross: anabranch.Router) -> None:
        with cross.transaction() as tx:
            tx.send("a.q", b"x")
            with pytest.raises(anabranch.NoRouteError):
                tx.send("b.q,nowhere", b"y")
            with pytest.raises(TypeError):
                tx.send("b.q", "text")  # type: ignore[call-overload]
            with pytest.raises(TypeError):
                tx.ack("text")  # type: ignore[arg-type]
        assert bodies(cross, "a.q", "b.q") == [[b"x"], []]

    def test_a_message_of_another_router(self, cross: anabranch.Router, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path / "other")) as other:
            other.queue("a.q").send(b"x")
            message = take(other, "a.q")
            with cross.transaction() as tx:
                tx.send("a.q,b.q", b"y")
                with pytest.raises(UnknownMessageError, match="another router"):
                    tx.ack(message)
            message.ack()
        assert bodies(cross, "a.q", "b.q") == [[b"y"], [b"y"]]

    def test_a_message_received_before_its_store_was_reopened(self, cross: anabranch.Router) -> None:
        """Its lease went with the store; others may have it."""
        for name in ("a.q", "b.q"):
            cross.queue(name).send(b"x")
        stale = take(cross, "a.q")
        cross.reopen("a")
        with cross.transaction() as tx:
            tx.ack(take(cross, "b.q"))
            with pytest.raises(ClosedError):
                tx.ack(stale)
        with cross.transaction() as tx:
            tx.send("b.q", b"y")
            tx.ack(take(cross, "a.q"))
        assert bodies(cross, "a.q", "b.q") == [[], [b"y"]]

    def test_a_store_that_is_reopened_meanwhile(self, cross: anabranch.Router) -> None:
        """Sends do not mind. Acks are lost with their leases: it is rolled back, and their messages are there."""
        for name in ("a.q", "b.q"):
            cross.queue(name).send_many([b"1", b"2"])
        sending = cross.transaction()
        sending.send("a.r,b.r", b"x")
        acking = cross.transaction()
        for name in ("a.q", "b.q"):
            acking.ack(take(cross, name))
        cross.reopen("a")
        message = take(cross, "a.q")
        for _ in range(2):  # each time it is asked
            with pytest.raises(TransactionError, match="was reopened since"):
                acking.ack(message)
        with pytest.raises(ClosedError):
            acking.commit()
        sending.ack(message)  # of the store as it is open now
        sending.commit()
        assert [drain(cross, "a.q"), drain(cross, "b.q")] == [[b"2"], [b"1", b"2"]]
        assert bodies(cross, "a.r", "b.r") == [[b"x"], [b"x"]]

    def test_a_closed_router(self, cross: anabranch.Router) -> None:
        for name in ("a.q", "b.q"):
            cross.queue(name).send(b"1")
        tx = cross.transaction()
        tx.ack(take(cross, "a.q"))
        tx.send("b.q", b"2")
        idle = cross.transaction()
        cross.close()
        with pytest.raises(ClosedError):
            tx.commit()
        idle.rollback()
        with anabranch.open(cross.config) as again:
            assert bodies(again, "a.q", "b.q") == [[b"1"], [b"1"]]
            assert take(again, "a.q").body == b"1"

    def test_a_forked_child_ends_nothing(self, cross: anabranch.Router) -> None:
        """Rule D4: neither commits, nor makes a file, nor frees what the parent's transaction holds."""
        cross.queue("a.q").send(b"1")
        one, two = cross.transaction(), cross.transaction()
        one.send("a.r", b"x")
        two.ack(take(cross, "a.q"))
        two.send("b.r", b"x")
        calls = (one.commit, two.commit, cross.transaction, lambda: cross.commit(anabranch.Xid(1, "x")))
        assert said_in_a_child(*calls) == ["ClosedError"] * 4
        assert not (cross.config.directory / "decisions").exists()
        assert cross.queue("a.q").receive() is None
        one.commit()
        two.commit()
        assert bodies(cross, "a.q", "a.r", "b.r") == [[], [b"x"], [b"x"]]


class TestLimits:
    def test_operations_and_bytes(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, max_operations=4, max_bytes=10)) as router:
            router.queue("a.q").send(b"x")
            message = take(router, "a.q")
            with router.transaction() as tx:
                tx.send("a.q,b.q", b"12345")
                with pytest.raises(TransactionError, match=r"11 bytes of messages; transactions\.max_bytes is 10"):
                    tx.send("c.q", b"1")
                tx.send("c.q", b"")
                tx.ack(message)
                with pytest.raises(TransactionError, match=r"5 operations; transactions\.max_operations is 4"):
                    tx.send("c.q", b"")
            assert bodies(router, "a.q", "b.q", "c.q") == [[b"12345"], [b"12345"], [b""]]

    def test_open_ones_prepared_ones_included(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, max_open=3)) as router:
            for number in range(2):
                held = router.transaction(anabranch.Xid(1, f"{number}"))
                held.send("a.q,b.q", b"x")
                held.prepare()
            last = router.transaction()
            for _ in range(2):
                with pytest.raises(TransactionError, match=r"1 transactions are open and 2 prepared; .*max_open is 3"):
                    router.transaction()
            with pytest.raises(TransactionError, match="max_open"):
                router.send("a.q,b.q", b"x")
            router.rollback(anabranch.Xid(1, "0"))
            router.transaction().rollback()
            router.transaction()
            with pytest.raises(TransactionError, match="max_open"):
                router.transaction(anabranch.Xid(1, "2"))
            last.rollback()
        with anabranch.open(config(tmp_path, max_open=1)) as router:
            with pytest.raises(TransactionError, match="0 transactions are open and 1 prepared"):
                router.transaction()
            router.commit(anabranch.Xid(1, "1"))
            router.send("a.q,b.q", b"y")
            assert bodies(router, "a.q", "b.q") == [[b"x", b"y"]] * 2

    def test_a_timeout_gives_back_what_it_held(self, tmp_path: Path) -> None:
        def test(seconds: float, path: Path) -> None:
            with anabranch.open(config(path, timeout=seconds)) as router:
                for name in ("a.q", "b.q"):
                    router.queue(name).send_many([b"1", b"2"])
                abandoned = router.transaction()
                with (
                    pytest.raises(TransactionError, match=rf"timed out after {seconds:g} s and rolled back"),
                    router.transaction() as tx,
                ):
                    with in_time():
                        for name in ("a.q", "b.q"):
                            abandoned.ack(take(router, name))
                            tx.ack(take(router, name))
                        tx.send("c.q", b"x")
                    eventually(lambda: tx.state.startswith("timed out"))
                eventually(lambda: abandoned.state.startswith("timed out"))
                for call in (tx.commit, tx.rollback, lambda: tx.send("a.q", b"x"), abandoned.commit):
                    with pytest.raises(TransactionError, match="timed out"):
                        call()
                assert [drain(router, "a.q"), drain(router, "b.q")] == [[b"1", b"2"]] * 2
                assert bodies(router, "c.q") == [[]]

        with_time_enough(test, 0.2, tmp_path)

    def test_a_timeout_hides_no_error_of_the_block(self, tmp_path: Path) -> None:
        def test(seconds: float, path: Path) -> None:
            with anabranch.open(config(path, timeout=seconds)) as router:
                with pytest.raises(ZeroDivisionError), router.transaction() as tx:
                    eventually(lambda: tx.state.startswith("timed out"))
                    raise ZeroDivisionError
                prepared = router.transaction(anabranch.Xid(1, "x"))
                with in_time():
                    prepared.send("a.q,b.q", b"x")
                    prepared.prepare()
                later = router.transaction()
                eventually(lambda: later.state.startswith("timed out"))
                assert router.recover() == [anabranch.Xid(1, "x")]  # a prepared one waits for its manager alone

        with_time_enough(test, 0.05, tmp_path)

    def test_a_full_participant(self, tmp_path: Path) -> None:
        """Rule T1: room is reserved in all stores before anything is prepared in one."""
        limited = anabranch.JournalOptions(segment_size=64 * 1024, sync=NEVER, max_messages=2)
        with anabranch.open(config(tmp_path, b=limited)) as router:
            for name in ("a.q", "b.q"):
                router.queue(name).send_many([b"1", b"2"])
            for _ in range(2):
                tx = router.transaction()
                tx.ack(take(router, "a.q"))
                tx.send("a.r,b.q,c.q", b"x")
                with pytest.raises(StoreFullError, match=r"'b'.*max_messages is 2"):
                    tx.commit()
                assert tx.state == "rolled back"
            assert bodies(router, "a.r", "b.q", "c.q") == [[], [b"1", b"2"], []]
            assert take(router, "a.q").body == b"1"
            assert router.in_doubt() == []
            take(router, "b.q").ack()
            router.send("b.q,c.q", b"x")
            with pytest.raises(StoreFullError):
                router.send("b.q,c.q", b"y")

    def test_room_in_a_full_store_is_given_once(self, tmp_path: Path) -> None:
        """8 threads want the last 5 places of one store."""
        limited = anabranch.JournalOptions(segment_size=64 * 1024, sync=NEVER, max_messages=5)
        with anabranch.open(config(tmp_path, b=limited)) as router:

            def work(number: int) -> bool:
                try:
                    router.send("a.q,b.q", f"{number}".encode())
                except StoreFullError:
                    return False
                return True

            with ThreadPoolExecutor(8) as pool:
                done = list(pool.map(work, range(24)))
            assert sum(done) == 5
            a, b = bodies(router, "a.q", "b.q")
            assert sorted(a) == sorted(b) == sorted(f"{n}".encode() for n, ok in enumerate(done) if ok)


class TestSyncs:
    """What a transaction costs, read from stats()."""

    @pytest.fixture(autouse=True)
    def nothing_in_the_background(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(log, "IDLE_SECONDS", 3600)
        monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 3600)

    def counts(self, router: anabranch.Router) -> list[int]:
        stats = router.stats()
        return [*(stats.stores[name].syncs for name in "abc"), stats.decision_syncs]

    def cost(self, router: anabranch.Router, *names: str) -> list[int]:
        before = self.counts(router)
        with router.transaction() as tx:
            for name in names:
                tx.send(name, b"x")
        return [now - then for then, now in zip(before, self.counts(router), strict=True)]

    def open(self, path: Path, options: anabranch.JournalOptions, sync: anabranch.Sync) -> anabranch.Router:
        router = anabranch.open(config(path, options, sync=sync))
        router.send("a.q,b.q,c.q", b"warm")  # the decision log is made, and its epoch begun
        return router

    @pytest.mark.parametrize("options", [SYNCED, OPTIONS], ids=["always", "never"])
    def test_two_latencies_whatever_the_number_of_stores(
        self, tmp_path: Path, options: anabranch.JournalOptions
    ) -> None:
        with self.open(tmp_path, options, anabranch.Sync.ALWAYS) as router:
            assert self.cost(router, "a.q", "a.r") == [int(options is SYNCED), 0, 0, 0]
            assert self.cost(router, "a.q", "b.q", "b.r") == [1, 1, 0, 1]
            assert self.cost(router, "c.q", "b.q", "a.q") == [1, 1, 1, 1]

    def test_prepares_wait_for_the_disk_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each store's sync of the prepare ends only when the others' have begun."""
        real, meeting = os.fdatasync, threading.Barrier(3)

        def fdatasync(fd: int) -> None:
            if "/stores/" in str(Path(f"/proc/self/fd/{fd}").readlink()) and not met.is_set():
                meeting.wait(PATIENCE)
            real(fd)

        met = threading.Event()
        met.set()
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        with self.open(tmp_path, OPTIONS, anabranch.Sync.ALWAYS) as router:
            met.clear()
            with Parallel(lambda: router.send("a.q,b.q,c.q", b"x")) as sending:
                sending.result()
            met.set()
            assert bodies(router, "a.q", "b.q", "c.q") == [[b"warm", b"x"]] * 3

    def test_none_if_nothing_asks_for_it(self, tmp_path: Path) -> None:
        with self.open(tmp_path, OPTIONS, NEVER) as router:
            assert self.cost(router, "a.q", "b.q", "c.q") == [0, 0, 0, 0]


def test_an_interrupted_rollback_to_a_savepoint_ends_the_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives back what was released before the savepoint, too, and its place among those that are open."""
    with anabranch.open(tmp_path / "data") as router:
        queue = router.queue("q")
        queue.send_many([b"1", b"2"])
        transaction = router.transaction()
        transaction.release(queue.receive(timeout=0) or pytest.fail("it was sent"))
        savepoint = transaction.savepoint()
        transaction.ack(queue.receive(timeout=0) or pytest.fail("it was sent"))
        unclaim, calls = Store.unclaim, []

        def struck(*arguments: Any, **options: Any) -> None:
            calls.append(arguments)
            if len(calls) == 1:
                raise KeyboardInterrupt
            unclaim(*arguments, **options)

        monkeypatch.setattr(Store, "unclaim", struck)
        with pytest.raises(KeyboardInterrupt):
            savepoint.rollback()
        assert sorted(message.body for message in queue.receive_many(2)) == [b"1", b"2"]
        assert not router._coordinator.table.begun
