"""Several routers over one database at the same time, each with a directory of its own."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

import anabranch
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.store_types import Settlement, Subscription
from anabranch.adapters.sql.shared import SharedStore, heads, waiting
from anabranch.policies.errors import OutcomeUnknownError, StoreFailedError, UnknownMessageError
from anabranch.policies.names.destination import Destination

from ..children import run_program
from ..contract.disk import PATIENCE, Parallel, eventually, take
from .leased import Shared, bodies, databases

shared = pytest.fixture(databases, params=["shared"])

OTHER = """
import sys
from pathlib import Path
from tests.sql.leased import Shared

shared = Shared(Path(sys.argv[1]), sys.argv[2], many=True)
with shared.stack:
    queue = shared.router(sys.argv[3]).queue("q")
    message = queue.receive(timeout=120)
    queue.send(b"answer to " + message.body)
    message.ack()
    print("done")
"""


def opened(shared: Shared, *names: str) -> list[anabranch.Router]:
    """Return routers whose shared store is open, with a queue `q`."""
    routers = [shared.router(name) for name in names]
    for router in routers:
        router.queue("q").declare()
    return routers


def connected(shared: Shared, autocommit: bool = False) -> psycopg.Connection:
    """A connection of nobody's to the database."""
    url = make_url(shared.url).set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(url, autocommit=autocommit)


def store_of(router: anabranch.Router) -> Any:
    """Return the shared store of a router."""
    (store,) = [one for one in router._registry.open_stores() if isinstance(one, SharedStore)]
    return store


def test_a_watch_that_is_woken_as_it_comes_into_line_holds_up_nobody(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    (router,) = opened(shared, "a")
    store, told, heard = store_of(router), list[bool](), list[bool]()
    destination = router.queue("q").destination
    eventually(lambda: store.waiting._poll_at)  # it hears, and wakes nobody because of that any more
    watch = store.receive_or_watch(destination, told.append)
    enter = store.waiting.enter

    def woken_first(*given: Any) -> None:
        watch.wake()
        enter(*given)

    monkeypatch.setattr(store.waiting, "enter", woken_first)
    assert store.receive_or_watch(destination, told.append, watch) is watch
    monkeypatch.undo()
    assert told == [False]
    store.receive_or_watch(destination, heard.append)
    router.queue("q").send(b"1")
    assert heard == [False]


def test_each_message_is_received_once_by_one_of_many(shared: Shared) -> None:
    routers = opened(shared, *"abcd")
    routers[0].queue("q").send_many([b"%d" % number for number in range(200)])

    def work(router: anabranch.Router) -> list[bytes]:
        found = []
        while (message := router.queue("q").receive()) is not None:
            found.append(message.body)
            message.ack()
        return found

    workers = [Parallel(lambda router=router: work(router)) for router in routers]  # type: ignore[misc]
    for worker in workers:
        worker.__enter__()
    found = [body for worker in workers for body in worker.result()]
    assert sorted(found, key=int) == [b"%d" % number for number in range(200)]


def test_who_waits_hears_of_a_send_in_another_router(shared: Shared) -> None:
    one, other = opened(shared, "one", "other")
    with Parallel(lambda: one.queue("q").receive(PATIENCE)) as waiting:
        eventually(lambda: store_of(one).waiting.count())
        other.queue("q").send(b"1")
        waiting.result().ack()
    seen: list[Message[Any]] = []
    listener = one.queue("q").listen(seen.append, credit=2)
    for body in (b"2", b"3"):
        other.queue("q").send(body)
        eventually(lambda body=body: body in [message.body for message in seen])  # type: ignore[misc]
    for message in seen:
        message.ack()
    listener.close()
    with Parallel(lambda: one.queue("q").receive(PATIENCE)) as waiting:
        eventually(lambda: store_of(one).waiting.count())
        with other.transaction() as tx:
            tx.send("q", b"4")
        message = waiting.result()
        with Parallel(lambda: other.queue("q").receive(PATIENCE)) as back:
            eventually(lambda: store_of(other).waiting.count())
            message.release()
            assert back.result().deliveries == 2
            back.result().ack()


def test_a_watch_is_woken_by_another_router(shared: Shared) -> None:
    one, other = opened(shared, "one", "other")
    queue = one.queue("q")
    woken = threading.Event()
    found = store_of(one).receive_or_watch(queue.destination, lambda is_over: woken.set())
    assert not isinstance(found, Message)
    other.queue("q").send(b"1")
    assert woken.wait(PATIENCE)
    message = queue.receive()
    assert message is not None
    message.ack()


def test_processes_that_answer_each_other(shared: Shared) -> None:
    here = shared.router("here").queue("q")
    here.send(b"1")
    code, told = run_program(OTHER, str(shared.directory), shared.url, "there", seconds=PATIENCE)
    assert (code, told.strip()[-4:]) == (0, "done"), told
    answer = here.receive(timeout=PATIENCE)
    assert answer is not None and answer.body == b"answer to 1"
    answer.ack()


def test_a_token_is_settled_in_any_router(shared: Shared) -> None:
    one, other = opened(shared, "one", "other")
    one.queue("q").send_many([b"1", b"2"])
    tokens = []
    for _ in range(2):
        message = one.queue("q").receive()
        assert message is not None
        tokens.append(message.token)
    other.settle(tokens[0], Settlement.ACK)
    assert bodies(one) == [b"2"]
    with pytest.raises(UnknownMessageError):
        one.settle(tokens[0], Settlement.ACK)
    other.settle(tokens[1], Settlement.RELEASE)
    message = one.queue("q").receive()
    assert message is not None and message.deliveries == 2
    message.ack()


def test_a_queue_that_one_has_made_is_there_in_the_other(shared: Shared) -> None:
    one, other = opened(shared, "one", "other")
    one.queue("made").declare()
    one.queue("sent").send(b"1")
    eventually(lambda: {"made", "sent"} <= {destination.name for destination in store_of(other).destinations()})
    assert other.queue("sent").depth() == 1


def test_who_only_receives_asks_for_its_queue_once(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a send there declares it, so that it stays when it is empty."""
    one, other = opened(shared, "one", "other")
    one.queue("w").receive(timeout=0.01)  # made, and not declared
    store = store_of(other)
    asked: list[str] = []
    look = store._database.look

    def looked(name: str, *given: Any) -> Any:
        asked.append(name)
        return look(name, *given)

    monkeypatch.setattr(store._database, "look", looked)
    for _ in range(3):
        assert other.queue("w").receive() is None
    assert asked.count("queue") == 1
    other.queue("w").send(b"1")
    assert asked.count("declare") == 1
    message = other.queue("w").receive()
    assert message is not None
    message.ack()
    assert "w" in {destination.name for destination in store.destinations()}


@pytest.mark.parametrize("how", ["as it is looked up", "unheard"])
def test_a_queue_that_is_deleted_meanwhile_is_declared_by_the_next_send(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    one, other = opened(shared, "one", "other")
    one.queue("w").declare()
    store = store_of(other)
    eventually(lambda: store.waiting._poll_at)  # it hears
    look, heard, told = store._database.look, threading.Event(), store.waiting._heard

    def hear(payload: str) -> None:
        if how != "unheard":
            told(payload)
        heard.set()

    def deleted(name: str, *given: Any) -> Any:
        rows = look(name, *given)
        if name == "queue" and not heard.is_set():
            one.queue("w").delete()
            assert heard.wait(PATIENCE)
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(store.waiting, "_heard", hear)
        patch.setattr(store._database, "look", deleted)
        assert other.queue("w").receive() is None
    if how == "unheard":  # it says so when it hears again
        said, listens = store.waiting.on_listening, threading.Event()

        def listening() -> None:
            said()
            listens.set()

        store.waiting.on_listening = listening
        connected(shared, autocommit=True).execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%shared_%' AND pid <> "
            "pg_backend_pid() AND datname = current_database()"
        )
        assert listens.wait(PATIENCE)
    other.queue("w").send(b"1")
    assert store._database.look("queue", "queue://w")[0][1]


def test_who_is_taken_for_dead_sends_nothing_leased(shared: Shared) -> None:
    one, other = opened(shared, "one", "other")
    store = store_of(one)
    eventually(lambda: store.waiting._poll_at)
    store._database.look("leave", store.waiting.router)
    with pytest.raises(OutcomeUnknownError, match="could not be leased"):
        one.queue("q").send_leased(b"1")
    message = other.queue("q").receive(timeout=PATIENCE)
    assert message is not None and message.body == b"1"
    message.ack()


def test_one_that_is_requeued_is_leased_to_its_sender(shared: Shared) -> None:
    (one,) = opened(shared, "one")
    store, queue = store_of(one), one.queue("q")
    for body in (b"1", b"2"):
        message = store.send_leased(queue.destination, Outgoing(body, message_id="x", requeued=True))
        assert message.body == body
        message.ack()


def test_a_pattern_finds_queues_that_do_not_come_in_the_order_of_their_numbers(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for which somebody waited first; one that a transaction over two stores has made."""
    for name, seconds in (("ALL_SECONDS", 0.0), ("POLL_SECONDS", 0.1)):
        monkeypatch.setattr(f"anabranch.adapters.sql.shared.waiting.{name}", seconds)
    one, other = opened(shared, "one", "other")

    def declared(name: str) -> None:
        one.queue(name).declare()
        eventually(lambda: name in {destination.name for destination in other._registry.table.destinations})

    assert one.queue("w.waited").receive(timeout=0.01) is None
    declared("later")
    one.queue("w.waited").send(b"1")
    with one.transaction() as tx:
        tx.send("w.both", b"2")
        tx.send("a.x", b"3")
    found = [other.receive("w.>", timeout=PATIENCE) for _ in range(2)]
    assert {message.body for message in found if message is not None} == {b"1", b"2"}
    other.ack([message for message in found if message is not None])


def test_purged_and_deleted_while_another_router_holds_one(shared: Shared) -> None:
    one, other = opened(shared, "one", "other")
    one.queue("q").send_many([b"1", b"2", b"3"])
    held = one.queue("q").receive()
    assert held is not None
    assert other.queue("q").purge() == 2
    assert bodies(one) == [b"1"]
    other.queue("q").delete()
    with pytest.raises(UnknownMessageError):
        held.ack()
    one.queue("q").send(b"4")
    assert bodies(other) == [b"4"]


def test_deleted_while_another_router_waits(shared: Shared) -> None:
    one, other = opened(shared, "one", "other")
    one.queue("q").send(b"1")
    first = one.queue("q").receive()
    assert first is not None
    first.ack()
    with Parallel(lambda: one.queue("q").receive(PATIENCE)) as waiting:
        eventually(lambda: store_of(one).waiting.count())
        other.queue("q").delete()
        other.queue("q").send(b"2")
        message = waiting.result()
        assert message.body == b"2"
        message.ack()


def test_one_that_was_committed_late_is_the_first_all_the_same(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends once its own send is committed sends after that, though others have been received in between."""
    monkeypatch.setattr(heads, "SHARE", 1e9)
    monkeypatch.setattr(heads, "SLOW", 0.0)
    router = shared.router("one")
    queue = router.queue("q")
    queue.declare()
    with connected(shared) as late:
        late.execute(
            "INSERT INTO shared_messages (due, expires, sent, queue, priority, content) "
            "SELECT 0, 0, 0, number, 4, 'late' FROM shared_queues WHERE name LIKE '%q'"
        )
        queue.send(b"between")
        between = queue.receive(timeout=PATIENCE)
        assert between is not None and between.body == b"between"
        between.ack()
        late.commit()
    queue.send(b"after")
    found = queue.receive_many(10)
    assert [message.body for message in found] == [b"late", b"after"]
    for message in found:
        message.ack()


def test_who_waits_finds_one_that_was_committed_late(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long after its sender, who knew of nobody, and before the first id that a slow look has found."""
    for name, value in (("LATE", 0), ("SLOW", 0.0), ("SHARE", 0)):
        monkeypatch.setattr(heads, name, value)
    router = shared.router("one")
    queue = router.queue("q")
    queue.declare()
    with connected(shared) as late:
        late.execute(
            "INSERT INTO shared_messages (due, expires, sent, queue, priority, content) "
            "SELECT 0, 0, 0, number, 4, 'late' FROM shared_queues WHERE name LIKE '%q'"
        )
        queue.send(b"between")
        seen: list[Message[Any]] = []
        listener = queue.listen(seen.append, credit=2)
        eventually(lambda: seen)
        seen.pop().ack()
        lines = store_of(router).waiting
        eventually(lambda: lines.count() and any(map(lines.heads.known, range(9))) and not lines._fresh)
        late.commit()
    eventually(lambda: seen)
    assert seen[0].body == b"late"
    seen[0].ack()
    listener.close()


def test_each_queue_is_looked_at_once_more_by_its_own_time(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule W11: not by that of another one, in which somebody began to wait before."""
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(waiting, "time", clock)
    router = shared.router("one")
    queue, seen = router.queue("q"), list[Message[Any]]()
    queue.declare()
    lines = store_of(router).waiting
    eventually(lambda: lines._poll_at > now)  # from here on nothing is due but what comes fresh
    with connected(shared) as late:
        late.execute(
            "INSERT INTO shared_messages (due, expires, sent, queue, priority, content) "
            "SELECT 0, 0, 0, number, 4, 'late' FROM shared_queues WHERE name LIKE '%q'"
        )
        before = router.queue("before").listen(seen.append)
        eventually(lambda: len(lines._fresh) == 1)
        now += waiting.RELOOK / 2
        listener = queue.listen(seen.append)
        eventually(lambda: len(lines._fresh) == 2)
        now += 0.75 * waiting.RELOOK
        eventually(lambda: len(lines._fresh) < 2)
        late.commit()
    now += waiting.RELOOK / 2
    eventually(lambda: seen)
    seen[0].ack()
    listener.close()
    before.close()


@pytest.mark.parametrize("struck", [KeyboardInterrupt, OutcomeUnknownError, StoreFailedError])
def test_what_was_leased_to_a_caller_that_was_not_told_is_free_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, struck: type[BaseException]
) -> None:
    """It was interrupted, or cut off from the database: for longer than it asks for the outcome, or when it asked what
    it had leased."""
    router = shared.router("one")
    queue = router.queue("q")
    queue.send(b"1")
    store = store_of(router)
    once = store._database.once

    def refuse(*_: Any) -> None:
        raise struck

    def strike(name: str, *given: Any, **named: Any) -> Any:
        assert once(name, *given, **named)
        if struck is not StoreFailedError:
            raise struck
        patch.setattr(store._database, "_run", refuse)
        return named["lost"]([])

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "once", strike)
        with pytest.raises(struck):
            queue.receive()
    assert queue.counts().leased in (0, 1)
    store.take_undelivered()
    message = queue.receive(timeout=PATIENCE)
    assert message is not None and message.deliveries == 1
    message.ack()


@pytest.mark.parametrize("how", ["take", "lease_again"])
def test_what_was_leased_is_free_again_though_its_queue_cannot_be_looked_up(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (router,) = opened(shared, "a")
    queue, store = router.queue("q"), store_of(router)
    seq = queue.send(b"1").seq
    queue.receive().release(delivered=False)  # type: ignore[union-attr]
    look = store._database.look

    def refusing(name: str, *given: Any) -> Any:
        if name == "queue_of":
            raise StoreFailedError
        return look(name, *given)

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "look", refusing)
        for name in ("note", "found"):  # of what looks beside it, too
            patch.setattr(store._queues, name, lambda *_: [])
        store._forget_all()  # meanwhile
        with pytest.raises(StoreFailedError):
            getattr(store, how)(queue.destination, 1 if how == "take" else seq)
    store.take_undelivered()
    message = queue.receive(timeout=PATIENCE)
    assert message is not None and message.deliveries == 1
    message.ack()


def test_an_outcome_that_was_seen_is_known_though_the_answer_to_what_removes_it_is_lost(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    (router,) = opened(shared, "a")
    database = store_of(router)._database
    look, lost = database.look, [StoreFailedError("it is cut off")]

    def losing(name: str, *given: Any) -> Any:
        rows = look(name, *given)
        if name == "disconnect" and lost:
            raise lost.pop()
        return rows

    monkeypatch.setattr(database, "look", losing)
    with connected(shared, autocommit=True) as other:
        other.execute("INSERT INTO shared_connections (number, last, router, made) VALUES (-1, 7, 0, 0)")
    assert database._ended(-1, 7, StoreFailedError("it was cut off")) == (7, [])
    assert not lost


def test_a_message_whose_id_is_forgotten_as_it_is_found_is_stored(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    (router,) = opened(shared, "a")
    queue, store = router.queue("q"), store_of(router)
    queue.send(b"1", message_id="x")
    look = store._database.look

    def forgetting(name: str, *given: Any) -> Any:
        if name == "id_of":
            look("delete_ids", given[0])
        return look(name, *given)

    monkeypatch.setattr(store._database, "look", forgetting)
    assert not queue.send(b"2", message_id="x").duplicate
    assert bodies(router) == [b"1", b"2"]


@pytest.mark.parametrize("kind", ["there", "received", "topic"])
def test_a_send_whose_id_is_forgotten_before_its_outcome_is_asked_for(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is stored once; where nobody can tell, the caller is told so."""
    store = store_of(opened(shared, "a")[0])
    to = Destination.parse("topic://t" if kind == "topic" else "q")
    store.subscribe(Subscription(Destination.parse("topic://t"), "desk"))
    once = store._database.once

    def losing(name: str, *given: Any, lost: Any) -> Any:
        ((seq, *_),) = once(name, *given, lost=lost)
        monkeypatch.undo()
        store._database.look("delete_ids", given[0])
        if kind == "received":
            take(store, to).ack()
        return lost([seq])

    monkeypatch.setattr(store._database, "once", losing)
    if kind == "received":
        with pytest.raises(OutcomeUnknownError, match="duplicate_window be larger than"):
            store.send(to, b"1", message_id="x")
        assert store.depth(to) == 0
    else:
        assert not store.send(to, b"1", message_id="x").duplicate
        assert store.depth(to) == 1


@pytest.mark.parametrize("error", [StoreFailedError("it is away"), OutcomeUnknownError("nobody knows")])
def test_what_took_effect_and_cannot_be_looked_at_is_not_told_as_failed(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, error: StoreFailedError
) -> None:
    database = store_of(opened(shared, "a")[0])._database
    monkeypatch.setattr(
        database, "_trying", lambda *_: (None, [7])
    )  # its answer was lost, and its row says that it was done
    sent: list[list[int]] = []

    def lost(ids: list[int]) -> list[Any]:
        sent.append(ids)
        raise error

    with pytest.raises(OutcomeUnknownError):
        database.once("ack_one", 1, 2, 3, lost=lost)
    assert sent == [[7]]


def test_a_router_that_comes_removes_what_others_left_of_their_connections(shared: Shared) -> None:
    opened(shared, "a")
    with connected(shared, autocommit=True) as database:
        database.execute(
            "INSERT INTO shared_connections (number, last, router, made) SELECT -1, 0, -1, 0 "
            "UNION ALL SELECT -2, 0, number, 0 FROM shared_routers WHERE number > 0 "
            "UNION ALL SELECT -3, 0, -1, (extract(epoch FROM now()) * 1000)::bigint"
        )
        opened(shared, "b")

        def left() -> list[int]:
            rows = database.execute("SELECT number FROM shared_connections WHERE number < 0").fetchall()
            return sorted(number for (number,) in rows)

        eventually(lambda: left() == [-3, -2])


def test_a_router_that_enters_while_another_looks_keeps_what_it_leases(shared: Shared) -> None:
    """Q21: that look began before there was such a router."""
    (slow,) = opened(shared, "a")
    slow.queue("q").send(b"1")
    blocked = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with connected(shared, autocommit=True) as looking, connected(shared) as holding:
        holding.execute("SELECT 1 FROM shared_connections FOR UPDATE")
        with Parallel(lambda: slow.queue("q").receive(timeout=0)) as found:
            eventually(lambda: looking.execute(blocked).fetchall())
            message = shared.router("b").queue("q").receive(timeout=0)
            assert message is not None
            holding.commit()
        assert found.result() is None
        message.ack()


def test_a_router_that_is_taken_for_dead_leases_nothing_until_it_has_entered_anew(shared: Shared) -> None:
    one, other = opened(shared, "a", "b")
    one.queue("q").send(b"1")
    with connected(shared, autocommit=True) as database:
        database.execute("DELETE FROM shared_routers WHERE number = %s", [store_of(one).waiting.router])
        message = one.queue("q").receive(timeout=PATIENCE)
        assert message is not None and other.queue("q").receive(timeout=0) is None
        message.ack()
