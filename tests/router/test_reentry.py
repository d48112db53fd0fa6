"""A signal handler that closes the router, or asks all its stores, wherever it has interrupted its own thread (G3)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.engine.engine import Engine
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.system.background import SLOW_SECONDS
from anabranch.router.placement.open_stores import OpenStores
from anabranch.router.transactions.decision_cleanup import DecisionCleanup

from ..contract.children import forked, reaped
from .disk import bodies, config, take

SECONDS = 60
SOON = 30.0


def handle(call: Callable[[], object]) -> list[BaseException | None]:
    """SIGUSR1 does it from now on: what it raised each time, None where it returned."""
    raised: list[BaseException | None] = []

    def handler(*_: object) -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)
        else:
            raised.append(None)

    signal.signal(signal.SIGUSR1, handler)
    return raised


def strike(owner: type, name: str) -> None:
    """The signal comes as this thread does it for the first time."""
    real = getattr(owner, name)
    me = threading.get_ident()

    def struck(*arguments: Any, **more: Any) -> Any:
        if threading.get_ident() == me:
            setattr(owner, name, real)
            signal.raise_signal(signal.SIGUSR1)
        return real(*arguments, **more)

    setattr(owner, name, struck)


def close_slowly() -> None:
    """Closing store `a` takes so long that background threads would close the others meanwhile."""
    real = JournalStore.close

    def close(store: JournalStore) -> None:
        if store.name == "a":
            threading.Event().wait(2 * SLOW_SECONDS)
        real(store)

    JournalStore.close = close  # type: ignore[assignment,method-assign]


Act = Callable[[anabranch.Router], object]

STRUCK: dict[str, tuple[type, str, Act]] = {
    "sweep": (JournalStore, "take_undelivered", lambda router: router.sweep()),
    "opening": (JournalStore, "open", lambda router: router.queue("c.q").send(b"1")),
    "removing": (JournalStore, "delete", lambda router: router.delete("b.gone")),
    "store lock": (Engine, "drain", lambda router: router.queue("b.q").browse().__next__()),
    "send": (JournalStore, "send", lambda router: router.queue("b.q").send(b"2")),
    "commit": (JournalStore, "prepare", lambda router: router.send("a.x,b.x", b"2")),
    "ack": (JournalStore, "ack", lambda router: take(router, "b.y").ack()),
    "close": (JournalStore, "close", lambda router: router.close()),
    "forgetting": (DecisionCleanup, "made_durable", lambda router: router.close()),
    "reopen": (OpenStores, "_close", lambda router: router.reopen("b")),
}
"""What is struck, and what does it."""


def in_child(path: Path, work: Callable[[anabranch.Router], None]) -> None:
    """Do it in a child, with a router over stores a and b that hold something, and look that nothing is lost: it must
    not hang, and a thread that waits for itself would hang here for ever."""

    def run() -> list[str]:
        real = JournalStore.close
        with anabranch.open(config(path)) as router:
            for name in ("a.q", "b.q", "b.y", "b.gone"):
                router.queue(name).send(b"1")
            router.send("a.x,b.x", b"1")
            work(router)
            JournalStore.close = real  # type: ignore[method-assign]
        with anabranch.open(config(path)) as router:
            found = bodies(router, "a.q", "b.q", "a.x", "b.x")
            assert [one[:1] for one in found] == [[b"1"]] * 4
            assert found[2] == found[3]
            assert router.in_doubt() == []
        return []

    assert reaped(forked(run), SECONDS) == 0


@pytest.mark.parametrize("where", STRUCK)
def test_one_that_closes_the_router_within_a_call_is_refused(where: str, tmp_path: Path) -> None:
    """And that call goes on as if nothing had been."""

    def work(router: anabranch.Router) -> None:
        owner, name, act = STRUCK[where]
        close_slowly()
        raised = handle(router.close)
        strike(owner, name)
        act(router)
        (error,) = raised
        assert isinstance(error, RuntimeError)
        assert "another thread" in str(error)

    in_child(tmp_path / "data", work)


@pytest.mark.parametrize("asked", ["sweep", "reclaim", "stats", "subscriptions", "reopen_decisions", "reopen"])
def test_one_that_goes_over_all_stores_within_a_call_is_refused(asked: str, tmp_path: Path) -> None:
    def work(router: anabranch.Router) -> None:
        raised = handle(lambda: getattr(router, asked)(*["b"] * (asked == "reopen")))
        strike(DecisionCleanup, "made_durable")
        router.close()
        (error,) = raised
        assert isinstance(error, RuntimeError)
        assert "signal handler" in str(error)

    in_child(tmp_path / "data", work)


def test_one_that_closes_the_router_ends_a_receive_that_waits(tmp_path: Path) -> None:
    def work(router: anabranch.Router) -> None:
        closed = threading.Event()

        def close() -> None:
            router.close()
            closed.set()

        def signals() -> None:
            while not closed.wait(0.005):  # until it strikes while the other thread does wait
                os.kill(os.getpid(), signal.SIGUSR1)

        raised = handle(close)
        sender = threading.Thread(target=signals)
        sender.start()
        with pytest.raises(anabranch.ClosedError):
            router.queue("b.empty").receive(SOON)
        sender.join(SOON)
        assert None in raised
        assert all(error is None or isinstance(error, RuntimeError) for error in raised)

    in_child(tmp_path / "data", work)


def test_one_that_uses_the_transaction_that_it_has_struck_is_refused(tmp_path: Path) -> None:
    def work(router: anabranch.Router) -> None:
        tx = router.transaction()
        raised = handle(lambda: tx.send("a.q", b"handler's"))
        strike(type(router._registry), "store_to_be")
        tx.send("a.q", b"2")
        (error,) = raised
        assert isinstance(error, RuntimeError) and "signal handler" in str(error)
        tx.commit()
        assert bodies(router, "a.q") == [[b"1", b"2"]]

    in_child(tmp_path / "data", work)


def test_what_a_generator_does_that_is_sent_from_is_no_handlers(tmp_path: Path) -> None:
    """Though ours has called it."""

    def work(router: anabranch.Router) -> None:
        other = anabranch.open(anabranch.Config(tmp_path / "other", [anabranch.StoreConfig("all", [">"])]))
        other.queue("a.q").send(b"moved")

        def moved() -> Iterator[bytes]:
            with other:
                assert len(other.stats().stores) == 1
                yield take(other, "a.q").body

        assert len(router.queue("b.q").send_many(moved())) == 1
        assert bodies(router, "b.q") == [[b"1", b"moved"]]
        with pytest.raises(anabranch.ClosedError):
            other.queue("a.q")

    in_child(tmp_path / "data", work)


def test_one_that_closes_the_router_between_calls(tmp_path: Path) -> None:
    def work(router: anabranch.Router) -> None:
        raised = handle(router.close)
        with pytest.raises(anabranch.ClosedError), router.transaction() as tx:
            tx.send("a.q", b"2")
            signal.raise_signal(signal.SIGUSR1)
        assert raised == [None]
        with pytest.raises(anabranch.ClosedError):
            router.queue("a.q")

    in_child(tmp_path / "data", work)
