"""The contract of what a host asks for: listeners, calls that do not wait, settling by token, counts, headers that
nest."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.store_types import Counts, Settlement, Subscription
from anabranch.policies.errors import (
    ClosedError,
    DestinationError,
    StoreFullError,
    UnknownMessageError,
    UnknownSubscriptionError,
)

from .disk import PATIENCE, A, B, Disk, T, assert_whole, bodies, drain, eventually, take
from .preparing import claim, prepare, to

DESK = Subscription(T, "desk")


class Ear:
    """What is called with each message."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[tuple[Message, str]] = SimpleQueue()

    def __call__(self, message: Message) -> None:
        self.heard.put((message, threading.current_thread().name))

    def next(self) -> Message:
        return self.heard.get(timeout=PATIENCE)[0]


class HostingContract:
    # Listening

    def test_a_listener_gets_as_many_as_it_wants(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3", b"4"])
        ear = Ear()
        listener = store.listen(A, ear, credit=2)
        first, second = ear.next(), ear.next()
        assert (first.body, second.body) == (b"1", b"2")
        assert store.counts(A) == Counts(2, 2)
        first.ack()
        listener.add_credit(1)
        assert ear.next().body == b"3"
        assert store.counts(A) == Counts(1, 2)
        assert not listener.close()
        listener.close()
        assert ear.heard.empty()

    def test_what_is_sent_later_is_heard(self, store: Store) -> None:
        ear = Ear()
        store.listen(A, ear, credit=100)
        store.send(A, b"1")
        store.send_many(A, [b"2", b"3"])
        store.commit([(A, Outgoing(b"4"))], [])
        assert [ear.next().body for _ in range(4)] == [b"1", b"2", b"3", b"4"]

    @pytest.mark.parametrize("how", ["send", "many", "nowait", "release", "unclaim", "commit", "prepared", "rollback"])
    def test_whatever_frees_a_message_a_listener_hears_of_it(self, store: Store, how: str) -> None:
        store.send_many(A, [b"x"] * 2)
        message, claimed = take(store), claim(store)
        name = prepare(store, 1, to(A, b"x"))
        back = prepare(store, 2, (), [claimed])
        ear, other = Ear(), Ear()
        store.listen(A, ear)
        store.listen(B, other)
        if how == "send":
            store.send(A, b"x")
        elif how == "many":
            store.send_many(A, [b"x"] * 5)
        elif how == "nowait":
            store.send_nowait(A, b"x")
        elif how == "release":
            message.release()
        elif how == "unclaim":
            store.claim(message)
            store.unclaim([message])
        elif how == "commit":
            store.commit([(A, Outgoing(b"x"))], [])
        elif how == "prepared":
            store.commit_prepared(name).wait()
        else:
            store.rollback_prepared(back).wait()
        assert ear.next().body == b"x"
        store.send(A, b"y")
        store.send(B, b"z")
        assert other.next().body == b"z"
        assert ear.heard.empty()

    def test_no_callback_runs_inside_a_send(self, store: Store) -> None:
        """Nor anywhere else in the thread of who sends: one that hangs holds up nobody."""
        begun, go_on = threading.Event(), threading.Event()

        def hang(message: Message) -> None:
            begun.set()
            assert go_on.wait(PATIENCE)

        ear = Ear()
        store.listen(A, hang)
        store.listen(A, ear, credit=10)
        store.send(A, b"1")
        assert begun.wait(PATIENCE)
        store.send(A, b"2")
        assert ear.next().body == b"2"
        go_on.set()
        store.send(A, b"3")
        message, thread = ear.heard.get(timeout=PATIENCE)
        assert (message.body, thread != threading.current_thread().name) == (b"3", True)

    def test_who_came_first_is_served_first(self, store: Store) -> None:
        """Listeners and those who wait in receive stand in one line."""
        order: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        listeners = []
        for number in range(5):
            listeners.append(store.listen(A, lambda m, number=number: order.put((number, m.body))))  # type: ignore[misc]
            eventually(lambda: store.stats().waiting == len(listeners))
        for n in range(5):
            store.send(A, str(n).encode())
            assert order.get(timeout=PATIENCE) == (n, str(n).encode())

    def test_one_message_wakes_one_of_many_receivers(self, store: Store) -> None:
        """And all get one in the end, each another."""
        with ThreadPoolExecutor(20) as pool:
            found = [pool.submit(take, store, A, PATIENCE) for _ in range(20)]
            eventually(lambda: store.stats().waiting == 20)
            store.send_many(A, [str(n).encode() for n in range(20)])
            assert sorted(int(one.result(PATIENCE).body) for one in found) == list(range(20))
        assert store.counts(A) == Counts(0, 20)

    def test_who_gives_up_waiting_leaves_nothing_leased(self, store: Store) -> None:
        """Whatever moment its time is over in: it has the message, or nobody has."""
        done = threading.Event()

        def impatient() -> list[Message]:
            got = []
            while not done.is_set():
                message = store.receive(A, 0.0001)
                if message is not None:
                    got.append(message)
            return got

        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(impatient) for _ in range(4)]
            for n in range(200):
                store.send(A, str(n).encode())
            done.set()
            got = [message for one in found for message in one.result(PATIENCE)]
        assert store.counts(A) == Counts(200 - len(got), len(got))

    def test_a_listener_that_raises_gives_its_message_back(self, store: Store) -> None:
        heard = []
        twice = threading.Event()

        def refuse(message: Message) -> None:
            heard.append(message.body)
            if len(heard) == 2:
                twice.set()
            raise ValueError("it is not for me")

        listener = store.listen(A, refuse, credit=1)
        store.send(A, b"1")
        eventually(lambda: heard == [b"1"])
        listener.add_credit(1)
        assert twice.wait(PATIENCE)
        listener.close()
        assert take(store, A, PATIENCE).body == b"1"

    def test_closed_from_within(self, store: Store) -> None:
        heard: list[bytes] = []
        ended = threading.Event()
        ready = threading.Event()

        def once(message: Message) -> None:
            assert ready.wait(PATIENCE)
            heard.append(message.body)
            listener.close()
            ended.set()

        listener = store.listen(A, once, credit=10)
        ready.set()
        store.send_many(A, [b"1", b"2"])
        assert ended.wait(PATIENCE)
        assert take(store, A, PATIENCE).body == b"2"
        assert heard == [b"1"]

    def test_a_listener_of_a_subscription(self, store: Store) -> None:
        store.subscribe(DESK)
        ear = Ear()
        store.listen(T, ear, 10, DESK.key)
        store.send(T, b"1")
        message = ear.next()
        assert (message.body, message.subscription) == (b"1", DESK.key)
        message.ack()
        with pytest.raises(DestinationError):
            store.listen(T, ear)
        with pytest.raises(UnknownSubscriptionError):
            store.listen(T, ear, 1, ("", "nobody"))

    def test_a_listener_hears_of_its_end(self, store: Store) -> None:
        """Also one that wants nothing just now; once, and not if it was closed before."""
        store.subscribe(DESK)
        ended: SimpleQueue[tuple[str, Exception]] = SimpleQueue()
        store.listen(A, Ear(), 0, on_end=lambda error: ended.put(("idle", error)))
        store.listen(A, Ear(), 9, on_end=lambda error: ended.put(("eager", error)))
        store.listen(T, Ear(), 0, DESK.key, lambda error: ended.put(("desk", error)))
        store.listen(A, Ear(), 9, on_end=lambda error: ended.put(("closed", error))).close()
        store.unsubscribe(T, DESK.key)
        who, error = ended.get(timeout=PATIENCE)
        assert (who, type(error)) == ("desk", UnknownSubscriptionError)
        store.close()
        told = dict(ended.get(timeout=PATIENCE) for _ in range(2))
        assert {who: type(error) for who, error in told.items()} == {"idle": ClosedError, "eager": ClosedError}
        assert ended.empty()

    def test_a_closed_store_hears_nobody(self, store: Store) -> None:
        listener = store.listen(A, Ear(), credit=10)
        store.close()
        listener.add_credit(1)
        assert not listener.close()
        with pytest.raises(ClosedError):
            store.listen(A, Ear())

    def test_close_says_whether_a_callback_runs(self, store: Store) -> None:
        begun, go_on = threading.Event(), threading.Event()
        heard: list[Message] = []

        def hang(message: Message) -> None:
            begun.set()
            assert go_on.wait(PATIENCE)
            heard.append(message)

        listener = store.listen(A, hang, credit=10)
        store.send_many(A, [b"1", b"2"])
        assert begun.wait(PATIENCE)
        assert listener.close()
        assert take(store).body == b"2"  # it was not begun with that one, and never will be
        go_on.set()
        eventually(lambda: [message.body for message in heard] == [b"1"])
        heard[0].ack()
        eventually(lambda: not listener.close())
        assert store.counts(A) == Counts(0, 1)

    def test_what_a_listener_was_not_called_with_is_free_once_it_is_closed(self, store: Store) -> None:
        """Whatever moment it is closed in: what was sent is heard, or there to be received."""
        for _ in range(50):
            heard: list[Message] = []
            listener = store.listen(A, heard.append, credit=10)
            store.send(A, b"x")
            if listener.close():
                eventually(lambda listener=listener: not listener.close())  # type: ignore[misc]
            assert store.counts(A).leased == len(heard)
            left = store.receive(A)
            assert (len(heard), left is None) in ((1, True), (0, False))
            (heard[0] if left is None else left).ack()

    def test_a_listener_waits_for_room(self, disk: Disk) -> None:
        store = disk.create(max_leases=2)
        ear = Ear()
        store.listen(A, ear, credit=5)
        store.send_many(A, [b"1", b"2", b"3", b"4"])
        first, second = ear.next(), ear.next()
        assert (first.body, second.body) == (b"1", b"2")
        first.ack()
        assert ear.next().body == b"3"
        second.release()
        again = ear.next()
        assert (again.body, again.deliveries) == (b"2", 2)

    def test_what_is_no_credit(self, store: Store) -> None:
        listener = store.listen(A, Ear(), credit=0)
        for wrong, error in ((-1, ValueError), (None, TypeError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match="credit"):
                store.listen(A, Ear(), wrong)  # type: ignore[arg-type]
            with pytest.raises(error, match="credit"):
                listener.add_credit(wrong)  # type: ignore[arg-type]

    def test_a_listener_keeps_its_store_open(self, store: Store) -> None:
        listener = store.listen(A, Ear(), credit=0)
        assert not store.retire()
        listener.close()
        assert store.volatile or store.retire()

    # Without waiting

    def test_acked_without_waiting(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        first, second = take(store), take(store)
        future = store.ack_nowait([first, second])
        with pytest.raises(UnknownMessageError):
            store.ack_nowait([first])
        future.result(PATIENCE)
        for view in disk.views(store):
            assert bodies(view) == [b"3"]
        assert_whole(store)

    def test_released_without_waiting(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        store.release_nowait([message]).result(PATIENCE)
        with pytest.raises(UnknownMessageError):
            store.release_nowait([message])
        again = take(store)
        assert (again.body, again.deliveries) == (b"1", 2)

    def test_committed_without_waiting(self, disk: Disk, store: Store) -> None:
        store.send(A, b"1")
        message = take(store)
        store.claim(message)
        receipts = store.commit_nowait([(B, Outgoing(b"2", None, "id")), (A, Outgoing(b"3"))], [message])
        assert [receipt.destination for receipt in receipts.result(PATIENCE)] == [B, A]
        for view in disk.views(store):
            assert (bodies(view), bodies(view, B)) == ([b"3"], [b"2"])

    def test_a_refused_commit_leaves_its_claims(self, disk: Disk) -> None:
        store = disk.create(max_messages=1)
        store.send(A, b"1")
        message = take(store)
        store.claim(message)
        refused: Future[Any] = Future()
        try:
            refused = store.commit_nowait([(B, Outgoing(b"2"))] * 2, [message])
        except StoreFullError as error:
            refused.set_exception(error)
        assert isinstance(refused.exception(PATIENCE), StoreFullError)
        store.commit_nowait([], [message]).result(PATIENCE)
        assert bodies(store) == []

    # By token

    def test_settled_by_token(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3", b"4"])
        tokens = [store.token(take(store)) for _ in range(3)]
        assert len(set(tokens)) == 3
        assert store.leased(tokens[1]).body == b"2"
        assert store.settle(tokens[:1], Settlement.ACK) == [None]
        assert store.settle(tokens[1:2], Settlement.RELEASE) == [None]
        again = take(store)
        assert (again.body, again.deliveries) == (b"2", 2)
        assert store.token(again) not in tokens
        gone, old, held = store.settle(tokens, Settlement.ACK)
        assert isinstance(gone, UnknownMessageError)
        assert isinstance(old, UnknownMessageError)  # it was given to another since
        assert held is None
        again.ack()
        for view in disk.views(store):
            assert bodies(view) == [b"4"]

    def test_a_token_of_a_subscription(self, store: Store) -> None:
        store.subscribe(DESK)
        store.send(T, b"1")
        message = take(store, T, subscription=DESK.key)
        assert store.settle([store.token(message)], Settlement.ACK) == [None]
        assert drain(store, T, DESK.key) == []

    def test_what_is_no_token(self, store: Store) -> None:
        """What is wrong with it is said of it alone, by name."""
        store.send_many(A, [b"1", b"2"])
        token, other = store.token(take(store)), store.token(take(store))
        foreign = bytes(16).hex() + token[32:]
        for wrong in ("", "x", "1.2.3", token + "x", token.rpartition(".")[0], token.upper() + "F", foreign):
            for how in (store.settle, lambda *args: store.settle_nowait(*args).result(PATIENCE)):
                (said,) = how([wrong], Settlement.ACK)
                assert isinstance(said, UnknownMessageError)
                assert (wrong or "''") in str(said)
            with pytest.raises(UnknownMessageError):
                store.leased(wrong)
        with pytest.raises(UnknownMessageError):
            store.leased(token[:-1] + ("0" if token[-1] != "0" else "1"))
        with pytest.raises(TypeError, match="token"):
            store.settle([token, 5], Settlement.ACK)  # type: ignore[list-item]
        first, second = store.settle(["x", token], Settlement.ACK)
        assert (type(first), second) == (UnknownMessageError, None)
        assert store.settle([other], Settlement.ACK) == [None]

    def test_settled_by_token_without_waiting(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        one, two, three = (store.token(take(store)) for _ in range(3))
        first = store.settle_nowait([one, "x"], Settlement.ACK)
        again, second = store.settle_nowait([one, two], Settlement.RELEASE).result(PATIENCE)
        assert (type(again), second) == (UnknownMessageError, None)
        done, wrong = first.result(PATIENCE)
        assert (done, type(wrong)) == (None, UnknownMessageError)
        assert take(store).deliveries == 2
        assert store.settle_nowait([three], Settlement.ACK).result(PATIENCE) == [None]
        for view in disk.views(store):
            assert bodies(view) == [b"2"]
        assert_whole(store)

    def test_what_another_has_in_hand_stays_with_it(self, store: Store) -> None:
        """An ack that is refused for one message changes nothing about the others."""
        store.send_many(A, [b"1", b"2"])
        first, second = take(store), take(store)
        under_way = store.ack_nowait([first])
        with pytest.raises(UnknownMessageError):
            store.ack_nowait([second, first])
        with pytest.raises(UnknownMessageError):
            store.release_nowait([second, first])
        under_way.result(PATIENCE)
        assert store.counts(A) == Counts(0, 1)
        second.ack()

    def test_a_claimed_one_is_its_transactions(self, store: Store) -> None:
        store.send(A, b"1")
        message = take(store)
        token = store.token(message)
        store.claim(message)
        assert isinstance(store.settle([token], Settlement.ACK)[0], UnknownMessageError)
        store.commit([], [message])

    def test_what_was_only_looked_at_has_no_token(self, store: Store) -> None:
        store.send(A, b"1")
        with pytest.raises(UnknownMessageError):
            store.token(next(iter(store.browse(A))))

    # Asking

    def test_counts(self, store: Store) -> None:
        assert store.counts(A) == Counts(0, 0)
        store.send_many(A, [b"x"] * 5)
        message = take(store)
        store.claim(take(store))
        assert store.counts(A) == Counts(3, 2)
        message.ack()
        assert store.counts(A) == Counts(3, 1)
        store.subscribe(DESK)
        store.send(T, b"1")
        take(store, T, subscription=DESK.key)
        assert store.counts(T, DESK.key) == Counts(0, 1)

    def test_found_by_id(self, store: Store) -> None:
        store.send(A, b"1", {"h": 1}, "one")
        store.send(A, b"2", None, "two")
        found = store.find(A, "two")
        assert found is not None
        assert (found.body, found.message_id, found.leased) == (b"2", "two", False)
        assert store.find(A, "three") is None
        assert store.find(B, "one") is None
        take(store).ack()
        assert store.find(A, "one") is None

    def test_headers_nest(self, disk: Disk, store: Store) -> None:
        headers: dict[str, Any] = {
            "list": [1, "two", None, [b"3", {"four": 4.5}]],
            "map": {"a": {"b": [True]}},
            "plain": 1,
        }
        store.send(A, b"x", headers)
        for view in disk.views(store):
            assert take(view).headers == headers
        deep: Any = []
        for _ in range(100):
            deep = [deep]
        with pytest.raises(ValueError, match="nests deeper"):
            store.send(A, b"x", {"deep": deep})
        with pytest.raises(TypeError, match="is not plain"):
            store.send(A, b"x", {"set": [{1, 2}]})  # type: ignore[list-item]
