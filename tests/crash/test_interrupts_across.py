"""Ctrl-C at every bytecode of a transaction over two stores (rules G2, G3, T2): everywhere or nowhere, nothing held.

What the interrupted thread leaves half done the background finishes; the tests wait for that, and look then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.journal import JournalStore
from anabranch.router.transactions import coordinator

from ..contract.disk import eventually
from ..shares import Share
from ..taking import take
from .interrupts import everywhere
from .ledger import body_of, contents, identity_of, violations


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    options = [
        anabranch.JournalOptions(sync=sync, segment_size=256 * 1024, checkpoint_interval=3600.0)
        for sync in (anabranch.Sync.ALWAYS, anabranch.Sync.NEVER)
    ]
    stores = [
        anabranch.StoreConfig(name, [f"queue://{name}.>"], journal=o) for name, o in zip("ab", options, strict=True)
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        yield router


class Scene:
    """A message in each of two stores, acked by one transaction that sends one to each."""

    def __init__(self, router: anabranch.Router) -> None:
        self.router = router
        self.number = 0
        self.outcomes: list[bool] = []

    def begin(self, xid: anabranch.Xid | None = None) -> anabranch.Transaction:
        """The transaction, all but its end."""
        self.number += 1
        tx = self.router.transaction(xid)
        for store in "ab":
            self.router.queue(f"{store}.in").send(body_of(f"m.{self.number}"))
            message = self.router.queue(f"{store}.in").receive()
            assert message is not None
            assert identity_of(message.body) == f"m.{self.number}", "an earlier one was left behind"
            tx.ack(message)
            tx.send(f"{store}.out", body_of(f"m.{self.number}"))
        return tx

    def settled(self, where: str) -> None:
        """Wait until the background has finished what was interrupted."""
        eventually(lambda: not self._busy(), lambda: (where, self.router.in_doubt(), self.router.stats()))
        for store in self.router._registry.open_stores():
            if isinstance(store, JournalStore):
                store.backend._log.flush()  # else a worker may carry on with a batch between two looks

    def _busy(self) -> bool:
        if self.router._coordinator.table.running() or any(d.xid is None or d.outcome for d in self.router.in_doubt()):
            return True
        return not self.router.recover() and any(store.leased for store in self.router.stats().stores.values())

    def done(self, where: str) -> bool:
        """Whether it took effect: in both stores or in none, with nothing held on to. Cleans up."""
        self.settled(where)
        signs = []
        for store in "ab":
            inside, outside = (self.router.queue(f"{store}.{end}") for end in ("in", "out"))
            sent = [identity_of(message.body) for message in outside.browse()]
            assert sent in ([], [f"m.{self.number}"]), where
            signs += [bool(sent), inside.depth() == 0]
            for queue in (inside, outside):
                while (message := queue.receive()) is not None:
                    message.ack()
                assert queue.depth() == 0, f"{where}: a message of {queue.destination} is held on to"
        assert len(set(signs)) == 1, f"{where}: half done: {signs}"
        for stats in self.router.stats().stores.values():
            assert stats.leased == 0, where
        self.outcomes.append(signs[0])
        return signs[0]

    def end(self) -> None:
        """After all: reopened, it is as it was."""
        assert set(self.outcomes) == {True, False}
        assert violations(self.router) == []
        before = contents(self.router)
        self.router.close()
        with anabranch.open(self.router.config) as again:
            assert contents(again) == before
            assert again.recover() == []
            assert again.in_doubt() == []
            assert violations(again) == []


@pytest.fixture
def scene(router: anabranch.Router) -> Scene:
    scene = Scene(router)
    scene.begin().commit()  # the stores and the decision log are made
    assert scene.done("at first")
    return scene


def xid_of(number: int) -> anabranch.Xid:
    return anabranch.Xid(1, f"x{number}")


@pytest.mark.parametrize("quick", [True, False])
def test_a_commit_over_two_stores(scene: Scene, share: Share, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quick`: the stores are prepared one after the other by its thread; else at once, by others too."""
    monkeypatch.setattr(coordinator, "HANDING_OVER_SECONDS", 1e9 if quick else 0.0)

    def prepare(at: int) -> Callable[[], object]:
        open_one[:] = [scene.begin()]
        return open_one[0].commit

    def check(at: int, where: str) -> None:
        if open_one[0].state == "open":
            open_one[0].rollback()
        assert scene.done(where) or where

    open_one: list[anabranch.Transaction] = []

    assert everywhere(prepare, check, 7, share) > 300
    scene.end()


def test_the_whole_of_a_transaction(scene: Scene, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        scene.number += 1
        messages = []
        for store in "ab":
            scene.router.queue(f"{store}.in").send(body_of(f"m.{scene.number}"))
            messages.append(take(scene.router.queue(f"{store}.in")))

        def run() -> None:
            tx = scene.router.transaction()
            open_one.append(tx)
            with tx:
                for store, message in zip("ab", messages, strict=True):
                    tx.send(f"{store}.out", body_of(f"m.{scene.number}"))
                    tx.ack(message)

        leased[:] = messages
        open_one.clear()
        return run

    def check(at: int, where: str) -> None:
        if open_one and open_one[0].state == "open":
            open_one[0].rollback()  # struck as its block ended, before the first bytecode there; else it times out
        for message in leased:
            try:
                message.release()  # what the transaction had not come to is leased still
            except anabranch.UnknownMessageError:
                pass
        assert scene.done(where) or where

    leased: list[anabranch.Message] = []
    open_one: list[anabranch.Transaction] = []
    assert everywhere(prepare, check, 13, share) > 300
    scene.end()


def test_a_send_of_what_is_committed_all_the_same(scene: Scene) -> None:
    """Who catches the interruption of a send and goes on has the transaction without it, or with all of it."""
    open_one: list[anabranch.Transaction] = []

    def prepare(at: int) -> Callable[[], object]:
        open_one[:] = [scene.router.transaction()]
        open_one[0].send("a.out", b"1")
        return lambda: open_one[0].send("b.out,a.out", b"2")

    def check(at: int, where: str) -> None:
        receipts = open_one[0].commit()
        found = [[message.body for message in scene.router.queue(f"{store}.out").browse()] for store in "ab"]
        assert (len(receipts), found) in ((1, [[b"1"], []]), (3, [[b"1", b"2"], [b"2"]])), where
        for store in "ab":
            scene.router.queue(f"{store}.out").purge()

    assert everywhere(prepare, check) > 10


def test_a_rollback_before_anything_is_prepared(scene: Scene, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        open_one[:] = [scene.begin()]
        return open_one[0].rollback

    def check(at: int, where: str) -> None:
        if open_one[0].state == "open":
            open_one[0].rollback()
        assert not scene.done(where)

    open_one: list[anabranch.Transaction] = []
    assert everywhere(prepare, check, 7, share) > 10
    scene.begin().commit()
    assert scene.done("")
    scene.end()


def test_a_prepare(scene: Scene, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        open_one[:] = [scene.begin(xid_of(at))]
        return open_one[0].prepare

    def check(at: int, where: str) -> None:
        if open_one[0].state == "open":
            open_one[0].rollback()
        scene.settled(where)
        held = scene.router.recover()
        assert held in ([], [xid_of(at)]), where
        commit = at // share.every(7) % 2 == 0
        if held:
            (scene.router.commit if commit else scene.router.rollback)(xid_of(at))
        assert scene.done(where) == (bool(held) and commit), where

    open_one: list[anabranch.Transaction] = []
    assert everywhere(prepare, check, 7, share) > 200
    scene.end()


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_the_outcome_of_a_prepared_one(scene: Scene, commit: bool, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        scene.begin(xid_of(at)).prepare()
        end = scene.router.commit if commit else scene.router.rollback
        return lambda: end(xid_of(at))

    def check(at: int, where: str) -> None:
        scene.settled(where)
        if xid_of(at) in scene.router.recover():  # it can be said again
            (scene.router.commit if commit else scene.router.rollback)(xid_of(at))
        assert scene.done(where) == commit, where
        with pytest.raises(anabranch.TransactionError):
            (scene.router.rollback if commit else scene.router.commit)(xid_of(at))

    assert everywhere(prepare, check, 13, share) > 200
    scene.outcomes.append(not commit)
    scene.end()


class Beside(Scene):
    """Store `b` is memory alone: the commit of `a` decides."""

    def done(self, where: str) -> bool:
        """Likewise. What is undone in memory though `a` has done it comes once more (rule T7)."""
        self.settled(where)
        signs = {}
        for store in "ab":
            inside, outside = (self.router.queue(f"{store}.{end}") for end in ("in", "out"))
            sent = [identity_of(message.body) for message in outside.browse()]
            assert sent in ([], [f"m.{self.number}"]), where
            signs[store] = bool(sent)
            assert (inside.depth() == 0) == signs[store], f"{where}: half done in {store}"
            for queue in (inside, outside):
                while (message := queue.receive()) is not None:
                    message.ack()
                assert queue.depth() == 0, f"{where}: a message of {queue.destination} is held on to"
        assert signs["a"] or not signs["b"], f"{where}: done in memory alone"
        self.outcomes.append(signs["a"])
        return signs["a"]


@pytest.mark.parametrize("kind", ["journal", "sql"])
def test_a_commit_beside_memory(tmp_path: Path, kind: str, share: Share) -> None:
    options = {"journal": anabranch.JournalOptions(), "sql": anabranch.SqlOptions()}[kind]
    stores = [
        anabranch.StoreConfig("a", ["queue://a.>"], **{kind: options}),  # type: ignore[arg-type]
        anabranch.StoreConfig("b", ["queue://b.>"], memory=anabranch.MemoryOptions()),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        scene = Beside(router)
        scene.begin().commit()
        assert scene.done("at first")

        def prepare(at: int) -> Callable[[], object]:
            open_one[:] = [scene.begin()]
            return open_one[0].commit

        def check(at: int, where: str) -> None:
            if open_one[0].state == "open":
                open_one[0].rollback()
            assert scene.done(where) or where

        open_one: list[anabranch.Transaction] = []
        assert everywhere(prepare, check, 13, share) > 100
        assert set(scene.outcomes) == {True, False}
        assert violations(router) == []
