"""huey over Anabranch: tasks in a queue, the schedule, results, locks and counters in maps.

    huey = AnabranchHuey("app", directory="data")

    @huey.task()
    def resize(name): ...

Any number of processes may do so at once: web workers that call tasks, and `huey_consumer app.huey`, whose workers may
be threads or processes. A task is leased while it is executed: one whose consumer is killed is executed again. So is
one from the schedule. `Huey(storage_class=AnabranchStorage, directory=...)` has huey's own contract instead: a task is
gone once a worker has it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from threading import Lock, local
from typing import Any, Final
from uuid import uuid4

from huey.api import Huey
from huey.constants import EmptyData
from huey.signals import SIGNAL_INTERRUPTED
from huey.storage import BaseStorage
from huey.utils import Error

import anabranch

log: logging.Logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 1.0
"""So long a task waits that could not be finished for its store, before it is executed again."""
_LASTING: Final = (anabranch.MessageTooLargeError, anabranch.TransactionError)
"""What a task's result can raise each time."""


def _key(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


def _sorted_as_times(ts: datetime) -> str:
    """Return a text that sorts as huey's naive times do, of whichever clock they are."""
    return f"{(ts.replace(tzinfo=None) - datetime.min).total_seconds():019.6f}"


class _Moved(local):
    """How a thread enqueues a task; see AnabranchStorage.moving."""

    source: anabranch.Message | None = None
    name: str | None = None


class AnabranchStorage(BaseStorage):
    """What huey keeps, in one queue, `huey.<name>.tasks`, and maps beside it.

    `directory` is one for huey alone, which processes share. Instead of it, `router` is an open one of the program's:
    of a shared directory if the consumer is another process, with `priorities: true` for the store of the queue if
    tasks have priorities, and closed by who opened it. A worker waits `read_timeout` seconds for a task, and heeds no
    end of the consumer meanwhile.
    """

    blocking = True

    def __init__(
        self,
        name: str = "huey",
        directory: str | Path | None = None,
        router: anabranch.Router | None = None,
        read_timeout: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(name, **kwargs)
        if (directory is None) == (router is None):
            raise TypeError(f"huey {name!r} needs a directory=, or an open router=, and not both")
        self._directory, self._given = directory, router
        self._own: anabranch.Router | None = None
        self._opening, self._moved = Lock(), _Moved()
        self.read_timeout = read_timeout

    @property
    def router(self) -> anabranch.Router:
        """The router: opened on first use, and again after `close`, which a consumer calls before it forks workers."""
        if self._given is not None:
            return self._given
        with self._opening:
            if self._own is None:
                assert self._directory is not None
                journal = anabranch.JournalOptions(priorities=True, dead_letter="dead.{name}")
                config = anabranch.Config(self._directory, [anabranch.StoreConfig("huey", [">"], journal=journal)])
                self._own = anabranch.open(config, shared=True)
            return self._own

    def close(self) -> None:
        """Close the router, unless it was given."""
        with self._opening:
            if self._own is not None:
                self._own.close()
                self._own = None

    @property
    def tasks(self) -> anabranch.Queue:
        """The tasks that wait for a worker."""
        return self.router.queue(f"huey.{self.name}.tasks")

    @property
    def due(self) -> anabranch.Queue:
        """The tasks whose time has come, and that the scheduler has not enqueued yet."""
        return self.router.queue(f"huey.{self.name}.due")

    @property
    def schedule(self) -> anabranch.Map:
        """The tasks that wait for their time."""
        return self.router.map(f"huey.{self.name}.schedule")

    @property
    def values(self) -> anabranch.Map:
        """Results, locks, revocations."""
        return self.router.map(f"huey.{self.name}.values")

    @property
    def counters(self) -> anabranch.Map:
        """Counters."""
        return self.router.map(f"huey.{self.name}.counters")

    # The queue

    def enqueue(self, data: bytes, priority: float | None = None) -> None:
        """Send a task; priorities from -32,768 to 32,767 count, others as the nearest of them."""
        level = min(max(int(priority or 0) + 32768, 0), 65535)
        source, name = self._moved.source, self._moved.name
        if source is None:
            self.tasks.send(data, message_id=name, priority=level)
            return
        with self.router.transaction() as tx:
            tx.ack(source)
            tx.send(self.tasks, data, message_id=name, priority=level)

    @contextmanager
    def moving(self, source: anabranch.Message | None = None, name: str | None = None) -> Iterator[None]:
        """Let this thread enqueue a task that comes from a leased message, or that has a name, under which it is
        enqueued once."""
        self._moved.source, self._moved.name = source, name
        try:
            yield
        finally:
            self._moved.source = self._moved.name = None

    def dequeue(self) -> bytes | None:
        """Receive a task, which is gone with that."""
        message = self.tasks.receive(self.read_timeout)
        if message is None:
            return None
        message.ack()
        return message.body

    def queue_size(self) -> int:
        """Count the tasks that wait."""
        return self.tasks.counts().ready

    def enqueued_items(self, limit: int | None = None) -> list[bytes]:
        """Look at the tasks that wait."""
        return [message.body for message in self.tasks.browse(limit or None)]

    def flush_queue(self) -> None:
        """Remove the tasks that wait."""
        self.tasks.purge()

    # The schedule

    def add_to_schedule(self, data: bytes, ts: datetime) -> None:
        """Keep a task until its time."""
        self.schedule.put(f"{_sorted_as_times(ts)}-{uuid4()}", data)

    def read_schedule(self, ts: datetime) -> list[bytes]:
        """Remove the tasks whose time has come."""
        taken = ((key, self.schedule.pop(key)) for key, _ in self._until(ts))
        return [data for _, data in taken if data is not None]

    def take_due(self, ts: datetime) -> list[anabranch.Message]:
        """Lease the tasks whose time has come, of which no scheduler gets one that another has."""
        for key, data in self._until(ts):
            with self.router.transaction() as tx:  # of two schedulers at once, the second one's send is a duplicate
                tx.send(self.due, data, message_id=f"{self.name}:{key}")
                tx.remove(self.schedule, key)
        return self.due.receive_many(max(self.due.counts().ready, 1))

    def _until(self, ts: datetime) -> Iterator[tuple[str, bytes]]:
        return self.schedule.items(before=_sorted_as_times(ts) + ".")  # which sorts behind the hyphen

    def schedule_size(self) -> int:
        """Count the tasks that wait for their time."""
        return self.schedule.count()

    def scheduled_items(self, limit: int | None = None) -> list[bytes]:
        """Look at the tasks that wait for their time, the next one first."""
        return [data for _, data in islice(self.schedule.items(), limit or None)]

    def flush_schedule(self) -> None:
        """Remove the tasks that wait for their time."""
        self.schedule.delete()
        self.due.purge()

    # Keyed values

    def put_data(self, key: Any, value: bytes, is_result: bool = False) -> None:
        """Set a value."""
        self.values.put(_key(key), value)

    def peek_data(self, key: Any) -> Any:
        """Look at a value."""
        return self.values.get(_key(key), EmptyData)

    def peek_many(self, keys: Any) -> dict[Any, bytes]:
        """Look at the values of those keys that have one."""
        names = {key: _key(key) for key in keys}
        found = self.values.get_many(names.values())
        return {key: found[name] for key, name in names.items() if name in found}

    def pop_data(self, key: Any) -> Any:
        """Remove a value, and return it. Where the owner of the directory dies meanwhile, it is the one that was there
        before, and another caller may have got it too."""
        while (before := self.peek_data(key)) is not EmptyData:
            try:
                return self.values.pop(_key(key), EmptyData)
            except anabranch.OutcomeUnknownError:
                if not self.has_data_for_key(key):
                    return before
        return before

    def has_data_for_key(self, key: Any) -> bool:
        """Say whether a key has a value."""
        return self.values.get(_key(key)) is not None

    def put_if_empty(self, key: Any, value: bytes, ttl: float | None = None) -> bool:
        """Set a value if there is none; say whether there was none."""
        return self.values.put_if_absent(_key(key), value, ttl=ttl)

    def wait_result(
        self, key: Any, timeout: float | None = None, backoff: float = 1.15, max_delay: float = 1.0
    ) -> bool:
        """Wait until a key has a value. It is told of it, and polls for nothing."""
        return self.values.wait(_key(key), timeout) is not None

    def result_items(self) -> dict[str, bytes]:
        """Look at all values."""
        return dict(self.values.items())

    def result_store_size(self) -> int:
        """Count the values."""
        return self.values.count()

    def flush_results(self) -> None:
        """Remove all values."""
        self.values.delete()

    # Counters

    def incr(self, key: Any, amount: int = 1) -> int:
        """Add to a counter, and return the sum."""
        return self.counters.increment(_key(key), amount)

    def delete_counter(self, key: Any) -> None:
        """Remove a counter."""
        self.counters.pop(_key(key))

    def flush_counters(self) -> None:
        """Remove all counters."""
        self.counters.delete()


class _Hand(local):
    """What a worker, or a scheduler, has in hand: one a thread."""

    message: anabranch.Message | None = None
    """The leased message of the task that is executed."""
    task: Any = None
    """That task."""

    def __init__(self) -> None:
        self.read: defaultdict[str, list[anabranch.Message]] = defaultdict(list)
        """The leased messages of scheduled tasks that are to be enqueued, by the task's id."""


class AnabranchHuey(Huey):
    """Huey over AnabranchStorage, whose tasks are executed at least once.

    A task's message is acked after all that its execution has enqueued; where nothing is enqueued behind its result, in
    one transaction with that. A task that cannot be read, and one that huey fails to finish, goes to the dead letters
    of its store, with the exception. One whose store has failed is executed again, a second later.
    """

    storage_class = AnabranchStorage

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._hand = _Hand()
        super().__init__(*args, **kwargs)

    def _leases(self) -> bool:
        return isinstance(self.storage, AnabranchStorage) and not self._immediate

    def dequeue(self) -> Any:
        """Lease a task for this thread, which is to execute it."""
        if not self._leases():
            return super().dequeue()
        message = self.storage.tasks.receive(self.storage.read_timeout)
        if message is None:
            return None
        task = self._read(message)
        self._hand.message, self._hand.task = message, task
        return task

    def _read(self, message: anabranch.Message) -> Any:
        try:
            return self.deserialize_task(message.body)
        except Exception as error:
            message.reject(error)
            raise

    def execute(self, task: Any, timestamp: datetime | None = None) -> Any:
        """Execute a task, and ack its message, if this thread has one."""
        hand = self._hand
        if hand.task is not task or hand.message is None:
            return super().execute(task, timestamp)
        try:
            value = super().execute(task, timestamp)
            if hand.message is not None:  # nor acked with its result, nor interrupted
                hand.message.ack()
        except Exception as error:
            if hand.message is None:
                pass
            elif isinstance(error, anabranch.AnabranchError) and not isinstance(error, _LASTING):
                with suppress(anabranch.AnabranchError):  # then it is free once this client has gone
                    hand.message.release(delay=PAUSE_SECONDS, reason=error)
            else:
                hand.message.reject(error)
            raise
        finally:
            hand.message = hand.task = None
        return value

    def put_result(self, key: str, data: Any) -> Any:
        """Store a result; with the last thing that an execution does, its message is acked."""
        hand, task = self._hand, self._hand.task
        if (
            hand.message is None or key != task.id or isinstance(data, Error)
            or task.on_complete is not None or task.chord_config is not None
        ):  # fmt: skip
            return super().put_result(key, data)
        value = self.serializer.serialize(data)
        with self.storage.router.transaction() as tx:
            tx.put(self.storage.values, key, value)  # first: one that is too large leaves the message in hand
            tx.ack(hand.message)
        hand.message = None
        return None

    def _emit(self, signal: str, task: Any, *args: Any, **kwargs: Any) -> None:
        if signal == SIGNAL_INTERRUPTED and self._hand.task is task and self._hand.message is not None:
            message, self._hand.message = self._hand.message, None
            message.release()
        super()._emit(signal, task, *args, **kwargs)

    # The schedule

    def read_schedule(self, timestamp: datetime | None = None) -> list[Any]:
        """Lease the tasks whose time has come, which this thread is to enqueue."""
        if not self._leases():
            return super().read_schedule(timestamp)  # type: ignore[no-any-return]
        tasks = []
        for message in self.storage.take_due(timestamp or self._get_timestamp()):
            try:
                task = self._read(message)
            except Exception:
                log.exception("A scheduled task cannot be read; it is in %s's dead letters.", self.storage.due)
                continue
            self._hand.read[task.id].append(message)
            tasks.append(task)
        return tasks

    def enqueue(self, task: Any) -> Any:
        """Enqueue a task; one from the schedule leaves it in the same step."""
        messages = self._hand.read.get(getattr(task, "id", ""))
        if not messages:
            return super().enqueue(task)
        message = messages.pop()
        if not messages:
            del self._hand.read[task.id]
        with self.storage.moving(message):
            return super().enqueue(task)

    # Chords

    def _check_chord(self, cc: Any, value: Any) -> None:
        """Enqueue the callback once all members have a result. Nothing is counted, which a member that is executed
        again would do twice; of two callbacks the second is a duplicate."""
        if not self._leases():
            super()._check_chord(cc, value)
            return
        keys = [f"chord:{cc.cid}:{number}" for number in range(cc.size)]
        self.put_result(keys[cc.idx], value)
        there = self.storage.peek_many(keys)
        if len(there) == cc.size:
            cc.callback.extend_data(([self.serializer.deserialize(there[key]) for key in keys],))
            with self.storage.moving(name=f"chord:{cc.cid}"):
                self.enqueue(cc.callback)
            for key in keys:
                self.delete(key)
