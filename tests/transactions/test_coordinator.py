"""The two phases when something fails in them: before the decision all is undone, after it nothing is (invariants 4, 7;
rules T1 to T3)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.wal import log
from anabranch.policies.errors import StoreFailedError, StoreFullError, StoreLockedError
from anabranch.router.placement import open_stores as stores_module
from anabranch.router.transactions import decision_cleanup

from ..contract.disk import eventually
from ..router.disk import OPTIONS, SYNCED, Faults, bodies, config, copied, drain, take


def begin(router: anabranch.Router) -> anabranch.Transaction:
    """One that acks in two stores, sends in three, and is big enough to make its stores' files grow."""
    router.send("a.x,b.x,c.x", b"")  # the decision log is made, and its epoch begun
    for name in ("a.in", "b.in"):
        router.queue(name).send_many([b"1", b"2"])
    tx = router.transaction()
    for name in ("a.in", "b.in"):
        tx.ack(take(router, name))
    for name in ("a.out", "b.out", "c.out"):
        tx.send(name, b"3".ljust(40_000))
    return tx


def fill(router: anabranch.Router, faults: Faults) -> None:
    """Store b takes what it has room for, and gets no more."""
    faults.fail("grow", "/stores/b/", errno.ENOSPC)
    with pytest.raises(StoreFullError):
        while True:
            router.queue("b.fill").send(bytes(1000))


BEFORE = [[b"1", b"2"], [b"1", b"2"], [], [], []]
QUEUES = ("a.in", "b.in", "a.out", "b.out", "c.out")


def summary(router: anabranch.Router) -> list[list[bytes]]:
    return [[body.rstrip() for body in found] for found in bodies(router, *QUEUES)]


AFTER = [[b"2"], [b"2"], [b"3"], [b"3"], [b"3"]]


class TestFirstPhase:
    @pytest.mark.parametrize("store", ["a", "b", "c"])
    @pytest.mark.parametrize("call", ["fdatasync", "pwrite"])
    def test_a_store_fails(self, synced: anabranch.Config, faults: Faults, store: str, call: str) -> None:
        with anabranch.open(synced) as router:
            tx = begin(router)
            faults.fail(call, f"/stores/{store}/")
            with pytest.raises(StoreFailedError, match=r"the transaction was rolled back: .*Input/output error"):
                tx.commit()
            assert tx.state == "rolled back"
            others = [name for name in QUEUES if name[0] != store]
            for name in others:
                assert bodies(router, name) == [BEFORE[QUEUES.index(name)]]
                if name.endswith(".in"):
                    assert drain(router, name) == [b"1", b"2"], "free again, in order (invariant 2)"
                    router.queue(name).send_many([b"1", b"2"])
            with pytest.raises(StoreFailedError, match=f"store '{store}' has stopped"):
                router.queue(f"{store}.out").send(b"x")
            faults.mend()
            router.reopen(store)
            assert summary(router) == BEFORE
            if store != "c":
                assert drain(router, f"{store}.in") == [b"1", b"2"]
            assert router.in_doubt() == []

    def test_a_store_had_failed_before(self, synced: anabranch.Config, faults: Faults) -> None:
        with anabranch.open(synced) as router:
            tx = begin(router)
            faults.fail("fdatasync", "/stores/c/")
            with pytest.raises(StoreFailedError):
                router.queue("c.out").send(b"x", sync=True)
            faults.mend()
            with pytest.raises(StoreFailedError, match="store 'c' has stopped"):
                tx.commit()
            assert [drain(router, name) for name in ("a.in", "b.in")] == [[b"1", b"2"]] * 2
            router.send("a.out,b.out", b"the others go on")
            router.reopen("c")
            router.send("a.out,c.out", b"again")

    def test_a_full_disk(self, synced: anabranch.Config, faults: Faults) -> None:
        with anabranch.open(synced) as router:
            router.queue("b.fill").send(bytes(30_000))
            tx = begin(router)
            faults.fail("grow", "/stores/b/", errno.ENOSPC)
            with pytest.raises(StoreFullError, match="store 'b' cannot grow: No space left on device"):
                tx.commit()
            assert summary(router) == BEFORE
            assert router.in_doubt() == []
            faults.mend()
            assert [drain(router, name) for name in ("a.in", "b.in")] == [[b"1", b"2"]] * 2
            router.send("a.out,b.out", b"x")
            assert bodies(router, "a.out", "b.out") == [[b"x"], [b"x"]]

    def test_a_store_is_locked_by_another_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever wants it is told whose it is; what the transaction held elsewhere is free again."""
        configuration = config(tmp_path)
        with anabranch.open(configuration) as router:
            for name in ("a.in", "each.x", "each.y"):
                router.queue(name).send(b"1")
            monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 1)
            tx = router.transaction()
            tx.send("each.x", b"2")
            tx.ack(take(router, "a.in"))
            for _ in range(2):
                router.queue("each.y").send(b"1")
                router.queue("each.z").send(b"1")
            (lock,) = (tmp_path / "stores" / "each").glob("*x*/store.lock")
            holder = (
                "import sys, pathlib; from anabranch.adapters.system.locking import DirectoryLock\n"
                f"lock = DirectoryLock(pathlib.Path({str(lock)!r}), 'it'); lock.acquire(); print('held', flush=True)\n"
                "sys.stdin.read()"
            )
            with subprocess.Popen(
                [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "held\n"
                with pytest.raises(StoreLockedError, match=str(process.pid)):
                    tx.commit()
                assert drain(router, "a.in") == [b"1"]
                with pytest.raises(StoreLockedError, match=str(process.pid)), router.transaction() as other:
                    other.send("a.in", b"never")
                    other.send("each.x", b"never")
                process.communicate("")
            router.send("each.x,a.in", b"3")
            assert bodies(router, "each.x", "a.in") == [[b"1", b"3"], [b"3"]]

    def test_what_could_not_be_undone_is_rolled_back_when_the_store_is_back(
        self, synced: anabranch.Config, faults: Faults
    ) -> None:
        """The prepare of `a` is on its disk when `b` fails, and `a` fails before it hears of that."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            faults.fail("fdatasync", "/stores/b/")
            faults.before("fdatasync", "/stores/b/", lambda: faults.fail("fdatasync", "/stores/a/"))
            with pytest.raises(StoreFailedError, match="rolled back"):
                tx.commit()
            faults.mend()
            for store in ("a", "b"):
                router.reopen(store)
            assert summary(router) == BEFORE
            assert [drain(router, name) for name in ("a.in", "b.in")] == [[b"1", b"2"]] * 2
            assert router.in_doubt() == []


class TestSecondPhase:
    """Rule T2: the decision stands, whatever becomes of a participant."""

    def commit_and_lose(self, router: anabranch.Router, faults: Faults, *stores: str) -> list[anabranch.Receipt]:
        tx = begin(router)
        for store in stores:
            faults.before("fdatasync", "/decisions/", lambda store=store: faults.fail("pwrite", f"/stores/{store}/"))  # type: ignore[misc]
        receipts = tx.commit()
        assert tx.state == "committed"
        return receipts

    def test_a_store_is_opened_again_between_vote_and_decision(
        self, synced: anabranch.Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It finds what was durable in its log, and knows no more which send was which."""
        with anabranch.open(synced) as router:
            coordinator = router._coordinator
            decide = coordinator._decide

            def decide_late(transaction: Any) -> None:
                router.reopen("b")  # as another thread does with one that has failed
                decide(transaction)

            monkeypatch.setattr(coordinator, "_decide", decide_late)
            tx = router.transaction()
            tx.send("a.out", b"1")
            tx.send("b.out", b"2")
            tx.send("b.out", b"gone with the store", persistent=False)
            tx.commit()
            assert [receipt.seq > 0 for receipt in tx.receipts] == [True, False, False]
            eventually(lambda: bodies(router, "a.out", "b.out") == [[b"1"], [b"2"]])

    @pytest.mark.parametrize("stores", ["a", "b", "c", "ac", "abc"])
    def test_commit_returns_and_reopening_carries_it_out(
        self, synced: anabranch.Config, faults: Faults, stores: str
    ) -> None:
        with anabranch.open(synced) as router:
            receipts = self.commit_and_lose(router, faults, *stores)
            assert [not receipt.seq for receipt in receipts] == [name in stores for name in "abc"]
            for name, after in zip(QUEUES, AFTER, strict=True):
                if name[0] not in stores:
                    assert [body.rstrip() for body in bodies(router, name)[0]] == after
            (waiting,) = router.in_doubt()
            assert (waiting.outcome, waiting.stores, waiting.xid) == ("commit", tuple(stores), None)
            assert "decided" in waiting.reason
            for outcome in ("rollback", "commit"):
                with pytest.raises(anabranch.TransactionError, match="is decided already: commit"):
                    router.resolve(waiting.transaction, outcome)
            faults.mend()
            for store in stores:
                router.reopen(store)
            assert summary(router) == AFTER
            assert router.in_doubt() == []
        with anabranch.open(synced) as router:
            assert summary(router) == AFTER

    def test_it_is_carried_out_when_the_router_is_opened_again(self, synced: anabranch.Config, faults: Faults) -> None:
        with pytest.raises(StoreFailedError), anabranch.open(synced) as router:
            self.commit_and_lose(router, faults, "a")
            with pytest.raises(StoreFailedError):
                router.queue("a.in").send(b"x")
            raise StoreFailedError
        faults.mend()
        with anabranch.open(synced) as router:
            assert summary(router) == AFTER
            assert router.in_doubt() == []

    def test_who_has_prepared_has_room_to_commit(self, synced: anabranch.Config, faults: Faults) -> None:
        """Rule J10, whatever comes between: the disk is full for sends first."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            faults.before("fdatasync", "/decisions/", lambda: fill(router, faults))
            assert all(receipt.seq for receipt in tx.commit())
            assert summary(router) == AFTER
            assert router.in_doubt() == []

    def test_a_store_without_room_is_told_again_until_it_has_some(
        self, synced: anabranch.Config, faults: Faults
    ) -> None:
        """What is larger than a segment gets no room beforehand."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            tx.send("b.large", bytes(100_000))
            faults.before("fdatasync", "/decisions/", lambda: faults.fail("grow", "/stores/b/", errno.ENOSPC))
            receipts = tx.commit()
            assert [bool(receipt.seq) for receipt in receipts] == [True, False, True, False]
            (waiting,) = router.in_doubt()
            assert (waiting.outcome, waiting.stores) == ("commit", ("b",))
            assert router.queue("b.in").receive() is not None  # the second: the first is claimed
            assert router.queue("b.in").receive() is None
            faults.mend()
            eventually(lambda: not router.in_doubt())
            assert summary(router) == AFTER

    def test_one_failed_store_holds_up_no_other(self, synced: anabranch.Config, faults: Faults) -> None:
        """Invariant 7: in the background too, whichever comes first."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            tx.send("c.large", bytes(100_000))
            faults.before("fdatasync", "/decisions/", lambda: faults.fail("pwrite", "/stores/a/"))
            faults.before("fdatasync", "/decisions/", lambda: faults.fail("grow", "/stores/c/", errno.ENOSPC))
            tx.commit()
            assert [waiting.stores for waiting in router.in_doubt()] == [("a", "c")]
            faults.mend()
            eventually(lambda: [waiting.stores for waiting in router.in_doubt()] == [("a",)])
            for _ in range(3):
                router.send("b.more,c.more", b"x")
            router._coordinator.cleanup.run()
            a = next(store.store_id for store in router._registry.open_stores() if store.name == "a")
            kept = router._coordinator.log.decisions.values()
            assert [a in decision.participants for decision in kept] == [True, True], (
                "what concerns others is forgotten"
            )
            router.reopen("a")
            assert summary(router) == AFTER
            assert router.in_doubt() == []
            router._coordinator.cleanup.run()
            assert router._coordinator.log.decisions == {}

    def test_receipts_are_not_taken_by_who_looks_for_what_waits(
        self, synced: anabranch.Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A retry of another transaction comes between the decision and its being carried out."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            resolver = router._coordinator.resolver
            resolve = resolver.resolve

            def after_a_retry(*arguments: Any) -> Any:
                monkeypatch.undo()
                resolver.resolve_all()
                resolver.recover_open()
                return resolve(*arguments)

            monkeypatch.setattr(resolver, "resolve", after_a_retry)
            assert all(receipt.seq for receipt in tx.commit())
            assert summary(router) == AFTER
            assert router.in_doubt() == []


class TestForgetting:
    """Rule T5."""

    def test_decisions_go_once_they_are_durable_everywhere(
        self, synced: anabranch.Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 0.05)
        with anabranch.open(synced) as router:
            for _ in range(5):
                router.send("a.q,b.q", b"x")
            eventually(lambda: not router._coordinator.log.decisions)
            for store in router._registry.open_stores():
                assert store.committed() == []

    def test_not_before_their_stores_have_synced(self, synced: anabranch.Config, faults: Faults) -> None:
        with anabranch.open(synced) as router:
            router.send("a.q,b.q", b"x")
            faults.fail("fdatasync", "/stores/b/")
            router._coordinator.cleanup.run()
            assert len(router._coordinator.log.decisions) == 1
            faults.mend()
            router.reopen("b")
            router._coordinator.cleanup.run()
            assert router._coordinator.log.decisions == {}
            assert bodies(router, "a.q", "b.q") == [[b"x"], [b"x"]]

    def test_closing_forgets(self, synced: anabranch.Config) -> None:
        with anabranch.open(synced) as router:
            router.send("a.q,b.q", b"x")
        with anabranch.open(synced) as router:
            assert router._coordinator.log.decisions == {}

    def test_a_thousand_do_not_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Invariant 10."""
        monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 3600)
        monkeypatch.setattr(decision_cleanup, "FORGET_MAX", 100)
        with anabranch.open(config(tmp_path)) as router:
            for _ in range(150):
                router.send("a.q,b.q", b"x")
            eventually(lambda: len(router._coordinator.log.decisions) <= 100)


class TestKilled:
    """The process dies before one of the writes of a commit: all or nothing, and once decided all."""

    def copies(self, configuration: anabranch.Config, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
        """Copies of the directory from before each write and sync of a journal, and after the last."""
        calls: list[tuple[str, Path]] = []
        recording = False

        def before(fd: int, what: str) -> None:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if recording and path.suffix == ".seg":
                copy = configuration.directory.with_name(f"copy{len(calls)}")
                calls.append((f"{what} {path.parts[-3]}", copied(router, copy)))

        real_pwrite, real_fdatasync = os.pwrite, os.fdatasync
        turn = threading.Lock()

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            with turn:
                before(fd, "pwrite")
                return real_pwrite(fd, data, offset)

        def fdatasync(fd: int) -> None:
            with turn:
                before(fd, "fdatasync")
                real_fdatasync(fd)

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        with anabranch.open(configuration) as router:
            tx = begin(router)
            recording = True
            tx.commit()
            recording = False
            calls.append(("end", copied(router, configuration.directory.with_name("end"))))
        return calls

    @pytest.mark.parametrize("options", [OPTIONS, SYNCED], ids=["never", "always"])
    def test_a_commit(self, tmp_path: Path, options: anabranch.JournalOptions, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 3600)
        monkeypatch.setattr(log, "IDLE_SECONDS", 3600)
        configuration = config(tmp_path / "data", options, sync=anabranch.Sync.ALWAYS)
        decided = False
        outcomes = []
        for what, copy in self.copies(configuration, monkeypatch):
            decided = decided or what == "fdatasync decisions"  # its write has been made, and a kill keeps that
            for _ in range(2):
                with anabranch.open(config(copy, options)) as router:
                    assert summary(router) == (AFTER if decided else BEFORE), what
                    assert router.in_doubt() == []
                    assert all(list(store.check()) == [] for store in router._registry.open_stores())
            with anabranch.open(config(copy, options)) as router:
                assert drain(router, "a.in") == ([b"2"] if decided else [b"1", b"2"])
            outcomes.append(decided)
        assert (True in outcomes, False in outcomes) == (True, True)
        assert len(outcomes) > 10
