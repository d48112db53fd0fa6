"""External (XA) transactions: prepared, held over restarts until their manager says the outcome (rule T4), or somebody
does by hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.policies.errors import (
    ClosedError,
    StoreFailedError,
    StoreFullError,
    TransactionError,
    TransactionInDoubt,
)

from ..router.disk import NEVER, Faults, bodies, config, crashed, drain, take

XID = anabranch.Xid(7, "global", "branch")


def prepare(router: anabranch.Router, xid: anabranch.Xid = XID, *, stores: int = 2) -> anabranch.Transaction:
    """Takes from a.in, gives to b.out; in one store, to a.out."""
    router.queue("a.in").send_many([b"1", b"2"])
    tx = router.transaction(xid)
    tx.ack(take(router, "a.in"))
    tx.send("a.out" if stores == 1 else "b.out", b"3", {"h": 1}, "id")
    tx.prepare()
    assert tx.state == "prepared"
    return tx


BEFORE, AFTER = [[b"1", b"2"], []], [[b"2"], [b"3"]]


def state(router: anabranch.Router, *, stores: int = 2) -> list[list[bytes]]:
    return bodies(router, "a.in", "a.out" if stores == 1 else "b.out")


@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("restart", ["none", "closed", "killed"])
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_it_is_held_until_told(tmp_path: Path, stores: int, restart: str, outcome: str) -> None:
    configuration = config(tmp_path / "data")
    router = anabranch.open(configuration)
    try:
        prepare(router, stores=stores)
        if restart == "killed":
            configuration = config(crashed(router, tmp_path / "copy"))
        if restart != "none":
            router.close()
            router = anabranch.open(configuration)
        for _ in range(2):
            assert router.recover() == [XID]
            (waiting,) = router.in_doubt()
            assert (waiting.xid, waiting.outcome, waiting.sends, waiting.acks) == (XID, None, 1, 1)
            assert "its transaction manager has not said" in waiting.reason
            assert state(router, stores=stores) == BEFORE
            message = take(router, "a.in")
            assert message.body == b"2", "the first is claimed"
            message.release()
            assert router.queue("a.in").purge() == 1
            router.queue("a.in").send(b"2")
            with pytest.raises(TransactionError, match="has claimed 1 of its messages"):
                router.queue("a.in").delete()
        getattr(router, outcome)(XID)
        after = AFTER if outcome == "commit" else BEFORE
        assert state(router, stores=stores) == after
        assert (router.recover(), router.in_doubt(), router.heuristics()) == ([], [], [])
        router.close()
        router = anabranch.open(configuration)
        assert state(router, stores=stores) == after
        assert router.recover() == []
        assert drain(router, "a.in") == after[0]
        if outcome == "commit":
            assert router.queue("a.out" if stores == 1 else "b.out").send(b"3", None, "id").duplicate
    finally:
        router.close()


class TestOutcomes:
    def test_said_again_it_changes_nothing(self, cross: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
        for outcome, other in (("commit", "rollback"), ("rollback", "commit")):
            prepare(cross)
            for _ in range(2):
                getattr(cross, outcome)(XID)
            with pytest.raises(TransactionError, match=rf"the outcome of transaction 7:global:branch is {outcome}"):
                getattr(cross, other)(XID)
            assert len(drain(cross, "a.in")) == (1 if outcome == "commit" else 2)
            cross._coordinator.cleanup.run()
            with pytest.raises(TransactionError, match="no transaction 7:global:branch is prepared here"):
                cross.commit(XID)

    def test_one_phase(self, cross: anabranch.Router) -> None:
        for number, xid in enumerate([anabranch.Xid(1, "one"), anabranch.Xid(1, "two")]):
            tx = cross.transaction(xid)
            tx.send("a.q", b"x")
            if number:
                tx.send("b.q", b"x")
            with pytest.raises(TransactionError, match=r"is not prepared; prepare\(\) it or commit it in one phase"):
                cross.commit(xid)
            cross.commit(xid, one_phase=True)
            assert tx.state == "committed"
        prepare(cross)
        cross.commit(XID, one_phase=True)
        assert bodies(cross, "a.q", "b.q", "b.out") == [[b"x", b"x"], [b"x"], [b"3"]]

    def test_one_that_is_open_can_be_rolled_back_by_name(self, cross: anabranch.Router) -> None:
        cross.queue("a.in").send(b"1")
        tx = cross.transaction(XID)
        tx.ack(take(cross, "a.in"))
        cross.rollback(XID)
        assert tx.state == "rolled back"
        assert take(cross, "a.in").body == b"1"

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_an_empty_one_waits_for_its_outcome_too(self, tmp_path: Path, outcome: str) -> None:
        """Its manager does not know that there is nothing to be done, and must not take it for lost."""
        with anabranch.open(config(tmp_path)) as router:
            tx = router.transaction(XID)
            tx.prepare()
            assert (tx.state, router.recover()) == ("prepared", [XID])
        for last in (False, True):
            with anabranch.open(config(tmp_path)) as router:
                (waiting,) = router.in_doubt()
                assert (waiting.xid, waiting.outcome, waiting.stores) == (XID, None, ())
                assert (waiting.sends, waiting.acks, router.recover()) == (0, 0, [XID])
                with pytest.raises(TransactionError, match="is in use"):
                    router.transaction(XID)
                if last:
                    getattr(router, outcome)(XID)
                    assert (router.recover(), router.in_doubt(), router.heuristics()) == ([], [], [])
        with anabranch.open(config(tmp_path)) as router:
            assert router.recover() == []
            router.transaction(XID).rollback()

    def test_an_empty_one_by_hand(self, cross: anabranch.Router) -> None:
        cross.transaction(XID).prepare()
        (waiting,) = cross.in_doubt()
        cross.resolve(waiting.transaction, "rollback")
        assert [one.outcome for one in cross.heuristics()] == ["rollback"]
        cross.forget(waiting.transaction)
        assert (cross.in_doubt(), cross.heuristics()) == ([], [])

    def test_a_prepared_one_is_its_managers(self, cross: anabranch.Router) -> None:
        tx = prepare(cross)
        for call in (tx.commit, tx.rollback, tx.prepare, lambda: tx.send("a.q", b"x")):
            with pytest.raises(TransactionError, match="this transaction is prepared"):
                call()
        with pytest.raises(TransactionError, match="only a transaction with an xid can be prepared"):
            cross.transaction().prepare()
        with cross.transaction(anabranch.Xid(1, "other")) as other:
            other.send("a.q,b.q", b"x")
            other.prepare()  # the end of the block leaves it so
        assert cross.recover() == [XID, anabranch.Xid(1, "other")]

    def test_many_of_them_oldest_first(self, tmp_path: Path) -> None:
        xids = [anabranch.Xid(n, f"g{n}", f"b{n}" * (n % 2)) for n in range(20)]
        for _ in range(2):
            with anabranch.open(config(tmp_path)) as router:
                for xid in xids[len(router.recover()) :][:10]:
                    tx = router.transaction(xid)
                    tx.send("a.q,b.q", str(xid).encode())
                    tx.prepare()
        with anabranch.open(config(tmp_path)) as router:
            assert router.recover() == xids
            for xid in reversed(xids):
                (router.commit if xid.format_id % 3 else router.rollback)(xid)
            expected = [str(xid).encode() for xid in reversed(xids) if xid.format_id % 3]
            assert bodies(router, "a.q", "b.q") == [expected, expected]

    def test_opposite_outcomes_by_8_threads(self, cross: anabranch.Router) -> None:
        """One wins, the other is told."""
        for number in range(10):
            tx = cross.transaction(XID)
            tx.send("a.q,b.q", f"{number}".encode())
            tx.prepare()

            def say(worker: int) -> str:
                outcome = ("commit", "rollback")[worker % 2]
                try:
                    getattr(cross, outcome)(XID)
                except TransactionError:
                    return ""
                return outcome

            with ThreadPoolExecutor(8) as pool:
                said = set(pool.map(say, range(8))) - {""}
            assert len(said) == 1
            there = [f"{number}".encode() in found for found in bodies(cross, "a.q", "b.q")]
            assert there == [said == {"commit"}] * 2
            cross._coordinator.cleanup.run()


class TestNames:
    def test_one_that_is_in_use(self, cross: anabranch.Router) -> None:
        tx = cross.transaction(XID)
        for _ in range(2):
            with pytest.raises(TransactionError, match="xid 7:global:branch is in use"):
                cross.transaction(XID)
        tx.send("a.q,b.q", b"x")
        tx.prepare()
        with pytest.raises(TransactionError, match="xid 7:global:branch is in use"):
            cross.transaction(XID)
        cross.transaction(anabranch.Xid(7, "global", "other branch")).rollback()
        cross.commit(XID)
        cross._coordinator.cleanup.run()
        with cross.transaction(XID) as again:
            again.send("a.q,b.q", b"y")
        assert bodies(cross, "a.q", "b.q") == [[b"x", b"y"]] * 2

    def test_two_threads_with_one_name(self, cross: anabranch.Router) -> None:
        def begin(_: int) -> anabranch.Transaction | None:
            try:
                return cross.transaction(XID)
            except TransactionError:
                return None

        for _ in range(20):
            with ThreadPoolExecutor(8) as pool:
                (tx,) = filter(None, pool.map(begin, range(8)))
            tx.rollback()

    @pytest.mark.parametrize("xid", [anabranch.Xid(1, "unknown"), anabranch.Xid(0, "global", "branch")])
    def test_one_that_is_not_prepared(self, cross: anabranch.Router, xid: anabranch.Xid) -> None:
        prepare(cross)
        for call in (cross.commit, cross.rollback):
            with pytest.raises(TransactionError, match=rf"no transaction {xid} is prepared here; .*: 7:global:branch"):
                call(xid)

    @pytest.mark.parametrize(
        ("xid", "error", "says"),
        [
            ((1, "x" * 65), TransactionError, "the global transaction id .* takes 65 bytes; 1 to 64"),
            ((1, "é" * 33), TransactionError, "takes 66 bytes"),
            ((1, "x", "b" * 65), TransactionError, "the branch qualifier .* takes 65 bytes; 0 to 64"),
            ((1, ""), TransactionError, "takes 0 bytes"),
            ((1, "\ud800"), TransactionError, "is not valid unicode"),
            ((-1, "x"), TransactionError, "format id -1 is not between 0 and 2147483647"),
            ((1 << 31, "x"), TransactionError, "is not between"),
            ((True, "x"), TypeError, "an xid is an int and two str"),
            (("1", "x"), TypeError, "an xid is an int and two str"),
            ((1, b"x"), TypeError, "an xid is an int and two str"),
            ((1, "x", None), TypeError, "an xid is an int and two str"),
            ((1,), TypeError, "an xid is"),
            ("x", TypeError, "an xid is"),
            (7, TypeError, "an xid is"),
            ([1, "x"], TypeError, "an xid is"),
        ],
    )
    def test_what_is_no_name(self, cross: anabranch.Router, xid: Any, error: type[Exception], says: str) -> None:
        for call in (cross.transaction, cross.commit, cross.rollback):
            with pytest.raises(error, match=says):
                call(xid)

    def test_the_longest(self, cross: anabranch.Router) -> None:
        xid = anabranch.Xid((1 << 31) - 1, "é" * 32, "b" * 64)
        prepare(cross, xid)
        cross.close()
        with anabranch.open(cross.config) as router:
            assert router.recover() == [xid]
            router.commit(tuple(xid))  # type: ignore[arg-type]
            assert state(router) == AFTER


class TestFailures:
    def test_a_participant_fails_in_prepare(self, synced: anabranch.Config, faults: Faults) -> None:
        with anabranch.open(synced) as router:
            router.send("a.x,b.x", b"")
            router.queue("a.in").send(b"1")
            tx = router.transaction(XID)
            tx.ack(take(router, "a.in"))
            tx.send("b.out", b"x")
            faults.fail("fdatasync", "/stores/b/")
            with pytest.raises(StoreFailedError, match="the transaction was rolled back"):
                tx.prepare()
            assert (tx.state, router.recover()) == ("rolled back", [])
            assert take(router, "a.in").body == b"1"
            with pytest.raises(TransactionError, match="is prepared here"):
                router.commit(XID)

    def test_no_room(self, tmp_path: Path) -> None:
        limited = anabranch.JournalOptions(segment_size=64 * 1024, sync=NEVER, max_messages=1)
        with anabranch.open(config(tmp_path, b=limited)) as router:
            prepare(router)
            other = router.transaction(anabranch.Xid(1, "other"))
            other.send("b.out", b"no room")
            with pytest.raises(StoreFullError):
                other.prepare()
            assert other.state == "rolled back"
        with anabranch.open(config(tmp_path, b=limited)) as router:
            with pytest.raises(StoreFullError):  # the room is held over the restart
                router.queue("b.out").send(b"no room")
            router.commit(XID)
            assert bodies(router, "b.out") == [[b"3"]]
            with pytest.raises(StoreFullError):
                router.queue("b.out").send(b"no room")

    @pytest.mark.parametrize(("call", "found"), [("fdatasync", [XID]), ("pwrite", [])])
    def test_the_log_fails_in_prepare(
        self, synced: anabranch.Config, faults: Faults, call: str, found: list[anabranch.Xid]
    ) -> None:
        """Without the record it is rolled back, with it held (rule T4); which of the two shows when the log is read."""
        with anabranch.open(synced) as router:
            router.send("a.x,b.x", b"")
            router.queue("a.in").send_many([b"1", b"2"])
            tx = router.transaction(XID)
            tx.ack(take(router, "a.in"))
            tx.send("b.out", b"3")
            faults.fail(call, "/decisions/")
            with pytest.raises(TransactionInDoubt):
                tx.prepare()
            assert tx.state == "in doubt"
            faults.mend()
            router.reopen_decisions()
            assert router.recover() == found
            assert [waiting.xid for waiting in router.in_doubt()] == found
            if found:
                router.commit(XID)
            assert state(router) == (AFTER if found else BEFORE)
            assert drain(router, "a.in") == ([b"2"] if found else [b"1", b"2"])

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    @pytest.mark.parametrize(("call", "stands"), [("fdatasync", True), ("pwrite", False)])
    def test_the_log_fails_with_the_outcome(
        self, synced: anabranch.Config, faults: Faults, outcome: str, call: str, stands: bool
    ) -> None:
        with anabranch.open(synced) as router:
            prepare(router)
            faults.fail(call, "/decisions/")
            with pytest.raises(TransactionInDoubt, match=r"reopen_decisions.*recover"):
                getattr(router, outcome)(XID)
            assert state(router) == BEFORE
            faults.mend()
            router.reopen_decisions()
            assert router.recover() == ([] if stands else [XID])
            getattr(router, outcome)(XID)
            assert state(router) == (AFTER if outcome == "commit" else BEFORE)
            assert router.in_doubt() == []

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_a_participant_fails_with_the_outcome(self, synced: anabranch.Config, faults: Faults, outcome: str) -> None:
        """Rule T2: it stands; a rollback too, which would else become a commit in the store that comes later."""
        with anabranch.open(synced) as router:
            prepare(router)
            faults.before("fdatasync", "/decisions/", lambda: faults.fail("pwrite", "/stores/b/"))
            getattr(router, outcome)(XID)
            assert bodies(router, "a.in") == [[b"2"] if outcome == "commit" else [b"1", b"2"]]
            (waiting,) = router.in_doubt()
            assert (waiting.xid, waiting.outcome, waiting.stores) == (XID, outcome, ("b",))
            with pytest.raises(TransactionError, match=f"the outcome .* is {outcome}: that was said before"):
                getattr(router, {"commit": "rollback", "rollback": "commit"}[outcome])(XID)
            with pytest.raises(TransactionError, match="in use"):
                router.transaction(XID)
            faults.mend()
            router.reopen("b")
            assert state(router) == (AFTER if outcome == "commit" else BEFORE)
            assert router.in_doubt() == []

    def test_a_failed_store_does_not_hold_up_what_others_hear(self, synced: anabranch.Config, faults: Faults) -> None:
        with anabranch.open(synced) as router:
            prepare(router)
            faults.fail("fdatasync", "/stores/a/")
            with pytest.raises(StoreFailedError):
                router.queue("a.q").send(b"x", sync=True)
            faults.mend()
            (waiting,) = router.in_doubt()
            assert (waiting.xid, waiting.stores) == (XID, ("b",))
            router.commit(XID)
            assert bodies(router, "b.out") == [[b"3"]]
            (waiting,) = router.in_doubt()
            assert (waiting.outcome, waiting.stores) == ("commit", ("a",))
            router.reopen("a")
            assert state(router) == AFTER
            assert router.in_doubt() == []


class TestByHand:
    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_an_outcome_by_hand_is_recorded(self, tmp_path: Path, outcome: anabranch.Outcome) -> None:
        configuration = config(tmp_path)
        with anabranch.open(configuration) as router:
            prepare(router)
            (waiting,) = router.in_doubt()
            router.resolve(waiting.transaction, outcome)
            assert state(router) == (AFTER if outcome == "commit" else BEFORE)
            with pytest.raises(TransactionError, match=f"is decided already: {outcome}"):
                router.resolve(waiting.transaction, "commit")
        for _ in range(2):
            with anabranch.open(configuration) as router:
                assert router.heuristics() == [anabranch.Heuristic(waiting.transaction, XID, outcome)]
                assert (router.recover(), router.in_doubt()) == ([], [])
                getattr(router, outcome)(XID)  # the manager says the same: nothing is wrong
                other = {"commit": "rollback", "rollback": "commit"}[outcome]
                with pytest.raises(TransactionError, match=f"is {outcome}: that was said by hand"):
                    getattr(router, other)(XID)
                with pytest.raises(TransactionError, match=f"had its outcome by hand, {outcome}; forget it first"):
                    router.transaction(XID)
                assert state(router) == (AFTER if outcome == "commit" else BEFORE)
        with anabranch.open(configuration) as router:
            router.forget(waiting.transaction)
            assert router.heuristics() == []
            router.transaction(XID).rollback()
            with pytest.raises(TransactionError, match="was given by hand"):
                router.forget(waiting.transaction)
        with anabranch.open(configuration) as router:
            assert router.heuristics() == []

    def test_it_is_kept_until_all_stores_have_it(self, tmp_path: Path, faults: Faults) -> None:
        with anabranch.open(config(tmp_path, sync=anabranch.Sync.ALWAYS)) as router:
            prepare(router)
            (waiting,) = router.in_doubt()
            faults.before("fdatasync", "/decisions/", lambda: faults.fail("pwrite", "/stores/b/"))
            router.resolve(waiting.transaction, "commit")
            with pytest.raises(TransactionError, match="cannot be forgotten yet"):
                router.forget(waiting.transaction)
            faults.mend()
            router.reopen("b")
            assert state(router) == AFTER
            router.forget(waiting.transaction)

    def test_what_cannot_be_decided_by_hand(self, cross: anabranch.Router) -> None:
        prepare(cross)
        (waiting,) = cross.in_doubt()
        with pytest.raises(ValueError, match="an outcome is 'commit' or 'rollback', not 'maybe'"):
            cross.resolve(waiting.transaction, "maybe")  # type: ignore[arg-type]
        wrong: list[Any] = ["", "xyz", "00", None, waiting.transaction + "00"]
        for transaction in wrong:
            for call in (lambda t: cross.resolve(t, "commit"), cross.forget):
                with pytest.raises(TransactionError, match="is no transaction's id"):
                    call(transaction)
        with pytest.raises(TransactionError, match=r"is in doubt; in_doubt\(\) lists"):
            cross.resolve("00" * 32, "commit")
        with pytest.raises(TransactionError, match="was given by hand"):
            cross.forget(waiting.transaction)
        assert cross.recover() == [XID]


def test_a_closed_router(cross: anabranch.Router) -> None:
    prepare(cross)
    (waiting,) = cross.in_doubt()
    cross.close()
    calls: list[Callable[[], object]] = [
        lambda: cross.transaction(anabranch.Xid(1, "x")),
        lambda: cross.commit(XID),
        lambda: cross.rollback(XID),
        cross.recover,
        cross.in_doubt,
        cross.heuristics,
        cross.reopen_decisions,
        lambda: cross.resolve(waiting.transaction, "commit"),
        lambda: cross.forget(waiting.transaction),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
