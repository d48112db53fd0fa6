"""The contract of subscriptions in transactions: changed, received from, sent to, all or none of it (invariant 4)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import Change, Prepared
from anabranch.policies.errors import StoreFullError, TransactionError, UnknownMessageError, UnknownSubscriptionError

from .disk import A, B, Disk, T, assert_whole, bodies, drain, drain_at_once, take
from .preparing import OTHER, Sends, to, transaction
from .topics import BOOK, DESK, U, offline, subscribed, take_for

JOIN, LEAVE = Change(DESK, True), Change(DESK, False)


def claim_for(store: Store) -> Message:
    """The desk's first message, for a transaction."""
    message = take_for(store, DESK, 1)[0]
    store.claim(message)
    return message


def prepare(
    store: Store, number: int, sends: Sends = (), acks: Sequence[Message] = (), changes: Sequence[Change] = ()
) -> bytes:
    """A branch that is prepared on return."""
    name = transaction(number)
    room = store.reserve(sends)
    store.prepare(name, [store.store_id, OTHER], sends, acks, True, room, changes).wait()
    return name


class ChangingContract:
    # In one store

    def test_a_commit_subscribes_then_sends_then_acks(self, disk: Disk, store: Store) -> None:
        """The new one gets what its own transaction sends."""
        subscribed(store, BOOK)
        store.send(T, b"before")
        message = take_for(store, BOOK, 1)[0]
        store.claim(message)
        receipts = store.commit(to(T, b"1"), [message], changes=[JOIN])
        assert [receipt.destination for receipt in receipts] == [T]
        for view in disk.views(store):
            assert set(view.subscriptions()) == {DESK, BOOK}
            assert offline(view) == {DESK.key: [b"1"], BOOK.key: [b"1"]}
            assert_whole(view)

    def test_a_commit_subscribes_retroactively(self, disk: Disk, store: Store) -> None:
        subscribed(store, BOOK)
        store.send_many(T, [b"1", b"2"])
        store.commit([], [], changes=[JOIN._replace(retroactive=True)])
        for view in disk.views(store):
            assert offline(view) == {DESK.key: [b"1", b"2"], BOOK.key: [b"1", b"2"]}

    def test_a_commit_unsubscribes(self, disk: Disk, store: Store) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2"])
        store.ack(take_for(store, BOOK, 1))
        leased = take_for(store, DESK, 1)[0]
        store.commit(to(T, b"3"), [], changes=[LEAVE])
        for view in disk.views(store):
            assert offline(view) == {BOOK.key: [b"2", b"3"]}
            assert view.depth(T) == 2
            assert_whole(view)
        with pytest.raises(UnknownMessageError):
            leased.ack()

    @pytest.mark.parametrize("prepared", [False, True])
    def test_nothing_is_received_for_who_has_left(self, store: Store, prepared: bool) -> None:
        """Also nothing of what was looked up ahead for him."""
        subscribed(store)
        store.send_many(T, [b"1", b"2", b"3"])
        store.release(take_for(store, DESK, 1))
        take_for(store, DESK, 1)
        if prepared:
            store.commit_prepared(prepare(store, 1, changes=[LEAVE])).wait()
        else:
            store.commit([], [], changes=[LEAVE])
        with pytest.raises(UnknownSubscriptionError):
            store.receive(T, 0, DESK.key)

    def test_the_last_ack_and_the_farewell(self, disk: Disk, store: Store) -> None:
        """A transaction may leave the subscription whose messages it acks."""
        subscribed(store)
        store.send_many(T, [b"1", b"2"])
        store.commit(to(A, b"gone"), [claim_for(store)], changes=[LEAVE])
        for view in disk.views(store):
            assert (offline(view), bodies(view)) == ({BOOK.key: [b"1", b"2"]}, [b"gone"])
            assert view.stats().leased == 0
            assert_whole(view)

    def test_leaving_and_joining_in_one(self, disk: Disk, store: Store) -> None:
        """In the order in which they are given: another selector, without the old backlog."""
        subscribed(store)
        store.send(T, b"1")
        changed = DESK._replace(selector="a = 1")
        store.commit(to(T, b"2"), [], changes=[LEAVE, Change(changed, True)])
        for view in disk.views(store):
            assert set(view.subscriptions()) == {changed, BOOK}
            assert offline(view) == {DESK.key: [b"2"], BOOK.key: [b"1", b"2"]}
            assert_whole(view)

    def test_what_is_no_change_any_more_is_passed_over(self, disk: Disk, store: Store) -> None:
        subscribed(store, DESK)
        store.send(T, b"1")
        store.commit([], [], changes=[JOIN, Change(DESK._replace(selector="other"), True), Change(BOOK, False)])
        for view in disk.views(store):
            assert (list(view.subscriptions()), offline(view)) == ([DESK], {DESK.key: [b"1"]})
            assert_whole(view)

    def test_a_commit_that_fails_changes_nothing(self, disk: Disk) -> None:
        store = disk.create(max_messages=1)
        subscribed(store, BOOK)
        store.send(T, b"1")
        message = take_for(store, BOOK, 1)[0]
        store.claim(message)
        with pytest.raises(StoreFullError):
            store.commit(to(A, b"2", b"3"), [message], changes=[JOIN, Change(BOOK, False)])
        assert list(store.subscriptions()) == [BOOK]
        store.unclaim([message])
        assert drain(store, T, BOOK.key) == [b"1"]

    def test_acks_of_several_subscriptions_and_queues(self, disk: Disk, store: Store) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2"])
        store.send(A, b"a")
        messages = [*take_for(store, DESK, 2), *take_for(store, BOOK, 1), take(store)]
        for message in messages:
            store.claim(message)
        with pytest.raises(UnknownMessageError):
            messages[0].ack()
        store.commit(to(B, b"b"), messages)
        for view in disk.views(store):
            assert (offline(view), view.depth(T)) == ({DESK.key: [], BOOK.key: [b"2"]}, 1)
            assert (bodies(view), bodies(view, B)) == ([], [b"b"])
            assert_whole(view)

    # In a branch

    def test_no_change_of_it_is_seen(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store, BOOK)
        store.send(T, b"1")
        prepare(store, 1, to(T, b"2"), (), [JOIN, Change(BOOK, False)])
        store = disk.later(store, place)
        assert (list(store.subscriptions()), bodies(store, T)) == ([BOOK], [b"1"])
        with pytest.raises(UnknownSubscriptionError):
            store.receive(T, 0, DESK.key)
        assert list(store.recover_prepared()) == [Prepared(transaction(1), (store.store_id, OTHER), 1, 0)]
        assert take_for(store, BOOK, 1)[0].body == b"1"
        assert_whole(store)

    def test_changes_of_its_commit(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store, DESK)
        store.send_many(T, [b"1", b"2"])
        changes = [Change(BOOK, True, retroactive=True), Change(DESK._replace(topic=U), True)]
        name = prepare(store, 1, [*to(T, b"3"), *to(U, b"u"), *to(A, b"a")], [claim_for(store)], changes)
        store.send(T, b"between")
        store = disk.later(store, place)
        receipts = store.commit_prepared(name).wait()
        assert [receipt.destination for receipt in receipts] == [T, U, A]
        store.sync()
        for view in disk.views(store):
            assert set(view.subscriptions()) == {DESK, BOOK, DESK._replace(topic=U)}
            assert offline(view)[DESK.key] == [b"2", b"between", b"3"]
            assert offline(view)[BOOK.key] == [b"1", b"2", b"between", b"3"]
            assert (bodies(view, U, DESK.key), bodies(view)) == ([b"u"], [b"a"])
            assert_whole(view)

    def test_its_commit_unsubscribes(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2"])
        name = prepare(store, 1, (), [claim_for(store)], [LEAVE])
        store.ack(take_for(store, BOOK, 1))
        store = disk.later(store, place)
        store.commit_prepared(name).wait()
        store.sync()
        for view in disk.views(store):
            assert (offline(view), view.depth(T), view.stats().leased) == ({BOOK.key: [b"2"]}, 1, 0)
            assert_whole(view)

    def test_changes_of_its_rollback(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store)
        store.send_many(T, [b"1", b"2"])
        name = prepare(store, 1, to(T, b"3"), [claim_for(store)], [LEAVE, Change(DESK._replace(topic=U), True)])
        store = disk.later(store, place)
        assert store.rollback_prepared(name).wait() is True
        message = take_for(store, DESK, 1)[0]
        assert (message.body, message.deliveries) == (b"1", 2)
        message.ack()
        store.sync()
        for view in disk.views(store):
            assert set(view.subscriptions()) == {DESK, BOOK}
            assert offline(view) == {DESK.key: [b"2"], BOOK.key: [b"1", b"2"]}
            assert_whole(view)

    def test_its_claims_are_nobody_elses(self, disk: Disk, store: Store, place: str) -> None:
        """Rule X6, for one subscription: the others go on."""
        subscribed(store)
        store.send_many(T, [b"1", b"2"])
        name = prepare(store, 1, (), [claim_for(store)])
        store = disk.later(store, place)
        assert take_for(store, DESK, 1)[0].body == b"2"
        assert store.receive(T, 0, DESK.key) is None
        with pytest.raises(TransactionError, match="claimed"):
            store.unsubscribe(T, DESK.key)
        with pytest.raises(TransactionError, match="claimed"):
            store.delete(T)
        assert drain(store, T, BOOK.key) == [b"1", b"2"]
        assert store.unsubscribe(T, BOOK.key) == 0
        assert not store.retire()
        store.commit_prepared(name).wait()
        assert bodies(store, T) == [b"2"]
        assert_whole(store)

    def test_the_first_to_change_wins(self, disk: Disk, store: Store, place: str) -> None:
        """What is prepared cannot fail: what is no change any more by then is skipped."""
        subscribed(store, BOOK)
        other = DESK._replace(selector="was first")
        names = [
            prepare(store, 1, to(T, b"1"), (), [JOIN, Change(BOOK, False)]),
            prepare(store, 2, to(T, b"2"), (), [Change(BOOK, False), JOIN]),
        ]
        store.subscribe(other)
        store.unsubscribe(T, BOOK.key)
        store = disk.later(store, place)
        for name in names:
            assert len(store.commit_prepared(name).wait()) == 1
        store.sync()
        for view in disk.views(store):
            assert (list(view.subscriptions()), offline(view)) == ([other], {DESK.key: [b"1", b"2"]})
            assert_whole(view)

    def test_it_sends_to_those_that_are_there_at_its_commit(self, disk: Disk, store: Store, place: str) -> None:
        subscribed(store, BOOK)
        name = prepare(store, 1, to(T, b"1"))
        store = disk.later(store, place)
        assert store.subscribe(DESK)
        assert store.unsubscribe(T, BOOK.key) == 0
        store.commit_prepared(name).wait()
        assert offline(store) == {DESK.key: [b"1"]}
        nobody = prepare(store, 2, to(T, b"2"))
        store = disk.later(store, place)
        store.unsubscribe(T, DESK.key)
        assert len(store.commit_prepared(nobody).wait()) == 1
        assert (store.depth(T), store.stats().messages) == (0, 0)
        assert_whole(store)

    def test_a_topic_that_was_deleted_meanwhile(self, disk: Disk, store: Store, place: str) -> None:
        """A branch's subscription brings it back, with what the branch sends."""
        subscribed(store, BOOK)
        store.send(T, b"old")
        name = prepare(store, 1, to(T, b"new"), (), [JOIN])
        store.delete(T)
        store = disk.later(store, place)
        store.commit_prepared(name).wait()
        store.sync()
        for view in disk.views(store):
            assert (list(view.subscriptions()), offline(view)) == ([DESK], {DESK.key: [b"new"]})
            assert_whole(view)

    def test_outcomes_are_told_twice(self, store: Store) -> None:
        name = prepare(store, 1, to(T, b"1"), (), [JOIN])
        store.commit_prepared(name).wait()
        store.unsubscribe(T, DESK.key)
        assert store.commit_prepared(name).wait() == []
        assert store.rollback_prepared(name).wait() is False
        assert list(store.subscriptions()) == []

    def test_changes_survive_many_restarts_and_reclaiming(self, disk: Disk, store: Store) -> None:
        """Subscriptions, their acks and the prepared ones, whatever else comes and goes (rule J6)."""
        subscribed(store)
        store.send_many(T, [b"1", b"2", b"3"])
        store.ack(take_for(store, BOOK, 2))
        names = [
            prepare(store, 1, to(T, b"4"), [claim_for(store)], [Change(DESK._replace(topic=U, selector="s"), True)]),
            prepare(store, 2, (), [claim_for(store)], [Change(BOOK, False)]),
        ]
        for place in ("crashed", "closed", "crashed", "closed"):
            store.send_many(B, [b"x" * 1000] * 150)
            assert len(drain_at_once(store, B)) == 150
            store.reclaim()
            store = disk.later(store, place)
            assert [prepared.transaction for prepared in store.recover_prepared()] == names
            assert offline(store) == {DESK.key: [b"1", b"2", b"3"], BOOK.key: [b"3"]}
            assert_whole(store)
        for name in names:
            store.commit_prepared(name).wait()
        store.send_many(B, [b"x" * 1000] * 150)
        drain_at_once(store, B)
        store.reclaim()
        store = disk.later(store)
        assert set(store.subscriptions()) == {DESK, DESK._replace(topic=U, selector="s")}
        assert offline(store) == {DESK.key: [b"3", b"4"]}
        assert_whole(store)
