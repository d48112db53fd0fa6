"""Ctrl-C at every bytecode of an operation (interrupts.py): nothing lost, doubled or stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.state.leases import Receiver
from anabranch.adapters.journal import JournalStore

from ..contract.disk import PATIENCE, Parallel
from ..shares import Share
from .interrupts import LIBRARY, OURS, everywhere
from .ledger import body_of, contents, identity_of, violations


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    options = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, segment_size=64 * 1024, checkpoint_interval=3600.0)
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], journal=options)])
    with anabranch.open(config) as router:
        yield router


def store_of(router: anabranch.Router) -> JournalStore:
    (store,) = router._registry.open_stores()
    assert isinstance(store, JournalStore)
    return store


def reopened(router: anabranch.Router) -> dict[str, list[str]]:
    """What is there after closing, reopening, and checking."""
    before = contents(router)
    assert violations(router) == []
    router.close()
    with anabranch.open(router.config) as again:
        assert contents(again) == before
        assert violations(again) == []
    return before


@pytest.mark.parametrize("size", [10, 30_000], ids=["small", "rolling"])
def test_a_send_interrupted_anywhere_and_sent_again_is_stored_once(router: anabranch.Router, size: int) -> None:
    queue = router.queue("q")
    queue.send(body_of("s.0"))

    def prepare(at: int) -> Callable[[], object]:
        return lambda: queue.send(body_of(f"s.{at}", size), message_id=f"s.{at}")

    def check(at: int, where: str) -> None:
        receipt = queue.send(body_of(f"s.{at}", size), message_id=f"s.{at}")
        assert queue.depth() == at + 1, where
        assert receipt.seq == at + 1, where

    places = everywhere(prepare, check)
    assert places > 20
    assert reopened(router)["q"] == [f"s.{n}" for n in range(places + 2)]


def test_who_gives_another_its_message_interrupted_anywhere(router: anabranch.Router) -> None:
    """What the other one acks does not come again."""
    queue = router.queue("q")
    queue.send(b"")
    store = store_of(router)
    (state,) = store._engine.catalog.destinations.values()
    receiver = Receiver()
    first = queue.receive()
    assert first is not None
    first.ack()

    def hand_over() -> None:
        with store._engine.lock:
            store._engine.hand_over(state.channel)

    def prepare(at: int) -> Callable[[], object]:
        nonlocal receiver
        queue.send_many([body_of(f"a.{at}"), body_of(f"b.{at}")])
        receiver = Receiver()
        receiver.prepare()
        state.channel.receivers[receiver] = None
        return hand_over

    def check(at: int, where: str) -> None:
        hand_over()
        assert receiver.lease is not None, where
        message = store._receiving.read(receiver.lease)
        assert message is not None and identity_of(message.body) == f"a.{at}", where
        message.ack()
        second = queue.receive()
        assert second is not None and identity_of(second.body) == f"b.{at}", where
        second.ack()
        assert queue.receive() is None, where

    assert everywhere(prepare, check) > 5


def test_an_ack_interrupted_anywhere(router: anabranch.Router) -> None:
    queue = router.queue("q")

    def prepare(at: int) -> Callable[[], object]:
        queue.send(body_of(f"s.{at}"))
        message = queue.receive()
        assert message is not None
        state["message"] = message
        return message.ack

    def check(at: int, where: str) -> None:
        if queue.depth():
            state["message"].ack()  # it can be tried again until it has taken effect
        with pytest.raises(anabranch.UnknownMessageError):
            state["message"].ack()
        assert queue.depth() == 0, where
        assert store_of(router).stats().leased == 0, where

    state: dict[str, anabranch.Message] = {}
    assert everywhere(prepare, check) > 10
    assert reopened(router) == {}


def test_a_transaction_interrupted_anywhere_is_whole(router: anabranch.Router, share: Share) -> None:
    queue, audit = router.queue("q"), router.queue("audit")
    queue.send(body_of("s.0"))

    def prepare(at: int) -> Callable[[], object]:
        queue.send(body_of(f"s.{at}"))
        message = queue.receive()
        assert message is not None
        identity = identity_of(message.body)
        state.update(identity=identity)

        def run() -> None:
            with router.transaction() as tx:
                tx.ack(message)
                tx.send("audit", body_of(identity))

        return run

    def check(at: int, where: str) -> None:
        identity = state["identity"]
        store_of(router).backend._log._finish()  # else a worker may carry on with it between the two looks
        acked = identity not in [identity_of(message.body) for message in queue.browse()]
        sent = identity in [identity_of(message.body) for message in audit.browse()]
        assert acked == sent, (identity, where)

    state: dict[str, str] = {}
    assert everywhere(prepare, check, 3, share) > 50
    reopened(router)


@pytest.mark.parametrize("given_back", [False, True])
def test_receive_interrupted_anywhere_passes_nothing_over(router: anabranch.Router, given_back: bool) -> None:
    leaked: list[str] = []

    def prepare(at: int) -> Callable[[], object]:
        queue = router.queue(f"q.{at}")
        queue.send_many([body_of(f"s.{n}") for n in range(3)])
        if given_back:
            messages = [queue.receive() for _ in range(2)]
            for message in messages:
                assert message is not None
                message.release()
        seen.clear()

        def run() -> None:
            message = queue.receive()
            assert message is not None
            seen.append(identity_of(message.body))

        return run

    def check(at: int, where: str) -> None:
        queue = router.queue(f"q.{at}")
        while (message := queue.receive()) is not None:
            seen.append(identity_of(message.body))
        assert store_of(router).stats().leased == 3, where  # none was passed over
        assert seen == sorted(set(seen)), where
        if len(seen) < 3:
            leaked.append(where)
        queue.delete()

    seen: list[str] = []
    places = everywhere(prepare, check)
    assert places > 20
    assert len(leaked) < 12, leaked  # between the store's lease and this test's note of it
    assert reopened(router) == {}


def test_receive_many_interrupted_anywhere_passes_nothing_over(router: anabranch.Router) -> None:
    """Nor does it keep any, unless it was about to return them."""
    kept: list[str] = []

    def prepare(at: int) -> Callable[[], object]:
        queue = router.queue(f"q.{at}")
        queue.send_many([body_of(f"s.{n}") for n in range(3)])
        return lambda: queue.receive_many(3)

    def check(at: int, where: str) -> None:
        queue = router.queue(f"q.{at}")
        if where:
            messages = queue.receive_many(9)
            left = range(3 - len(messages), 3)
            assert [identity_of(message.body) for message in messages] == [f"s.{n}" for n in left], where
            assert store_of(router).stats().leased == 3, where  # none was passed over
            if len(messages) < 3:
                kept.append(where)
        queue.delete()

    assert everywhere(prepare, check, every=3) > 50
    assert len(kept) < 8, kept
    assert reopened(router) == {}


@pytest.mark.parametrize("what", ["checkpoint", "reclaim", "compact", "delete", "purge"])
def test_upkeep_interrupted_anywhere_loses_nothing(router: anabranch.Router, what: str, share: Share) -> None:
    queue, gone = router.queue("q"), router.queue("gone")
    kept: list[str] = []

    def prepare(at: int) -> Callable[[], object]:
        queue.send(body_of(f"s.{at}", 3000))
        kept.append(f"s.{at}")
        gone.send_many([body_of(f"g.{at}", 22_000), body_of(f"h.{at}", 22_000)])
        if what in ("reclaim", "compact"):
            for _ in range(2):
                message = gone.receive()
                assert message is not None
                message.ack()
        store = store_of(router)
        return {
            "checkpoint": store.checkpoint, "reclaim": store.reclaim, "compact": store.compact,
            "delete": gone.delete, "purge": gone.purge,
        }[what]  # fmt: skip

    def check(at: int, where: str) -> None:
        assert violations(router) == [], where
        assert queue.depth() == len(kept), where
        if len(kept) > 3:
            message = queue.receive()
            assert message is not None, where
            assert identity_of(message.body) == kept.pop(0), where
            message.ack()
        gone.purge()
        store_of(router).checkpoint()  # so that the next time begins where this one did

    assert everywhere(prepare, check, 29 if what == "compact" else 5, share) > 10
    assert reopened(router)["q"] == kept


def others_open(directory: Path) -> None:
    """Another thread can open another directory, use it and close it: nothing of the process is left locked."""

    def run() -> None:
        with anabranch.open(anabranch.Config(directory, [anabranch.StoreConfig("all", [">"])])) as router:
            router.queue("q").send_nowait(b"1").result(PATIENCE)
            router.queue("q").purge()

    with Parallel(run) as other:
        other.result()


def test_close_interrupted_anywhere_can_be_closed_again(tmp_path: Path, share: Share) -> None:
    options = anabranch.JournalOptions(segment_size=64 * 1024)
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], journal=options)])

    def prepare(at: int) -> Callable[[], object]:
        router = anabranch.open(config)
        router.queue("q").send(body_of(f"s.{at}"))
        sent.append(f"s.{at}")
        state["router"] = router
        return router.close

    def check(at: int, where: str) -> None:
        others_open(tmp_path / "other")
        state["router"].close()
        with anabranch.open(config) as router:
            assert contents(router)["q"] == sent, where
            assert violations(router) == [], where

    state: dict[str, anabranch.Router] = {}
    sent: list[str] = []
    assert everywhere(prepare, check, 19, share, (*OURS, *LIBRARY)) > 20


def test_open_interrupted_anywhere_can_be_opened_again(tmp_path: Path, share: Share) -> None:
    options = anabranch.JournalOptions(segment_size=64 * 1024)
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], journal=options)])
    opened: list[anabranch.Router] = []

    def prepare(at: int) -> Callable[[], object]:
        def run() -> None:
            router = anabranch.open(config)
            opened.append(router)
            router.queue("q").send(body_of(f"s.{at}"))

        return run

    def check(at: int, where: str) -> None:
        others_open(tmp_path / "other")
        while opened:
            opened.pop().close()
        with anabranch.open(config) as router:
            assert contents(router).get("q", []) in ([], [f"s.{at}"]), where
            assert violations(router) == [], where
            router.queue("q").purge()

    assert everywhere(prepare, check, 131, share, (*OURS, *LIBRARY)) > 200


@pytest.mark.parametrize("kind", ["journal", "memory", "sql"])
def test_a_reopening_interrupted_anywhere_leaves_the_store_to_be_used(kind: str, tmp_path: Path, share: Share) -> None:
    """By another thread at once."""
    options: dict[str, Any] = {kind: {}}
    store = anabranch.StoreConfig("all", [">"], **options)
    with anabranch.open(anabranch.Config(tmp_path / "data", [store])) as router:
        queue = router.queue("q")
        queue.send(b"0")
        sent = [] if kind == "memory" else [b"0"]

        def check(at: int, where: str) -> None:
            with Parallel(lambda: queue.send(b"%d" % at)) as other:
                other.result()
            found = [message.body for message in queue.browse()]
            if kind == "memory":
                assert found[-1:] == [b"%d" % at], where
                return
            sent.append(b"%d" % at)
            assert found == sent, where

        assert everywhere(lambda at: lambda: router.reopen("all"), check, 193, share, (*OURS, *LIBRARY)) > 200


@pytest.mark.parametrize("kind", ["journal", "memory", "sql"])
def test_a_first_use_interrupted_anywhere_leaves_the_store_free(kind: str, tmp_path: Path, share: Share) -> None:
    """The same router opens it the next time, with nothing collected before."""
    options: dict[str, Any] = {
        "journal": anabranch.JournalOptions(segment_size=64 * 1024),
        "memory": anabranch.MemoryOptions(),
        "sql": anabranch.SqlOptions(),
    }
    routers: list[anabranch.Router] = []

    def prepare(at: int) -> Callable[[], object]:
        store = anabranch.StoreConfig("all", [">"], **{kind: options[kind]})
        router = anabranch.open(anabranch.Config(tmp_path / str(at), [store]))
        routers.append(router)
        return lambda: router.queue("q").send(b"1")

    def check(at: int, where: str) -> None:
        router = routers.pop()
        others_open(tmp_path / "other")
        try:
            router.queue("q").send(b"2")
        except anabranch.AnabranchError as error:
            pytest.fail(f"{where}: {error}")
        assert [message.body for message in router.queue("q").browse()][-1:] == [b"2"], where
        router.close()

    assert everywhere(prepare, check, 193, share, (*OURS, *LIBRARY)) > 200


def test_a_read_of_a_database_interrupted_anywhere_raises_nothing_else(tmp_path: Path, share: Share) -> None:
    """Also in SQLAlchemy, which asserts that its cleaning up has ended."""
    store = anabranch.StoreConfig("all", [">"], sql=anabranch.SqlOptions(pool_min=2, pool_max=2))
    with anabranch.open(anabranch.Config(tmp_path / "data", [store])) as router:
        queue = router.queue("q")
        queue.send(b"1")

        def prepare(at: int) -> Callable[[], object]:
            return lambda: [message.body for message in queue.browse()]

        def check(at: int, where: str) -> None:
            assert [message.body for message in queue.browse()] == [b"1"], where

        assert everywhere(prepare, check, 7, share, (*OURS, "/sqlalchemy/")) > 200
