"""Dead letters go back where they came from: none is lost, whatever the duplicate window knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.policies.config.when_full import WhenFull
from anabranch.router.upkeep import copies, requeue

from ..contract.disk import Parallel, eventually
from ..router.disk import SYNCED, contents, drain, take
from ..thirdparty.disk import SITE

KINDS = ("journal", "sql", "memory", "onefile")
ID = "invoice-1"

assert SITE.is_dir()  # stores of kind `onefile` are found by their entry point


def of_kind(kind: str, **options: Any) -> dict[str, Any]:
    """The options of a store of that kind, as StoreConfig takes them."""
    model = {"journal": anabranch.JournalOptions, "sql": anabranch.SqlOptions, "memory": anabranch.MemoryOptions}.get(
        kind
    )
    if model is None:
        return {kind: options}
    return {kind: SYNCED.model_copy(update=options) if kind == "journal" else model(**options)}


def config(tmp_path: Path, kind: str = "journal", letters: str | None = "journal", **options: Any) -> anabranch.Config:
    """What is not a dead letter is in store `all`, of one kind; the others are in `dead`, or there too."""
    undelivered = {"max_deliveries": 1, "dead_letter": "dlq.{name}", **options}
    stores = [anabranch.StoreConfig("all", [">"], **of_kind(kind, **undelivered))]
    if letters is not None:
        stores.append(anabranch.StoreConfig("dead", ["dlq.>"], **of_kind(letters)))
    return anabranch.Config(tmp_path / "data", stores)


def fail(router: anabranch.Router, source: anabranch.Queue | anabranch.Subscriber, *bodies: bytes) -> None:
    """These are received, given back and put aside."""
    for body in bodies:
        message = source.receive()
        assert message is not None
        assert message.body == body
        message.release()
    router.sweep()


def failed(router: anabranch.Router, name: str, count: int, size: int = 10) -> list[bytes]:
    """So many messages of a queue that have become dead letters; their bodies."""
    bodies = [b"%d" % number + bytes(size) for number in range(count)]
    queue = router.queue(name)
    for number, body in enumerate(bodies):
        queue.send(body, message_id=f"{name}-{number}")
    fail(router, queue, *bodies)
    return bodies


def requeued(reason: str, count: int, deliveries: int) -> dict[str, Any]:
    """What a message that was put back says of it."""
    return {"requeued_reason": reason, "requeued_count": count, "requeued_deliveries": deliveries}


def without_labels(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.headers.items() if not name.startswith("dead_letter")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("letters", [None, "journal", "sql", "memory"])
def test_a_dead_letter_that_is_sent_back_by_hand_is_not_lost(tmp_path: Path, kind: str, letters: str | None) -> None:
    """Acked, and sent where it came from under the id that it had there, in one transaction."""
    with anabranch.open(config(tmp_path, kind, letters)) as router:
        router.queue("q").send(b"pay", {"k": 1}, ID)
        fail(router, router.queue("q"), b"pay")
        letter = take(router, "dlq.q")
        assert letter.headers["dead_letter_message_id"] == ID
        with router.transaction() as tx:
            tx.ack(letter)
            tx.send(str(letter.headers["dead_letter_source"]), letter.body, without_labels(letter), ID)
        assert [receipt.duplicate for receipt in tx.receipts] == [False]
        assert (contents(router, "q"), contents(router, "dlq.q")) == ([b"pay"], [])
        message = take(router, "q")
        assert (message.message_id, message.headers, message.deliveries) == (ID, {"k": 1}, 1)


@pytest.mark.parametrize("kind", ["journal", "sql", "onefile"])
def test_nor_is_it_if_the_transaction_is_committed_by_the_next_process(tmp_path: Path, kind: str) -> None:
    xid = anabranch.Xid(1, "requeue")
    with anabranch.open(config(tmp_path, kind)) as router:
        router.queue("q").send(b"pay", message_id=ID)
        fail(router, router.queue("q"), b"pay")
        tx = router.transaction(xid)
        tx.ack(take(router, "dlq.q"))
        tx.send("q", b"pay", message_id=ID)
        tx.send("q", b"pay", message_id=ID)  # there is one dead letter: this is a duplicate
        tx.prepare()
    with anabranch.open(config(tmp_path, kind)) as router:
        router.commit(xid)
        assert (contents(router, "q"), contents(router, "dlq.q")) == ([b"pay"], [])
        assert router.queue("q").send(b"again", message_id=ID).duplicate


def test_a_voted_transaction_puts_it_back_too(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("q").send(b"pay", message_id=ID)
        fail(router, router.queue("q"), b"pay")
        tx = router.transaction()
        tx.send("q", b"pay", message_id=ID)
        tx.ack(take(router, "dlq.q"))
        tx.vote()
        assert [receipt.duplicate for receipt in tx.commit()] == [False]
        assert contents(router, "q") == [b"pay"]


def test_other_sends_of_the_same_id_are_duplicates_still(tmp_path: Path) -> None:
    """A consumer that sends on what it receives, and is not sure that it has not done so before, counts on it."""
    with anabranch.open(config(tmp_path)) as router:
        router.queue("q").send(b"pay", message_id=ID)
        router.queue("other").send(b"pay", message_id=ID)
        fail(router, router.queue("q"), b"pay")
        with router.transaction() as tx:
            tx.ack(take(router, "dlq.q"))
            tx.send("other", b"pay", message_id=ID)
        assert [receipt.duplicate for receipt in tx.receipts] == [True]
        assert router.queue("q").send(b"pay", message_id=ID).duplicate
        assert (contents(router, "q"), contents(router, "other")) == ([], [b"pay"])


@pytest.mark.parametrize("kind", ["journal", "sql"])
def test_what_was_put_back_is_among_the_latest_ids_after_a_restart_too(tmp_path: Path, kind: str) -> None:
    settings = config(tmp_path, kind, duplicate_window=4)
    with anabranch.open(settings) as router:
        queue = router.queue("orders")
        for name in ("a", "b", "c"):
            queue.send(name.encode(), message_id=name)
        fail(router, queue, b"a")
        assert router.requeue("dlq.orders") == 1
    with anabranch.open(settings) as router:
        queue = router.queue("orders")
        for name in ("d", "e"):
            queue.send(name.encode(), message_id=name)
        assert queue.send(b"again", message_id="a").duplicate
        assert not queue.send(b"again", message_id="b").duplicate


def test_a_transaction_keeps_its_receipts(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("q").send(b"1", message_id=ID)
        with router.transaction() as tx:
            tx.send("q", b"2", message_id=ID)
            tx.send("topic://t", b"3")
            assert tx.receipts == []
        assert [(str(r.destination), r.duplicate) for r in tx.receipts] == [("queue://q", True), ("topic://t", False)]
        with pytest.raises(ZeroDivisionError), router.transaction() as tx:
            tx.send("q", b"4")
            raise ZeroDivisionError
        assert tx.receipts == []
        tx = router.transaction()
        tx.send("q", b"5")
        assert tx.commit() == tx.receipts
        assert len(tx.receipts) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("letters", [None, "journal", "sql", "memory"])
def test_requeue_of_a_message_in_hand(tmp_path: Path, kind: str, letters: str | None) -> None:
    with anabranch.open(config(tmp_path, kind, letters)) as router:
        queue = router.queue("q")
        for _ in range(3):  # it may fail again
            queue.send(b"pay", {"k": 1, "letter": "x"}, ID, priority=7)
            queue.send(b"good", message_id="good")
            fail(router, queue, b"pay")
            assert router.requeue(take(router, "dlq.q")) == 1
            assert (contents(router, "q"), contents(router, "dlq.q")) == ([b"good", b"pay"], [])
            drain(router, "dlq.q")
            good, message = take(router, "q"), take(router, "q")
            assert (message.body, message.message_id, message.priority) == (b"pay", ID, 7)
            labels = requeued("delivery_limit", 1, 1)
            assert (message.headers, message.deliveries) == ({"k": 1, "letter": "x", **labels}, 1)
            good.ack()
            message.release()
            router.sweep()
            assert router.requeue([take(router, "dlq.q")]) == 1
            assert drain(router, "q") == [b"pay"]
            queue.delete()  # the window forgets both ids


def test_requeue_of_many_is_one_transaction(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        failed(router, "a", 2)
        failed(router, "b", 2)
        letters = [take(router, f"dlq.{name}") for name in "aabb"]
        router.queue("dlq.b").send(b"no letter")
        with pytest.raises(anabranch.DeadLetterError, match="no dead letter: it has no header dead_letter_source"):
            router.requeue([*letters, take(router, "dlq.b")])
        assert (router.queue("a").depth(), router.queue("b").depth()) == (0, 0)
        assert router.requeue(iter(letters)) == 4  # they were leased still
        assert (router.queue("a").depth(), router.queue("b").depth()) == (2, 2)
        assert (router.queue("dlq.a").depth(), contents(router, "dlq.b")) == (0, [b"no letter"])
        assert router.requeue([]) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("message_id", [None, ID])
def test_a_dead_letter_is_not_dropped_for_being_new(tmp_path: Path, kind: str, message_id: str | None) -> None:
    with anabranch.open(config(tmp_path, kind, max_messages=1, when_full=WhenFull.DROP_NEW)) as router:
        queue = router.queue("q")
        queue.send(b"1", message_id=message_id)
        fail(router, queue, b"1")
        queue.send(b"2")
        with pytest.raises(anabranch.StoreFullError):
            router.requeue("dlq.q")
        assert router.queue("dlq.q").depth() == 1
        drain(router, "q")
        assert router.requeue("dlq.q") == 1
        assert queue.depth() == 1


def test_requeue_of_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, the whole of it, in order; with a limit so many."""
    monkeypatch.setattr(requeue, "BATCH_MESSAGES", 7)
    monkeypatch.setattr(requeue, "BATCH_BYTES", 600)
    with anabranch.open(config(tmp_path, dead_letter="dlq")) as router:
        dead = router.queue("dlq")
        small, large = failed(router, "a", 30), failed(router, "b", 10, 500)
        assert router.requeue(dead, limit=11) == 11
        assert (contents(router, "a"), dead.depth()) == (small[:11], 29)
        assert router.requeue("queue://dlq", 0) == 0
        syncs = router.stats().stores["all"].batches
        assert router.requeue("dlq") == 29
        assert router.stats().stores["all"].batches - syncs <= 19 / 7 + 10 + 5  # not one by one
        assert (drain(router, "a"), drain(router, "b"), dead.depth()) == (small, large, 0)
        assert router.requeue("dlq") == 0
        assert router.requeue("dlq.never") == 0


def test_requeue_of_a_queue_leaves_what_comes_back_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go round and round."""
    monkeypatch.setattr(requeue, "BATCH_MESSAGES", 1)
    with anabranch.open(config(tmp_path)) as router:
        bodies = failed(router, "q", 3)
        put_back = requeue._put_back

        def fails_again(*args: Any) -> None:
            put_back(*args)
            with Parallel(lambda: fail(router, router.queue("q"), next(router.queue("q").browse()).body)) as other:
                other.result()

        monkeypatch.setattr(requeue, "_put_back", fails_again)
        assert router.requeue("dlq.q") == 3
        assert (contents(router, "q"), contents(router, "dlq.q")) == ([], bodies)


def test_requeue_of_a_queue_stops_at_what_cannot_go_back(tmp_path: Path) -> None:
    """What was before it is back, it and the rest stay, and none of them has been delivered."""
    with anabranch.open(config(tmp_path)) as router:
        bodies = failed(router, "q", 3)
        dead = router.queue("dlq.q")
        dead.send(b"no letter")
        router.queue("q").send(b"last", message_id="last")
        fail(router, router.queue("q"), b"last")
        with pytest.raises(anabranch.DeadLetterError, match="no dead letter") as raised:
            router.requeue(dead)
        assert raised.value.__notes__ == ["3 dead letters of queue://dlq.q were put back before this."]
        assert (contents(router, "q"), contents(router, "dlq.q")) == (bodies, [b"no letter", b"last"])
        with pytest.raises(anabranch.DeadLetterError, match="no dead letter"):
            router.requeue(dead)
        other = take(router, "dlq.q")
        assert (other.body, other.deliveries) == (b"no letter", 1)
        assert router.requeue(dead) == 1  # all but what is held by somebody
        assert contents(router, "q") == [*bodies, b"last"]


def test_requeue_goes_on_where_a_full_store_has_stopped_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "BATCH_MESSAGES", 2)
    with anabranch.open(config(tmp_path, max_messages=5)) as router:
        bodies = failed(router, "q", 5)
        router.queue("other").send(b"in the way")
        with pytest.raises(anabranch.StoreFullError) as raised:
            router.requeue("dlq.q")
        assert raised.value.__notes__ == ["4 dead letters of queue://dlq.q were put back before this."]
        assert (contents(router, "q"), contents(router, "dlq.q")) == (bodies[:4], bodies[4:])
        drain(router, "other")
        assert router.requeue("dlq.q") == 1
        assert contents(router, "q") == bodies


def test_what_has_nowhere_to_go_stays(tmp_path: Path) -> None:
    journal = SYNCED.model_copy(update={"max_deliveries": 1, "dead_letter": "dlq"})
    stores = [
        anabranch.StoreConfig("all", ["r"], journal=journal),
        anabranch.StoreConfig("dead", ["dlq.>"], journal=SYNCED),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        dead = router.queue("dlq")
        for source, said in (
            ("queue://q", "cannot go back to queue://q: no pattern matches"),
            ("http://q", "cannot go back to http://q: unknown scheme"),
            ("queue://dlq", "comes from queue://dlq itself"),
            (7, "no header dead_letter_source"),
        ):
            dead.send(b"x", {"dead_letter_source": source})
            letter = take(router, "dlq")
            with pytest.raises(anabranch.DeadLetterError, match=said):
                router.requeue(letter)
            letter.ack()  # it was leased still
        dead.send(b"x", {"dead_letter_source": "queue://r", "dead_letter_message_id": 7})
        with pytest.raises(anabranch.DeadLetterError, match="dead_letter_message_id is 7"):
            router.requeue("dlq")


def test_what_is_no_message_is_refused(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        failed(router, "q", 1)
        dead = router.queue("dlq.q")
        with pytest.raises(anabranch.UnknownMessageError, match="browsed"):
            router.requeue(dead.browse())
        letter = take(router, "dlq.q")
        with pytest.raises(TypeError, match="put back"):
            router.requeue([letter, b"x"])  # type: ignore[list-item]
        with pytest.raises(
            TypeError, match=r"^requeue takes messages that were received, or their queue .*, not int: 5$"
        ):
            router.requeue(5)  # type: ignore[arg-type]
        for wrong in (True, "1", 1.5):
            with pytest.raises(TypeError, match=r"^limit is a number of messages, not "):
                router.requeue(dead, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="limit"):
            router.requeue(dead, -1)
        with pytest.raises(ValueError, match="limit"):
            router.requeue([letter], 1)
        with pytest.raises(ValueError, match=r"^<Message .*> is given twice; give it once. Nothing was put back$"):
            router.requeue([letter, letter])
        assert router.requeue(letter) == 1
        with pytest.raises(anabranch.UnknownMessageError):
            router.requeue(letter)
        assert router.queue("q").depth() == 1


def test_what_was_not_persistent_is_not_persistent_again(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("q").send(b"1", message_id=ID, persistent=False)
        fail(router, router.queue("q"), b"1")
        assert router.requeue("dlq.q") == 1
        assert contents(router, "q") == [b"1"]
    with anabranch.open(config(tmp_path)) as router:
        assert (contents(router, "q"), contents(router, "dlq.q")) == ([], [])


def test_what_expired_goes_back_and_does_not_expire_again(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("q").send(b"1", message_id=ID, expires_in=0.001)
        eventually(lambda: router.sweep() > 0 or router.queue("dlq.q").depth() > 0)
        assert router.requeue("dlq.q") == 1
        message = take(router, "q")
        assert (message.body, message.message_id, message.expires_at_ms) == (b"1", ID, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_subscription_has_given_up_goes_to_its_topic(tmp_path: Path, kind: str) -> None:
    """Once, if several have: each of them has it once more then."""
    with anabranch.open(config(tmp_path, kind)) as router:
        topic = router.topic("t")
        one, two, three = topic.subscribe("one", "c"), topic.subscribe("two"), topic.subscribe("three")
        topic.send(b"x", message_id=ID)
        fail(router, one, b"x")
        fail(router, two, b"x")
        assert router.requeue("dlq.t") == 2
        assert (one.depth(), two.depth(), three.depth(), router.queue("dlq.t").depth()) == (1, 1, 2, 0)
        message = one.receive()
        assert message is not None
        assert (message.body, message.message_id, message.deliveries) == (b"x", ID, 1)


def test_messages_of_a_topic_that_have_the_same_id_all_go_back(tmp_path: Path) -> None:
    bodies = [b"first", b"between", b"second", b"between", b"second"]
    with anabranch.open(config(tmp_path, duplicate_window=1)) as router:
        topic = router.topic("prices")
        one, two = topic.subscribe("one"), topic.subscribe("two")
        for body in bodies:
            assert not topic.send(body, message_id="between" if body == b"between" else ID).duplicate
        fail(router, one, *bodies)
        fail(router, two, *bodies)
        assert router.requeue("dlq.prices") == 2 * len(bodies)
        for subscription in (one, two):
            assert sorted(message.body for message in subscription.browse()) == sorted(bodies)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("persistent", [True, False])
def test_copies_in_different_transactions_are_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, persistent: bool
) -> None:
    """All letters of one subscription come before those of the other."""
    monkeypatch.setattr(requeue, "BATCH_MESSAGES", 3)
    bodies = [b"%d" % number for number in range(8)]
    with anabranch.open(config(tmp_path, kind)) as router:
        topic = router.topic("t")
        one, two, three = topic.subscribe("one", "c"), topic.subscribe("two"), topic.subscribe("three")
        for body in bodies:
            topic.send(body, {"nested": [{"k": 1}]}, body.decode(), persistent=persistent)
        fail(router, one, *bodies)
        fail(router, two, *bodies)
        assert router.requeue("dlq.t") == 16
        assert router.queue("dlq.t").depth() == 0
        for subscription in (one, two):
            assert [message.body for message in subscription.browse()] == bodies
        assert [message.body for message in three.browse()] == bodies * 2


def test_what_a_subscription_gives_up_meanwhile_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of the message that was just sent back, which its subscription would never see again."""
    monkeypatch.setattr(requeue, "BATCH_MESSAGES", 1)
    settings = config(tmp_path)
    dead = anabranch.StoreConfig("dead", ["dlq.>"], journal=SYNCED.model_copy(update={"priorities": True}))
    with anabranch.open(anabranch.Config(settings.directory, [settings.stores[0], dead])) as router:
        topic = router.topic("t")
        one, two = topic.subscribe("one"), topic.subscribe("two")
        topic.send(b"urgent", message_id="urgent", priority=9)
        topic.send(b"other", message_id="other")
        fail(router, one, b"urgent", b"other")
        for _ in range(2):
            message = two.receive()
            assert message is not None
            message.ack()
        put_back = requeue._put_back
        calls = iter([lambda: fail(router, two, b"urgent")])

        def fails_again(*args: Any) -> None:
            put_back(*args)
            for call in calls:
                with Parallel(call) as other:
                    other.result()

        monkeypatch.setattr(requeue, "_put_back", fails_again)
        assert router.requeue("dlq.t") == 2
        assert (contents(router, "dlq.t"), [message.body for message in two.browse()]) == ([b"other"], [b"urgent"])


@pytest.mark.parametrize(("remembered", "sent"), [(1, 12), (5, 12), (6, 6)])
def test_so_many_messages_of_a_topic_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: int, sent: int
) -> None:
    """Beyond that they are sent again; none is lost."""
    monkeypatch.setattr(requeue, "BATCH_MESSAGES", 4)
    monkeypatch.setattr(copies, "REMEMBERED_MAX", remembered)
    bodies = [b"%d" % number for number in range(6)]
    with anabranch.open(config(tmp_path)) as router:
        topic = router.topic("t")
        subscriptions = topic.subscribe("one"), topic.subscribe("two")
        for body in bodies:
            topic.send(body, message_id=body.decode())
        for subscription in subscriptions:
            fail(router, subscription, *bodies)
        assert router.requeue("dlq.t") == 12
        for subscription in subscriptions:
            received = [message.body for message in subscription.browse()]
            assert (set(received), len(received)) == (set(bodies), sent)


def test_a_message_is_forgotten_when_no_copy_is_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "BATCH_MESSAGES", 3)
    monkeypatch.setattr(copies, "REMEMBERED_MAX", 1)
    with anabranch.open(config(tmp_path)) as router:
        topic = router.topic("t")
        one, two = topic.subscribe("one"), topic.subscribe("two")
        bodies = [b"%d" % number for number in range(6)]
        for body in bodies:
            topic.send(body, message_id=body.decode())
            fail(router, one, body)
            fail(router, two, body)
        assert router.requeue("dlq.t") == 12
        for subscription in (one, two):
            assert [message.body for message in subscription.browse()] == bodies


def test_what_nobody_would_have_does_not_go_back(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        topic = router.topic("t")
        one, two = topic.subscribe("one", "c"), topic.subscribe("two")
        topic.send(b"x", message_id=ID)
        fail(router, one, b"x")
        one.unsubscribe()
        with pytest.raises(anabranch.DeadLetterError, match="subscription 'one' of topic://t, which is not there"):
            router.requeue("dlq.t")
        topic.send(b"y", expires_in=0.001)
        eventually(lambda: router.sweep() > 0 or router.queue("dlq.t").depth() == 2)
        two.unsubscribe()
        first = take(router, "dlq.t")
        with pytest.raises(anabranch.DeadLetterError, match="nobody would have it; subscribe first, or ack"):
            router.requeue("dlq.t")
        first.release()
        assert router.queue("dlq.t").depth() == 2
        one, two = topic.subscribe("one", "c"), topic.subscribe("two")
        assert router.requeue("dlq.t") == 2
        assert (one.depth(), two.depth()) == (2, 2)


def test_a_dead_letter_that_is_given_back_too_often_remembers_where_it_comes_from(tmp_path: Path) -> None:
    """Its queue's store has the same dead-letter queue, as where there is one store for everything."""
    with anabranch.open(config(tmp_path, letters=None, dead_letter="dlq")) as router:
        router.queue("q").send(b"x", message_id=ID)
        fail(router, router.queue("q"), b"x")
        fail(router, router.queue("dlq"), b"x")
        letter = take(router, "dlq")
        assert (letter.headers["dead_letter_source"], letter.headers["dead_letter_reason"]) == (
            "queue://q",
            "delivery_limit",
        )
        assert router.requeue(letter) == 1
        assert [(m.body, m.message_id) for m in router.queue("q").browse()] == [(b"x", ID)]


@pytest.mark.parametrize("label", ["message_id", "source", "subscription", "client"])
def test_a_sender_may_use_the_names_of_the_labels(tmp_path: Path, label: str) -> None:
    """Its message is acked, dead-lettered and put back as any other, and holds up none behind it."""
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        for body in (b"acked", b"released", b"rejected", b"behind"):
            queue.send(body, {f"dead_letter_{label}": ["x"], "k": 1})
        with router.transaction() as tx:
            tx.ack(take(router, "q"))
        fail(router, queue, b"released")
        take(router, "q").reject()
        fail(router, queue, b"behind")
        assert (contents(router, "q"), router.requeue("dlq.q")) == ([], 3)
        assert [(m.body, m.message_id, m.headers) for m in queue.browse()] == [
            (b"released", None, {"k": 1, **requeued("delivery_limit", 1, 1)}),
            (b"rejected", None, {"k": 1, **requeued("rejected", 1, 1)}),
            (b"behind", None, {"k": 1, **requeued("delivery_limit", 1, 1)}),
        ]  # fmt: skip


@pytest.mark.parametrize("label", ["client", "subscription"])
def test_a_label_that_is_no_name_is_refused(tmp_path: Path, label: str) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.topic("t").subscribe("one", "c")
        labels = {"source": "topic://t", "client": "c", "subscription": "one", label: ["x"]}
        router.queue("dlq").send(b"x", {f"dead_letter_{name}": value for name, value in labels.items()})
        with pytest.raises(anabranch.DeadLetterError, match="not there any more"):
            router.requeue("dlq")
        assert contents(router, "dlq") == [b"x"]


def test_a_dead_letter_that_was_sent_on_comes_from_where_it_fails_next(tmp_path: Path) -> None:
    """Whoever sends it on with all its headers says nothing of that."""
    with anabranch.open(config(tmp_path)) as router:
        topic = router.topic("t")
        one = topic.subscribe("one", "c")
        topic.send(b"x", {"k": 1}, ID)
        fail(router, one, b"x")
        letter = take(router, "dlq.t")
        router.queue("q").send(letter.body, letter.headers)
        fail(router, router.queue("q"), b"x")
        assert router.requeue("dlq.q") == 1
        message = take(router, "q")
        assert (message.body, message.message_id) == (b"x", None)
        assert message.headers == {"k": 1, **requeued("delivery_limit", 1, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_letter_that_fails_in_a_queue_of_its_own_stays_there(tmp_path: Path, kind: str) -> None:
    """Where one store has everything: there is no dead-letter queue of dead-letter queues."""
    with anabranch.open(config(tmp_path, kind, None)) as router:
        router.queue("q").send(b"x", {"k": 1}, ID)
        one = router.topic("t").subscribe("one", "c")
        router.topic("t").send(b"y", {"k": 2}, ID)
        fail(router, router.queue("q"), b"x")
        fail(router, one, b"y")
        for name, body in (("dlq.q", b"x"), ("dlq.t", b"y")):
            fail(router, router.queue(name), body)
            take(router, name).reject("again")
            assert [m.headers["dead_letter_reason"] for m in router.queue(name).browse()] == ["again"]
            assert router.requeue(name) == 1
        for source in (router.queue("q"), one):
            message = source.receive()
            assert message is not None
            assert message.message_id == ID
            assert {"k", *requeued("", 0, 0)} == set(message.headers)


def test_a_dead_letter_that_fails_in_its_queue_may_go_to_another(tmp_path: Path) -> None:
    """Which the store of the dead letters names: it goes back from there to where it came from first."""
    settings = config(tmp_path)
    dead = anabranch.JournalOptions(max_deliveries=1, dead_letter="hopeless.{name}")
    stores = [settings.stores[0], anabranch.StoreConfig("dead", ["dlq.>"], journal=dead)]
    with anabranch.open(anabranch.Config(settings.directory, stores)) as router:
        router.queue("q").send(b"x", message_id=ID)
        fail(router, router.queue("q"), b"x")
        fail(router, router.queue("dlq.q"), b"x")
        assert router.requeue("hopeless.q") == 1
        assert take(router, "q").message_id == ID


def test_a_full_store_does_not_wear_dead_letters_out(tmp_path: Path) -> None:
    """Each try counts as a delivery; they can be put back all the same once there is room."""
    journal = SYNCED.model_copy(update={"max_deliveries": 1, "dead_letter": "dlq.{name}"})
    full = anabranch.StoreConfig("full", ["q"], journal=journal.model_copy(update={"max_messages": 1}))
    rest = anabranch.StoreConfig("rest", [">"], journal=journal)
    with anabranch.open(anabranch.Config(tmp_path / "data", [full, rest])) as router:
        queue = router.queue("q")
        queue.send(b"x", message_id=ID)
        fail(router, queue, b"x")
        queue.send(b"in the way")
        for _ in range(3):
            with pytest.raises(anabranch.StoreFullError):
                router.requeue("dlq.q")
            router.sweep()
        drain(router, "q")
        assert router.requeue("dlq.q") == 1
        assert contents(router, "q") == [b"x"]


# What is put back says why and how often


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_why_and_how_often_it_was_a_dead_letter(tmp_path: Path, kind: str) -> None:
    """Over all the times; its own count begins anew."""
    with anabranch.open(config(tmp_path, kind, max_deliveries=2)) as router:
        queue = router.queue("q")
        queue.send(b"x", {"k": 1}, ID)
        fail(router, queue, b"x", b"x")
        assert router.requeue("dlq.q") == 1
        message = take(router, "q")
        assert (message.headers, message.deliveries) == ({"k": 1, **requeued("delivery_limit", 1, 2)}, 1)
        message.reject("it is wrong")
        (letter,) = queue.dead_letters()
        assert (letter.reason, letter.deliveries, letter.requeued) == ("it is wrong", 1, 1)
        assert router.requeue(take(router, "dlq.q")) == 1
        message = take(router, "q")
        assert (message.headers, message.message_id) == ({"k": 1, **requeued("it is wrong", 2, 3)}, ID)


@pytest.mark.parametrize("wrong", ["x", -1, True, [1]])
def test_a_sender_may_use_those_names(tmp_path: Path, wrong: Any) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        queue.send(b"x", {"requeued_count": wrong, "requeued_deliveries": wrong, "requeued_reason": wrong})
        fail(router, queue, b"x")
        assert router.requeue("dlq.q") == 1
        assert take(router, "q").headers == requeued("delivery_limit", 1, 1)


def test_one_as_large_as_may_be_goes_back_all_the_same(tmp_path: Path) -> None:
    """Without those headers: its store would refuse it with them."""
    stores = [
        anabranch.StoreConfig("all", [">"], **of_kind("memory", dead_letter="dlq", message_bytes_max=2000)),
        anabranch.StoreConfig("dead", ["dlq"], **of_kind("memory")),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        for size in (1900, 2000):
            router.queue("q").send(bytes(size))
            take(router, "q").reject()
        assert router.requeue("dlq") == 2
        assert [(len(m.body), len(m.headers)) for m in router.queue("q").browse()] == [(1900, 3), (2000, 0)]
