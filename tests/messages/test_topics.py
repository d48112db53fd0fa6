"""Topics and durable subscriptions through the router."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch

from ..contract.disk import eventually
from ..router.disk import SYNCED
from ..taking import take


@pytest.fixture
def setup(tmp_path: Path) -> anabranch.Config:
    return anabranch.Config(
        tmp_path / "data",
        [
            anabranch.StoreConfig("prices", ["topic://prices.>"], journal=SYNCED),
            anabranch.StoreConfig("rest", [">"], journal=SYNCED),
        ],
    )


def received(subscriber: anabranch.Subscriber) -> list[bytes]:
    found = []
    while (message := subscriber.receive()) is not None:
        found.append(message.body)
        message.ack()
    return found


def test_each_subscription_has_a_backlog_of_its_own_over_restarts(setup: anabranch.Config) -> None:
    with anabranch.open(setup) as router:
        prices = router.topic("prices.eu")
        prices.send(b"before")
        audit = prices.subscribe("audit", client_id="a", selector="sku = 'T-1'", no_local=True)
        prices.send_many([b"1", b"2"])
        board = prices.subscribe("board")
        prices.send(b"3")
        assert received(board) == [b"3"]
        assert (audit.depth(), board.depth(), prices.depth()) == (3, 0, 3)
    with anabranch.open(setup) as router:
        prices = router.topic("topic://prices.eu")
        assert router.subscriptions() == [
            anabranch.Subscription(prices.destination, "board"),
            anabranch.Subscription(prices.destination, "audit", "a", "sku = 'T-1'", True),
        ]
        audit = prices.subscribe("audit", client_id="a", selector="sku = 'T-1'", no_local=True)
        first = take(audit)
        assert (first.body, first.subscription) == (b"1", ("a", "audit"))
        assert [m.body for m in audit.browse(after=first)] == [b"2", b"3"]
        first.ack()
        assert audit.purge() == 2
        assert prices.depth() == 0
        assert [s.subscription.name for s in prices.subscriptions()] == ["board", "audit"]
        assert audit.unsubscribe() == 0
        with pytest.raises(anabranch.UnknownSubscriptionError):
            audit.receive()


def test_another_subscription_of_the_same_name_is_refused_with_the_next_step(setup: anabranch.Config) -> None:
    with anabranch.open(setup) as router:
        topic = router.topic("t")
        topic.subscribe("s", selector="a = 1")
        topic.send(b"1")
        with pytest.raises(anabranch.SubscriptionError, match="unsubscribe"):
            topic.subscribe("s", selector="a = 2")
        with (
            router.transaction() as tx,
            pytest.raises(anabranch.SubscriptionError, match=r"'a = 1'.*unsubscribe"),
        ):
            tx.subscribe("t", "s", selector="a = 2")
        assert topic.subscribe("s", selector="a = 1").depth() == 1


def test_kinds_are_not_mixed_up(setup: anabranch.Config) -> None:
    with anabranch.open(setup) as router:
        with pytest.raises(anabranch.DestinationError, match=r"topic://t is a topic.*router.topic"):
            router.queue("topic://t")
        with pytest.raises(anabranch.DestinationError, match=r"queue://q is a queue.*router.queue"):
            router.topic("queue://q")


def test_a_transaction_subscribes_sends_and_acks_over_stores_as_one(setup: anabranch.Config) -> None:
    with anabranch.open(setup) as router:
        prices, orders = router.topic("prices.eu"), router.queue("orders")
        old = prices.subscribe("old")
        orders.send(b"order")
        message = take(orders)
        with router.transaction() as tx:
            new = tx.subscribe(prices, "new")
            tx.unsubscribe(old)
            tx.send("topic://prices.eu,queue://copies", b"1")
            tx.ack(message)
            assert [s.subscription.name for s in prices.subscriptions()] == ["old"]  # others see nothing before
        assert [s.subscription for s in prices.subscriptions()] == [new]
        assert [m.body for m in prices.subscriptions()[0].browse()] == [b"1"]
        assert orders.depth() == 0
        tx = router.transaction()
        tx.subscribe("other", "s")
        point = tx.savepoint()
        tx.unsubscribe(new)
        tx.send(prices, b"2")
        point.rollback()
        tx.rollback()
        assert len(router.subscriptions()) == 1


def test_a_prepared_change_survives_a_restart(setup: anabranch.Config) -> None:
    xid = anabranch.Xid(7, "g", "b")
    with anabranch.open(setup) as router:
        prices = router.topic("prices.eu")
        kept = prices.subscribe("kept")
        prices.send(b"1")
        message = take(kept)
        tx = router.transaction(xid=xid)
        tx.ack(message)
        tx.subscribe("prices.us", "new")
        tx.send("topic://prices.us,topic://prices.eu,queue://q", b"2")
        tx.prepare()
    with anabranch.open(setup) as router:
        kept = router.topic("prices.eu").subscribe("kept")
        assert kept.receive() is None  # acked by what is prepared
        router.commit(xid)
        assert received(kept) == [b"2"]
        assert [m.body for m in router.topic("prices.us").subscriptions()[0].browse()] == [b"2"]
        assert router.queue("q").depth() == 1


def test_a_topic_is_deleted_with_its_subscriptions(setup: anabranch.Config) -> None:
    with anabranch.open(setup) as router:
        topic = router.topic("t")
        topic.subscribe("s")
        topic.send(b"1")
        topic.send(b"2", persistent=False)
        assert router.destinations() == [topic.destination]
        assert topic.delete() == 2
        assert router.subscriptions() == []
        assert router.destinations() == []


def test_a_topic_says_whom_to_receive_from(setup: anabranch.Config) -> None:
    with anabranch.open(setup) as router:
        prices = router.topic("prices.eu")
        for name in ("receive", "receive_many", "consume", "listen"):
            assert not hasattr(prices, name)
            with pytest.raises(AttributeError, match=rf"prices\.eu is a topic.* topic\.subscribe\(name\)\.{name}\(\)"):
                getattr(prices, name)
        with pytest.raises(AttributeError, match="'Topic' object has no attribute 'recieve'"):
            prices.recieve()  # type: ignore[attr-defined]
        assert not router.exists("topic://prices.eu")


def test_what_no_subscription_wanted_is_counted_as_dropped(setup: anabranch.Config) -> None:
    """In the store that the topic lives in, persistent or not; and in all."""
    with anabranch.open(setup) as router:
        prices, other = router.topic("prices.eu"), router.topic("other")
        prices.send(b"1")
        other.send(b"2")
        other.send(b"3", persistent=False)
        router.send("topic://prices.us,topic://other,queue://q", b"4")
        with router.transaction() as tx:
            tx.subscribe(prices, "board")
            tx.send(prices, b"5")
            tx.send(other, b"6")
        prices.send(b"7", persistent=False)
        stats = router.stats()
        assert {name: store.dropped for name, store in stats.stores.items()} == {"prices": 2, "rest": 4}
        assert stats.dropped == 6
        router.queue("q").send(b"8", expires_in=0.001)
        eventually(lambda: router.stats().dropped == 7)  # expired, and nowhere to be put
