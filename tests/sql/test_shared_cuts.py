"""A shared store that is disturbed in the midst of a call: its connection is cut, before the server has heard it or
before its answer is heard, or the server takes a statement, or the COMMIT, for one that meets others. At each step of
each call: it takes effect once, and who called need not know (rules D11, D12)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Change, Settlement, Subscription
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.shared import SharedStore, waiting
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import AnabranchError, OutcomeUnknownError, StoreFailedError
from anabranch.policies.names.destination import Destination, Kind

from ..contract.disk import take
from ..contract.newest import newest
from ..shares import Share
from .outages import insist
from .server import PostgresServer
from .shared import NAMES
from .wire import Wire

HOUR: Final = 3600.0


def transaction(queue: Destination) -> bytes:
    """Return the id of a queue's transaction."""
    return hashlib.sha256(queue.name.encode()).digest()


def taken(store: Any, queue: Destination, count: int = 1) -> list[Any]:
    """Return messages of a queue that were sent and leased."""
    store.send_many(queue, [b"%d" % number for number in range(count)])
    return [take(store, queue) for _ in range(count)]


def held(store: Any, queue: Destination, message: Outgoing) -> Any:
    """Return a message that was sent so that its sender has it."""
    found = store.send_leased(queue, message)
    found._note.kept = True
    return found


def claimed(store: Any, queue: Destination) -> list[Any]:
    """Return messages that a transaction has."""
    messages = taken(store, queue, 2)
    for message in messages:
        store.claim(message)
    return messages


def prepared(store: Any, queue: Destination) -> Any:
    """Prepare an ack of two messages, and two sends."""
    sends = [(queue, Outgoing(b"3")), (queue, Outgoing(b"4", message_id=f"{queue.name} 4"))]
    store.prepare(transaction(queue), [store.store_id], sends, claimed(store, queue), True).wait()


def commit(store: Any, queue: Destination, messages: list[Any]) -> None:
    store.commit([(queue, Outgoing(b"3")), (queue, Outgoing(b"4"))], messages)


def prepare(store: Any, queue: Destination, messages: list[Any]) -> None:
    store.prepare(transaction(queue), [store.store_id], [(queue, Outgoing(b"3"))], messages, True).wait()


Call = tuple[Callable[[Any, Destination], Any], Callable[[Any, Destination, Any], Any]]
NAMED: Final = [Outgoing(b"%d" % number, message_id=str(number)) for number in range(3)]
CALLS: Final[dict[str, Call]] = {
    "send": (lambda s, q: s.declare(q), lambda s, q, _: s.send(q, b"1")),
    "send to one that is new": (lambda s, q: None, lambda s, q, _: s.send(q, b"1")),
    "send with an id": (lambda s, q: s.declare(q), lambda s, q, _: s.send(q, b"1", message_id="1").duplicate),
    "send_many": (lambda s, q: s.declare(q), lambda s, q, _: len(s.send_many(q, [b"1", b"2", b"3"]))),
    "send_many with ids": (
        lambda s, q: s.declare(q), lambda s, q, _: [one.duplicate for one in s.send_many(q, NAMED)],
    ),
    "send_leased": (lambda s, q: s.declare(q), lambda s, q, _: held(s, q, Outgoing(b"1")).body),
    "send_leased with an id": (
        lambda s, q: s.declare(q), lambda s, q, _: held(s, q, Outgoing(b"1", message_id="1")).body,
    ),
    "receive": (lambda s, q: s.send_many(q, [b"1", b"2"]), lambda s, q, _: take(s, q).body),
    "receive the newest": (lambda s, q: s.send_many(q, [b"1", b"2"]), lambda s, q, _: newest(s, q).body),
    "receive_many": (
        lambda s, q: s.send_many(q, [b"1", b"2", b"3"]), lambda s, q, _: [m.body for m in kept(s, q)],
    ),
    "ack": (taken, lambda s, q, messages: s.ack(messages)),
    "ack of many": (lambda s, q: taken(s, q, 3), lambda s, q, messages: s.ack(messages[:2])),
    "ack by a token": (
        lambda s, q: s.token(taken(s, q)[0]), lambda s, q, token: s.settle([token], Settlement.ACK),
    ),
    "release": (lambda s, q: taken(s, q, 3), lambda s, q, messages: s.release(messages[:2])),
    "release uncounted": (taken, lambda s, q, messages: s.release(messages, delivered=False)),
    "release with a delay": (taken, lambda s, q, messages: s.release(messages, delay=HOUR)),
    "release by a token": (
        lambda s, q: s.token(taken(s, q)[0]), lambda s, q, token: s.settle([token], Settlement.RELEASE),
    ),
    "extend": (taken, lambda s, q, messages: s.extend(messages[0], HOUR)),
    "unclaim": (claimed, lambda s, q, messages: s.unclaim(messages)),
    "commit": (claimed, commit),
    "prepare": (claimed, prepare),
    "commit_prepared": (prepared, lambda s, q, _: len(s.commit_prepared(transaction(q)).wait())),
    "rollback_prepared": (prepared, lambda s, q, _: s.rollback_prepared(transaction(q)).wait()),
    "forget": (
        lambda s, q: [prepared(s, q), s.commit_prepared(transaction(q)).wait()],
        lambda s, q, _: s.forget([transaction(q)]),
    ),
    "purge": (lambda s, q: s.send_many(q, [b"1", b"2"]), lambda s, q, _: s.purge(q)),
    "delete": (lambda s, q: s.send_many(q, [b"1", b"2"]), lambda s, q, _: s.delete(q)),
}  # fmt: skip
"""What is there before, and the call."""


def joined(store: Any, topic: Destination, *bodies: bytes, expires_at_ms: int = 0) -> None:
    """Begin two subscriptions, and send messages for them."""
    for name in ("desk", "book"):
        store.subscribe(Subscription(topic, name))
    store.send_many(topic, [Outgoing(body, expires_at_ms=expires_at_ms) for body in bodies])


def commit_changes(store: Any, topic: Destination, _: Any) -> int:
    changes = [Change(Subscription(topic, "desk"), False), Change(Subscription(topic, "late"), True, True)]
    return len(store.commit([(topic, Outgoing(b"3")), (topic, Outgoing(b"4", message_id="4"))], [], changes=changes))


def given_up(store: Any, topic: Destination, _: Any) -> list[bytes]:
    found = store.take_undelivered()
    for message, _reason in found:
        message._note.kept = True
    return [message.body for message, _reason in found if message.destination == topic]


OF_TOPICS: Final[dict[str, Call]] = {
    "send to a topic": (joined, lambda s, t, _: s.send(t, b"1").duplicate),
    "send to a topic with an id": (joined, lambda s, t, _: s.send(t, b"1", message_id="1").duplicate),
    "send_many to a topic": (joined, lambda s, t, _: len(s.send_many(t, [b"1", *NAMED, b"2", b"3"]))),
    "subscribe": (
        lambda s, t: joined(s, t, b"1", b"2"), lambda s, t, _: s.subscribe(Subscription(t, "late"), retroactive=True),
    ),
    "unsubscribe": (lambda s, t: joined(s, t, b"1", b"2"), lambda s, t, _: s.unsubscribe(t, ("", "desk"))),
    "commit of changes": (lambda s, t: joined(s, t, b"1", b"2"), commit_changes),
    "delete of a topic": (lambda s, t: joined(s, t, b"1", b"2"), lambda s, t, _: s.delete(t)),
    "take_undelivered of a topic": (lambda s, t: joined(s, t, b"1", expires_at_ms=1), given_up),
}  # fmt: skip


def kept(store: Any, queue: Destination) -> list[Any]:
    messages: list[Any] = store.receive_many(queue, 2)
    for message in messages:
        message._note.kept = True
    return messages


def state(store: Any, queue: Destination) -> Any:
    """Return what a queue has, and what became of its transaction."""
    waits = [one for one in store.recover_prepared() if one.transaction == transaction(queue)]
    there = [(message.body, message.deliveries) for message in store.browse(queue)]
    joined = {
        one.name: [message.body for message in store.browse(queue, subscription=one.key)]
        for one in store.subscriptions()
        if one.topic == queue
    }
    return there, tuple(store.counts(queue)[:3]), len(waits), store.has_committed(transaction(queue)), joined


def whoever_has_them(found: Any) -> Any:
    """Return a state without what says which messages are leased."""
    there, (free, leased, delayed), *rest = found
    return there, free + leased, delayed, rest


@pytest.fixture
def wire(postgres: PostgresServer) -> Iterator[Wire]:
    if postgres.pid is None:
        postgres.start()
    wire = Wire(postgres.port)
    yield wire
    wire.close()


@pytest.fixture
def opened(
    postgres_url: str, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Opens the one store of a test, over the wire. The connection on which it listens says nothing by itself."""
    monkeypatch.setattr(waiting, "POLL_SECONDS", HOUR)
    stores: list[Any] = []

    def opening(**options: Any) -> Any:
        given: dict[str, Any] = {"url": wire.url(postgres_url), "shared": True, "pool_min": 0, "router_timeout": HOUR}
        made = SqlOptions(**given | options)
        SqlStore.create("s", tmp_path / "s", made)
        store = SqlStore("s", tmp_path / "s", made)
        assert isinstance(store, SharedStore)
        store.open()
        stores.append(store)
        return store

    yield opening
    wire.spare()
    for store in stores:
        store.close()


_numbers = itertools.count(1)


def called(store: Any, call: Call, cut: Callable[[], object]) -> tuple[Any, Any, Any]:
    """Return what a call has returned that may be `cut` off, in a queue of its own, and what was there before and is
    behind it."""
    kind = Kind.TOPIC if call in OF_TOPICS.values() else Kind.QUEUE
    queue = Destination(kind, f"q{next(_numbers)}")
    there = call[0](store, queue)
    before = state(store, queue)
    cut()
    try:
        result = call[1](store, queue, there)
    except AnabranchError as error:
        result = error
    return result, before, insist(lambda: state(store, queue))


@pytest.mark.parametrize("name", [*CALLS, *OF_TOPICS])
def test_cut_at_each_step_it_takes_effect_once(
    opened: Callable[..., Any], wire: Wire, budget: Share, name: str
) -> None:
    store = opened(outcome_timeout=60.0)
    call = {**CALLS, **OF_TOPICS}[name]
    expected, before, behind = called(store, call, lambda: None)
    cuts = 0
    for acted_on in (False, True):
        for step in itertools.count(0, budget.every(2)):
            result, was, found = called(
                store,
                call,
                lambda: wire.cut_at(b"", acted_on=acted_on, after=step),  # noqa: B023
            )
            is_over = not wire.cut.is_set()
            wire.spare()
            if isinstance(result, AnabranchError):
                raise result
            where = f"step {step}, {'answer' if acted_on else 'question'} lost"
            if name not in ("send", "send to one that is new"):
                assert result == expected, where
            assert (was, found) == (before, behind), where
            if is_over:
                break
            cuts += 1
    assert cuts >= 2
    budget.counts.append(f"{name}: cut at {cuts} places")


MET: Final = """
CREATE SEQUENCE met MINVALUE 0;
CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS $$DECLARE step bigint := nextval('met'); BEGIN
    IF step IN {once} OR step >= {first} THEN
        RAISE EXCEPTION USING ERRCODE = CASE step % 2 WHEN 0 THEN '40001' ELSE '40P01' END, MESSAGE = 'it met others';
    END IF;
    RETURN NULL;
END$$;
CREATE CONSTRAINT TRIGGER met AFTER UPDATE ON shared_connections DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION meet()
"""
"""Counts the statements that change a table, and the COMMITs. One of them fails, or all from one on."""
ONCE, FIRST = (1000, 1501), 2000
BY_PAGES: Final = ("unsubscribe", "delete of a topic")
"""They return how much they have removed themselves; the rest goes later. A delete of a queue that is cut short has
removed some, and is done again."""


def test_a_statement_that_meets_others_is_tried_again(
    opened: Callable[..., Any], postgres: PostgresServer, postgres_url: str, budget: Share
) -> None:
    """As one that cannot be serialized, or is in a deadlock. For a while: then the caller is told, and nothing has
    happened."""
    store = opened()
    with postgres.connect(postgres_url.rpartition("/")[2].partition("?")[0]) as server:
        server.execute(f"SET search_path = {postgres_url.rpartition('%3D')[2]}")
        server.execute(MET.format(once=ONCE, first=FIRST))
        for table in NAMES:
            server.execute(f"CREATE TRIGGER meets BEFORE INSERT OR UPDATE OR DELETE ON {table} EXECUTE FUNCTION meet()")

        def meeting(step: int) -> int:
            """Let steps be counted from there on; returns the last one there was."""
            ((before,),) = server.execute("SELECT last_value FROM met").fetchall()
            server.execute("SELECT setval('met', %s)", (step,))
            return int(before)

        met = told = 0
        for number, (name, call) in enumerate({**CALLS, **OF_TOPICS}.items()):
            meeting(0)
            expected, before, behind = called(store, call, lambda: None)
            for fails in (*budget.of(ONCE, 2, number), FIRST):
                for step in itertools.count(1):
                    result, was, found = called(store, call, lambda: meeting(fails - step))  # noqa: B023
                    is_over = meeting(0) < fails
                    where = f"{name}, step {step}, {'on and on' if fails == FIRST else 'once'}"
                    assert was == before, where
                    if isinstance(result, AnabranchError):
                        assert fails == FIRST and type(result) is StoreFailedError, (where, result)
                        assert "it met others" in str(result), where
                        assert found == before or name == "delete", where
                        told += 1
                    else:
                        assert found == behind, where
                        is_short = name in BY_PAGES and fails == FIRST
                        assert result == expected or is_short or name in ("send", "send to one that is new"), where
                    if is_over:
                        break
                    met += 1
    assert met > 4 * len(CALLS) and told
    budget.counts.append(f"met others at {met} steps, the caller was told of {told}")


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_while_nobody_can_tell_the_caller_is_told_so(opened: Callable[..., Any], wire: Wire, acted_on: bool) -> None:
    store = opened(outcome_timeout=0.2)
    queue = Destination.parse("q")
    store.send(queue, b"before")
    calls: list[Callable[[], Any]] = [
        lambda: store.send(queue, b"cut", message_id="cut"),
        lambda: store.send_many(queue, [Outgoing(b"cut 2", message_id="2"), Outgoing(b"cut 3", message_id="3")]),
    ]
    for number, call in enumerate(calls):
        wire.cut_at(b"COMMIT" if number else b"cut", acted_on=acted_on, stay=True)
        with pytest.raises(OutcomeUnknownError, match="with the same message_id"):
            call()
        with pytest.raises(StoreFailedError) as raised:
            store.send(queue, b"refused")
        assert not isinstance(raised.value, OutcomeUnknownError), "this one was certainly not stored"
        wire.spare()
        wire.join()
        call()
    assert [message.body for message in store.browse(queue)] == [b"before", b"cut", b"cut 2", b"cut 3"]


@pytest.mark.parametrize(
    "name", ["send", "send_many with ids", "receive", "ack", "release", "commit", "commit_prepared"]
)
def test_a_server_that_crashes_in_the_midst_is_asked_afterwards(
    opened: Callable[..., Any], wire: Wire, postgres: PostgresServer, name: str, budget: Share
) -> None:
    """A crash is a cut that may take back leases, which are not synced. Nothing else that was told is lost."""
    store = opened(outcome_timeout=60.0)
    _, before, behind = called(store, CALLS[name], lambda: None)

    def crash() -> None:
        postgres.stop("immediate")
        postgres.start()

    cuts = unknown = 0
    for acted_on in (False, True):
        for step in itertools.count(0, budget.every(3)):
            result, was, found = called(
                store,
                CALLS[name],
                lambda: wire.cut_at(b"", acted_on=acted_on, after=step, then=crash),  # noqa: B023
            )
            is_over = not wire.cut.is_set()
            wire.spare()
            assert was == before
            if isinstance(result, OutcomeUnknownError):
                unknown += 1
                assert whoever_has_them(found) in (whoever_has_them(before), whoever_has_them(behind))
            elif isinstance(result, AnabranchError):
                assert whoever_has_them(found) == whoever_has_them(before), "certainly nothing has happened"
            else:
                assert whoever_has_them(found) == whoever_has_them(behind)
            if is_over:
                break
            cuts += 1
    assert cuts >= 2
    budget.counts.append(f"{name}: {cuts} crashes, {unknown} outcomes unknown")
