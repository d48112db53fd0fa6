"""The decision log fails, is full, damaged, lost, older than its stores: it never guesses (rules T2 to T5)."""

from __future__ import annotations

import errno
import shutil
from functools import partial
from pathlib import Path

import pytest

import anabranch
from anabranch.policies.errors import (
    CorruptionError,
    PlacementError,
    StoreFailedError,
    StoreFullError,
    TransactionError,
    TransactionInDoubt,
)
from anabranch.router.transactions import decision_cleanup, decision_log, resolver

from ..contract.disk import eventually
from ..router.disk import NEVER, OPTIONS, Faults, bodies, config, crashed, drain, take

XID = anabranch.Xid(7, "global", "branch")


def begin(router: anabranch.Router, xid: anabranch.Xid | None = None) -> anabranch.Transaction:
    """One that takes from a.in and gives to b.out."""
    router.send("a.x,b.x", b"")  # the decision log is made, and its epoch begun
    router.queue("a.in").send_many([b"1", b"2"])
    tx = router.transaction(xid)
    tx.ack(take(router, "a.in"))
    tx.send("b.out", b"3")
    return tx


BEFORE, AFTER = [[b"1", b"2"], []], [[b"2"], [b"3"]]


def state(router: anabranch.Router) -> list[list[bytes]]:
    return bodies(router, "a.in", "b.out")


def held(configuration: anabranch.Config) -> str:
    """A directory in which an external transaction is prepared; returns its id."""
    with anabranch.open(configuration) as router:
        begin(router, XID).prepare()
        (waiting,) = router.in_doubt()
        assert (waiting.xid, waiting.outcome, waiting.stores) == (XID, None, ("a", "b"))
        return waiting.transaction


class TestReadingAgain:
    def test_who_commits_meanwhile_is_told_so_and_rolled_back(self, synced: anabranch.Config) -> None:
        """Also if the log was closed just after it was found open."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            log = router._coordinator.log._log
            assert log is not None
            log.close()
            for commit in tx.commit, lambda: router.send("a.x,b.x", b""):
                with pytest.raises(StoreFailedError, match="is being read again; nothing was written"):
                    commit()
            assert (state(router), router.in_doubt()) == (BEFORE, [])
            router.reopen_decisions()
            router.send("a.x,b.x", b"2")
            assert bodies(router, "a.x", "b.x") == [[b"", b"2"], [b"", b"2"]]


class TestFailure:
    @pytest.mark.parametrize(("call", "after"), [("fdatasync", AFTER), ("pwrite", BEFORE)])
    @pytest.mark.parametrize("reopen", ["decisions", "router"])
    def test_while_it_writes(
        self, synced: anabranch.Config, faults: Faults, call: str, after: list[list[bytes]], reopen: str
    ) -> None:
        """The outcome is unknown until the log reads back: the decision may be in the file, or not."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            faults.fail(call, "/decisions/")
            with pytest.raises(TransactionInDoubt, match=r"over 'a', 'b' is in doubt.*reopen_decisions") as caught:
                tx.commit()
            assert tx.state == "in doubt"
            (waiting,) = router.in_doubt()
            assert (waiting.transaction, waiting.stores) == (caught.value.transaction, ("a", "b"))
            assert caught.value.stores == ["a", "b"]
            assert (waiting.outcome, "cannot be read" in waiting.reason) == (None, True)
            assert state(router) == BEFORE
            assert drain(router, "a.in") == [b"2"], "the first is claimed still"
            router.queue("a.in").send(b"2")
            for _ in range(2):
                other = router.transaction()
                other.ack(take(router, "a.in"))
                other.send("b.out", b"never")
                with pytest.raises(StoreFailedError, match=r"decision log .*failed.*reopen_decisions"):
                    other.commit()
            router.send("a.out", b"one store needs no decision")
            with pytest.raises(StoreFailedError, match="reopen_decisions"):
                router.resolve(waiting.transaction, "commit")
            faults.mend()
            if reopen == "decisions":
                router.reopen_decisions()
                assert state(router) == after
                assert router.in_doubt() == []
                router.send("a.x,b.x", b"again")
        with anabranch.open(synced) as router:
            assert state(router) == after
            assert router.in_doubt() == []
            assert drain(router, "a.in") == after[0]

    def test_before_anything_is_written(self, synced: anabranch.Config, faults: Faults) -> None:
        """A full disk: nobody can find a decision, so all is rolled back (rule T2)."""
        with anabranch.open(synced) as router:
            begin(router).rollback()
            drain(router, "a.in")
            faults.fail("grow", "/decisions/", errno.ENOSPC)
            sent = 0
            with pytest.raises(StoreFullError, match=r"cannot grow: No space left on device"):
                for _ in range(2000):  # what is allocated ahead is used up first
                    router.queue("a.in").send_many([b"1", b"2"])
                    tx = router.transaction()
                    tx.ack(take(router, "a.in"))
                    tx.send("b.out", b"3")
                    tx.commit()
                    sent += 1
                    drain(router, "a.in")
            assert tx.state == "rolled back"
            assert bodies(router, "a.in", "b.out") == [[b"1", b"2"], [b"3"] * sent]
            assert drain(router, "a.in") == [b"1", b"2"]
            assert router.in_doubt() == []
            faults.mend()
            router.send("a.x,b.x", b"again")

    @pytest.mark.parametrize("call", ["fdatasync", "pwrite"])
    def test_before_its_first_use(self, tmp_path: Path, faults: Faults, call: str) -> None:
        """It cannot say that a new epoch has begun (rule I3): the transaction is rolled back."""
        configuration = config(tmp_path / "data", sync=anabranch.Sync.ALWAYS)
        with anabranch.open(configuration) as router:
            router.send("a.x,b.x", b"x")
        with anabranch.open(configuration) as router:
            router.queue("a.in").send(b"1")
            tx = router.transaction()
            tx.ack(take(router, "a.in"))
            tx.send("b.out", b"3")
            faults.fail(call, "/decisions/")
            with pytest.raises(StoreFailedError, match="rolled back: "):
                tx.commit()
            assert tx.state == "rolled back"
            assert drain(router, "a.in") == [b"1"]
            with pytest.raises(StoreFailedError, match="reopen_decisions"):
                router.send("a.x,b.x", b"y")
            faults.mend()
            router.reopen_decisions()
            router.send("a.x,b.x", b"y")
            assert bodies(router, "a.x", "b.x", "b.out") == [[b"x", b"y"], [b"x", b"y"], []]

    def test_it_cannot_be_made(self, tmp_path: Path, faults: Faults) -> None:
        with anabranch.open(config(tmp_path)) as router:
            router.queue("a.in").send(b"1")
            for error, kind in ((errno.ENOSPC, StoreFullError), (errno.EIO, StoreFailedError)):
                for call in ("grow", "pwrite"):
                    faults.fail(call, "/.decisions", error)
                tx = router.transaction()
                tx.ack(take(router, "a.in"))
                tx.send("b.out", b"3")
                with pytest.raises(kind, match="the decision log, which transactions over several stores need"):
                    tx.commit()
                faults.mend()
                assert bodies(router, "a.in", "b.out") == [[b"1"], []]
            with router.transaction() as tx:
                tx.ack(take(router, "a.in"))
                tx.send("b.out", b"3")
            assert bodies(router, "a.in", "b.out") == [[], [b"3"]]

    def test_an_unfinished_one_is_swept(self, tmp_path: Path) -> None:
        left = tmp_path / f".decisions.{bytes(16).hex()}.tmp"
        (left / "journal").mkdir(parents=True)
        with anabranch.open(config(tmp_path)) as router:
            assert not left.exists()
            router.send("a.x,b.x", b"x")


def damage(path: Path) -> None:
    """One bit of each record area that is known to be on disk."""
    (first, *_) = sorted((path / "journal").glob("*.seg"))
    data = bytearray(first.read_bytes())
    for place in range(4096, 4096 + 600, 50):
        data[place] ^= 1
    first.write_bytes(data)


class TestDamage:
    """Nothing is decided by guess: what is prepared is listed, and waits for a word or for the log."""

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        configuration = config(tmp_path / "data")
        held(configuration)
        decisions = configuration.directory / "decisions"
        shutil.copytree(decisions, tmp_path / "backup")
        damage(decisions)
        for _ in range(2):
            with anabranch.open(configuration) as router:
                (waiting,) = router.in_doubt()
                assert (waiting.xid, waiting.outcome, waiting.stores) == (None, None, ("a", "b"))
                assert "cannot be read" in waiting.reason
                assert router.health().for_operator == 1
                assert state(router) == BEFORE
                message = take(router, "a.in")
                assert message.body == b"2"
                tx = router.transaction()
                tx.ack(message)
                tx.send("b.out", b"never")
                with pytest.raises(StoreFailedError, match=r"decision log cannot be read: .*\.seg.*older copy"):
                    tx.commit()
                assert take(router, "a.in").body == b"2", "free again"
                for call in (
                    partial(router.resolve, waiting.transaction, "commit"),
                    partial(router.forget, waiting.transaction),
                    partial(router.commit, XID),
                ):
                    with pytest.raises((StoreFailedError, TransactionError)):
                        call()
                with pytest.raises(CorruptionError):
                    router.reopen_decisions()
                router.send("a.out", b"one store needs no decision")
                assert router.stats().decision_syncs == 0
        with anabranch.open(configuration) as router:
            shutil.rmtree(decisions)
            shutil.copytree(tmp_path / "backup", decisions)
            router.reopen_decisions()
            assert router.recover() == [XID]
            router.commit(XID)
            assert state(router) == AFTER

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_a_deleted_one(self, tmp_path: Path, outcome: anabranch.Outcome) -> None:
        configuration = config(tmp_path)
        transaction = held(configuration)
        shutil.rmtree(tmp_path / "decisions")
        with anabranch.open(configuration) as router:
            (waiting,) = router.in_doubt()
            assert (waiting.transaction, waiting.outcome) == (transaction, None)
            assert "another decision log" in waiting.reason
            assert (state(router), router.recover()) == (BEFORE, [])
            router.send("a.x,b.x", b"the new log knows nothing of it")
            assert len(router.in_doubt()) == 1
        with anabranch.open(configuration) as router:
            assert len(router.in_doubt()) == 1
            router.resolve(transaction, outcome)
            assert state(router) == (AFTER if outcome == "commit" else BEFORE)
            assert router.in_doubt() == []
            assert router.heuristics() == [anabranch.Heuristic(transaction, None, outcome)]
        with anabranch.open(configuration) as router:
            assert state(router) == (AFTER if outcome == "commit" else BEFORE)
            assert drain(router, "a.in") == ([b"2"] if outcome == "commit" else [b"1", b"2"])
            router.forget(transaction)
            assert router.heuristics() == []

    def test_one_that_is_moved_aside_and_put_back(self, tmp_path: Path) -> None:
        configuration = config(tmp_path / "data")
        transaction = held(configuration)
        decisions = configuration.directory / "decisions"
        with anabranch.open(configuration) as router:
            assert router.recover() == [XID]
            decisions.rename(tmp_path / "extras")
            router.reopen_decisions()
            assert router.recover() == []
            assert [waiting.transaction for waiting in router.in_doubt()] == [transaction]
            (tmp_path / "extras").rename(decisions)
            router.reopen_decisions()
            assert router.recover() == [XID]
            router.rollback(XID)
            assert drain(router, "a.in") == [b"1", b"2"]
            assert router.in_doubt() == []

    def test_an_older_copy_of_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It lacks what was decided since: of a time that it does not know, nothing is taken for rolled back (T3)."""
        monkeypatch.setattr(resolver, "RETRY_SECONDS", 3600)
        configuration = config(tmp_path / "data")
        decisions = configuration.directory / "decisions"
        with anabranch.open(configuration) as router:
            router.send("a.x,b.x", b"x")
        shutil.copytree(decisions, tmp_path / "older")
        transaction = held(configuration)
        shutil.rmtree(decisions)
        shutil.copytree(tmp_path / "older", decisions)
        for _ in range(2):
            with anabranch.open(configuration) as router:
                (waiting,) = router.in_doubt()
                assert waiting.transaction == transaction
                assert "does not know of its time" in waiting.reason
                router.send("a.x,b.x", b"y")  # begins an epoch: it is none of those that the copy lacks
                assert len(router.in_doubt()) == 1
                router.reopen_decisions()
                assert len(router.in_doubt()) == 1
        with anabranch.open(configuration) as router:
            router.resolve(transaction, "commit")
            assert router.in_doubt() == []
            assert bodies(router, "b.out") == [[b"3"]]


class TestAnyCommitWins:
    """Rule T3: where the log cannot say, a participant that has committed can."""

    def half(self, synced: anabranch.Config, faults: Faults, copy: Path) -> anabranch.Config:
        """A killed process's directory, without its decisions: `a` has committed, `b` has prepared."""
        with anabranch.open(synced) as router:
            tx = begin(router)
            faults.before("fdatasync", "/decisions/", lambda: faults.fail("pwrite", "/stores/b/"))
            tx.commit()
            crashed(router, copy)
        faults.mend()
        shutil.rmtree(copy / "decisions")
        return config(copy)

    def test_the_others_follow(self, synced: anabranch.Config, faults: Faults, tmp_path: Path) -> None:
        with anabranch.open(self.half(synced, faults, tmp_path / "copy")) as router:
            assert bodies(router, "a.in") == [[b"2"]]
            router.in_doubt()  # opens b
            eventually(lambda: not router.in_doubt())
            assert state(router) == AFTER

    def test_nobody_can_say_otherwise(
        self, synced: anabranch.Config, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resolver, "RETRY_SECONDS", 3600)
        with anabranch.open(self.half(synced, faults, tmp_path / "copy")) as router:
            (waiting,) = router.in_doubt()
            assert waiting.stores == ("b",)
            with pytest.raises(TransactionError, match="cannot be rolled back: store 'a' has committed it"):
                router.resolve(waiting.transaction, "rollback")
            router.resolve(waiting.transaction, "commit")
            assert state(router) == AFTER


class TestMissingStores:
    """Rule T3: a participant that is not there keeps the transaction, and fails open()."""

    def test_a_missing_participant(self, tmp_path: Path) -> None:
        configuration = config(tmp_path / "data")
        held(configuration)
        store = configuration.directory / "stores" / "b"
        store.rename(tmp_path / "unmounted")
        for _ in range(2):
            with pytest.raises(PlacementError, match=r"store 'b' is missing"):
                anabranch.open(configuration)
        assert not store.exists(), "it is never made anew"
        (tmp_path / "unmounted").rename(store)
        with anabranch.open(configuration) as router:
            router.commit(XID)
            assert state(router) == AFTER

    def test_one_that_nobody_recorded(self, tmp_path: Path) -> None:
        """The placement record is lost as well: the decision log still knows that there was a store."""
        configuration = config(tmp_path / "data")
        transaction = held(configuration)
        (configuration.directory / "placement.records").unlink()
        store = configuration.directory / "stores" / "b"
        store.rename(tmp_path / "unmounted")
        with pytest.raises(PlacementError, match=rf"transaction {transaction} waits for store [0-9a-f]{{32}}"):
            anabranch.open(configuration)
        (tmp_path / "unmounted").rename(store)
        with anabranch.open(configuration) as router:
            router.commit(XID)
            assert state(router) == AFTER

    def test_a_lost_record_of_stores_that_hold_nothing_else(self, tmp_path: Path) -> None:
        configuration = config(tmp_path)
        with anabranch.open(configuration) as router:
            tx = router.transaction(XID)
            tx.send("a.out,b.out", b"x")
            tx.prepare()
        (tmp_path / "placement.records").unlink()
        with anabranch.open(configuration) as router:
            assert router.recover() == [XID]
            router.commit(XID)
            assert bodies(router, "a.out", "b.out") == [[b"x"], [b"x"]]

    def test_a_pattern_that_moves_would_hide_what_is_prepared(self, tmp_path: Path) -> None:
        """Invariant 6: the messages will come to where the destination lived."""
        configuration = config(tmp_path)
        held(configuration)
        stores = [
            anabranch.StoreConfig("a", ["queue://a.>", "queue://b.out"], journal=OPTIONS),
            anabranch.StoreConfig("b", ["queue://b.>"], journal=OPTIONS),
        ]
        other = anabranch.Config(tmp_path, stores)
        with pytest.raises(PlacementError, match=r"queue://b.out: 0 messages and 1 prepared transaction"):
            anabranch.open(other)
        with anabranch.open(configuration) as router:
            router.rollback(XID)
        with anabranch.open(other) as router:
            router.queue("b.out").send(b"moved")
            assert [message.body for message in router.queue("b.out").browse()] == [b"moved"]


class TestSegments:
    def test_they_roll_and_are_released(
        self, synced: anabranch.Config, faults: Faults, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rule T5: what is held, in doubt or said by hand is carried on, and pins no file."""
        monkeypatch.setattr(decision_log, "SEGMENT_BYTES", 64 * 1024)
        monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 0.05)
        configuration = config(synced.directory, sync=NEVER)
        by_hand = held(configuration)
        shutil.rmtree(configuration.directory / "decisions")
        segments = configuration.directory / "decisions" / "journal"
        with anabranch.open(configuration) as router:
            router.resolve(by_hand, "rollback")
            tx = router.transaction(XID)
            tx.send("a.held,c.held", b"x")
            tx.prepare()
            pending = router.transaction()
            pending.send("a.out,b.out", b"pending")
            faults.before("pwrite", "/decisions/", lambda: faults.fail("pwrite", "/stores/b/"))
            assert [bool(receipt.seq) for receipt in pending.commit()] == [True, False]
            faults.mend()
            count = 0
            while not (segments / "000000000005.seg").exists():
                router.send("a.q,c.q", b"x")
                count += 1
                assert count < 5000
            eventually(lambda: len(list(segments.glob("*.seg"))) <= 2)
            crashed(router, synced.directory.with_name("copy"))
        for path in (synced.directory, synced.directory.with_name("copy")):
            with anabranch.open(config(path)) as router:
                assert router.recover() == [XID]
                assert router.heuristics() == [anabranch.Heuristic(by_hand, None, "rollback")]
                assert bodies(router, "a.out", "b.out") == [[b"pending"], [b"pending"]]
                assert [waiting.xid for waiting in router.in_doubt()] == [XID]
                router.commit(XID)
                router.send("a.q,c.q", b"x")
                assert bodies(router, "a.held", "c.held", "a.q") == [[b"x"], [b"x"], [b"x"] * (count + 1)]

    def test_many_openings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each begins an epoch (rule I3), of which it remembers so many (invariant 10); what is held outlives that."""
        monkeypatch.setattr(decision_log, "EPOCHS_MAX", 3)
        configuration = config(tmp_path)
        held(configuration)
        for number in range(5):
            with anabranch.open(configuration) as router:
                router.send("a.x,b.x", b"x")
                assert len(router._coordinator.log.epochs) == min(number + 2, 3)
        with anabranch.open(configuration) as router:
            assert router.recover() == [XID]
            router.commit(XID)
            assert state(router) == AFTER
