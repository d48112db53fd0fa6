"""What a host asks of a router: to be called with messages, to settle by token, and never to wait where it must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import Settlement
from anabranch.router.placement import open_stores

from ..contract.disk import PATIENCE, Parallel, eventually
from ..router.disk import NEVER
from ..taking import take

ACK, RELEASE, REJECT = Settlement.ACK, Settlement.RELEASE, Settlement.REJECT
KINDS: dict[str, Any] = {
    "journal": anabranch.JournalOptions(sync=NEVER, dead_letter="dlq", segment_size=64 * 1024),
    "sql": anabranch.SqlOptions(dead_letter="dlq"),
    "memory": anabranch.MemoryOptions(dead_letter="dlq"),
}


def config(directory: Path, kind: str) -> anabranch.Config:
    """Everything in a store of this kind, but what is in a journal of its own: its dead letters, and `other.>`."""
    journal = anabranch.JournalOptions(sync=NEVER, segment_size=64 * 1024)
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("all", [">"], **{kind: KINDS[kind]}),
            anabranch.StoreConfig("beside", ["dlq", "queue://other.>"], journal=journal),
        ],
        transactions=anabranch.TransactionOptions(sync=NEVER),
    )


@pytest.fixture(params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


def bodies(queue: anabranch.Queue | anabranch.Subscriber) -> list[bytes]:
    return [message.body for message in queue.browse()]


# Settling


def test_settled_by_token_from_another_thread(router: anabranch.Router) -> None:
    """Over two stores, what is wrong with one said of that one."""
    q, other = router.queue("q"), router.queue("other.q")
    q.send_many([b"1", b"2", b"3"])
    other.send(b"4")
    tokens = [take(q).token, take(q).token, take(other).token, "no token"]
    said: Future[Any] = Future()
    threading.Thread(target=lambda: said.set_result(router.settle(tokens, ACK))).start()
    *right, wrong = said.result(PATIENCE)
    assert right == [None, None, None]
    assert isinstance(wrong, anabranch.UnknownMessageError)
    assert (bodies(q), bodies(other)) == ([b"3"], [])


def test_one_token_raises_what_is_wrong(router: anabranch.Router) -> None:
    q = router.queue("q")
    q.send(b"1")
    token = take(q).token
    router.settle(token, RELEASE)
    again = take(q)
    assert again.deliveries == 2
    with pytest.raises(anabranch.UnknownMessageError, match=token):
        router.settle(token, ACK)
    router.settle(again.token, ACK)
    assert bodies(q) == []


def test_settled_by_token_with_a_delay(router: anabranch.Router) -> None:
    q, other = router.queue("q"), router.queue("other.q")
    q.send_many([b"1", b"2"])
    other.send(b"3")
    one, two, three = take(q), take(q), take(other)
    assert router.settle([one.token, three.token], RELEASE, delay=3600) == [None, None]
    assert (q.counts().delayed, other.counts().delayed) == (1, 1)
    assert router.settle_nowait(two.token, RELEASE, delivered=False).result(PATIENCE) == [None]
    again = take(q)
    assert (again.body, again.deliveries) == (b"2", 1)
    for wrong in (-1, float("inf")):
        with pytest.raises(ValueError, match="delay is a number of seconds"):
            router.settle(again.token, RELEASE, delay=wrong)
    for how in (ACK, REJECT):
        with pytest.raises(ValueError, match="for what is released"):
            router.settle(again.token, how, delay=0)
        with pytest.raises(ValueError, match="for what is released"):
            router.settle_nowait(again.token, how, delivered=False)
    router.settle(again.token, RELEASE, delay=3600)
    assert q.counts() == anabranch.Counts(0, 0, 2)


def test_tokens_that_mean_nothing_here(router: anabranch.Router, tmp_path: Path) -> None:
    """Each is named, with what to do; none of them opens a store."""
    router.queue("q").send(b"1")
    other = router.queue("other.q")
    other.send(b"2")
    closed = take(other).token
    router.reopen("beside")
    with anabranch.open(config(tmp_path / "foreign", "journal")) as second:
        second.queue("q").send(b"1")
        foreign = take(second.queue("q")).token
        for call in (router.settle, lambda tokens, how: router.settle_nowait(tokens, how).result(PATIENCE)):
            for token, why in (("", "no token"), ("x.y", "no token"), (foreign, "this router lacks")):
                for how in Settlement:
                    (error,) = call([token], how)
                    assert isinstance(error, anabranch.UnknownMessageError)
                    assert why in str(error)
                    assert token in str(error)
    (error,) = router.settle([closed], ACK)
    assert isinstance(error, anabranch.UnknownMessageError)
    with pytest.raises(TypeError, match="token is a str"):
        router.settle([b"x"], ACK)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="Settlement"):
        router.settle("x", "ack")  # type: ignore[call-overload]


def test_a_token_opens_no_store(tmp_path: Path) -> None:
    settings = config(tmp_path / "data", "journal")
    with anabranch.open(settings) as router:
        router.queue("q").send(b"1")
        token = take(router.queue("q")).token
    with anabranch.open(settings) as router:
        for how in Settlement:
            with pytest.raises(anabranch.UnknownMessageError, match="'all', which was closed since"):
                router.settle(token, how)
        assert router._registry.open_stores() == []
    with pytest.raises(anabranch.ClosedError):
        router.settle(token, ACK)


def test_without_waiting_over_two_stores(router: anabranch.Router) -> None:
    q, other = router.queue("q"), router.queue("other.q")
    q.send_many([b"1", b"2"])
    other.send_many([b"3", b"4"])
    mine, theirs = [take(q), take(q)], [take(other), take(other)]
    assert router.ack_nowait([mine[0], theirs[0]]).result(PATIENCE) is None
    assert router.release_nowait([mine[1], theirs[1]]).result(PATIENCE) is None
    again = take(q)
    assert (again.body, again.deliveries) == (b"2", 2)
    assert isinstance(router.ack_nowait([again, mine[0]]).exception(PATIENCE), anabranch.UnknownMessageError)
    assert router.settle_nowait([again.token, take(other).token, "x"], RELEASE).result(PATIENCE)[:2] == [None, None]
    router.release([take(q), take(other)], delivered=False)
    found = [take(q), take(other)]
    assert [message.deliveries for message in found] == [3, 3]
    found[0].ack_nowait().result(PATIENCE)
    found[1].release_nowait(delivered=False).result(PATIENCE)
    assert (bodies(q), bodies(other)) == ([], [b"4"])
    assert router.ack_nowait([]).result(0) is None
    with pytest.raises(TypeError, match="acked or released"):
        router.ack_nowait(["x"])  # type: ignore[list-item]


# Rejecting


@pytest.mark.parametrize("how", ["message", "router", "token", "token without waiting"])
def test_rejected_with_a_reason(router: anabranch.Router, how: str) -> None:
    q, dead = router.queue("q"), router.queue("dlq")
    q.send(b"poison", {"k": 1}, "id-1", priority=7)
    q.send(b"good")
    take(q).release()
    message = take(q)
    if how == "message":
        message.reject("it does not parse")
    elif how == "router":
        router.reject(message, "it does not parse")
    elif how == "token":
        router.settle(message.token, REJECT, "it does not parse")
    else:
        assert router.settle_nowait(message.token, REJECT, "it does not parse").result(PATIENCE) == [None]
    letter = take(dead)
    assert (letter.body, letter.priority) == (b"poison", 7)
    assert letter.headers == {
        "k": 1, "dead_letter_reason": "it does not parse", "dead_letter_source": "queue://q",
        "dead_letter_deliveries": 2, "dead_letter_message_id": "id-1",
    }  # fmt: skip
    assert bodies(q) == [b"good"]
    assert router.stats().dead_lettered == 1
    with pytest.raises(anabranch.UnknownMessageError):
        message.reject()
    router.requeue(letter)
    assert bodies(q) == [b"good", b"poison"]


def test_rejected_for_a_subscription(router: anabranch.Router) -> None:
    topic = router.topic("t")
    one, two = topic.subscribe("one", "client"), topic.subscribe("two")
    topic.send(b"x")
    take(one).reject()
    letter = take(router.queue("dlq"))
    assert letter.headers["dead_letter_reason"] == "rejected"
    assert (letter.headers["dead_letter_client"], letter.headers["dead_letter_subscription"]) == ("client", "one")
    assert (bodies(one), bodies(two)) == ([], [b"x"])


def test_rejected_where_there_are_no_dead_letters(router: anabranch.Router) -> None:
    """Dropped, and counted; not so a dead letter, which stays where it is whatever the reason says."""
    other = router.queue("other.q")
    other.send(b"1")
    take(other).reject("nobody wants it")
    assert (bodies(other), router.stats().dropped) == ([], 1)


def test_a_dead_letter_that_is_rejected_stays(tmp_path: Path) -> None:
    journal = anabranch.JournalOptions(sync=NEVER, dead_letter="dlq")
    with anabranch.open(anabranch.Config(tmp_path, [anabranch.StoreConfig("all", [">"], journal=journal)])) as router:
        router.queue("q").send(b"1")
        take(router.queue("q")).reject()
        take(router.queue("dlq")).reject("expired")
        letter = take(router.queue("dlq"))
        assert letter.headers["dead_letter_reason"] == "expired"
        assert letter.headers["dead_letter_source"] == "queue://q"


def test_what_cannot_be_rejected_is_free_again(router: anabranch.Router) -> None:
    """Of many tokens one that is too long for the dead letters' store holds up no other."""
    small = anabranch.JournalOptions(sync=NEVER, message_bytes_max=1000)
    stores = [router.config.stores[0], anabranch.StoreConfig("small", ["dlq"], journal=small)]
    directory = router.config.directory / "beside"
    with anabranch.open(anabranch.Config(directory, stores)) as own:
        q = own.queue("q")
        q.send_many([b"1", b"x" * 2000, b"3"])
        messages = [take(q) for _ in range(3)]
        first, second, third = own.settle([message.token for message in messages], REJECT)
        assert (first, type(second), third) == (None, anabranch.MessageTooLargeError, None)
        assert bodies(own.queue("dlq")) == [b"1", b"3"]
        again = take(q)
        assert (len(again.body), again.deliveries) == (2000, 2)
        with pytest.raises(anabranch.MessageTooLargeError):
            again.reject()
        with pytest.raises(anabranch.UnknownMessageError):
            again.ack()
        for wrong in (next(iter(q.browse())), "x"):
            with pytest.raises((anabranch.UnknownMessageError, TypeError)):
                own.reject(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="reason"):
            take(q).reject(5)  # type: ignore[arg-type]


def test_rejected_in_a_transaction(router: anabranch.Router) -> None:
    """With all else that it does, or not at all; counted and told of once it is committed."""
    q, other, dead = router.queue("q"), router.queue("other.q"), router.queue("dlq")
    events: SimpleQueue[Any] = SimpleQueue()
    of_messages = (anabranch.MessageDeadLettered, anabranch.MessageDropped)
    router.on_event(lambda event: events.put(event) if isinstance(event, of_messages) else None)
    q.send_many([b"poison", b"good"])
    other.send(b"dropped")
    with pytest.raises(KeyError), router.transaction() as tx:
        tx.reject(take(q), "it does not parse")
        tx.send("done", b"x")
        assert (tx.state, dead.depth(), q.counts().leased) == ("open", 0, 1)
        raise KeyError
    assert (router.stats().dead_lettered, bodies(dead), q.counts().ready) == (0, [], 2)
    with router.transaction() as tx:
        message, gone, good = take(q), take(other), take(q)
        savepoint = tx.savepoint()
        tx.reject(good)
        savepoint.rollback()
        tx.reject(message, ValueError("it does not parse"))
        tx.send("done", b"x")
        tx.reject(gone)
        tx.send("other.done", b"y")
        for wrong in (good, next(iter(q.browse()))):
            with pytest.raises(anabranch.UnknownMessageError):
                tx.reject(wrong)
        with pytest.raises(TypeError, match="can be rejected, not str"):
            tx.reject("x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a reason is"):
            tx.reject(take(q), 5)  # type: ignore[arg-type]
    done = [next(iter(router.queue(name).browse())) for name in ("done", "other.done")]
    assert [one.seq for one in tx.receipts] == [one.seq for one in done]
    (letter,) = q.dead_letters()
    assert (letter.reason, letter.error_type, letter.error_text) == ("rejected", "ValueError", "it does not parse")
    assert (letter.message.body, letter.deliveries) == (b"poison", 2)
    assert (bodies(q), bodies(other), len(bodies(dead))) == ([b"good"], [], 1)
    assert (router.stats().dead_lettered, router.stats().dropped) == (1, 1)
    first, second = (events.get(timeout=PATIENCE) for _ in range(2))
    assert (first.reason, first.deliveries, first.dead_letter_queue) == ("rejected", 2, dead.destination)
    assert (type(second), second.reason) == (anabranch.MessageDropped, "rejected")
    with pytest.raises(anabranch.UnknownMessageError, match="it was rejected"):
        message.ack()
    with pytest.raises(anabranch.TransactionError):
        tx.reject(take(dead))


def test_rejected_and_voted_for(router: anabranch.Router) -> None:
    q = router.queue("q")
    q.send_many([b"1", b"2"])
    rolled_back, tx = router.transaction(), router.transaction()
    rolled_back.reject(take(q))
    tx.reject(take(q))
    rolled_back.vote()
    tx.vote()
    rolled_back.rollback()
    assert tx.commit() == []
    assert (bodies(q), bodies(router.queue("dlq")), router.stats().dead_lettered) == ([b"1"], [b"2"], 1)


def test_rejecting_without_waiting(router: anabranch.Router) -> None:
    q = router.queue("q")
    q.send_many([b"1", b"2"])
    message, other = take(q), take(q)
    message.reject_nowait("it is wrong").result(PATIENCE)
    (letter,) = q.dead_letters()
    assert (letter.message.body, letter.reason) == (b"1", "it is wrong")
    other.ack()
    with pytest.raises(anabranch.UnknownMessageError):
        other.reject_nowait().result(PATIENCE)
    with pytest.raises(anabranch.UnknownMessageError, match="was browsed"):
        letter.message.reject_nowait()


def test_a_message_shows_no_private_field(router: anabranch.Router) -> None:
    router.queue("q").send(b"1")
    message = take(router.queue("q"))
    shown = [name for name in dir(message) if not name.startswith("_")]
    assert shown == [
        "ack", "ack_nowait", "body", "content", "deliveries", "destination", "expires_at_ms", "extend", "group",
        "headers", "is_large", "leased", "message_id", "open", "persistent", "priority", "raw_body", "read",
        "redelivered", "reject", "reject_nowait", "release", "release_nowait", "seq", "size", "subscription",
        "timestamp_ms", "token",
    ]  # fmt: skip
    assert repr(message) == f"<Message {message.seq} of queue://q, 1 bytes>"
    assert not hasattr(message, "__dict__")


# Listening


class Ear:
    """What is called with each message."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[tuple[Message, int]] = SimpleQueue()

    def __call__(self, message: Message) -> None:
        self.heard.put((message, threading.get_ident()))

    def next(self) -> Message:
        return self.heard.get(timeout=PATIENCE)[0]


def test_a_listener_of_a_queue(router: anabranch.Router) -> None:
    """Called on another thread, with what is sent before and after, also by a transaction over two stores."""
    queue, ear = router.queue("q"), Ear()
    queue.send(b"1")
    listener = queue.listen(ear, credit=2)
    with router.transaction() as tx:
        tx.send("q", b"2")
        tx.send("other.q", b"beside")
    message, thread = ear.heard.get(timeout=PATIENCE)
    assert (message.body, thread != threading.get_ident()) == (b"1", True)
    assert ear.next().body == b"2"
    queue.send(b"3")
    listener.add_credit(1)
    assert ear.next().body == b"3"
    router.settle(message.token, ACK)
    assert queue.counts() == anabranch.Counts(0, 2)
    queue.send(b"4")
    assert not listener.close()
    assert take(queue).body == b"4"
    assert ear.heard.empty()


def test_a_listener_of_a_subscription(router: anabranch.Router) -> None:
    topic, ear = router.topic("t"), Ear()
    desk = topic.subscribe("desk")
    ended: SimpleQueue[Exception] = SimpleQueue()
    desk.listen(ear, 5, on_end=ended.put)
    topic.send(b"1")
    assert ear.next().subscription == ("", "desk")
    assert desk.counts() == anabranch.Counts(0, 1)
    desk.unsubscribe()
    assert isinstance(ended.get(timeout=PATIENCE), anabranch.UnknownSubscriptionError)
    with pytest.raises(anabranch.UnknownSubscriptionError):
        desk.listen(ear)


def test_one_message_for_200_who_wait_is_received_once(router: anabranch.Router) -> None:
    """Each further one by the next in line; nobody asks for nothing meanwhile."""
    queue = router.queue("q")
    heard: SimpleQueue[tuple[int, Message]] = SimpleQueue()
    listeners = [queue.listen(lambda message, n=n: heard.put((n, message))) for n in range(200)]  # type: ignore[misc]
    store = router._registry.store_for(queue.destination)
    eventually(lambda: store.stats().waiting >= 200)
    queue.send(b"1")
    first = heard.get(timeout=PATIENCE)
    queue.send(b"2")
    second = heard.get(timeout=PATIENCE)
    assert (first[1].body, second[1].body, first[0] != second[0]) == (b"1", b"2", True)
    assert queue.counts() == anabranch.Counts(0, 2)
    for listener in listeners:
        listener.close()
    assert heard.empty()


def test_a_listener_hears_that_its_store_or_its_router_closes(router: anabranch.Router) -> None:
    """Whether it wants a message or not; who listens anew goes on."""
    queue, ended = router.queue("other.q"), SimpleQueue[Exception]()
    queue.listen(Ear(), on_end=ended.put)
    idle = queue.listen(Ear(), credit=0, on_end=ended.put)
    router.reopen("beside")
    for _ in range(2):
        assert isinstance(ended.get(timeout=PATIENCE), anabranch.ClosedError)
    idle.add_credit(1)
    assert not idle.close()
    ear = Ear()
    queue.listen(ear, on_end=ended.put)
    queue.send(b"1")
    assert ear.next().body == b"1"
    router.close()
    assert isinstance(ended.get(timeout=PATIENCE), anabranch.ClosedError)
    with pytest.raises(anabranch.ClosedError):
        queue.listen(ear)


def test_a_queue_that_is_deleted_keeps_its_listeners(tmp_path: Path) -> None:
    """Also one with a store of its own, which stays as long as somebody listens."""
    journal = anabranch.JournalOptions(sync=NEVER, segment_size=64 * 1024)
    stores = [anabranch.StoreConfig("each", [">"], per_destination=True, journal=journal)]
    with anabranch.open(anabranch.Config(tmp_path, stores)) as router:
        queue, ear = router.queue("q"), Ear()
        listener = queue.listen(ear, credit=5)
        queue.send(b"1")
        assert ear.next().body == b"1"
        assert queue.delete() == 1
        queue.send(b"2")
        assert ear.next().body == b"2"
        listener.close()
        assert queue.delete() == 1
        assert (router.exists("q"), router._registry.table.stores) == (False, {})


def test_many_in_turn_do_not_close_the_store_of_a_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_stores, "OPEN_STORES_MAX", 2)
    journal = anabranch.JournalOptions(sync=NEVER, segment_size=64 * 1024)
    stores = [anabranch.StoreConfig("each", [">"], per_destination=True, journal=journal)]
    with anabranch.open(anabranch.Config(tmp_path, stores)) as router:
        ear = Ear()
        listener = router.queue("q").listen(ear, credit=0)
        for n in range(6):
            router.queue(f"q{n}").send(b"x")
        listener.add_credit(1)
        router.queue("q").send(b"1")
        assert ear.next().body == b"1"


# Asking


def test_counts_and_depth(router: anabranch.Router) -> None:
    queue = router.queue("q")
    assert (queue.counts(), queue.depth()) == (anabranch.Counts(0, 0), 0)
    queue.send_many([b"x"] * 5)
    take(queue)
    with router.transaction() as tx:
        tx.ack(take(queue))
        assert (queue.counts(), queue.depth()) == (anabranch.Counts(3, 2), 5)
    assert (queue.counts(), queue.depth()) == (anabranch.Counts(3, 1), 4)
    with pytest.raises(TypeError):
        len(queue)  # type: ignore[arg-type]


def test_found_by_id(router: anabranch.Router) -> None:
    queue = router.queue("q")
    assert queue.find("one") is None
    queue.send(b"1", {"h": 1}, "one")
    found = queue.find("one")
    assert found is not None
    assert (found.body, found.headers, found.leased) == (b"1", {"h": 1}, False)
    take(queue).ack()
    assert queue.find("one") is None
    for name in ("q", "never used"):
        with pytest.raises(TypeError, match="message_id"):
            router.queue(name).find(5)  # type: ignore[arg-type]


# Sending


class Slow:
    """Stores open when `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.threads = threading.Event(), SimpleQueue[int]()
        real = open_stores.OpenStores.load

        def load(*args: Any) -> Any:
            self.threads.put(threading.get_ident())
            assert self.go_on.wait(PATIENCE)
            return real(*args)

        monkeypatch.setattr(open_stores.OpenStores, "load", load)


@pytest.fixture(params=KINDS)
def closed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    """A router whose queue `q` has a message and is in a store that is not open; it is opened once more for memory."""
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        router.queue("q").send(b"0")
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


def test_a_send_that_must_not_wait_opens_no_store(closed: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the same thread sends later, waiting or not, or in a transaction, comes behind it."""
    slow, queue = Slow(monkeypatch), closed.queue("q")
    body = bytearray(b"1")
    futures = [queue.send_nowait(body), queue.send_nowait(b"2", {"h": 1}, "id", priority=7)]  # type: ignore[arg-type]
    body[:] = b"x"
    assert slow.threads.get(timeout=PATIENCE) != threading.get_ident()
    assert not any(future.done() for future in futures)

    def send_more() -> None:
        queue.send(b"3")
        futures.append(queue.send_nowait(b"4"))
        with closed.transaction() as tx:
            tx.send("q", b"5")

    with Parallel(send_more) as later:
        assert later.outlives(0.05)
        slow.go_on.set()
        later.result()
    assert [future.result(PATIENCE).destination for future in futures] == [queue.destination] * 3
    assert [body for body in bodies(queue) if body != b"0"] == [b"1", b"2", b"3", b"4", b"5"]
    assert [m.message_id for m in queue.browse() if m.headers] == ["id"]
    assert queue.send_nowait(b"again", None, "id").result(PATIENCE).duplicate


def test_what_is_deferred_when_the_router_closes_says_so(
    closed: anabranch.Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, queue = Slow(monkeypatch), closed.queue("q")
    futures = [queue.send_nowait(b"1"), queue.send_nowait(b"2")]
    slow.threads.get(timeout=PATIENCE)
    with Parallel(closed.close) as closing:
        eventually(lambda: not closed._registry.opened)
        slow.go_on.set()
        closing.result()
    for future in futures:
        assert isinstance(future.exception(PATIENCE), anabranch.ClosedError)
    with pytest.raises(anabranch.ClosedError):
        queue.send_nowait(b"3")


def test_a_send_that_must_not_wait_to_a_store_that_was_closed_for_being_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is stored once, in order."""
    monkeypatch.setattr(open_stores, "OPEN_STORES_MAX", 2)
    journal = anabranch.JournalOptions(sync=NEVER, segment_size=64 * 1024)
    stores = [anabranch.StoreConfig("each", [">"], per_destination=True, journal=journal)]
    with anabranch.open(anabranch.Config(tmp_path, stores)) as router:
        queues = [router.queue(f"q{n}") for n in range(6)]
        futures = [queue.send_nowait(b"%d" % turn) for turn in range(10) for queue in queues]
        assert all(future.result(PATIENCE) for future in futures)
        for queue in queues:
            assert bodies(queue) == [b"%d" % turn for turn in range(10)]


def test_what_is_wrong_with_a_send_is_said_at_once_where_its_store_is_closed(closed: anabranch.Router) -> None:
    for wrong in ({"priority": "high"}, {"headers": {"k": {1}}}, {"message_id": 5}):
        with pytest.raises(TypeError):
            closed.queue("q").send_nowait(b"x", **wrong)


# Transactions


def test_released_in_a_transaction(router: anabranch.Router) -> None:
    """Nobody else has it until the end, which is one delivery more, be it a commit or a rollback."""
    queue = router.queue("q")
    queue.send(b"1")
    for deliveries, end in enumerate(("commit", "rollback", "error"), 1):
        tx = router.transaction()
        message = take(queue)
        assert message.deliveries == deliveries
        tx.release(message)
        tx.send("other.q", b"beside")
        assert queue.receive() is None
        for wrong in (message, next(iter(queue.browse()))):
            with pytest.raises(anabranch.UnknownMessageError):
                tx.release(wrong)
        with pytest.raises(anabranch.UnknownMessageError):
            message.ack()
        if end == "commit":
            tx.commit()
        elif end == "rollback":
            tx.rollback()
        else:
            with pytest.raises(ZeroDivisionError), tx:
                raise ZeroDivisionError
    assert take(queue).deliveries == 4
    assert bodies(router.queue("other.q")) == [b"beside"]
    with pytest.raises(TypeError, match="released"):
        router.transaction().release("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_released_in_a_transaction_with_a_delay(router: anabranch.Router, end: str) -> None:
    queue = router.queue("q")
    queue.send_many([b"1", b"2", b"3"])
    tx = router.transaction()
    tx.release(take(queue), delay=3600)
    tx.release(take(queue), delivered=False)
    third = take(queue)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="delay is a number of seconds"):
            tx.release(third, delay=wrong)
    tx.ack(third)
    assert queue.counts() == anabranch.Counts(0, 3, 0)
    getattr(tx, end)()
    again = take(queue)
    assert (again.body, again.deliveries, queue.counts().delayed) == (b"2", 1, 1)


def test_a_release_before_a_savepoint_stays(router: anabranch.Router) -> None:
    queue = router.queue("q")
    queue.send_many([b"1", b"2"])
    tx = router.transaction()
    tx.release(take(queue))
    point = tx.savepoint()
    tx.release(take(queue))
    assert tx.savepoint() is not point
    point.rollback()
    assert take(queue).body == b"2"
    assert queue.receive() is None
    tx.commit()
    assert take(queue).body == b"1"


def test_a_release_is_over_once_its_transaction_is_prepared(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        queue = router.queue("q")
        queue.send_many([b"1", b"2"])
        xid = anabranch.Xid(1, "one", "")
        tx = router.transaction(xid)
        tx.release(take(queue))
        tx.ack(take(queue))
        tx.prepare()
        assert take(queue).body == b"1"
        router.rollback(xid)
        assert take(queue).body == b"2"


@pytest.mark.parametrize("over", ["one", "two"])
def test_committed_without_waiting(router: anabranch.Router, over: str) -> None:
    queue, to = router.queue("q"), router.queue("other.out" if over == "two" else "out")
    queue.send(b"1")
    with router.transaction() as tx:
        tx.ack(take(queue))
        tx.send(to, b"2")
        future = tx.commit_nowait()
        for call in (tx.commit, tx.commit_nowait, tx.rollback, tx.savepoint, lambda: tx.send(to, b"3")):
            with pytest.raises(anabranch.TransactionError):
                call()
    (receipt,) = future.result(PATIENCE)
    assert (receipt.destination, tx.state) == (to.destination, "committed")
    assert (bodies(queue), bodies(to)) == ([], [b"2"])


def test_many_committed_without_waiting(router: anabranch.Router) -> None:
    queue, to = router.queue("q"), router.queue("other.out")
    queue.send_many([b"%d" % n for n in range(30)])
    futures = []
    while (message := queue.receive()) is not None:
        tx = router.transaction()
        tx.ack(message)
        tx.send(to, message.body)
        futures.append(tx.commit_nowait())
    assert all(future.result(PATIENCE) for future in futures)
    assert (queue.depth(), sorted(bodies(to))) == (0, sorted(b"%d" % n for n in range(30)))


def test_a_commit_without_waiting_that_fails_says_so(tmp_path: Path) -> None:
    """What it had acked is free again."""
    full = anabranch.JournalOptions(sync=NEVER, max_messages=1)
    with anabranch.open(anabranch.Config(tmp_path, [anabranch.StoreConfig("all", [">"], journal=full)])) as router:
        queue = router.queue("q")
        queue.send(b"1")
        tx = router.transaction()
        tx.ack(take(queue))
        tx.send("q", b"2")
        tx.send("q", b"3")
        assert isinstance(tx.commit_nowait().exception(PATIENCE), anabranch.StoreFullError)
        assert tx.state == "rolled back"
        assert take(queue).deliveries == 2
