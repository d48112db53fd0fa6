"""Ctrl-C at every bytecode of what hosts call: settling by token, rejecting, listening, and what does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import anabranch
from anabranch import Message, Settlement

from ..contract.disk import eventually
from .interrupts import everywhere
from .ledger import body_of, identity_of, violations

NEVER = anabranch.Sync.NEVER


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    """Two stores: everything, and its dead letters."""
    options = anabranch.JournalOptions(sync=NEVER, segment_size=64 * 1024, dead_letter="dead")
    stores = [anabranch.StoreConfig("all", [">"], journal=options), anabranch.StoreConfig("dead", ["dead"])]
    settings = anabranch.Config(tmp_path / "data", stores, transactions=anabranch.TransactionOptions(sync=NEVER))
    with anabranch.open(settings) as router:
        given(router, 0).reject()  # both are open, and the decision log: how that goes under Ctrl-C is another test
        letter = router.queue("dead").receive()
        assert letter is not None
        letter.ack()
        yield router
        assert violations(router) == []


def given(router: anabranch.Router, at: int) -> Message:
    """Sent just now, and leased."""
    router.queue("q").send(body_of(f"s.{at}"))
    message = router.queue("q").receive()
    assert message is not None
    return message


def let_go(message: Message) -> None:
    """Whoever was interrupted may hold it still."""
    with suppress(anabranch.UnknownMessageError):
        message.release()


def leased(router: anabranch.Router) -> int:
    return sum(store.leased for store in router.stats().stores.values())


@pytest.mark.parametrize("waiting", [True, False])
def test_settling_by_token(router: anabranch.Router, waiting: bool) -> None:
    """It can be tried again until it has taken effect."""
    state: dict[str, str] = {}

    def prepare(at: int) -> Callable[[], object]:
        token = state["token"] = given(router, at).token
        if waiting:
            return lambda: router.settle([token], Settlement.ACK)
        return lambda: router.settle_nowait([token], Settlement.ACK)

    def settled() -> bool:
        router.settle([state["token"]], Settlement.ACK)
        return router.queue("q").depth() == 0 and leased(router) == 0

    assert everywhere(prepare, lambda at, where: eventually(settled), every=5) > 10


def test_releasing_by_token(router: anabranch.Router) -> None:
    """Free in the end, once: nobody has it any more who does not know."""
    state: dict[str, str] = {}

    def prepare(at: int) -> Callable[[], object]:
        token = state["token"] = given(router, at).token
        return lambda: router.settle_nowait([token], Settlement.RELEASE)

    def check(at: int, where: str) -> None:
        eventually(lambda: not router.settle([state["token"]], Settlement.RELEASE) or leased(router) == 0)
        message = router.queue("q").receive()
        assert message is not None, where
        assert router.queue("q").receive() is None, where
        message.ack()

    assert everywhere(prepare, check, every=5) > 10


def test_rejecting(router: anabranch.Router) -> None:
    """In its queue or in the dead letters, never in both, and nobody holds it."""
    state: dict[str, Message] = {}
    queue, dead = router.queue("q"), router.queue("dead")

    def prepare(at: int) -> Callable[[], object]:
        message = state["message"] = given(router, at)
        return lambda: message.reject("it is struck by lightning")

    def check(at: int, where: str) -> None:
        let_go(state["message"])
        eventually(lambda: leased(router) == 0 and router.in_doubt() == [])
        found: list[Message] = []

        def is_there() -> bool:  # not before the background has ended what was struck
            found.extend(message for message in (queue.receive(), dead.receive()) if message is not None)
            return bool(found)

        eventually(is_there, lambda: where)
        assert [identity_of(message.body) for message in found] == [f"s.{at}"], where
        found[0].ack()
        assert queue.depth() + dead.depth() == 0, where

    assert everywhere(prepare, check, every=40) > 100


def test_putting_dead_letters_back(router: anabranch.Router) -> None:
    """In its queue or in the dead letters, never in both, and nobody holds it; the next call goes on."""
    queue, dead = router.queue("q"), router.queue("dead")

    def prepare(at: int) -> Callable[[], object]:
        given(router, at).reject()
        return lambda: router.requeue("dead")

    def check(at: int, where: str) -> None:
        eventually(lambda: leased(router) == 0 and router.in_doubt() == [], lambda: where)
        assert queue.depth() + dead.depth() == 1, where
        router.requeue("dead")
        message = queue.receive()
        assert message is not None, where
        assert (identity_of(message.body), message.headers["requeued_count"]) == (f"s.{at}", 1), where
        message.ack()

    assert everywhere(prepare, check, every=7) > 50


@pytest.mark.parametrize("how", ["release", "commit_nowait"])
def test_a_transaction(router: anabranch.Router, how: str) -> None:
    """It is whole, and what it releases is free once it has ended."""
    state: dict[str, Message] = {}
    begun: list[anabranch.Transaction] = []
    queue, audit = router.queue("q"), router.queue("audit")

    def prepare(at: int) -> Callable[[], object]:
        message = state["message"] = given(router, at)

        def release() -> None:
            with router.transaction() as tx:
                begun.append(tx)
                tx.send("audit", body_of(f"s.{at}"))
                tx.release(message)

        def commit_nowait() -> None:
            with router.transaction() as tx:
                begun.append(tx)
                tx.send("audit", body_of(f"s.{at}"))
                tx.ack(message)
                tx.commit_nowait()

        return release if how == "release" else commit_nowait

    def check(at: int, where: str) -> None:
        let_go(state["message"])
        if begun and where.startswith("Transaction.__exit__:") and begun[-1].state == "open":
            begun[-1].rollback()  # nothing of ours had run at the end of its block: else its time would end it
        eventually(lambda: leased(router) == 0, lambda: where)
        left, sent = queue.receive(), audit.receive()
        if how == "release":
            assert left is not None, where
        else:
            assert (left is None) == (sent is not None), where
        for message in (left, sent):
            if message is not None:
                message.ack()
        assert queue.depth() + audit.depth() == 0, where

    assert everywhere(prepare, check, every=5) > 50


def test_a_send_that_opens_no_store(router: anabranch.Router) -> None:
    """Sent again under its id it is stored once, in order."""
    queue = router.queue("q")
    queue.send(body_of("s.0"))

    def prepare(at: int) -> Callable[[], object]:
        router.reopen("all")
        router._registry._stores.forget_found()
        (row,) = [row for name, row in router._registry.rows_by_name().items() if name == "all"]
        router._registry._stores.close_at(row.path)
        return lambda: queue.send_nowait(body_of(f"s.{at}"), None, f"s.{at}")

    def check(at: int, where: str) -> None:
        queue.send(body_of(f"s.{at}"), message_id=f"s.{at}")
        assert [identity_of(message.body) for message in queue.browse()] == ["s.0", f"s.{at}"], where
        for message in (queue.receive(), queue.receive()):
            assert message is not None
            (message.release if identity_of(message.body) == "s.0" else message.ack)()

    assert everywhere(prepare, check, every=3) > 10


def test_closing_a_listener(router: anabranch.Router) -> None:
    """Closed again it is closed: what was sent was heard once, or is free."""
    state: dict[str, anabranch.Listener] = {}
    queue = router.queue("q")
    heard: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        heard.clear()
        listener = state["listener"] = queue.listen(heard.append)
        queue.send(body_of(f"s.{at}"))
        return listener.close

    def check(at: int, where: str) -> None:
        eventually(lambda: not state["listener"].close())
        assert leased(router) == len(heard), where
        found = [message for message in (queue.receive(), *heard) if message is not None]
        assert [identity_of(message.body) for message in found] == [f"s.{at}"], where
        found[0].ack()
        assert router.stats().stores["all"].waiting == 0, where

    assert everywhere(prepare, check, every=2) > 10


def test_beginning_to_listen(router: anabranch.Router) -> None:
    """It listens, or nobody stands in line: what is sent then is heard or received."""
    queue = router.queue("q")
    heard: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        heard.clear()
        return lambda: queue.listen(heard.append)

    def check(at: int, where: str) -> None:
        queue.send(body_of(f"s.{at}"))
        message = queue.receive(0) or next(iter(heard), None)
        if message is None:
            eventually(lambda: bool(heard))
            message = heard[0]
        message.ack()
        router.reopen("all")  # which ends all listeners

    assert everywhere(prepare, check, every=7) > 10
