"""The contract of ack, release, transactions, duplicates, purge and delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import MADE, MadeId, Outgoing, Receipt
from anabranch.policies.errors import TransactionError, UnknownMessageError

from .disk import PATIENCE, A, B, C, Disk, T, assert_whole, bodies, drain, survives, take


class SettlingContract:
    # ack

    def test_ack_removes(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        take(store).ack()
        assert bodies(store) == [b"2", b"3"]
        assert store.depth(A) == 2
        again = disk.later(store)
        assert drain(again) == [b"2", b"3"]
        assert_whole(again)

    def test_ack_of_many(self, store: Store) -> None:
        store.send_many(A, [str(n).encode() for n in range(10)])
        store.send(B, b"b")
        messages = [take(store) for _ in range(5)]
        store.ack([*messages[::-1], take(store, B)])
        assert bodies(store) == [str(n).encode() for n in range(5, 10)]
        assert bodies(store, B) == []
        assert store.stats().acks == 6

    def test_ack_of_nothing(self, store: Store) -> None:
        store.ack([])
        store.release([])

    def test_ack_twice(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        message.ack()
        ways: list[Callable[[], object]] = [message.ack, message.release, lambda: store.claim(message)]
        for again in ways:
            with pytest.raises(UnknownMessageError):
                again()
        assert bodies(store) == [b"2"]

    def test_ack_is_all_or_none(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        one, two, three = (take(store) for _ in range(3))
        two.ack()
        for some in ([one, two, three], [one, three, one]):
            with pytest.raises(UnknownMessageError):
                store.ack(some)
        assert bodies(store) == [b"1", b"3"]
        store.ack([one, three])
        assert bodies(store) == []

    def test_what_was_browsed_cannot_be_settled(self, store: Store) -> None:
        store.send(A, b"x")
        (message,) = store.browse(A)
        take(store)  # although somebody has leased it
        ways: list[Callable[[], object]] = [message.ack, message.release, lambda: store.claim(message)]
        for settle in ways:
            with pytest.raises(UnknownMessageError, match="browsed"):
                settle()
        assert bodies(store) == [b"x"]

    @survives
    def test_a_lease_of_before_is_worth_nothing(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x")
        message = take(store)
        again = disk.crash(store)
        with pytest.raises(UnknownMessageError):
            again.ack([message])
        assert bodies(again) == [b"x"]

    def test_a_message_of_another_store_is_refused(self, disk: Disk) -> None:
        one, two = disk.create(), disk.create()
        one.send(A, b"1")
        two.send(A, b"2")
        message = take(one)
        take(two)
        for settle in (two.ack, two.release):
            with pytest.raises(UnknownMessageError):
                settle([message])
        with pytest.raises(UnknownMessageError):
            two.claim(message)
        assert bodies(two) == [b"2"]

    # release

    def test_release_gives_the_old_place_back(self, store: Store) -> None:
        sent = [str(n).encode() for n in range(150)]
        store.send_many(A, sent)
        messages = [take(store) for _ in range(100)]
        store.release([messages[70], messages[3], messages[99]])
        messages[40].release()
        assert [take(store).body for _ in range(5)] == [sent[3], sent[40], sent[70], sent[99], sent[100]]

    def test_release_before_anything_was_acked(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        for _ in range(5):
            message = take(store)
            assert message.body == b"1"
            message.release()
        assert drain(store) == [b"1", b"2"]

    def test_release_twice(self, store: Store) -> None:
        store.send(A, b"x")
        message = take(store)
        message.release()
        for again in (message.release, message.ack):
            with pytest.raises(UnknownMessageError):
                again()
        assert drain(store) == [b"x"]

    def test_release_is_all_or_none(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        one, two = take(store), take(store)
        two.ack()
        with pytest.raises(UnknownMessageError):
            store.release([one, two])
        assert take(store).body == b"3"
        one.ack()

    # transactions

    def test_commit_applies_all(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        store.claim(message)
        receipts = store.commit(
            [(B, Outgoing(b"b", {"h": 1}, "id")), (A, Outgoing(b"3")), (C, Outgoing(b"c"))], [message]
        )
        assert [r.destination for r in receipts] == [B, A, C]
        assert [r.seq for r in receipts] == sorted({r.seq for r in receipts})
        assert bodies(store, A) == [b"2", b"3"]
        (b,) = store.browse(B)
        assert (b.body, b.headers, b.message_id, b.seq) == (b"b", {"h": 1}, "id", receipts[0].seq)
        again = disk.later(store)
        assert (bodies(again, A), bodies(again, B), bodies(again, C)) == ([b"2", b"3"], [b"b"], [b"c"])
        assert_whole(again)

    def test_commit_of_nothing(self, store: Store) -> None:
        assert store.commit([], []) == []

    def test_a_big_commit_is_one(self, disk: Disk, store: Store) -> None:
        """More than a batch and more than a file: still all or none, here all."""
        store.send_many(A, [b"x"] * 50)
        messages = [take(store) for _ in range(50)]
        for message in messages:
            store.claim(message)
        sent = [str(n).encode() * 300 for n in range(500)]
        store.commit([(B, Outgoing(body)) for body in sent], messages)
        again = disk.later(store)
        assert bodies(again, A) == []
        assert drain(again, B) == sent
        assert_whole(again)

    def test_a_claimed_message_is_the_transactions(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        store.claim(message)
        ways: list[Callable[[], object]] = [message.ack, message.release, lambda: store.claim(message)]
        for settle in ways:
            with pytest.raises(UnknownMessageError):
                settle()
        assert take(store).body == b"2"
        assert store.receive(A) is None
        store.commit([], [message])
        assert bodies(store) == [b"2"]

    def test_what_is_not_claimed_cannot_be_committed(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        one, two = take(store), take(store)
        store.claim(one)
        with pytest.raises(UnknownMessageError):
            store.commit([(B, Outgoing(b"b"))], [one, two])
        assert bodies(store, B) == []
        store.unclaim([one])
        assert take(store).body == b"1"

    def test_unclaim_gives_the_old_places_back(self, store: Store) -> None:
        store.send_many(A, [str(n).encode() for n in range(5)])
        messages = [take(store) for _ in range(4)]
        for message in messages[:3]:
            store.claim(message)
        store.unclaim(messages[2::-1])
        with pytest.raises(UnknownMessageError):
            store.unclaim(messages[:3])
        assert [take(store).body for _ in range(4)] == [b"0", b"1", b"2", b"4"]

    @survives
    def test_a_claim_ends_with_the_process(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x")
        store.claim(take(store))
        assert drain(disk.crash(store)) == [b"x"]

    # duplicates

    def test_a_message_id_is_stored_once(self, store: Store) -> None:
        first = store.send(A, b"1", None, "id")
        second = store.send(A, b"2", None, "id")
        assert not first.duplicate
        assert second == Receipt(A, first.seq, True)
        assert bodies(store) == [b"1"]

    def test_a_message_id_twice_in_one_batch(self, store: Store) -> None:
        receipts = store.send_many(A, [Outgoing(b"1", None, "x"), b"2", Outgoing(b"3", None, "x")])
        assert [r.duplicate for r in receipts] == [False, False, True]
        assert receipts[2].seq == receipts[0].seq
        assert bodies(store) == [b"1", b"2"]

    def test_a_message_id_sent_without_waiting(self, store: Store) -> None:
        futures = [store.send_nowait(A, b"x", None, "id") for _ in range(20)]
        receipts = [future.result(PATIENCE) for future in futures]
        assert [r.duplicate for r in receipts] == [False] + [True] * 19
        assert len({r.seq for r in receipts}) == 1
        assert store.depth(A) == 1

    def test_an_id_of_the_librarys_own_is_shown_to_nobody(self, disk: Disk, store: Store) -> None:
        made: Any = MadeId(MADE + "client-1")
        first = store.send(A, b"1", None, made)
        again = [
            store.send(A, b"2", None, made),
            store.send_nowait(A, b"2", None, made).result(PATIENCE),
            Receipt(A, *store.begin_sends([(A, Outgoing(b"2", None, made))]).wait()[0]),  # type: ignore[misc]
            *store.send_many(A, [Outgoing(b"2", None, made)]),
            *store.commit([(A, Outgoing(b"2", None, made))], []),
        ]
        assert again == [first] * 5 and not first.duplicate
        store = disk.later(store)
        assert store.send(A, b"2", None, made) == first
        assert [(one.body, one.message_id) for one in store.browse(A)] == [(b"1", None)]
        message = take(store)
        assert (message.body, message.message_id) == (b"1", None)
        found = store.find(A, made)
        assert found is not None and found.message_id is None
        message.ack()
        assert store.send(A, b"2", None, made) == first
        assert bodies(store) == []

    def test_an_id_that_begins_as_the_librarys_own_is_refused(self, store: Store) -> None:
        message = Outgoing(b"1", None, MADE + "client-1")
        calls: list[Callable[[], object]] = [
            lambda: store.send(A, *message[:3]),
            lambda: store.send_nowait(A, *message[:3]).result(PATIENCE),
            lambda: store.send_many(A, [b"x", message]),
            lambda: store.commit([(A, message)], []),
            lambda: store.find(A, MADE + "client-1"),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="begins with"):
                call()
        assert bodies(store) == []

    def test_a_message_id_is_a_destinations(self, store: Store) -> None:
        assert not store.send(A, b"1", None, "id").duplicate
        assert not store.send(B, b"2", None, "id").duplicate
        assert (bodies(store, A), bodies(store, B)) == ([b"1"], [b"2"])

    def test_a_message_id_in_transactions(self, store: Store) -> None:
        first = store.commit([(A, Outgoing(b"1", None, "x")), (A, Outgoing(b"1", None, "x"))], [])
        assert [r.duplicate for r in first] == [False, True]
        second = store.commit([(A, Outgoing(b"2", None, "x")), (B, Outgoing(b"2"))], [])
        assert second == [Receipt(A, first[0].seq, True), Receipt(B, second[1].seq, False)]
        assert store.send(A, b"3", None, "x").duplicate
        assert (bodies(store, A), bodies(store, B)) == ([b"1"], [b"2"])

    def test_only_duplicates_change_nothing(self, disk: Disk, store: Store) -> None:
        seq = store.send(A, b"1", None, "x").seq
        for _ in range(3):
            assert store.send_many(A, [Outgoing(b"2", None, "x")]) == [Receipt(A, seq, True)]
        assert store.send(A, b"3").seq > seq
        assert bodies(disk.later(store)) == [b"1", b"3"]

    def test_a_message_id_of_an_acked_message(self, store: Store) -> None:
        store.send(A, b"1", None, "id")
        take(store).ack()
        assert store.send(A, b"2", None, "id").duplicate
        assert bodies(store) == []

    @survives
    @pytest.mark.parametrize("crash", [False, True])
    def test_the_window_survives(self, disk: Disk, store: Store, crash: bool) -> None:
        seq = store.send(A, b"1", None, "id").seq
        store.send(B, b"1", None, "acked")
        take(store, B).ack()
        if crash:
            again = disk.crash(store)
        else:
            store.close()
            again = disk.reopen(store)
        assert again.send(A, b"2", None, "id") == Receipt(A, seq, True)
        assert again.send(B, b"2", None, "acked").duplicate
        assert (bodies(again, A), bodies(again, B)) == ([b"1"], [])

    def test_the_window_forgets_the_oldest(self, disk: Disk, place: str) -> None:
        store = disk.create(duplicate_window=3)
        for name in "abcd":
            store.send(A, name.encode(), None, name)
        store = disk.later(store, place)
        assert [store.send(A, b"again", None, name).duplicate for name in "dcb"] == [True] * 3
        assert not store.send(A, b"again", None, "a").duplicate

    def test_the_window_forgets_when_a_batch_is_over(self, disk: Disk) -> None:
        """A batch is sent with the window that it met, whatever it brings into it."""
        store = disk.create(duplicate_window=2)
        store.send_many(A, [Outgoing(b"1", None, "1"), Outgoing(b"2", None, "2")])
        for batch in (("3", "1"), ("4", "5", "3")):
            receipts = store.commit([(A, Outgoing(b"x", None, name)) for name in batch], [])
            assert [receipt.duplicate for receipt in receipts] == [False] * (len(batch) - 1) + [True]

    def test_a_requeued_message_is_no_duplicate(self, disk: Disk, store: Store, place: str) -> None:
        """A dead letter that is put back where it came from, under the id that it had there."""
        first = store.send(A, b"1", None, "id")
        take(store).ack()
        store.send(B, b"letter")
        letter = take(store, B)
        store.claim(letter)
        back = store.commit([(A, Outgoing(b"2", None, "id", requeued=True))], [letter])[0]
        assert (back.duplicate, back.seq > first.seq) == (False, True)
        assert not store.send_many(A, [Outgoing(b"3", None, "id", requeued=True)])[0].duplicate
        store = disk.later(store, place)
        for view in disk.views(store):
            assert [(message.body, message.message_id) for message in view.browse(A)] == [(b"2", "id"), (b"3", "id")]
            assert view.send(A, b"4", None, "id").duplicate
            assert (drain(view), drain(view, B)) == ([b"2", b"3"], [])
            assert_whole(view)

    def test_a_requeued_id_is_among_the_latest_again(self, disk: Disk, place: str) -> None:
        """A window that reads its own order wrong forgets all of them."""
        store = disk.create(duplicate_window=3)
        store.send_many(A, [Outgoing(b"x", None, name) for name in "abc"])
        receipts = store.commit([(A, Outgoing(b"y", None, "a", requeued=True)), (A, Outgoing(b"x", None, "d"))], [])
        assert [receipt.duplicate for receipt in receipts] == [False, False]
        store.send(A, b"x", None, "e")
        store = disk.later(store, place)
        assert [store.send(A, b"z", None, name).duplicate for name in "eda"] == [True] * 3
        assert_whole(store)

    @pytest.mark.parametrize("window", [1, 7, 100])
    def test_the_latest_are_known_later(self, disk: Disk, window: int) -> None:
        """Also where others fell out, and went with queues that are no more."""
        store = disk.create(duplicate_window=window)
        names = [f"id-{n}" for n in range(25)]
        for turn in range(3):
            for name in names[:5]:
                assert not store.send(B, b"x", None, name).duplicate
            store.send_many(A, [Outgoing(b"x", None, f"{turn}.{name}") for name in names])
            take(store).ack()
            store.delete(B)
            store = disk.later(store)
            assert all(store.send(A, b"y", None, f"{turn}.{name}").duplicate for name in names[-window:])
        assert_whole(store)

    def test_sends_of_many_callers_are_stored_or_refused_each(self, disk: Disk, store: Store) -> None:
        first = store.send(A, b"1", None, "id")
        given: list[Any] = [
            (A, Outgoing(b"2")), (A, Outgoing(b"3", None, "id")), (B, Outgoing(b"4", {"h": 1}, "id")),
            (A, Outgoing("no bytes")), (A, Outgoing(b"5", None, "")), (A, Outgoing(b"6", None, "new")),
            (A, Outgoing(b"7", None, "new")), (T, Outgoing(b"8")),
        ]  # fmt: skip
        results: list[Any] = store.begin_sends(given).wait()
        assert [type(one) for one in results[3:5]] == [TypeError, ValueError]
        seqs = [one[0] for one in results[:3] + results[5:]]
        assert seqs == [first.seq + 1, first.seq, first.seq + 2, first.seq + 3, first.seq + 3, first.seq + 4]
        assert [one[1] for one in results[:3] + results[5:]] == [False, True, False, False, True, False]
        assert store.begin_sends([]).wait() == []
        store = disk.later(store)
        assert (bodies(store, A), bodies(store, B)) == ([b"1", b"2", b"6"], [b"4"])

    def test_no_window(self, disk: Disk) -> None:
        store = disk.create(duplicate_window=0)
        assert not any(store.send(A, b"x", None, "id").duplicate for _ in range(3))
        assert store.depth(A) == 3

    # purge and delete

    def test_purge(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"x"] * 1300)
        store.send(B, b"b")
        assert store.purge(A) == 1300
        assert store.purge(A) == 0
        assert (bodies(store, A), store.receive(A)) == ([], None)
        store.send(A, b"new")
        assert bodies(store, A) == [b"new"]
        again = disk.later(store)
        assert (bodies(again, A), bodies(again, B)) == ([b"new"], [b"b"])
        assert_whole(again)

    def test_purge_of_nothing(self, store: Store) -> None:
        assert store.purge(A) == 0

    def test_purge_spares_what_is_held(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [str(n).encode() for n in range(10)])
        messages = [take(store) for _ in range(7)]
        messages[0].release()
        messages[5].release()
        store.claim(messages[3])
        assert store.purge(A) == 5
        assert bodies(store) == [b"1", b"2", b"3", b"4", b"6"]
        assert store.receive(A) is None
        messages[1].ack()
        messages[4].release()
        assert take(store).body == b"4"
        store.commit([], [messages[3]])
        for view in disk.views(store):
            assert bodies(view) == [b"2", b"4", b"6"]
            if view is not store:
                assert drain(view) == [b"2", b"4", b"6"]  # the leases have ended
            assert_whole(view)

    def test_delete(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        store.send(B, b"b")
        message = take(store)
        assert store.delete(A) == 2
        assert list(store.destinations()) == [B]
        for settle in (message.ack, message.release):
            with pytest.raises(UnknownMessageError):
                settle()
        assert (bodies(store), store.receive(A), store.depth(A)) == ([], None, 0)
        assert store.stats().leased == 0
        assert store.delete(A) == 0
        again = disk.later(store)
        assert (bodies(again, A), bodies(again, B), list(again.destinations())) == ([], [b"b"], [B])
        assert_whole(again)

    def test_delete_of_nothing(self, store: Store) -> None:
        assert store.delete(A) == 0
        assert list(store.destinations()) == []

    def test_a_deleted_destination_can_come_back(self, disk: Disk, store: Store) -> None:
        for n in range(3):
            store.send(A, str(n).encode())
            assert bodies(store) == [str(n).encode()]
            if n < 2:
                store.delete(A)
        again = disk.later(store)
        assert drain(again) == [b"2"]
        assert list(again.destinations()) == [A]
        assert_whole(again)

    def test_a_deleted_destination_forgets_its_message_ids(self, disk: Disk, store: Store, place: str) -> None:
        store.send(A, b"1", None, "id")
        store.send(B, b"1", None, "id")
        store.delete(A)
        store = disk.later(store, place)
        assert not store.send(A, b"2", None, "id").duplicate
        assert store.send(A, b"3", None, "id").duplicate
        assert store.send(B, b"3", None, "id").duplicate
        assert bodies(disk.later(store)) == [b"2"]

    def test_claimed_messages_refuse_a_delete(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        store.claim(message)
        with pytest.raises(TransactionError, match="claimed"):
            store.delete(A)
        assert bodies(store) == [b"1", b"2"]
        store.unclaim([message])
        assert store.delete(A) == 2
