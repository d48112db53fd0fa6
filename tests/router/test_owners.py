"""One owner for a data directory (invariant 8): what keeps a router open, and what happens when a lock is deleted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.system import locking
from anabranch.policies.errors import StoreFailedError, StoreLockedError
from anabranch.router.upkeep import dead_letters

from ..children import run_program
from ..taking import take
from .disk import config, contents

HOLDERS: dict[str, Callable[[anabranch.Router], object]] = {
    "queue": lambda router: router.queue("a.x"),
    "queue whose store is open": lambda router: _sent(router),
    "subscription": lambda router: router.topic("a.t").subscribe("s"),
    "topic": lambda router: router.topic("a.t"),
    "message": lambda router: (router.queue("a.x").send(b"1"), router.queue("a.x").receive())[1],
    "message that is not persistent": lambda router: (
        router.queue("a.x").send(b"1", persistent=False),
        router.queue("a.x").receive(),
    )[1],
    "browsing": lambda router: (_sent(router), router.queue("a.x").browse())[1],
    "transaction": lambda router: router.transaction(),
    "connection": lambda router: router.connection(),
    "a method": lambda router: router.queue("a.x").send,
}


def _sent(router: anabranch.Router) -> anabranch.Queue:
    queue = router.queue("a.x")
    queue.send(b"1")
    return queue


def everywhere(directory: Path) -> anabranch.Config:
    """Queues and topics of a."""
    return anabranch.Config(directory, [anabranch.StoreConfig("a", ["a.>", "dead"])])


def open_once_it_can_be(configuration: anabranch.Config, within: float = 30.0) -> anabranch.Router:
    """Open as soon as nothing that the garbage collector can find keeps the directory locked."""
    deadline = time.monotonic() + within
    while True:
        gc.collect()
        try:
            return anabranch.open(configuration)
        except StoreLockedError:
            if time.monotonic() > deadline:
                raise


class TestWhatKeepsARouterOpen:
    @pytest.mark.parametrize("holder", HOLDERS)
    def test_whatever_can_reach_a_store(self, tmp_path: Path, holder: str) -> None:
        held = HOLDERS[holder](anabranch.open(everywhere(tmp_path / "data")))
        gc.collect()
        assert held is not None
        with pytest.raises(StoreLockedError, match="open already, by this process"):
            anabranch.open(everywhere(tmp_path / "data"))
        del held
        open_once_it_can_be(everywhere(tmp_path / "data")).close()

    def test_another_process_cannot_take_what_a_queue_writes_to(self, tmp_path: Path) -> None:
        queue = anabranch.open(everywhere(tmp_path / "data")).queue("a.x")
        gc.collect()
        queue.send(b"1")
        assert "StoreLockedError the router in" in _other_process(tmp_path / "data", "pass")
        queue.send(b"2")
        assert queue.depth() == 2

    def test_dead_letters_move_while_a_queue_is_held(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dead_letters, "SWEEP_SECONDS", 0.01)
        options = anabranch.JournalOptions(dead_letter="dead")
        stores = [anabranch.StoreConfig("a", [">"], journal=options)]
        router = anabranch.open(anabranch.Config(tmp_path / "data", stores))
        queue, dead = router.queue("x"), router.queue("dead")
        del router
        gc.collect()
        queue.send(b"late", expires_in=0.001)
        message = take(dead, 30)
        assert message.body == b"late"

    def test_a_checkpoint_that_is_due_later_keeps_none_open(self, tmp_path: Path) -> None:
        options = anabranch.JournalOptions(checkpoint_interval=3600)
        configuration = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", [">"], journal=options)])
        assert _sent(anabranch.open(configuration)).depth() == 1
        with open_once_it_can_be(configuration) as router:
            assert contents(router, "a.x") == [b"1"]

    def test_what_a_transaction_over_several_stores_leaves_to_do_keeps_none_open(self, tmp_path: Path) -> None:
        router = anabranch.open(config(tmp_path / "data"))
        with router.transaction() as tx:
            tx.send("a.x", b"1")
            tx.send("b.x", b"2")
        del router, tx
        with open_once_it_can_be(config(tmp_path / "data")) as again:
            assert (contents(again, "a.x"), contents(again, "b.x")) == ([b"1"], [b"2"])


def watch_each(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look so often whether the locks are there that are taken from now on."""
    monkeypatch.setattr(locking, "WATCH_SECONDS", seconds)
    monkeypatch.setattr(locking, "_watch", locking._Watch())


KINDS: dict[str, anabranch.StoreConfig] = {
    "journal": anabranch.StoreConfig("a", ["a.>"]),
    "sql": anabranch.StoreConfig("a", ["a.>"], sql={}),
    "memory": anabranch.StoreConfig("a", ["a.>"], memory={}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_with_open_stores_that_nobody_holds_is_let_go_of(tmp_path: Path, kind: str) -> None:
    configuration = anabranch.Config(tmp_path / "data", [KINDS[kind]])
    router = anabranch.open(configuration)
    message = (_sent(router), router.queue("a.x").receive())[1]
    del router
    gc.collect()
    assert message is not None
    message.ack()
    del message
    with open_once_it_can_be(configuration) as again:
        assert contents(again, "a.x") == []


class TestLocksThatAreDeleted:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_store_notices_while_it_is_idle(self, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        watch_each(0.01, monkeypatch)
        directory = tmp_path / "data"
        with anabranch.open(anabranch.Config(directory, [KINDS[kind]])) as router:
            queue = router.queue("a.x")
            queue.send(b"1")
            queue.receive()
            (directory / "stores" / "a" / "store.lock").unlink()
            with pytest.raises(StoreFailedError, match=r"store\.lock was deleted while store 'a' was open"):
                queue.receive(timeout=60)
            with pytest.raises(StoreFailedError, match="before you open it again"):
                queue.send(b"2")
            assert "was deleted" in (router.stats().stores["a"].failed or "")
            router.reopen("a")
            assert contents(router, "a.x") == ([] if kind == "memory" else [b"1"])
            queue.send(b"3")

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_is_prepared_in_a_store_whose_lock_is_anothers(self, tmp_path: Path, kind: str) -> None:
        directory = tmp_path / "data"
        stores = [KINDS[kind], anabranch.StoreConfig("b", ["b.>"])]
        with anabranch.open(anabranch.Config(directory, stores)) as router:
            router.queue("a.x").send(b"1")
            lock = directory / "stores" / "a" / "store.lock"
            lock.unlink()
            lock.write_text("1 elsewhere\n")
            with (
                pytest.raises(StoreFailedError, match=r"store\.lock was replaced by another"),
                router.transaction() as tx,
            ):
                tx.send("a.x", b"2")
                tx.send("b.x", b"2")
            assert contents(router, "b.x") == []
            assert lock.read_text() == "1 elsewhere\n"
        assert lock.read_text() == "1 elsewhere\n"

    def test_no_index_is_written_out_to_another_owner(self, tmp_path: Path) -> None:
        store = tmp_path / "data" / "stores" / "a"
        options = anabranch.JournalOptions(checkpoint_interval=3600)
        configuration = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", ["a.>"], journal=options)])
        with anabranch.open(configuration) as router:
            router.queue("a.x").send(b"1")
            index = (store / "index.mdb").read_bytes()
            (store / "store.lock").unlink()
            router.reclaim()  # nothing is free, and so nothing is written
            with pytest.raises(StoreFailedError, match=r"store\.lock was deleted"):
                router._registry.open_stores()[0].checkpoint()
        assert (store / "index.mdb").read_bytes() == index

    def test_a_second_router_finds_the_decisions_locked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        watch_each(3600, monkeypatch)
        directory = tmp_path / "data"
        with anabranch.open(config(directory)) as router:
            _over_two(router, b"1")
            (directory / "router.lock").unlink()
            other = _other_process(directory, "pass")
            assert "StoreLockedError" in other
            assert "decisions" in other
            transaction = router.transaction(anabranch.Xid(1, "x"))
            transaction.send("a.x", b"2")
            transaction.send("b.x", b"2")
            transaction.prepare()
        with anabranch.open(config(directory)) as router:
            assert router.recover() == [anabranch.Xid(1, "x")]
            router.commit(anabranch.Xid(1, "x"))
            assert (contents(router, "a.x"), contents(router, "b.x")) == ([b"1", b"2"], [b"1", b"2"])

    def test_nothing_is_decided_once_the_lock_of_the_decisions_is_gone(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path / "data")) as router:
            _over_two(router, b"1")
            (tmp_path / "data" / "decisions" / "store.lock").unlink()
            for _ in range(2):
                with pytest.raises(StoreFailedError, match=r"store\.lock was deleted"):
                    _over_two(router, b"2")
            assert (contents(router, "a.x"), contents(router, "b.x")) == ([b"1"], [b"1"])
            assert router.in_doubt() == []
            router.queue("a.x").send(b"3")
            router.reopen_decisions()
            _over_two(router, b"4")
            assert (contents(router, "a.x"), contents(router, "b.x")) == ([b"1", b"3", b"4"], [b"1", b"4"])

    def test_a_router_whose_lock_is_gone_takes_nothing_more(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path / "data")) as router:
            queue = router.queue("a.x")
            queue.send_many([b"1", b"2"])
            message = take(queue)
            (tmp_path / "data" / "router.lock").unlink()
            record = (tmp_path / "data" / "placement.records").read_bytes()
            with pytest.raises(StoreFailedError, match=r"router\.lock was deleted while the router was open"):
                router.queue("a.new").send(b"3")
            for call in (lambda: queue.send(b"3"), queue.receive, router.stats, router.transaction):
                with pytest.raises(StoreFailedError, match="the router has stopped"):
                    call()
            message.ack()  # its store has a lock of its own
            assert (tmp_path / "data" / "placement.records").read_bytes() == record
        with anabranch.open(config(tmp_path / "data")) as router:
            assert contents(router, "a.x") == [b"2"]

    def test_a_disk_that_goes_away_is_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        watch_each(0.01, monkeypatch)
        with anabranch.open(config(tmp_path / "data")) as router:
            queue = router.queue("a.x")
            queue.send(b"1")
            queue.receive()
            (tmp_path / "data").rename(tmp_path / "elsewhere")
            with pytest.raises(StoreFailedError, match="data was deleted or renamed, or its disk went away"):
                queue.receive(timeout=60)


def _over_two(router: anabranch.Router, body: bytes) -> None:
    with router.transaction() as tx:
        tx.send("a.x", body)
        tx.send("b.x", body)


def _other_process(directory: Path, does: str) -> str:
    """What is said by another process that opens the directory."""
    program = f"""
import anabranch, pathlib
from tests.router.disk import config
try:
    with anabranch.open(config(pathlib.Path({str(directory)!r}))) as router:
        {does}
        print("opened")
except anabranch.AnabranchError as error:
    print(type(error).__name__, error)
"""
    code, told = run_program(program)
    assert code == 0, told
    return told
