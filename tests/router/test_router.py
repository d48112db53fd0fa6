"""The router: queues, per_destination stores, transactions of one store, threads, failures, forks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.system.locking import DirectoryLock
from anabranch.policies.errors import (
    ClosedError,
    ConfigError,
    DestinationError,
    NoRouteError,
    StoreFailedError,
    StoreLockedError,
    UnknownMessageError,
)
from anabranch.router.placement import open_stores as stores_module
from anabranch.router.placement.record import StoreRow

from ..contract.disk import PATIENCE
from ..taking import take
from .disk import bodies, contents, said_in_a_child

OPTIONS = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER)


def config(directory: Path) -> anabranch.Config:
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("one", ["queue://one.>"], journal=OPTIONS),
            anabranch.StoreConfig("two", ["queue://two.>"], journal=OPTIONS),
            anabranch.StoreConfig("each", ["queue://each.>"], per_destination=True, journal=OPTIONS),
        ],
    )


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data")) as router:
        yield router


class TestQueues:
    def test_a_queue(self, router: anabranch.Router) -> None:
        queue = router.queue("one.a")
        receipt = queue.send(b"1", {"h": 1}, "id")
        assert queue.send(b"1", None, "id").duplicate
        queue.send_many([b"2", Outgoing(b"3")])
        assert queue.send_nowait(b"4").result(PATIENCE).seq == receipt.seq + 3
        assert [m.body for m in queue.browse(limit=2, after=receipt.seq)] == [b"2", b"3"]
        message = take(queue)
        assert (message.body, message.headers, queue.depth()) == (b"1", {"h": 1}, 4)
        message.release()
        take(queue).ack()
        assert queue.depth() == 3
        assert queue.purge() == 3
        assert queue.delete() == 0
        assert bool(queue)
        assert router.destinations() == []

    def test_asking_creates_nothing(self, router: anabranch.Router, tmp_path: Path) -> None:
        queue = router.queue("one.a")
        assert queue.depth() == 0
        assert (queue.receive(), list(queue.browse()), queue.purge(), queue.delete()) == (None, [], 0, 0)
        assert router.stats().stores == {}
        assert router.destinations() == []
        assert not (tmp_path / "data" / "stores").exists()

    def test_two_names_of_one_queue(self, router: anabranch.Router) -> None:
        router.queue("one.a").send(b"x")
        assert take(router.queue("queue://one.a")).body == b"x"

    @pytest.mark.parametrize("name", ["", "a,b", "topic://one.a", "http://one", "one.\0"])
    def test_what_is_no_queue(self, router: anabranch.Router, name: str) -> None:
        with pytest.raises(DestinationError):
            router.queue(name)

    def test_no_route(self, router: anabranch.Router) -> None:
        for call in (lambda: router.queue("three"), lambda: router.send("three", b"x")):
            with pytest.raises(NoRouteError, match=r"queue://three.*closest"):
                call()
        with router.transaction() as tx:
            with pytest.raises(NoRouteError):
                tx.send("three", b"x")
            tx.send("one.a", b"x")
        assert contents(router, "one.a") == [b"x"]

    def test_a_receiver_waits_for_a_queue_that_is_not_there_yet(self, router: anabranch.Router) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(router.queue("one.a").receive, PATIENCE)
            router.queue("one.a").send(b"x")
            message = waiting.result(PATIENCE)
        assert message is not None
        assert message.body == b"x"

    def test_a_deleted_queue_can_come_back(self, router: anabranch.Router) -> None:
        queue = router.queue("one.a")
        queue.send_many([b"1", b"2"])
        assert queue.delete() == 2
        assert (queue.depth(), router.destinations()) == (0, [])
        queue.send(b"3")
        assert contents(router, "one.a") == [b"3"]

    def test_ack_of_messages_of_several_stores(self, router: anabranch.Router) -> None:
        for name in ("one.a", "two.a", "each.a", "each.b"):
            router.queue(name).send(b"x")
        router.ack([take(router.queue(name)) for name in ("one.a", "two.a", "each.a", "each.b")])
        assert all(store.messages == 0 for store in router.stats().stores.values())


class TestComposites:
    def test_a_composite_is_one_send(self, router: anabranch.Router) -> None:
        receipts = router.send("queue://one.a, one.b,one.a", b"x", {"h": 1}, "id")
        assert [str(r.destination) for r in receipts] == ["queue://one.a", "queue://one.b"]
        assert contents(router, "one.a") == contents(router, "one.b") == [b"x"]
        assert all(r.duplicate for r in router.send("one.a,one.b", b"x", None, "id"))

    def test_one_part_without_a_route_refuses_all(self, router: anabranch.Router) -> None:
        with pytest.raises(NoRouteError):
            router.send("one.a,nowhere", b"x")
        assert contents(router, "one.a") == []


class TestPerDestination:
    def test_each_has_a_store_of_its_own(self, router: anabranch.Router, tmp_path: Path) -> None:
        names = ["each.a", "each.A", "each.a/b", "each." + "x" * 500, "each." + "x" * 501]
        for name in names:
            router.queue(name).send(name.encode())
        assert len(list((tmp_path / "data" / "stores" / "each").iterdir())) == len(names)
        assert set(router.stats().stores) == {f"each:queue://{name}" for name in names}
        for name in names:
            assert contents(router, name) == [name.encode()]

    def test_they_come_back(self, tmp_path: Path) -> None:
        for n in range(3):
            with anabranch.open(config(tmp_path)) as router:
                for name in ("a", "b", "c"):
                    router.queue(f"each.{name}").send(f"{name}{n}".encode())
        with anabranch.open(config(tmp_path)) as router:
            assert [str(d) for d in router.destinations()] == ["queue://each.a", "queue://each.b", "queue://each.c"]
            assert contents(router, "each.b") == [b"b0", b"b1", b"b2"]

    def test_idle_stores_close_and_open_again(self, router: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 3)
        queues = [router.queue(f"each.{n}") for n in range(10)]
        held = []
        for round_ in range(3):
            for n, queue in enumerate(queues):
                queue.send(f"{round_}".encode())
                if n == 0 and round_ == 0:
                    held.append(take(queue))
        assert len(router._registry.open_stores()) <= 4
        for message in held:
            message.ack()  # its store was held open for it
        assert [queue.depth() for queue in queues] == [2] + [3] * 9
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: queues[n % 10].send(b"x"), range(200)))
        assert sum(queue.depth() for queue in queues) == 29 + 200

    def test_a_transaction_outlives_the_idleness_of_its_store(
        self, router: anabranch.Router, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 2)
        with router.transaction() as tx:
            tx.send("each.0", b"x")
            for n in range(1, 6):
                router.queue(f"each.{n}").send(b"y")
        assert contents(router, "each.0") == [b"x"]


class TestTransactions:
    def test_commit(self, router: anabranch.Router) -> None:
        queue = router.queue("one.a")
        queue.send_many([b"1", b"2"])
        with router.transaction() as tx:
            tx.ack(take(queue))
            tx.send("one.b,one.c", b"3", {"h": 1}, "id")
            assert (contents(router, "one.a"), contents(router, "one.b")) == ([b"1", b"2"], [])
        assert bodies(router, "one.a", "one.b", "one.c") == [[b"2"], [b"3"], [b"3"]]

    def test_a_refused_first_step_ties_it_to_no_store(self, router: anabranch.Router, tmp_path: Path) -> None:
        """What did not become part of the transaction does not make it one over several stores."""
        router.queue("one.a").send(b"x")
        message = take(router.queue("one.a"))
        message.ack()
        with router.transaction() as tx:
            with pytest.raises(UnknownMessageError):
                tx.ack(message)
            with pytest.raises(NoRouteError):
                tx.send("one.b,three", b"x")
            tx.send("two.a", b"y")
        assert (contents(router, "one.b"), contents(router, "two.a")) == ([], [b"y"])
        assert not (tmp_path / "data" / "decisions").exists()

    def test_an_empty_one(self, router: anabranch.Router) -> None:
        assert router.transaction().commit() == []
        router.transaction().rollback()

    def test_a_failed_commit_gives_the_messages_back(self, tmp_path: Path) -> None:
        options = anabranch.JournalOptions(segment_size=64 * 1024, max_messages=2)
        stores = [anabranch.StoreConfig("all", [">"], journal=options)]
        with anabranch.open(anabranch.Config(tmp_path, stores)) as router:
            router.queue("a").send_many([b"1", b"2"])
            tx = router.transaction()
            tx.ack(take(router.queue("a")))
            for _ in range(3):
                tx.send("a", b"x")
            with pytest.raises(anabranch.StoreFullError):
                tx.commit()
            assert take(router.queue("a")).body == b"1"

    def test_a_rollback_after_close_hides_no_error(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), anabranch.open(config(tmp_path)) as router:
            router.queue("one.a").send(b"x")
            with router.transaction() as tx:
                tx.ack(take(router.queue("one.a")))
                router.close()
                raise ZeroDivisionError


class TestIsolation:
    """Invariant 7: one store's trouble is nobody else's."""

    def fail(self, router: anabranch.Router, store: str) -> None:
        (failing,) = [s for s in router._registry.open_stores() if s.name == store]
        failing.backend._log.fail(OSError(5, "Input/output error"))  # type: ignore[attr-defined]

    def test_other_stores_go_on(self, router: anabranch.Router) -> None:
        for name in ("one.a", "two.a"):
            router.queue(name).send(b"x")
        self.fail(router, "one")
        with pytest.raises(StoreFailedError):
            router.queue("one.a").send(b"y")
        router.queue("two.a").send(b"y")
        assert contents(router, "two.a") == [b"x", b"y"]
        stats = router.stats().stores
        assert "Input/output error" in (stats["one"].failed or "")
        assert stats["two"].failed is None
        router.reopen("one")
        router.queue("one.a").send(b"z")
        assert contents(router, "one.a") == [b"x", b"z"]

    def test_a_failed_store_does_not_stop_others_from_opening(
        self, router: anabranch.Router, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 2)
        router.queue("one.a").send(b"x")
        self.fail(router, "one")
        for n in range(5):
            router.queue(f"each.{n}").send(b"x")
        assert contents(router, "each.0") == [b"x"]

    def test_a_damaged_store_does_not_stop_others(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path)) as router:
            for name in ("one.a", "two.a"):
                router.queue(name).send(b"x")
        (tmp_path / "stores" / "one" / "journal" / "000000000001.seg").unlink()
        with anabranch.open(config(tmp_path)) as router:
            assert contents(router, "two.a") == [b"x"]
            for _ in range(2):
                with pytest.raises(anabranch.CorruptionError, match="segments are gone"):
                    router.queue("one.a").send(b"y")

    def test_a_damaged_store_whose_index_is_gone_names_what_is_recorded_in_it(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path)) as router:
            for number in range(12):
                router.queue(f"one.{number:02d}").send(b"x")
        for path in (tmp_path / "stores" / "one").rglob("*1.seg"):
            path.write_bytes(bytes(4096))
        (tmp_path / "stores" / "one" / "index.mdb").unlink()
        with anabranch.open(config(tmp_path)) as router, pytest.raises(anabranch.CorruptionError) as caught:
            router.queue("one.00").send(b"y")
        names = ", ".join(f"queue://one.{number:02d}" for number in range(10))
        assert f"destinations in this store: {names} and 2 more" in str(caught.value)

    def test_reopen_of_an_unknown_store(self, router: anabranch.Router) -> None:
        with pytest.raises(ConfigError, match="no store 'nothing'"):
            router.reopen("nothing")


class TestLifecycle:
    def test_closed(self, tmp_path: Path) -> None:
        router = anabranch.open(config(tmp_path))
        queue = router.queue("one.a")
        queue.send(b"x")
        message = take(queue)
        router.close()
        router.close()
        for call in (
            lambda: queue.send(b"x"),
            lambda: queue.send_many([b"x"]),
            lambda: queue.send_nowait(b"x"),
            lambda: queue.receive(),
            lambda: queue.receive(1),
            lambda: list(queue.browse()),
            lambda: queue.depth(),
            queue.purge,
            queue.delete,
            message.ack,
            lambda: router.send("one.a", b"x"),
            router.transaction,
            router.stats,
            router.destinations,
            router.reclaim,
            lambda: router.queue("one.a"),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_one_owner(self, router: anabranch.Router, tmp_path: Path) -> None:
        with pytest.raises(StoreLockedError, match="this process"):
            anabranch.open(config(tmp_path / "data"))
        router.queue("one.a").send(b"x")

    def test_two_routers_and_one_store_outside(self, tmp_path: Path) -> None:
        """Rule D3: the store has a lock of its own."""

        def with_outside(name: str) -> anabranch.Config:
            stores = [anabranch.StoreConfig("s", [">"], directory=tmp_path / "outside", journal=OPTIONS)]
            return anabranch.Config(tmp_path / name, stores)

        with anabranch.open(with_outside("a")) as one:
            one.queue("q").send(b"x")
            with anabranch.open(with_outside("b")) as two:
                with pytest.raises(StoreLockedError):
                    two.queue("q").send(b"y")
                assert two.destinations() == []
            assert contents(one, "q") == [b"x"]

    def test_a_forked_child_is_refused_and_harms_nothing(self, router: anabranch.Router, tmp_path: Path) -> None:
        queue = router.queue("one.a")
        queue.send(b"x")
        calls = (lambda: queue.send(b"y"), lambda: queue.receive(1), router.stats, router.transaction, router.close)
        assert said_in_a_child(*calls) == ["ClosedError"] * 4 + ["returned"]
        queue.send(b"z")
        assert contents(router, "one.a") == [b"x", b"z"]
        with pytest.raises(StoreLockedError):
            anabranch.open(config(tmp_path / "data"))

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(ConfigError, match="cannot be used"):
            anabranch.open(config(tmp_path / "file" / "data"))

    def test_many_threads_make_many_queues(self, router: anabranch.Router) -> None:
        barrier = threading.Barrier(8)

        def work(number: int) -> None:
            barrier.wait(PATIENCE)
            for n in range(20):
                router.queue(f"each.{n}").send(f"{number}".encode())
                router.queue(f"one.{n}").send(f"{number}".encode())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        for n in range(20):
            for store in ("each", "one"):
                assert sorted(contents(router, f"{store}.{n}")) == [f"{k}".encode() for k in range(8)]
        assert len(router.stats().stores) == 21


class TestArguments:
    """A destination is named in one way everywhere; what is wrong is said where it is given."""

    def test_three_ways_to_name_a_queue(self, router: anabranch.Router) -> None:
        queue = router.queue("one.a")
        for address in ("one.a", "queue://one.a", queue.destination, queue):
            assert router.queue(address).destination == queue.destination
            assert router.send(address, b"x")[0].destination == queue.destination
            with router.transaction() as tx:
                tx.send(address, b"y")
            assert router.delete(address) == 2

    @pytest.mark.parametrize("name", ["one.*", "one.>", "one.eu-*", "one.?", "one.[ab]", "one.>.b"])
    def test_a_pattern_names_no_destination(self, router: anabranch.Router, name: str) -> None:
        """Nothing of that name is made; a Destination says that it is meant so."""
        literal = anabranch.Destination.parse(name)
        tx = router.transaction()
        for call in (
            lambda: router.queue(name),
            lambda: router.topic(f"topic://{name}"),
            lambda: router.send(f"one.a,{name}", b"x"),
            lambda: router.delete(name),
            lambda: tx.send(name, b"x"),
            lambda: tx.subscribe(name, "desk"),
        ):
            with pytest.raises(DestinationError, match=r"holds the wildcard [*>?[], .*Destination\.(queue|topic)\('"):
                call()
        tx.send(literal, b"meant so")
        tx.commit()
        assert router.destinations() == [literal]
        router.close()
        with router.open():  # also what was made when nobody refused it
            assert router.destinations() == [literal]
            assert [message.body for message in router.queue(literal).browse()] == [b"meant so"]
            assert router.delete(literal) == 1

    def test_the_error_says_how_a_pattern_names_it(self, router: anabranch.Router) -> None:
        with pytest.raises(DestinationError, match=r"write its pattern as one\.\[\*\]$"):
            router.queue("one.*")

    @pytest.mark.parametrize("address", [None, 7, b"one.a", ["one.a"]])
    def test_what_names_no_queue(self, router: anabranch.Router, address: Any) -> None:
        tx = router.transaction()
        for call in (
            lambda: router.queue(address),
            lambda: router.send(address, b"x"),
            lambda: router.delete(address),
            lambda: tx.send(address, b"x"),
        ):
            with pytest.raises(TypeError, match="a destination is given as text"):
                call()

    @pytest.mark.parametrize(
        ("message", "error", "says"),
        [
            (("text",), TypeError, "a message body is bytes, or a file to read them from, not str"),
            ((b"", {"h": object()}), TypeError, "is not plain"),
            ((b"", None, 7), TypeError, "a message_id is a str"),
            ((b"", None, "\ud800"), ValueError, "message_id .* is not valid unicode"),
        ],
    )
    def test_a_transaction_refuses_at_once(
        self, router: anabranch.Router, message: Any, error: type[Exception], says: str
    ) -> None:
        with router.transaction() as tx:
            with pytest.raises(error, match=says):
                tx.send("one.a", *message)
            tx.send("two.a", b"x")  # the refused step ties it to no store
        with pytest.raises(error, match=says):
            router.queue("one.a").send(*message)
        assert (contents(router, "one.a"), contents(router, "two.a")) == ([], [b"x"])

    def test_a_transaction_keeps_what_it_was_given(self, router: anabranch.Router) -> None:
        body, headers = bytearray(b"x"), {"h": 1}
        with router.transaction() as tx:
            tx.send("one.a", body, headers)  # type: ignore[call-overload]
            body[0], headers["h"] = 0, 2
        message = take(router.queue("one.a"))
        assert (message.body, message.headers) == (b"x", {"h": 1})

    def test_a_header_that_is_no_unicode(self, router: anabranch.Router) -> None:
        with pytest.raises(ValueError, match="a header is not valid unicode"):
            router.queue("one.a").send(b"", {"h": "\ud800"})

    def test_a_browsed_message_ties_a_transaction_to_no_store(self, router: anabranch.Router) -> None:
        router.queue("one.a").send(b"x")
        (seen,) = router.queue("one.a").browse()
        with router.transaction() as tx:
            with pytest.raises(UnknownMessageError):
                tx.ack(seen)
            tx.send("two.a", b"y")
        assert contents(router, "two.a") == [b"y"]

    def test_ack_takes_one_message_too(self, router: anabranch.Router) -> None:
        router.queue("one.a").send(b"x")
        router.ack(take(router.queue("one.a")))
        assert router.queue("one.a").depth() == 0
        wrong: Any = ["x"]
        with pytest.raises(TypeError, match="messages that were received can be acked or released, not str"):
            router.ack(wrong)

    @pytest.mark.parametrize("timeout", ["1", b"1", [1], (), object()])
    def test_what_is_no_number_of_seconds(self, router: anabranch.Router, timeout: Any) -> None:
        """Whether or not there is something to receive, and in the words of the other arguments."""
        queue = router.queue("one.a")
        desk = anabranch.Subscriber(router._registry, anabranch.Subscription(queue.destination, "desk"))
        for _ in range(2):
            for receiver in (queue, desk):
                with pytest.raises(TypeError, match=f"^timeout is a number of seconds, not {type(timeout).__name__}: "):
                    receiver.receive(timeout)
            queue.send(b"x")
        assert take(queue).deliveries == 1

    @pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e300])
    def test_what_nobody_can_wait_for(self, router: anabranch.Router, timeout: float) -> None:
        with pytest.raises(ValueError, match=r"^timeout is a number of seconds up to .* None is for ever$"):
            router.queue("one.a").receive(timeout)

    @pytest.mark.parametrize("timeout", [-1, -0.5, 0, 0.0, False, 0.001])
    def test_a_wait_that_is_over(self, router: anabranch.Router, timeout: float) -> None:
        assert router.queue("one.a").receive(timeout) is None

    def test_browse_refuses_a_negative_limit(self, router: anabranch.Router) -> None:
        with pytest.raises(ValueError, match="limit of 0 or more"):
            router.queue("one.a").browse(limit=-1)


class TestIdleStores:
    def test_browse_goes_on(self, router: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 1)
        router.queue("each.a").send_many([f"{n}".encode() for n in range(2000)])
        seen = []
        for n, message in enumerate(router.queue("each.a").browse(limit=1500, after=0)):
            seen.append(message.body)
            if n in (0, 600):
                router.queue(f"each.{n}").send(b"x")
                assert [store.name for store in router._registry.open_stores()] == [f"each:queue://each.{n}"]
        assert seen == [f"{n}".encode() for n in range(1500)]

    def test_one_more_than_may_be_open_costs_little(
        self, router: anabranch.Router, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of stores that are used in turn few are closed just before they are used again."""
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 32)
        loaded: list[str] = []
        real = stores_module.OpenStores.load

        def load(stores: stores_module.OpenStores, row: StoreRow) -> Any:
            loaded.append(row.path)
            return real(stores, row)

        monkeypatch.setattr(stores_module.OpenStores, "load", load)
        for _ in range(10):
            for n in range(33):
                router.queue(f"each.{n}").send(b"x")
        assert len(router._registry.open_stores()) <= 32
        assert len(loaded) < 33 + 9 * 33 // 2

    def test_one_that_is_used_stays_open(self, router: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", 3)
        for n in range(20):
            router.queue("each.hot").send(b"x")
            router.queue(f"each.{n}").send(b"x")
            assert n < 4 or "each:queue://each.hot" in [store.name for store in router._registry.open_stores()]

    def test_a_composite_goes_on(self, router: anabranch.Router) -> None:
        router.send("one.a,one.b", b"1")
        (store,) = router._registry.open_stores()
        assert store.retire()
        router.send("one.a,one.b", b"2")
        assert contents(router, "one.a") == contents(router, "one.b") == [b"1", b"2"]

    def test_reclaim_tries_every_store(self, router: anabranch.Router) -> None:
        for name in ("one.a", "two.a"):
            queue = router.queue(name)
            queue.send_many([bytes(30_000)] * 10)
            queue.purge()
        one, two = router._registry.open_stores()
        one.backend._log.fail(OSError(5, "Input/output error"))  # type: ignore[attr-defined]
        before = two.stats().segments["retained"]
        with pytest.raises(StoreFailedError):
            router.reclaim()
        assert two.stats().segments["retained"] < before or before == 0


class TestDirectories:
    def test_a_file_as_data_directory(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_text("x")
        with pytest.raises(ConfigError, match=rf"{tmp_path}/data cannot be used: File exists .*choose one"):
            anabranch.open(config(tmp_path / "data"))
        assert (tmp_path / "data").read_text() == "x"

    def test_a_store_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        stores = [
            anabranch.StoreConfig("one", ["queue://one.>"], directory=tmp_path / "file" / "s", journal=OPTIONS),
            anabranch.StoreConfig("two", ["queue://two.>"], journal=OPTIONS),
        ]
        with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"'one'.*file.*choose another directory"):
                    router.queue("one.a").send(b"x")
            router.queue("two.a").send(b"x")
            assert [str(d) for d in router.destinations()] == ["queue://two.a"]

    def test_a_lock_does_not_need_to_say_whose_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full disk must not leak it."""

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        lock = DirectoryLock(tmp_path / "lock", "it")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            lock.acquire()
        with pytest.raises(StoreLockedError):
            DirectoryLock(tmp_path / "lock", "it").acquire()
        lock.release()
        DirectoryLock(tmp_path / "lock", "it").acquire()


def test_a_router_that_nobody_holds_any_more_is_let_go_of(tmp_path: Path) -> None:
    """As after Ctrl-C at the end of open(): the directory is free again (invariant 8), without close()."""
    anabranch.open(config(tmp_path / "data"))
    gc.collect()
    with anabranch.open(config(tmp_path / "data")) as router:
        router.queue("one.a").send(b"1")
