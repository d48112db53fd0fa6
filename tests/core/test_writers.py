"""How tickets become writes, and what happens when a write's outcome is not known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from anabranch_onefile.backend import OneFileBackend, OneFileOptions

from anabranch.adapters.core import Store
from anabranch.adapters.core.backend.writers import Threaded
from anabranch.adapters.core.operations.plan import Plan
from anabranch.policies.errors import ClosedError, OutcomeUnknownError, StoreFailedError, StoreFullError

from ..contract.disk import A, B, bodies, take
from .made import onefile, ticket_of


class Refusing(OneFileBackend):
    """Raises what it is told to, before or after it has written."""

    before: BaseException | None = None
    after: BaseException | None = None
    answer: Callable[[], bool] = staticmethod(lambda: True)

    def write(self, plan: Plan) -> None:
        if self.before is not None:
            error, self.before = self.before, None
            raise error
        super().write(plan)
        if self.after is not None:
            error, self.after = self.after, None
            raise error

    def took_effect(self, plan: Plan) -> bool:
        return self.answer()


class RefusingStore(Store):
    backend_type = Refusing
    options_model = OneFileOptions
    backend: Refusing


@pytest.fixture
def store(tmp_path: Path) -> RefusingStore:
    options = OneFileOptions()
    RefusingStore.create("s", tmp_path / "s", options)
    store = RefusingStore("s", tmp_path / "s", options)
    store.open()
    return store


def test_what_is_refused_has_not_happened(store: RefusingStore) -> None:
    store.send(A, b"1")
    message = take(store)
    store.backend.before = StoreFullError("full")
    with pytest.raises(StoreFullError):
        store.send(A, b"2")
    store.backend.before = StoreFullError("full")
    with pytest.raises(StoreFullError):
        message.ack()
    message.ack()
    assert bodies(store) == []
    store.close()


def test_an_unknown_outcome_that_took_effect(store: RefusingStore) -> None:
    """The backend tells later; nothing is written, and nothing more is seen, before that."""
    known = [False]

    def answer() -> bool:
        if not known[0]:
            raise StoreFailedError("away")
        return True

    store.backend.answer = answer
    store.backend.after = OutcomeUnknownError("cut off")
    with pytest.raises(OutcomeUnknownError):
        store.send(A, b"1")
    with pytest.raises(StoreFailedError):
        store.send(A, b"2")
    assert bodies(store) == []
    known[0] = True
    store.send(A, b"3")
    assert bodies(store) == [b"1", b"3"]
    store.close()


def test_an_unknown_outcome_that_did_not_take_effect(store: RefusingStore) -> None:
    """It is tried again at once; an ack that did not happen gives its message back."""
    store.send(A, b"1")
    message = take(store)
    store.backend.answer = lambda: False
    store.backend.before = OutcomeUnknownError("cut off")
    message.ack()
    assert bodies(store) == []
    store.close()


def test_who_queues_more_keeps_his_order() -> None:
    with onefile() as disk:
        store = disk.create()
        futures = [store.send_nowait(A if n % 3 else B, str(n).encode()) for n in range(60)]
        for future in futures:
            future.result(60)
        assert bodies(store) == [str(n).encode() for n in range(60) if n % 3]
        assert store.stats().batches < 60


def test_what_is_queued_as_the_store_closes_is_refused(store: RefusingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the writer's thread too, whoever comes to it first: taken out by both, a ticket would never be done."""
    writer = store._writer
    assert isinstance(writer, Threaded)
    store.close()
    monkeypatch.setattr(store.backend, "write", lambda plan: pytest.fail("written after the end"))
    tickets = [ticket_of(), ticket_of()]
    writer._queue.extend(tickets)
    assert not writer.step()
    assert [type(ticket.error) for ticket in tickets] == [ClosedError, ClosedError]
    assert [ticket.done for ticket in tickets] == [True, True]
