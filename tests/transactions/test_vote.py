"""A transaction that votes before it is committed, and one that goes back to a savepoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch import StoreFullError, TransactionError, UnknownMessageError, Xid
from anabranch.router.placement import open_stores as stores_module

from ..contract.disk import eventually
from ..router.disk import contents, in_time, take, with_time_enough

NEVER = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER)


def config(directory: Path, **options: float) -> anabranch.Config:
    stores = [
        anabranch.StoreConfig("one", ["queue://one"], journal=NEVER),
        anabranch.StoreConfig("two", ["queue://two"], journal=NEVER),
        anabranch.StoreConfig("few", ["queue://few"], journal=NEVER.model_copy(update={"max_messages": 1})),
        anabranch.StoreConfig("each", ["queue://each.>"], per_destination=True, journal=NEVER),
    ]
    return anabranch.Config(directory, stores, transactions=anabranch.TransactionOptions.model_validate(options))


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data")) as router:
        yield router


ONE, BOTH = "queue://one", "queue://one,queue://two"


def voted(router: anabranch.Router, where: str) -> anabranch.Transaction:
    """One that has voted: it acks what a queue held, and sends."""
    router.queue("one").send(b"old")
    tx = router.transaction()
    tx.ack(take(router, "one"))
    tx.send(where, b"new")
    tx.vote()
    return tx


@pytest.mark.parametrize("where", [ONE, BOTH])
class TestVote:
    def test_then_commit(self, router: anabranch.Router, where: str) -> None:
        tx = voted(router, where)
        assert (tx.state, contents(router, "one"), contents(router, "two")) == ("voted", [b"old"], [])
        receipts = tx.commit()
        assert contents(router, "one") == [b"new"]
        assert [receipt.seq > 0 for receipt in receipts] == [True] * len(where.split(","))

    def test_then_rollback(self, router: anabranch.Router, where: str) -> None:
        router.queue("one").send_many([b"1", b"2"])
        tx = router.transaction()
        tx.ack(take(router, "one"))
        tx.send(where, b"never")
        tx.vote()
        tx.rollback()
        assert (tx.state, take(router, "one").body, take(router, "one").body) == ("rolled back", b"1", b"2")
        assert (contents(router, "two"), router.in_doubt()) == ([], [])

    def test_its_block_commits_or_rolls_back(self, router: anabranch.Router, where: str) -> None:
        with router.transaction() as tx:
            tx.send(where, b"1")
            tx.vote()
        with pytest.raises(ValueError, match="no"), router.transaction() as tx:
            tx.send(where, b"2")
            tx.vote()
            raise ValueError("no")
        assert contents(router, "one") == [b"1"]

    def test_nothing_else_can_be_done_with_it(self, router: anabranch.Router, where: str) -> None:
        with router.transaction() as tx:
            tx.send(where, b"1")
            point = tx.savepoint()
            tx.vote()
            for step in (tx.vote, tx.prepare, tx.savepoint, point.rollback, lambda: tx.send(ONE, b"2")):
                with pytest.raises(TransactionError, match="this transaction has voted; commit it or roll it back"):
                    step()
        assert contents(router, "one") == [b"1"]

    def test_closing_the_router_rolls_it_back(self, tmp_path: Path, where: str) -> None:
        router = anabranch.open(config(tmp_path / "data"))
        tx = voted(router, where)
        router.close()
        with router:  # the same object again
            assert (contents(router, "one"), router.in_doubt()) == ([b"old"], [])
            with pytest.raises(TransactionError, match="when the router was closed"):
                tx.commit()
            assert take(router, "one").body == b"old"

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_a_store_that_was_reopened_hears_the_outcome(
        self, router: anabranch.Router, where: str, outcome: str
    ) -> None:
        tx = voted(router, where)
        router.reopen("one")
        assert router.queue("one").receive() is None  # claimed still
        getattr(tx, outcome)()
        assert take(router, "one").body == (b"new" if outcome == "commit" else b"old")

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_a_store_that_was_closed_for_being_idle_hears_it(
        self, router: anabranch.Router, where: str, outcome: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 2)
        tx = router.transaction()
        tx.send(where, b"new")
        tx.vote()
        for number in range(4):
            router.queue(f"each.{number}").send(b"x")
        getattr(tx, outcome)()
        assert contents(router, "one") == ([b"new"] if outcome == "commit" else [])
        assert router.in_doubt() == []


class TestVoteOfOthers:
    def test_without_operations_it_writes_nothing(self, router: anabranch.Router, tmp_path: Path) -> None:
        with router.transaction() as tx:
            tx.vote()
        assert not (tmp_path / "data" / "decisions").exists()

    def test_after_no_it_is_rolled_back(self, router: anabranch.Router) -> None:
        router.queue("few").send(b"full")
        router.queue("one").send(b"old")
        tx = router.transaction()
        tx.ack(take(router, "one"))
        tx.send("few", b"never")
        with pytest.raises(StoreFullError):
            tx.vote()
        with pytest.raises(TransactionError, match="rolled back"):
            tx.commit()
        assert take(router, "one").body == b"old"

    def test_it_does_not_time_out(self, tmp_path: Path) -> None:
        def test(seconds: float, path: Path) -> None:
            with anabranch.open(config(path, timeout=seconds)) as router:
                voted = router.transaction()
                with in_time():
                    voted.send(BOTH, b"1")
                    voted.vote()
                later = router.transaction()
                eventually(lambda: later.state != "open")
                voted.commit()
                assert contents(router, "two") == [b"1"]

        with_time_enough(test, 0.05, tmp_path)

    def test_it_counts_as_open(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path / "data", max_open=1)) as router:
            tx = router.transaction()
            tx.vote()
            with pytest.raises(TransactionError, match="max_open is 1"):
                router.transaction()
            tx.commit()
            router.transaction()

    def test_its_xid_is_in_use(self, router: anabranch.Router) -> None:
        with router.transaction(Xid(1, "x")) as tx:
            tx.send("one", b"1")
            tx.vote()
            with pytest.raises(TransactionError, match="in use"):
                router.transaction(Xid(1, "x"))


class TestSavepoints:
    def test_back_and_forth(self, router: anabranch.Router) -> None:
        router.queue("one").send_many([b"1", b"2", b"3"])
        with router.transaction() as tx:
            tx.ack(take(router, "one"))
            tx.send("two", b"a")
            point = tx.savepoint()
            for body in (b"b", b"c"):
                tx.send(BOTH, body)
                tx.ack(take(router, "one"))
                point.rollback()
                point.rollback()  # harmless
            tx.send("two", b"d")
        assert (contents(router, "one"), contents(router, "two")) == ([b"2", b"3"], [b"a", b"d"])

    def test_what_was_undone_is_free_at_its_old_place(self, router: anabranch.Router) -> None:
        router.queue("one").send_many([b"1", b"2"])
        with router.transaction() as tx:
            start = tx.savepoint()
            message = take(router, "one")
            tx.ack(message)
            start.rollback()
            with pytest.raises(UnknownMessageError):
                tx.ack(message)  # the lease has gone with it
            assert take(router, "one").body == b"1"

    def test_a_store_that_only_the_undone_touched_takes_no_part(self, router: anabranch.Router, tmp_path: Path) -> None:
        with router.transaction() as tx:
            tx.send("one", b"1")
            point = tx.savepoint()
            tx.send("two", b"never")
            point.rollback()
        assert contents(router, "one") == [b"1"]
        assert not (tmp_path / "data" / "decisions").exists()  # one store: one batch

    def test_a_later_one_is_gone(self, router: anabranch.Router) -> None:
        with router.transaction() as tx:
            tx.send("one", b"1")
            early = tx.savepoint()
            tx.send("one", b"2")
            late = tx.savepoint()
            early.rollback()
            tx.send("one", b"3")
            with pytest.raises(TransactionError, match="this savepoint is gone"):
                late.rollback()
        assert contents(router, "one") == [b"1", b"3"]
        with pytest.raises(TransactionError, match="committed; begin another"):
            early.rollback()

    def test_what_was_undone_does_not_count_for_the_limits(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path / "data", max_operations=2, max_bytes=10)) as router:
            with router.transaction() as tx:
                point = tx.savepoint()
                for _ in range(3):
                    point.rollback()
                    tx.send(BOTH, b"12345")
            assert contents(router, "two") == [b"12345"]

    def test_many_at_one_point_are_one(self, router: anabranch.Router) -> None:
        with router.transaction() as tx:
            assert tx.savepoint() is tx.savepoint()
