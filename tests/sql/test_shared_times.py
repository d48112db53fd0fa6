"""The times of a shared store, which are those of the database's clock: what the contract asks of a clock that a test
puts forward is waited for here."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.adapters.core.messages import DELIVERY_LIMIT, EXPIRED, Message, Outgoing
from anabranch.adapters.core.store_types import Settlement, Subscription
from anabranch.adapters.sql.shared import SharedStore, heads, waiting
from anabranch.adapters.sql.shared import store as store_module
from anabranch.policies.config.fields import Redelivery
from anabranch.policies.errors import OutcomeUnknownError, StoreFailedError, UnknownMessageError
from anabranch.policies.names.destination import Destination
from anabranch.router.transactions.primary import packed
from anabranch.router.transactions.xid import Xid

from ..children import run_program
from ..contract.disk import PATIENCE, A, Parallel, bodies, drain, eventually, take
from ..contract.expiring import HOUR, GoingClock, going_by, undelivered
from .leased import Shared, databases
from .shared import SharedDisk, SharedTables, shared_tables

SHORT = 0.05
"""Seconds of a lease, or a delay, whose end is waited for."""
LONG = 3600.0

shared = pytest.fixture(databases, params=["shared"])


sets = pytest.fixture(scope="module")(shared_tables)


@pytest.fixture
def disk(tmp_path: Path, sets: SharedTables) -> Iterator[SharedDisk]:
    with SharedDisk(tmp_path, sets) as disk:
        yield disk


def late(call: Callable[[], object]) -> None:
    """Require that a message whose lease has run out cannot be settled."""
    with pytest.raises(UnknownMessageError):
        call()


# Leases that run out -------------------------------------------------------------------------------------------------


def test_a_lease_that_runs_out_comes_back_at_its_place_and_counts(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [b"1", b"2", b"3"])
    first, held = take(store), take(store)
    assert held.body == b"2"
    first.extend(SHORT)
    back = take(other, timeout=PATIENCE)
    assert back.body in (b"1", b"3")  # the third is free from the start
    other.release([back], delivered=False)
    eventually(lambda: other.counts(A).ready == 2)
    back = take(other)
    assert (back.seq, back.body, back.deliveries) == (first.seq, b"1", 2)
    assert take(other).body == b"3"
    for settle in (first.ack, first.release, first.extend):
        late(settle)
    held.ack()
    back.ack()
    assert bodies(store) == [b"3"]


def test_who_waits_has_what_runs_out_in_another_router(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send(A, b"1")
    first = store.receive(A, lease=SHORT)
    assert first is not None
    back = take(other, A, PATIENCE)
    assert (back.seq, back.deliveries) == (first.seq, 2)
    (wrong,) = store.settle([other.token(back)], Settlement.ACK)
    assert wrong is None, "a token is settled in any router"
    assert bodies(store) == []


def test_the_time_of_a_store_and_that_of_a_call(disk: SharedDisk) -> None:
    store = disk.create(lease_timeout=SHORT)
    store.send_many(A, [b"1", b"2"])
    first = store.receive(A, lease=LONG)
    second = take(store)
    assert (first.body, second.body) == (b"1", b"2")  # type: ignore[union-attr]
    assert take(store, A, PATIENCE).body == b"2"
    first.ack()  # type: ignore[union-attr]


def test_extended_it_is_held_for_longer_by_the_database_too(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [b"1", b"2"])
    one, two = store.receive(A, lease=LONG), store.receive(A, lease=LONG)
    assert one is not None and two is not None
    two.extend(SHORT)  # earlier than before
    one.extend()
    back = take(other, A, PATIENCE)
    assert (back.body, back.deliveries) == (b"2", 2)
    late(two.extend)
    late(two.ack)
    one.ack()
    back.ack()
    assert bodies(store) == []


def test_one_without_an_end_can_be_given_one(disk: SharedDisk) -> None:
    store = disk.create()
    store.send(A, b"1")
    message = take(store)
    message.extend()
    message.extend(SHORT)
    assert take(store, A, PATIENCE).deliveries == 2


def test_what_a_transaction_has_claimed_does_not_run_out(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [b"1", b"2"])
    message = store.receive(A, lease=LONG)
    marker = store.receive(A, lease=SHORT)
    assert message is not None and marker is not None
    message.extend(PATIENCE / 40)  # no longer than this for the claim to come
    store.claim(message)
    assert take(other, A, PATIENCE).body == b"2"
    store.commit([], [message])
    assert bodies(store) == [b"2"]


# Delays --------------------------------------------------------------------------------------------------------------


def refuse(*_: Any) -> None:
    raise StoreFailedError("the database is gone")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_delayed_one_comes_when_it_is_due(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [Outgoing(b"1", deliver_at_ms=now_ms() + HOUR), Outgoing(b"2", deliver_at_ms=now_ms() + 50)])
    assert other.counts(A).delayed >= 1
    message = take(other, A, PATIENCE)
    assert (message.body, message.deliveries, other.counts(A).delayed) == (b"2", 1, 1)
    message.ack()
    assert other.receive(A) is None


def test_a_release_with_a_delay(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [b"1", b"2"])
    store.release([take(store)], delay=LONG)
    assert (take(other).body, other.receive(A), store.counts(A).delayed) == (b"2", None, 1)
    store.send(A, b"3")
    third = take(store)
    store.release([third], delay=SHORT)
    back = take(other, A, PATIENCE)
    assert (back.body, back.deliveries) == (b"3", 2)


@pytest.mark.parametrize("count", ["on_return", "on_receive"])
def test_the_redelivery_policy(disk: SharedDisk, count: str) -> None:
    """Each time it waits longer: the second time for longer than a test does."""
    store = disk.create(redelivery=Redelivery(delay=4 * SHORT, multiplier=1000.0), count_deliveries=count)
    other = disk.beside(store)
    store.send(A, b"1")
    take(store).release()
    back = take(other, A, PATIENCE)
    assert back.deliveries == 2
    back.release()
    assert store.receive(A) is None and store.counts(A).delayed == 1


@pytest.mark.parametrize("count", ["on_return", "on_receive"])
def test_the_redelivery_policy_of_one_that_another_router_settles(
    disk: SharedDisk, sets: SharedTables, count: str
) -> None:
    redelivery = Redelivery(delay=1.0, multiplier=1000.0)
    store = disk.create(redelivery=redelivery, count_deliveries=count, router_timeout=LONG)
    other = disk.beside(store)
    store.send(A, b"1")
    try:
        for ms in (0, 10_000):
            sets.set_clock(ms)
            assert other.settle([store.token(take(store))], Settlement.RELEASE) == [None]
        sets.set_clock(60_000)  # the second time it waits for a thousand seconds
        assert store.receive(A) is None
    finally:
        sets.set_clock(0)


# Deliveries that are counted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["on_return", "on_receive"])
def test_what_is_let_go_of_is_counted_once(disk: SharedDisk, count: str) -> None:
    store = disk.create(count_deliveries=count)
    store.send(A, b"1")
    for expected in (1, 2, 3):
        assert [message.deliveries for message in store.browse(A)] == [expected - 1]
        with pytest.warns(ResourceWarning):
            store.receive(A)
            gc.collect()
        store.take_undelivered()


@pytest.mark.parametrize("count", ["on_return", "on_receive"])
def test_what_is_leased_again_is_counted_once(disk: SharedDisk, count: str) -> None:
    """By who had leased it before its router was gone."""
    store = disk.create(max_deliveries=2, dead_letter="dlq", count_deliveries=count)
    store.send(A, b"1")
    seq = take(store).seq
    store = disk.crash(store)
    token = store.lease_again(A, seq)
    assert token is not None and store.settle([token], Settlement.RELEASE) == [None]
    assert take(store).deliveries == 2


@pytest.mark.parametrize("count", ["on_return", "on_receive"])
def test_what_a_listener_has_not_called_with_is_not_counted(disk: SharedDisk, count: str) -> None:
    store = disk.create(max_deliveries=2, dead_letter="dlq", count_deliveries=count)
    store.send_many(A, [b"1", b"2", b"3"])
    heard, goes_on = SimpleQueue[Message](), Event()

    def hear(message: Message) -> None:
        heard.put(message)
        assert goes_on.wait(PATIENCE)

    listener = store.listen(A, hear, 3)
    heard.get(timeout=PATIENCE).ack()
    assert store.counts(A).leased == 2
    listener.close()
    goes_on.set()
    assert [(message.body, message.deliveries) for message in store.receive_many(A, 9)] == [(b"2", 1), (b"3", 1)]


# Expiry and dead letters ---------------------------------------------------------------------------------------------


def test_an_expired_one_is_handed_out_once(disk: SharedDisk) -> None:
    store = disk.create()
    other = disk.beside(store)
    store.send_many(A, [Outgoing(b"1", expires_at_ms=now_ms() + 50), Outgoing(b"2", expires_at_ms=now_ms() + HOUR)])
    found: list[tuple[Message, str]] = []
    eventually(lambda: found.extend(undelivered(other)) or found)  # type: ignore[func-returns-value]
    assert [(message.body, why) for message, why in found] == [(b"1", EXPIRED)]
    assert undelivered(store) == [], "it is leased"
    other.ack([found[0][0]])
    assert drain(store) == [b"2"]


def test_what_expires_while_it_is_leased_is_passed_over_when_it_comes_back(disk: SharedDisk) -> None:
    store = disk.create()
    store.send(A, b"1", expires_at_ms=now_ms() + 100)
    message = store.receive(A)
    if message is None:  # the machine was slow
        assert [why for _, why in undelivered(store)] == [EXPIRED]
        return
    eventually(lambda: now_ms() > message.expires_at_ms)
    message.release()
    assert store.receive(A) is None
    assert [why for _, why in undelivered(store)] == [EXPIRED]


@pytest.mark.parametrize("count", ["on_return", "on_receive"])
@pytest.mark.parametrize("most", [1, 2])
def test_the_last_lease_ran_out_in_another_router(disk: SharedDisk, most: int, count: str) -> None:
    """It is a delivery, and no more than so many there are."""
    store = disk.create(max_deliveries=most, dead_letter="dlq", count_deliveries=count)
    other = disk.beside(store)
    store.send(A, b"1")
    for _ in range(most - 1):
        take(store).release()
    assert other.receive(A, lease=SHORT) is not None
    found: list[tuple[Message, str]] = []
    eventually(lambda: found.extend(undelivered(store)) or found)  # type: ignore[func-returns-value]
    assert [(message.body, message.deliveries, why) for message, why in found] == [(b"1", most + 1, DELIVERY_LIMIT)]
    assert store.receive(A) is None and other.receive(A) is None
    store.ack([found[0][0]])
    assert bodies(store) == []


def test_they_are_dead_lettered_by_whichever_router_finds_them(shared: Shared) -> None:
    config = {"max_deliveries": 2, "dead_letter": "dlq"}
    first, second = shared.router("first", **config), shared.router("second", **config)
    first.queue("q").send(b"expired", expires_in=SHORT)
    first.queue("q").send(b"poison")
    for router in (first, second):
        message = router.queue("q").receive(timeout=PATIENCE)
        while message is not None and message.body == b"expired":
            message.ack()
            message = router.queue("q").receive(timeout=PATIENCE)
        assert message is not None
        message.release()
    eventually(lambda: second.queue("dlq").depth() >= 1 and second.queue("q").depth() == 0)
    assert {letter.body for letter in second.queue("dlq").browse()} >= {b"poison"}
    assert first.queue("q").receive() is None


@pytest.mark.parametrize("struck", [KeyboardInterrupt, OutcomeUnknownError])
@pytest.mark.parametrize("count", ["on_return", "on_receive"])
def test_what_a_sweep_has_not_heard_of_is_found_by_the_next(
    disk: SharedDisk, monkeypatch: pytest.MonkeyPatch, count: str, struck: type[BaseException]
) -> None:
    """It was interrupted, or cut off for long; and what it gives back is not delivered again."""
    store: Any = disk.create(max_deliveries=1, dead_letter="dlq", count_deliveries=count)
    topic = Destination.parse("topic://t")
    store.subscribe(Subscription(topic, "desk"))
    for destination in (A, topic):
        store.send(destination, b"expired", expires_at_ms=1)
    store.send(A, b"spent")
    take(store).release()
    change = store._database.change

    def strike(work: Any) -> None:
        change(work)
        raise struck

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "change", strike)
        with pytest.raises(struck):
            store.take_undelivered()
    assert store.stats().leased == 3
    for _ in range(2):
        found = store.take_undelivered()
        assert sorted((why, str(message.destination), message.deliveries) for message, why in found) == [
            (DELIVERY_LIMIT, "queue://a", 2), (EXPIRED, "queue://a", 1), (EXPIRED, "topic://t", 1),
        ]  # fmt: skip
        for message, _ in found:
            store.release([message], delivered=False)
        assert store.receive(A) is None


def test_a_claim_of_which_nobody_knows_whether_it_took_effect_can_be_given_back(
    disk: SharedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = disk.create()
    store.send(A, b"1")
    message = store.receive(A, lease=LONG)
    assert message is not None
    change = store._database.change

    def strike(work: Any) -> None:
        change(work)
        raise OutcomeUnknownError

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "change", strike)
        with pytest.raises(OutcomeUnknownError):
            store.claim(message)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * LONG)
    store.leases.forget_late()
    monkeypatch.undo()
    message.release()
    assert take(store).body == b"1"


@pytest.mark.parametrize("end", ["commit_prepared", "rollback_prepared"])
def test_what_a_prepare_of_unknown_outcome_has_taken_over_is_not_held_any_more(
    disk: SharedDisk, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    store: Any = disk.create()
    store.send(A, b"1")
    message = take(store)
    store.claim(message)
    change = store._database.change

    def strike(work: Any) -> None:
        change(work)
        raise OutcomeUnknownError

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "change", strike)
        with pytest.raises(OutcomeUnknownError):
            store.prepare(bytes(32), [store.store_id], [], [message], True)
    getattr(store, end)(bytes(32)).wait()
    if end == "rollback_prepared":
        take(store).ack()
    assert store.delete(A) == 0
    with pytest.raises(UnknownMessageError):
        message.ack()


def test_what_nobody_has_seen_is_given_back_once_it_can_be(disk: SharedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = disk.create()
    store.send(A, b"1")
    message = take(store)
    with monkeypatch.context() as patch:
        patch.setattr(store._database, "change", refuse)
        store.free_unseen([message._note])
        with pytest.raises(StoreFailedError):
            store.take_undelivered()
    assert store.take_undelivered() == []
    assert take(store).deliveries == 1


@pytest.mark.parametrize("call", ["unclaim", "commit"])
def test_what_a_transaction_cannot_give_back_is_free_once_it_can_be(
    disk: SharedDisk, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is rolled back while the database cannot be used, or nobody knows whether it is committed."""
    store: Any = disk.create()
    store.send(A, b"1")
    message = take(store)
    store.claim(message)

    def cut_off(work: Any) -> None:
        raise OutcomeUnknownError

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "change", cut_off)
        if call == "unclaim":
            with pytest.raises(OutcomeUnknownError):
                store.unclaim([message])
        else:
            with pytest.raises(OutcomeUnknownError):
                store.commit([], [message])
        with pytest.raises(StoreFailedError):
            store.take_undelivered()
    late(message.ack)
    assert store.take_undelivered() == []
    assert take(store).deliveries == 2


@pytest.mark.parametrize("struck", [KeyboardInterrupt, OutcomeUnknownError])
@pytest.mark.parametrize("count", ["on_return", "on_receive"])
def test_what_is_leased_again_and_not_told_is_free_again(
    disk: SharedDisk, monkeypatch: pytest.MonkeyPatch, count: str, struck: type[BaseException]
) -> None:
    store: Any = disk.create(count_deliveries=count)
    store.send(A, b"1")
    seq = take(store).seq
    store = disk.crash(store)
    change = store._database.change

    def strike(work: Any) -> None:
        change(work)
        raise struck

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "change", strike)
        with pytest.raises(struck):
            store.lease_again(A, seq)
    assert store.counts(A).leased == 1
    store.take_undelivered()
    assert take(store).deliveries == (2 if count == "on_receive" else 1)


def test_what_a_router_prepared_that_is_gone_is_rolled_back_by_others(disk: SharedDisk, sets: SharedTables) -> None:
    """Not what its transaction manager, or another store, has yet to decide."""
    store: Any = disk.create(router_timeout=3600.0)
    eventually(lambda: store.waiting._poll_at)  # it says that it lives, and not again for long

    def seen(ms: int) -> None:
        prefix, number = store.options.schema_prefix, store.waiting.router
        sets.run([f"UPDATE {prefix}shared_routers SET seen = {ms} WHERE number = {number}"])

    seen(1 << 60)
    other: Any = disk.beside(store, router_timeout=0.6)
    store.send(A, b"first")
    eventually(lambda: other.take_undelivered() == [] and not other.waiting.has_orphans)
    take(other).ack()
    notes = packed(None, store.store_id), packed(Xid(1, "x"), store.store_id), packed(None, b"another")
    for number, note in enumerate(notes):
        store.send(A, b"%d" % number)
        message = take(store)
        store.claim(message)
        store.prepare(bytes([number]), [], [], [message], True, note=note).wait()
    other.waiting.has_orphans = True  # as when a third router is gone
    assert other.take_undelivered() == [] and other.counts(A).leased == 3
    seen(0)
    eventually(lambda: other.take_undelivered() == [] and other.counts(A).ready)
    assert take(other).body == b"0"
    assert [prepared.transaction for prepared in other.recover_prepared()] == [b"\1", b"\2"]


def test_a_look_for_what_is_not_delivered_any_more_commits_nothing(disk: SharedDisk) -> None:
    """Each router looks each second."""
    store: Any = disk.create(max_deliveries=3, dead_letter="dlq")
    store.send(A, b"1")
    take(store).release()
    commits = store._database.commits
    assert store.take_undelivered() == []
    assert store._database.commits == commits


def test_it_is_closed_while_the_database_does_not_answer(disk: SharedDisk, sets: SharedTables) -> None:
    store: Any = disk.create(response_timeout=0.3, outcome_timeout=0.1, router_timeout=0.6)
    table = f"{store.options.schema_prefix}shared_routers"
    with sets.locked(table):
        with Parallel(store.close) as closing:
            closing.result()
        assert store._opened is False


def test_nobody_is_taken_for_dead_because_the_clock_is_set(disk: SharedDisk, sets: SharedTables) -> None:
    store: Any = disk.create(router_timeout=3600.0)
    other: Any = disk.beside(store, router_timeout=3600.0)
    for one in (store, other):
        eventually(lambda: one.waiting._poll_at)  # noqa: B023
    store.send(A, b"1")
    message = take(other)
    lines = store.waiting
    lines._bury_at = 0.0
    sets.set_clock(2 * HOUR)
    try:
        lines._beat_at = before = -3600.0
        lines._poke()
        eventually(lambda: lines._beat_at != before)
        polled = lines._poll_at
        eventually(lambda: lines._poll_at > polled)
    finally:
        sets.set_clock(0)
    message.ack()


# Clocks that differ --------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
ahead = int(sys.argv[3]) * 1_000_000
right, right_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: right() + ahead / 1e9, lambda: right_ns() + ahead
from anabranch.adapters.sql import SqlStore  # noqa
import anabranch
from tests.sql.leased import Shared

shared = Shared(Path(sys.argv[1]), sys.argv[2], many=True)
with shared.stack:
    queue = shared.router("child", dead_letter="dlq").queue("q")
    queue.send(b"now")
    queue.send(b"soon", deliver_in=0.05)
    queue.send(b"later", deliver_in=3600.0)
    queue.send(b"ends", expires_in=0.05)
    queue.send(b"lasts", expires_in=1800.0)
    with shared.router("other", dead_letter="dlq").transaction() as tx:
        tx.send("q", b"of a transaction", expires_in=1800.0)
    seen = {message.body: message for message in queue.browse()}
    assert abs(seen[b"lasts"].expires_at_ms - time.time() * 1000 - 1_800_000) < 600_000, seen[b"lasts"].expires_at_ms
    assert abs(seen[b"now"].timestamp_ms - time.time() * 1000) < 600_000, seen[b"now"].timestamp_ms
"""


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_times_are_by_the_database_s_clock_whatever_a_process_believes(shared: Shared, ahead: int) -> None:
    router = shared.router("first", dead_letter="dlq")
    code, told = run_program(CHILD, str(shared.directory), shared.url, str(ahead), seconds=PATIENCE)
    assert code == 0, told
    eventually(lambda: b"ends" in [letter.body for letter in router.queue("dlq").browse()])
    found: list[Message] = []
    while len(found) < 4:
        message = router.queue("q").receive(timeout=PATIENCE)
        assert message is not None
        found.append(message)
    assert {message.body for message in found} == {b"now", b"soon", b"lasts", b"of a transaction"}
    for message in found:
        if message.expires_at_ms:
            assert abs(message.expires_at_ms - now_ms() - 1_800_000) < 600_000
        message.ack()
    assert (router.queue("q").receive(), router.queue("q").counts().delayed) == (None, 1)


def test_a_clock_that_is_set_is_noticed(disk: SharedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next heartbeat."""
    store = disk.create(router_timeout=0.5)
    assert isinstance(store, SharedStore)
    for clock in going_by(GoingClock(), monkeypatch):
        clock.offset_ms = HOUR
        eventually(lambda: store.waiting.ahead_ms < -HOUR / 2)
        store.send(A, b"1", deliver_at_ms=now_ms() + 50, expires_at_ms=now_ms() + HOUR)
        assert take(store, A, PATIENCE).body == b"1"
    eventually(lambda: store.waiting.ahead_ms == 0)


def test_a_look_is_slow_by_the_clock_of_the_server(disk: SharedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many processes share a machine each look waits for it, and has passed through nothing."""
    store: Any = disk.create()
    store.send(A, b"1")
    for name, value in (("SLOW", 1000.0), ("LATE", 0)):
        monkeypatch.setattr(heads, name, value)
    hours = iter(range(0, 1_000_000, 3600))
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    message = take(store)
    assert not store.waiting.heads.known(message._note.place.queue)
    monkeypatch.setattr(heads, "SLOW", 0.0)
    message.release()
    message = take(store)
    assert store.waiting.heads.known(message._note.place.queue)


@pytest.mark.parametrize("group", [None, "g"])
def test_a_look_is_slow_until_it_has_found_all(
    disk: SharedDisk, monkeypatch: pytest.MonkeyPatch, group: str | None
) -> None:
    """It finds the first message of a group, and may pass through all others, each of which is looked up in a queue
    that had no groups before."""
    store: Any = disk.create()
    store.send(A, b"1")
    take(store).ack()
    store.send_many(A, [Outgoing(b"%d" % number, group=group) for number in range(50)])
    ((number, has_groups),) = store.waiting.heads._grouped.items()
    assert not has_groups
    hours = iter(range(0, 1_000_000, 3600))
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    monkeypatch.setattr(heads, "SLOW", 1000.0)
    once, found = store._database.once, list[Any]()

    def noting(*given: Any, **named: Any) -> list[Any]:
        found.extend(once(*given, **named))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "once", noting)
        store.take(A, len(bodies(store)))
    if group is None:
        assert found[0][-1] < found[-1][-1] and len(found) == 50
    assert (number in store.waiting.heads._grouped) == (group is None)


def test_a_router_asks_nothing_that_cannot_have_changed(disk: SharedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs as much as a part of a send, and with many routers there are as many each second."""
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.02)
    store: Any = disk.create(router_timeout=0.5)
    lines, asked = store.waiting, list[str]()
    eventually(lambda: not lines._has_grown and time.monotonic() > lines._bury_at)
    says = lines._statements

    class Noting:
        def __getitem__(self, name: str) -> str:
            asked.append(name)
            return str(says[name])

    lines._statements = Noting()
    eventually(lambda: asked.count("seen") > 1 and asked.count("newer_queues") > 1)
    assert "bury" not in asked and "size_of_waiting" not in asked
    assert store.receive(A, timeout=0.01) is None
    eventually(lambda: "size_of_waiting" in asked)
