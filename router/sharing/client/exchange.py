"""The talk of a client and its owner: requests, their answers, and what is sent again to the next owner.

Nothing here reads, writes or waits. Who drives it does: the threads of a blocking client (connection.py), or an event
loop (router/aio/looped.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from ....adapters.system.background import shared
from ....adapters.system.conditions import Promise
from ....policies.errors import AnabranchError, OutcomeUnknownError, StoreFailedError, UnknownSubscriptionError
from .. import protocol
from ..clients import ClientFile
from ..descriptors import Arrived, Descriptor
from . import heartbeat

log: logging.Logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0
"""Until an owner is looked for again that did not come."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request that has no answer yet."""

    number: int
    request: protocol.Request
    on_answer: Callable[[Any], Any] | None
    """Makes the result of the answer's value, while no other answer is looked at."""
    on_late: Callable[[Any], object] | None = None
    """Called with the value instead, once the caller was interrupted, or has given up."""
    late: Callable[[Any], object] | None = None
    """What `on_late` is to be then."""
    is_patient: bool = False
    """It waits for an owner that does not answer, too."""
    is_standing: bool = False
    """It was asked of the owner as that came, by `on_reconnect`, which asks the next one again."""
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
    began: float = 0.0
    """When it was asked (monotonic), where a caller waits."""
    on_done: Callable[[], object] | None = None
    """Called once it is answered, instead."""
    on_error: Callable[[Exception], object] | None = None
    """Called first, if that is an error."""

    def wake(self) -> None:
        """Let the thread that waits, which has a lock here, look again."""
        assert self.lock is not None
        with suppress(RuntimeError):
            self.lock.release()


class Exchange(ABC):
    """The requests of one client, and its place among the clients of the directory."""

    def __init__(self, directory: Path, held: Callable[[], list[protocol.Held]]) -> None:
        """`held` tells what this client holds."""
        self._held = held
        self.directory = directory
        self.on_push: Callable[[int, list[Any] | None, list[Any] | None], None] = lambda number, messages, error: None
        """Called with what comes for a listener, or with the error that has ended it."""
        self.on_reconnect: Callable[[], list[protocol.Request]] = list
        """Returns the requests that each owner is to have been sent, such as those by which listeners begin again."""
        self.on_refused: Callable[[protocol.Request, Exception], None] = lambda request, error: None
        """Called where an owner has refused one of these."""
        self.on_fork: Callable[[], None] = lambda: None
        """Called in a child as it is forked, which holds nothing."""
        self.on_life: Callable[[], None] = lambda: None
        """Called where an owner that did not answer does so again."""
        self.descriptors: WeakValueDictionary[int, Descriptor] = WeakValueDictionary()
        """Those of the bodies that are to be sent, which go with a Body of their number."""
        self.is_closed: bool = False
        self._is_forked = False
        self._begin()
        _exchanges.add(self)

    def _begin(self) -> None:
        """Begin as a client of the owner, which has no connection yet."""
        self.client: str = f"{os.getpid():x}-{os.urandom(8).hex()}"
        self._file = ClientFile(self.directory, self.client)
        self._place = self.directory.stat()
        """Which directory it is, whatever comes to be of that name."""
        self._numbers = itertools.count(1)
        self._unanswered: dict[int, Asked] = {}
        self._outcomes: dict[int, tuple[Promise[Any], Any, BaseException | None]] = {}
        """By number: those of futures that are to be resolved, together."""
        self.arrived: Arrived = Arrived()
        self._owner = ""
        """Tells the owner that it was connected to last from those before and after it."""
        self.owner_pid: int = 0
        self._is_silent = False
        """The owner has not answered for too long."""
        self._has_left = False
        """The owner has said goodbye: what it has not answered it has not begun, and does not begin."""

    def leave(self) -> None:
        """Let go of all that is the parent's, in a forked child."""
        self._is_forked = True
        self._file.leave()
        self.on_fork()

    # Connecting

    def require_place(self) -> None:
        """Raise StoreFailedError unless the directory is the one that this client has begun with."""
        with suppress(OSError):
            if os.path.samestat(self._place, self.directory.stat()):
                return
        raise StoreFailedError(
            f"the directory {self.directory} was deleted or renamed, or its disk went away, since this process opened "
            "it: what is there now holds nothing of it; see to that, and open the router again"
        )

    def hello(self) -> bytes:
        """Return the frame that greets an owner."""
        hello = protocol.Hello(protocol.VERSION, self.client, os.getpid(), self._owner, self._held())
        return protocol.pack(next(self._numbers), hello)

    def greeted(self, answer: list[Any]) -> None:
        """Take the answer to a greeting. Raises its error, and EOFError for the word of an owner that leaves."""
        _, ok, value = answer
        if ok is None:  # as in `_take`: it had not come to the greeting
            raise EOFError
        if not ok:
            raise protocol.unpack_error(value)
        self._owner, self.owner_pid = value
        self._is_silent = False

    def _framed(self, number: int, request: protocol.Request) -> tuple[bytes, int]:
        """Return the frame of a request, and the descriptor that goes with it; -1 for none. Raises as `pack`."""
        found = self.descriptors.get(request.body) if type(request) is protocol.Body else None
        return protocol.pack_request(number, request), -1 if found is None else found.fd

    def _again(self) -> list[tuple[bytes, int]]:
        """Return what goes to an owner which has just been greeted: what is to have been sent to each, and what has no
        answer. First go the bodies, of which the others speak."""
        standing, frames = self.on_reconnect(), list[tuple[bytes, int]]()
        has_left, self._has_left = self._has_left, False
        for asked in list(self._unanswered.values()):
            asked.is_sent = asked.is_sent and not has_left
            if asked.is_standing:
                self._unanswered.pop(asked.number, None)
                continue
            again = _again(asked) if asked.is_sent or asked.is_again else _with_time_left(asked)
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
                frames.append(self._framed(asked.number, again))
                asked.is_again |= asked.is_sent
                asked.is_sent = True
        for one in standing:
            asked = Asked(next(self._numbers), one, None, is_patient=True, is_sent=True, is_standing=True)
            asked.on_done = partial(self._stands, asked)
            self._unanswered[asked.number] = asked
            frames.append(self._framed(asked.number, one))
        self._resolve()
        plain = b"".join([frame for frame, fd in frames if fd < 0])
        return [*(one for one in frames if one[1] >= 0), (plain, -1)]

    def _stands(self, asked: Asked) -> None:
        if asked.error is not None:
            self.on_refused(asked.request, asked.error)

    # Asking

    def ask(
        self,
        request: protocol.Request,
        on_answer: Callable[[Any], Any] | None = None,
        on_late: Callable[[Any], object] | None = None,
        is_patient: bool = False,
    ) -> Any:
        """Ask, and wait for the answer. Raises its error, ClosedError, and StoreFailedError where the owner does not
        answer; `is_patient`: it is waited for then. `on_late`: it may be cancelled, and this is called with what comes
        all the same."""
        asked = self._asked(request, on_answer)
        asked.late, asked.is_patient, asked.began = on_late, is_patient, time.monotonic()
        self._send_and_wait(asked)
        if asked.error is not None:
            raise asked.error
        return asked.value

    def ask_nowait(
        self, request: protocol.Request, on_answer: Callable[[Any], Any],
        on_error: Callable[[Exception], object] | None = None,
    ) -> Future[Any]:  # fmt: skip
        """Ask; callbacks of the future are called on a thread of the library. Raises ClosedError."""
        asked = self._asked(request, on_answer)
        asked.on_error = on_error
        future: Promise[Any] = Promise()
        asked.future = future
        future.set_running_or_notify_cancel()
        self._send(asked)
        self.read_for_future()
        return future

    @abstractmethod
    def _send(self, asked: Asked) -> None:
        """Send a request, or leave it to who connects. Raises ClosedError, StoreFailedError."""

    @abstractmethod
    def _send_and_wait(self, asked: Asked) -> None:
        """Send a request, and wait until it is answered. Raises as `_send`."""

    @abstractmethod
    def keep_reading(self) -> None:
        """Read from now on, whether anybody waits or not."""

    @abstractmethod
    def read_for_future(self) -> None:
        """Read as long as a Future has no answer."""

    @abstractmethod
    def later(self, call: Callable[[], None]) -> None:
        """Make a call that asks, without waiting for it. Any thread, also that which reads."""

    @abstractmethod
    def schedule(self, seconds: float, method: Callable[[], None]) -> None:
        """Call a method that asks in so many seconds, if its object is there still. Any thread."""

    @abstractmethod
    def _pause(self, seconds: float) -> None:
        """Wait for so long, where a call may wait."""

    def _wait_for_life(self) -> None:
        """Read until the owner answers, or another, and ask it as long as it does not."""
        while self._is_silent and not self.is_closed:
            try:
                self.ask(protocol.Ping(), is_patient=True)
            except (AnabranchError, OSError, protocol.ProtocolError) as error:
                log.debug("the owner of %s is lost: %s", self.directory, error)
                if not self.is_closed:
                    self._pause(RETRY_SECONDS)

    @abstractmethod
    def close(self) -> None:
        """Close the connection: the owner gives back what this client holds. Idempotent."""

    def _asked(self, request: protocol.Request, on_answer: Callable[[Any], Any] | None = None) -> Asked:
        return Asked(next(self._numbers), request, on_answer)

    @property
    def _is_brief(self) -> bool:
        """True if something has no answer that waits for nothing but the disk."""
        return not self._is_silent and any(map(_waits_for_disk, list(self._unanswered.values())))

    # Answers

    def _take_all(self, buffer: bytearray) -> None:
        """Take the whole frames at the head of a buffer. Raises ProtocolError."""
        for frame in protocol.unpack(buffer):
            self._take(*frame)
        if self._outcomes:
            self._resolve()
        self.arrived.let_go()

    def _take(self, number: int, ok: Any, value: Any, error: list[Any] | None = None) -> None:
        if number == 0 and ok is None:
            self._has_left = True
            return
        if number == 0 and (ok is True or ok == protocol.PASSES):
            # The owner lives, and reads nothing of this client for now; or a descriptor has come with it.
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
        if asked.error is not None and asked.on_error is not None:
            asked.on_error(asked.error)
        asked.done = True
        if asked.future is not None:
            self._outcomes[asked.number] = asked.future, asked.value, asked.error
        elif asked.on_done is not None:
            asked.on_done()
        elif asked.lock is not None:  # else nobody waits yet, who looks first
            asked.wake()
        self._unanswered.pop(asked.number, None)

    def _resolve(self) -> None:
        """Resolve the futures of what was answered; once more where a signal strikes, which does nothing."""
        if self._outcomes:
            outcomes = dict(self._outcomes)
            observed: list[Any] = [one for one in outcomes.values() if not one[0].settle(one[1], one[2])]
            if observed:
                shared().resolve(observed)
            for number in outcomes:
                self._outcomes.pop(number, None)

    def _fail_all(self, error: Exception) -> None:
        """End what has no answer, since none comes."""
        for asked in list(self._unanswered.values()):
            if asked.is_standing:
                self._unanswered.pop(asked.number, None)
            elif not asked.done:
                asked.error = self._without_answer(asked, error)
                self._answered(asked)
        self._resolve()

    def _without_answer(self, asked: Asked, error: Exception) -> Exception:
        """Return the error of a request to which no answer comes, for this one."""
        is_out = asked.is_again or (asked.is_sent and not self._has_left)
        return heartbeat.lost(asked.request, error) if is_out and not (asked.done or self.is_closed) else error

    # An owner that does not answer (heartbeat.py)

    def _require_life(self, asked: Asked) -> None:
        """Raise StoreFailedError for what is not sent to an owner that does not answer."""
        if self._is_silent and not asked.is_patient:
            raise heartbeat.refused(self.owner_pid, self.directory)

    def _fall_silent(self) -> None:
        """Note that the owner does not answer: what waits for it ends."""
        if not self._is_silent:
            self._is_silent = True  # first: who asks from now on hears it at once
            log.warning("%s; calls fail until it answers", heartbeat.shown(self.owner_pid, self.directory))
            self.later(self._wait_for_life)
        for asked in list(self._unanswered.values()):
            if not asked.is_patient and asked.on_late is None:
                asked.error = heartbeat.given_up(self.owner_pid, self.directory, asked.request, asked.is_sent)
                self._answered(asked)
                if asked.late is not None and asked.is_sent:  # what comes all the same is taken care of
                    self._unanswered[asked.number] = Asked(asked.number, asked.request, None, asked.late)
        self._resolve()

    def _note_life(self) -> None:
        """Note that something has come again."""
        if self._is_silent:
            self._is_silent = False
            log.warning("process %d, which owns %s, answers again", self.owner_pid, self.directory)
            for asked in list(self._unanswered.values()):
                if asked.on_late is not None:
                    self.later(partial(self._end, asked))
            self.later(self.on_life)

    def _end(self, asked: Asked) -> None:
        """End a request that its caller has given up."""
        with suppress(AnabranchError):
            self.ask(protocol.Cancel(asked.number))


_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _leave_all() -> None:
    for exchange in list(_exchanges):
        exchange.leave()


os.register_at_fork(after_in_child=_leave_all)


def _waits_for_disk(asked: Asked) -> bool:
    """Return whether a request waits for nothing but the disk."""
    request = asked.request
    if asked.on_late is not None or asked.is_standing:
        return False
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


def _again(asked: Asked) -> protocol.Request | None:
    """Return a request as it is sent once more; None for one that must not be."""
    request = asked.request
    if isinstance(request, protocol.Commit):
        return msgspec.structs.replace(request, again=True)
    if isinstance(request, protocol.Call) and request.name in protocol.TOLD_AGAIN:
        return msgspec.structs.replace(request, given=[*request.given[:-1], True])
    if isinstance(request, protocol.Call) and request.name in protocol.ONCE:
        return None
    return _with_time_left(asked)


def _with_time_left(asked: Asked) -> protocol.Request:
    """Return a request that waits for no longer than its caller wants, the time before included."""
    request, gone = asked.request, time.monotonic() - asked.began
    match request:
        case protocol.Receive(timeout=float(timeout)) | protocol.ReceivePattern(timeout=float(timeout)):
            return msgspec.structs.replace(request, timeout=max(timeout - gone, 0.0))
        case protocol.Call("map_wait", [*given, float(timeout)]):
            return msgspec.structs.replace(request, given=[*given, max(timeout - gone, 0.0)])
    return request
