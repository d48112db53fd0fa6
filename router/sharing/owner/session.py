"""A client as its owner sees it: its connection, and what it holds."""

from __future__ import annotations

import base64
import itertools
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from ....adapters.core.messages import MADE, MadeId, Message, Outgoing, note_settled
from ....adapters.core.record.large import StoredBody
from ....adapters.core.service.looking import LookingListener
from ....adapters.core.store_types import Listener, SubscriptionKey
from ....adapters.system.background import shared
from ....policies.errors import AnabranchError, ClosedError
from ...api.transaction import Transaction
from ...events import EventListener
from ...placement.registry import StoreRegistry
from ...router import Router
from .. import protocol
from ..descriptors import NONE, READ_BYTES, Arrived, Descriptor, send
from ..socket_file import identity_of
from .bodies import GivenFile, all_given

log: logging.Logger = logging.getLogger(__name__)

PAGE_BYTES: Final = 8 << 20
"""Bytes of bodies after which a page of messages, or of a map's values, ends."""
UNANSWERED_MAX: Final = 1024
"""Requests of a client that are taken without an answer; beyond that it is not read."""
UNREAD_MAX: Final = 64 << 20
"""Bytes that wait for a client to read them; beyond that nothing more is read of it, no page is made for it, its
listeners have no credit, and it is dropped after a time."""
IN_HAND_MAX: Final = 64 << 20
"""Bytes of a client's requests that have no answer; beyond that it is not read."""
LARGE: Final = 4096
"""A request of more bytes counts among them: the others are bounded by their number."""
LONG_MAX: Final = 256
"""Calls of a client that may take long at once: each has a thread."""
PASSED_MAX: Final = 64
"""Descriptors of received bodies that a client is passed unasked; for more it asks, one by one, when it reads them."""
GIVEN_MAX: Final = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
"""Descriptors of bodies to be sent that are taken, of all clients."""

SLICE_SECONDS: Final = 1.0
"""For so long a call waits before it looks whether its client is still there."""
_here = threading.local()


def slices(timeout: float | None) -> Iterator[float]:
    """Yield for how many seconds to wait, again and again until this time is over; at least once, None: for ever."""
    deadline = None if timeout is None else time.monotonic() + timeout
    left = SLICE_SECONDS
    while left == SLICE_SECONDS:
        if deadline is not None:
            left = min(SLICE_SECONDS, max(deadline - time.monotonic(), 0))
        yield left


class Session:
    """One connection of a client. `lock` guards what is to be written, and what is held; any thread may answer."""

    def __init__(self, sock: socket.socket, on_change: Callable[[Session], None], router: Router) -> None:
        """`on_change` is called, by any thread, when the socket takes no more for now, or when more may be read of it
        again."""
        self.sock = sock
        self._on_change = on_change
        self.router = router
        self.registry: StoreRegistry = router._registry
        self.client: str = ""
        """The client's id; empty before its Hello."""
        self._made = ""
        """The ids begin so that its messages without one are given."""
        self.pid: int = 0
        self.lock: Final = threading.RLock()
        self._in = bytearray()
        self.out: bytearray = bytearray()
        """What the socket did not take yet."""
        self.taken: int = 0
        """Bytes that it took later than they were sent."""
        self.is_looked_at = False
        """It will be looked at whether the client has read anything, of which too much waits for it."""
        self.unanswered: int = 0
        self.large: dict[int, int] = {}
        """By number: the bytes of large requests that have no answer."""
        self._large_bytes = 0
        self._pages = 0
        """How many pages are just made, each of PAGE_BYTES."""
        self._parked: deque[Callable[[], None]] = deque()
        """Those that are made once the client has read what waits for it."""
        self.held: dict[str, SubscriptionKey | None] = {}
        """Tokens of what it holds, as they are now, with the subscription."""
        self.aliases: dict[str, str | None] = {}
        """Tokens as the client knows them from an owner before, and as they are now; None: gone."""
        self.ending: set[int] = set()
        """Numbers of the requests that are just ending leases."""
        self.ended_late: set[str] = set()
        """Tokens of what it held when it was closed, and was settled after that."""
        self.listeners: dict[int, Listener] = {}
        self.granted: dict[int, int] = {}
        """By listener that its client wants, also where it is just beginning: all credit that it was given since its
        beginning."""
        self._withheld: dict[int, int] = {}
        """By listener: credit that it gets back once the client has read what waits for it."""
        self.waiting: dict[int, Any] = {}
        """By the number of the request: receives that wait."""
        self._long = 0
        self._cancelled: dict[int, threading.Event] = {}
        """By the numbers of the requests that may take long: set once nobody waits for the answer."""
        self.bodies: dict[int, Any] = {}
        """Large bodies that the client has received, by number."""
        self.given: dict[int, GivenFile] = {}
        """Those that it is to send, by its numbers."""
        self.arrived: Final = Arrived()
        self.passed: set[int] = set()
        """Numbers of the bodies whose descriptors the client was passed."""
        self.voted: dict[int, Transaction] = {}
        """Transactions that have voted, by the numbers of the requests, until the client says their outcome."""
        self.numbers: Final = itertools.count(int.from_bytes(os.urandom(5)) << 20)
        """Of bodies: others than those of an owner before."""
        self.events: EventListener | None = None
        self.is_closed: bool = False
        self.watched = 0
        """The events that are waited for at the socket."""
        self.is_unread = False
        """No more is read of it for now."""
        self.is_held_up = False
        """What it has asked for is not begun yet, by a thread that others do not wait for."""

    def greeted(self, client: str, pid: int) -> None:
        """Note who it is."""
        self.client, self.pid = client, pid
        own = int(client.rpartition("-")[2], 16) % (1 << 64)
        self._made = MADE + base64.urlsafe_b64encode(own.to_bytes(8)).decode().rstrip("=")

    # Reading

    def read(self) -> list[tuple[int, protocol.Request]]:
        """Return the requests that have come, with their numbers. Raises OSError, EOFError at the end,
        ProtocolError."""
        data = self.arrived.receive(self.sock, READ_BYTES)
        if not data:
            raise EOFError
        self._in += data
        requests = protocol.unpack(self._in, self._request_of, protocol.REQUEST_MAX)
        if not self.client and any(type(request) not in (protocol.Hello, protocol.Unfit) for _, request in requests):
            raise protocol.ProtocolError("a client greets first")
        if self.arrived:
            self._take_given(request for _, request in requests)
        with self.lock:
            self.unanswered += len(requests)
        return requests

    def _request_of(self, data: memoryview) -> tuple[int, protocol.Request]:
        number, request = protocol.request_of(data)
        if len(data) > LARGE:
            with self.lock:
                if number in self.large:
                    raise protocol.ProtocolError(f"two requests of number {number} at once")
                self.large[number] = len(data)
                self._large_bytes += len(data)
        return number, request

    def note_answered(self, number: int) -> None:
        """Note that a request that may be a large one is answered. Before it is sent."""
        with self.lock:
            self._large_bytes -= self.large.pop(number, 0)

    def _take_given(self, requests: Iterable[protocol.Request]) -> None:
        """Take the descriptors that belong to requests, and close those of which no frame speaks. Raises
        ProtocolError."""
        for request in requests:
            if type(request) is protocol.Body and request.body < 0:
                descriptor = self.arrived.take(request.identity)
                if descriptor is not None and len(all_given) < GIVEN_MAX:
                    self.given[request.body] = GivenFile(descriptor, request)
        if self._in:
            self.arrived.require_few()
        else:
            self.arrived.let_go(0)

    @property
    def in_hand(self) -> int:
        """Return how many requests have no answer yet, and wait for nothing that may never come."""
        return self.unanswered - len(self.waiting) - self._long

    @property
    def is_busy(self) -> bool:
        """True if no more is to be read of it for now."""
        return (
            self.is_held_up
            or self.unanswered - len(self.waiting) - self._long > UNANSWERED_MAX  # as `in_hand`, less a call
            or len(self.out) > UNREAD_MAX
            or self._large_bytes > IN_HAND_MAX
        )

    # Answering

    def answering(self, number: int, value: Any) -> bytes:
        """Return the frame that answers a request, which is to be sent."""
        if self.large:
            self.note_answered(number)
        if self.ending:
            self.ending.discard(number)
        return protocol.pack(number, True, value)

    def failing(self, number: int, error: BaseException) -> bytes:
        """Return the frame that answers a request with an error."""
        if not protocol.is_expected(error):
            log.error("a request of a client failed: %s", error, exc_info=error)
        if self.large:
            self.note_answered(number)
        self.ending.discard(number)
        return protocol.pack(number, False, protocol.pack_error(error))

    def answer(self, number: int, value: Any) -> None:
        """Answer a request, from any thread."""
        self.send(self.answering(number, value), 1)

    def fail(self, number: int, error: BaseException) -> None:
        """Answer a request with an error."""
        self.send(self.failing(number, error), 1)

    def run_long(self, number: int, call: Callable[[], Any], done: Callable[[], None] = lambda: None) -> None:
        """Answer with what a call returns that waits for something else than a store. Begun with `begin_long`."""
        _here.cancelled = self._cancelled.get(number)
        try:
            self.answer(number, call())
        except Exception as error:
            self.fail(number, error)
        finally:
            with self.lock:
                self._long -= 1
                self._cancelled.pop(number, None)
            done()

    def begin_long(self, number: int) -> None:
        """Note that a request may take long. Raises ValueError for one too many: each has a thread."""
        with self.lock:
            if self._long >= LONG_MAX:
                raise ValueError(
                    f"{LONG_MAX} calls of this process wait at the owner for values, or messages of many queues: no "
                    "more are taken until one ends"
                )
            self._long += 1
            self._cancelled[number] = threading.Event()

    def cancel_long(self, number: int) -> None:
        """End a request that may take long, if it asks."""
        cancelled = self._cancelled.get(number)
        if cancelled is not None:
            cancelled.set()

    @property
    def is_over(self) -> bool:
        """True if nobody waits for what this thread does, by `run_long`."""
        return self.is_closed or (_here.cancelled is not None and _here.cancelled.is_set())

    def make_page(self, make: Callable[[], None]) -> None:
        """Let a page be made, once there is room for it in what waits for the client. `page_made` is called then."""
        self._parked.append(make)
        self._make_pages()

    def page_made(self) -> None:
        """Note that a page is made, and on its way."""
        with self.lock:
            self._pages -= 1
        self._make_pages()

    def _make_pages(self) -> None:
        while True:
            with self.lock:
                room = UNREAD_MAX - len(self.out) - self._pages * PAGE_BYTES
                if room < PAGE_BYTES or not self._parked or self.is_closed:
                    return
                make = self._parked.popleft()
                self._pages += 1
            make()

    def send(self, frames: bytes, answered: int = 0) -> None:
        """Send frames, which answer so many requests."""
        with self.lock:
            self.unanswered -= answered
            if self.is_closed:
                return
            if not self.out:
                try:
                    frames = frames[self.sock.send(frames) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # its end is read soon
            self.out += frames
            is_as_before = not frames and not (self.is_unread and not self.is_busy)
        if not is_as_before:
            self._on_change(self)

    def flush(self) -> None:
        """Send what the socket takes now of what it did not take before."""
        with self.lock:
            try:
                while self.out:
                    sent = self.sock.send(memoryview(self.out)[:READ_BYTES])
                    del self.out[:sent]
                    self.taken += sent
            except BlockingIOError:
                pass
            except OSError:
                self.out.clear()
        if self._parked:
            self._make_pages()
        if self._withheld:
            self._give_withheld()

    def keep_vote(self, number: int, transaction: Transaction) -> None:
        """Keep a transaction that has voted, until its client says the outcome. Raises ClosedError if that has gone."""
        with self.lock:
            if self.is_closed:
                raise ClosedError("the connection of this client was lost")
            self.voted[number] = transaction

    # Listeners

    def begin_listener(self, number: int, listener: Listener) -> int | None:
        """Keep a listener that has begun; returns all credit that it was given by now. None if it is not wanted any
        more: it is not kept then. Any thread."""
        with self.lock:
            granted = None if self.is_closed else self.granted.get(number)
            if granted is not None:
                self.listeners[number] = listener
        return granted

    def end_listener(self, number: int) -> None:
        """Let go of a listener that has ended. Any thread."""
        with self.lock:
            self.listeners.pop(number, None)
            self.granted.pop(number, None)

    def withhold(self, number: int) -> None:
        """Take a listener its credit, until the client has read what waits for it. Any thread."""
        listener = self.listeners.get(number)
        taken = 0 if listener is None else listener.withdraw_credit(sys.maxsize)
        with self.lock:
            self._withheld[number] = self._withheld.get(number, 0) + taken
        self._give_withheld()  # it may just have read it

    def _give_withheld(self) -> None:
        with self.lock:
            if len(self.out) > UNREAD_MAX:
                return
            withheld, self._withheld = self._withheld, {}
        for number, credit in withheld.items():
            listener = self.listeners.get(number)
            if listener is not None:
                listener.add_credit(credit)

    def withdraw_credit(self, number: int, most: int) -> int | None:
        """Take credit back from a listener; None for one that is not known, or not yet."""
        listener = self.listeners.get(number)
        if listener is None:
            return None
        taken = listener.withdraw_credit(most)
        with self.lock:
            withheld = self._withheld.get(number, 0)
            left = max(withheld - (most - taken), 0)
            if withheld:
                self._withheld[number] = left
        return taken + withheld - left

    # Holding

    def hold(self, messages: Iterable[Message[Any]]) -> list[list[Any]] | None:
        """Note that the client has these messages from now on; returns them as they go to it. None if it has gone: they
        are given back then."""
        given = list(messages)
        with self.lock:
            if not self.is_closed:
                packed = []
                for message in given:
                    token = message.token
                    self.held[token] = message.subscription
                    packed.append(protocol.pack_message(message, token, self.add_body))
                note_settled(given)
                return packed
        for message in given:
            message._store.release([message], delivered=False)
        return None

    def add_body(self, body: StoredBody) -> list[Any]:
        """Keep a body for the client; returns its place: what its message's record says of it, its number here, and
        which file it is whose descriptor goes to the client before that. No file: the client asks for the descriptor
        when it needs it."""
        number, identity = next(self.numbers), NONE
        self.bodies[number] = body
        if len(self.passed) < PASSED_MAX and not self.out:
            with suppress(OSError, AnabranchError):
                descriptor = Descriptor(body.descriptor())
                if self.pass_descriptor(descriptor.fd):
                    self.passed.add(number)
                    identity = identity_of(os.fstat(descriptor.fd))
        return [body.reference, number, *identity]

    def pass_descriptor(self, fd: int) -> bool:
        """Send a descriptor ahead of the frame that speaks of it; returns False if the socket does not take it now."""
        frame = protocol.pack(0, protocol.PASSES, None)
        with self.lock:
            if self.out or self.is_closed:
                return False
            try:
                self.out += frame[send(self.sock, frame, fd) :]
            except OSError:
                return False
            is_left = bool(self.out)
        if is_left:
            self._on_change(self)
        return True

    def end_bodies(self, numbers: list[int]) -> None:
        """Let go of bodies that the client does not need any more."""
        for number in numbers:
            self.bodies.pop(number, None)
            given = self.given.pop(number, None)
            if given is not None:
                given.close()
            self.passed.discard(number)

    def page(self, messages: Iterable[Message[Any]]) -> list[list[Any]]:
        """Return the first of these messages as they go to the client, which does not hold them: until a page is full.
        No more of them are read than go."""
        packed, size = [], 0
        for message in messages:
            packed.append(protocol.pack_message(message, message._store.store_id, self.add_body))
            size += 0 if message.is_large else message.size
            if size >= PAGE_BYTES:
                break
        return packed

    def outgoing_of(self, fields: protocol.OutgoingFields, number: int | None = None, at: int = 0) -> Outgoing:
        """Return the message to be sent that these are the fields of, the one with number `at` in a request. Without an
        id it is given one that is its own, also if the request comes again; not so without a number, where the request
        is remembered whole. Raises ClosedError for a body that was kept by an owner before."""
        body, headers, name, priority, expires_at_ms, persistent, requeued, deliver_at_ms = fields
        if name is None and number is not None:
            name = MadeId(f"{self._made}{number:x}.{at:x}" if at else f"{self._made}{number:x}")
        kept: Any = body if type(body) is bytes else self._body(body[1])
        made = (kept, headers, name, priority, expires_at_ms, persistent, requeued, deliver_at_ms, None)
        return tuple.__new__(Outgoing, made)  # as its own, less a call

    def _body(self, number: int) -> Any:
        found = self.given[number].reader() if number in self.given else self.bodies.get(number)
        if found is None:
            raise ClosedError(
                "a large body is gone with the process that kept it, which owned the directory before; send it anew"
            )
        return found

    def now(self, token: str) -> str | None:
        """Return the token by which the owner knows what the client knows by this one; None if it is gone."""
        return self.aliases.get(token, token) if self.aliases else token

    def begin_ending(self, number: int) -> bool:
        """Note that a request is just ending leases, until it is answered. False: its client has gone, or comes again
        over another connection, and asks for it there."""
        self.ending.add(number)
        if not self.is_closed:  # looked at behind the line above: who greets it again looks the other way round
            return True
        self.ending.discard(number)
        return False

    def let_go(self, tokens: Iterable[str]) -> None:
        """Note that the client holds these no more."""
        with self.lock:
            for token in tokens:
                if self.aliases:
                    token = self.aliases.pop(token, token) or token
                self.held.pop(token, None)
                if self.is_closed:
                    self.ended_late.add(token)

    def shown(self) -> dict[str, Any]:
        """Return who it is, and what it holds and waits for, as plain values."""
        return {
            "pid": self.pid, "client": self.client, "held": len(self.held), "listeners": len(self.listeners),
            "waiting": len(self.waiting), "unanswered": self.unanswered,
        }  # fmt: skip

    def close(self) -> tuple[dict[str, SubscriptionKey | None], list[Future[None]]]:
        """Close the connection; returns what the client held, and what tells that its votes are rolled back, each of
        which may wait for a store. Idempotent."""
        with self.lock:
            self.is_closed = True
            held, self.held = self.held, {}
        for listener in list(self.listeners.values()):
            if isinstance(listener, LookingListener):
                shared().call(listener.close)  # it may be looking, which takes a while
            else:
                listener.close()
        if self.events is not None:
            self.events.close()
        for waiting in list(self.waiting.values()):
            waiting.cancel()
        self.listeners.clear()
        self.waiting.clear()
        self.bodies.clear()
        self._parked.clear()
        self.end_bodies(list(self.given))
        self.arrived.let_go(0)
        rolled_back = []
        with suppress(KeyError):  # its outcome may just be said
            while self.voted:
                rolled_back.append(shared().call(self.voted.popitem()[1].rollback))
        self.sock.close()
        return held, rolled_back
