"""A database that routers of several directories have in turn, by a lease: what tests of transactions over it share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import anabranch
from anabranch.policies.errors import StoreFailedError


class Shared:
    """The database, and the routers of nodes that a test opens."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.url, self.stack = directory, url, ExitStack()

    def config(self, name: str, **more: Any) -> anabranch.Config:
        """Return what a node has: two journals, a memory store, and the leased store for everything else."""
        leased = {"url": self.url, "lease_expiration": 60.0, "pool_min": 0, **more}
        return anabranch.Config(
            self.directory / name,
            [
                anabranch.StoreConfig("a", ["a.>"], kind="journal"),
                anabranch.StoreConfig("b", ["b.>"], kind="journal"),
                anabranch.StoreConfig("memory", ["memory.>"], kind="memory"),
                anabranch.StoreConfig("primary", [">"], kind="sql", options=leased),
            ],
        )

    def router(self, name: str, **more: Any) -> anabranch.Router:
        return self.stack.enter_context(anabranch.open(self.config(name, **more)))

    def killed(self, router: anabranch.Router) -> None:
        """Let a node be gone: it has closed nothing that another could see but its connections."""
        for store in router._registry.open_stores():
            store.backend.close(clean=False)
        router._registry.stop(StoreFailedError("the process was killed"))

    def expire(self) -> None:
        """Whoever has the lease has it no more: its process has gone."""
        engine = create_engine(self.url)
        with engine.begin() as connection:
            connection.execute(text("UPDATE lease SET expires = 1"))
        engine.dispose()


def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    """Yield one of SQLite and one of PostgreSQL, in turn: for a fixture that has these as its params."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    made = Shared(tmp_path, url)
    with made.stack:
        yield made


def bodies(router: anabranch.Router, name: str = "q") -> list[bytes]:
    """Return what a queue has."""
    return [message.body for message in router.queue(name).browse()]


def ready(router: anabranch.Router, name: str = "q") -> list[bytes]:
    """Return what a queue has that nobody holds."""
    messages = router.queue(name).receive_many(100)
    router.release(messages, delivered=False)
    return [message.body for message in messages]
