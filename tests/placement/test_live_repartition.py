"""Destinations move to where a new configuration routes them while they are used (rule J11, invariants 2 and 3)."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy

import anabranch
from anabranch import (
    ClosedError,
    Config,
    ConfigError,
    CorruptionError,
    Counts,
    PlacementError,
    Receipt,
    Settlement,
    StoreConfig,
    StoreFailedError,
    StoreFullError,
    TransactionError,
    UnknownMessageError,
)
from anabranch.adapters.core.migration.live_copy import LiveCopy
from anabranch.adapters.core.service import transactions
from anabranch.adapters.journal import JournalStore
from anabranch.policies.config.fields import Redelivery
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement.on_disk.repartition_progress import NAME

from ..contract.disk import PATIENCE, eventually
from ..contract.leasing import LONG, Lasting
from ..contract.when_full import waiting
from ..crash.traffic import Traffic
from ..journal.test_salvage import flip, place_of
from ..router.disk import drain
from .test_repartition import JOURNAL, KINDS, XID, config, facts, fill, new, old, stores_of


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_there_and_back(tmp_path: Path, source: str, target: str) -> None:
    before, after = old(tmp_path, source), new(tmp_path, target)
    fill(before)
    expected = facts(before)
    told: list[tuple[int, int]] = []
    with anabranch.open(before) as router:
        done = router.repartition(after, lambda *given: told.append(given))
        assert len(done.moves) == 6
        assert done.removed == ("all",)
        assert router.queue("a.x").send(b"", message_id="a.x-0").duplicate
        assert router.queue("emptied").send(b"", message_id="e").duplicate
        router.queue("new").send(b"x")
        router.delete("new")
    assert told == sorted(told) and told[-1] == (60, 60)
    assert facts(after) == expected
    assert stores_of(after) == ["a", "rest", "ticks"]
    with anabranch.open(after) as router:
        router.repartition(before)
        router.repartition(after)
        router.repartition(before)
    assert facts(before) == expected
    assert stores_of(before) == ["all"]


def test_a_token_whose_store_is_removed_when_it_was_just_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message has moved with its lease: it is settled where that is now."""
    before = Config(tmp_path, [StoreConfig("one", [">"], journal=JOURNAL)])
    after = Config(tmp_path, [StoreConfig("other", [">"], journal=JOURNAL)])
    with anabranch.open(before) as router:
        queue = router.queue("q")
        queue.send(b"1")
        message = queue.receive()
        assert message is not None
        token, one = message.token, message._store
        router.repartition(after)
        assert [store.name for store in router._registry.open_stores()] == ["other"]
        find = router._tokens._store
        monkeypatch.setattr(router._tokens, "_store", lambda of: one if of == token else find(of))
        router.settle(token, Settlement.ACK)
        assert queue.counts() == (0, 0, 0, 0)
        with pytest.raises(UnknownMessageError):
            message.ack()


def test_a_store_that_was_not_configured_has_its_options(tmp_path: Path) -> None:
    """It was open, since somebody had looked at all; the others keep those with which they are open."""
    slow = {**JOURNAL, "redelivery": Redelivery(delay=60)}
    other = StoreConfig("other", ["a"], journal=slow)

    def config(journal: dict[str, Any], *more: StoreConfig) -> Config:
        return Config(tmp_path, [*more, StoreConfig("all", [">"], journal=journal)])

    def waits(router: anabranch.Router, name: str) -> bool:
        queue = router.queue(name)
        queue.send(b"1")
        message = queue.receive()
        assert message is not None
        message.release()
        return queue.counts().delayed == 1

    with anabranch.open(config(JOURNAL, other)) as router:
        router.queue("a").send(b"0")
        router.queue("a").delete()  # its store stays, empty
    with anabranch.open(config(JOURNAL)) as router:
        assert not waits(router, "b")
        assert {store.name for store in router._registry.all_stores()} == {"all", "other"}
        router.repartition(config(slow, other))
        assert (waits(router, "a"), waits(router, "b")) == (True, False)


def test_an_empty_queue_goes_and_comes_again(tmp_path: Path) -> None:
    """A store that never had anything written of it forgets the moves all the same."""
    one, other = StoreConfig("one", ["x.*"], journal=JOURNAL), StoreConfig("other", [">"], journal=JOURNAL)
    before = Config(tmp_path, [one, other])
    after = Config(tmp_path, [StoreConfig("one", ["q", "x.*"], journal=JOURNAL), other])
    with anabranch.open(before) as router:
        queue = router.queue("q")
        queue.send(b"1")
        assert drain(router, "q") == [b"1"]
        for to in (after, before, after):
            router.repartition(to)
        queue.send(b"2")
        assert drain(router, "q") == [b"2"]
        router.repartition(before)
        queue.delete()
        router.repartition(after)
        queue.send(b"3")
        assert drain(router, "q") == [b"3"]


@pytest.mark.parametrize("placed", [True, False])
def test_a_transaction_that_waits_for_room_while_routes_change_does_nothing_by_the_old_ones(
    tmp_path: Path, placed: bool
) -> None:
    """Whether another sender has come to its new queue since, or not."""
    full = anabranch.JournalOptions(max_messages=1, when_full="block", block_timeout="60s")
    stores = [StoreConfig("full", ["full"], journal=full), StoreConfig("one", [">"], journal=JOURNAL)]
    after = Config(tmp_path, [*stores, StoreConfig("other", ["q"], journal=JOURNAL)])
    with anabranch.open(Config(tmp_path, stores)) as router:
        router.queue("r").send(b"0")
        router.queue("full").send(b"1")
        told = list[BaseException]()

        def send() -> None:
            try:
                with router.transaction() as tx:
                    tx.send("q", b"2")
                    tx.send("full", b"2")
            except ClosedError as error:
                told.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        (store,) = [one for one in router._registry.open_stores() if one.name == "full"]
        eventually(lambda: waiting(store))
        router.repartition(after)
        if placed:
            router.queue("q").send(b"1")
        assert drain(router, "full") == [b"1"]
        sender.join()
        assert (len(told), drain(router, "q"), drain(router, "full")) == (1, [b"1"] if placed else [], [])
    with anabranch.open(after) as router:
        assert router.queue("q").depth() == 0


@pytest.mark.parametrize("how", ["send", "transaction"])
def test_a_new_queue_goes_by_the_routes_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A sender that found another store for it, and comes to record that late, sends where it was placed since."""
    one, other = StoreConfig("one", [">"], journal=JOURNAL), StoreConfig("other", ["q"], journal=JOURNAL)
    with anabranch.open(Config(tmp_path, [one])) as router:
        router.queue("r").send(b"0")
        queue, record = router.queue("q"), router._registry._record
        late: list[threading.Thread] = []

        def recorded(destinations: Any, row: Any, *routes: Any) -> None:
            if threading.current_thread() in late:
                found.set()
                placed.wait(PATIENCE)
            record(destinations, row, *routes)

        def send() -> None:
            if how == "send":
                queue.send(b"2")
            else:
                try:
                    with router.transaction() as tx:
                        tx.send("q", b"2")
                except ClosedError:
                    queue.send(b"2")

        found, placed = threading.Event(), threading.Event()
        monkeypatch.setattr(router._registry, "_record", recorded)
        late.append(threading.Thread(target=send))
        late[0].start()
        assert found.wait(PATIENCE)
        router.repartition(Config(tmp_path, [one, other]))
        queue.send(b"1")
        placed.set()
        late[0].join()
        assert drain(router, "q") == [b"1", b"2"]
    with anabranch.open(Config(tmp_path, [one, other])) as router:
        assert router.queue("q").depth() == 0


long = pytest.mark.campaign


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("journal", "journal"),
        ("journal", "sql"),
        pytest.param("sql", "journal", marks=long),
        pytest.param("sql", "sql", marks=long),
    ],
)
def test_while_it_is_used(tmp_path: Path, source: str, target: str) -> None:
    """Nothing is lost, nothing comes twice, all in order, and nobody gets an error."""
    before = anabranch.Config(tmp_path, [StoreConfig("all", [">"], **KINDS[source])])
    after = anabranch.Config(
        tmp_path, [StoreConfig("all", ["stays"], **KINDS[source]), StoreConfig("other", [">"], **KINDS[target])]
    )
    with anabranch.open(before) as router:
        with Traffic(router, pause=0.01) as traffic:
            for to in (after, before, after):
                assert len(router.repartition(to).moves) > 5
        assert traffic.wrong() == []
        assert {str(d): count for d, count in router.stats().stores["other"].destinations.items() if count} == {}
        for store in router._registry.all_stores():
            assert list(store.check()) == []


SOURCES: dict[str, dict[str, Any]] = {**KINDS, "memory": {"memory": {}}}


def moving(directory: Path, source: str, target: str, match: list[str], **options: Any) -> tuple[Config, Config]:
    """All in store `one` of a kind, and all in store `two` of another, with these options."""

    def config(name: str, kind: str) -> Config:
        given: dict[str, Any] = {kind: {**SOURCES[kind][kind], **options}}
        return Config(directory, [StoreConfig(name, match, **given)])

    return config("one", source), config("two", target)


@pytest.mark.parametrize("how", ["live", "offline"])
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_was_put_back_or_need_not_be_kept(tmp_path: Path, source: str, target: str, how: str) -> None:
    """A dead letter that was put back, whose id is in the duplicate window, and what a memory store holds that was sent
    with `persistent=False`: a kind of store that keeps no note of either takes them all the same."""
    if source == "memory" and how == "offline":
        return  # nothing of it is there
    before, after = moving(tmp_path, source, target, ["q", "dlq"], dead_letter="dlq")
    with anabranch.open(before) as router:
        queue = router.queue("q")
        queue.send(b"1", message_id="m-1")
        message = queue.receive()
        assert message is not None
        message.reject()
        assert router.requeue("dlq") == 1
        queue.send(b"2", persistent=source != "memory")
        if how == "live":
            router.repartition(after)
    if how == "offline":
        repartition(after, before)
    with anabranch.open(after) as router:
        queue = router.queue("q")
        assert queue.send(b"3", message_id="m-1").duplicate
        assert [message.persistent for message in queue.browse()] == [True, True]
        assert drain(router, "q") == [b"1", b"2"]


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_many_that_wait_for_room_are_stored_once(tmp_path: Path, source: str, target: str) -> None:
    """Those that had room before the move are not sent again after it; each has its receipt, and its place."""
    before, after = moving(tmp_path, source, target, ["q"], max_messages=3, when_full="block", block_timeout=PATIENCE)
    many = [b"%d" % number for number in range(8)]
    receipts: list[Receipt] = []
    with anabranch.open(before) as router:
        queue = router.queue("q")
        sender = threading.Thread(target=lambda: receipts.extend(queue.send_many(many)))
        sender.start()
        eventually(lambda: queue.depth() == 3)
        router.repartition(after)
        got: list[bytes] = []
        while len(got) < len(many):
            message = queue.receive(PATIENCE)
            assert message is not None
            got.append(message.body)
            message.ack()
        sender.join(PATIENCE)
        assert (got, queue.depth()) == (many, 0)
        assert len(receipts) == len(many)
        assert not any(receipt.duplicate for receipt in receipts)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_a_transaction_that_acks_while_the_gate_is_being_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    """It waits for the move to be over, as one that sends does: what it prepared in the old store by then would ack
    nothing, and the copy would be delivered again (invariants 3 and 4)."""
    out = StoreConfig("out", ["out"], journal=JOURNAL)
    before = Config(tmp_path, [StoreConfig("one", ["q"], **KINDS[source]), out])
    after = Config(tmp_path, [StoreConfig("two", ["q"], **KINDS[target]), out])
    begin, prepared, closed = (threading.Event() for _ in range(3))
    with anabranch.open(before) as router:
        queue = router.queue("q")
        queue.send(b"1")
        message = queue.receive()
        assert message is not None
        transaction = router.transaction()
        transaction.ack(message)
        transaction.send("out", message.body)
        store, close = cast(JournalStore, message._store), LiveCopy.close

        def step(engine: Any, *given: Any, real: Callable[..., Any] = transactions.Step, **options: Any) -> Any:
            if engine is store._engine:
                prepared.set()
                closed.wait(1)
            return real(engine, *given, **options)

        def slow_close(copy: LiveCopy, gate: Any) -> None:
            begin.set()
            prepared.wait(0.3)
            close(copy, gate)
            closed.set()

        def commit() -> None:
            begin.wait(PATIENCE)
            transaction.commit()

        monkeypatch.setattr(transactions, "Step", step)
        monkeypatch.setattr(LiveCopy, "close", slow_close)
        committing = threading.Thread(target=commit)
        committing.start()
        router.repartition(after)
        committing.join(PATIENCE)
        assert not prepared.is_set()
        assert (queue.depth(), router.queue("out").depth()) == (0, 1)
    with anabranch.open(after) as router:
        assert (drain(router, "q"), drain(router, "out")) == ([], [b"1"])


class TestHolding:
    """Who has a message in hand while its queue moves settles it afterwards."""

    @pytest.fixture(params=["stays open", "is removed"])
    def moved(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Moved]:
        """A queue with ten messages, and its move."""
        journal = {**JOURNAL, "dead_letter": "dlq.{name}"}
        stays = request.param == "stays open"
        before = Config(tmp_path, [StoreConfig("one", ["q", "dlq.>"], journal=journal)])
        two = StoreConfig("two", ["q"] if stays else ["q", "dlq.>"], journal=journal)
        one = StoreConfig("one", ["queue://other", "dlq.>"], journal=journal)
        after = Config(tmp_path, [one, two] if stays else [two])
        with anabranch.open(before) as router:
            for number in range(10):
                router.queue("q").send(b"%d" % number, message_id=f"id-{number}")
            yield Moved(router, router.queue("q"), after, before)
        with anabranch.open(after) as router:
            for store in router._registry.all_stores():
                assert list(store.check()) == []

    def test_acks(self, moved: Moved) -> None:
        held = moved.take(5)
        tokens = [message.token for message in held]
        moved.there()
        held[0].ack()
        moved.router.ack(held[1:3])
        held[3].ack_nowait().result(10)
        moved.router.settle(tokens[4], Settlement.ACK)
        assert moved.bodies() == [5, 6, 7, 8, 9]
        for message in held:
            with pytest.raises(UnknownMessageError):
                message.ack()

    def test_releases(self, moved: Moved) -> None:
        held = moved.take(5)
        tokens = [message.token for message in held]
        moved.there()
        moved.back()
        moved.there()
        assert moved.queue.counts() == Counts(5, 5)
        held[3].release()
        held[1].release_nowait().result(10)
        moved.router.release([held[0], held[2]])
        assert moved.router.settle_nowait([tokens[4]], Settlement.RELEASE).result(10) == [None]
        assert [(m.body, m.deliveries) for m in moved.take(6)] == [(b"%d" % n, 2 if n < 5 else 1) for n in range(6)]

    def test_rejects(self, moved: Moved) -> None:
        held = moved.take(2)
        token = held[1].token
        moved.there()
        held[0].reject("bad")
        moved.router.settle(token, Settlement.REJECT, "worse")
        assert [m.body for m in moved.router.queue("dlq.q").browse()] == [b"0", b"1"]
        assert moved.bodies() == list(range(2, 10))

    def test_what_is_left_of_a_lease(self, moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
        """It runs out when it would have without the move; the others can be extended."""
        lasting = Lasting(monkeypatch)
        held = [moved.queue.receive(lease=seconds) for seconds in (LONG, 4 * LONG, LONG, LONG)]
        assert None not in held
        one, two, three, four = (message for message in held if message is not None)
        lasting.ahead += LONG / 2
        moved.there()
        three.extend(4 * LONG)
        with moved.router.transaction() as transaction:
            transaction.ack(four)
            lasting.go_on(moved.router._registry.store_for(moved.queue.destination), LONG)
            back = moved.queue.receive()
            assert back is not None
            assert (back.body, back.deliveries) == (one.body, 2)
            with pytest.raises(UnknownMessageError, match="its lease of 3600 s ran out"):
                one.ack()
            two.ack()
        three.ack()
        back.ack()
        assert moved.bodies() == [4, 5, 6, 7, 8, 9]

    @pytest.mark.parametrize("commit", [True, False])
    def test_in_a_transaction(self, moved: Moved, commit: bool) -> None:
        held = moved.take(3)
        with moved.router.transaction() as transaction:
            transaction.ack(held[0])
            transaction.send("q", b"10")
            point = transaction.savepoint()
            transaction.ack(held[1])
            moved.there()
            transaction.send("q", b"11")
            point.rollback()
            transaction.ack(held[2])
            transaction.send("q", b"12")
            if not commit:
                transaction.rollback()
        if commit:
            assert [receipt.destination.name for receipt in transaction.receipts] == ["q", "q"]
            assert moved.bodies() == [1, 3, 4, 5, 6, 7, 8, 9, 10, 12]
        else:
            assert moved.bodies() == list(range(10))
        assert moved.queue.counts().leased == 0

    def test_a_listener(self, moved: Moved) -> None:
        seen: list[int] = []
        ended: list[Exception] = []

        def on_message(message: anabranch.Message) -> None:
            seen.append(int(message.body))
            message.ack()

        listener = moved.queue.listen(on_message, credit=4, on_end=ended.append)
        eventually(lambda: len(seen) == 4)
        moved.there()
        listener.add_credit(3)
        eventually(lambda: len(seen) == 7)
        moved.back()
        listener.add_credit(100)
        eventually(lambda: len(seen) == 10)
        listener.close()
        assert (seen, ended) == (list(range(10)), [])

    def test_who_waits(self, moved: Moved) -> None:
        for message in moved.take(10):
            message.ack()
        found: list[anabranch.Message | None] = []
        thread = threading.Thread(target=lambda: found.append(moved.queue.receive(timeout=20)))
        thread.start()
        eventually(lambda: sum(store.waiting for store in moved.router.stats().stores.values()) == 1)
        moved.there()
        moved.queue.send(b"at last")
        thread.join(20)
        assert [message and message.body for message in found] == [b"at last"]


class Moved:
    """A queue, and two configurations between which it goes."""

    def __init__(self, router: anabranch.Router, queue: anabranch.Queue, after: Config, before: Config) -> None:
        self.router, self.queue, self._after, self._before = router, queue, after, before

    def there(self) -> None:
        self.router.repartition(self._after)

    def back(self) -> None:
        self.router.repartition(self._before)

    def take(self, count: int) -> list[anabranch.Message]:
        return [message for _ in range(count) if (message := self.queue.receive()) is not None]

    def bodies(self) -> list[int]:
        return [int(message.body) for message in self.queue.browse()]


class TestRefused:
    """Each with one message; the others have moved, and all is in use."""

    @pytest.fixture
    def router(self, tmp_path: Path) -> Iterator[anabranch.Router]:
        fill(old(tmp_path))
        with anabranch.open(old(tmp_path)) as router:
            yield router

    def test_routed_nowhere(self, router: anabranch.Router, tmp_path: Path) -> None:
        """Before anything is changed."""
        for wrong, said in (
            (config(tmp_path, ("a", ["queue://a.>"])), r"queue://b: 18 messages in store .* routed to no store; add a"),
            (config(tmp_path, ("m", [">"]), memory={}), r"from store 'all' to 'm', a memory store, which keeps no"),
            (config(tmp_path, ("all", [">"]), sql={}), r"store 'all' is a journal store in .*, and the configuration"),
        ):
            with pytest.raises(PlacementError, match=said):
                router.repartition(wrong)
        assert not (tmp_path / NAME).exists()
        router.queue("elsewhere").send(b"")
        assert list(router.stats().stores) == ["all"]

    def test_another_directory(self, router: anabranch.Router, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="must be the same"):
            fill(old(tmp_path / "other"))
            router.repartition(new(tmp_path / "other"))
        with pytest.raises(PlacementError, match="is no data directory"):
            router.repartition(Config(tmp_path / "nowhere", new(tmp_path).stores))

    def test_a_prepared_transaction(self, router: anabranch.Router, tmp_path: Path) -> None:
        transaction = router.transaction(XID)
        transaction.send("a.x", b"prepared")
        transaction.prepare()
        with pytest.raises(
            PlacementError, match=r"queue://a\.x: transaction \w+ is prepared in store 'all'.* after 0\.05"
        ):
            router.repartition(new(tmp_path), prepared_seconds=0.05)
        assert {d.name for d in router._registry.table.destinations_in(store_id(router, "all"))} == {"a.x"}
        threading.Timer(0.2, router.commit, [XID]).start()
        done = router.repartition(new(tmp_path))
        assert ([move.destination.name for move in done.moves], done.removed) == (["a.x"], ("all",))
        assert router.queue("a.x").depth() == 19

    def test_messages_that_are_not_persistent(self, router: anabranch.Router, tmp_path: Path) -> None:
        router.queue("a.y").send(b"", persistent=False)
        with pytest.raises(
            PlacementError, match=r"queue://a\.y: 1 message\(s\) of it in store 'all' are not persistent"
        ):
            router.repartition(new(tmp_path))
        assert {d.name for d in router._registry.table.destinations_in(store_id(router, "all"))} == {"a.y"}
        router.queue("a.y").purge()
        assert len(router.repartition(new(tmp_path)).moves) == 1

    def test_a_full_target(self, router: anabranch.Router, tmp_path: Path) -> None:
        small = [
            StoreConfig("a", ["queue://a.>"], journal={**JOURNAL, "max_messages": 20}), *new(tmp_path).stores[1:]
        ]  # fmt: skip
        with pytest.raises(StoreFullError) as caught:
            router.repartition(Config(tmp_path, small))
        assert caught.value.__notes__[0].startswith("moved: queue://a.x; where they were: queue://a.y, queue://b")
        assert [router.queue(name).depth() for name in ("a.x", "a.y", "b")] == [18, 18, 18]
        assert router.stats().stores["a"].messages == 18
        router.queue("a.y").purge()
        assert len(router.repartition(Config(tmp_path, small)).moves) == 5

    def test_another_configuration_half_way(self, router: anabranch.Router, tmp_path: Path) -> None:
        router.queue("b").send(b"", persistent=False)
        with pytest.raises(PlacementError, match="These destinations have not moved"):
            router.repartition(new(tmp_path))
        with pytest.raises(PlacementError, match="is being repartitioned to another configuration"):
            router.repartition(old(tmp_path))
        assert len(router.repartition(old(tmp_path), restart=True).moves) == 5
        assert list(router.stats().stores) == ["all"]

    def test_twice_at_once_and_close(self, router: anabranch.Router, tmp_path: Path) -> None:
        """The second is refused; close() stops the first, and the next opening goes on."""
        reached, errors = threading.Event(), list[Exception]()

        def progress(done: int, total: int) -> None:
            if done > 20 and not reached.is_set():
                with pytest.raises(TransactionError, match="is being repartitioned already"):
                    router.repartition(new(tmp_path))
                reached.set()
                time.sleep(0.05)

        def move() -> None:
            try:
                router.repartition(new(tmp_path), progress)
            except ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=move)
        thread.start()
        assert reached.wait(20)
        router.close()
        thread.join(20)
        assert "the repartition was stopped; call it again" in str(errors[0])
        with pytest.raises(PlacementError, match="is being repartitioned, and that was interrupted"):
            anabranch.open(new(tmp_path))
        repartition(new(tmp_path))
        assert len(facts(new(tmp_path))["queue://a.x"]) == 18

    def test_an_interruption(self, router: anabranch.Router, tmp_path: Path) -> None:
        struck = threading.Lock()

        def progress(done: int, total: int) -> None:
            if done > 20 and struck.acquire(blocking=False):  # once: the next would strike the test itself
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(0.05)

        with pytest.raises(KeyboardInterrupt):
            router.repartition(new(tmp_path), progress)
        assert [router.queue(name).depth() for name in ("a.x", "a.y", "b")] == [18, 18, 18]
        assert 3 < len(router.repartition(new(tmp_path)).moves) < 6

    def test_a_progress_that_raises(self, router: anabranch.Router, tmp_path: Path) -> None:
        def progress(done: int, total: int) -> None:
            if done > 20:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            router.repartition(new(tmp_path), progress)
        assert [router.queue(name).depth() for name in ("a.x", "a.y", "b")] == [18, 18, 18]
        router.repartition(new(tmp_path))


def store_id(router: anabranch.Router, name: str) -> bytes:
    return next(row.store_id for row in router._registry.table.stores.values() if row.name == name)


def test_from_a_memory_store(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, ("m", [">"]), memory={})) as router:
        for number in range(5):
            router.queue("q").send(b"%d" % number)
        assert router.repartition(old(tmp_path)).removed == ("m",)
        assert [message.body for message in router.queue("q").browse()] == [b"0", b"1", b"2", b"3", b"4"]
    with anabranch.open(old(tmp_path)) as router:
        assert router.queue("q").depth() == 5


def test_what_becomes_of_a_queue_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    fill(old(tmp_path))
    with anabranch.open(old(tmp_path)) as router:

        def progress(done: int, total: int) -> None:
            if router.exists("a.x"):
                router.delete("a.x")
                router.topic("ticks").subscribe("third")

        router.repartition(new(tmp_path), progress)
        router.queue("a.x").send(b"anew", message_id="a.x-0")
        assert [message.body for message in router.queue("a.x").browse()] == [b"anew"]
        assert [s.subscription.name for s in router.topic("ticks").subscriptions()] == ["second", "third", "first"]
    assert len(facts(new(tmp_path))["queue://a.y"]) == 18


def test_a_subscription_that_begins_while_its_topic_is_copied(tmp_path: Path) -> None:
    """It is copied anew."""
    before, after = old(tmp_path), new(tmp_path)
    with anabranch.open(before) as router:
        topic = router.topic("t")
        first = topic.subscribe("first")
        for number in range(1500):
            topic.send(b"%d" % number)
        done = [topic.subscribe("second") and False, False, False]

        def progress(moved: int, total: int) -> None:
            for at, (name, begin) in enumerate((("third", True), ("second", False), ("fourth", True))):
                if moved >= 512 and not done[at]:
                    topic.subscribe(name) if begin else next(
                        s for s in topic.subscriptions() if s.subscription.name == name
                    ).unsubscribe()
                    topic.send(b"after %d" % at)
                    done[at] = True
                    break

        router.repartition(after, progress)
        assert first.depth() == 1503
        third, fourth = (topic.subscribe(name) for name in ("third", "fourth"))
        assert [m.body for m in third.browse()] == [b"after 0", b"after 1", b"after 2"]
        assert [m.body for m in fourth.browse()] == [b"after 2"]
        assert [s.subscription.name for s in topic.subscriptions()] == ["first", "fourth", "third"]


def test_to_a_server_and_back(tmp_path: Path, postgres_url: str) -> None:
    before, after = old(tmp_path), Config(tmp_path, [StoreConfig("server", [">"], sql={"url": postgres_url})])
    fill(before)
    expected = facts(before)
    with anabranch.open(before) as router:
        assert len(router.repartition(after).moves) == 6
        router.repartition(before)
    assert facts(before) == expected


@long
def test_to_a_server_while_it_is_used(tmp_path: Path, postgres_url: str) -> None:
    before = config(tmp_path, ("stays", ["stays"]), ("all", [">"]))
    after = Config(tmp_path, [before.stores[0], StoreConfig("server", [">"], sql={"url": postgres_url})])
    with anabranch.open(before) as router:
        with Traffic(router, pause=0.004) as traffic:
            for to in (after, before, after):
                assert len(router.repartition(to).moves) > 5
        assert traffic.wrong() == []
        for store in router._registry.all_stores():
            assert list(store.check()) == []


def test_a_store_is_opened_again_while_it_is_copied(tmp_path: Path) -> None:
    """The copy is begun anew."""
    with anabranch.open(old(tmp_path)) as router:
        for number in range(1500):
            router.queue("a.x").send(b"%d" % number)
        names = ["all", "a"]

        def progress(moved: int, total: int) -> None:
            if moved and names:
                router.reopen(names.pop())

        router.repartition(new(tmp_path), progress)
        assert [int(message.body) for message in router.queue("a.x").browse()] == list(range(1500))


def test_who_browses_is_told(tmp_path: Path) -> None:
    with anabranch.open(old(tmp_path)) as router:
        for number in range(1500):
            router.queue("a.x").send(b"%d" % number)
        browsed = router.queue("a.x").browse()
        next(browsed)
        router.repartition(new(tmp_path))
        with pytest.raises(ClosedError, match=r"queue://a\.x has moved to another store since <Message 1 of"):
            list(browsed)


def test_transactions_over_stores_that_move(tmp_path: Path) -> None:
    """An open one over two stores is in one when it is prepared, and the other way round."""
    before, after = new(tmp_path), old(tmp_path)
    with anabranch.open(before) as router:
        for config_, xid in ((after, XID), (before, anabranch.Xid(1, "g", "c"))):
            router.queue("a.x").send(b"0")
            message = router.queue("a.x").receive()
            assert message is not None
            transaction = router.transaction(xid)
            transaction.send("b", b"1")
            transaction.ack(message)
            transaction.subscribe("ticks", xid.branch)
            router.repartition(config_)
            transaction.prepare()
            router.commit(xid)
        assert (router.queue("a.x").depth(), router.queue("b").depth()) == (0, 2)
        assert [s.subscription.name for s in router.topic("ticks").subscriptions()] == ["b", "c"]
        assert router.in_doubt() == []


@pytest.mark.parametrize("delivered", [True, False])
@pytest.mark.parametrize(
    ("source", "target"), [("on_receive", "on_receive"), ("on_receive", "on_return"), ("on_return", "on_receive")]
)
def test_what_is_held_counts_its_deliveries_once(tmp_path: Path, source: str, target: str, delivered: bool) -> None:
    """Whichever store has counted this one: when it is handed out, or when it is given back."""
    before = Config(tmp_path, [StoreConfig("one", [">"], journal=JOURNAL | {"count_deliveries": source})])
    after = Config(tmp_path, [StoreConfig("two", [">"], journal=JOURNAL | {"count_deliveries": target})])
    with anabranch.open(before) as router:
        router.queue("q").send(b"1")
        message = router.queue("q").receive()
        assert message is not None
        router.repartition(after)
        message.release(delivered)
        message = None
    with anabranch.open(after) as router:
        again = router.queue("q").receive()
        assert again is not None and again.deliveries == 1 + delivered


def test_a_queue_that_is_there_anew_meanwhile(tmp_path: Path) -> None:
    """What is sent to it then is in its new store, and is not taken for the copy."""
    fill(old(tmp_path))
    with anabranch.open(old(tmp_path)) as router:
        threads: list[threading.Thread] = []

        def anew() -> None:
            for number in range(5):
                router.queue("a.x").send(b"%d" % number, message_id=f"a.x-{number}")

        def progress(done: int, total: int) -> None:
            if not threads:
                router.delete("a.x")
                threads.append(threading.Thread(target=anew))
                threads[0].start()
                eventually(lambda: router.exists("a.x"))

        router.repartition(new(tmp_path), progress)
        threads[0].join(20)
        assert [message.body for message in router.queue("a.x").browse()] == [b"0", b"1", b"2", b"3", b"4"]
        assert router.queue("a.y").depth() == 18
    assert len(facts(new(tmp_path))["queue://a.x"]) == 5


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_placement_record_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Of one destination nobody can tell where it is: nobody uses it, and neither copy goes, until the next call or
    `anabranch repartition` has written where."""
    fill(old(tmp_path))
    expected = facts(old(tmp_path))
    with anabranch.open(old(tmp_path)) as router:
        table = router._registry.table
        real = table.record_destinations

        def fails(rows: Any) -> None:
            if router._registry.gates._gates:
                real(rows) if rows[0].store_id == store_id(router, "a") and not goes_on else None
                raise StoreFailedError("EIO")
            real(rows)

        with monkeypatch.context() as patched:
            patched.setattr(table, "record_destinations", fails)
            with pytest.raises(StoreFailedError, match="EIO"):
                router.repartition(new(tmp_path))
            with pytest.raises(
                StoreFailedError, match=r"queue://a\.x may be in store 'all' or in .* cannot be written"
            ):
                router.queue("a.x").receive()
            assert router.queue("a.y").depth() == 18
        assert router.stats().stores["a"].messages == 18
        if goes_on:
            assert len(router.repartition(new(tmp_path)).moves) == 6
            assert router.queue("a.x").depth() == 18
    repartition(new(tmp_path))
    assert facts(new(tmp_path)) == expected


def test_it_waits_for_transactions_on_connections_of_the_users_own(tmp_path: Path, postgres_url: str) -> None:
    """What they send and ack is in one store, the old one (rule Q6)."""
    sql = anabranch.SqlOptions(url=postgres_url, pool_min=0)
    before = Config(tmp_path, [StoreConfig("all", [">"], sql=sql)])
    fill(before)
    engine = sqlalchemy.create_engine(postgres_url)
    with anabranch.open(before) as router:
        queue = router.queue("a.x")
        message = queue.receive()
        assert message is not None
        with engine.connect() as connection:
            queue.send(b"sent", connection=connection)
            message.ack(connection=connection)
            with pytest.raises(PlacementError, match=r"queue://a\.x: transactions on connections of your own"):
                router.repartition(new(tmp_path), prepared_seconds=0.05)
            assert {d.name for d in router._registry.table.destinations_in(store_id(router, "all"))} == {"a.x"}
            connection.commit()
        router.repartition(new(tmp_path))
        assert queue.depth() == 18
        assert [message.body for message in queue.browse()][-1] == b"sent"
        with pytest.raises(TransactionError), engine.connect() as connection:
            queue.send(b"", connection=connection)
    engine.dispose()


def test_a_large_body_that_is_damaged_is_named_with_its_message(tmp_path: Path) -> None:
    """And what can be done."""
    journal = {**JOURNAL, "large_message_size": 1024}
    before, after = (config(tmp_path, (name, [">"]), journal=journal) for name in ("all", "new"))
    with anabranch.open(before) as router:
        router.queue("q").send_many([b"1", io.BytesIO(bytes(3000))])
    (body,) = tmp_path.glob("stores/all/large/*")
    flip(body, 1000)
    with pytest.raises(CorruptionError, match=r"queue://q cannot be moved.* message 2 of queue://q.*--restart and the"):
        repartition(after, before)
    repartition(before, before, restart=True)
    with anabranch.open(before) as router:
        first, second = router.queue("q").receive_many(2)
        second.ack()
        first.release()
    repartition(after, before)
    with anabranch.open(after) as router:
        assert drain(router, "q") == [b"1"]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("on_corruption", ["refuse", "salvage"])
def test_it_goes_on_without_no_message(tmp_path: Path, live: bool, on_corruption: str) -> None:
    """A damaged one is named, and its destination stays where it was: one can go back, and all else is there."""
    before = config(tmp_path, ("all", [">"]), journal={**JOURNAL, "on_corruption": on_corruption})
    after = config(tmp_path, ("new", ["q"]), ("all", [">"]), journal={**JOURNAL, "on_corruption": on_corruption})
    with anabranch.open(before) as router:
        for number in range(3):
            router.queue("q").send(b"%d" % number)
        store = router._registry.store_for(router.queue("q").destination)
        assert isinstance(store, JournalStore)
        path, offset, length = place_of(store, router.queue("q").destination, 2)
        if live:
            flip(path, offset + length - 1)
            with pytest.raises(CorruptionError, match="message 2 of queue://q"):
                router.repartition(after)
            assert router._registry.store_for(router.queue("q").destination) is store
            assert router.queue("q").depth() == 3
    if not live:
        flip(path, offset + length - 1)
        with pytest.raises(CorruptionError, match="message 2 of queue://q"):
            repartition(after, before)
    repartition(before, before, restart=True)
    with anabranch.open(before) as router:
        assert router.queue("q").depth() == 3
        assert not list(tmp_path.rglob("loss-*"))
