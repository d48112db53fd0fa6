"""What prepared transactions do to a destination moves with it (rule J11, invariants 4 and 6)."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.migration import moved_branches
from anabranch.adapters.core.service.transactions import Step
from anabranch.policies.errors import PlacementError
from anabranch.router.migration.plan import plan_of
from anabranch.router.offline.repartition import repartition
from anabranch.router.transactions.decision_log import DecisionLog

from ..shares import Share
from ..taking import take
from .test_repartition import JOURNAL, KINDS, XID, Snapshots, config, fill, new, old

ELSEWHERE = anabranch.Xid(1, "other", "b")


def prepare(settings: anabranch.Config) -> None:
    """One that sends to and acks from destinations that go to three stores, and one that stays open."""
    with anabranch.open(settings) as router:
        transaction = router.transaction(XID)
        transaction.send("queue://a.x", b"sent", {"n": 7}, message_id="prepared")
        for name in "a.x", "a.y", "b":
            message = take(router.queue(name))
            transaction.ack(message)
        subscriber = router.topic("ticks").subscribe("second")
        message = take(subscriber)
        transaction.ack(message)
        transaction.send("topic://ticks", b"tick")
        transaction.send("queue://new", b"its first")
        transaction.prepare()
        other = router.transaction(ELSEWHERE)
        other.send("queue://b", b"never")
        other.prepare()


def seen(settings: anabranch.Config) -> dict[str, Any]:
    """What each destination and subscription shows once the outcomes are told."""
    with anabranch.open(settings) as router:
        assert router.recover() == [XID, ELSEWHERE]
        held = {name: router.queue(name).depth() for name in ("a.x", "a.y", "b")}
        router.commit(XID)
        router.rollback(ELSEWHERE)
        found: dict[str, Any] = {"held": held, "in doubt": router.in_doubt()}
        for name in "a.x", "a.y", "b", "new":
            found[name] = [(m.body, m.headers, m.message_id, m.deliveries) for m in router.queue(name).browse()]
        for subscription in router.subscriptions():
            store = router._registry.store_for(subscription.topic)
            messages = store.browse(subscription.topic, subscription=subscription.key)
            found[str(subscription)] = [(m.body, m.deliveries) for m in messages]
        found["again"] = router.queue("a.x").send(b"", message_id="prepared").duplicate
        for store in router._registry.all_stores():
            assert list(store.check()) == []
    return found


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_its_outcome_is_told_in_the_new_stores(tmp_path: Path, source: str, target: str) -> None:
    stays, moves = tmp_path / "stays", tmp_path / "moves"
    for directory in stays, moves:
        fill(old(directory, source))
        prepare(old(directory, source))
    expected = seen(old(stays, source))
    assert (
        expected["new"] == [(b"its first", {}, None, 0)]
        and (b"tick", 0)
        in expected[str(anabranch.Subscription(anabranch.Destination.parse("topic://ticks"), "second"))]
    )
    done = repartition(new(moves, target), old(moves, source))
    assert done.removed == ("all",)
    assert seen(new(moves, target)) == expected


def test_there_and_back(tmp_path: Path) -> None:
    before, after = old(tmp_path), new(tmp_path, "sql")
    fill(before)
    prepare(before)
    repartition(after, before)
    repartition(before, after)
    with anabranch.open(before) as router:
        assert {name for one in router.in_doubt() for name in one.stores} == {"all"}
        router.commit(XID)
        assert [m.body for m in router.queue("a.x").browse()][-1] == b"sent"


def test_an_empty_one_waits_for_its_outcome_too(tmp_path: Path) -> None:
    """Also one whose operations were undone."""
    before, after = old(tmp_path), new(tmp_path)
    fill(before)
    with anabranch.open(before) as router:
        router.transaction(XID).prepare()
        undone = router.transaction(ELSEWHERE)
        savepoint = undone.savepoint()
        undone.send("queue://a.x,queue://b", b"never")
        savepoint.rollback()
        undone.prepare()
    repartition(after, before)
    with anabranch.open(after) as router:
        assert router.recover() == [XID, ELSEWHERE]
        router.commit(XID)
        router.rollback(ELSEWHERE)
        assert (router.recover(), router.in_doubt()) == ([], [])


def test_some_of_it_stays(tmp_path: Path) -> None:
    """One branch becomes two, and two become one."""
    before = config(tmp_path, ("a", ["queue://a.x"]), ("rest", [">"]))
    after = config(tmp_path, ("a", ["queue://a.*"]), ("rest", [">"]))
    fill(before)
    prepare(before)
    done = repartition(after)
    assert [str(move.destination) for move in done.moves] == ["queue://a.y"]
    found = seen(after)
    assert (len(found["a.x"]), len(found["a.y"]), len(found["b"])) == (18, 17, 17)


def test_it_is_committed_however_long_its_new_store_stays_closed(tmp_path: Path) -> None:
    """The decision is remembered until the new store, which nobody has opened since, has carried it out."""
    before, after = old(tmp_path), new(tmp_path)
    fill(before)
    prepare(before)
    repartition(after)
    with anabranch.open(after) as router:
        router.commit(XID)
    for _ in range(2):
        with anabranch.open(after):
            pass
    with anabranch.open(after) as router:
        assert router.queue("a.x").send(b"", message_id="prepared").duplicate


@pytest.mark.parametrize(("source", "target"), [("journal", "sql"), ("sql", "journal"), ("sql", "sql")])
def test_ended_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, share: Share
) -> None:
    """Of journals tests.crash.moving spoils every call."""
    data = tmp_path / "data"
    before, after = old(data, source), new(data, target)
    fill(before)
    prepare(before)
    with monkeypatch.context() as patched:
        snapshots = Snapshots(data, tmp_path / "copies", patched, lambda step: step % share.every(40) == 0)
        snapshots.watch(moved_branches, "put")
        snapshots.watch(Step, "__init__")
        snapshots.watch(DecisionLog, "hold")
        repartition(after)
    shutil.copytree(data, tmp_path / "whole")
    expected = seen(new(tmp_path / "whole", target))
    for path in share.of(snapshots.paths):
        settings = new(path, target)
        repartition(settings, old(path, source))
        assert seen(settings) == expected


class TestRefused:
    def test_one_that_no_store_is_to_have(self, tmp_path: Path) -> None:
        with anabranch.open(old(tmp_path)) as router:
            transaction = router.transaction(XID)
            transaction.send("queue://a.x", b"prepared")
            transaction.prepare()
        after = config(tmp_path, ("b", ["queue://b"]))
        said = r"a\.x: transaction \w+ is prepared in store 'all', and no store that"
        with pytest.raises(PlacementError, match=said):
            repartition(after)
        with anabranch.open(old(tmp_path)) as router:
            router.commit(XID)
            assert router.queue("a.x").depth() == 1

    @pytest.mark.parametrize("name", ["queue://a.x", "queue://b"])
    def test_one_that_sends_a_large_message(self, tmp_path: Path, name: str) -> None:
        """Where it moves, or in the store that a part of it would come to."""
        journal = {"large_message_size": 1024}
        before = anabranch.Config(
            tmp_path,
            [
                anabranch.StoreConfig("a", ["queue://a.>"], journal=journal),
                anabranch.StoreConfig("rest", [">"], journal=journal),
            ],
        )
        after = anabranch.Config(tmp_path, [anabranch.StoreConfig("rest", [">"], journal=journal)])
        with anabranch.open(before) as router:
            router.queue("a.x").send(b"1")
            transaction = router.transaction(XID)
            transaction.send(name, io.BytesIO(b"x" * 5000))
            message = take(router.queue("a.x"))
            transaction.ack(message)
            transaction.prepare()
        said = r"nothing was changed.*\n  queue://a\.x: transaction \w+ is prepared in store 'a' and sends a large mes"
        with pytest.raises(PlacementError, match=said):
            repartition(after, before)
        with anabranch.open(before) as router:
            router.commit(XID)
            assert [one.read() for one in router.queue(name).browse()] == [b"x" * 5000]
            assert router.queue("a.x").depth() == (name == "queue://a.x")
        repartition(after, before)
        with anabranch.open(after) as router:
            assert [one.read() for one in router.queue(name).browse()] == [b"x" * 5000]

    def test_one_of_another_decision_log(self, tmp_path: Path) -> None:
        """Nobody can say what becomes of it."""
        fill(old(tmp_path))
        prepare(old(tmp_path))
        (tmp_path / "decisions").rename(tmp_path / "lost")
        with pytest.raises(PlacementError, match=r"and would change it, and waits for no transaction manager; give"):
            repartition(new(tmp_path))


def test_a_dry_run_counts_what_has_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = anabranch.Config(tmp_path, [anabranch.StoreConfig("all", [">"], journal=JOURNAL)])
    with anabranch.open(settings) as router:
        transaction = router.transaction(XID)
        transaction.send("queue://a.x", b"prepared")
        transaction.prepare()
    assert [str(move.destination) for move in plan_of(new(tmp_path))] == ["queue://a.x"]
    assert "1 transaction prepared in store all would change it; those that wait for" in caplog.text
