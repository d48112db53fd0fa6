"""The calls that a store makes of the operating system, one by one: counted, watched, made to fail.

The calls are those of the os module, and what LMDB is asked to write. Background jobs run where a script says, time
moves only there, and what is random comes from a seed, so that call number k is the same in every run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import lmdb

from anabranch.adapters.core.features import scheduled as waiting
from anabranch.adapters.system import background, locking
from anabranch.adapters.system.background import Outcome
from anabranch.adapters.wal import log as wal_log

T = TypeVar("T")
R = TypeVar("R")

CALLS = (
    "open", "pwrite", "pread", "fsync", "fdatasync", "rename", "unlink", "truncate", "mkdir", "posix_fallocate",
)  # fmt: skip
KINDS = ("eio", "enospc", "short", "crash")


READS = ("open", "pread")
"""They change nothing: gone before one of them, or before the call that comes next, is the same. An open that makes a
file is called `create` in the log."""


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Faults:
    """Counts the calls and spoils number `at`."""

    root: Path
    kind: str = ""
    at: int = 0
    count: int = 0
    log: list[str] = field(default_factory=list)
    dead: bool = False
    hit: str = ""
    """What was spoilt."""
    failed_syncs: dict[str, set[int]] = field(default_factory=dict)
    """Segments, and the offsets of what was written before and not since."""
    unsynced: dict[str, set[int]] = field(default_factory=dict)
    """Files, and the offsets of what was written and not synced, but for zeros."""
    retried: list[str] = field(default_factory=list)
    """Segments whose sync was tried again after it had failed, and not all was written again."""
    on: bool = True
    watch: Callable[[str, str, tuple[Any, ...], Any], None] = lambda *_: None
    """Told of each call once it was made: name, target, arguments, result."""

    def call(self, name: str, real: Callable[..., Any], target: str, *arguments: Any) -> Any:
        if self.dead:
            raise Crash
        if not self.on:
            return self._made(name, real, target, arguments)
        self.count += 1
        makes = name == "open" and arguments[1] & os.O_CREAT
        self.log.append(f"{'create' if makes else name} {target}")
        if name in ("fsync", "fdatasync") and self.failed_syncs.pop(target, False):
            self.retried.append(target)
        if self.count != self.at:
            return self._made(name, real, target, arguments)
        self.hit = self.log[-1]
        if self.kind == "crash":
            self.dead = True
            raise Crash
        if self.kind == "short" and name == "pwrite":
            fd, data, offset = arguments
            self.at += 1
            self.kind = "enospc"
            return real(fd, memoryview(data)[: max(1, len(data) // 2)], offset)
        if name in ("fsync", "fdatasync") and target.endswith(".seg"):
            self.failed_syncs[target] = self.unsynced.pop(target, set())
        number = errno.EIO if self.kind == "eio" else errno.ENOSPC
        if name.startswith("mdb_"):
            kind = lmdb.Error if self.kind == "eio" else lmdb.DiskError
            raise kind(f"{name}: {os.strerror(number)}")
        raise OSError(number, os.strerror(number), target)

    def _made(self, name: str, real: Callable[..., Any], target: str, arguments: tuple[Any, ...]) -> Any:
        result = real(*arguments)
        if name == "pwrite":
            _, data, offset = arguments
            if any(data):
                self.unsynced.setdefault(target, set()).add(offset)
            lost = self.failed_syncs.get(target, set())
            lost -= {place for place in lost if offset <= place < offset + result}
        elif name in ("fsync", "fdatasync"):
            self.unsynced.pop(target, None)
        self.watch(name, target, arguments, result)
        return result

    def name(self, target: Any) -> str:
        """What a call is about, short."""
        if isinstance(target, int):
            target = str(Path(f"/proc/self/fd/{target}").readlink())
        return str(os.fspath(target)).removeprefix(str(self.root))

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, getattr(os, name))))
            stack.enter_context(mock.patch.object(lmdb, "open", self._lmdb_open(lmdb.open)))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **named: Any) -> Any:
            text = self.name(target)
            if text.startswith("/dev/") or text.endswith((".lock", ".pyc")) or "/data" not in text:
                return real(target, *arguments, **named)
            return self.call(name, lambda *a: real(*a, **named), text, target, *arguments)

        return call

    def _lmdb_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: str, **named: Any) -> _Environment:
            environment = _Environment(self, real(path, **named), self.name(path))
            self.watch("mdb_env_open", self.name(path), (), None)
            return environment

        return opened


class _Environment:
    """An LMDB environment whose commits can fail."""

    def __init__(self, faults: Faults, real: Any, name: str) -> None:
        self._faults, self._real, self._name = faults, real, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def sync(self, force: bool = False) -> None:
        self._faults.call("mdb_env_sync", self._real.sync, self._name, force)

    def begin(self, write: bool = False, **named: Any) -> Any:
        txn = self._real.begin(write=write, **named)
        return _Transaction(self._faults, txn, self._name) if write else txn


class _Transaction:
    def __init__(self, faults: Faults, real: Any, name: str) -> None:
        self._faults, self._real, self._name = faults, real, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> _Transaction:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._real.abort() if kind else self.commit()

    def commit(self) -> None:
        try:
            self._faults.call("mdb_txn_commit", self._real.commit, self._name)
        except BaseException:
            self._real.abort()
            raise


class Jobs(background.Background):
    """Background work that waits until the script lets it run.

    What leads a store's writes runs at once, or with `backward` never, so that whoever waits has to lead: stores that
    prepare at once then do so one after the other, in this order or in that.
    """

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward
        self.now = 0.0
        self.raised: list[str] = []
        """What jobs should have dealt with themselves."""

    def schedule(self, delay: float, job: Callable[[], None]) -> None:
        self._jobs.append((delay, 0, job))

    def forget(self) -> None:
        """The process is gone."""
        self._jobs.clear()

    def lead(self, job: Callable[[], None]) -> None:
        if self.backward:
            self.schedule(0, job)
        else:
            self._do(job)

    def for_each(self, items: Iterable[T], call: Callable[[T], R], timeout: float | None = None) -> list[Outcome[T, R]]:
        """Here, without any other thread."""
        walk = background._Walk(items, call)
        count = len(walk.items)
        walk.run()
        return walk.outcomes_of(count, None)

    def run(self) -> None:
        """All that waits, in order, whatever its delay; what they schedule in turn is left for the next time."""
        self.now += 1.0
        waiting, self._jobs = self._jobs, []
        for _, _, job in waiting:
            self._do(job)

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.raised.append(f"a background job raised {type(error).__name__}: {error}")

    def clock(self) -> float:
        """Seconds; a little more each time."""
        self.now += 1e-6
        return self.now


@contextlib.contextmanager
def simulated(jobs: Jobs, seed: str) -> Iterator[None]:
    """A process in which nothing happens by chance or by time: jobs wait, ids and nonces follow from the seed."""
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(background, "_shared", jobs))
        # That of the real process would wait for ever for a look that it had asked these jobs for.
        stack.enter_context(mock.patch.object(locking, "_watch", locking._Watch()))
        for module in (wal_log, waiting):
            stack.enter_context(mock.patch.object(module, "monotonic", jobs.clock))
        stack.enter_context(mock.patch.object(os, "urandom", chance.randbytes))
        yield
