"""What the router's tests share, those of transactions over several stores above all: three stores, a disk that fails
where a test says, and the directory as a killed process leaves it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.sql import SqlStore

from .. import taking
from ..contract.children import reaped
from ..sql.disk import lead_of
from ..wal.logs import quiet

NEVER = anabranch.Sync.NEVER
SYNCED = anabranch.JournalOptions(segment_size=64 * 1024, checkpoint_interval=3600, pool_files=0)
OPTIONS = anabranch.JournalOptions(segment_size=64 * 1024, checkpoint_interval=3600, pool_files=0, sync=NEVER)
"""No checkpoint while a directory is copied, and no file made ahead that a full disk would still have."""


def config(
    directory: Path, options: anabranch.JournalOptions = OPTIONS, b: anabranch.JournalOptions | None = None, **more: Any
) -> anabranch.Config:
    """Stores `a`, `b`, `c` for the queues a.>, b.>, c.>, and one for each queue of each.>. `more` are the options of
    transactions; they do not sync here where no test asks for it."""
    more = {"sync": NEVER, **more}
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("a", ["queue://a.>"], journal=options),
            anabranch.StoreConfig("b", ["queue://b.>"], journal=b or options),
            anabranch.StoreConfig("c", ["queue://c.>"], journal=options),
            anabranch.StoreConfig("each", ["queue://each.>"], per_destination=True, journal=options),
        ],
        transactions=anabranch.TransactionOptions(**more),
    )


class TooSlowError(Exception):
    """A transaction timed out before what it was to time out after."""


@contextmanager
def in_time() -> Iterator[None]:
    """What is done here comes before a timeout; TooSlowError where the machine was too busy for that."""
    try:
        yield
    except anabranch.TransactionError as error:
        if "timed out" in str(error):
            raise TooSlowError from error
        raise


def with_time_enough(test: Callable[[float, Path], None], seconds: float, path: Path) -> None:
    """Call it with a timeout of transactions and a directory of its own; with a longer timeout if it was too slow."""
    for number in range(4):
        try:
            return test(seconds * 10**number, path / f"try-{number}")
        except TooSlowError as error:
            slow = error
    raise slow


def take(router: anabranch.Router, name: str) -> Message:
    """Receive one that must be there, of a queue."""
    return taking.take(router.queue(name))


def contents(router: anabranch.Router, name: str) -> list[bytes]:
    """What a queue holds, in order."""
    return [message.body for message in router.queue(name).browse()]


def bodies(router: anabranch.Router, *names: str) -> list[list[bytes]]:
    """What the queues hold, in order."""
    return [contents(router, name) for name in names]


def drain(router: anabranch.Router, name: str) -> list[bytes]:
    """Receive and ack until nothing is left."""
    return taking.drained(router.queue(name))


def said_in_a_child(*calls: Callable[[], object]) -> list[str]:
    """What these raise in a forked child; `returned` for what does not."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        said = []
        for call in calls:
            try:
                call()
                said.append("returned")
            except Exception as error:
                said.append(type(error).__name__)
        os.write(writer, " ".join(said).encode())
        os._exit(0)
    os.close(writer)
    assert reaped(pid) == 0
    with os.fdopen(reader) as pipe:
        return pipe.read().split()


def copied(router: anabranch.Router, copy: Path) -> Path:
    """A copy of the data directory. Nobody may write meanwhile."""
    nobody = shutil.ignore_patterns("*.lock", "*.tmp", "*.sock", "clients")
    shutil.copytree(router.config.directory, copy, ignore=nobody)
    return copy


def crashed(router: anabranch.Router, copy: Path) -> Path:
    """The data directory as it is when the process is killed now."""
    with still(router):
        return copied(router, copy)


@contextmanager
def still(router: anabranch.Router) -> Iterator[None]:
    """Nobody writes in the block, to a journal, a database or the decision log."""
    with ExitStack() as stack:
        for store in router._registry.open_stores():
            if isinstance(store, JournalStore):
                for lock in (store.backend._reclaimer._lock, quiet(store.backend._log), store._engine.lock):
                    stack.enter_context(lock)
            elif isinstance(store, SqlStore):
                stack.enter_context(lead_of(store))
        decisions = router._coordinator.log
        if decisions._reclaimer is not None:
            stack.enter_context(decisions._reclaimer._lock)
        if decisions._log is not None:
            stack.enter_context(quiet(decisions._log))
        yield


class Faults:
    """Errors of the disk in the files whose path contains a text, from `fail` to `mend`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._failing: list[tuple[str, str, int]] = []
        self._before: list[tuple[str, str, Callable[[], object]]] = []
        self._pwrite, self._fdatasync = os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "pwrite", self._pwrite_or_fail)
        monkeypatch.setattr(os, "fdatasync", self._fdatasync_or_fail)

    def fail(self, call: str, part: str, error: int = errno.EIO) -> None:
        """`call` is pwrite, fdatasync, or grow: a pwrite that allocates."""
        self._failing.append((call, part, error))

    def mend(self) -> None:
        self._failing.clear()

    def before(self, call: str, part: str, act: Callable[[], object]) -> None:
        """Do something once, before the next such call."""
        self._before.append((call, part, act))

    def _meet(self, call: str, fd: int) -> None:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        for entry in list(self._before):
            if entry[0] == call and entry[1] in path:
                self._before.remove(entry)
                entry[2]()
        for name, part, error in self._failing:
            if name == call and part in path:
                raise OSError(error, os.strerror(error))

    def _pwrite_or_fail(self, fd: int, data: Any, offset: int) -> int:
        self._meet("pwrite" if any(memoryview(data)[:64]) else "grow", fd)
        return self._pwrite(fd, data, offset)

    def _fdatasync_or_fail(self, fd: int) -> None:
        self._meet("fdatasync", fd)
        self._fdatasync(fd)


def keep_background_out(router: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """No decision is forgotten, and no store told again, but by who asks for it."""
    monkeypatch.setattr(router._coordinator.cleanup, "add", lambda: None)
    monkeypatch.setattr(router._coordinator.resolver, "retry_later", lambda: None)
