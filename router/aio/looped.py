"""A client's connection that an event loop drives: no thread waits, and none is made but to find another owner."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import logging
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from ...adapters.system.conditions import Thread
from ...policies.errors import AnabranchError, ClosedError, router_closed
from ..sharing import protocol
from ..sharing.client import heartbeat
from ..sharing.client.exchange import RETRY_SECONDS, Asked, Exchange
from ..sharing.client.greeting import Greeter
from ..sharing.descriptors import READ_BYTES, send
from .together import Together
from .workers import GreenletExit, current, pause, result_of, start

log: logging.Logger = logging.getLogger(__name__)


def _period() -> float:
    return heartbeat.HEARTBEAT_SECONDS / heartbeat.PERIODS


class LoopConnection(Exchange):
    """The connection of one client. All is done on the thread of its loop, if not said otherwise."""

    def __init__(self, directory: Path, greeter: Greeter, held: Callable[[], list[protocol.Held]]) -> None:
        """Connect by a greeter, in a worker; `held` is as Exchange says."""
        self._greeter = greeter
        self.loop: Final = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._sock: socket.socket | None = None
        self._in = bytearray()
        self._out: deque[tuple[bytearray, int]] = deque()
        """What is to go, with descriptors."""
        self._going: list[Asked] = []
        """Those whose requests are in `_out`, of which nothing has gone yet."""
        self.is_asked: bool = False
        """Something is to go to the owner with this turn of the loop."""
        self._is_writing = False
        self.together: Final = Together(self._flush_soon)
        self._context = contextvars.Context()
        """That of no task."""
        self._beating: asyncio.TimerHandle | None = None
        self._quiet = 0
        """For so many periods nothing has come; -1: something has in this one."""
        self._connecting: asyncio.Task[None] | None = None
        super().__init__(directory, held)
        try:
            self._link(*result_of(self._greet()))
        except BaseException:
            self.close()
            raise

    # Connecting

    def _greet(self) -> asyncio.Future[tuple[socket.socket, bytearray]]:
        """Find the owner, which may have to be started, on a thread of its own: all of the loop's may wait for it."""
        greeted: Future[tuple[socket.socket, bytearray]] = Future()
        greeted.set_running_or_notify_cancel()

        def greet() -> None:
            try:
                greeted.set_result(self._greeter.connect(self))
            except BaseException as error:
                greeted.set_exception(error)

        Thread(greet, "share-greet").start()
        return asyncio.wrap_future(greeted)

    def _link(self, sock: socket.socket, buffer: bytearray) -> None:
        if self.is_closed:
            sock.close()
            return
        sock.setblocking(False)
        self._sock, self._in = sock, buffer
        self._out.extend((bytearray(frame), fd) for frame, fd in self._again())
        self.loop.add_reader(sock, self._read)
        self._flush()
        self._quiet, self._beating = 0, self.loop.call_later(_period(), self._beat)

    def _beat(self) -> None:
        """Note that nothing has come for a period, where something is waited for, and ask whether the owner lives."""
        self._beating = self.loop.call_later(_period(), self._beat)
        if self._quiet >= 0 and (self._unanswered or self.on_reconnect()):
            if self._quiet == 0:
                self._put(protocol.pack(next(self._numbers), protocol.Ping()))
            self._quiet += 1
            if self._quiet > heartbeat.PERIODS:
                self._fall_silent()
        else:
            self._quiet = 0

    def _pause(self, seconds: float) -> None:
        result_of(self.loop.create_task(asyncio.sleep(seconds)))

    async def _connect(self) -> None:
        while not self.is_closed:
            try:
                self._link(*await self._greet())
                return
            except (AnabranchError, OSError, protocol.ProtocolError) as error:
                log.error("the owner of %s is lost: %s", self.directory, error)
                self._fail_all(error)
                await asyncio.sleep(RETRY_SECONDS)

    def _unlink(self) -> None:
        sock, self._sock = self._sock, None
        if self._beating is not None:
            self._beating.cancel()
        if sock is not None:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.remove_reader(sock)
                self.loop.remove_writer(sock)
            self._is_writing = False
            sock.close()
        self._out.clear()
        self._going.clear()

    def _lost(self) -> None:
        """Connect to the next owner."""
        self._unlink()
        self._connecting = self.loop.create_task(self._connect())

    # Asking

    def _send_and_wait(self, asked: Asked) -> None:
        """Send a request, and let the loop go on until the answer is there."""
        worker = current()
        if worker is None or threading.get_ident() != self._thread:
            raise RuntimeError(
                f"a call of {self.directory} was made without `await`: its router is one of anabranch.aio"
            )
        asked.on_done = worker.resume
        self._send(asked)
        try:
            while not asked.done:
                pause()
        except GreenletExit:  # the loop has ended, and nobody has closed the router
            raise
        except BaseException:
            asked.on_late = asked.late or (lambda late: None)
            with suppress(ClosedError):
                self._send(self._asked(protocol.Cancel(asked.number)))
            raise

    def _send(self, asked: Asked) -> None:
        if self._is_forked:
            raise ClosedError(f"the router of {self.directory} is its parent process's; open one in this process")
        if self.is_closed:
            raise router_closed()
        self._require_life(asked)
        frame, fd = self._framed(asked.number, asked.request)
        self._unanswered[asked.number] = asked
        if self._sock is None:
            return  # it is sent when the next owner is there
        self._going.append(asked)
        self._put(frame, fd)

    def _put(self, frame: bytes, fd: int = -1) -> None:
        if fd < 0 and self._out and self._out[-1][1] < 0:
            self._out[-1][0].extend(frame)
        else:
            self._out.append((bytearray(frame), fd))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self.is_asked:  # with all that others ask in this turn of the loop
            self.loop.call_soon(self._flush, context=self._context)
            self.is_asked = True

    def _flush(self) -> None:
        try:
            self.together.begin()
        except BaseException:  # an interrupt
            self.loop.call_soon(self._flush, context=self._context)
            raise
        self.is_asked = False
        if self._sock is None:
            return
        for asked in self._going:
            asked.is_sent = True
        self._going.clear()
        try:
            while self._out:
                frames, fd = self._out[0]
                del frames[: send(self._sock, frames, fd)]
                self._out[0] = (frames, -1)
                if frames:
                    break
                self._out.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # so many descriptors are on their way, and not received yet
                self.loop.call_later(0.001, self._flush)
            else:
                self._out.clear()  # the end is read soon
        if bool(self._out) != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self.loop.add_writer(self._sock, self._flush)
            else:
                self.loop.remove_writer(self._sock)

    def keep_reading(self) -> None:
        """Do nothing: the loop reads."""

    read_for_future = keep_reading

    def later(self, call: Callable[[], None]) -> None:
        """Make a call that asks, without waiting for it. Any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(start, call)

    def schedule(self, seconds: float, method: Callable[[], None]) -> None:
        """Call a method in so many seconds, if its object is there still. Any thread."""
        alive = weakref.WeakMethod(method)

        def run() -> None:
            found = alive()
            if found is not None:
                start(found)

        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(partial(self.loop.call_later, seconds, run))

    # Reading

    def _read(self) -> None:
        assert self._sock is not None
        try:
            data = self.arrived.receive(self._sock, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if self._quiet > 0 and data:
            self._note_life()
        self._quiet = -1
        self._in += data
        try:
            self._take_all(self._in)
        except protocol.ProtocolError as error:
            log.error("the owner of %s is lost: %s", self.directory, error)
            data = b""
        if not data and not self.is_closed:
            self._lost()

    # Ending

    async def finish(self, seconds: float) -> None:
        """Wait for the answers to what was begun, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (self.is_asked or self._is_brief) and not self.loop.is_closed():
                    await asyncio.sleep(0.0005)

    def close(self) -> None:
        """Close the connection: the owner gives back what this client holds. What waits raises ClosedError.
        Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if not self._is_forked:
            self._file.close()  # first: the owner sees that it is gone for good
        if self._connecting is not None and not self.loop.is_closed():
            self._connecting.cancel()
        self._unlink()
        self._fail_all(router_closed())

    def leave(self) -> None:
        """Let go of all that is the parent's, in a forked child."""
        super().leave()
        sock, self._sock = self._sock, None  # the loop's own descriptor is its parent's too: nothing is removed there
        if sock is not None:
            sock.close()
        self._unanswered.clear()
