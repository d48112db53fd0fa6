"""Messages that are not persistent: beside those that are, in one order, and gone at restart (rule T7)."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.wal import log
from anabranch.router.placement import open_stores

from ..contract.disk import PATIENCE, Parallel
from ..router.disk import SYNCED
from ..taking import drained, take


@pytest.fixture(autouse=True)
def no_sync_of_a_log_that_idles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs are counted here."""
    monkeypatch.setattr(log, "IDLE_SECONDS", 3600)


def one(tmp_path: Path, **options: object) -> anabranch.Config:
    journal = SYNCED.model_copy(update=options)
    stores = [
        anabranch.StoreConfig("m", ["m.>"], memory=anabranch.MemoryOptions()),
        anabranch.StoreConfig("all", [">"], journal=journal),
    ]
    return anabranch.Config(tmp_path / "data", stores)


def test_they_keep_their_place_among_the_others_and_go_with_the_process(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path)) as router:
        queue = router.queue("q")
        for number in range(6):
            queue.send(b"%d" % number, persistent=number % 2 == 0)
        assert [m.body for m in queue.browse()] == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert [m.body for m in queue.browse(limit=2, after=next(queue.browse(limit=1)))] == [b"1", b"2"]
        second = list(queue.browse())[1]
        assert [m.body for m in queue.browse(limit=2, after=second)] == [b"2", b"3"]
        first, again = take(queue), take(queue)
        assert (first.body, again.body) == (b"0", b"1")
        again.release()
        first.release()
        assert queue.depth() == 6
        assert [m.deliveries for m in queue.browse()] == [1, 1, 0, 0, 0, 0]
        assert take(queue).body == b"0"
        syncs = router.stats().stores["all"].syncs
        queue.send(b"6", persistent=False)
        assert router.stats().stores["all"].syncs == syncs  # never waited for
        receipts = queue.send_many([b"7", Outgoing(b"8", persistent=False), b"9"])
        assert len(receipts) == 3
        assert drained(queue) == [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9"]
        queue.send(b"10", persistent=False)
        queue.send(b"11")
    with anabranch.open(one(tmp_path)) as router:
        assert drained(router.queue("q")) == [b"0", b"11"]


def test_priorities_hold_over_both(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path, priorities=True)) as router:
        queue = router.queue("q")
        for number, priority in enumerate((4, 9, 4, 0, 9)):
            queue.send(b"%d" % number, priority=priority, persistent=number % 2 == 0)
        assert [m.body for m in queue.browse()] == [b"1", b"4", b"0", b"2", b"3"]
        assert drained(queue) == [b"1", b"4", b"0", b"2", b"3"]


def test_who_waits_is_woken_by_the_first_one_that_is_not_persistent(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path)) as router:
        queue = router.queue("q")
        with Parallel(lambda: queue.receive(timeout=PATIENCE)) as parallel:
            queue.send(b"1", persistent=False)
            assert parallel.result().body == b"1"
        with Parallel(lambda: queue.receive(timeout=PATIENCE)) as parallel:
            queue.send(b"2", persistent=False)
            assert parallel.result().body == b"2"
        with Parallel(lambda: queue.receive(timeout=PATIENCE)) as parallel:
            queue.send(b"3")
            assert parallel.result().body == b"3"
        assert queue.receive(timeout=0.01) is None


def test_subscriptions_have_them_too(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path)) as router:
        topic = router.topic("t")
        early = topic.subscribe("early", selector="x")
        topic.send(b"1", persistent=False)
        late = topic.subscribe("late")
        topic.send(b"2")
        topic.send(b"3", persistent=False)
        with router.transaction() as tx:
            tx.subscribe(topic, "last")
            tx.send(topic, b"4", persistent=False)
        assert drained(early) == [b"1", b"2", b"3", b"4"]
        assert drained(late) == [b"2", b"3", b"4"]
        assert late.unsubscribe() == 0
        topic.send(b"5", persistent=False)
        assert topic.subscribe("last").depth() >= 1
        assert topic.subscribe("late").receive() is None


@pytest.mark.parametrize("durable", [[], ["q"], ["q", "other.q"]], ids=["none", "one", "two"])
def test_a_transaction_over_them_is_seen_as_one(tmp_path: Path, durable: list[str]) -> None:
    setup = one(tmp_path)
    other = anabranch.StoreConfig("other", ["other.>"], journal=SYNCED)
    setup = anabranch.Config(setup.directory, [*setup.stores, other])
    with anabranch.open(setup) as router:
        acked = []
        for name in [*durable, "m.q"]:
            router.queue(name).send(b"old")
            acked.append(take(router.queue(name)))
        router.queue("x").send(b"old", persistent=False)
        acked.append(take(router.queue("x")))
        before = router.stats()
        tx = router.transaction()
        for message in acked:
            tx.ack(message)
        for name in [*durable, "m.q"]:
            tx.send(name, b"new")
        tx.send("x", b"new", persistent=False)
        names = [*durable, "m.q", "x"]
        assert [router.queue(name).depth() for name in names] == [1] * len(names)
        receipts = tx.commit()
        assert len(receipts) == len(names)
        assert all(receipt.seq for receipt in receipts)
        assert [[m.body for m in router.queue(name).browse()] for name in names] == [[b"new"]] * len(names)
        after = router.stats()
        # One that remembers needs no second phase: its own commit's sync is the only one (rule T7).
        if len(durable) == 1:
            assert after.stores["all"].syncs - before.stores["all"].syncs == 1
        assert (after.decision_syncs > before.decision_syncs) == (len(durable) > 1)
        with pytest.raises(ZeroDivisionError), router.transaction() as tx:
            for name in names:
                tx.ack(take(router.queue(name)))
                tx.send(name, b"never", persistent=name != "x")
            raise ZeroDivisionError
        assert [[m.body for m in router.queue(name).browse()] for name in names] == [[b"new"]] * len(names)
        assert list(router.stats().stores) != []
    with anabranch.open(setup) as router:
        assert [router.queue(name).depth() for name in names] == [1] * len(durable) + [0, 0]


def test_a_participant_that_is_full_stops_all(tmp_path: Path) -> None:
    stores = [
        anabranch.StoreConfig("m", ["m.>"], memory=anabranch.MemoryOptions(max_messages=1)),
        anabranch.StoreConfig("all", [">"], journal=SYNCED),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        router.queue("m.q").send(b"1")
        router.queue("q").send(b"1")
        with pytest.raises(anabranch.StoreFullError), router.transaction() as tx:
            tx.ack(take(router.queue("q")))
            tx.send("queue://q,queue://m.q", b"2")
        assert [m.body for m in router.queue("q").browse()] == [b"1"]
        assert take(router.queue("q")).body == b"1"


def test_a_prepared_external_transaction_is_carried_out_in_memory_too(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path)) as router:
        router.queue("m.q").send(b"1")
        for xid, commit in ((anabranch.Xid(1, "g", "a"), True), (anabranch.Xid(1, "g", "b"), False)):
            tx = router.transaction(xid=xid)
            tx.ack(take(router.queue("m.q")))
            tx.send("queue://m.q,queue://q", b"2")
            tx.send("queue://q", b"3", persistent=False)
            tx.prepare()
            assert router.queue("m.q").receive() is None
            (router.commit if commit else router.rollback)(xid)
            assert [m.body for m in router.queue("m.q").browse()] == [b"2"]
            assert [m.body for m in router.queue("q").browse()] == [b"2", b"3"]
        assert router.in_doubt() == []


def test_messages_of_memory_and_of_no_importance_are_one_thing_there(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path)) as router:
        router.queue("m.q").send(b"1", persistent=False)
        router.queue("m.q").send(b"2")
        assert drained(router.queue("m.q")) == [b"1", b"2"]
        assert set(router.stats().stores) == {"m"}


def test_a_commit_that_unsubscribes_succeeds_whoever_has_claimed_a_message_of_no_importance(tmp_path: Path) -> None:
    """What is committed is committed; who unsubscribes alone is refused, as for any message."""
    with anabranch.open(one(tmp_path)) as router:
        topic = router.topic("t")
        subscriber = topic.subscribe("s")
        topic.send(b"1", persistent=False)
        message = take(subscriber)
        other = router.transaction()
        other.ack(message)
        with pytest.raises(anabranch.TransactionError):
            subscriber.unsubscribe()
        with router.transaction() as tx:
            tx.unsubscribe(subscriber.subscription)
            tx.send("q", b"2")
        assert tx.state == "committed"
        assert topic.subscriptions() == []
        with pytest.raises(anabranch.UnknownMessageError):
            other.commit()
        assert topic.subscribe("s").depth() == 0
        topic.subscribe("s").unsubscribe()


def test_what_an_external_transaction_begins_or_ends_begins_and_ends_here_too(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path)) as router:
        topic = router.topic("t")
        old = topic.subscribe("old")
        topic.send(b"0", persistent=False)
        tx = router.transaction(xid=anabranch.Xid(1, "g", "b"))
        tx.subscribe(topic, "new")
        tx.unsubscribe(old.subscription)
        tx.prepare()
        router.commit(anabranch.Xid(1, "g", "b"))
        topic.send(b"1", persistent=False)
        (new,) = topic.subscriptions()
        assert new.depth() == 1
        assert drained(new) == [b"1"]
        assert topic.subscribe("old").depth() == 0


def test_nothing_is_kept_for_a_subscription_that_was_ended(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path)) as router:
        topic = router.topic("t")
        subscriber = topic.subscribe("s")
        topic.send(b"1", persistent=False)
        subscriber.unsubscribe()
        with pytest.raises(anabranch.UnknownSubscriptionError):
            subscriber.receive()
        topic.send(b"2", persistent=False)
        assert router.stats().stores["all"].messages == 0


def test_a_memory_store_forgets_transactions_that_nobody_asks_about(tmp_path: Path) -> None:
    """Else it would be kept open for ever, and they would be very many (invariant 10)."""
    with anabranch.open(one(tmp_path)) as router:
        with router.transaction() as tx:
            tx.send("queue://m.q,queue://q", b"1")
        xid = anabranch.Xid(1, "g", "b")
        tx = router.transaction(xid=xid)
        tx.send("queue://m.q,queue://q", b"2")
        tx.prepare()
        router.commit(xid)
        assert drained(router.queue("m.q")) == [b"1", b"2"]
        (store,) = (store for store in router._registry.open_stores() if store.name == "m")
        assert store.committed() == []
        assert store.retire()


@pytest.mark.parametrize("beside", [True, False])
def test_the_durable_store_is_closed_for_being_idle_before_they_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr(open_stores, "OPEN_STORES_MAX", 1)
    setup = one(tmp_path)
    other = anabranch.StoreConfig("other", ["other.>"], journal=SYNCED)
    with anabranch.open(anabranch.Config(setup.directory, [*setup.stores, other])) as router:
        router.queue("q").send(b"0")
        tx = router.transaction()
        tx.send("q", b"1", persistent=False)
        if beside:
            tx.send("other.q", b"2")
        router.queue("other.q").send(b"3")
        assert "all" not in {store.name for store in router._registry.open_stores()}
        tx.commit()
        assert tx.state == "committed"
        assert [(m.body, m.persistent) for m in router.queue("q").browse()] == [(b"0", True), (b"1", False)]
        assert router.in_doubt() == []


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_store_in_which_nothing_persistent_is_done_needs_no_second_phase(tmp_path: Path, outcome: str) -> None:
    setup = one(tmp_path)
    other = anabranch.StoreConfig("other", ["other.>"], journal=SYNCED)
    with anabranch.open(anabranch.Config(setup.directory, [*setup.stores, other])) as router:
        router.queue("q").send(b"1", persistent=False)
        router.queue("other.q").send(b"2")
        before = router.stats()
        tx = router.transaction()
        tx.ack(take(router.queue("q")))
        tx.send("q", b"3", persistent=False)
        tx.ack(take(router.queue("other.q")))
        getattr(tx, outcome)()
        after = router.stats()
        assert after.decision_syncs == before.decision_syncs
        assert after.stores["all"].syncs == before.stores["all"].syncs
        assert drained(router.queue("q")) == ([b"3"] if outcome == "commit" else [b"1"])
        assert drained(router.queue("other.q")) == ([] if outcome == "commit" else [b"2"])
        assert router.in_doubt() == []
        for commit in (True, False):  # an external one, of such messages alone in one of its stores
            xid = anabranch.Xid(1, "g", str(commit))
            tx = router.transaction(xid=xid)
            tx.send("q", b"4", persistent=False)
            tx.send("other.q", b"5")
            tx.prepare()
            assert router.queue("q").receive() is None
            (router.commit if commit else router.rollback)(xid)
            assert drained(router.queue("q")) == ([b"4"] if commit else [])
            assert drained(router.queue("other.q")) == ([b"5"] if commit else [])
        assert router.in_doubt() == []


def test_a_dead_letter_is_as_persistent_as_it_was(tmp_path: Path) -> None:
    with anabranch.open(one(tmp_path, dead_letter="dlq", max_deliveries=1)) as router:
        for persistent in (True, False):
            router.queue("q").send(b"%d" % persistent, persistent=persistent)
            take(router.queue("q")).release()
        assert router.sweep() == 2
        assert [(m.body, m.persistent) for m in router.queue("dlq").browse()] == [(b"1", True), (b"0", False)]
        assert router.requeue("dlq") == 2
        assert [(m.body, m.persistent) for m in router.queue("q").browse()] == [(b"1", True), (b"0", False)]
    with anabranch.open(one(tmp_path)) as router:
        assert drained(router.queue("q")) == [b"1"]


@pytest.mark.parametrize("kind", ["journal", "sql", "memory"])
def test_their_swap_files_are_as_large_as_it_is_said(tmp_path: Path, kind: str) -> None:
    """A file goes once all in it are gone: so small ones follow a queue that moves on, and a large one does not."""
    models = {"journal": anabranch.JournalOptions, "sql": anabranch.SqlOptions, "memory": anabranch.MemoryOptions}
    memory = "max_bytes" if kind == "memory" else "nonpersistent_memory"
    files: dict[int, list[int]] = {}
    for size in (64 * 1024, 1024 * 1024):
        directory = tmp_path / str(size)
        options = models[kind](roll_over_size=size, **{memory: 64 * 1024})
        store = anabranch.StoreConfig("s", [">"], **{kind: options})
        with anabranch.open(anabranch.Config(directory, [store])) as router:
            queue = router.queue("q")
            for number in range(40):
                queue.send(b"%d" % number + bytes(20_000), persistent=False)
            files[size] = [len(list(directory.glob("stores/s/swap/*.swap")))]
            for number in range(30):
                message = take(queue)
                assert message.body.rstrip(b"\0") == (b"%d" % number).rstrip(b"\0")
                message.ack()
            files[size].append(len(list(directory.glob("stores/s/swap/*.swap"))))
    assert files[1024 * 1024] == [1, 1]
    assert files[64 * 1024][0] > 5
    assert files[64 * 1024][1] < files[64 * 1024][0] // 2
