"""The contract of messages that are not persistent: beside those that are, in one order, and gone with the process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DELIVERY_LIMIT, EXPIRED, Message, Outgoing
from anabranch.adapters.core.store_types import Change, Counts, Settlement, Subscription
from anabranch.policies.errors import StoreFullError, TransactionError, UnknownMessageError, UnknownSubscriptionError

from .disk import PATIENCE, A, B, Disk, Parallel, T, assert_whole, bodies, drain, survives, take
from .expiring import messages_of, undelivered
from .preparing import claim, prepare

DESK, BOOK, PAD = (Subscription(T, name) for name in ("desk", "book", "pad"))


def passing(body: bytes, **options: object) -> Outgoing:
    """A message that is not persistent."""
    return Outgoing(body, persistent=False, **options)  # type: ignore[arg-type]


def alternate(store: Store, count: int = 6) -> None:
    """The numbers from 0 on, the odd ones not persistent."""
    for number in range(count):
        store.send(A, b"%d" % number, persistent=number % 2 == 0)


def kinds(store: Store) -> list[tuple[bytes, bool]]:
    return [(message.body, message.persistent) for message in store.browse(A)]


class NonpersistentContract:
    # In one order with the others

    def test_all_are_in_one_order(self, store: Store) -> None:
        alternate(store)
        assert kinds(store) == [(b"%d" % n, n % 2 == 0) for n in range(6)]
        seqs = [message.seq for message in store.browse(A)]
        assert seqs == sorted(set(seqs))
        assert bodies(store) == [message.body for message in store.browse(A, after=seqs[0] - 1)]
        assert [message.body for message in store.browse(A, limit=2, after=seqs[1])] == [b"2", b"3"]
        first, second = take(store), take(store)
        assert (first.body, second.body, second.persistent) == (b"0", b"1", False)
        second.release()
        first.release()
        assert [message.deliveries for message in store.browse(A)] == [1, 1, 0, 0, 0, 0]
        assert store.counts(A) == Counts(6, 0)
        assert drain(store) == [b"%d" % n for n in range(6)]
        assert_whole(store)

    def test_a_store_is_whole_while_they_are_held(self, store: Store) -> None:
        store.subscribe(DESK)
        alternate(store)
        store.send(T, b"x", persistent=False)
        store.claim(take(store))
        held = [take(store), claim(store), take(store, T, 0, DESK.key)]
        assert [message.persistent for message in held] == [False, True, False]
        assert_whole(store)

    def test_they_go_with_the_process(self, disk: Disk, store: Store, place: str) -> None:
        alternate(store)
        take(store).release()
        store.send(B, b"of no other kind", persistent=False)
        later = disk.later(store, place)
        gone = later is not store
        assert bodies(later) == ([b"0", b"2", b"4"] if gone else [b"%d" % n for n in range(6)])
        assert bodies(later, B) == ([] if gone else [b"of no other kind"])
        receipt = later.send(A, b"6", persistent=False)
        assert receipt.seq > max(message.seq for message in later.browse(A, limit=3))
        assert drain(later)[-1] == b"6"
        assert_whole(later)

    @survives
    def test_they_wait_for_no_disk(self, store: Store) -> None:
        store.send(A, b"0")
        first = take(store)
        if (syncs := self._syncs_of_some(store)) > 0:  # of the mark that an idle log leaves, once
            syncs = self._syncs_of_some(store)
        assert syncs == 0
        first.release()
        assert bodies(store) == [b"0"]

    def _syncs_of_some(self, store: Store) -> int:
        """Return how often the store syncs while messages are sent and acked that are not persistent."""
        before = store.stats()
        store.send(A, b"1", persistent=False)
        store.send_nowait(A, b"2", persistent=False).result()
        store.send_many(A, [passing(b"3"), passing(b"4")])
        store.commit([(A, passing(b"5"))], [])
        messages = [take(store) for _ in range(5)]
        store.ack(messages[:2])
        store.ack_nowait([messages[2]]).result()
        assert store.settle([store.token(messages[3])], Settlement.ACK) == [None]
        messages[4].release()
        last = take(store)
        assert (last.body, last.deliveries) == (b"5", 2)
        last.ack()
        after = store.stats()
        assert after.batches == before.batches
        assert (after.sends - before.sends, after.acks - before.acks) == (5, 5)
        return after.syncs - before.syncs

    def test_priorities_hold_over_both(self, disk: Disk) -> None:
        store = disk.create(priorities=True)
        for number, priority in enumerate((4, 9, 4, 0, 9, 4)):
            store.send(A, b"%d" % number, priority=priority, persistent=number % 2 == 0)
        store.commit([(A, Outgoing(b"6", priority=9)), (A, passing(b"7", priority=9)), (A, passing(b"8"))], [])
        expected = [b"1", b"4", b"6", b"7", b"0", b"2", b"5", b"8", b"3"]
        assert bodies(store) == expected
        third = list(store.browse(A))[2]
        assert [message.body for message in store.browse(A, after=third)] == expected[3:]
        assert drain(store) == expected

    def test_many_at_once_keep_their_order(self, store: Store) -> None:
        receipts = store.send_many(A, [b"0", passing(b"1"), passing(b"2"), b"3", passing(b"4")])
        assert [receipt.seq for receipt in receipts] == [message.seq for message in store.browse(A)]
        assert drain(store) == [b"0", b"1", b"2", b"3", b"4"]

    def test_who_waits_gets_them(self, store: Store) -> None:
        for number in range(4):
            with Parallel(lambda: take(store, timeout=PATIENCE)) as receiving:
                if number < 3:
                    store.send(A, b"%d" % number, persistent=number % 2 == 1)
                else:
                    store.commit([(A, passing(b"3"))], [])
                message = receiving.result()
            assert message.body == b"%d" % number
            message.ack()

    def test_threads_that_send_and_receive_both(self, store: Store) -> None:
        """None is lost or doubled, and each sender's come in order, to one who receives."""
        count, senders = 60, 3

        def send(who: int) -> None:
            for number in range(count):
                store.send(A, b"%d %d" % (who, number), persistent=(number + who) % 2 == 0)

        found: list[bytes] = []
        with ThreadPoolExecutor(senders) as pool:
            sending = [pool.submit(send, who) for who in range(senders)]
            while len(found) < count * senders:
                message = take(store, timeout=PATIENCE)
                found.append(message.body)
                message.ack()
            for one in sending:
                one.result()
        by_sender = [[body for body in found if body.startswith(b"%d " % who)] for who in range(senders)]
        assert by_sender == [[b"%d %d" % (who, number) for number in range(count)] for who in range(senders)]
        assert (store.depth(A), store.receive(A)) == (0, None)
        assert_whole(store)

    # Topics

    def test_each_subscription_has_them(self, store: Store) -> None:
        store.send(T, b"0", persistent=False)  # for nobody
        store.subscribe(DESK)
        store.send(T, b"1", persistent=False)
        store.subscribe(BOOK)
        store.send(T, b"2")
        store.send(T, b"3", persistent=False)
        store.subscribe(PAD, retroactive=True)
        assert store.stats().dropped == 1
        assert store.stats().subscriptions == {DESK: 3, BOOK: 2, PAD: 3}
        assert drain(store, T, BOOK.key) == [b"2", b"3"]
        assert store.depth(T) == 3
        message = take(store, T, subscription=DESK.key)
        assert (message.body, message.subscription) == (b"1", DESK.key)
        message.release()
        assert take(store, T, subscription=DESK.key).deliveries == 2
        assert store.unsubscribe(T, DESK.key) == 3
        assert drain(store, T, PAD.key) == [b"1", b"2", b"3"]
        assert store.depth(T) == 0
        with pytest.raises(UnknownSubscriptionError):
            store.receive(T, 0, DESK.key)
        store.subscribe(DESK)
        assert store.depth(T, DESK.key) == 0
        assert_whole(store)

    def test_a_commit_that_subscribes_and_sends(self, store: Store) -> None:
        store.subscribe(DESK)
        store.send(T, b"0", persistent=False)
        store.commit([(T, passing(b"1")), (T, Outgoing(b"2"))], [], changes=[Change(BOOK, True)])
        store.send(T, b"3", persistent=False)
        assert drain(store, T, BOOK.key) == [b"1", b"2", b"3"]
        assert drain(store, T, DESK.key) == [b"0", b"1", b"2", b"3"]
        assert_whole(store)

    # Message ids

    def test_ids(self, store: Store) -> None:
        """What is stored durably need not be stored again; what is not does not stand for what is to be."""
        kept = store.send(A, b"1", message_id="kept")
        assert store.send(A, b"2", message_id="kept", persistent=False) == (A, kept.seq, True)
        first = store.send(A, b"3", message_id="passing", persistent=False)
        assert store.send(A, b"4", message_id="passing", persistent=False) == (A, first.seq, True)
        receipts = store.commit([(A, passing(b"5", message_id="passing")), (A, Outgoing(b"6"))], [])
        assert (receipts[0].seq, receipts[0].duplicate, receipts[1].duplicate) == (first.seq, True, False)
        found = store.find(A, "passing")
        assert found is not None
        assert (found.body, found.persistent) == (b"3", False)
        take(store, A).ack()
        take(store, A).ack()
        again = passing(b"7", message_id="passing")._replace(requeued=True)
        assert not store.send_many(A, [again])[0].duplicate
        assert bodies(store) == [b"6", b"7"]

    @survives
    def test_an_id_of_one_does_not_hide_a_persistent_one(self, disk: Disk, store: Store, place: str) -> None:
        store.send(A, b"1", message_id="x", persistent=False)
        assert not store.send(A, b"2", message_id="x").duplicate
        assert bodies(disk.later(store, place)) == ([b"1", b"2"] if place == "here" else [b"2"])

    # What is not delivered any more

    @survives
    @pytest.mark.parametrize("within", [False, True])
    def test_a_subscription_that_began_behind_them_misses_nothing_after_a_crash(
        self, disk: Disk, store: Store, within: bool, place: str
    ) -> None:
        """Nobody knows of their seqs any more, and it is for what comes behind these (rule A5)."""
        alternate(store)
        if within:
            store.commit([], [], changes=[Change(DESK, True)])
        else:
            store.subscribe(DESK)
        for _ in range(2):
            later = disk.later(store, place)
            later.send_many(T, [b"%d" % number for number in range(8)])
            assert drain(later, T, subscription=DESK.key) == [b"%d" % number for number in range(8)]
            assert_whole(later)
            store = later

    def test_they_expire(self, store: Store) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(A, b"1", expires_at_ms=1, persistent=False)
        store.send(A, b"2", expires_at_ms=1)
        store.send(T, b"3", expires_at_ms=1, persistent=False)
        assert store.receive(A) is None
        assert store.receive(T, 0, DESK.key) is None
        found = store.take_undelivered()
        assert {(one.message.body, one.reason, one.message.persistent) for one in found} == {
            (b"1", EXPIRED, False), (b"2", EXPIRED, True), (b"3", EXPIRED, False),
        }  # fmt: skip
        store.ack(messages_of(found))
        assert (store.depth(A), store.depth(T)) == (0, 0)
        assert_whole(store)

    def test_deliveries_are_limited(self, disk: Disk) -> None:
        store = disk.create(max_deliveries=2, dead_letter="dlq")
        store.send(A, b"1", persistent=False)
        store.send(A, b"2", persistent=False)
        for _ in range(2):
            take(store).release()
        assert take(store).body == b"2"
        ((message, reason),) = undelivered(store)
        assert (message.body, reason, message.persistent) == (b"1", DELIVERY_LIMIT, False)

    # Limits

    def test_they_count_among_the_messages_that_a_store_holds(self, disk: Disk) -> None:
        store = disk.create(max_messages=3)
        store.send(A, b"1", persistent=False)
        store.send(A, b"2")
        store.send_many(A, [passing(b"3")])
        for persistent in (True, False):
            with pytest.raises(StoreFullError):
                store.send(A, b"4", persistent=persistent)
            with pytest.raises(StoreFullError):
                store.commit([(A, Outgoing(b"4", persistent=persistent))], [])
        take(store).ack()
        store.send(A, b"4", persistent=False)
        assert bodies(store) == [b"2", b"3", b"4"]

    def test_leases_are_limited(self, disk: Disk) -> None:
        store = disk.create(max_leases=2)
        alternate(store)
        take(store), take(store)
        with pytest.raises(StoreFullError):
            store.receive(A)

    # Transactions

    def test_a_commit_of_both(self, disk: Disk, store: Store, place: str) -> None:
        alternate(store, 4)
        acked = [claim(store), claim(store)]
        receipts = store.commit([(A, Outgoing(b"4")), (A, passing(b"5")), (A, Outgoing(b"6"))], acked)
        assert [receipt.seq for receipt in receipts] == [message.seq for message in store.browse(A)][2:]
        later = disk.later(store, place)
        assert bodies(later) == ([b"2", b"3", b"4", b"5", b"6"] if later is store else [b"2", b"4", b"6"])
        assert_whole(later)

    def test_a_commit_whose_persistent_part_is_there_already(self, store: Store) -> None:
        first = store.send(A, b"1", message_id="x")
        with Parallel(lambda: take(store, B, timeout=PATIENCE)) as receiving:
            again = store.commit([(A, Outgoing(b"1", message_id="x")), (B, passing(b"2"))], [])
            message = receiving.result()
        assert ((again[0].seq, again[0].duplicate), again[1].seq) == ((first.seq, True), message.seq)
        assert (bodies(store), bodies(store, B)) == ([b"1"], [b"2"])

    def test_all_or_none_are_acked(self, store: Store) -> None:
        alternate(store)
        messages = [take(store) for _ in range(4)]
        store.ack(messages[1:2])
        with pytest.raises(UnknownMessageError):
            store.ack(messages)
        store.release([messages[0]])
        store.ack(messages[2:])
        assert bodies(store) == [b"0", b"4", b"5"]
        assert drain(store) == [b"0", b"4", b"5"]

    def test_what_is_given_back_is_counted(self, store: Store) -> None:
        alternate(store)
        store.release([take(store) for _ in range(4)])
        store.release_nowait([take(store) for _ in range(2)]).result()
        tokens = [store.token(take(store)) for _ in range(2)]
        assert store.settle(tokens, Settlement.RELEASE) == [None, None]
        assert [message.deliveries for message in store.browse(A)] == [3, 3, 1, 1, 0, 0]

    def test_a_branch_of_both(self, disk: Disk, store: Store, place: str) -> None:
        alternate(store, 4)
        acked = [claim(store), claim(store)]
        branch = prepare(store, 1, [(A, passing(b"4")), (A, Outgoing(b"5")), (A, passing(b"6"))], acked)
        (prepared,) = store.recover_prepared()
        assert (prepared.sends, prepared.acks) == (3, 2)
        assert [message.body for message in store.browse(A)] == [b"0", b"1", b"2", b"3"]
        later = disk.later(store, place)
        receipts = later.commit_prepared(branch).wait()
        gone = later is not store
        assert bodies(later) == ([b"2", b"5"] if gone else [b"2", b"3", b"4", b"5", b"6"])
        assert [receipt.seq for receipt in receipts] == [message.seq for message in later.browse(A)][1 if gone else 2 :]
        assert (later.commit_prepared(branch).wait(), later.recover_prepared()) == ([], [])
        assert_whole(later)

    def test_a_branch_of_both_that_is_rolled_back(self, store: Store) -> None:
        alternate(store, 4)
        branch = prepare(store, 1, [(A, passing(b"4")), (A, Outgoing(b"5"))], [claim(store), claim(store)])
        assert take(store).body == b"2"
        assert store.rollback_prepared(branch).wait()
        assert not store.rollback_prepared(branch).wait()
        assert [message.deliveries for message in store.browse(A)] == [1, 1, 0, 0]
        assert [take(store).body for _ in range(3)] == [b"0", b"1", b"3"]

    def test_a_branch_of_them_alone(self, store: Store) -> None:
        alternate(store, 4)
        store.ack([take(store)])
        before = store.stats()
        for commit in (False, True):
            branch = prepare(store, 1, [(A, passing(b"4")), (B, passing(b"5"))], [claim(store)])
            assert [prepared.transaction for prepared in store.recover_prepared()] == [branch]
            assert bodies(store) == [b"1", b"2", b"3"]
            assert not store.retire()
            if commit:
                assert [receipt.destination for receipt in store.commit_prepared(branch).wait()] == [A, B]
            else:
                assert store.rollback_prepared(branch).wait()
            assert store.recover_prepared() == []
        assert store.stats().syncs == before.syncs
        assert bodies(store) == [b"2", b"3", b"4"]
        assert drain(store, B) == [b"5"]
        assert_whole(store)

    # Upkeep

    def test_purge_and_delete(self, store: Store) -> None:
        alternate(store)
        first, second = take(store), take(store)
        assert store.purge(A) == 4
        assert bodies(store) == [b"0", b"1"]
        second.release()
        assert store.purge(A) == 1
        alternate(store, 2)
        first.release()
        assert drain(store) == [b"0", b"0", b"1"]
        alternate(store, 3)
        leased = [take(store), take(store)]
        store.claim(leased[1])
        with pytest.raises(TransactionError):
            store.delete(A)
        store.unclaim([leased[1]])
        assert store.delete(A) == 3
        assert (store.receive(A), store.depth(A), store.stats().messages) == (None, 0, 0)
        with pytest.raises(UnknownMessageError):
            leased[0].ack()
        store.send(A, b"anew", persistent=False)
        assert drain(store) == [b"anew"]
        assert_whole(store)

    def test_a_destination_of_them_alone(self, store: Store) -> None:
        store.send(B, b"1", message_id="x", persistent=False)
        assert store.destinations() == [B]
        assert (store.depth(B), store.stats().destinations[B]) == (1, 1)
        message = take(store, B)
        assert store.delete(B) == 1
        with pytest.raises(UnknownMessageError):
            message.ack()
        assert store.destinations() == []
        assert not store.send(B, b"2", message_id="x", persistent=False).duplicate
        assert drain(store, B) == [b"2"]

    def test_a_store_that_holds_some_does_not_retire(self, store: Store) -> None:
        store.send(A, b"1", persistent=False)
        assert not store.retire()
        assert store.stats().memory_bytes > 0
        assert drain(store) == [b"1"]

    def test_a_listener_hears_them(self, store: Store) -> None:
        heard: list[Message] = []
        done = threading.Event()

        def on_message(message: Message) -> None:
            heard.append(message)
            if len(heard) == 6:
                done.set()

        store.listen(A, on_message, credit=10)
        alternate(store)
        assert done.wait(PATIENCE)
        assert [message.body for message in heard] == [b"%d" % n for n in range(6)]
