"""Fixtures by which tests of routers run once more with routers whose owner is another process."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any

import pytest

import anabranch
from anabranch.router.placement.on_disk.in_force import configuration_of
from anabranch.router.sharing.client.router import SharedRouter

from .not_remote import OF_ROUTERS

if TYPE_CHECKING:
    from .owner import Owner


@pytest.fixture(scope="session")
def owner() -> Iterator[Owner]:
    """The process that owns directories, one for all tests of a worker."""
    from .owner import Owner

    owner = Owner()
    yield owner
    owner.close()


def run_shared(metafunc: pytest.Metafunc) -> None:
    """Let a test run twice: with a router of its own process, and with one whose owner is another."""
    names = OF_ROUTERS.get(metafunc.module.__name__.removeprefix("tests."))
    if names is not None and metafunc.function.__name__ not in names:
        metafunc.parametrize("owned", ["here", "elsewhere"], indirect=True)


@pytest.fixture(autouse=True)
def owned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the owner of each directory is that the test opens."""
    if getattr(request, "param", "here") == "here":
        yield
        return
    owner = request.getfixturevalue("owner")
    opened: list[anabranch.Router] = []

    def open_elsewhere(source: str | PathLike[str] | anabranch.Config | None = None, **more: Any) -> anabranch.Router:
        router = OwnedElsewhere(owner, configuration_of(source))
        opened.append(router)
        return router.open()

    monkeypatch.setattr(anabranch, "open", open_elsewhere)
    yield
    for router in opened:
        router.close()


class OwnedElsewhere(SharedRouter):
    """A router of a directory that the owner opens when it is opened, and closes when it is closed."""

    def __init__(self, owner: Owner, config: anabranch.Config) -> None:
        super().__init__(config, starts=False)
        self._owner = owner

    def open(self, progress: Any = None) -> anabranch.Router:
        self._owner.ask("open_router", self.config)
        return super().open(progress)

    def close(self) -> None:
        opened = self._registry.opened
        super().close()
        if opened:
            self._owner.ask("close_router", self.config.directory)
