"""A client's connection to the owner of a directory: requests of any threads, pipelined, and their answers.

Who waits for an answer reads the socket for all who wait, so that a call costs no change of threads. Where nobody waits
and something may come all the same (for a Future, a listener) a thread of the library reads.

An owner that has gone is replaced: the next call, or the read that finds it, connects to the next owner, tells what
this client holds, and sends again what has no answer. Each request bears that: docs/processes.md says how. An owner
that lives and does not answer is waited for no longer than heartbeat.py says.

A signal handler may use the connection, where it has struck its own thread as that waits at the socket: it reads for
both. Where it has struck it in the middle of a frame its call raises RuntimeError, and has done nothing (rule G3).
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from ....adapters.system.background import shared
from ....adapters.system.conditions import Event, Thread, unless_busy
from ....policies.errors import AnabranchError, StoreFailedError, router_closed
from ...api.reentry import waits_for_message
from .. import protocol
from ..descriptors import CLOSED_ON_EXEC, READ_BYTES, SPACE, send
from . import heartbeat
from .exchange import RETRY_SECONDS, Asked, Exchange
from .greeting import Greeter

log: logging.Logger = logging.getLogger(__name__)

FINISH_SECONDS: Final = 5.0
"""For so long a connection that is closed waits for the answers to what was begun."""
LOOK_SECONDS: Final = 0.05
"""A thread that waits while another reads looks after so long whether that still does. It is woken where it does not,
unless that one was interrupted."""
LOOK_MAX_SECONDS: Final = 1.0
"""The pauses between its looks double up to this: there may be a thousand such threads."""
PUMP_SECONDS: Final = 0.1
"""For so long another Future is expected after one."""


class _Link:
    """One socket, and what has come over it."""

    __slots__ = ("buffer", "came", "quiet", "sends", "sock", "takes", "waits")

    def __init__(self, sock: socket.socket, buffer: bytearray) -> None:
        self.sock: Final = sock
        self.buffer: bytearray = buffer
        self.came: list[Any] = []
        """What was read and is not in the buffer yet; nothing, at the end."""
        self.sends: bool = False
        self.takes: bool = False
        """A thread sends, or takes what has come, with the lock held; without it: one was interrupted there, and what
        has gone, or come, is not known any more."""
        self.waits: bool = False
        """A thread is about to read, or was interrupted there, which has lost nothing."""
        self.quiet: int = 0
        """For so many periods nothing has come or gone."""
        period = heartbeat.HEARTBEAT_SECONDS / heartbeat.PERIODS
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # which cost nothing while something comes
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(period), int(period % 1 * 1e6)))

    def cut(self) -> None:
        """End it, which wakes who reads it; what has come can be read still."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Connection(Exchange):
    """The connection of one client. Threads: all. A forked child connects anew, as another client."""

    def __init__(self, directory: Path, greeter: Greeter, held: Callable[[], list[protocol.Held]]) -> None:
        """Connect by a greeter; `held` is as Exchange says."""
        self._greeter = greeter
        self._beginning = threading.RLock()
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
        self._sending = threading.RLock()  # a signal handler may come back to it in the same thread
        self._reading = threading.RLock()
        """Held by the thread that reads, and connects."""
        self._connects = False
        """A thread connects, or was interrupted there."""
        self._pump: threading.Thread | None = None
        """The thread that reads for listeners and Futures."""
        self._is_pumping = Event()
        """It reads, or is about to look whether it is to."""
        self._reads_on = False
        self._future_at = 0.0
        """When the last Future was made (monotonic)."""

    # Connecting

    def _connect(self) -> None:
        """Connect, instead of a link that has ended, and send what has no answer. With `_reading` held. Raises
        StoreFailedError if no owner comes, ConfigError for one that cannot be reached."""
        self._refuse_within(Connection._connect)
        self._connects = True
        old = self._link
        if old is not None:
            old.cut()  # wakes who sends
        link = _Link(*self._greeter.connect(self))
        try:
            with self._sending:
                self._link = link
                if self.is_closed:  # looked at behind the line above: `close` looks the other way round
                    raise router_closed()
                frames = self._again()
                with suppress(OSError):  # whoever reads finds it
                    for frame, fd in frames:
                        self._write(link, frame, fd)
            self._connects = False
        except BaseException:
            link.cut()  # interrupted, and not known how far it came; or closed, which tells the owner
            raise
        finally:
            if old is not None:
                old.sock.close()

    # Asking

    def _send_and_wait(self, asked: Asked) -> None:
        try:
            self._send(asked)
            self._await(asked)
        except Exception as error:
            self._unanswered.pop(asked.number, None)
            self._hand_over()  # it may have read for all
            lost = self._without_answer(asked, error)
            if lost is error:
                raise
            raise lost from error
        except BaseException:
            self._cancel(asked)
            raise

    def _asked(self, request: protocol.Request, on_answer: Callable[[Any], Any] | None = None) -> Asked:
        if self._is_forked:
            self._begin_in_child()
        return Asked(next(self._numbers), request, on_answer)

    def _cancel(self, asked: Asked) -> None:
        """Let go of a request whose caller was interrupted, and of what comes all the same."""
        if asked.late is None or self.is_closed:
            self._unanswered.pop(asked.number, None)
            self._hand_over()
            return
        asked.on_late = asked.late
        with suppress(AnabranchError):
            other = self._asked(protocol.Cancel(asked.number))
            self._send(other)
            self._await(other)  # behind which nothing more comes

    def _send(self, asked: Asked) -> None:
        frame, fd = self._framed(asked.number, asked.request)
        if self._is_silent:  # first: whoever sends may wait for an owner that takes nothing
            self._require_life(asked)
        with self._sending:
            if self.is_closed:
                raise router_closed()
            if self._is_silent:
                self._require_life(asked)
            link = self._link
            if self._connects:
                self._refuse_within(Connection._connect)
            if link is None:
                self._unanswered[asked.number] = asked
                return  # whoever reads connects, and sends it
            if link.takes:
                self._refuse_within(Connection._take_came)
            if link.sends:
                self._refuse_within(Connection._send, Connection._ping)
                self._unanswered[asked.number] = asked
                link.cut()  # what one has sent that was interrupted is not known
                return
            self._unanswered[asked.number] = asked
            link.sends = True
            try:
                asked.is_sent = self._write(link, frame, fd, asked)
            except OSError:
                link.cut()
            except StoreFailedError:
                link.sends = False
                self._unanswered.pop(asked.number, None)  # who reads may have answered it meanwhile, for the silence
                raise
            link.sends = False

    def _write(self, link: _Link, data: bytes, fd: int, asked: Asked | None = None) -> bool:
        """Send bytes over a link; return whether they have gone. Those of a request that is given up need not. With
        `_sending` held. Raises OSError, also where half of a request has gone, and StoreFailedError for one of which
        nothing goes, since the owner does not answer: else all who send would wait for it."""
        sent = 0
        while True:
            try:
                sent += send(link.sock, memoryview(data)[sent:] if sent else data, -1 if sent else fd)
                if sent == len(data):
                    return True
                link.quiet = 0
            except BlockingIOError:  # the owner takes nothing: it reads no more of this client for now, or is stopped
                unless_busy(self._reading, partial(self._look, link))  # else who reads looks
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(0.001)  # so many descriptors are on their way, and not received yet
            if asked is not None and asked.done:
                if sent:
                    raise BrokenPipeError
                return False
            if asked is not None and self._is_silent and not sent:
                raise heartbeat.refused(self.owner_pid, self.directory)

    def _look(self, link: _Link) -> None:
        """Read what has come, without waiting. With `_reading` held."""
        if not link.takes:
            self._pull(link, socket.MSG_DONTWAIT)

    def _refuse_within(self, *calls: Callable[..., object]) -> None:
        """Raise RuntimeError in a signal handler that has interrupted its own thread in one of these methods."""
        if _is_within(self, sys._getframe(1).f_back, [one.__code__ for one in calls]):
            raise RuntimeError(
                "a shared router was called from a signal handler that interrupted another call of its thread as that "
                "was at the socket; do it after the handler, or in another thread"
            )

    # Reading

    def _await(self, asked: Asked) -> None:
        """Wait for an answer: read for all, or until another thread that reads has it."""
        read, pause = partial(self._read_for, asked), LOOK_SECONDS
        while not asked.done:
            if unless_busy(self._reading, read):
                if self._unanswered:
                    self._hand_over()
            else:
                if asked.lock is None:
                    asked.lock = threading.Lock()
                    asked.lock.acquire()  # whoever ends reading from here on wakes this one: it looks once more
                elif not asked.done:
                    is_woken = asked.lock.acquire(timeout=pause)
                    pause = LOOK_SECONDS if is_woken else min(2 * pause, LOOK_MAX_SECONDS)

    def _read_for(self, asked: Asked) -> bool:
        link = self._link
        is_nested = False
        if link is not None and link.waits:
            is_nested = link.waits = _is_within(self, sys._getframe(), [_PULL])
        while not asked.done:
            self._read(asked)
        if is_nested and link is not None:
            with self._sending:
                self._ping(link)  # wakes the call that was interrupted at the socket: its answer may have come
        return True

    def _hand_over(self) -> None:
        """Let another thread read, if one waits."""
        for other in list(self._unanswered.values()):
            if other.lock is not None and other.on_late is None:  # else its caller has gone
                other.wake()
                return

    def _watch(self) -> None:
        """Let a thread find the end of a link that nobody reads: what this client holds is told to the next owner in
        time."""
        Thread(_watched, "share-watch", (weakref.ref(self),)).start()

    def keep_reading(self) -> None:
        """Let a thread of the library read from now on."""
        self._reads_on = True
        self._start_pump()

    def read_for_future(self) -> None:
        """Let a thread of the library read until no Future waits any more, and a while longer."""
        self._future_at = time.monotonic()
        self._start_pump()

    def _start_pump(self) -> None:
        if self._pump is None:
            pump = Thread(self._read_on, "share-read")
            pump.start()
            self._pump = pump
        if not self._is_pumping.is_set():
            self._is_pumping.set()

    def _is_pump_needed(self) -> bool:
        return (
            self._reads_on
            or self.is_closed
            or time.monotonic() < self._future_at + PUMP_SECONDS
            or any(asked.future is not None for asked in list(self._unanswered.values()))
        )

    def later(self, call: Callable[[], None]) -> None:
        """Make a call on a thread of the library."""
        shared().lead(call)

    def schedule(self, seconds: float, method: Callable[[], None]) -> None:
        """Call a method on a thread of the library."""
        shared().schedule_while_alive(seconds, method)

    def _read_on(self) -> None:
        while not self.is_closed:
            if not self._is_pump_needed():
                self._is_pumping.clear()
                self._hand_over()
                if not self._is_pump_needed():
                    self._is_pumping.wait()
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
        self._hand_over()

    def _read(self, asked: Asked | None = None) -> None:
        """Read what has come, and give each answer to who waits for it; connect if the link has ended, unless this
        request is answered by then. With `_reading` held. Raises as `_connect`."""
        link = self._link
        if link is not None and not link.takes and self._pull(link):
            return
        if self._link is not link or (asked is not None and asked.done):
            return
        if self.is_closed:
            raise router_closed()
        self._connect()

    def _pull(self, link: _Link, flags: int = 0) -> bool:
        """Read a piece of what has come; return whether the link goes on. With `_reading` held."""
        waits, link.waits = link.waits, True
        try:
            # One step: what was read is in hand, or with the operating system, wherever a signal strikes.
            link.came.extend(map(link.sock.recvmsg, (READ_BYTES,), (SPACE,), (flags | CLOSED_ON_EXEC,)))
        except BlockingIOError:
            link.waits = waits
            self._note_quiet(link)
            return True
        except OSError:
            return False
        link.waits = waits
        return self._take_came(link)

    def _take_came(self, link: _Link) -> bool:
        """Take what has come; return False at the end of the link."""
        link.takes = True
        if link.quiet:
            link.quiet = 0
            self._note_life()
        came = list(map(self.arrived.note, link.came))
        is_open = b"" not in came
        link.buffer += b"".join(came)
        link.came.clear()
        self._take_all(link.buffer)
        link.takes = False
        return is_open

    def _note_quiet(self, link: _Link) -> None:
        """Note that nothing has come for a period. With `_reading` held."""
        if link.quiet == 0:
            if not self._unanswered and not self.on_reconnect():
                return  # nothing is waited for
            unless_busy(self._sending, partial(self._ping, link))  # else the owner shows by itself that it lives
        link.quiet += 1
        if link.quiet > heartbeat.PERIODS:
            self._fall_silent()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _ping(self, link: _Link) -> None:
        """Ask whether the owner lives, without waiting for its answer. With `_sending` held."""
        if not link.sends:
            link.sends = True
            with suppress(OSError):
                link.sock.send(protocol.pack(next(self._numbers), protocol.Ping()), socket.MSG_DONTWAIT)
            link.sends = False

    # Ending

    def close(self) -> None:
        """Close the connection, once what was begun is answered: the owner gives back what this client holds.
        Idempotent."""
        if self.is_closed or self._is_forked:  # all of it is the parent's then
            self.is_closed: bool = True
            return
        deadline = time.monotonic() + FINISH_SECONDS
        while self._is_brief and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.is_closed = True
        self._is_pumping.set()
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
        self._beginning = threading.RLock()
        if self._link is not None:
            self._link.sock.close()

    def _begin_in_child(self) -> None:
        self._refuse_within(Connection._begin_in_child)
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


_PULL: Final = Connection._pull.__code__


def _is_within(connection: Connection, frame: FrameType | None, codes: list[CodeType]) -> bool:
    """Return whether a frame, or one that it was called from, is a call of this connection with this code."""
    if threading.get_ident() != threading.main_thread().ident:
        return False
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is connection:
            return True
        frame = frame.f_back
    return False


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


def _waits_in_receive(frame: FrameType) -> bool:
    """Return whether a `receive` waits here for a message, and has nothing in hand."""
    if frame.f_code not in (_PULL, Connection._await.__code__):
        return False
    found: FrameType | None = frame
    while found is not None and found.f_code is not Connection._await.__code__:
        found = found.f_back
    return found is not None and isinstance(found.f_locals["asked"].request, protocol.Receive | protocol.ReceivePattern)


waits_for_message.append(_waits_in_receive)
