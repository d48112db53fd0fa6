"""The contract of leases that have an end, and of messages that nobody settled."""

from __future__ import annotations

import copy
import gc
import math
import time
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.engine import lease_times
from anabranch.adapters.core.messages import DELIVERY_LIMIT, Message, Outgoing
from anabranch.adapters.core.state import delivery
from anabranch.adapters.core.state.leases import CLAIMED
from anabranch.adapters.core.store_types import Settlement, Subscription
from anabranch.policies.errors import AnabranchError, StoreFullError, UnknownMessageError

from .disk import PATIENCE, A, B, Disk, T, assert_whole, bodies, drain, eventually, in_one_store, take
from .expiring import undelivered
from .preparing import claim

SHORT = 0.01
LONG = 3600.0
DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def timed(store: Store, seconds: float | None, **options: Any) -> Message:
    """The first of A, leased for so long."""
    message = store.receive(A, lease=seconds, **options)
    assert message is not None
    return message


def claimed_by(store: Store, message: Message) -> Message:
    store.claim(message)
    return message


class Lasting:
    """The clock by which leases run out."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        patches.setattr(delivery, "monotonic", self.now)
        patches.setattr(lease_times, "monotonic", self.now)

    def now(self) -> float:
        return time.monotonic() + self.ahead

    def go_on(self, store: Store, seconds: float = 2 * LONG) -> None:
        """So much time passes, and the store looks what has run out."""
        self.ahead += seconds
        store._lease_times.run()


class LeasingContract:
    @pytest.fixture
    def lasting(self, monkeypatch: pytest.MonkeyPatch) -> Lasting:
        return Lasting(monkeypatch)

    def test_who_waits_has_what_runs_out(self, store: Store) -> None:
        """Without anybody's doing."""
        store.send(A, b"1")
        first = timed(store, SHORT)
        back = take(store, A, PATIENCE)
        assert (back.body, back.deliveries, back.seq) == (b"1", 2, first.seq)

    def test_a_lease_that_runs_out(self, disk: Disk, store: Store, lasting: Lasting) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        held = timed(store, LONG), take(store)
        lasting.go_on(store, LONG / 2)
        assert take(store).body == b"3"
        lasting.go_on(store, LONG)
        back = take(store)
        assert (back.body, back.deliveries) == (b"1", 2)
        assert [message.deliveries for message in store.browse(A)] == [1, 0, 0]
        held[1].ack()
        again = disk.later(store)
        assert [message.deliveries for message in again.browse(A)] == [1, 0]
        assert_whole(again)

    @pytest.mark.parametrize("priorities", [False, True])
    def test_it_comes_back_at_its_old_place(self, disk: Disk, lasting: Lasting, priorities: bool) -> None:
        store = disk.create(priorities=priorities)
        store.send_many(A, [b"1", b"2", b"3", b"4"])
        held = [timed(store, seconds) for seconds in (3 * LONG, LONG, 3 * LONG)]
        lasting.go_on(store)
        assert [take(store).body for _ in range(2)] == [b"2", b"4"]
        lasting.go_on(store)
        assert [take(store).body for _ in range(2)] == [b"1", b"3"]
        del held

    def test_the_stores_own_time(self, disk: Disk, lasting: Lasting) -> None:
        store = disk.create(lease_timeout=SHORT)
        store.send(A, b"1")
        first = take(store)
        lasting.go_on(store)
        second = timed(store, LONG, timeout=PATIENCE)  # somebody else may just be giving it back
        with pytest.raises(UnknownMessageError, match=r"its lease of 0\.01 s ran out"):
            first.ack()
        lasting.go_on(store, LONG / 2)
        assert second.deliveries == 2
        second.ack()
        assert bodies(store) == []

    @pytest.mark.parametrize("looked", [True, False])
    def test_who_comes_too_late(self, store: Store, lasting: Lasting, looked: bool) -> None:
        store.send(A, b"1")
        message = timed(store, LONG)
        token = store.token(message)
        lasting.ahead += LONG
        if looked:
            store._lease_times.run()
        for late in (
            message.ack, message.release, message.extend, lambda: message.extend(LONG), lambda: store.claim(message),
            message.ack_nowait, message.release_nowait,
        ):  # fmt: skip
            with pytest.raises(UnknownMessageError, match=r"its lease of 3600 s ran out"):
                late()
        with pytest.raises(UnknownMessageError, match="ran out"), message:
            pass
        with pytest.raises(KeyError), message:
            raise KeyError  # alone
        for settled in (Settlement.ACK, Settlement.RELEASE):
            (wrong,) = store.settle([token], settled)
            assert isinstance(wrong, UnknownMessageError)
            (wrong,) = store.settle_nowait([token], settled).result(PATIENCE)
            assert isinstance(wrong, UnknownMessageError)
        lasting.go_on(store, 0)
        holder = take(store)
        with pytest.raises(UnknownMessageError):
            message.ack()
        assert holder.deliveries == 2
        holder.ack()
        assert bodies(store) == []

    def test_an_ack_of_many_says_which_is_late(self, store: Store, lasting: Lasting) -> None:
        store.send_many(A, [b"1", b"2"])
        messages = [timed(store, 3 * LONG), timed(store, LONG)]
        lasting.go_on(store)
        with pytest.raises(UnknownMessageError, match=f"Message {messages[1].seq} of"):
            store.ack(messages)
        messages[0].ack()
        assert bodies(store) == [b"2"]

    def test_extended_it_goes_on(self, store: Store, lasting: Lasting) -> None:
        store.send_many(A, [b"1", b"2"])
        message = timed(store, LONG)
        for _ in range(3):
            lasting.go_on(store, LONG / 2)
            message.extend()
        message.extend(4 * LONG)
        lasting.go_on(store, 3 * LONG)
        assert timed(store, LONG).body == b"2"
        message.extend()  # once more so long
        lasting.go_on(store, 3 * LONG)
        assert take(store).body == b"2"
        message.extend(LONG)  # earlier than before
        lasting.go_on(store)
        back = take(store)
        assert (back.body, back.deliveries) == (b"1", 2)
        with pytest.raises(UnknownMessageError, match="its lease of 3600 s ran out"):
            message.extend()

    def test_one_without_an_end_can_be_given_one(self, store: Store, lasting: Lasting) -> None:
        store.send(A, b"1")
        message = take(store)
        message.extend()
        lasting.go_on(store)
        assert store.receive(A) is None
        message.extend(LONG)
        lasting.go_on(store)
        assert take(store).deliveries == 2

    def test_what_was_settled_in_time_does_not_come_back(self, store: Store, lasting: Lasting) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        timed(store, LONG).ack()
        timed(store, LONG).release(delivered=False)
        held = take(store)
        lasting.go_on(store)
        assert (held.body, take(store).body, store.receive(A)) == (b"2", b"3", None)
        assert (held.deliveries, store.counts(A)) == (1, (0, 2, 0, 0))

    def test_a_transaction_holds_it_without_an_end(self, store: Store, lasting: Lasting) -> None:
        store.send_many(A, [b"1", b"2"])
        messages = [timed(store, LONG) for _ in range(2)]
        for message in messages:
            store.claim(message)
            with pytest.raises(UnknownMessageError, match="claimed"):
                message.extend()
        lasting.go_on(store)
        assert store.receive(A) is None
        store.commit([(B, Outgoing(b"x"))], messages[:1])
        store.unclaim(messages[1:])
        assert (drain(store), bodies(store, B)) == ([b"2"], [b"x"])

    def test_many_leases(self, disk: Disk, store: Store, lasting: Lasting) -> None:
        """Those that end in time are forgotten, and those that run out come back in order."""
        count = disk.many_leases
        store.send_many(A, [b"%d" % n for n in range(count)])
        messages = [timed(store, 3 * LONG if n % 3 else LONG) for n in range(count)]
        store.ack(messages[1::3])
        lasting.go_on(store)
        assert [int(take(store).body) for _ in range(count // 3)] == list(range(0, count, 3))
        assert store.counts(A) == (0, count // 3 * 2, 0, 0)
        messages[2].ack()

    def test_each_subscription_has_its_own(self, store: Store, lasting: Lasting) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(T, b"1")
        desk = store.receive(T, 0, DESK.key, LONG)
        book = store.receive(T, 0, BOOK.key, 3 * LONG)
        lasting.go_on(store)
        again = take(store, T, 0, DESK.key)
        assert desk is not None and book is not None
        assert (again.deliveries, book.deliveries) == (2, 1)
        again.ack()
        book.ack()
        assert bodies(store, T) == []

    def test_a_batch_is_leased_for_so_long(self, store: Store, lasting: Lasting) -> None:
        store.send_many(A, [b"%d" % n for n in range(5)])
        messages = store.receive_many(A, 4, lease=LONG)
        messages[1].ack()
        lasting.go_on(store)
        assert [(m.body, m.deliveries) for m in store.receive_many(A, 9)] == [
            (b"0", 2), (b"2", 2), (b"3", 2), (b"4", 1),
        ]  # fmt: skip

    def test_one_that_is_not_persistent(self, store: Store, lasting: Lasting) -> None:
        store.send(A, b"1", persistent=False)
        store.send(A, b"2")
        held = [timed(store, LONG), timed(store, LONG)]
        lasting.go_on(store)
        assert [(back.body, back.deliveries) for back in (take(store), take(store))] == [(b"1", 2), (b"2", 2)]
        with pytest.raises(UnknownMessageError, match="ran out"):
            held[0].ack()

    def test_it_counts_towards_the_limit(self, disk: Disk, lasting: Lasting) -> None:
        store = disk.create(max_deliveries=2, dead_letter="dlq", lease_timeout=LONG)
        store.send(A, b"1")
        for expected in (1, 2):
            message = take(store)
            assert message.deliveries == expected
            lasting.go_on(store)
        assert store.receive(A) is None
        ((message, reason),) = undelivered(store)
        assert (message.body, reason) == (b"1", DELIVERY_LIMIT)

    def test_a_listener_has_so_long_too(self, store: Store, lasting: Lasting) -> None:
        store.send(A, b"1")
        seen: list[Message] = []
        listener = store.listen(A, seen.append, credit=1, lease=LONG)
        eventually(lambda: seen)
        lasting.go_on(store)
        back = take(store)
        with pytest.raises(UnknownMessageError, match="ran out"):
            seen[0].ack()
        back.ack()
        listener.close()

    def test_the_wall_clock_does_not_matter(
        self, store: Store, lasting: Lasting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.send(A, b"1")
        message = timed(store, LONG)
        for years in (1, -1):
            now = time.time_ns() + years * 365 * 86400 * 10**9
            with monkeypatch.context() as patches:
                patches.setattr(time, "time_ns", lambda now=now: now)
                lasting.go_on(store, 1)
                assert store.receive(A) is None
        message.ack()

    def test_a_store_that_is_closed_forgets_them(self, disk: Disk, store: Store, lasting: Lasting) -> None:
        store.send(A, b"1")
        message = timed(store, LONG)
        store.close()
        lasting.go_on(store)
        store = disk.reopen(store)
        with pytest.raises(AnabranchError):
            message.ack()

    @in_one_store("seconds", [0, -1, 0.0, math.inf, -math.inf, math.nan])
    def test_what_is_no_time(self, store: Store, seconds: float) -> None:
        store.send(A, b"1")
        for call in (
            lambda: store.receive(A, 0, None, seconds), lambda: store.listen(A, print, 1, None, None, seconds),
            lambda: store.extend(take(store), seconds),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="is a number of seconds above 0, not"):
                call()
        assert store.counts(A).leased == 1  # that which was to be extended
        assert store.delete(A) == 1

    @in_one_store("seconds", [True, "1", b"1", [1]])
    def test_what_is_no_number(self, store: Store, seconds: Any) -> None:
        store.send(A, b"1")
        for call in (
            lambda: store.receive(A, 0, None, seconds), lambda: store.listen(A, print, 1, None, None, seconds),
            lambda: store.extend(take(store), seconds),
        ):  # fmt: skip
            with pytest.raises(TypeError, match="is a number of seconds, not"):
                call()

    def test_one_that_was_browsed_is_not_extended(self, store: Store) -> None:
        store.send(A, b"1")
        (message,) = store.browse(A)
        with pytest.raises(UnknownMessageError, match="browsed"):
            message.extend()
        with pytest.raises(UnknownMessageError, match="browsed"), message:
            pass
        assert drain(store) == [b"1"]

    # with message

    def test_with_a_message(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        with take(store) as message:
            assert message.body == b"1"
        assert bodies(store) == [b"2"]
        with pytest.raises(KeyError), take(store):
            raise KeyError
        with take(store) as message:
            assert (message.body, message.deliveries) == (b"2", 2)
        assert bodies(store) == []

    def test_what_was_settled_inside_is_left_as_it_is(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        with take(store) as message:
            message.ack()
        with pytest.raises(KeyError), take(store) as message:
            message.ack()
            raise KeyError
        with take(store) as message:
            message.release()
        with take(store) as message:
            assert store.settle([store.token(message)], Settlement.RELEASE) == [None]
        with take(store) as message:
            assert message.deliveries == 3
            store.claim(message)
        assert bodies(store) == [b"3"]
        store.unclaim([message])
        with take(store) as message:
            future = message.ack_nowait()
        future.result(PATIENCE)
        assert bodies(store) == []
        assert_whole(store)

    def test_one_that_is_claimed_again(self, store: Store) -> None:
        store.send(A, b"1")
        message = claim(store)
        store.unclaim([message])
        with pytest.raises(UnknownMessageError):
            message.extend()

    # Nobody's

    def test_one_that_nobody_holds_any_more(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        message = store.receive(A)
        with pytest.warns(ResourceWarning, match="of queue://a, 1 bytes> was received and let go of"):
            del message
            gc.collect()
        assert store.take_undelivered() == []
        back = take(store)
        assert (back.body, back.deliveries) == (b"1", 2)
        assert [message.deliveries for message in disk.later(store).browse(A)] == [1, 0]

    @pytest.mark.filterwarnings("error::ResourceWarning")
    @pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
    def test_one_that_was_settled_is_nobodys_loss(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"%d" % n for n in range(9)])
        store.send(B, b"b", persistent=False)
        for settle in (
            lambda message: message.ack(), lambda message: message.release(), lambda message: message.ack(),
            lambda message: message.ack_nowait().result(PATIENCE),
            lambda message: message.release_nowait().result(PATIENCE),
            lambda message: store.settle([store.token(message)], Settlement.ACK),
            lambda message: store.commit([], [claimed_by(store, message)]),
            lambda message: store.unclaim([claimed_by(store, message)]),
            lambda message: store.delete(A),
        ):  # fmt: skip
            message = store.receive(A)
            assert message is not None
            settle(message)
            del message
        message = store.receive(B)
        assert message is not None
        store.close()
        del message
        gc.collect()

    def test_what_others_may_settle_is_kept(self, store: Store) -> None:
        """Who has its token, or a transaction."""
        store.send_many(A, [b"1", b"2"])
        token = store.token(store.receive(A))  # type: ignore[arg-type]
        message = store.receive(A)
        assert message is not None
        store.claim(message)
        lease = message._note
        del message
        gc.collect()
        store.take_undelivered()
        assert (store.receive(A), store.counts(A)) == (None, (0, 2, 0, 0))
        assert store.settle([token], Settlement.ACK) == [None]
        assert lease.hold == CLAIMED

    def test_what_was_leased_again_and_acked_is_not_received(self, store: Store) -> None:
        """Another receiver may have looked it up ahead by then."""
        store.send_many(A, [b"1", b"2", b"3"])
        first = take(store)
        assert first.body == b"1"
        token = store.lease_again(A, first.seq + 1)
        assert token is not None
        assert store.settle([token], Settlement.ACK) == [None]
        assert store.depth(A) == 2
        assert drain(store) == [b"3"]

    def test_many_that_nobody_holds(self, disk: Disk, store: Store) -> None:
        store.subscribe(DESK)
        store.send_many(A, [b"%d" % n for n in range(20)])
        store.send(A, b"v", persistent=False)
        store.send(T, b"t")
        found = [store.receive(A) for _ in range(21)] + [store.receive(T, 0, DESK.key)]
        assert None not in found
        with pytest.warns(ResourceWarning):
            del found
            gc.collect()
        store.take_undelivered()
        assert store.stats().leased == 0
        assert {take(store).body for _ in range(21)} == {b"v", *(b"%d" % n for n in range(20))}
        assert take(store, T, 0, DESK.key).deliveries == 2

    def test_too_often_nobodys(self, disk: Disk) -> None:
        """It counts, so that one that ends its worker each time reaches the limit."""
        store = disk.create(max_deliveries=2, dead_letter="dlq")
        store.send(A, b"1")
        for _ in range(2):
            with pytest.warns(ResourceWarning):
                assert store.receive(A) is not None
                gc.collect()
            found = store.take_undelivered()
        ((message, reason),) = found
        assert (message.body, reason) == (b"1", DELIVERY_LIMIT)
        message.ack()

    def test_an_ack_that_fails_later(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """By then nobody holds the message."""
        store.send(A, b"1")
        message = store.receive(A)
        assert message is not None

        def refused(future: Any, leases: Any, hold: int, changes: Any, messages: Any) -> None:
            store._engine.delivery.put_back(leases, hold)
            messages.clear()

        monkeypatch.setattr(store._settling, "_acked", refused)
        monkeypatch.setattr(store._engine, "submit", lambda ticket: ticket.finish(StoreFullError("full")))
        monkeypatch.setattr(store._writer, "proceed", lambda: None)
        with pytest.warns(ResourceWarning):
            future = message.ack_nowait()
            del message
            with pytest.raises(StoreFullError):
                future.result(PATIENCE)
            eventually(lambda: store.abandoned)
        monkeypatch.undo()
        store.take_undelivered()
        assert take(store).deliveries == 2

    def test_there_is_no_copy_of_a_message(self, store: Store) -> None:
        store.send(A, b"1")
        message = take(store)
        assert copy.copy(message) is message
        assert copy.deepcopy([message])[0] is message
