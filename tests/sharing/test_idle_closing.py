"""Pages that an owner reads for a client of a store that is just closed for being idle (rule G7): they are whole."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.policies.names.destination import Destination
from anabranch.router.sharing.owner.calls import CALLS
from anabranch.router.sharing.owner.session import Session

from ..contract.disk import Parallel


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    """A router with three messages and three values."""
    with anabranch.open(tmp_path / "data") as router:
        for number in range(3):
            router.queue("jobs").send(b"%d" % number)
            router.map("state").put(str(number), b"x")
        yield router


@pytest.fixture
def session(router: anabranch.Router) -> Iterator[Session]:
    """What the owner keeps of a client."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        yield Session(ours, lambda session: None, router)


def close_first(
    monkeypatch: pytest.MonkeyPatch, router: anabranch.Router, of: type, name: str, destination: Destination
) -> list[bool]:
    """Close the store of a destination once just before a method is called; returns whether it was, then."""
    real: Callable[..., Any] = getattr(of, name)
    closed: list[bool] = []

    def call(*given: Any) -> Any:
        if not closed:
            store = router._registry.store_of(destination)
            assert store is not None
            row = router._registry.table.stores[store.store_id]
            with Parallel(lambda: router._registry._stores.close_if_idle(row.path)) as closer:
                closed.append(closer.result())
        return real(*given)

    monkeypatch.setattr(of, name, call)
    return closed


@pytest.mark.parametrize("name", ["browse", "newer"])
def test_messages_of_a_store_that_was_just_closed(
    name: str, router: anabranch.Router, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = router.queue("jobs").destination
    closed = close_first(monkeypatch, router, Store, "browse", jobs)
    given = [str(jobs), None, 10, 0, True] if name == "browse" else [str(jobs), 0]
    page = CALLS[name].with_(session, given)()
    assert closed == [True]
    assert [fields[2] for fields in page] == [b"0", b"1", b"2"]


def test_values_of_a_store_that_was_just_closed(
    router: anabranch.Router, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = router.map("state").destination
    store = router._registry.store_of(state)
    assert store is not None
    closed = close_first(monkeypatch, router, type(store.maps), "items", state)
    page = CALLS["map_items"].with_(session, [str(state), "", None, None])()
    assert closed == [True]
    assert [key for key, _ in page] == ["0", "1", "2"]
