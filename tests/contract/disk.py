"""What an author of a store provides for its tests, and what the tests share."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from anabranch.adapters.base import Message, Store
from anabranch.policies.destination import Destination

A = Destination.parse("a")
B = Destination.parse("b")
C = Destination.parse("topic://c")

PATIENCE = 20.0
"""Seconds after which a test that waits for something has failed."""


class Disk(ABC):
    """Where the stores of one test live. Closes at the end what it opened."""

    def __init__(self) -> None:
        self.opened: list[Store] = []

    @abstractmethod
    def create(self, **options: Any) -> Store:
        """A new, empty, open store. Options are JournalOptions' names: max_messages, duplicate_window and so on; a
        store that lacks one cannot keep the contract."""

    @abstractmethod
    def reopen(self, store: Store, **options: Any) -> Store:
        """Open again what was closed or has failed; with the options of before where none are given."""

    @abstractmethod
    def unopened(self, store: Store) -> Store:
        """Another object for the same data, not opened."""

    @abstractmethod
    def crash(self, store: Store, **options: Any) -> Store:
        """The process dies at this point, nothing is closed: what a new one finds, open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self.opened:
            store.close()


def bodies(store: Store, destination: Destination = A) -> list[bytes]:
    """All of a destination, in order, without taking any."""
    return [message.body for message in store.browse(destination)]


def take(store: Store, destination: Destination = A, timeout: float | None = 0) -> Message:
    """Receive one that must be there."""
    message = store.receive(destination, timeout)
    assert message is not None
    return message


def drain(store: Store, destination: Destination = A) -> list[bytes]:
    """Receive and ack until nothing is left."""
    found = []
    while (message := store.receive(destination)) is not None:
        found.append(message.body)
        message.ack()
    return found


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it holds, for what others do without telling."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.002)


def assert_whole(store: Store) -> None:
    """check() finds nothing."""
    assert list(store.check()) == []


class Parallel:
    """A call in another thread: `with Parallel(call) as parallel: ...; parallel.result()`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._started.set()
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(PATIENCE)
        if kind is None:
            assert not self._thread.is_alive(), "the call hangs"

    def result(self) -> Any:
        """What the call returned, or raised."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._result

    def outlives(self, seconds: float) -> bool:
        """Whether it is still at it after so long."""
        self._thread.join(seconds)
        return self._thread.is_alive()
