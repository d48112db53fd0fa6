"""The contract of topics: durable subscriptions, each with its own backlog of messages that are stored once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing, Receipt
from anabranch.adapters.core.store_types import Change, Subscription, SubscriptionKey
from anabranch.policies.errors import (
    DestinationError,
    StoreFullError,
    SubscriptionError,
    TransactionError,
    UnknownMessageError,
    UnknownSubscriptionError,
)
from anabranch.policies.names.destination import Destination

from .disk import PATIENCE, A, Disk, Parallel, T, assert_whole, bodies, drain, eventually, take
from .preparing import prepare, transaction

U = Destination.parse("topic://u")
DESK = Subscription(T, "desk", "c1")
BOOK = Subscription(T, "book", "c1")
BOTH = (DESK.key, BOOK.key)

ODD = [
    "'; DROP TABLE MESSAGES; --",
    '"quoted" `name`',
    "with spaces\tand\nlines",
    "\U0001f600 ü",
    "x" * 1024,
    "%_[]*>..",
]


def subscribed(store: Store, *subscriptions: Subscription) -> Store:
    for subscription in subscriptions or (DESK, BOOK):
        assert store.subscribe(subscription)
    return store


def offline(store: Store) -> dict[SubscriptionKey, list[bytes]]:
    """What each subscription of T has yet to ack."""
    return {s.key: bodies(store, T, s.key) for s in store.subscriptions() if s.topic == T}


def take_for(store: Store, subscription: Subscription, count: int) -> list[Message]:
    return [take(store, subscription.topic, 0, subscription.key) for _ in range(count)]


class TopicsContract:
    # Subscriptions

    def test_subscriptions_come_back(self, disk: Disk, store: Store, place: str) -> None:
        all_of_them = [
            DESK,
            BOOK,
            DESK._replace(client_id="c2"),
            DESK._replace(client_id=""),
            DESK._replace(topic=U, selector="colour = 'red' AND weight > 2.5 -- ü", no_local=True),
            BOOK._replace(topic=U, selector=""),
            BOOK._replace(topic=U, name="only no_local", no_local=True),
        ]
        subscribed(store, *all_of_them)
        store = disk.later(store, place)
        found = store.subscriptions()
        assert len(found) == len(all_of_them)
        assert set(found) == set(all_of_them)
        assert {type(s.no_local) for s in found} == {bool}
        assert dict(store.stats().subscriptions) == dict.fromkeys(all_of_them, 0)
        assert_whole(store)

    def test_subscribing_again_changes_nothing(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store, DESK)
        store.send(T, b"1")
        store = disk.later(store, place)
        for retroactive in (False, True):
            assert store.subscribe(DESK, retroactive) is False
        assert (list(store.subscriptions()), drain(store, T, DESK.key)) == ([DESK], [b"1"])

    @pytest.mark.parametrize("other", [{"selector": "a = 1"}, {"no_local": True}, {"selector": "", "no_local": False}])
    def test_another_of_the_same_name_is_refused(self, store: Store, other: dict[str, Any]) -> None:
        """Its backlog would be lost, or wrong."""
        subscribed(store, DESK)
        store.send(T, b"1")
        with pytest.raises(SubscriptionError, match="desk"):
            store.subscribe(DESK._replace(**other))
        assert (list(store.subscriptions()), bodies(store, T, DESK.key)) == ([DESK], [b"1"])

    def test_a_queue_has_none(self, store: Store) -> None:
        with pytest.raises(DestinationError):
            store.subscribe(Subscription(A, "desk"))
        assert list(store.subscriptions()) == []

    def test_nobody_receives_from_a_topic_as_such(self, store: Store) -> None:
        subscribed(store, DESK)
        store.send(T, b"1")
        with pytest.raises(DestinationError):
            store.receive(T)

    def test_what_nobody_wanted_is_counted(self, disk: Disk, store: Store) -> None:
        """However it was sent, once it takes effect; and what a queue or a subscription has is not."""
        store.send(T, b"1", None, "id")
        store.send(A, b"a")
        assert store.send(T, b"1", None, "id").duplicate
        assert store.stats().dropped == 1
        store.send_many(T, [b"2", b"3"])
        store.send_nowait(T, b"4").result(PATIENCE)
        store.commit([(T, Outgoing(b"5")), (A, Outgoing(b"a"))], [], changes=[Change(Subscription(U, "desk"), True)])
        assert store.stats().dropped == 5
        prepare(store, 1, [(T, Outgoing(b"6")), (U, Outgoing(b"u"))])
        prepare(store, 2, [(T, Outgoing(b"7"))])
        assert store.stats().dropped == 5
        store.commit_prepared(transaction(1)).wait()
        store.rollback_prepared(transaction(2)).wait()
        subscribed(store)
        store.send(T, b"8")
        assert drain(store, T, DESK.key) == drain(store, T, BOOK.key) == [b"8"]
        assert store.stats().dropped == 6
        assert_whole(store)
        assert disk.later(store, "closed").stats().dropped == (6 if disk.volatile else 0)

    def test_unknown_subscriptions(self, store: Store) -> None:
        subscribed(store, DESK)
        store.send(T, b"1")
        for topic, key in ((T, ("c1", "other")), (T, ("c2", "desk")), (U, DESK.key)):
            with pytest.raises(UnknownSubscriptionError):
                store.receive(topic, 0, key)
            with pytest.raises(UnknownSubscriptionError):
                store.unsubscribe(topic, key)
        assert bodies(store, T, DESK.key) == [b"1"]

    def test_subscriptions_of_all_names(self, disk: Disk, store: Store, place: str) -> None:
        made = []
        for name in ODD:
            topic = Destination.parse("topic://" + name.replace("\n", " ")[:500])
            made.append((name, Subscription(topic, "n", name), Subscription(topic, name, "", f"s = {name}")))
            subscribed(store, *made[-1][1:])
            store.send(topic, b"1", {name: name}, name)
        store = disk.later(store, place)
        assert set(store.subscriptions()) == {subscription for _, *both in made for subscription in both}
        for name, of_client, of_name in made:
            topic = of_name.topic
            assert store.subscribe(of_name) is False
            message = take(store, topic, 0, of_name.key)
            assert (message.subscription, message.headers, message.message_id) == (("", name), {name: name}, name)
            assert store.send(topic, b"2", None, name).duplicate
            assert store.unsubscribe(topic, of_client.key) == 1
        assert_whole(store)

    # Who gets what

    def test_without_subscriptions_a_message_is_gone_at_once(self, disk: Disk, store: Store, place: str) -> None:
        before = store.last_seq
        first = store.send(T, b"1", None, "id")
        assert (first.destination, first.duplicate) == (T, False)
        assert first.seq > before
        more = store.send_many(T, [b"2", Outgoing(b"3", None, "id")])
        assert more == [Receipt(T, more[0].seq, False), Receipt(T, first.seq, True)]
        assert store.send_nowait(T, b"4").result(PATIENCE).seq > more[0].seq
        store.commit([(T, Outgoing(b"5"))], [])
        store = disk.later(store, place)
        subscribed(store)
        assert (bodies(store, T), store.depth(T), store.stats().messages) == ([], 0, 0)
        assert offline(store) == {DESK.key: [], BOOK.key: []}
        assert_whole(store)

    def test_what_nobody_wants_takes_no_room(self, disk: Disk) -> None:
        store = disk.create(max_messages=2)
        for _ in range(5):
            store.send_many(T, [b"x", b"y"])
        subscribed(store)
        store.send_many(T, [b"1", b"2"])  # once each, for both
        with pytest.raises(StoreFullError):
            store.send(T, b"3")
        assert offline(store) == {DESK.key: [b"1", b"2"], BOOK.key: [b"1", b"2"]}

    def test_each_gets_what_came_after_it(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store, DESK)
        store.send(T, b"1")
        subscribed(store, BOOK)
        store.send(T, b"2")
        store.send(U, b"another topic's")
        store.send(A, b"a queue's")
        store = disk.later(store, place)
        store.send(T, b"3")
        assert offline(store) == {DESK.key: [b"1", b"2", b"3"], BOOK.key: [b"2", b"3"]}
        assert drain(store, T, BOOK.key) == [b"2", b"3"]
        assert drain(store, T, DESK.key) == [b"1", b"2", b"3"]
        assert_whole(store)

    def test_retroactive_ones_get_what_is_still_held(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store, DESK)
        store.send_many(T, [b"1", b"2", b"3", b"4"])
        take_for(store, DESK, 1)[0].ack()  # by the last one: gone
        second, third = take_for(store, DESK, 2)
        assert store.subscribe(BOOK, retroactive=True)
        second.ack()
        store = disk.later(store, place)
        assert store.depth(T, BOOK.key) == 3
        store.send(T, b"5")
        assert drain(store, T, BOOK.key) == [b"2", b"3", b"4", b"5"]
        assert bodies(store, T, DESK.key) == [b"3", b"4", b"5"]
        if place == "here":
            third.ack()
            assert bodies(store, T) == [b"4", b"5"]
        assert_whole(store)

    def test_offline_backlog(self, disk: Disk, store: Store) -> None:
        """Whether or not anybody receives, however often the process ends."""
        subscribed(store)
        expected = {DESK.key: list[bytes](), BOOK.key: list[bytes]()}
        for n, place in enumerate(("here", "crashed", "closed", "crashed", "closed")):
            sent = [f"{n}.{k}".encode() for k in range(10)]
            store.send_many(T, sent)
            for key in BOTH:
                expected[key] += sent
            for message in take_for(store, DESK, 5):
                message.ack()
            del expected[DESK.key][:5]
            take_for(store, BOOK, 1)[0].ack()
            del expected[BOOK.key][:1]
            store.reclaim()
            store = disk.later(store, place)
            assert offline(store) == expected
            assert (store.depth(T, DESK.key), store.depth(T, BOOK.key)) == (5 * n + 5, 9 * n + 9)
            assert_whole(store)
        assert {key: drain(store, T, key) for key in BOTH} == expected
        assert (bodies(store, T), store.stats().messages) == ([], 0)

    def test_they_lease_independently(self, store: Store) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2"])
        first, second = take_for(store, DESK, 2)
        assert store.receive(T, 0, DESK.key) is None
        other = take_for(store, BOOK, 1)[0]
        assert (first.body, other.body, first.seq) == (b"1", b"1", other.seq)
        assert (first.subscription, other.subscription) == BOTH
        assert store.stats().leased == 3
        first.release()
        again = take_for(store, DESK, 1)[0]
        assert again.seq == first.seq
        with pytest.raises(UnknownMessageError):
            first.ack()
        other.ack()
        again.ack()
        with pytest.raises(UnknownMessageError):
            other.release()
        second.release()
        assert offline(store) == {DESK.key: [b"2"], BOOK.key: [b"2"]}

    def test_it_is_gone_when_the_last_has_acked(self, disk: Disk, store: Store) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2", b"3"])
        store.ack(take_for(store, DESK, 3))
        for view in disk.views(store):
            assert (view.depth(T), view.stats().messages, view.depth(T, DESK.key)) == (3, 3, 0)
            assert dict(view.stats().destinations)[T] == 3
            assert dict(view.stats().subscriptions) == {DESK: 0, BOOK: 3}
        first, second, third = take_for(store, BOOK, 3)
        store.ack([third, first])
        for view in disk.views(store):
            assert (bodies(view, T), view.depth(T)) == ([b"2"], 1)
            assert_whole(view)
        second.ack()
        for view in disk.views(store):
            assert (bodies(view, T), view.depth(T), view.stats().messages) == ([], 0, 0)
            assert_whole(view)

    def test_acks_in_any_order(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store)
        store.send_many(T, [str(n).encode() for n in range(100)])
        desk, book = take_for(store, DESK, 100), take_for(store, BOOK, 100)
        store.ack(desk[::3] + desk[1::3][::-1])
        store.ack(book[99:0:-2])
        book[50].ack()
        store = disk.later(store, place)
        odd, even = [str(n).encode() for n in range(2, 100, 3)], [str(n).encode() for n in range(0, 100, 2) if n != 50]
        assert offline(store) == {DESK.key: odd, BOOK.key: even}
        assert [message.body for message in store.browse(T)] == sorted({*odd, *even}, key=int)
        if place == "here":
            store.release([*desk[2::3], *(book[n] for n in range(0, 100, 2) if n != 50)])
        assert (drain(store, T, DESK.key), drain(store, T, BOOK.key)) == (odd, even)
        assert store.depth(T) == 0
        assert_whole(store)

    @pytest.mark.parametrize("persistent", [True, False])
    def test_room_for_a_lease_is_a_subscriptions_own(self, disk: Disk, persistent: bool) -> None:
        """Who waits for room is told of the ack that makes it, whatever others have acked before."""
        store = subscribed(disk.create(max_leases=1))
        heard = {key: SimpleQueue[Message]() for key in BOTH}
        store.send_many(T, [Outgoing(body, persistent=persistent) for body in (b"1", b"2")])
        for key in BOTH:
            store.listen(T, heard[key].put, 2, key)
        first = {key: heard[key].get(timeout=PATIENCE) for key in BOTH}
        eventually(lambda: store.stats().waiting == len(BOTH))  # each has found that there is no room
        for key in BOTH:
            first[key].ack()
            assert heard[key].get(timeout=PATIENCE).body == b"2"

    def test_one_ack_for_many_subscriptions(self, store: Store) -> None:
        subscribed(store)
        store.send(T, b"1")
        store.send(A, b"a")
        store.ack([*take_for(store, DESK, 1), take(store), *take_for(store, BOOK, 1)])
        assert store.stats().messages == 0
        assert_whole(store)

    def test_many_subscriptions_share_one_message(self, disk: Disk, store: Store, place: str) -> None:
        many = [Subscription(T, f"s{n}", f"c{n % 3}") for n in range(40)]
        subscribed(store, *many)
        store.send_many(T, [b"x" * 1000] * 25)
        store = disk.later(store, place)
        assert (store.stats().messages, store.depth(T)) == (25, 25)
        for n, subscription in enumerate(many):
            store.ack(take_for(store, subscription, 25 if n % 2 else 10))
        store = disk.later(store, place)
        assert [store.depth(T, s.key) for s in many] == [0 if n % 2 else 15 for n in range(40)]
        assert store.depth(T) == 15
        for subscription in many[::2]:
            assert store.unsubscribe(T, subscription.key) == 15
        assert (store.stats().messages, set(store.subscriptions())) == (0, set(many[1::2]))
        assert_whole(store)

    def test_message_ids(self, store: Store) -> None:
        subscribed(store)
        first = store.send(T, b"1", None, "id")
        assert store.send(T, b"2", None, "id") == Receipt(T, first.seq, True)
        assert not store.send(U, b"3", None, "id").duplicate
        assert offline(store) == {DESK.key: [b"1"], BOOK.key: [b"1"]}

    def test_a_topic_by_priority(self, disk: Disk, place: str) -> None:
        store = subscribed(disk.create(priorities=True))
        store.send_many(T, [Outgoing(str(p).encode(), priority=p) for p in (4, 1, 9, 4, 7)])
        take_for(store, BOOK, 1)[0].ack()
        store = disk.later(store, place)
        assert offline(store) == {DESK.key: [b"9", b"7", b"4", b"4", b"1"], BOOK.key: [b"7", b"4", b"4", b"1"]}
        store.send(T, b"8", priority=8)
        assert drain(store, T, BOOK.key) == [b"8", b"7", b"4", b"4", b"1"]
        message = take_for(store, DESK, 1)[0]
        assert next(store.browse(T, 1, message, DESK.key)).body == b"8"

    def test_browse_a_part_of_a_topic(self, store: Store) -> None:
        subscribed(store)
        seqs = [receipt.seq for receipt in store.send_many(T, [str(n).encode() for n in range(300)])]
        store.ack(take_for(store, DESK, 100)[::2])
        expected = [n for n in range(300) if n >= 100 or n % 2]
        assert [m.seq for m in store.browse(T, subscription=DESK.key)] == [seqs[n] for n in expected]
        found = [(m.seq, m.subscription, m.leased) for m in store.browse(T, 3, seqs[4], DESK.key)]
        assert found == [(seqs[n], DESK.key, False) for n in (5, 7, 9)]
        assert [(m.seq, m.subscription) for m in store.browse(T, 2, seqs[4])] == [(seqs[5], None), (seqs[6], None)]

    @pytest.mark.parametrize("how", ["send", "release", "commit", "rollback"])
    def test_who_waits_is_woken(self, store: Store, how: str) -> None:
        subscribed(store)
        store.send(T, b"x")
        message = take_for(store, DESK, 1)[0]
        name = prepared(store, [(T, Outgoing(b"x"))], [])
        if how == "rollback":
            store.claim(message)
        with Parallel(lambda: store.receive(T, None, DESK.key)) as receiver:
            assert receiver.outlives(0.05)
            if how == "send":
                store.send(T, b"x")
            elif how == "release":
                message.release()
            elif how == "commit":
                store.commit_prepared(name).wait()
            else:
                store.unclaim([message])
            assert receiver.result().body == b"x"

    def test_who_waits_is_told_that_it_is_unsubscribed(self, store: Store) -> None:
        subscribed(store)
        with Parallel(lambda: store.receive(T, None, DESK.key)) as receiver:
            assert receiver.outlives(0.05)
            store.unsubscribe(T, DESK.key)
            with pytest.raises(UnknownSubscriptionError):
                receiver.result()

    # Unsubscribing, purging, deleting

    def test_unsubscribe(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2", b"3"])
        take_for(store, BOOK, 1)[0].ack()
        take_for(store, DESK, 1)[0].ack()
        leased = take_for(store, DESK, 1)[0]
        assert store.unsubscribe(T, DESK.key) == 2  # the leased one too
        with pytest.raises(UnknownMessageError):
            leased.ack()
        assert store.stats().leased == 0
        store = disk.later(store, place)
        assert (list(store.subscriptions()), offline(store)) == ([BOOK], {BOOK.key: [b"2", b"3"]})
        assert store.depth(T) == 2
        with pytest.raises(UnknownSubscriptionError):
            store.receive(T, 0, DESK.key)
        assert store.subscribe(DESK._replace(selector="now another"))
        assert (store.receive(T, 0, DESK.key), store.depth(T, DESK.key)) == (None, 0)
        assert store.unsubscribe(T, BOOK.key) == 2
        assert (store.depth(T), store.stats().messages) == (0, 0)
        assert_whole(store)

    def test_the_last_to_unsubscribe_takes_all_with_it(self, disk: Disk, store: Store) -> None:
        subscribed(store)
        store.send_many(T, [b"x"] * 1300)
        assert store.unsubscribe(T, DESK.key) == 1300
        assert store.depth(T) == 1300
        assert store.unsubscribe(T, BOOK.key) == 1300
        for view in disk.views(store):
            assert (view.depth(T), view.stats().messages, list(view.subscriptions())) == (0, 0, [])
            assert_whole(view)

    def test_a_claim_refuses_to_unsubscribe(self, store: Store) -> None:
        subscribed(store)
        store.send(T, b"1")
        message = take_for(store, DESK, 1)[0]
        store.claim(message)
        with pytest.raises(TransactionError, match="claimed"):
            store.unsubscribe(T, DESK.key)
        assert store.unsubscribe(T, BOOK.key) == 1
        store.unclaim([message])
        assert store.unsubscribe(T, DESK.key) == 1
        assert store.depth(T) == 0

    def test_purge_of_one(self, disk: Disk, store: Store) -> None:
        subscribed(store)
        store.send_many(T, [str(n).encode() for n in range(10)])
        messages = take_for(store, DESK, 4)
        messages[1].release()
        assert store.purge(T, DESK.key) == 7
        assert store.purge(T, DESK.key) == 0
        for view in disk.views(store):
            assert offline(view)[DESK.key] == [b"0", b"2", b"3"]
            assert len(offline(view)[BOOK.key]) == view.depth(T) == 10
            assert_whole(view)
        assert store.receive(T, 0, DESK.key) is None
        assert store.purge(T, BOOK.key) == 10
        messages[0].ack()
        store.release(messages[2:])
        assert drain(store, T, DESK.key) == [b"2", b"3"]
        assert store.depth(T) == 0
        assert_whole(store)

    def test_purge_of_one_that_began_late_leaves_nothing_behind(self, disk: Disk, store: Store, place: str) -> None:
        """What was sent before it began is not its own, and goes without a trace once the others have acked it."""
        subscribed(store, DESK)
        store.send_many(T, [b"1", b"2", b"3"])
        subscribed(store, BOOK)
        assert store.purge(T, BOOK.key) == 0
        assert_whole(store)
        store.send(T, b"4")
        assert store.purge(T, BOOK.key) == 1
        store = disk.later(store, place)
        assert drain(store, T, DESK.key) == [b"1", b"2", b"3", b"4"]
        assert store.depth(T) == 0
        assert_whole(store)

    def test_purge_for_all(self, disk: Disk, store: Store) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2", b"3"])
        take_for(store, DESK, 1)[0].ack()
        assert store.purge(T) == 3
        for view in disk.views(store):
            assert (offline(view), view.depth(T)) == ({DESK.key: [], BOOK.key: []}, 0)
            assert_whole(view)
        store.send_many(T, [b"4", b"5"])
        message = take_for(store, DESK, 1)[0]
        store.purge(T)
        assert bodies(store, T, DESK.key) == [b"4"]  # held, so it stays
        message.ack()
        assert (offline(store)[DESK.key], set(store.subscriptions())) == ([], {DESK, BOOK})
        store.send(T, b"6")
        assert drain(store, T, BOOK.key)[-1] == b"6"
        assert_whole(store)

    def test_delete_of_a_topic(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store, DESK, BOOK, DESK._replace(topic=U))
        store.send_many(T, [b"1", b"2"])
        store.send(U, b"u")
        message = take_for(store, DESK, 1)[0]
        assert store.delete(T) == 2
        with pytest.raises(UnknownMessageError):
            message.ack()
        store = disk.later(store, place)
        assert (list(store.subscriptions()), bodies(store, T)) == ([DESK._replace(topic=U)], [])
        with pytest.raises(UnknownSubscriptionError):
            store.receive(T, 0, DESK.key)
        assert drain(store, U, DESK.key) == [b"u"]
        assert store.subscribe(DESK)
        store.send(T, b"new")
        assert drain(store, T, DESK.key) == [b"new"]
        assert_whole(store)

    def test_a_claim_refuses_to_delete_a_topic(self, store: Store) -> None:
        subscribed(store)
        store.send(T, b"1")
        store.claim(take_for(store, BOOK, 1)[0])
        with pytest.raises(TransactionError, match="claimed"):
            store.delete(T)
        assert offline(store) == {DESK.key: [b"1"], BOOK.key: [b"1"]}

    # Many threads

    def test_each_subscription_gets_each_message_once(self, disk: Disk, store: Store) -> None:
        """Producers, two receivers for each of three subscriptions, some of which give back."""
        three = [DESK, BOOK, DESK._replace(client_id="c3")]
        subscribed(store, *three)
        done = threading.Event()

        def consume(key: SubscriptionKey) -> list[bytes]:
            taken: list[bytes] = []
            while True:
                message = store.receive(T, 0.01, key)
                if message is None:
                    if done.is_set() and store.depth(T, key) == 0:
                        return taken
                elif message.seq % 7 == 0 and not message.redelivered:
                    message.release()
                elif message.seq % 5 == 0:
                    store.claim(message)
                    store.commit([], [message])
                    taken.append(message.body)
                else:
                    message.ack()
                    taken.append(message.body)

        def produce(number: int) -> None:
            for n in range(0, 90, 3):
                store.send(T, f"{number}.{n}".encode())
                store.send_many(T, [f"{number}.{n + k}".encode() for k in (1, 2)])

        with ThreadPoolExecutor(9) as pool:
            consumers = [pool.submit(consume, s.key) for s in three for _ in range(2)]
            for producer in [pool.submit(produce, n) for n in range(3)]:
                producer.result(3 * PATIENCE)
            done.set()
            taken = [consumer.result(3 * PATIENCE) for consumer in consumers]
        expected = sorted(f"{p}.{n}".encode() for p in range(3) for n in range(90))
        for one, two in zip(taken[::2], taken[1::2], strict=True):
            assert sorted(one + two) == expected
        for view in disk.views(store):
            assert (view.stats().messages, view.depth(T)) == (0, 0)
            assert_whole(view)


def prepared(store: Store, sends: list[tuple[Destination, Outgoing]], acks: list[Message]) -> bytes:
    """A branch that is prepared on return."""
    name = bytes(31) + b"\x07"
    store.prepare(name, [store.store_id], sends, acks, True, None).wait()
    return name
