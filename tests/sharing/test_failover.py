"""What becomes of each call while which the owner dies: before it does it, once it has, and once it has answered.

docs/processes.md has the table; here it is by kind of store. A memory store's messages die with the owner, so what is
asked of it is in tests of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import anabranch
from anabranch import Xid
from anabranch.adapters.core.store_types import Settlement
from anabranch.adapters.system.conditions import unless_busy
from anabranch.policies.errors import (
    ClosedError,
    ConfigError,
    OutcomeUnknownError,
    TransactionError,
    UnknownMessageError,
)
from anabranch.router.sharing import clients, starting
from anabranch.router.sharing.client import connection
from anabranch.router.sharing.client.connection import Connection
from anabranch.router.sharing.protocol import pack
from anabranch.router.sharing.socket_file import bound, remove

from ..children import CONTEXT
from ..contract.disk import Parallel, eventually
from ..shares import Share
from ..taking import take
from .peers import Op
from .striking import MOMENTS, PATIENCE, Striking, owners, stopped

striking = pytest.fixture(owners)

KINDS = ("journal", "sqlite")
Router = anabranch.Router
XID = Xid(1, "x")


def stores(striking: Striking, kind: str) -> None:
    """Let there be two stores of a kind: one for `other.>`, one for all else."""
    made = {"journal": "journal", "sqlite": "sql", "memory": "memory"}[kind]
    striking.configure(
        anabranch.StoreConfig("rest", [">"], kind=made, options={"dead_letter": "dead"}),
        anabranch.StoreConfig("other", ["queue://other.>"], kind=made),
    )


def connection_of(router: Any) -> Connection:
    """Return a client's connection."""
    found: Connection = router._store.connection
    return found


def bodies(router: Router, name: str = "q") -> list[bytes]:
    """Return what a queue holds."""
    return [message.body for message in router.queue(name).browse()]


def ready(router: Router, name: str = "q") -> list[bytes]:
    """Return what a queue holds that nobody has leased."""
    return [message.body for message in router.queue(name).receive_many(100)]


@dataclass
class Case:
    """A call: what it is made of, and what must have come of it."""

    op: Op
    call: Callable[[Router, Any], Any]
    check: Callable[[Router, Any, Any], object]
    prepare: Callable[[Router], Any] = lambda router: None
    name: str = ""
    once: bool = False
    """It is not made again, where nobody knows whether it took effect."""


def _holding(router: Router) -> anabranch.Message[bytes]:
    queue = router.queue("q")
    for body in (b"1", b"2", b"3"):
        queue.send(body)
    return take(queue)


def _expect(*expected: bytes, name: str = "q") -> Callable[[Router, Any, Any], None]:
    def check(router: Router, given: Any, result: Any) -> None:
        assert ready(router, name) == list(expected)

    return check


def _sent(router: Router, given: Any, result: Any) -> None:
    assert bodies(router) == [b"x"]
    assert not result.duplicate and result.seq == next(iter(router.queue("q").browse())).seq


def _sent_many(router: Router, given: Any, result: Any) -> None:
    assert bodies(router) == [b"%d" % n for n in range(300)]
    assert len(result) == 300 and not any(one.duplicate for one in result)


def _acked_twice(router: Router, message: anabranch.Message[bytes], result: Any) -> None:
    assert ready(router) == [b"2", b"3"]
    with pytest.raises(UnknownMessageError):
        message.ack()


def _rejected(router: Router, message: Any, result: Any) -> None:
    assert ready(router) == [b"2", b"3"]
    assert [one.message.body for one in router.queue("q").dead_letters()] == [b"1"]


def _extended(router: Router, message: Any, result: Any) -> None:
    assert ready(router) == [b"2", b"3"]
    message.ack()
    assert bodies(router) == [b"2", b"3"]


def _received(router: Router, given: Any, message: anabranch.Message[bytes]) -> None:
    assert message.body == b"1" and message.deliveries == 1
    assert ready(router) == [b"2"]
    message.ack()
    assert bodies(router) == [b"2"]


def _received_many(router: Router, given: Any, messages: list[anabranch.Message[bytes]]) -> None:
    assert [message.body for message in messages] == [b"1", b"2"]
    router.ack(messages)
    assert bodies(router) == []


def _two(router: Router) -> None:
    router.queue("q").send_many([b"1", b"2"])


def _holding_two(router: Router) -> list[anabranch.Message[bytes]]:
    _two(router)
    return router.queue("q").receive_many(2)


def _commit(router: Router, acked: anabranch.Message[bytes] | None, *sends: tuple[str, bytes]) -> Any:
    with router.transaction() as transaction:
        if acked is not None:
            transaction.ack(acked)
        for name, body in sends:
            transaction.send(name, body)
    return transaction.receipts


def _prepare(router: Router, acked: anabranch.Message[bytes]) -> None:
    transaction = router.transaction(Xid(1, "x"))
    transaction.ack(acked)
    transaction.send("done", b"t")
    transaction.send("other.done", b"u")
    transaction.prepare()


def _prepared(router: Router, given: Any, result: Any) -> None:
    assert router.recover() == [Xid(1, "x")]
    assert ready(router, "done") == []
    router.commit(Xid(1, "x"))
    _moved_across(router, given, result)


def _moved(router: Router, given: Any, result: Any) -> None:
    assert ready(router) == [b"2", b"3"]
    assert ready(router, "done") == [b"t"]
    assert ready(router, "other.done") == []


def _moved_across(router: Router, given: Any, result: Any) -> None:
    assert ready(router) == [b"2", b"3"]
    assert ready(router, "done") == [b"t"]
    assert ready(router, "other.done") == [b"u"]


def _value(router: Router, given: Any, result: Any, value: bytes = b"new") -> None:
    assert router.map("m").get("k") == value


def _holding_with_value(router: Router) -> anabranch.Message[bytes]:
    _with_value(router)
    return _holding(router)


def _touched(router: Router, given: Any, result: Any) -> None:
    assert result is True and router.map("m").get("k") == b"old"


def _range_removed(router: Router, message: anabranch.Message[bytes]) -> None:
    with router.transaction() as transaction:
        transaction.ack(message)
        assert transaction.remove_range("m", "k") == 1


def _acked_twice_and_removed(router: Router, message: anabranch.Message[bytes], result: Any) -> None:
    assert router.map("m").count() == 0
    _acked_twice(router, message, result)


def _with_value(router: Router) -> None:
    router.map("m").put("k", b"old")


def _subscribed(router: Router, given: Any, subscriber: Any) -> None:
    router.topic("t").send(b"x")
    assert take(subscriber).body == b"x"


def _committed(router: Router, given: Any, receipts: Any) -> None:
    _sent(router, given, receipts[0])
    assert ready(router, "done") == [b"t"]


def _incremented(router: Router, given: Any, result: Any) -> None:
    assert result == 2 and router.map("n").increment("k") == 3


def _holding_prepared(router: Router) -> None:
    _prepare(router, _holding(router))


def _xid_committed(router: Router, given: Any, result: Any) -> None:
    assert router.recover() == []
    _moved_across(router, given, result)


def _xid_rolled_back(router: Router, given: Any, result: Any) -> None:
    assert router.recover() == []
    assert ready(router) == [b"1", b"2", b"3"] and ready(router, "done") == ready(router, "other.done") == []


def _emptied(router: Router, given: Any, result: Any) -> None:
    assert bodies(router) == []


CASES = {
    "send": Case(Op.SEND, lambda router, _: router.queue("q").send(b"x"), _sent),
    "send with an id": Case(
        Op.SEND, lambda router, _: router.queue("q").send(b"x", message_id="i"),
        # Whether it is a duplicate of another's or of its own first try, nobody knows after the owner's death.
        lambda router, _, receipt: assert_equal([one.seq for one in router.queue("q").browse()], [receipt.seq]),
    ),
    "send_nowait": Case(Op.SEND, lambda router, _: router.queue("q").send_nowait(b"x").result(PATIENCE), _sent),
    "send_many": Case(
        Op.SEND_MANY, lambda router, _: router.queue("q").send_many([b"%d" % n for n in range(300)]), _sent_many
    ),
    "ack": Case(Op.ACK, lambda router, message: message.ack(), _acked_twice, _holding),
    "ack_nowait": Case(Op.ACK, lambda router, message: message.ack_nowait().result(PATIENCE), _acked_twice, _holding),
    "ack of two": Case(Op.ACK, lambda router, messages: router.ack(messages), _emptied, _holding_two),
    "release": Case(Op.SETTLE, lambda router, message: message.release(), _expect(b"1", b"2", b"3"), _holding),
    "reject": Case(Op.SETTLE, lambda router, message: message.reject("bad"), _rejected, _holding),
    "extend": Case(Op.CALL, lambda router, message: message.extend(60), _extended, _holding, "extend"),
    "receive": Case(Op.RECEIVE, lambda router, _: router.queue("q").receive(), _received, _two),
    "receive, waiting": Case(Op.RECEIVE, lambda router, _: router.queue("q").receive(PATIENCE), _received, _two),
    "receive_many": Case(Op.RECEIVE, lambda router, _: router.queue("q").receive_many(9), _received_many, _two),
    "commit of sends": Case(
        Op.COMMIT, lambda router, _: _commit(router, None, ("q", b"x"), ("done", b"t")),
        _committed,
    ),
    "commit of an ack": Case(Op.COMMIT, lambda router, message: _commit(router, message), _acked_twice, _holding),
    "commit of both": Case(
        Op.COMMIT, lambda router, message: _commit(router, message, ("done", b"t")), _moved, _holding
    ),
    "commit over two stores": Case(
        Op.COMMIT, lambda router, message: _commit(router, message, ("done", b"t"), ("other.done", b"u")),
        _moved_across, _holding,
    ),
    "prepare": Case(Op.COMMIT, lambda router, message: _prepare(router, message), _prepared, _holding),
    "commit of an xid": Case(
        Op.CALL, lambda router, _: router.commit(XID), _xid_committed, _holding_prepared, "commit_xid"
    ),
    "rollback of an xid": Case(
        Op.CALL, lambda router, _: router.rollback(XID), _xid_rolled_back, _holding_prepared, "rollback_xid"
    ),
    "unsubscribe": Case(
        Op.CALL, lambda router, _: router.topic("t").subscribe("s").unsubscribe(),
        lambda router, _, result: assert_equal(len(router.topic("t").subscriptions()), 0),
        lambda router: router.topic("t").subscribe("s"), "unsubscribe",
    ),
    "put": Case(Op.CALL, lambda router, _: router.map("m").put("k", b"new"), _value, _with_value, "map_put"),
    "increment": Case(
        Op.CALL, lambda router, _: router.map("n").increment("k", 2),
        _incremented,
        name="map_increment", once=True,
    ),
    "pop": Case(
        Op.CALL, lambda router, _: router.map("m").pop("k"), lambda router, _, result: assert_equal(result, b"old"),
        _with_value, "map_pop", once=True,
    ),
    "put_if_absent": Case(
        Op.CALL, lambda router, _: router.map("m").put_if_absent("k", b"new"), _value, name="map_put_if_absent",
        once=True,
    ),
    "compare_and_set": Case(
        Op.CALL, lambda router, _: router.map("m").compare_and_set("k", b"old", b"new"), _value, _with_value,
        "map_compare_and_set", once=True,
    ),
    "touch": Case(
        Op.CALL, lambda router, _: router.map("m").touch("k", 1e6), _touched, _with_value, "map_touch"
    ),
    "remove_range": Case(
        Op.COMMIT, lambda router, message: _range_removed(router, message), _acked_twice_and_removed,
        _holding_with_value,
    ),
    "put_nowait": Case(
        Op.CALL, lambda router, _: router.map("m").put_nowait("k", b"new").result(PATIENCE), _value, _with_value,
        "map_put",
    ),
    "subscribe": Case(Op.CALL, lambda router, _: router.topic("t").subscribe("s"), _subscribed, name="subscribe"),
    "purge": Case(
        Op.CALL, lambda router, _: router.queue("q").purge(), _emptied, _two, "purge",
    ),
    "delete": Case(
        Op.CALL, lambda router, _: router.queue("q").delete(), _emptied, _two, "delete",
    ),
}  # fmt: skip


def assert_equal(found: Any, expected: Any) -> None:
    """Compare, within an expression."""
    assert found == expected


SHOWN = {*product(["journal"], MOMENTS, [False]), ("journal", "written", True), ("sqlite", "written", False)}
"""What others only repeat."""
WAYS = [
    pytest.param(
        *way, id=f"{way[0]}-{way[1]}{'-cut' * way[2]}", marks=() if way in SHOWN else pytest.mark.campaign
    )
    for way in product(KINDS, MOMENTS, (False, True))
]  # fmt: skip


@pytest.mark.parametrize(("kind", "moment", "cuts"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_call_while_which_the_owner_dies(striking: Striking, name: str, kind: str, moment: str, cuts: bool) -> None:
    """Or, with `cuts`, while which the connection is lost: the owner lives, and knows what it has done."""
    _called(striking, CASES[name], moment, kind, cuts)


def _called(striking: Striking, case: Case, moment: str, kind: str, cuts: bool) -> None:
    stores(striking, kind)
    with striking.client() as router:
        given = case.prepare(router)
        striking.aim(moment, case.op, case.name, cuts=cuts)
        result = None
        if case.once and moment != "answered":
            with pytest.raises(OutcomeUnknownError):
                case.call(router, given)
        else:
            result = case.call(router, given)
        if cuts:
            router.destinations()  # over a new connection
        else:
            striking.died()
        if not case.once or moment == "answered":
            case.check(router, given, result)
    assert not cuts or len(striking.owners) == 1


# What a transaction's second try must know


def test_a_duplicate_in_a_transaction_is_no_sign_that_it_was_committed(striking: Striking) -> None:
    """Its other sends, and its acks, are carried out by the next owner."""
    stores(striking, "journal")
    with striking.client() as router:
        message = _holding(router)
        router.queue("done").send(b"x", message_id="known")
        striking.aim("before", Op.COMMIT)
        with router.transaction() as transaction:
            transaction.ack(message)
            transaction.send("done", b"x", message_id="known")
            transaction.send("done", b"y")
        assert ready(router, "done") == [b"x", b"y"]
        assert ready(router) == [b"2", b"3"]


def test_a_transaction_that_acks_what_is_gone_is_not_taken_for_committed(striking: Striking) -> None:
    """Its message was purged meanwhile, with the queue. Its sends are not lost in silence."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        message = _holding(router)
        other.settle(message.token, Settlement.ACK)
        striking.aim("before", Op.COMMIT)
        with pytest.raises(UnknownMessageError, match="not leased any more: it was acked or released, its lease ran"):
            _commit(router, message, ("done", b"t"))
        assert ready(router, "done") == []


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("target", ["topic://somebody", "topic://nobody", "map"])
def test_a_transaction_is_committed_once_whatever_it_does(striking: Striking, target: str, moment: str) -> None:
    stores(striking, "journal")
    with striking.client() as router:
        subscriber = router.topic("somebody").subscribe("s")
        message = _holding(router)
        striking.aim(moment, Op.COMMIT)
        with router.transaction() as transaction:
            transaction.ack(message)
            if target == "map":
                transaction.put("m", "k", b"v")
            else:
                transaction.send(target, b"t")
        assert ready(router) == [b"2", b"3"]
        assert [one.body for one in subscriber.receive_many(9)] == ([b"t"] if "somebody" in target else [])
        assert router.map("m").get("k") == (b"v" if target == "map" else None)


def test_a_message_that_was_sent_is_not_sent_again_once_it_was_taken(striking: Striking) -> None:
    """Nobody finds it any more when the send comes again, and the store knows its id still."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        other.queue("q").send(b"first")
        striking.aim("written", Op.SEND)
        with Parallel(lambda: router.queue("q").send(b"x")) as sent:
            striking.died()
            taken = []
            while b"x" not in taken:
                message = take(other.queue("q"), PATIENCE)
                taken.append(message.body)
                message.ack()
            sent.result()
        assert taken == [b"first", b"x"] and bodies(other) == []


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_outcome_of_a_vote_is_told_as_it_was(striking: Striking, moment: str, cuts: bool) -> None:
    """A transaction that has voted is rolled back with its owner, or its connection, unless it was committed before."""
    stores(striking, "journal")
    with striking.client() as router:
        message = _holding(router)
        transaction = router.transaction()
        transaction.ack(message)
        transaction.send("done", b"t")
        transaction.vote()
        striking.aim(moment, Op.CALL, "end_vote", cuts=cuts)
        is_done = moment != "before"
        with nullcontext() if is_done else pytest.raises(TransactionError, match="rolled back"):
            (receipt,) = transaction.commit()
            assert receipt.seq == next(iter(router.queue("done").browse())).seq
        assert ready(router, "done") == ([b"t"] if is_done else [])
        assert bodies(router) == ([b"2", b"3"] if is_done else [b"1", b"2", b"3"])


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_vote_that_is_lost_is_cast_again(striking: Striking, moment: str, cuts: bool) -> None:
    """But not where it was heard over a connection that was lost: with that it was rolled back."""
    stores(striking, "journal")
    with striking.client() as router:
        message = _holding(router)
        transaction = router.transaction()
        transaction.ack(message)
        transaction.send("done", b"t")
        striking.aim(moment, Op.COMMIT, cuts=cuts)
        is_lost = moment == "answered" or (moment == "written" and cuts)
        with pytest.raises((TransactionError, UnknownMessageError)) if is_lost else nullcontext():
            transaction.vote()
            router.destinations()
            transaction.commit()
        assert ready(router, "done") == ([] if is_lost else [b"t"])
        assert bodies(router) == ([b"1", b"2", b"3"] if is_lost else [b"2", b"3"])
        assert router.in_doubt() == []


@pytest.mark.parametrize("end", ["commit", "rollback", "savepoint"])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("lease", [None, 0.3])
def test_the_time_of_a_lease_stops_once_a_transaction_has_claimed_it(
    striking: Striking, lease: float | None, dies: bool, end: str
) -> None:
    """Of the store's own leases, and of those that the receiver asks for. At the next owner too."""
    options = {} if lease else {"lease_timeout": 0.3}
    striking.configure(anabranch.StoreConfig("rest", [">"], kind="journal", options=options))
    with striking.client() as router:
        queue = router.queue("q")
        queue.send_many([b"1", b"2"])
        message = queue.receive(lease=lease)
        assert message is not None
        transaction = router.transaction()
        before = transaction.savepoint()
        transaction.ack(message)
        if dies:
            striking.kill()
        time.sleep(1.0)
        assert [one.body for one in queue.receive_many(9)] == [b"2"]
        {"commit": transaction.commit, "rollback": transaction.rollback, "savepoint": before.rollback}[end]()
        assert [one.body for one in queue.receive_many(9)] == ([] if end == "commit" else [b"1"])


# What waits


def test_a_receive_that_waits_goes_on_at_the_next_owner(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        striking.aim("waiting", Op.RECEIVE)
        with Parallel(lambda: take(router.queue("q"), PATIENCE)) as waiting:
            striking.died()
            other.queue("q").send(b"x")
            taken = waiting.result()
        assert (taken.body, taken.deliveries) == (b"x", 1)
        taken.ack()
        assert bodies(other) == []


def test_an_owner_that_leaves_before_it_has_greeted_has_ended(striking: Striking) -> None:
    """It tells all who have connected that it leaves, whether or not it has read what they have sent."""
    with anabranch.open(striking.source):
        pass  # a data directory
    listening, identity = bound(striking.directory, 1)

    def leave() -> None:
        sock, _ = listening.accept()
        sock.recv(1)
        listening.close()
        remove(striking.directory, identity)
        sock.sendall(pack(0, None, None))
        sock.close()

    with Parallel(leave) as leaving, striking.client() as router:
        leaving.result()
        router.queue("q").send(b"x")
        assert bodies(router) == [b"x"]


def test_who_asks_while_another_thread_connects_reads_on_at_once(
    striking: Striking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that watches for the end of a link has found it, and reads no more once it has connected."""
    monkeypatch.setattr(connection, "LOOK_SECONDS", 3600.0)
    with striking.client() as router:
        router.queue("q").send(b"1")
        greeter = connection_of(router)._greeter
        connects, may_connect, connect = threading.Event(), threading.Event(), greeter.connect

        def slow_connect(exchange: Any) -> Any:
            connects.set()
            assert may_connect.wait(PATIENCE)
            return connect(exchange)

        monkeypatch.setattr(greeter, "connect", slow_connect)
        os.kill(striking.owners[-1].pid or 0, signal.SIGKILL)
        assert connects.wait(PATIENCE)
        with Parallel(lambda: router.queue("q").send(b"2")) as sending:
            eventually(lambda: any(asked.lock for asked in connection_of(router)._unanswered.values()))
            may_connect.set()
            sending.result()
        assert bodies(router) == [b"1", b"2"]


def test_threads_that_wait_while_another_reads_look_ever_less_often(
    striking: Striking, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[int]()

    def look(*given: Any) -> Any:
        looks.append(threading.get_ident())
        return unless_busy(*given)

    with striking.client() as router:
        unanswered = connection_of(router)._unanswered
        with Parallel(lambda: take(router.queue("q"), PATIENCE)) as reading:
            eventually(lambda: len(unanswered) == 1)
            monkeypatch.setattr(connection, "LOOK_SECONDS", 0.001)
            monkeypatch.setattr(connection, "unless_busy", look)
            with Parallel(lambda: take(router.queue("q"), PATIENCE)) as waiting:
                eventually(lambda: any(asked.lock for asked in unanswered.values()))
                time.sleep(0.3)
                assert len(looks) < 30
                router.queue("q").send_many([b"1", b"2"])
                assert {reading.result().body, waiting.result().body} == {b"1", b"2"}


def test_a_value_that_is_waited_for_is_seen_at_the_next_owner(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        striking.aim("waiting", Op.CALL, "map_wait")
        with Parallel(lambda: router.map("m").wait("k", timeout=PATIENCE)) as waiting:
            striking.died()
            other.map("m").put("k", b"v")
            assert waiting.result() == b"v"


def test_what_waits_while_owners_die_waits_no_longer_than_it_was_to(striking: Striking) -> None:
    """Here each owner dies within half of the time."""
    stores(striking, "journal")
    ended = threading.Event()
    with striking.client() as router, striking.client() as other:

        def wait_for_all() -> list[Any]:
            waits = [
                lambda: router.queue("q").receive(2.0),
                lambda: router.receive("q*", 2.0),
                lambda: router.map("m").wait("k", timeout=2.0),
            ]
            try:
                with ThreadPoolExecutor(len(waits)) as pool:
                    return [one.result() for one in [pool.submit(one) for one in waits]]
            finally:
                ended.set()

        with Parallel(wait_for_all) as waiting:
            for _ in range(10):
                other.queue("q").depth()  # so an owner serves, that has been asked again
                if ended.wait(1.0):
                    break
                striking.kill()
            assert ended.is_set()
            assert waiting.result() == [None, None, None]


def test_each_queue_that_expires_when_idle_is_told_to_the_next_owner(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router:
        for name in ("a", "b"):
            router.queue(name, expires_when_idle=1.0).declare()
        striking.kill()
        assert [str(one) for one in router.destinations()] == ["queue://a", "queue://b"]
        eventually(lambda: not router.destinations(), router.destinations)


# What is held


def test_a_client_that_asks_for_nothing_keeps_what_it_holds(striking: Striking) -> None:
    """It reads nothing, and tells the next owner all the same: the other, who waits, gets the second message."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        message = _holding(router)
        striking.kill()
        time.sleep(clients.GRACE_SECONDS + 0.5)
        assert take(other.queue("q"), PATIENCE).body == b"2"
        message.ack()
        assert bodies(other) == [b"2", b"3"]


def test_what_another_holds_by_now_is_not_acked(striking: Striking) -> None:
    """The owner died while a client was stopped, whose message went to another."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        message = _holding(router)
        with connection_of(router)._reading:  # it is stopped, as far as the owner sees
            striking.kill()
            again = take(other.queue("q"), PATIENCE)
            assert again.body == b"1"
        with pytest.raises(UnknownMessageError, match="its store was opened anew since, by the next process"):
            message.ack()
        again.release()
        assert ready(other) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("moment", ["before", "written"])
@pytest.mark.parametrize("how", ["send", "send_nowait", "commit", "ack"])
def test_a_call_whose_owner_dies_and_that_none_follows(
    striking: Striking, monkeypatch: pytest.MonkeyPatch, how: str, moment: str
) -> None:
    """Nobody can be asked about it: who is told that it failed would do it once more."""
    stores(striking, "journal")
    with striking.client() as router:
        message = _holding(router)
        striking.aim(moment, Op.COMMIT if how == "commit" else Op.ACK if how == "ack" else Op.SEND)
        with monkeypatch.context() as patches:
            patches.setattr(starting, "_tell_start", _refuse)
            with pytest.raises(OutcomeUnknownError, match=r"yaml:1: a slip\. What was asked before"):
                if how == "commit":
                    _commit(router, message, ("done", b"t"))
                elif how == "ack":
                    message.ack()
                else:
                    sent = getattr(router.queue("done"), how)(b"t")
                    sent.result(PATIENCE)
            with pytest.raises(ConfigError, match=r"a slip$"):
                router.queue("done").depth()
        del message
        is_done = moment == "written"
        assert bodies(router, "done") == ([b"t"] if is_done and how != "ack" else [])
        left = [b"2", b"3"] if is_done and how in ("commit", "ack") else [b"1", b"2", b"3"]
        assert bodies(router) == left
        if how == "commit":
            eventually(lambda: router.queue("q").counts().leased == 0, lambda: "it is held still")
            assert ready(router) == left


def _refuse(config: anabranch.Config) -> None:
    raise ConfigError(["stores.yaml:1: a slip"])


def test_what_a_dead_client_held_goes_to_its_old_places(striking: Striking) -> None:
    """Both die: the client first."""
    stores(striking, "journal")
    with striking.client() as router:
        queue = router.queue("q")
        queue.send_many([b"1", b"2", b"3"])
        process = CONTEXT.Process(target=_hold, args=(striking.source, held := CONTEXT.Event()))
        process.start()
        assert held.wait(PATIENCE)
        assert queue.depth() == 3 and ready(router) == []
        process.kill()
        process.join(PATIENCE)
        messages = [take(queue, PATIENCE) for _ in range(3)]
        assert [message.body for message in messages] == [b"1", b"2", b"3"]


def _hold(source: Any, held: Any) -> None:
    with anabranch.open(source, shared=True) as router:
        messages = router.queue("q").receive_many(3)
        assert len(messages) == 3
        held.set()
        time.sleep(PATIENCE)


def test_the_newest_is_received_from_the_next_owner(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router:
        router.queue("q").send_many([b"1", b"2", b"3"])
        striking.aim("written", Op.RECEIVE)
        message = router.queue("q").receive(newest=True)
        assert message is not None and message.body == b"3"
        striking.died()
        assert ready(router) == [b"1", b"2"]
        message.ack()


@pytest.mark.parametrize(("kind", "message_id"), [("journal", None), ("sqlite", "id")])
@pytest.mark.parametrize(("moment", "cuts"), [*((moment, False) for moment in MOMENTS), ("written", True)])
def test_a_message_is_leased_to_its_sender_by_the_next_owner(
    striking: Striking, kind: str, message_id: str | None, moment: str, cuts: bool
) -> None:
    """Stored once; and nobody else has it, whichever owner stored it."""
    stores(striking, kind)
    with striking.client() as router:
        queue = router.queue("q")
        queue.send(b"0")
        striking.aim(moment, Op.CALL, "send_leased", cuts=cuts)
        message = queue.send_leased(b"1", message_id=message_id, lease=PATIENCE)
        assert message is not None and (message.body, message.message_id) == (b"1", message_id)
        if moment == "answered":
            bodies(router)  # by which the client hears of it
        if not cuts:
            striking.died()
        assert ready(router) == [b"0"] and bodies(router) == [b"0", b"1"]
        if message_id is not None:
            assert queue.send_leased(b"2", message_id="id") is None
        message.release()
        assert take(queue).deliveries == 2


def test_one_of_a_sender_that_others_have_received_since_is_not_leased_to_it(striking: Striking) -> None:
    """The next owner may hand it to who waits before it is asked again."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        received = router.queue("q").send_leased(b"0")
        assert received is not None
        with Parallel(lambda: other.queue("q").receive(PATIENCE)) as waiting:
            eventually(lambda: router.stats().stores["rest"].waiting == 1)
            striking.aim("written", Op.CALL, "send_leased")
            try:
                message = router.queue("q").send_leased(b"1")
            except OutcomeUnknownError as error:
                assert "the message is stored, and could not be leased to its sender" in str(error)
                message = None
            striking.died()
            assert bodies(router) == [b"0", b"1"]
            if message is not None:
                assert message.body == b"1" and ready(router) == []
                message.release()
            got = waiting.result()
            assert got is not None and got.body == b"1"
        received.ack()
        got.ack()
        assert bodies(router) == []


def test_a_rejection_goes_again_with_its_commit(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router:
        router.queue("q").send_many([b"1", b"2"])
        striking.aim("written", Op.COMMIT)
        with router.transaction() as transaction:
            transaction.reject(take(router.queue("q")), ValueError("it does not parse"))
            transaction.send("done", b"x")
        striking.died()
        (letter,) = router.queue("q").dead_letters()
        assert (letter.message.body, letter.error_text) == (b"1", "it does not parse")
        (receipt,), (done,) = transaction.receipts, router.queue("done").browse()
        assert receipt.seq in (0, done.seq) and (ready(router), done.body) == ([b"2"], b"x")


# Listeners


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("moment", [*MOMENTS, "waiting"])
@pytest.mark.parametrize("op", [Op.LISTEN, Op.CREDIT, Op.ACK])
def test_a_listener_holds_no_more_than_its_credit(striking: Striking, op: Op, moment: str, cuts: bool) -> None:
    """Whatever is under way when it has to begin again: itself, more credit, or an ack."""
    if moment == "waiting" and cuts:
        return
    stores(striking, "journal")
    taken: Queue[anabranch.Message[bytes]] = Queue()
    with striking.client() as router, striking.client() as other:
        queue = router.queue("q")
        queue.send_many([b"%d" % n for n in range(9)])
        if op == Op.LISTEN:
            striking.aim(moment, op, cuts=cuts)
        listener = queue.listen(taken.put, credit=2)
        if op != Op.LISTEN:
            striking.aim(moment, op, cuts=cuts)
        messages = [taken.get(timeout=PATIENCE) for _ in range(2)]
        if op == Op.ACK:
            messages.pop(0).ack()
        listener.add_credit(1)
        messages.append(taken.get(timeout=PATIENCE))
        time.sleep(0.1)
        assert taken.empty()
        held = len(messages)
        assert [message.body for message in messages] == [b"%d" % n for n in range(3 - held, 3)]
        assert ready(other) == [b"%d" % n for n in range(3, 9)]
        listener.close()
        for message in messages:
            message.ack()
        assert other.queue("q").depth() == 6


@pytest.mark.parametrize(("moment", "cuts"), [("before", True), ("written", False), ("answered", False)])
def test_credit_is_withdrawn_once(striking: Striking, moment: str, cuts: bool) -> None:
    """Whichever owner takes it back: the next one is told of what is left."""
    stores(striking, "journal")
    taken: Queue[anabranch.Message[bytes]] = Queue()
    with striking.client() as router:
        queue = router.queue("q")
        listener = queue.listen(taken.put, credit=5)
        striking.aim(moment, Op.CALL, "withdraw_credit", cuts=cuts)
        assert listener.withdraw_credit(3) == 3
        router.destinations()
        queue.send_many([b"1", b"2", b"3"])
        for body in (b"1", b"2"):
            assert taken.get(timeout=PATIENCE).body == body
        assert (listener.withdraw_credit(1), take(queue).body, taken.empty()) == (0, b"3", True)


def test_a_listener_of_many_queues_goes_on_with_its_credit(striking: Striking) -> None:
    """Also with a queue that comes at the next owner."""
    stores(striking, "journal")
    taken: Queue[anabranch.Message[bytes]] = Queue()
    with striking.client() as router:
        listener = router.listen(["q", "other.*"], taken.put, credit=4)
        router.send("q,other.a", b"1")
        held = [taken.get(timeout=PATIENCE) for _ in range(2)]
        striking.kill()
        router.queue("other.b").send_many([b"2", b"3", b"4"])
        assert [taken.get(timeout=PATIENCE).body for _ in range(2)] == [b"2", b"3"]
        assert (listener.withdraw_credit(1), take(router.queue("other.b")).body) == (0, b"4")
        router.ack(held)
        listener.add_credit(1)
        listener.close()
        router.queue("q").send(b"5")
        assert ready(router) == [b"5"] and taken.empty()


def test_a_listener_that_the_next_owner_refuses_is_told(striking: Striking) -> None:
    """Its subscription was removed while its process was stopped, and the owner died."""
    stores(striking, "journal")
    with striking.client() as router:
        said = CONTEXT.Queue()
        process = CONTEXT.Process(target=_listen, args=(striking.source, said))
        process.start()
        assert said.get(timeout=PATIENCE) == "listens"
        stopped(process.pid or 0)
        striking.kill()
        router.topic("t").subscribe("s").unsubscribe()
        os.kill(process.pid or 0, signal.SIGCONT)
        assert said.get(timeout=PATIENCE) == "UnknownSubscriptionError"
        process.join(PATIENCE)


def _listen(source: Any, said: Any) -> None:
    with anabranch.open(source, shared=True) as router:
        ended: Queue[Exception] = Queue()
        subscription = router.topic("t").subscribe("s")
        kept = router.queue("q").listen(lambda message: message.ack(), on_end=ended.put)
        subscription.listen(lambda message: message.ack(), on_end=ended.put)
        said.put("listens")
        said.put(type(ended.get(timeout=PATIENCE)).__name__)
        kept.close()
        assert ended.empty()


# A destination that moves


def test_who_browses_a_destination_that_has_moved_is_told(striking: Striking, tmp_path: Path) -> None:
    """As who has the directory for himself is."""
    stores(striking, "journal")
    file = tmp_path / "stores.yaml"
    file.write_text(
        f"directory: {striking.directory}\nstores:\n"
        "  - {name: rest, match: ['>'], journal: {dead_letter: dead}}\n"
        "  - {name: other, match: ['queue://other.>', 'queue://q'], journal: {}}\n"
    )
    with striking.client() as router:
        queue = router.queue("q")
        queue.send_many([b"%d" % n for n in range(600)])
        browsed = queue.browse()
        last = next(browsed)
        held = take(queue)
        assert len(list(queue.browse(after=held))) == len(list(queue.browse(after=last))) == 599
        router.repartition(file)
        with pytest.raises(ClosedError, match="queue://q has moved to another store since"):
            list(browsed)
        for one in (last, held):
            with pytest.raises(ClosedError, match="has moved to another store"):
                list(queue.browse(after=one))
        assert [int(message.body) for message in queue.browse()] == list(range(600))
        held.ack()


# A memory store


def test_what_a_memory_store_had_dies_with_its_owner_and_no_call_hangs(striking: Striking) -> None:
    """What is under way is done in the next one, and what was acked there stays acked."""
    stores(striking, "memory")
    with striking.client() as router:
        held = _holding(router)
        striking.aim("written", Op.SEND)
        receipt = router.queue("q").send(b"x")
        assert not receipt.duplicate and bodies(router) == [b"x"]
        held.ack()
        striking.aim("waiting", Op.RECEIVE)
        with Parallel(lambda: take(router.queue("late"), PATIENCE)) as waiting:
            striking.died()
            assert bodies(router) == []
            router.queue("late").send(b"y")
            assert waiting.result().body == b"y"


@pytest.mark.parametrize(
    "moment", ["written", *(pytest.param(one, marks=pytest.mark.campaign) for one in ("before", "answered"))]
)
@pytest.mark.parametrize("name", [name for name in CASES if name != "receive, waiting"])  # which waits for its end
def test_a_call_to_a_memory_store_ends(striking: Striking, name: str, moment: str) -> None:
    """With a result, or an error of ours, and with nothing twice."""
    case = CASES[name]
    stores(striking, "memory")
    with striking.client() as router:
        given = case.prepare(router)
        striking.aim(moment, case.op, case.name)
        with suppress(anabranch.AnabranchError):
            case.call(router, given)
        striking.died()
        for queue in ("q", "done", "other.done"):
            found = bodies(router, queue)
            assert len(found) == len(set(found))


# All of it at random


@pytest.mark.parametrize(
    "kind", ["journal", *(pytest.param(kind, marks=pytest.mark.campaign, id=f"{kind}-whole") for kind in KINDS)]
)
@pytest.mark.weight(3)
def test_kills_of_owners_and_clients_lose_nothing_and_double_nothing(tmp_path: Path, kind: str, budget: Share) -> None:
    budget.run(
        "tests.sharing.workers", "--rounds", str(budget.count(1, 1000)), "--kind", kind, "--directory", str(tmp_path)
    )
    assert " 0 wrong" in budget.counts[0]
