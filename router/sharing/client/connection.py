"""A client's connection to the owner of a directory: requests of any threads, pipelined, and their answers.

Who waits for an answer reads the socket for all who wait, so that a call costs no change of threads. Where nobody waits
and something may come all the same (a Future, a listener) a thread of the library reads.

An owner that has gone is replaced: the next call, or the read that finds it, connects to the next owner, tells what
this client holds, and sends again what has no answer. Each request bears that: docs/processes.md says how.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from ....adapters.system.background import shared
from ....adapters.system.conditions import Promise, Thread, unless_busy
from ....policies.errors import (
    AnabranchError,
    ConfigError,
    OutcomeUnknownError,
    StoreFailedError,
    UnknownSubscriptionError,
    router_closed,
)
from .. import protocol
from ..clients import ClientFile
from ..socket_file import connected, peer_of

log = logging.getLogger(__name__)

READ_BYTES: Final = 1 << 18
RETRY_SECONDS: Final = 1.0
"""Until an owner is looked for again that did not come."""
PATIENCE: Final = 60.0
"""Seconds for which an owner that does not come, or does not answer its greeting, is waited for."""
FINISH_SECONDS: Final = 5.0
"""For so long a connection that is closed waits for the answers to what was begun."""
ONCE: Final = frozenset({"map_increment", "map_pop", "map_put_if_absent", "map_compare_and_set", "end_vote"})
"""Calls that are not made once more where nobody knows whether they took effect."""


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


@dataclass(slots=True, eq=False)
class Asked:
    """A request that has no answer yet."""

    number: int
    request: protocol.Request
    on_answer: Callable[[Any], Any] | None
    """Makes the result of the answer's value, while no other answer is looked at."""
    on_late: Callable[[Any], object] | None = None
    """Called with the value instead, once the caller was interrupted."""
    is_sent: bool = False
    """It has gone to an owner, whole; as far as is known no owner has seen it otherwise."""
    is_again: bool = False
    """It has gone to one before, which may have done it."""
    done: bool = False
    value: Any = None
    error: Exception | None = None
    lock: threading.Lock | None = None
    """Held until the answer is there, or until its thread is to read, where a thread waits."""
    future: Promise[Any] | None = None

    def wake(self) -> None:
        """Let the thread that waits look again."""
        with suppress(RuntimeError, AttributeError):
            self.lock.release()  # type: ignore[union-attr]


class Connection:
    """The connection of one client. Threads: all. A forked child connects anew, as another client."""

    def __init__(
        self,
        directory: Path,
        start_owner: Callable[[], None],
        held: Callable[[], list[protocol.Held]],
        patience: float = PATIENCE,
    ) -> None:
        """`start_owner` starts an owner where there is none; `held` tells what this client holds. An owner is waited
        for so many seconds."""
        self.directory, self._start_owner, self._held, self._patience = directory, start_owner, held, patience
        self.on_push: Callable[[int, list[Any] | None, list[Any] | None], None] = lambda number, messages, error: None
        """Called with what comes for a listener, or with the error that has ended it."""
        self.on_reconnect: Callable[[], list[protocol.Request]] = list
        """Returns the requests that each owner is to have been sent, such as those by which listeners begin again."""
        self.on_fork: Callable[[], None] = lambda: None
        """Called in a child as it is forked, which holds nothing."""
        self.is_closed = self._is_forked = False
        self._beginning = threading.Lock()
        """Held by the thread that begins in a forked child."""
        self._file: ClientFile | None = None
        self._begin()
        _connections.add(self)
        try:
            with self._reading:
                self._connect()
        except BaseException:
            self.close()
            raise
        self._watch()

    def _begin(self) -> None:
        """Begin as a client of the owner, which has no connection yet."""
        self.client = f"{os.getpid():x}-{os.urandom(6).hex()}"
        self._file = ClientFile(self.directory, self.client)
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._unanswered: dict[int, Asked] = {}
        self._link: _Link | None = None
        """What requests go over. Assigned with `_reading` and `_sending` held."""
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        """Held by the thread that reads, and connects."""
        self._owner = ""
        """Tells the owner that it was connected to last from those before and after it."""
        self.owner_pid = 0
        self._pump: threading.Thread | None = None
        self._watcher: threading.Thread | None = None

    # Connecting

    def _connect(self) -> None:
        """Connect, instead of a link that has ended, and send what has no answer. With `_reading` held. Raises
        StoreFailedError if no owner comes, ConfigError for one that cannot be reached."""
        old = self._link
        if old is not None:
            old.cut()  # wakes who sends
        link = _Link(*self._greeted())
        try:
            with self._sending:
                standing = self.on_reconnect()
                frames = []
                self._link = link
                for asked in list(self._unanswered.values()):
                    again = _again(asked.request) if asked.is_sent or asked.is_again else asked.request
                    for one in standing:
                        if _is_same(one, asked.request):
                            standing.remove(one)
                            again = one
                            break
                    if asked.done or asked.on_late is not None:  # a reader, or its caller, was interrupted
                        self._unanswered.pop(asked.number, None)
                    elif again is None:
                        assert isinstance(asked.request, protocol.Call)
                        asked.error = OutcomeUnknownError(
                            f"{asked.request.name} of {asked.request.given[0]}: the connection to the owner of "
                            f"{self.directory} was lost before it had answered; look whether it took effect"
                        )
                        self._answered(asked)
                    else:
                        frames.append(protocol.pack(asked.number, again))
                        asked.is_again |= asked.is_sent
                        asked.is_sent = True
                frames += [protocol.pack(next(self._numbers), one) for one in standing]
                with suppress(OSError):  # whoever reads finds it
                    link.sock.sendall(b"".join(frames))
        except BaseException:
            link.cut()  # interrupted, and not known how far it came
            raise
        finally:
            if old is not None:
                old.sock.close()

    def _greeted(self) -> tuple[socket.socket, bytearray]:
        """Return the socket of an owner that has answered a Hello, and what has come beyond that; an owner is started
        if there is none."""
        deadline, pause = time.monotonic() + self._patience, 0.0005
        while True:
            if self.is_closed:
                raise router_closed()
            is_there = True
            try:
                return self._greet()
            except (FileNotFoundError, ConnectionRefusedError):
                is_there = False
            except (ConnectionError, EOFError):
                pass  # it has just ended
            except TimeoutError as error:
                raise StoreFailedError(f"{self.directory} is open, and {error}") from None
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT):
                    raise ConfigError([f"the owner of {self.directory} cannot be reached: {error}"]) from error
            if not is_there:
                self._start_owner()
            if time.monotonic() > deadline:
                raise StoreFailedError(
                    f"no process that owns {self.directory} has answered in {self._patience:.0f} s; run "
                    f"`anabranch serve {self.directory}` to see why"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _greet(self) -> tuple[socket.socket, bytearray]:
        sock = connected(self.directory)
        try:
            sock.settimeout(self._patience)
            hello = protocol.Hello(protocol.VERSION, self.client, os.getpid(), self._owner, self._held())
            sock.sendall(protocol.pack(next(self._numbers), hello))
            buffer, answers = bytearray(), list[list[Any]]()
            while not answers:
                try:
                    data = sock.recv(READ_BYTES)
                except TimeoutError:
                    raise TimeoutError(
                        f"its process, {peer_of(sock)[0]}, has not answered in {self._patience:.0f} s: it may be "
                        "stopped, by a debugger say, or its disk hangs"
                    ) from None
                if not data:
                    raise EOFError
                buffer += data
                answers = protocol.unpack(buffer)
            _, ok, value = answers[0]
            if not ok:
                raise protocol.unpack_error(value)
            self._owner, self.owner_pid = value
            sock.settimeout(None)
            return sock, buffer
        except BaseException:
            sock.close()
            raise

    # Asking

    def new_id(self) -> str:
        """Return an id for a message that has none, by which it can be sent again."""
        if self._is_forked:
            self._begin_in_child()
        return f"{self.client}.{next(self._ids):x}"

    def ask(
        self,
        request: protocol.Request,
        on_answer: Callable[[Any], Any] | None = None,
        on_late: Callable[[Any], object] | None = None,
    ) -> Any:
        """Ask, and wait for the answer. Raises its error, and ClosedError. `on_late`: it may be cancelled, and this is
        called with what comes all the same."""
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
        return Asked(next(self._numbers), request, on_answer)

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

    def _fail_all(self, error: Exception) -> None:
        """End what has no answer, since none comes."""
        for number in list(self._unanswered):
            asked = self._unanswered.pop(number, None)
            if asked is not None:
                asked.error = error
                self._answered(asked)

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
                for frame in protocol.unpack(link.buffer):
                    self._take(*frame)
                link.reads = False
                return
        if self.is_closed:
            raise router_closed()
        self._connect()

    def _take(self, number: int, ok: Any, value: Any, error: list[Any] | None = None) -> None:
        if number == 0 and ok is None:  # the owner says goodbye
            for one in list(self._unanswered.values()):
                one.is_sent = False
            return
        if number == 0:
            self.on_push(ok, value, error)
            return
        asked = self._unanswered.get(number)
        if asked is None or asked.done:
            return
        try:
            if not ok:
                asked.error = protocol.unpack_error(value)
                if asked.is_again and isinstance(asked.error, UnknownSubscriptionError) and _ends(asked.request):
                    asked.value, asked.error = 0, None  # the first try has ended it
            elif asked.on_late is not None:
                asked.on_late(value)
            else:
                asked.value = value if asked.on_answer is None else asked.on_answer(value)
        except Exception as wrong:  # who asked is told, not who reads
            asked.error = wrong
        self._answered(asked)

    def _answered(self, asked: Asked) -> None:
        """Give an answer to who waits for it. A reader that is interrupted leaves it answered, or asked still."""
        asked.done = True
        if asked.future is not None:
            shared().resolve([(asked.future, asked.value, asked.error)])
        else:
            asked.wake()
        self._unanswered.pop(asked.number, None)

    # Ending

    def close(self) -> None:
        """Close the connection, once what was begun is answered: the owner gives back what this client holds.
        Idempotent."""
        if self.is_closed:
            return
        deadline = time.monotonic() + FINISH_SECONDS
        while any(map(_is_brief, list(self._unanswered.values()))) and time.monotonic() < deadline:
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
        self._is_forked = True
        self._beginning = threading.Lock()
        if self._file is not None:
            self._file.leave()
        if self._link is not None:
            self._link.sock.close()
        self.on_fork()

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


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _leave_all() -> None:
    for connection in list(_connections):
        connection.leave()


os.register_at_fork(after_in_child=_leave_all)


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


def _is_brief(asked: Asked) -> bool:
    """Return whether a request waits for nothing but the disk."""
    request = asked.request
    if isinstance(request, protocol.Call):
        return request.name != "map_wait"
    return not isinstance(request, protocol.Receive | protocol.ReceivePattern)


def _is_same(standing: protocol.Request, request: protocol.Request) -> bool:
    """Return whether a request that stands is the same, or of the same listener."""
    if isinstance(standing, protocol.Listen) and isinstance(request, protocol.Listen):
        return standing.listener == request.listener
    return standing == request


def _ends(request: protocol.Request) -> bool:
    """Return whether a request ends a subscription."""
    return isinstance(request, protocol.Call) and request.name == "unsubscribe"


def _again(request: protocol.Request) -> protocol.Request | None:
    """Return a request as it is sent once more; None for one that must not be."""
    if isinstance(request, protocol.Commit):
        return msgspec.structs.replace(request, again=True)
    return None if isinstance(request, protocol.Call) and request.name in ONCE else request
