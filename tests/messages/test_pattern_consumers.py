"""Receiving from all queues that a pattern names: each has its turn, whatever stores they are in."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.policies.errors import StoreFailedError
from anabranch.router.api import pattern_consumers
from anabranch.router.placement import open_stores

from ..contract.disk import PATIENCE, Parallel, eventually
from ..crash.interrupts import everywhere
from ..router.disk import NEVER

KINDS: dict[str, dict[str, Any]] = {
    "journal": {"journal": anabranch.JournalOptions(sync=NEVER, segment_size=64 * 1024, max_leases=100)},
    "sql": {"sql": anabranch.SqlOptions(max_leases=100)},
    "memory": {"memory": anabranch.MemoryOptions(max_leases=100)},
}


def config(directory: Path, kind: str) -> anabranch.Config:
    stores = [
        anabranch.StoreConfig("each", ["each.>"], per_destination=True, **KINDS[kind]),
        anabranch.StoreConfig("other", ["*.b"], **KINDS["journal"]),
        anabranch.StoreConfig("all", [">"], **KINDS[kind]),
    ]
    return anabranch.Config(directory, stores, transactions=anabranch.TransactionOptions(sync=NEVER))


@pytest.fixture(params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        yield router


def take(router: anabranch.Router, pattern: str, timeout: float | None = 0) -> Message:
    message = router.receive(pattern, timeout)
    assert message is not None
    return message


def fill(router: anabranch.Router, names: list[str], each: int) -> None:
    for name in names:
        router.queue(name).send_many([f"{name} {number}".encode() for number in range(each)])


def test_each_queue_has_its_turn(router: anabranch.Router) -> None:
    """And its own order, whatever store it is in."""
    names = ["a.a", "a.b", "a.c", "each.d"]
    fill(router, [*names, "b"], 3)
    for number in range(3):
        turn = [take(router, "*.?").body.decode() for _ in names]
        assert sorted(turn) == [f"{name} {number}" for name in names]
    assert router.receive("*.?") is None
    assert router.queue("b").depth() == 3


def test_a_message_is_leased_and_settled_as_any_other(router: anabranch.Router) -> None:
    fill(router, ["a.a"], 2)
    message = take(router, "a.*")
    assert (message.destination.name, message.deliveries, message.leased) == ("a.a", 1, True)
    assert router.queue("a.a").counts() == anabranch.Counts(1, 1)
    message.release()
    again = take(router, "a.*")
    assert (again.body, again.deliveries) == (b"a.a 0", 2)
    with router.transaction() as tx:
        tx.ack(again)
        tx.ack(take(router, "a.*"))
    assert router.receive("a.*") is None


def test_a_lease_of_a_time(router: anabranch.Router) -> None:
    """It ends, and who waits has the message then, counted as a delivery."""
    fill(router, ["a.a"], 1)
    late = router.receive("a.*", lease=0.01)
    again = take(router, "a.*", None)
    assert late is not None
    assert (again.body, again.deliveries) == (late.body, 2)
    with pytest.raises(anabranch.UnknownMessageError, match="ran out"):
        late.ack()


def test_who_waits_gets_what_is_sent_to_any_of_them(router: anabranch.Router) -> None:
    """To one that there was, to new ones in each store, in a transaction."""
    fill(router, ["a.a"], 0)
    sends: list[Callable[[], object]] = [
        lambda: router.queue("a.a").send(b"x"),
        lambda: router.queue("a.new").send(b"x"),
        lambda: router.queue("a.b").send(b"x"),
        lambda: router.queue("a.later").send_nowait(b"x").result(PATIENCE),
        lambda: router.send("a.one,a.two,other", b"x"),
        lambda: None,  # the second one of that
    ]
    for send in sends:
        with Parallel(lambda: router.receive("a.>", None)) as receiver:
            assert receiver.outlives(0.02) or send is sends[-1]
            send()
            message = receiver.result()
            assert message.body == b"x"
            message.ack()
    assert router.receive("a.>") is None


def test_topics_are_none_of_them(router: anabranch.Router) -> None:
    audit = router.topic("a.t").subscribe("audit")
    router.topic("a.t").send(b"x")
    assert router.receive(">") is None
    assert audit.depth() == 1


def test_a_queue_that_is_deleted_and_comes_again(router: anabranch.Router) -> None:
    for _ in range(3):
        fill(router, ["a.a", "each.a"], 1)
        assert {take(router, ">").body, take(router, ">").body} == {b"a.a 0", b"each.a 0"}
        assert router.receive(">") is None
        router.delete("a.a")
        router.delete("each.a")
        assert router.receive(">") is None
    assert router.destinations() == []


def test_consuming_a_pattern(router: anabranch.Router) -> None:
    fill(router, ["a.a", "a.b"], 2)
    bodies = []
    for message in router.consume("a.>", timeout=0):
        bodies.append(message.body)
        message.ack()
    assert sorted(bodies) == [b"a.a 0", b"a.a 1", b"a.b 0", b"a.b 1"]


def test_many_who_receive_share_the_queues(router: anabranch.Router) -> None:
    """Nothing twice, nothing left, while it is sent to them."""
    names = [f"a.{number}" for number in range(10)]
    got: list[bytes] = []

    def work() -> None:
        for message in router.consume("a.*", timeout=None):
            message.ack()
            if message.body == b"end":
                return
            got.append(message.body)

    with Parallel(work) as one, Parallel(work) as two, Parallel(work) as three:
        for number in range(20):
            for name in names:
                router.queue(name).send(f"{name} {number}".encode())
        eventually(lambda: len(got) == 200, lambda: len(got))
        router.queue("a.end").send_many([b"end"] * 3)
        for each in (one, two, three):
            each.result()
    assert Counter(got) == Counter(f"{name} {number}".encode() for name in names for number in range(20))


def test_the_queues_own_receivers_come_first(router: anabranch.Router) -> None:
    fill(router, ["a.a"], 0)
    assert router.receive("a.*") is None
    with Parallel(lambda: router.queue("a.a").receive(None)) as own:
        assert own.outlives(0.02)
        eventually(lambda: sum(store.waiting for store in router.stats().stores.values()) == 1)
        with Parallel(lambda: router.receive("a.*", None)) as any_of_them:
            assert any_of_them.outlives(0.02)
            router.queue("a.a").send(b"1")
            assert own.result().body == b"1"
            router.queue("a.a").send(b"2")
            assert any_of_them.result().body == b"2"


def test_a_queue_with_as_many_leases_as_may_be_is_passed_over(router: anabranch.Router) -> None:
    fill(router, ["a.a"], 101)
    fill(router, ["a.c"], 1)
    held = [take(router, "a.*") for _ in range(101)]
    assert {message.destination.name for message in held} == {"a.a", "a.c"}
    with Parallel(lambda: router.receive("a.*", None)) as receiver:
        assert receiver.outlives(0.02)
        next(message for message in held if message.body == b"a.a 0").ack()
        assert receiver.result().body == b"a.a 100"


# Stores


def closed(router: anabranch.Router) -> None:
    """Close what is idle."""
    stores = router._registry._stores
    while stores._close_idle_one():
        pass


def test_stores_are_opened_one_after_the_other_and_may_be_closed(
    journals: anabranch.Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each store is opened once to see that there is nothing more, and never again unless somebody sends there."""
    fill(journals, [f"each.{number}" for number in range(12)], 1)
    journals.close()
    monkeypatch.setattr(open_stores, "OPEN_STORES_MAX", 4)
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        take(router, "each.>").ack()
        assert len(router._registry.open_stores()) == 1
        while (message := router.receive("each.>")) is not None:
            message.ack()
        assert len(router._registry.open_stores()) <= 4
        closed(router)
        assert router._registry.open_stores() == []
        opened: list[str] = []
        router._registry._stores.on_open = _and_note(router._registry._stores.on_open, opened)
        assert router.receive("each.>") is None
        with Parallel(lambda: router.receive("each.>", None)) as receiver:
            assert receiver.outlives(0.02)
            router.queue("each.7").send(b"x")
            assert receiver.result().body == b"x"
        assert opened == ["each:queue://each.7"]


def _and_note(on_open: Callable[[Any], None], opened: list[str]) -> Callable[[Any], None]:
    def note(store: Any) -> None:
        opened.append(store.name)
        on_open(store)

    return note


def test_what_is_left_in_a_store_that_was_closed_is_found(journals: anabranch.Router) -> None:
    """It was sent while nobody received, and the store closed before anybody looked."""
    fill(journals, ["each.a"], 1)
    take(journals, "each.>").ack()
    assert journals.receive("each.>") is None
    fill(journals, ["each.a"], 1)
    closed(journals)
    assert take(journals, "each.>").body == b"each.a 0"


def test_what_waits_for_its_time_comes_then(router: anabranch.Router) -> None:
    """Also in a store that could be closed for being idle: it stays open as long as somebody watches there."""
    for name in ("a.a", "each.a"):
        router.queue(name).send(b"later", deliver_in=3600)
    assert router.receive(">") is None
    closed(router)
    assert len(router._registry.open_stores()) == 2
    for name in ("a.a", "each.a"):
        router.queue(name).send(b"soon", deliver_in=0.01)
    assert {take(router, ">", None).destination.name for _ in range(2)} == {"a.a", "each.a"}


def test_a_store_that_fails_holds_up_no_other(journals: anabranch.Router) -> None:
    """Nor does one that was reopened stay away."""
    fill(journals, ["a.a", "a.b"], 2)
    (store,) = [store for store in journals._registry.open_stores() if store.name == "other"]
    store._engine.fail(StoreFailedError("its disk is gone"))
    assert [take(journals, "a.>").body for _ in range(2)] == [b"a.a 0", b"a.a 1"]
    assert journals.receive("a.>") is None
    with Parallel(lambda: journals.receive("a.>", None)) as receiver:
        assert receiver.outlives(0.02)
        journals.reopen("other")
        assert receiver.result().body == b"a.b 0"


def test_a_store_that_cannot_be_opened_is_tried_again(
    journals: anabranch.Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pattern_consumers, "RETRY_SECONDS", 0.01)
    fill(journals, ["a.a", "each.b"], 1)
    journals.close()
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        (row,) = [row for row in router._registry.table.stores.values() if row.name == "each:queue://each.b"]
        directory = router._registry.directories.path(row)
        away = directory.rename(tmp_path / "away")
        assert take(router, ">", None).body == b"a.a 0"
        assert router.receive(">") is None
        with Parallel(lambda: router.receive(">", None)) as receiver:
            assert receiver.outlives(0.03)
            away.rename(directory)
            assert receiver.result().body == b"each.b 0"


def test_while_queues_move(journals: anabranch.Router) -> None:
    """To one store for each: nothing is lost on the way, and who waits hears what is sent there."""
    fill(journals, ["a.a", "a.c"], 3)
    first = [take(journals, "a.*") for _ in range(2)]
    directory = journals.config.directory
    moved = anabranch.Config(
        directory,
        [anabranch.StoreConfig("own", ["a.*"], per_destination=True, **KINDS["journal"]), *journals.config.stores[2:]],
        transactions=journals.config.transactions,
    )
    with Parallel(lambda: list(journals.consume("a.*", timeout=1.0))) as consumer:
        journals.repartition(moved)
        router_bodies = [b"later a", b"later c"]
        journals.queue("a.a").send(router_bodies[0])
        journals.queue("a.c").send(router_bodies[1])
        got = [message.body for message in (*first, *consumer.result())]
    assert sorted(got) == sorted([f"a.{name} {n}".encode() for name in "ac" for n in range(3)] + router_bodies)
    for message in first:
        message.ack()


def test_it_ends_with_the_router(journals: anabranch.Router) -> None:
    fill(journals, ["a.a"], 0)
    with Parallel(lambda: journals.receive("a.*", None)) as one, Parallel(lambda: journals.receive("a.*", 60)) as two:
        assert one.outlives(0.02)
        journals.close()
        for each in (one, two):
            with pytest.raises(anabranch.ClosedError, match="the router is closed"):
                each.result()
    with pytest.raises(anabranch.ClosedError):
        journals.receive("a.*")


def test_no_more_patterns_are_kept_than_a_few(memory: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """But all from which somebody receives just then."""
    monkeypatch.setattr(pattern_consumers, "PATTERNS_MAX", 3)
    with Parallel(lambda: memory.receive("a.0.>", None)) as receiver:
        assert receiver.outlives(0.02)
        fill(memory, ["a.1"], 0)
        for number in range(10):
            assert memory.receive(f"*.{number}") is None
        assert len(memory._patterns._consumers) == 3
        assert sum(store.stats().waiting for store in memory._registry.open_stores()) == 0
        memory.queue("a.0.b").send(b"x")
        assert receiver.result().body == b"x"


def test_a_receive_costs_the_same_however_many_queues_there_are(
    memory: anabranch.Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand queues in which there is nothing none is looked at."""
    fill(memory, [f"a.{number}" for number in range(1000)], 1)
    while (message := memory.receive("a.*")) is not None:
        message.ack()
    looked: list[object] = []
    look = pattern_consumers.PatternConsumer._look

    def note(self: Any, place: Any, lease: float | None) -> Message | None:
        looked.append(place)
        return look(self, place, lease)

    monkeypatch.setattr(pattern_consumers.PatternConsumer, "_look", note)
    for number in range(10):
        memory.queue(f"a.{number}").send(b"x")
        assert take(memory, "a.*").body == b"x"
    assert len(looked) <= 30


# Names, codecs, bad input


def test_a_name_is_that_queue(memory: anabranch.Router) -> None:
    with Parallel(lambda: memory.receive("queue://new", None)) as receiver:
        assert receiver.outlives(0.02)
        memory.queue("new").send(b"[1]")
        assert receiver.result().body == b"[1]"
    fill(memory, ["a"], 2)
    assert [message.body for message in memory.consume(memory.queue("a"), 0)] == [b"a 0", b"a 1"]
    numbers = memory.queue("numbers", codec="json")
    numbers.send({"n": 1})
    message = memory.receive(numbers)
    assert message is not None
    assert message.body == {"n": 1}


def test_with_a_codec(memory: anabranch.Router) -> None:
    for name in ("a.a", "a.c"):
        memory.queue(name, codec="json").send([name])
    first = memory.receive("a.*", codec="json")
    assert first is not None
    (second,) = memory.consume("a.*", 0, codec="json")
    assert sorted([first.body, second.body]) == [["a.a"], ["a.c"]]
    memory.queue("numbers").send(b"7")
    message = memory.receive("numbers", codec="json")
    assert message is not None
    assert message.body == 7


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda r: r.receive("topic://a.*"), anabranch.DestinationError, "names topics.*subscriptions"),
        (lambda r: r.receive("topic://a"), anabranch.DestinationError, "names topics"),
        (lambda r: r.receive("a.*,b.*"), anabranch.DestinationError, "holds a comma"),
        (lambda r: r.receive(""), anabranch.DestinationError, "is empty"),
        (lambda r: r.receive(7), TypeError, "a destination is given as text"),
        (lambda r: r.receive("a.*", True), TypeError, "timeout is a number of seconds, not bool"),
        (lambda r: r.receive("a.*", float("nan")), ValueError, "timeout is a number"),
        (lambda r: r.consume("a.*", "1"), TypeError, "timeout is a number of seconds, not str"),
        (lambda r: r.receive("a.*", lease=0), ValueError, "lease"),
        (lambda r: r.receive("a.*", codec="jsno"), ValueError, "there are json, msgpack, pickle"),
        (lambda r: r.consume("a.*", codec=7), TypeError, "a codec is one of"),
    ],
)
def test_bad_input(memory: anabranch.Router, call: Callable[[Any], object], kind: type[Exception], says: str) -> None:
    fill(memory, ["a.a"], 1)
    with pytest.raises(kind, match=says):
        call(memory)
    assert memory.queue("a.a").counts() == anabranch.Counts(1, 0)


def test_ctrl_c_anywhere_loses_no_queue(journals: anabranch.Router) -> None:
    """Of what a pattern names: the next one finds what is there, and hears what comes."""

    def prepare(at: int) -> Callable[[], object]:
        fill(journals, ["a.a", "a.b"], 1)
        return lambda: [journals.receive("a.*") for _ in range(3)]

    def check(at: int, where: str) -> None:
        names = set()
        while (message := journals.receive("a.*")) is not None:
            message.ack()
            names.add(message.destination.name)
        left = {name: journals.queue(name).depth() - journals.queue(name).counts().leased for name in ("a.a", "a.b")}
        assert left == {"a.a": 0, "a.b": 0}, where
        fill(journals, ["a.a", "a.b"], 1)
        for _ in range(2):
            message = journals.receive("a.*", PATIENCE)
            assert message is not None, where
            message.ack()
        for name in ("a.a", "a.b"):
            journals.delete(name)  # with what an interrupted one holds

    assert everywhere(prepare, check, every=9) > 50


def test_a_callback_may_receive_and_a_thread_may_end(memory: anabranch.Router) -> None:
    """From any thread."""
    fill(memory, ["a.a"], 50)
    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: got.extend(m.body for m in memory.consume("a.*", timeout=0))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    got.extend(message.body for message in memory.consume("a.*", timeout=0))
    assert len(got) == len(set(got)) == 50
