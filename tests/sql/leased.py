"""A database that routers of several directories have in turn, by a lease: what tests of transactions over it share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.sql.shared import SharedStore
from anabranch.policies.errors import StoreFailedError


class Shared:
    """The database, and the routers of nodes that a test opens."""

    def __init__(self, directory: Path, url: str, many: bool = False) -> None:
        """`many`: they have it at the same time, instead of in turn."""
        self.directory, self.url, self.many, self.stack = directory, url, many, ExitStack()
        self.prefix = "shared_" if many else ""
        """The beginning of the names of its tables."""

    def config(self, name: str, **more: Any) -> anabranch.Config:
        """Return what a node has: two journals, a memory store, and the leased store for everything else."""
        use = {"shared": True} if self.many else {"lease_expiration": 60.0}
        leased = {"url": self.url, "pool_min": 0, **use, **more}
        return anabranch.Config(
            self.directory / name,
            [
                anabranch.StoreConfig("a", ["a.>"], kind="journal"),
                anabranch.StoreConfig("b", ["b.>"], kind="journal"),
                anabranch.StoreConfig("memory", ["memory.>"], kind="memory"),
                anabranch.StoreConfig("primary", ["queue://>" if self.many else ">"], kind="sql", options=leased),
            ],
        )

    def router(self, name: str, **more: Any) -> anabranch.Router:
        return self.stack.enter_context(anabranch.open(self.config(name, **more)))

    def killed(self, router: anabranch.Router) -> None:
        """Let a node be gone: it has closed nothing that another could see but its connections."""
        for store in router._registry.open_stores():
            if isinstance(store, SharedStore):
                store._end(leave=False)
            else:
                store.backend.close(clean=False)
        router._registry.stop(StoreFailedError("the process was killed"))

    def expire(self) -> None:
        """Whoever has the lease has it no more: its process has gone."""
        engine = create_engine(self.url)
        with engine.begin() as connection:
            gone = "DELETE FROM shared_routers WHERE number <> 0" if self.many else "UPDATE lease SET expires = 1"
            connection.execute(text(gone))
        engine.dispose()


def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    """Yield one of SQLite and one of PostgreSQL, in turn: for a fixture that has these as its params."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    if request.param in ("postgresql", "shared"):
        url = request.getfixturevalue("postgres_url")
    made = Shared(tmp_path, url, request.param == "shared")
    with made.stack:
        yield made


def replace(monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[..., Any]) -> None:
    """Let stores of each kind do this instead: it is called with what they do otherwise, and what that is given."""

    def replaced(usual: Any) -> Any:
        return lambda self, *given: call(usual, self, *given)

    for kind in (Store, SharedStore):
        monkeypatch.setattr(kind, name, replaced(getattr(kind, name)))


def bodies(router: anabranch.Router, name: str = "q") -> list[bytes]:
    """Return what a queue has."""
    return [message.body for message in router.queue(name).browse()]


def ready(router: anabranch.Router, name: str = "q") -> list[bytes]:
    """Return what a queue has that nobody holds."""
    messages = router.queue(name).receive_many(100)
    router.release(messages, delivered=False)
    return [message.body for message in messages]
