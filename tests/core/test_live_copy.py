"""A destination is copied into another store while it is used (adapters/core/migration/live_copy.py)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.migration import copying, live_copy
from anabranch.adapters.core.migration.live_copy import GivenUpError, LiveCopy, volatile_count
from anabranch.adapters.core.record.keys import put_of, removal_of
from anabranch.adapters.core.state.gates import Gate, MovedError
from anabranch.adapters.core.store_types import Settlement
from anabranch.policies.errors import CorruptionError, StoreFailedError, UnknownMessageError

from ..contract.disk import A, T, assert_whole, bodies, eventually, take
from ..contract.keyed import M
from .test_copying import EARLY, IDLE, LATE, Both, both, facts, fill_queue, sets, with_options  # noqa: F401

Step = Callable[[Store], object]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three messages, looked up five at a time."""
    monkeypatch.setattr(copying, "PAGE", 3)
    monkeypatch.setattr(copying, "READ", 5)
    monkeypatch.setattr(live_copy, "PAGE", 3)


def moved(both: Both, destination: Any, *steps: Step, last: Step = lambda store: None) -> LiveCopy:  # noqa: F811
    """Copied, with a step after each page, and one before the gate is closed; and switched."""
    rest = list(steps)

    def told(count: int) -> None:
        if rest:
            rest.pop(0)(both.source)

    copy = LiveCopy(both.source, both.target, destination)
    copy.reserve()
    copy.begin()
    try:
        copy.follow(told, lambda: None)
        last(both.source)
        gate = Gate.passed(destination)
        copy.close(gate)
        assert copy.finish()
        copy.switch()
    finally:
        copy.abandon()
    copying.remove(both.source, destination)
    assert not rest
    return copy


@with_options({}, {}, every=True)
@pytest.mark.parametrize("seed", range(1))
def test_a_map(both: Both, seed: int) -> None:  # noqa: F811
    """Whatever is put, replaced and removed after each page, and while one is read, before and behind it."""
    rng, model = random.Random(seed), dict[str, bytes]()
    names = [f"k{number:02}" for number in range(15)]
    commits: list[str] = []

    def change(store: Store) -> None:
        for _ in range(rng.randrange(6)):
            name, value = rng.choice(names), b"%d" % rng.randrange(1000)
            match rng.randrange(5):
                case 0 | 1:
                    store.maps.put(M, name, value)
                    model[name] = value
                case 2:
                    assert store.maps.pop(M, name) == model.pop(name, None)
                case 3:
                    other = rng.choice(names)
                    commits.append(str(len(commits)))
                    store.commit([(M, put_of(name, value)), (M, removal_of(other))], [], None, (), commits[-1])
                    model[name] = value
                    model.pop(other, None)
                case 4:
                    assert store.maps.increment(M, "n") == int(model.get("n", b"0")) + 1
                    model["n"] = b"%d" % (int(model.get("n", b"0")) + 1)

    for name in names:
        both.source.maps.put(M, name, b"before")
        model[name] = b"before"
    bodies_of = both.source._engine.rows.bodies

    def bodies_changed(*given: Any) -> Any:
        found = list(bodies_of(*given))
        if rng.randrange(2):
            change(both.source)
        return iter(found)

    def last(store: Store) -> None:
        change(store)
        changing.undo()  # from here on nobody can

    changing = pytest.MonkeyPatch()
    changing.setattr(both.source._engine.rows, "bodies", bodies_changed)
    moved(both, M, change, change, last=last)
    assert dict(both.target.maps.items(M)) == model
    assert both.target.maps.count(M) == len(model)
    assert all(both.target.marked(name, [], [M]) == [] for name in commits)
    with pytest.raises(MovedError):
        both.source.maps.get(M, "n")
    assert both.target.maps.increment(M, "n") == int(model.get("n", b"0")) + 1
    assert_whole(both.target)


def ack(count: int, destination: Any = A, subscription: Any = None) -> Step:
    def step(store: Store) -> None:
        for _ in range(count):
            take(store, destination, subscription=subscription).ack()

    return step


@with_options({}, {}, every=True)
def test_a_queue(both: Both) -> None:  # noqa: F811
    fill_queue(both.source)
    for number in range(20):
        both.source.send(A, b"more %d" % number, message_id=f"more-{number}")
    both.source.commit([(A, Outgoing(b"before"))], [], None, (), "before")
    held: list[Message] = []

    def hold(store: Store) -> None:
        held.extend(take(store) for _ in range(3))

    def give_back(store: Store) -> None:
        take(store).release()

    def some_more(store: Store) -> None:
        store.send_many(A, [b"many"] * 4)
        store.send(A, b"gone", message_id="gone")
        store.commit([(A, Outgoing(b"marked"))], [], None, (), "mark")
        held.append(take(store))

    expected: list[Any] = []

    def keep(store: Store) -> None:
        store.send(A, b"at last", message_id="at-last")
        held[0].ack()
        held[1].release()
        expected.extend(facts(store, A))

    moved(both, A, ack(2), hold, give_back, some_more, ack(1), last=keep)
    assert facts(both.target, A) == expected
    assert A not in both.source.destinations()
    for name in ("more-0", "more-19", "gone", "first", "last", "at-last"):
        assert both.target.send(A, b"", message_id=name).duplicate, name
    for name in ("before", "mark"):
        assert both.target.marked(name, [], [A]) == []
    counts = both.target.counts(A)
    assert (counts.ready, counts.leased) == (len(expected) - 2, 2)
    held[2].ack()
    held[3].release()
    assert both.target.depth(A) == len(expected) - 1
    assert list(both.target.check()) == [] and list(both.source.check()) == []


@with_options({}, {}, every=True)
def test_a_topic(both: Both) -> None:  # noqa: F811
    source = both.source
    for subscription in (EARLY, LATE, IDLE):
        source.subscribe(subscription)
    for number in range(20):
        source.send(T, b"%d" % number)
    source.purge(T, IDLE.key)
    expected: dict[Any, list[Any]] = {}

    def keep(store: Store) -> None:
        store.send(T, b"for all")
        for one in (EARLY, LATE, IDLE):
            expected[one] = facts(store, T, one.key)

    moved(both, T, ack(7, T, EARLY.key), ack(3, T, LATE.key), ack(2, T, EARLY.key), last=keep)
    assert {one: facts(both.target, T, one.key) for one in expected} == expected
    assert [len(expected[one]) for one in (EARLY, LATE, IDLE)] == [12, 18, 1]
    assert [both.target.depth(T, one.key) for one in expected] == [12, 18, 1]
    assert list(both.target.check()) == []


def test_a_purge(both: Both) -> None:  # noqa: F811
    for number in range(20):
        both.source.send(A, b"%d" % number)
    held = take(both.source)
    moved(both, A, lambda store: None, lambda store: store.purge(A), last=lambda store: store.send(A, b"20"))
    assert bodies(both.target) == [b"0", b"20"]
    held.ack()
    assert bodies(both.target) == [b"20"]


def test_what_is_abandoned_is_as_it_was(both: Both) -> None:  # noqa: F811
    for number in range(10):
        both.source.send(A, b"%d" % number)
    held = take(both.source)
    copy = LiveCopy(both.source, both.target, A)
    copy.reserve()
    copy.begin()
    copy.follow(lambda count: None, lambda: None)
    assert both.target.depth(A) == 10
    assert both.target.take_undelivered() == []
    gate = Gate(A)
    copy.close(gate)
    copy.abandon()
    gate.open()
    assert both.target.depth(A) == 0
    held.ack()
    both.source.send(A, b"10")
    assert [take(both.source).body for _ in range(10)] == [b"%d" % number for number in range(1, 11)]


def finished(both: Both) -> tuple[LiveCopy, Gate]:  # noqa: F811
    """A copy that only has to be switched, and the gate that holds up senders until then."""
    copy = LiveCopy(both.source, both.target, A)
    copy.reserve()
    copy.begin()
    copy.follow(lambda count: None, lambda: None)
    gate = Gate(A)
    copy.close(gate)
    assert copy.finish()
    return copy, gate


@pytest.mark.parametrize("fails", ["switch", "record"])
def test_who_holds_what_has_moved_without_its_lease_is_told(
    both: Both,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    """The target fails once the record says that the destination is there; or nobody can tell what the record says. An
    ack in the source would be none."""
    both.source.send_many(A, [b"1", b"2", b"3"])
    held = [take(both.source) for _ in range(2)]
    token = held[0].token
    both.source.claim(held[1])
    copy, gate = finished(both)

    def failed() -> None:
        raise StoreFailedError("EIO")

    with monkeypatch.context() as patches:
        if fails == "switch":
            patches.setattr(both.target._engine, "check", failed)
            with pytest.raises(StoreFailedError, match="EIO"):
                copy.switch()
        copy.abandon(keep=fails == "record")
    gate.open()
    for call in (held[0].ack, lambda: both.source.commit([], [held[1]])):
        with pytest.raises(UnknownMessageError, match="moved to another store, or may have"):
            call()
    (error,) = both.source.settle([token], Settlement.ACK)
    assert "moved to another store, or may have" in str(error)
    both.later()
    assert bodies(both.target) == [b"1", b"2", b"3"]
    if fails == "record":
        assert [take(both.source).body for _ in range(3)] == [b"1", b"2", b"3"], "if it counts in the end"


@pytest.mark.parametrize("fails", ["check", "_successor"])
def test_a_target_that_fails_for_a_while_in_the_switch_is_used_on(
    both: Both,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    """As one in a database that is back soon: the record says that the destination is there."""
    both.source.send_many(A, [b"1", b"2", b"3"])
    for _ in range(2):
        take(both.source)
    seen: list[bytes] = []

    def on_message(message: Message[Any]) -> None:
        seen.append(message.body)
        message.ack()

    listener = both.source.listen(A, on_message, 0)
    copy, gate = finished(both)
    whose: Any = both.target._engine if fails == "check" else copy
    usual, calls = getattr(whose, fails), []

    def failed(*given: Any) -> Any:
        calls.append(given)
        if len(calls) != (1 if fails == "check" else 2):  # a listener that finds it away, too, ends with that
            return usual(*given)
        raise StoreFailedError("it is away")

    with monkeypatch.context() as patches:
        patches.setattr(whose, fails, failed)
        with pytest.raises(StoreFailedError, match="it is away"):
            copy.switch()
        copy.abandon()
    gate.open()
    both.target.send(A, b"4")
    assert [take(both.target).body for _ in range(2)] == [b"1", b"2"]
    listener.add_credit(5)
    eventually(lambda: seen == [b"3", b"4"])


def test_a_copy_that_differs(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for number in range(10):
        both.source.send(A, b"%d" % number)
    real = copying.Bringing.page
    monkeypatch.setattr(copying.Bringing, "page", lambda self, items: real(self, items[:2]))
    with pytest.raises(CorruptionError, match=r"the copy of queue://a in store .* is not what store"):
        moved(both, A)
    assert (both.source.depth(A), both.target.depth(A)) == (10, 0)


def test_more_acks_than_can_be_kept(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(live_copy, "REPEAT_MAX", 5)
    both.source.send_many(A, [b""] * 30)
    with pytest.raises(GivenUpError, match="more than 5 acks came while a page of it was copied"):
        moved(both, A, ack(6))
    assert (both.source.depth(A), both.target.depth(A)) == (24, 0)


def test_subscriptions_that_change_without_end(both: Both) -> None:  # noqa: F811
    both.source.subscribe(EARLY)
    both.source.send_many(T, [b""] * 30)

    def change(store: Store) -> None:
        store.subscribe(LATE)
        store.unsubscribe(T, LATE.key)

    with pytest.raises(GivenUpError, match="its subscriptions change too often"):
        moved(both, T, *[change] * 30)
    assert (both.source.depth(T), both.target.depth(T)) == (30, 0)


def test_messages_that_are_not_persistent(both: Both) -> None:  # noqa: F811
    both.source.send(A, b"kept")
    both.source.send(A, b"", persistent=False)
    assert volatile_count(both.source, A) == 1
    with pytest.raises(GivenUpError, match=r"queue://a: 1 message\(s\) of it .* are not persistent"):
        moved(both, A)
    assert both.source.depth(A) == 2


@with_options({"priorities": True}, {"priorities": True})
def test_in_order_of_priority(both: Both) -> None:  # noqa: F811
    for number in range(20):
        both.source.send(A, b"%d" % number, priority=number % 4)
    held = take(both.source)
    assert held.body == b"3"
    moved(both, A, ack(2), ack(1), last=lambda store: store.send(A, b"urgent", priority=9))
    assert [take(both.target).body for _ in range(4)] == [b"urgent", b"19", b"2", b"6"]
    held.release()
    assert take(both.target).body == b"3"
