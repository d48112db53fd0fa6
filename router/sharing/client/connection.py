"""A client's connection to the owner of a directory: requests of any threads, pipelined, and their answers.

Who waits for an answer reads the socket for all who wait, so that a call costs no change of threads. Where nobody waits
and something may come all the same (a Future, a listener) a thread of the library reads.

An owner that has gone is replaced: the next call, or the read that finds it, connects to the next owner, tells what
this client holds, and sends again what has no answer. Each request bears that: docs/processes.md says how.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from ....adapters.system.background import shared
from ....adapters.system.conditions import Promise, Thread, unless_busy
from ....policies.errors import AnabranchError, router_closed
from .. import protocol
from .exchange import Asked, Exchange
from .greeting import PATIENCE, READ_BYTES, Greeter

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0
"""Until an owner is looked for again that did not come."""
FINISH_SECONDS: Final = 5.0
"""For so long a connection that is closed waits for the answers to what was begun."""


class _Link:
    """One socket, and what has come over it."""

    __slots__ = ("buffer", "reads", "sends", "sock")

    def __init__(self, sock: socket.socket, buffer: bytearray) -> None:
        self.sock, self.buffer = sock, buffer
        self.sends = self.reads = False
        """A thread is at the socket, with the lock held; without it: one was interrupted there, and what has gone, or
        come, is not known any more."""

    def cut(self) -> None:
        """End it, which wakes who reads it; what has come can be read still."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Connection(Exchange):
    """The connection of one client. Threads: all. A forked child connects anew, as another client."""

    def __init__(
        self,
        directory: Path,
        start_owner: Callable[[], None],
        held: Callable[[], list[protocol.Held]],
        patience: float = PATIENCE,
    ) -> None:
        """Connect; what is given is as Exchange and Greeter say."""
        self._greeter = Greeter(start_owner, patience)
        self._beginning = threading.Lock()
        """Held by the thread that begins in a forked child."""
        super().__init__(directory, held)
        try:
            with self._reading:
                self._connect()
        except BaseException:
            self.close()
            raise
        self._watch()

    def _begin(self) -> None:
        super()._begin()
        self._link: _Link | None = None
        """What requests go over. Assigned with `_reading` and `_sending` held."""
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        """Held by the thread that reads, and connects."""
        self._pump: threading.Thread | None = None
        self._watcher: threading.Thread | None = None

    # Connecting

    def _connect(self) -> None:
        """Connect, instead of a link that has ended, and send what has no answer. With `_reading` held. Raises
        StoreFailedError if no owner comes, ConfigError for one that cannot be reached."""
        old = self._link
        if old is not None:
            old.cut()  # wakes who sends
        link = _Link(*self._greeter.connect(self))
        try:
            with self._sending:
                self._link = link
                frames = self._again()
                with suppress(OSError):  # whoever reads finds it
                    link.sock.sendall(frames)
        except BaseException:
            link.cut()  # interrupted, and not known how far it came
            raise
        finally:
            if old is not None:
                old.sock.close()

    # Asking

    def ask(
        self,
        request: protocol.Request,
        on_answer: Callable[[Any], Any] | None = None,
        on_late: Callable[[Any], object] | None = None,
    ) -> Any:
        """Ask, and wait for the answer, as Exchange."""
        asked = self._asked(request, on_answer)
        try:
            self._send(asked)
            self._await(asked)
        except Exception:
            self._unanswered.pop(asked.number, None)
            raise
        except BaseException:
            self._cancel(asked, on_late)
            raise
        if asked.error is not None:
            raise asked.error
        return asked.value

    def ask_nowait(self, request: protocol.Request, on_answer: Callable[[Any], Any]) -> Future[Any]:
        """Ask; the future resolves on a thread of the library. Raises ClosedError."""
        asked = self._asked(request, on_answer)
        future: Promise[Any] = Promise()
        asked.future = future
        future.set_running_or_notify_cancel()
        self._send(asked)
        self.keep_reading()
        return future

    def _asked(self, request: protocol.Request, on_answer: Callable[[Any], Any] | None = None) -> Asked:
        if self._is_forked:
            self._begin_in_child()
        return super()._asked(request, on_answer)

    def _cancel(self, asked: Asked, on_late: Callable[[Any], object] | None) -> None:
        """Let go of a request whose caller was interrupted, and of what comes all the same."""
        if on_late is None or self.is_closed:
            self._unanswered.pop(asked.number, None)
            return
        asked.on_late = on_late
        with suppress(AnabranchError):
            other = self._asked(protocol.Cancel(asked.number))
            self._send(other)
            self._await(other)  # behind which nothing more comes

    def _send(self, asked: Asked) -> None:
        frame = protocol.pack(asked.number, asked.request)
        with self._sending:
            if self.is_closed:
                raise router_closed()
            self._unanswered[asked.number] = asked
            link = self._link
            if link is None or link.sends:  # what one has sent that was interrupted is not known
                if link is not None:
                    link.cut()
                return  # whoever reads connects, and sends it
            link.sends = True
            try:
                link.sock.sendall(frame)
                asked.is_sent = True
            except OSError:
                link.cut()
            link.sends = False

    # Reading

    def _await(self, asked: Asked) -> None:
        """Wait for an answer: read for all, or until another thread that reads has it."""
        read = partial(self._read_for, asked)
        while not asked.done:
            if unless_busy(self._reading, read):
                self._hand_over()
            else:
                if asked.lock is None:
                    asked.lock = threading.Lock()
                    asked.lock.acquire()
                if not asked.done:
                    asked.lock.acquire(timeout=0.05)

    def _read_for(self, asked: Asked) -> bool:
        while not asked.done:
            self._read()
        return True

    def _hand_over(self) -> None:
        """Let another thread read, if one waits."""
        for other in list(self._unanswered.values()):
            if other.lock is not None:
                other.wake()
                return

    def _watch(self) -> None:
        """Let a thread find the end of a link that nobody reads: what this client holds is told to the next owner in
        time."""
        if self._watcher is None:
            self._watcher = Thread(_watched, "share-watch", (weakref.ref(self),))
            self._watcher.start()

    def keep_reading(self) -> None:
        """Let a thread of the library read from now on."""
        if self._pump is None:
            self._pump = Thread(self._read_on, "share-read")
            self._pump.start()

    def later(self, call: Callable[[], None]) -> None:
        """Make a call on a thread of the library."""
        shared().lead(call)

    def schedule(self, seconds: float, method: Callable[[], None]) -> None:
        """Call a method on a thread of the library."""
        shared().schedule_while_alive(seconds, method)

    def _read_on(self) -> None:
        while not self.is_closed:
            try:
                with self._reading:
                    self._read()
            except (AnabranchError, OSError, protocol.ProtocolError) as error:
                if self.is_closed:
                    return
                log.error("the owner of %s is lost: %s", self.directory, error)
                self._fail_all(error)
                time.sleep(RETRY_SECONDS)

    def read_end(self, link: _Link | None) -> None:
        """Read what is left of a link that has ended, and connect. Raises as `_connect`."""
        while self._link is link and not self.is_closed:
            with self._reading:
                if self._link is link:
                    self._read()

    def _read(self) -> None:
        """Read what has come, and give each answer to who waits for it. With `_reading` held. Raises as `_connect`."""
        link = self._link
        if link is not None and not link.reads:
            link.reads = True
            data = b""
            with suppress(OSError):
                data = link.sock.recv(READ_BYTES)
            if data:
                link.buffer += data
                self._take_all(link.buffer)
                link.reads = False
                return
        if self.is_closed:
            raise router_closed()
        self._connect()

    # Ending

    def close(self) -> None:
        """Close the connection, once what was begun is answered: the owner gives back what this client holds.
        Idempotent."""
        if self.is_closed:
            return
        deadline = time.monotonic() + FINISH_SECONDS
        while self._is_brief and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.is_closed = True
        if self._file is not None:
            self._file.close()  # first: the owner sees that it is gone for good
        link = self._link
        if link is not None:
            link.cut()
            unless_busy(self._reading, self._close_link, FINISH_SECONDS)  # whoever reads is awake, and leaves
        self._fail_all(router_closed())

    def _close_link(self) -> None:
        with self._sending:
            if self._link is not None:
                self._link.sock.close()

    def leave(self) -> None:
        """Let go of all that is the parent's, in a forked child."""
        super().leave()
        self._beginning = threading.Lock()
        if self._link is not None:
            self._link.sock.close()

    def _begin_in_child(self) -> None:
        with self._beginning:
            if self._is_forked:
                self._begin()
                with self._reading:
                    self._connect()
                self._watch()
                self._is_forked = False

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is not None:
            link.cut()
            link.sock.close()


def _watched(alive: weakref.ref[Connection]) -> None:
    """Read the end of each link of a connection, where no other thread does."""
    while True:
        connection = alive()
        if connection is None or connection.is_closed:
            return
        link = connection._link
        connection = None
        poll = select.poll()
        with suppress(OSError, ValueError):  # it is closed
            poll.register(link.sock if link is not None else -1, select.POLLRDHUP)
            poll.poll()
        connection = alive()
        if connection is None:
            return
        try:
            connection.read_end(link)
        except (AnabranchError, OSError, protocol.ProtocolError) as error:
            log.debug("the owner of %s is lost: %s", connection.directory, error)
            connection = None
            time.sleep(RETRY_SECONDS)
