"""Topics of a shared store, whose subscriptions several routers make, end, send to and receive for at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DELIVERY_LIMIT, EXPIRED, Message, Outgoing
from anabranch.adapters.core.store_types import Change, Settlement
from anabranch.adapters.sql.shared import topics
from anabranch.adapters.sql.shared.waiting import Waiting
from anabranch.policies.errors import (
    AnabranchError,
    ConfigError,
    PlacementError,
    StoreFailedError,
    SubscriptionError,
    TransactionError,
    UnknownMessageError,
    UnknownSubscriptionError,
)
from anabranch.router.offline.repartition import repartition

from ..contract.changing import prepare
from ..contract.disk import PATIENCE, A, Parallel, T, assert_whole, bodies, drain, eventually, take
from ..contract.expiring import undelivered
from ..contract.preparing import to
from ..contract.topics import BOOK, DESK, U, offline, subscribed, take_for
from .shared import SharedDisk, SharedTables, shared_tables

ROUNDS = 20
"""How often two meet that may come in either order."""


sets = pytest.fixture(scope="module")(shared_tables)


@pytest.fixture
def disk(tmp_path: Path, sets: SharedTables) -> Iterator[SharedDisk]:
    with SharedDisk(tmp_path, sets) as disk:
        yield disk


@pytest.fixture
def routers(disk: SharedDisk) -> tuple[Store, Store]:
    """Two of them over the same tables."""
    one = disk.create()
    return one, disk.beside(one)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Begin calls at the same moment; return what each returned, or raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        try:
            return call()
        except AnabranchError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(run, call) for call in calls]]


# Who sees what ------------------------------------------------------------------------------------------------------


def test_what_one_subscribes_the_other_sends_to_at_once(routers: tuple[Store, Store]) -> None:
    one, other = routers
    other.send(T, b"to nobody")  # it knows the topic from now on
    for subscription in (DESK, BOOK):
        assert one.subscribe(subscription)
        assert subscription in other.subscriptions()
        assert not other.subscribe(subscription)
        other.send(T, subscription.name.encode())
    assert offline(one) == {DESK.key: [b"desk", b"book"], BOOK.key: [b"book"]}
    one.unsubscribe(T, DESK.key)
    other.send_many(T, [b"1", b"2"])
    other.commit([(T, Outgoing(b"3"))], [])
    assert offline(one) == {BOOK.key: [b"book", b"1", b"2", b"3"]}
    assert list(other.subscriptions()) == [BOOK]
    assert_whole(one)


def test_each_message_goes_to_one_router_of_each_subscription(routers: tuple[Store, Store]) -> None:
    subscribed(routers[0])
    for n in range(20):
        routers[n % 2].send(T, str(n).encode())
    found: dict[Any, list[bytes]] = {DESK.key: [], BOOK.key: []}
    for n in range(40):
        key = (DESK, BOOK)[n // 2 % 2].key
        message = take(routers[n % 2], T, 0, key)
        found[key].append(message.body)
        message.ack()
    assert found == {key: [str(n).encode() for n in range(20)] for key in found}
    assert (routers[1].depth(T), routers[1].stats().messages) == (0, 0)


def test_who_waits_hears_of_what_the_other_sends(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one)
    heard = SimpleQueue[Message]()
    one.listen(T, heard.put, 9, BOOK.key)
    with Parallel(lambda: one.receive(T, None, DESK.key)) as receiver:
        eventually(lambda: one.stats().waiting == 2)
        other.send(T, b"1", None, "id")
        assert receiver.result().body == heard.get(timeout=PATIENCE).body == b"1"


def test_a_token_settles_a_message_from_another_router(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one)
    one.send(T, b"1")
    token = one.token(take(one, T, 0, DESK.key))
    assert (other.leased(token).subscription, other.leased(token).destination) == (DESK.key, T)
    assert other.settle([token], Settlement.ACK) == [None]
    assert offline(other) == {DESK.key: [], BOOK.key: [b"1"]}


@pytest.mark.parametrize("how", ["ack", "settle", "commit", "prepare", "release"])
def test_a_message_that_is_held_for_one_subscription_only_is_settled_for_that_alone(
    routers: tuple[Store, Store], how: str
) -> None:
    """Both have it under one id."""
    one, other = routers
    subscribed(one)
    one.send(T, b"1")
    messages = [take(one, T, 0, key) for key in (DESK.key, BOOK.key)]
    tokens = [one.token(message) for message in messages]
    if how in ("commit", "prepare"):
        for message in messages:
            one.claim(message)
    assert other.settle(tokens[1:], Settlement.RELEASE) == [None]
    if how == "settle":
        first, second = one.settle(tokens, Settlement.ACK)
        assert first is None and isinstance(second, UnknownMessageError)
        assert offline(other) == {DESK.key: [], BOOK.key: [b"1"]}
        return
    calls: dict[str, Callable[[], object]] = {
        "ack": lambda: one.ack(messages), "commit": lambda: one.commit([], messages),
        "prepare": lambda: prepare(one, 1, [], messages), "release": lambda: one.release(messages),
    }  # fmt: skip
    with pytest.raises(UnknownMessageError):
        calls[how]()
    assert offline(other) == {DESK.key: [b"1"], BOOK.key: [b"1"]}
    assert_whole(one)


# Both at once -------------------------------------------------------------------------------------------------------


def test_two_that_subscribe_the_same_at_once(routers: tuple[Store, Store]) -> None:
    one, other = routers
    for n in range(ROUNDS):
        name = DESK._replace(name=f"desk {n}", topic=T if n % 2 else U)
        assert sorted(at_once(lambda: one.subscribe(name), lambda: other.subscribe(name))) == [False, True]  # noqa: B023
        assert [s for s in one.subscriptions() if s.name == name.name] == [name]
        name = name._replace(name=f"book {n}")
        found = at_once(lambda: one.subscribe(name), lambda: other.subscribe(name._replace(no_local=True)))  # noqa: B023
        assert {type(result) for result in found} == {bool, SubscriptionError}
    assert_whole(one)


def test_two_that_unsubscribe_the_same_at_once(routers: tuple[Store, Store]) -> None:
    one, other = routers
    for _ in range(ROUNDS):
        subscribed(one, DESK)
        other.send(T, b"1")
        found = at_once(lambda: one.unsubscribe(T, DESK.key), lambda: other.unsubscribe(T, DESK.key))
        assert {type(result) for result in found} == {int, UnknownSubscriptionError}
        assert 1 in found
    assert_whole(one)


@pytest.mark.parametrize("how", ["one by one", "named", "many", "commit"])
def test_a_retroactive_one_misses_nothing_that_is_just_being_sent(routers: tuple[Store, Store], how: str) -> None:
    """Whatever is sent while it begins is held already, or comes behind it (rule Q17)."""
    one, other = routers
    subscribed(one, DESK)
    stop = threading.Event()
    sent: list[bytes] = []

    def send() -> None:
        while not stop.is_set():
            some = [str(len(sent) + n).encode() for n in range(3)]
            if how == "many":
                other.send_many(T, some)
            elif how == "commit":
                other.commit([(T, Outgoing(body)) for body in some], [])
            else:
                for body in some:
                    other.send(T, body, None, body.decode() if how == "named" else None)
            sent.extend(some)

    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        try:
            for n in range(ROUNDS):
                so_far = len(sent)
                eventually(lambda: len(sent) > so_far)  # noqa: B023
                assert one.subscribe(BOOK._replace(name=f"book {n}"), retroactive=True)
        finally:
            stop.set()
        sender.result(PATIENCE)
    for key, found in offline(one).items():
        assert (key, sorted(found, key=int)) == (key, sent)
    assert_whole(one)


def test_nothing_is_left_to_one_that_ends_while_others_send(routers: tuple[Store, Store]) -> None:
    """Nor to a topic that is deleted: what is sent comes before that, or goes to nobody."""
    one, other = routers
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            assert other.send(T, b"1").seq
            other.send_many(T, [b"2", b"3"])
            other.commit([(A, Outgoing(b"a")), (T, Outgoing(b"4"))], [])

    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        try:
            for n in range(ROUNDS):
                subscribed(one)
                eventually(lambda: one.depth(T, DESK.key))
                one.delete(T) if n % 2 else [one.unsubscribe(T, key) for key in (DESK.key, BOOK.key)]
                assert one.subscriptions() == []
        finally:
            stop.set()
        sender.result(PATIENCE)
    assert (one.depth(T), list(one.take_undelivered())) == (0, [])
    assert_whole(one)


# What ends while another one holds of it ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["unsubscribed", "deleted"])
def test_what_another_one_has_leased_is_not_leased_any_more(routers: tuple[Store, Store], how: str) -> None:
    one, other = routers
    subscribed(one)
    one.send_many(T, [b"1", b"2", b"3"])
    held = take_for(other, DESK, 2)
    token = other.token(held[0])
    gone = one.unsubscribe(T, DESK.key) if how == "unsubscribed" else one.delete(T)
    assert gone == 3
    for settle in (held[0].ack, held[1].release):
        with pytest.raises(UnknownMessageError):
            settle()
    assert isinstance(other.settle([token], Settlement.ACK)[0], UnknownMessageError)
    with pytest.raises(UnknownSubscriptionError):
        other.receive(T, 0, DESK.key)
    with pytest.raises(UnknownSubscriptionError):
        other.depth(T, DESK.key)
    assert other.stats().leased == 0
    assert_whole(one)


def test_who_waits_in_another_one_is_told(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one)
    ended = SimpleQueue[Exception]()
    other.listen(T, print, 1, BOOK.key, ended.put)
    with Parallel(lambda: other.receive(T, None, DESK.key)) as receiver:
        eventually(lambda: other.stats().waiting == 2)
        one.delete(T)
        with pytest.raises(UnknownSubscriptionError):
            receiver.result()
        assert isinstance(ended.get(timeout=PATIENCE), UnknownSubscriptionError)
    assert other.stats().waiting == 0


def test_one_that_has_begun_anew_elsewhere_is_another(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one, DESK)
    other.send(T, b"old")
    old = take(other, T, 0, DESK.key)
    one.unsubscribe(T, DESK.key)
    subscribed(one, DESK)
    other.send(T, b"new")
    with pytest.raises(UnknownMessageError):
        old.ack()
    assert drain(other, T, DESK.key) == [b"new"]


def test_a_transaction_of_another_one_that_comes_too_late_does_nothing(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one)
    one.send(T, b"1")
    message = take(other, T, 0, DESK.key)
    other.claim(message)
    one.unsubscribe(T, DESK.key)
    with pytest.raises(UnknownMessageError):
        other.commit([(A, Outgoing(b"a")), (T, Outgoing(b"2"))], [message])
    assert (bodies(one), offline(one)) == ([], {BOOK.key: [b"1"]})


def test_what_another_one_has_prepared_keeps_its_subscription(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one)
    one.send(T, b"1")
    message = take(other, T, 0, DESK.key)
    other.claim(message)
    name = prepare(other, 1, to(T, b"2"), [message], changes=[Change(DESK, False)])
    with pytest.raises(TransactionError, match="claimed"):
        one.unsubscribe(T, DESK.key)
    with pytest.raises(TransactionError, match="claimed"):
        one.delete(T)
    with Parallel(lambda: one.receive(T, None, DESK.key)) as receiver:
        eventually(lambda: one.stats().waiting == 1)
        other.commit_prepared(name).wait()
        with pytest.raises(UnknownSubscriptionError):
            receiver.result()
    assert offline(one) == {BOOK.key: [b"1", b"2"]}
    assert_whole(one)


def test_a_topic_that_another_one_has_deleted_is_sent_to(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(other, DESK)
    other.send(T, b"1", None, "id")
    assert one.delete(T) == 1
    assert not other.send(T, b"2", None, "id").duplicate
    assert (other.depth(T), other.find(T, "id")) == (0, None)
    subscribed(other, BOOK)
    one.send(T, b"3")
    assert offline(one) == {BOOK.key: [b"3"]}
    assert T in one.destinations()
    assert_whole(one)


# What is removed by pages ------------------------------------------------------------------------------------------


class Rows:
    """The messages of a store, some of which the database does not let go of."""

    def __init__(self, store: Any, sets: SharedTables, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(topics, "PAGE", 3)
        self._name, self._sets = f"{store.options.schema_prefix}shared_messages", sets
        self.engine = store._database.engine

    def keep(self, body: bytes) -> None:
        self._sets.run([
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''it is to stay''; END'",
            f"CREATE TRIGGER keep BEFORE DELETE ON {self._name} FOR EACH ROW WHEN (OLD.content = '{body.decode()}') "
            "EXECUTE FUNCTION keep()",
        ])  # fmt: skip

    def let_go(self) -> None:
        self._sets.run(["DROP FUNCTION IF EXISTS keep CASCADE"])

    def count(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.exec_driver_sql(f"SELECT count(*) FROM {self._name}").scalar_one())

    @contextmanager
    def locked(self, body: bytes) -> Iterator[None]:
        with self.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")
            connection.exec_driver_sql(f"SELECT 1 FROM {self._name} WHERE content = '{body.decode()}' FOR UPDATE")
            yield
            connection.exec_driver_sql("ROLLBACK")


@pytest.fixture
def rows(routers: tuple[Store, Store], sets: SharedTables, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    rows = Rows(routers[0], sets, monkeypatch)
    yield rows
    rows.let_go()


SENT = [b"%d" % n for n in range(10, 20)]


@pytest.mark.parametrize("how", ["unsubscribed", "deleted", "committed"])
def test_what_was_cut_off_between_pages_is_gone_and_another_removes_the_rest(
    routers: tuple[Store, Store], rows: Rows, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the other has not heard yet that it has ended."""
    monkeypatch.setattr(Waiting, "_heard", lambda *_: None)
    one, other = routers
    subscribed(one, DESK)
    one.send_many(T, [Outgoing(body, expires_at_ms=int(body == b"18")) for body in SENT])
    held = take(other, T, 0, DESK.key)
    rows.keep(b"17")
    if how == "committed":
        one.commit([], [], changes=[Change(DESK, False)])
    else:
        assert (one.unsubscribe(T, DESK.key) if how == "unsubscribed" else one.delete(T)) == 6
    assert rows.count() == 4
    for store in routers:
        with pytest.raises(UnknownSubscriptionError):
            store.receive(T, 0, DESK.key)
        assert (store.depth(T), store.stats().messages, store.stats().leased) == (0, 0, 0)
    with pytest.raises(UnknownMessageError):
        held.ack()
    subscribed(other, BOOK)
    assert one.subscribe(DESK, retroactive=True)
    assert offline(one) == {DESK.key: [], BOOK.key: []}
    assert_whole(one)
    rows.let_go()
    other.send(T, b"new")
    assert list(other.take_undelivered()) == []
    assert (rows.count(), offline(one)) == (2, {DESK.key: [b"new"], BOOK.key: [b"new"]})


def test_others_send_while_one_removes(routers: tuple[Store, Store], rows: Rows) -> None:
    one, other = routers
    subscribed(one)
    one.send_many(T, SENT)
    with ThreadPoolExecutor(1) as pool:
        with rows.locked(b"15"):
            removing = pool.submit(one.unsubscribe, T, DESK.key)
            eventually(lambda: one.subscriptions() == [BOOK])
            other.send(T, b"new")
            assert offline(other) == {BOOK.key: [*SENT, b"new"]}
            assert list(one.take_undelivered()) == []  # it leaves that to the call
        assert removing.result(PATIENCE) == len(SENT)
    assert rows.count() == len(SENT) + 1


def test_a_delete_of_a_queue_that_is_cut_off_is_done_again(routers: tuple[Store, Store], rows: Rows) -> None:
    one, other = routers
    one.send_many(A, SENT)
    rows.keep(b"17")
    with pytest.raises(StoreFailedError, match="it is to stay"):
        one.delete(A)
    assert bodies(other) == SENT[6:]
    rows.let_go()
    assert (other.delete(A), rows.count()) == (4, 0)
    assert A not in one.destinations()


# What is not delivered ----------------------------------------------------------------------------------------------


def test_what_has_expired_is_taken_by_one_router_for_all_subscriptions(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one)
    for _ in range(ROUNDS):
        one.send_many(T, [Outgoing(b"1", expires_at_ms=1), Outgoing(b"2", expires_at_ms=1)])
        found = [lost for some in at_once(lambda: undelivered(one), lambda: undelivered(other)) for lost in some]
        assert sorted((m.body, m.destination, m.subscription, why) for m, why in found) == [
            (b"1", T, None, EXPIRED), (b"2", T, None, EXPIRED),
        ]  # fmt: skip
        assert (one.depth(T), one.stats().leased) == (2, 2)
        for message, _ in found:
            message.ack()
        assert (one.depth(T), one.depth(T, DESK.key), undelivered(other)) == (0, 0, [])
    assert_whole(one)


def test_what_has_expired_waits_for_who_holds_it(routers: tuple[Store, Store]) -> None:
    one, other = routers
    subscribed(one)
    one.send(T, b"1", expires_at_ms=1)
    seq = next(one.browse(T)).seq
    token = other.lease_again(T, seq, DESK.key)
    assert token is not None and undelivered(one) == []
    assert other.settle([token], Settlement.RELEASE) == [None]
    ((message, _),) = undelivered(one)
    one.release([message])
    ((message, _),) = undelivered(other)  # it stays for all of them at once
    message.ack()
    assert (one.depth(T), one.depth(T, BOOK.key)) == (0, 0)
    assert_whole(one)


def test_the_delivery_limit_is_each_subscriptions_own(disk: SharedDisk) -> None:
    one = disk.create(max_deliveries=1, dead_letter="dlq")
    other = disk.beside(one)
    subscribed(one)
    one.send(T, b"1")
    take(other, T, 0, BOOK.key).release()
    ((message, reason),) = undelivered(one)
    assert (message.subscription, reason) == (BOOK.key, DELIVERY_LIMIT)
    message.ack()
    assert offline(other) == {DESK.key: [b"1"], BOOK.key: []}


# Routers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path, postgres_url: str) -> Iterator[tuple[anabranch.Router, anabranch.Router]]:
    """Two routers with a journal each, and a store that they share for all queues and topics."""
    options = {"url": postgres_url, "pool_min": 0, "shared": True, "max_deliveries": 1, "dead_letter": "dlq"}
    configs = [
        anabranch.Config(
            tmp_path / name,
            [
                anabranch.StoreConfig("own", ["own.>"], kind="journal"),
                anabranch.StoreConfig("all", ["queue://>", "topic://>"], kind="sql", options=options),
            ],
        )
        for name in "ab"
    ]
    with anabranch.open(configs[0]) as one, anabranch.open(configs[1]) as other:
        yield one, other


def test_a_transaction_over_a_topic_and_a_journal(pair: tuple[anabranch.Router, anabranch.Router]) -> None:
    one, other = pair
    desk = one.topic("t").subscribe("desk")
    other.topic("t").send(b"1")
    message = desk.receive()
    assert message is not None
    with one.transaction() as transaction:
        transaction.ack(message)
        transaction.send("own.q", message.body)
        transaction.send("topic://t", b"2")
        transaction.subscribe("topic://t", "book", retroactive=True)
    assert [m.body for m in one.queue("own.q").browse()] == [b"1"]
    assert [[m.body for m in s.browse()] for s in other.topic("t").subscriptions()] == [[b"1", b"2"], [b"2"]]


def test_what_a_subscription_gives_up_and_takes_back(pair: tuple[anabranch.Router, anabranch.Router]) -> None:
    one, other = pair
    desk, book = (one.topic("t").subscribe(name) for name in ("desk", "book"))
    other.topic("t").send(b"x")
    received = other.topic("t").subscribe("desk").receive()
    assert received is not None
    received.release()
    dead = one.queue("dlq")
    eventually(lambda: dead.depth() == 1)
    eventually(lambda: (desk.depth(), book.depth()) == (0, 1))
    letter = next(dead.browse())
    assert letter.headers["dead_letter_subscription"] == "desk"
    assert one.requeue("dlq") == 1
    assert (desk.depth(), dead.depth()) == (1, 0)


def test_what_expires_is_dead_once(pair: tuple[anabranch.Router, anabranch.Router]) -> None:
    one, other = pair
    desk, book = (one.topic("t").subscribe(name) for name in ("desk", "book"))
    other.topic("t").send(b"x", expires_in=0.001)
    eventually(lambda: (one.queue("dlq").depth(), desk.depth(), book.depth()) == (1, 0, 0))
    assert next(other.queue("dlq").browse()).headers["dead_letter_reason"] == "expired"


def test_a_shared_store_takes_no_maps(tmp_path: Path) -> None:
    for pattern in ("map://a.>", "a.>"):
        with pytest.raises(ConfigError, match=r"takes maps.*write queue://a\.> and topic://a\.>"):
            options = {"url": "postgresql+psycopg://app@db/app", "shared": True}
            anabranch.Config(tmp_path, [anabranch.StoreConfig("all", [pattern], kind="sql", options=options)])


def test_a_topic_moves_into_no_shared_store(tmp_path: Path, postgres_url: str) -> None:
    """Nor out of it: it is deleted there, and begins anew."""

    def config(*patterns: str) -> anabranch.Config:
        options = {"url": postgres_url, "pool_min": 0, "shared": True}
        stores = [anabranch.StoreConfig("all", ["queue://all", *patterns], kind="sql", options=options)]
        return anabranch.Config(tmp_path, [*stores, anabranch.StoreConfig("own", [">"])])

    for before, after in ((config(), config("topic://t")), (config("topic://t"), config())):
        with anabranch.open(before) as router:
            desk = router.topic("t").subscribe("desk")
            router.topic("t").send(b"1")
        with pytest.raises(PlacementError, match="topics move neither"):
            repartition(after, before)
        with anabranch.open(before) as router:
            desk = router.topic("t").subscribe("desk")
            assert [message.body for message in desk.browse()] == [b"1"]
            router.topic("t").delete()
        repartition(after, before)
