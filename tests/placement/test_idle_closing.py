"""Stores that are closed for being idle, at each step of a call (rule G7): nobody notices, nothing is done twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.backend.writers import Threaded
from anabranch.adapters.wal import Log, Ticket
from anabranch.policies.errors import ClosedError

from ..contract.disk import Parallel

PATIENCE = 60.0


class Closer:
    """Closes for idleness the store in whose queue something is put, just before or just after that, the `at`-th time
    that the thread which made this puts anything into a queue of its."""

    def __init__(self, router: anabranch.Router, at: int, before: bool) -> None:
        self._router, self._at, self._before = router, at, before
        self._thread = threading.get_ident()
        self.count = 0
        self.closed = 0
        """How many stores were."""

    def put(self, queue: object, put: Callable[[], object]) -> None:
        store = self._store_of(queue)
        if store is None or threading.get_ident() != self._thread:
            put()
            return
        self.count += 1
        now = self.count == self._at
        if now and self._before:
            self._close(store)
        put()
        if now and not self._before:
            self._close(store)

    def _store_of(self, queue: object) -> Store | None:
        for store in self._router._registry.open_stores():
            writer = store._writer
            log = getattr(writer, "_log", None)
            if queue in (writer, log):
                return store
        return None

    def _close(self, store: Store) -> None:
        row = self._router._registry.table.stores[store.store_id]
        with Parallel(lambda: self._router._registry._stores.close_if_idle(row.path)) as closing:
            self.closed += closing.result()


closer: list[Closer] = []


def put(queue: object, real: Callable[[], object]) -> None:
    if closer:
        closer[0].put(queue, real)
    else:
        real()


@pytest.fixture(autouse=True)
def queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    submit, real = Log.submit, Threaded._put

    def submitted(log: Log, ticket: Ticket) -> Ticket:
        put(log, lambda: submit(log, ticket))
        return ticket

    monkeypatch.setattr(Log, "submit", submitted)
    monkeypatch.setattr(Threaded, "_put", lambda writer, tickets: put(writer, lambda: real(writer, tickets)))
    yield
    closer.clear()


@contextmanager
def closing(router: anabranch.Router, at: int, before: bool) -> Iterator[Closer]:
    closer[:] = [Closer(router, at, before)]
    try:
        yield closer[0]
    finally:
        closer.clear()


KINDS: dict[str, dict[str, Any]] = {
    "journal": {"journal": anabranch.JournalOptions(segment_size=64 * 1024, pool_files=0)},
    "sql": {"sql": anabranch.SqlOptions()},
    "limited": {"journal": anabranch.JournalOptions(segment_size=64 * 1024, pool_files=0, max_messages=1000)},
}


def opened(directory: Path, kind: str) -> anabranch.Router:
    stores = [anabranch.StoreConfig(name, [f"queue://{name}.>"], **KINDS[kind]) for name in ("a", "b")]
    router = anabranch.open(anabranch.Config(directory, stores))
    router.send("a.q,b.q,a.other", b"0")
    return router


def one_store(router: anabranch.Router, body: bytes) -> None:
    with router.transaction() as tx:
        tx.send("a.q", body)
        tx.send("a.other", body)
        (first, second) = tx.commit()
    assert first.seq and second.seq


def two_stores(router: anabranch.Router, body: bytes) -> None:
    with router.transaction() as tx:
        tx.send("a.q", body)
        tx.send("b.q", body)
        (first, second) = tx.commit()
    assert first.seq and second.seq


def voted(router: anabranch.Router, body: bytes) -> None:
    tx = router.transaction()
    tx.send("a.q", body)
    tx.send("b.q", body)
    tx.vote()
    (first, second) = tx.commit()
    assert first.seq and second.seq


def external(router: anabranch.Router, body: bytes) -> None:
    xid = anabranch.Xid(1, body.decode())
    tx = router.transaction(xid)
    tx.send("a.q", body)
    tx.send("b.q", body)
    tx.prepare()
    router.commit(xid)


def rolled_back(router: anabranch.Router, body: bytes) -> None:
    """And sent otherwise."""
    xid = anabranch.Xid(1, body.decode())
    tx = router.transaction(xid)
    tx.send("a.q", b"never")
    tx.send("b.q", b"never")
    tx.prepare()
    router.rollback(xid)
    assert router.in_doubt() == [] and router.recover() == []
    router.send("a.q", body)


def nowait(router: anabranch.Router, body: bytes) -> None:
    for name in ("a.q", "b.q"):
        assert router.queue(name).send_nowait(body).result(PATIENCE).seq
    with router.transaction() as tx:
        tx.send("a.other", body)
        tx.send("b.q", body)
        assert len(tx.commit_nowait().result(PATIENCE)) == 2


def plain(router: anabranch.Router, body: bytes) -> None:
    assert router.queue("a.q").send(body).seq
    assert len(router.queue("a.other").send_many([body, body])) == 2


CALLS: dict[str, tuple[Callable[[anabranch.Router, bytes], None], dict[str, int]]] = {
    "one store": (one_store, {"a.q": 1, "a.other": 1}),
    "two stores": (two_stores, {"a.q": 1, "b.q": 1}),
    "voted": (voted, {"a.q": 1, "b.q": 1}),
    "external": (external, {"a.q": 1, "b.q": 1}),
    "rolled back": (rolled_back, {"a.q": 1}),
    "nowait": (nowait, {"a.q": 1, "b.q": 2, "a.other": 1}),
    "plain": (plain, {"a.q": 1, "a.other": 2}),
}
"""What is called, and how often its body is in each queue then."""


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_a_store_closed_at_any_step(call: str, kind: str, before: bool, tmp_path: Path) -> None:
    """As it is about to queue what it asks for, or has just done so."""
    act, sent = CALLS[call]
    want: dict[str, list[bytes]] = {name: [b"0"] for name in ("a.q", "b.q", "a.other")}
    closed = at = 0
    with opened(tmp_path / "data", kind) as router:
        while True:
            at += 1
            body = b"%d" % at
            with closing(router, at, before) as its:
                act(router, body)
            for name, count in sent.items():
                want[name] += [body] * count
            found = {name: [message.body for message in router.queue(name).browse()] for name in want}
            assert found == want, at
            assert router.in_doubt() == []
            closed += its.closed
            if its.count < at:
                break
            assert at < 100
    assert closed or (call in ("rolled back",) and not before)
    assert at > 1
    with anabranch.open(router.config) as again:
        assert {name: [message.body for message in again.queue(name).browse()] for name in want} == want


def test_the_router_that_is_closed_meanwhile_says_so(tmp_path: Path) -> None:
    """It is no store that was idle."""
    router = opened(tmp_path / "data", "journal")
    tx = router.transaction()
    tx.send("a.q", b"1")
    tx.send("b.q", b"1")
    router.close()
    with pytest.raises(ClosedError):
        tx.commit()
    with anabranch.open(router.config) as again:
        assert [message.body for message in again.queue("a.q").browse()] == [b"0"]
        assert again.in_doubt() == []
