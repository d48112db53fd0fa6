"""Messages that are not delivered any more are dead-lettered: dead-letter queues, expiry, limits of delivery."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.system import rare_warnings
from anabranch.router.upkeep import dead_letters

from ..contract.disk import eventually
from ..router.disk import SYNCED
from ..taking import take


def setup(tmp_path: Path, dead_letter: str | None = "dlq", **options: object) -> anabranch.Config:
    """Everything in store `all` but the dead letters, which are in a store of their own."""
    journal = SYNCED.model_copy(update={"dead_letter": dead_letter, **options})
    return anabranch.Config(
        tmp_path / "data",
        [
            anabranch.StoreConfig("all", [">"], journal=journal),
            anabranch.StoreConfig("dead", ["dlq.>"], journal=SYNCED),
        ],
    )


def fail(queue: anabranch.Queue | anabranch.Subscriber) -> int:
    """Receive one and give it back; the count of its deliveries."""
    message = take(queue)
    message.release()
    return message.deliveries


def test_a_message_that_comes_back_too_often_goes_to_the_dead_letter_queue(tmp_path: Path) -> None:
    config = setup(tmp_path, max_deliveries=3)
    with anabranch.open(config) as router:
        queue = router.queue("q")
        queue.send(b"poison", headers={"k": 1}, message_id="m-1", priority=7)
        queue.send(b"good")
        assert fail(queue) == 1
        with pytest.raises(ZeroDivisionError), router.transaction() as tx:
            message = take(queue)
            assert message.deliveries == 2
            tx.ack(message)
            raise ZeroDivisionError
    with anabranch.open(config) as router:  # the count is kept
        queue, dead = router.queue("q"), router.queue("dlq")
        assert fail(queue) == 3
        message = take(queue)
        assert message.body == b"good"
        message.release()
        eventually(lambda: dead.depth() == 1)  # by itself
        letter = take(dead)
        assert (letter.body, letter.priority, letter.deliveries) == (b"poison", 7, 1)
        assert letter.headers == {
            "k": 1, "dead_letter_reason": "delivery_limit", "dead_letter_source": "queue://q",
            "dead_letter_deliveries": 3, "dead_letter_message_id": "m-1",
        }  # fmt: skip
        assert [m.body for m in queue.browse()] == [b"good"]
        assert router.stats().dead_lettered == 1


def test_expired_messages_are_dropped_and_counted_where_there_is_no_dead_letter_queue(tmp_path: Path) -> None:
    with anabranch.open(setup(tmp_path, None)) as router:
        queue = router.queue("q")
        queue.send(b"1", expires_in=0.001)
        queue.send(b"2", expires_in=3600)
        queue.send(b"3", expires_in=0.001, persistent=False)
        eventually(lambda: router.stats().dropped == 2)
        assert [m.body for m in queue.browse()] == [b"2"]


def test_what_is_deleted_for_want_of_a_dead_letter_queue_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each queue at once, and then once a minute. What expires was meant to go."""
    now = 1000.0
    monkeypatch.setattr(rare_warnings, "monotonic", lambda: now)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    def of(count: str, queue: str) -> str:
        return (
            f"store all: {count} of queue://{queue} deleted, rejected or given back too often: the store has no "
            "dead-letter queue; set `dead_letter: dlq` to keep such messages"
        )

    with anabranch.open(setup(tmp_path, None, max_deliveries=1)) as router:
        for queue in (router.queue("rejected"), router.queue("failed")):
            queue.send_many([b"1", b"2", b"3"])
            queue.send(b"4", expires_in=0.001)
        eventually(lambda: router.stats().dropped == 2)
        assert told() == []
        for _ in range(3):
            message = take(router.queue("rejected"))
            message.reject("no")
            fail(router.queue("failed"))
            router.sweep()
        assert told() == [of("1 message", "rejected"), of("1 message", "failed")]
        now += rare_warnings.TELL_SECONDS
        eventually(lambda: len(told()) == 4)
        assert sorted(told()[2:]) == [of("2 messages", "failed"), of("2 messages", "rejected")]
        router.queue("rejected").send(b"5")
        message = take(router.queue("rejected"))
        message.reject("no")
    assert told()[4:] == [of("1 message", "rejected")]


@pytest.mark.parametrize("persistent", [True, False])
def test_expired_messages_go_to_the_dead_letter_queue_of_their_destination(tmp_path: Path, persistent: bool) -> None:
    with anabranch.open(setup(tmp_path, "dlq.{name}")) as router:
        topic = router.topic("t")
        topic.subscribe("one")
        topic.subscribe("two")
        for destination in (topic, router.queue("q")):
            destination.send(b"x", expires_in=0.001, persistent=persistent)
            dead = router.queue(f"dlq.{destination.destination.name}")
            eventually(lambda dead=dead: dead.depth() == 1)  # type: ignore[misc]  # once, not for each subscription
            letter = take(dead)
            assert letter.headers["dead_letter_reason"] == "expired"
            assert letter.expires_at_ms == 0
        # A letter is there before what it was made of is gone.
        eventually(lambda: topic.depth() == router.queue("q").depth() == 0)
    with anabranch.open(setup(tmp_path, "dlq.{name}")) as router:
        assert router.queue("dlq.t").depth() == (1 if persistent else 0)


def test_each_subscription_has_its_own_count(tmp_path: Path) -> None:
    with anabranch.open(setup(tmp_path, max_deliveries=2)) as router:
        topic = router.topic("t")
        one, two = topic.subscribe("one", client_id="c"), topic.subscribe("two")
        topic.send(b"x")
        assert [fail(one), fail(one), fail(two)] == [1, 2, 1]
        assert one.receive() is None
        eventually(lambda: router.queue("dlq").depth() == 1)
        eventually(lambda: (one.depth(), two.depth()) == (0, 1))
        letter = take(router.queue("dlq"))
        assert (letter.headers["dead_letter_client"], letter.headers["dead_letter_subscription"]) == ("c", "one")


def test_what_cannot_be_put_aside_waits(tmp_path: Path) -> None:
    config = setup(tmp_path, max_deliveries=1)
    full = config.stores[1].model_copy(update={"options": SYNCED.model_copy(update={"max_messages": 1})})
    with anabranch.open(anabranch.Config(config.directory, [config.stores[0], full])) as router:
        queue, dead = router.queue("q"), router.queue("dlq")
        queue.send_many([b"1", b"2"])
        fail(queue)
        eventually(lambda: dead.depth() == 1)
        fail(queue)
        assert router.sweep() == 0
        assert queue.receive() is None
        assert [m.body for m in queue.browse()] == [b"2"]
        letter = take(dead)
        letter.ack()
        eventually(lambda: [m.body for m in dead.browse()] == [b"2"])
        eventually(lambda: queue.depth() == 0)


@pytest.mark.parametrize("limit", [{"max_messages": 5}, {"max_bytes": 1000}])
@pytest.mark.parametrize("kind", ["journal", "sql", "memory"])
def test_a_full_store_lets_its_dead_letters_go(tmp_path: Path, kind: str, limit: dict[str, int]) -> None:
    """Into a dead-letter queue of its own, though their headers are longer: it would stay full for ever."""
    name = "max_stored_bytes" if kind == "memory" and "max_bytes" in limit else next(iter(limit))
    options = {name: next(iter(limit.values())), "dead_letter": "dlq", "max_deliveries": 1}
    store = anabranch.StoreConfig("all", [">"], kind=kind, options=options)
    with anabranch.open(anabranch.Config(tmp_path / "data", [store])) as router:
        queue, dead = router.queue("q"), router.queue("dlq")
        size = 1 if "max_messages" in limit else 150
        for _ in range(3):
            queue.send(b"x" * size, expires_in=0.2)
        queue.send_many([b"y" * size] * 2)
        with pytest.raises(anabranch.StoreFullError):
            queue.send(b"z" * size)
        message = queue.receive(timeout=5)
        while message is not None and message.body[:1] == b"x":
            message.release(delivered=False)
            message = queue.receive(timeout=5)
        assert message is not None
        message.reject("no")
        fail(queue)
        eventually(lambda: (router.sweep(), dead.depth())[1] == 5)
        assert queue.depth() == 0
        reasons = {letter.headers["dead_letter_reason"] for letter in dead.browse()}
        assert reasons == {"expired", "no", "delivery_limit"}
        dead.purge()
        queue.send(b"z" * size)


def test_bad_values(tmp_path: Path) -> None:
    with anabranch.open(setup(tmp_path)) as router:
        queue = router.queue("q")
        for wrong in ({"priority": 65_536}, {"priority": -1}, {"expires_in": 0}, {"expires_in": -1.5}):
            with pytest.raises(ValueError, match=r"priority|expires_in"):
                queue.send(b"x", **wrong)
            with router.transaction() as tx, pytest.raises(ValueError, match=r"priority|expires_in"):
                tx.send("q", b"x", **wrong)
        with pytest.raises(TypeError, match="priority"):
            queue.send(b"x", priority="high")  # type: ignore[arg-type]
        assert queue.depth() == 0


def test_many_bytes_are_put_aside_in_spite_of_what_a_user_may_hold_in_a_transaction(tmp_path: Path) -> None:
    """Else they would wait for ever, and all behind them."""
    config = setup(tmp_path, max_deliveries=1)
    config = anabranch.Config(
        config.directory, config.stores, transactions=anabranch.TransactionOptions(max_operations=3, max_bytes=1000)
    )
    with anabranch.open(config) as router:
        queue = router.queue("q")
        for size in (400, 400, 400, 3000, 1):
            queue.send(bytes(size))
            fail(queue)
        router.sweep()
        eventually(lambda: router.queue("dlq").depth() == 5)  # the background may have been quicker
        assert queue.depth() == 0


def test_one_that_its_dead_letter_queue_refuses_holds_up_no_other(tmp_path: Path) -> None:
    small = SYNCED.model_copy(update={"message_bytes_max": 2000})
    config = setup(tmp_path, max_deliveries=1)
    config = anabranch.Config(
        config.directory, [config.stores[0], anabranch.StoreConfig("dead", ["dlq.>"], journal=small)]
    )
    with anabranch.open(config) as router:
        queue = router.queue("q")
        for size in (1, 3000, 2):
            queue.send(bytes(size))
            fail(queue)
        router.sweep()
        eventually(lambda: sorted(len(m.body) for m in router.queue("dlq").browse()) == [1, 2])
        assert [len(m.body) for m in queue.browse()] == [3000]  # neither lost nor delivered
        assert queue.receive() is None


def test_whatever_fails_there_is_a_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "SWEEP_SECONDS", 0.02)
    with anabranch.open(setup(tmp_path, max_deliveries=1)) as router:
        find, failures = router._registry.open_stores, iter([OSError("unforeseen")])

        def fails_once() -> list[Store]:
            for failure in failures:
                raise failure
            return find()

        monkeypatch.setattr(router._registry, "open_stores", fails_once)
        queue = router.queue("q")
        queue.send(b"1")
        fail(queue)
        eventually(lambda: router.queue("dlq").depth() == 1)


def test_a_clock_before_1970_refuses_what_would_have_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes first needs the time: a store in memory, an expiry, the first transaction over several stores."""
    config = setup(tmp_path)
    memory = anabranch.StoreConfig("memory", ["m"], memory=anabranch.MemoryOptions())
    with anabranch.open(anabranch.Config(config.directory, [*config.stores, memory])) as router:
        router.queue("q").send(b"1")
        message = take(router.queue("q"))
        with monkeypatch.context() as patches:
            patches.setattr(time, "time_ns", lambda: -1_000_000_000)
            for send in (
                lambda: router.queue("m").send(b"x"),
                lambda: router.queue("q").send(b"x", persistent=False),
                lambda: router.queue("q").send(b"x", expires_in=60),
                lambda: router.send("q,dlq", b"x"),
            ):
                with pytest.raises(anabranch.ClockError, match=r"clock stands 1\.000 s before 1970"):
                    send()
            with pytest.raises(anabranch.ClockError), router.transaction() as tx:
                tx.send("dlq", b"x")
                tx.ack(message)
            with router.transaction() as tx:  # acks alone have no time
                again = take(router.queue("q"))
                tx.ack(again)
        router.send("q,dlq,m", b"2")
        assert [router.queue(name).depth() for name in ("q", "dlq", "m")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["Smith, J.", "a,queue://b", " blank ", "a.*", "topic://x"])
def test_any_text_is_a_name(tmp_path: Path, name: str) -> None:
    """It is sent to, dead-lettered, put back, listed, deleted, and there after a restart."""
    config = setup(tmp_path, "dlq.{name}", max_deliveries=1)
    named = anabranch.Destination.queue(name)
    with anabranch.open(config) as router:
        queue = router.queue(named)
        queue.send(b"x")
        with router.transaction() as tx:
            tx.send(named, b"y")
        fail(queue)
        dead = router.queue(anabranch.Destination.queue(f"dlq.{name}"))
        eventually(lambda: dead.depth() == 1)
    with anabranch.open(config) as router:
        queue, dead = router.queue(named), router.queue(dead.destination)
        assert [m.body for m in queue.browse()] == [b"y"]
        assert router.requeue(dead) == 1
        assert router.exists(named)
        assert router.delete(named) == 2
        assert named not in router.destinations()


def test_dead_letters_go_to_a_queue() -> None:
    """A topic without subscriptions would keep none of them."""
    for pattern in ("topic://dead", "topic://dead.{name}"):
        with pytest.raises(anabranch.ConfigError, match=r"dead_letter.*expected a queue, such as `dlq`"):
            anabranch.StoreConfig("a", [">"], journal={"dead_letter": pattern})


# Looking at them


def test_dead_letters_of_a_queue(tmp_path: Path) -> None:
    """Those that come from there, of a dead-letter queue that others share; they stay."""
    with anabranch.open(setup(tmp_path, max_deliveries=1)) as router:
        for name in ("q", "other", "q"):
            queue = router.queue(name)
            queue.send(name.encode(), message_id=f"{name}-1" if name == "other" else None)
            fail(queue)
        router.sweep()
        router.queue("dlq").send(b"sent by hand", {"dead_letter_source": ["no", "name"]})
        router.queue("q").send(b"rejected")
        message = take(router.queue("q"))
        message.reject("it is wrong")
        letters = list(router.queue("q").dead_letters())
        assert [(letter.message.body, letter.reason, letter.deliveries) for letter in letters] == [
            (b"q", "delivery_limit", 1), (b"q", "delivery_limit", 1), (b"rejected", "it is wrong", 1),
        ]  # fmt: skip
        assert {letter.source for letter in letters} == {router.queue("q").destination}
        assert not any(letter.message.leased for letter in letters)
        (other,) = router.queue("other").dead_letters()
        assert (other.message_id, other.requeued, other.subscription) == ("other-1", 0, None)
        assert list(router.queue("dlq").dead_letters()) == []
        assert router.queue("dlq").depth() == 5


def test_dead_letters_of_a_topic_and_of_a_subscription(tmp_path: Path) -> None:
    with anabranch.open(setup(tmp_path, "dlq.{name}", max_deliveries=1)) as router:
        topic = router.topic("t", codec="json")
        one, two = topic.subscribe("one"), topic.subscribe("two", client_id="c")
        topic.send([1])
        fail(one)
        fail(two)
        router.sweep()
        assert [letter.subscription for letter in topic.dead_letters()] == [("", "one"), ("c", "two")]
        (letter,) = two.dead_letters()
        body: object = letter.message.body
        assert (letter.subscription, body) == (("c", "two"), [1])


def test_there_are_none(tmp_path: Path) -> None:
    """Nobody has sent there yet; there is no dead-letter queue."""
    with anabranch.open(setup(tmp_path)) as router:
        assert list(router.queue("q").dead_letters()) == []
        assert router.destinations() == []
    with anabranch.open(setup(tmp_path, None)) as router:
        assert list(router.queue("q").dead_letters()) == []
