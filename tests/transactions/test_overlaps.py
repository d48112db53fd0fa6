"""What happens in the middle of a transaction: the router is closed, or opened again; the decision log is read again; a
signal handler commits; another store takes its time (invariants 4 and 7, rules G3, I3, T2, T3, T5)."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.wal import log
from anabranch.policies.errors import StoreFailedError, TransactionError, TransactionInDoubt
from anabranch.router.transactions import decision_cleanup, resolver
from anabranch.router.transactions.global_transaction import GlobalTransaction
from anabranch.router.transactions.states import IN_DOUBT

from ..contract.disk import Parallel, eventually
from ..router.disk import Faults, bodies, config, take

XID = anabranch.Xid(1, "global", "branch")
SOON = 120.0


@pytest.fixture
def synced(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> anabranch.Config:
    """Prepares and decisions wait for the disk, nothing else happens in between. Use after `faults`."""
    monkeypatch.setattr(resolver, "RETRY_SECONDS", 3600)
    monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 3600)
    monkeypatch.setattr(log, "IDLE_SECONDS", 3600)
    return config(tmp_path / "data", sync=anabranch.Sync.ALWAYS)


class TestClosed:
    @pytest.mark.parametrize("xid", [None, XID])
    def test_and_opened_again_between_prepare_and_decision(
        self, tmp_path: Path, xid: anabranch.Xid | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was prepared before is rolled back when the stores open: a decision that comes later finds nothing to
        commit, and must not be told as one."""
        prepared, go_on = threading.Event(), threading.Event()
        raised: list[BaseException] = []
        with anabranch.open(config(tmp_path / "data")) as router:
            router.send("a.x,b.x", b"before")
            prepare = router._coordinator._prepare

            def slow(*arguments: Any) -> None:
                prepare(*arguments)
                prepared.set()
                assert go_on.wait(SOON)

            monkeypatch.setattr(router._coordinator, "_prepare", slow)

            def run() -> None:
                tx = router.transaction(xid)
                tx.send("a.x,b.x", b"late")
                try:
                    tx.prepare() if xid else tx.commit()
                except StoreFailedError as error:
                    raised.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            assert prepared.wait(SOON)
            router.close()
            router.open()
            assert bodies(router, "a.x", "b.x") == [[b"before"], [b"before"]]
            go_on.set()
            thread.join(SOON)
            assert len(raised) == 1
            assert router.recover() == []
            assert bodies(router, "a.x", "b.x") == [[b"before"], [b"before"]]

    def test_who_was_about_to_begin_makes_no_log(self, tmp_path: Path) -> None:
        """The directory may be another router's by then: two of them in one log would write over each other."""
        router = anabranch.open(config(tmp_path / "data"))
        router.close()
        with pytest.raises(StoreFailedError, match="closed"):
            router._coordinator.log.new_transaction()
        assert not (tmp_path / "data" / "decisions").exists()
        with anabranch.open(config(tmp_path / "data")) as other:
            other.send("a.x,b.x", b"other")
            with pytest.raises(StoreFailedError, match="closed"):
                router._coordinator.log.new_transaction()
            assert router._coordinator.log.id == b""


class Hooked(dict[bytes, Any]):
    """A table in which the first look is followed by something."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def __contains__(self, key: object) -> bool:
        self._look()
        return False

    def __len__(self) -> int:
        self._look()
        return 0

    def get(self, key: object, default: object = None) -> Any:
        self._look()
        return default

    def _look(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


class TestReadAgain:
    def test_what_is_held_stays_held(self, cross: anabranch.Router) -> None:
        """Who looks a transaction up while the log is half read, and goes on once it is whole, has seen in neither that
        it is held."""
        tx = cross.transaction(XID)
        tx.send("a.x,b.x", b"held")
        tx.prepare()
        decisions = cross._coordinator.log
        decisions.damage = StoreFailedError("it is being read")
        decisions.externals = Hooked(cross.reopen_decisions)
        for store in cross._registry.open_stores():
            cross._coordinator.resolver.recover(store)
        cross.commit(XID)
        assert bodies(cross, "a.x", "b.x") == [[b"held"], [b"held"]]

    def test_what_was_looked_up_before_counts_for_nothing(self, cross: anabranch.Router) -> None:
        tx = cross.transaction(XID)
        tx.send("a.x,b.x", b"held")
        tx.prepare()
        cross._coordinator.log.externals = Hooked(cross.reopen_decisions)
        for store in cross._registry.open_stores():
            cross._coordinator.resolver.recover(store)
        cross.commit(XID)
        assert bodies(cross, "a.x", "b.x") == [[b"held"], [b"held"]]

    def test_nobody_is_rolled_back_before_it_is_read(self, synced: anabranch.Config, faults: Faults) -> None:
        """The decision is on disk, though its log has failed; between closing that and reading it again nothing says
        that there is one."""
        with anabranch.open(synced) as router:
            router.send("a.x,b.x", b"1")
            faults.fail("fdatasync", "/decisions/")
            with pytest.raises(TransactionInDoubt):
                router.send("a.x,b.x", b"2")
            faults.mend()
            router._coordinator.log.close()
            for store in router._registry.open_stores():
                router._coordinator.resolver.recover(store)
            router.reopen_decisions()
            assert bodies(router, "a.x", "b.x") == [[b"1", b"2"], [b"1", b"2"]]

    def test_by_threads(self, cross: anabranch.Router) -> None:
        """Again and again, while others begin, commit and settle."""
        for number in range(3):
            tx = cross.transaction(anabranch.Xid(1, f"held {number}"))
            tx.send("a.held,b.held", b"%d" % number)
            tx.prepare()
        stop, sent = threading.Event(), [0, 0]

        def send(worker: int) -> None:
            while not stop.is_set():
                try:
                    cross.send("a.x,b.x", b"")
                    sent[worker] += 1
                except StoreFailedError:
                    stop.wait(0.001)

        def settle() -> None:
            while not stop.is_set():
                for store in cross._registry.open_stores():
                    cross._coordinator.resolver.recover(store)

        with Parallel(partial(send, 0)) as first, Parallel(partial(send, 1)) as second, Parallel(settle) as third:
            for _ in range(100):
                cross.reopen_decisions()
            stop.set()
            for thread in first, second, third:
                thread.result()
        eventually(lambda: all(waiting.xid for waiting in cross.in_doubt()))
        for xid in cross.recover():
            cross.commit(xid)
        held = [b"0", b"1", b"2"]
        assert bodies(cross, "a.held", "b.held", "a.x", "b.x") == [held, held, [b""] * sum(sent), [b""] * sum(sent)]


class TestSignalHandlers:
    @pytest.mark.parametrize("interrupted", ["/stores/a/", "/stores/b/", "/decisions/"])
    def test_one_that_commits(self, synced: anabranch.Config, faults: Faults, interrupted: str) -> None:
        """It interrupts its own thread in the write of a store or of the log, which both would wait for: it is refused
        (rule G3), and leaves nothing prepared nor claimed."""
        with anabranch.open(synced) as router:
            router.send("a.x,b.x", b"before")
            for name in ("a.in", "b.in"):
                router.queue(name).send(b"in")
            tx = router.transaction()
            tx.ack(take(router, "a.in"))
            tx.ack(take(router, "b.in"))
            tx.send("a.x,b.x", b"handler")
            refused: list[BaseException] = []

            def handle(*_: object) -> None:
                try:
                    tx.commit()
                except RuntimeError as error:
                    refused.append(error)

            before = signal.signal(signal.SIGUSR1, handle)
            try:
                faults.before("pwrite", interrupted, lambda: signal.raise_signal(signal.SIGUSR1))
                router.send("a.x,b.x" if "decisions" in interrupted else f"{interrupted.split('/')[2]}.y", b"main")
            finally:
                signal.signal(signal.SIGUSR1, before)
            assert len(refused) == 1
            assert tx.state == "rolled back"
            eventually(lambda: not any(store.leased for store in router.stats().stores.values()))
            assert router.in_doubt() == []
            assert bodies(router, "a.in", "b.in") == [[b"in"], [b"in"]]
            assert all(b"handler" not in found for found in bodies(router, "a.x", "b.x"))

    def test_one_that_sends_while_its_thread_begins_a_transaction(self, cross: anabranch.Router) -> None:
        cross.send("a.x,b.x", b"before")
        before = signal.signal(signal.SIGUSR1, lambda *_: cross.send("a.x,b.x", b"handler"))
        try:
            cross._coordinator.log.externals = Hooked(lambda: signal.raise_signal(signal.SIGUSR1))
            cross.send("a.x,b.x", b"main")
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert bodies(cross, "a.x", "b.x") == [[b"before", b"handler", b"main"]] * 2


def test_an_outcome_waits_for_no_store_of_others(cross: anabranch.Router) -> None:
    """Another transaction's store, which has yet to carry out what is decided, takes long to open (invariant 7)."""
    tx = cross.transaction(XID)
    tx.send("a.x,b.x", b"held")
    tx.prepare()
    cross.queue("c.x").send(b"")
    other = next(store for store in cross._registry.open_stores() if store.name == "c")
    assert isinstance(other, JournalStore)
    path = cross._registry._directories.recorded(other.backend._directory.path)
    cross._registry._stores.close_at(path)
    unfinished = GlobalTransaction.recovered(bytes(32), [other.store_id], IN_DOUBT)
    unfinished.decide(True)
    cross._coordinator.table.add(unfinished)
    done = threading.Event()

    def say() -> None:
        cross.commit(XID)
        done.set()

    thread = threading.Thread(target=say)
    with cross._registry._stores.exclusive(path):
        thread.start()
        assert done.wait(SOON)
    thread.join(SOON)
    assert bodies(cross, "a.x", "b.x") == [[b"held"], [b"held"]]


def test_what_is_being_rolled_back_is_not_committed_by_hand(synced: anabranch.Config, faults: Faults) -> None:
    """One store has rolled it back, the other has no room for the record: a commit by hand would be one in part
    (invariant 4)."""
    with anabranch.open(synced) as router:
        router.send("a.x,b.x", b"before")
        tx = router.transaction()
        tx.send("a.x,b.x", bytes(100_000))
        tx.vote()
        for call in ("pwrite", "grow"):
            faults.fail(call, "/stores/a/", errno.ENOSPC)
        tx.rollback()
        (waiting,) = router.in_doubt()
        assert waiting.stores == ("a",)
        with pytest.raises(TransactionError, match="never decided"):
            router.resolve(waiting.transaction, "commit")
        faults.mend()
        router._coordinator.resolver.recover_open()
        assert router.in_doubt() == []
        assert bodies(router, "a.x", "b.x") == [[b"before"], [b"before"]]
