"""Who waits in this router for messages of a shared store, and the one connection on which it hears of them.

A queue in which somebody waits has a row in WAITING for each such router. Whoever sends there removes the rows after
its commit, and notifies those whose they were: so senders pay for it where somebody waits, once, and never otherwise.

W11  A receiver has looked once more after its row was committed, before it waits. A sender looks for rows in the
    statement of the message, which is committed soon after: what commits in between is found by a look RELOOK later.
    Who sends in a transaction looks after its commit.
W12  Whatever becomes free by itself, by a time or by the end of a router, is found by one question each POLL_SECONDS
    for all queues together; so is what a lost connection has kept from being heard. It does not ask whether groups are
    held: who is woken looks.
W13  WAITING is emptied when it has grown, and all announce themselves anew: it cannot shrink by itself while some
    transaction in the database is open.
W14  Times are those of the database's clock. It is asked with each heartbeat how far it is ahead of this machine's, by
    which the times of messages are moved on their way in and out.
    If it was set, or this router stood still, the others have as long as ever to say that they live.
W15  A router that the others have taken for dead finds its row in ROUTERS gone, and enters anew under another number.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

import psycopg
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from ....policies.errors import AnabranchError
from ...core.state.sweep import wall_ms
from ...system.conditions import Thread
from .database import Ask, SharedDatabase
from .heads import Heads
from .prepared import Prepared
from .statements import Statements

log: logging.Logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
PAUSE: Final = 0.1
"""Seconds after which a connection that was lost is made anew; they double with each try."""
RELOOK: Final = 0.02
"""Seconds after which a queue is looked at again in which somebody begins to wait."""
WAITING_MAX: Final = 1 << 15
"""Bytes of WAITING with which it is emptied."""
ALL: Final = "!"
"""The notice that WAITING is empty. Another one is the number of a queue that was deleted, with a minus sign before it;
or those of queues that have messages."""
SKEW_MS: Final = 100
"""Clocks that differ by less count as one, as those do that are kept right."""
ALL_SECONDS: Final = 10.0
"""Seconds after which all queues are looked at once more. Numbers do not come in the order in which queues do: of two
that are made at once the first may be committed last, and one that is deleted and made anew keeps its number."""
FORGET_SECONDS: Final = 3600.0
"""Seconds after which rows of CONNECTIONS are looked for that nobody uses. As long as some transaction is open, that
passes through a version for each change that there was since."""
STOP_MS: Final = 1000
"""For so long (ms) an answer is waited for where nobody needs it any more."""
BEATS: Final = 3
"""Heartbeats in the time after which a router is taken for dead."""


class Waiter(Protocol):
    """Whoever stands in line for a message."""

    queue: int
    """The one whose line it is; 0: it stands in none yet."""

    def wake(self) -> None:
        """Hear that there may be one. Any thread; must not wait."""


class Waiting:
    """The lines of one open store, and its row in ROUTERS. Threads: all."""

    def __init__(
        self, name: str, database: SharedDatabase, single: Engine, statements: Statements, channel: str,
        node: str, timeout: float, most_deliveries: int, patience: float,
    ) -> None:  # fmt: skip
        """`single` makes connections of their own. `node` names the directory, which one process has at a time.
        `timeout`: seconds after which a router that is not seen is taken for dead. `patience`: seconds after which an
        answer is given up; 0: never."""
        self._name, self._database, self._single, self._statements = name, database, single, statements
        self._channel, self._node = channel, node
        self._timeout, self._most_deliveries, self._patience = timeout, most_deliveries, patience or math.inf
        self.router: int = 0
        """The number of this router."""
        self.ahead_ms: int = 0
        """How far the database's clock is ahead of this machine's (W14)."""
        self.on_queues: Callable[[list[tuple[int, str]]], None] = lambda queues: None
        """Called with queues that have come, made by other routers too. No lock may be waited for."""
        self.on_deleted: Callable[[int], None] = lambda queue: None
        """Called with the number of a queue that was deleted."""
        self.on_listening: Callable[[], None] = lambda: None
        """Called when this router begins to hear, again too: what was told before it has missed."""
        self.has_orphans: bool = True
        """There may be branches that nobody commits any more, and messages of subscriptions that have ended: who was to
        see to them is gone, or was cut off."""
        self.heads: Final = Heads()
        self._lock = threading.RLock()
        self._lines: dict[int, dict[Waiter, None]] = {}
        self._announced: set[int] = set()
        """Queues with a row in WAITING."""
        self._has_grown = True
        """There may be more rows in WAITING, by this router, than when its size was asked for."""
        self._heard_of = 0
        """How often rows there were told to be gone."""
        self._last_queue = 0
        self._beat_at = self._poll_at = self._bury_at = self._all_at = self._forget_at = 0.0
        self._clock = 0
        """The database's, as it was last told (ms)."""
        self._fresh: dict[int, float] = {}
        """Queues in which somebody has begun to wait, and when they are looked at once more (W11)."""
        self._stopped = False
        self._wake_fds = os.pipe()
        self._thread = Thread(self._run, "shared-store")

    def start(self) -> None:
        """Enter, and hear from now on. Raises StoreFailedError."""
        self._enter()
        self._thread.start()

    def _enter(self) -> None:
        name = f"process {os.getpid()} on {os.uname().nodename}"

        def enter(ask: Ask) -> int:
            ask("enter_anew", self._node)  # that of the process which had this directory before
            began = wall_ms()
            ((number, now),) = ask("enter", self._node, name)
            self._note_clock(began, now)
            return int(number)

        self.router = self._database.router = self._database.change(enter)

    def _note_clock(self, began: int, now: int) -> None:
        """Note what the database's clock has said (ms), which was asked at `began`."""
        # That was set, or this router stood still, as others may have.
        if now - self._clock > 1000 * max(self._timeout, 2 * POLL_SECONDS):
            self._bury_at = time.monotonic() + self._timeout
        self._clock = now
        took = wall_ms() - began
        ahead = now - began - took // 2
        self.ahead_ms = ahead if abs(ahead) > took + SKEW_MS else 0

    def stop(self, leave: bool = True) -> None:
        """Leave: what this router holds is free. Unless it is to `leave` the others find out. Never raises but for a
        signal."""
        self._stopped = True
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:  # nobody pokes what has its number next
            fds, self._wake_fds = self._wake_fds, (-1, -1)
            for fd in fds:
                os.close(fd)
        with suppress(AnabranchError):
            if leave:
                self._database.change(lambda ask: ask("leave", self.router))
        self.wake_all()
        self._single.dispose()

    def _poke(self) -> None:
        with self._lock, suppress(OSError):  # it is full, or closed
            os.write(self._wake_fds[1], b"x")

    # Lines

    def enter(self, queue: int, waiter: Waiter) -> None:
        """Stand in this line and in no other, and let other routers know of it. Whoever does looks once more before it
        waits (W11). Raises StoreFailedError."""
        if waiter.queue != queue:
            self.leave(waiter)
            waiter.queue = queue
        with self._lock:
            self._lines.setdefault(queue, {})[waiter] = None
            announced, heard = queue in self._announced, self._heard_of
        if not announced:
            self._database.look("wait", queue, self.router)
            with self._lock:
                if heard == self._heard_of:  # else its row may be gone again, and the next one tells
                    self._announced.add(queue)
                self._has_grown = True
                self._fresh[queue] = time.monotonic() + RELOOK
            self._poke()

    def leave(self, waiter: Waiter) -> None:
        """Leave the line, and wake who stands behind: there may be more. Idempotent."""
        with self._lock:
            line = self._lines.get(waiter.queue, {})
            was_there = waiter in line
            line.pop(waiter, None)
            if not line:
                self._lines.pop(waiter.queue, None)
        if was_there:
            self.wake([waiter.queue])

    def count(self) -> int:
        """Return how many stand in lines."""
        with self._lock:
            return sum(map(len, self._lines.values()))

    def wake(self, queues: Iterable[int]) -> None:
        """Wake the first in line of each queue."""
        for queue in queues:
            with self._lock:
                line = self._lines.get(queue)
                first = next(iter(line)) if line else None
            if first is not None:
                first.wake()

    def wake_all(self) -> None:
        """Wake everybody: the store is closed."""
        with self._lock:
            waiters = [waiter for line in self._lines.values() for waiter in line]
        for waiter in waiters:
            waiter.wake()

    def tell(self, queues: Iterable[int]) -> None:
        """Wake who waits for messages of these queues, here and in other routers. After the commit (W11)."""
        names = list(dict.fromkeys(queues))
        if names:
            with suppress(AnabranchError):  # they look by themselves
                self._database.look("wake", names, self._channel)
            self.wake(names)

    def look_at_queues(self) -> None:
        """Look at all queues once more: some may have got the numbers of others."""
        self._last_queue = 0

    def tell_deleted(self, ask: Ask, queue: int) -> None:
        """Tell other routers that a queue is deleted, with the transaction of `ask`."""
        ask("notify", self._channel, f"-{queue}")

    # The connection

    def _run(self) -> None:
        pause = PAUSE
        while not self._stopped:
            try:
                fairy = self._single.raw_connection()
                connection: Any = fairy.driver_connection
                fairy.detach()
                with connection:
                    prepared = Prepared(connection, partial(self._await, connection))
                    prepared.script(f"LISTEN {self._channel}")
                    self.on_listening()
                    self._lost_none()
                    # The others have been cut off too, perhaps: they have as long to say that they live.
                    self._bury_at = time.monotonic() + self._timeout
                    pause = PAUSE
                    while not self._stopped:
                        self._beat(prepared)
                        with self._lock:
                            due = min(self._fresh.values(), default=self._poll_at)
                        self._wait(max(0.0, due - time.monotonic()), connection.fileno())
                        for heard in prepared.notified():
                            self._heard(heard)
            except (psycopg.Error, SQLAlchemyError, OSError, AnabranchError) as error:
                is_new = pause == PAUSE and not self._stopped  # once an outage
                log.log(logging.WARNING if is_new else logging.DEBUG,
                    "store %s: the connection on which it hears of messages is lost, and tried again until its "
                    "database is back: %s", self._name, self._database.words(error))  # fmt: skip
                self._wait(pause)
                pause = min(2 * pause, self._timeout / BEATS)  # to be back before others take it for dead

    def _await(self, connection: Any) -> None:
        """Wait for an answer. Raises psycopg.OperationalError if it takes too long, or the store is being closed."""
        began, poll = time.monotonic(), select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        while not poll.poll(STOP_MS):
            if self._stopped or time.monotonic() > began + self._patience:
                connection.close()
                raise psycopg.OperationalError("the database has not answered")

    def _wait(self, seconds: float, *others: int) -> None:
        """Wait for one of these descriptors, or for a poke."""
        poll = select.poll()
        for fd in (*others, self._wake_fds[0]):
            poll.register(fd, select.POLLIN)
        if any(fd == self._wake_fds[0] for fd, _ in poll.poll(math.ceil(1000 * seconds))):
            os.read(self._wake_fds[0], 4096)

    def _lost_none(self) -> None:
        """Announce all anew: what was notified without a connection is lost."""
        with self._lock:
            self._announced.clear()
            self._heard_of += 1
        self.wake_all()

    def _heard(self, payload: str) -> None:
        if payload == ALL:
            self._lost_none()
        elif payload.startswith("-"):
            self.on_deleted(int(payload[1:]))
        else:
            queues = [int(text) for text in payload.split(",")]
            with self._lock:
                self._announced.difference_update(queues)
                self._heard_of += 1
            self.wake(queues)

    def _beat(self, prepared: Prepared) -> None:
        """Do what is due: say that this router lives, bury who does not, look for what came free by itself."""
        now, run, says = time.monotonic(), prepared.run, self._statements
        if now >= self._beat_at + self._timeout / BEATS:
            began, rows = wall_ms(), run(says["seen"], [self.router, self._node])
            ms, is_late = round(self._timeout * 1000), False
            for seen, oldest, _ in rows:
                self._note_clock(began, seen)
                is_late = oldest < seen - ms
            if not rows:
                log.warning("store %s: other routers have taken this process for dead: it was silent too long, and "
                    "what it held is free", self._name)  # fmt: skip
                self._enter()
                self._lost_none()
            self._beat_at = now
            for (name,) in run(says["bury"], [ms]) if is_late and now >= self._bury_at else ():
                log.warning("store %s: %s is gone; what it held is free", self._name, name)
                self.has_orphans = True
            if now >= self._forget_at:
                self._forget_at = now + FORGET_SECONDS
                run(says["forget_connections"])
        is_poll = now >= self._poll_at
        with self._lock:
            due = [queue for queue, at in self._fresh.items() if now >= at]
            waited = list(self._lines) if is_poll else due
            for queue in due:
                del self._fresh[queue]
        if waited:
            firsts = [self.heads.known(queue) for queue in waited]
            found = {queue for (queue,) in run(says["ready"], [waited, firsts, self._most_deliveries])}
            if is_poll:  # what was committed very late lies before; who waits looks from the start, when that is due
                found.update(queue for queue in waited if self.heads.known(queue) > self.heads.first(queue))
            self.wake(found)
        if is_poll:
            self._poll_at = now + POLL_SECONDS
            if self._has_grown:
                self._has_grown = False  # first: another thread may be about to wait
                ((size,),) = run(says["size_of_waiting"])
                if size > WAITING_MAX:
                    self._has_grown = True  # somebody may use it now
                    self._empty(prepared)
            if now >= self._all_at:
                self._all_at, self._last_queue = now + ALL_SECONDS, 0
            came = run(says["newer_queues"], [self._last_queue])
            if came:
                self._last_queue = came[-1][0]
                self.on_queues(came)

    def _empty(self, prepared: Prepared) -> None:
        """Empty WAITING, unless somebody uses it now (W13)."""
        says = self._statements
        try:
            prepared.script("BEGIN")
            prepared.script(says["lock_waiting"])
            prepared.script(says["empty_waiting"])
            prepared.run(says["notify"], [self._channel, ALL])
            prepared.script("COMMIT")
        except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege):
            prepared.script("ROLLBACK")
