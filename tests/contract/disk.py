"""What an author of a store provides for its tests, and what the tests share."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import SubscriptionKey
from anabranch.policies.names.destination import Destination

A = Destination.parse("a")
B = Destination.parse("b")
C = Destination.parse("c")
T = Destination.parse("topic://t")

PATIENCE = 120.0
"""Seconds after which a test that waits for something has failed; a busy machine takes its time."""


PLACES = ("here", "closed", "crashed")
"""What has happened to the store that a test goes on with: nothing, or one or the other end of its process. A test with
an argument `place` runs with each of them, where something survives."""

Test = TypeVar("Test", bound=Callable[..., None])


def survives(test: Test) -> Test:
    """It asks for nothing but what survives the process, so it is not for volatile stores (volatile.py is)."""
    test.survives = True  # type: ignore[attr-defined]
    return test


def in_one_store(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test once with each of these, as `parametrize` would, all with the same store: for what a store refuses
    and is as before, and for what goes to destinations of its own. To open a store costs more than such a test."""
    given = [name.strip() for name in names.split(",")]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def call(*arguments: Any, **fixtures: Any) -> None:
            for value in values:
                named = dict(zip(given, value if len(given) > 1 else [value], strict=True))
                try:
                    test(*arguments, **fixtures, **named)
                except BaseException as error:
                    error.add_note(f"with {named}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in given]
        call.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


class Disk(ABC):
    """Where the stores of one test live. Closes at the end what it opened."""

    volatile: ClassVar[bool] = False
    """Nothing survives: what reopen and crash find is empty. As the Store says of itself."""
    owner: ClassVar[str] = "this process"
    """What is said to a second opener of a store which this process has open (a pattern)."""
    idle: ClassVar[Mapping[str, Any]] = {}
    """Options with which a store does nothing by itself for as long as a test runs."""
    many_priorities: int = 600
    """Of so many a store has room at once, even a small one."""
    many_leases: int = 3000
    """So many are taken one by one to see that they are many."""

    def __init__(self) -> None:
        self.opened: list[Store] = []

    @abstractmethod
    def create(self, **options: Any) -> Store:
        """A new, empty, open store. Options have StoreOptions' names (max_messages, duplicate_window and so on; a
        store that lacks one cannot keep the contract), and beside them there is `max_bytes`: the most bytes of
        messages that the store holds, whatever it is called there."""

    @abstractmethod
    def reopen(self, store: Store, **options: Any) -> Store:
        """Close it and open it again, also one that is closed already or has failed; with the options of before where
        none are given."""

    @abstractmethod
    def unopened(self, store: Store) -> Store:
        """Another object for the same data, not opened."""

    @abstractmethod
    def crash(self, store: Store, **options: Any) -> Store:
        """The process dies at this point, nothing is closed: what a new one finds, open. `store` itself goes on, beside
        it and apart from it: a copy of its data is what is opened."""

    def later(self, store: Store, place: str = "crashed") -> Store:
        """The store as the next process finds it, or as it is, if `place` is `here` or if there is nothing to find."""
        if place == "here" or self.volatile:
            return store
        return self.crash(store) if place == "crashed" else self.reopen(store)

    def views(self, store: Store) -> list[Store]:
        """The store, and what a new process would find now: to be asked the same."""
        return [store] if self.volatile else [store, self.crash(store)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self.opened:
            store.close()


def _of(subscription: SubscriptionKey | None) -> dict[str, Any]:
    return {} if subscription is None else {"subscription": subscription}


def bodies(store: Store, destination: Destination = A, subscription: SubscriptionKey | None = None) -> list[bytes]:
    """All of a destination, in order, without taking any."""
    return [message.body for message in store.browse(destination, **_of(subscription))]


def take(
    store: Store, destination: Destination = A, timeout: float | None = 0, subscription: SubscriptionKey | None = None
) -> Message:
    """Receive one that must be there. It stays leased, whether the test holds it or not."""
    message = store.receive(destination, timeout, **_of(subscription))
    assert message is not None
    message._note.kept = True  # as for who has its token
    return message


def drain(store: Store, destination: Destination = A, subscription: SubscriptionKey | None = None) -> list[bytes]:
    """Receive and ack until nothing is left."""
    found = []
    while (message := store.receive(destination, 0, **_of(subscription))) is not None:
        found.append(message.body)
        message.ack()
    return found


def drain_at_once(store: Store, destination: Destination = A) -> list[bytes]:
    """Receive until nothing is left, and ack all in one call."""
    messages = list(iter(lambda: store.receive(destination, 0), None))
    store.ack(messages)
    return [message.body for message in messages]


def eventually(condition: Callable[[], object], otherwise: Callable[[], object] = lambda: "nothing is said") -> None:
    """Wait until it holds, for what others do without telling. Raises AssertionError with what `otherwise` returns."""
    deadline, pause = time.monotonic() + PATIENCE, 0.0005
    while not condition():
        assert time.monotonic() < deadline, f"it does not come about: {otherwise()}"
        time.sleep(pause)
        pause = min(2 * pause, 0.016)


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
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._started.set()
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self.thread.start()
        assert self._started.wait(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.join(PATIENCE)
        if kind is None:
            assert not self.thread.is_alive(), "the call hangs"

    def result(self) -> Any:
        """What the call returned, or raised."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._result

    def outlives(self, seconds: float) -> bool:
        """Whether it is still at it after so long."""
        self.thread.join(seconds)
        return self.thread.is_alive()
