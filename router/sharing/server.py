"""The owner's side of a shared directory: one thread that serves all clients.

A round takes what all sockets hold: the sends and acks of each store are queued together, waited for with one sync, and
answered; the next round gathers meanwhile. So processes share group commits as threads do. What may wait for something
else than the disk (a store that is to be opened, room, another transaction, a message) runs on a thread of the library
and holds up no other client.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import operator
import os
import re
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...adapters.core import Store
from ...adapters.core.messages import LargeBody, Message
from ...adapters.core.store_types import Listener, Pending, Settlement, SubscriptionKey
from ...adapters.system.background import CoalescedJob, shared
from ...adapters.system.conditions import Thread
from ...adapters.system.files import disk_errors
from ...policies.errors import AnabranchError, ClosedError, UnknownMessageError
from ...policies.names.destination import Destination
from ..api.consumer import require_count, require_timeout
from ..api.endpoint import Endpoint, kept
from . import calls
from .clients import is_living, living
from .owner import hold_start
from .protocol import VERSION, Op, ProtocolError, is_expected, pack, pack_error
from .session import UNREAD_MAX, Session, consumer_key, destination_of
from .socket_file import Identity, bound, is_left, remove, user_of

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry
    from ..router import Router

log = logging.getLogger(__name__)

SLOW_SECONDS: Final = 0.5
"""A round that takes longer is left to its thread."""
_PROCESS: Final = os.urandom(4).hex()
GRACE_SECONDS: Final = 2.0
"""For so long a new owner waits for the clients of the one before to tell what they hold; and for a client that lives
and has lost its connection, until what it held is given back."""
UNREAD_SECONDS: Final = 30.0
"""A client that reads nothing for so long, while too much waits for it, is dropped."""
RETRY_SECONDS: Final = 1.0
"""For so long no client is let in after one could not be: there is no descriptor left, say."""
BACKLOG: Final = 1024
"""Connections that may wait to be accepted."""
DEATH_SECONDS: Final = 0.02
"""A process that was killed has its socket closed before its file, or the other way round, this much apart at most."""
FINISH_SECONDS: Final = 5.0
"""For so long an owner that ends waits for what it has in hand."""
LOOK_SECONDS: Final = 1.0
"""How often it looks whether its socket's file is still there."""
WAIT_MAX: Final = 3600.0
"""A selector waits for no more than some weeks; who waits for longer is looked after now and then."""
WAITING_MAX: Final = 16_384
"""Receives of a client that may wait at once."""
CLIENT: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")
"""The id of a client, which is also its file's name."""
LINGER_SECONDS: Final = 10.0
"""For so long an owner that was started by a client stays after the last one has gone."""


class Server:
    """Serves the clients of one router. All is done on its thread, if not said otherwise."""

    def __init__(
        self,
        router: Router,
        registry: StoreRegistry,
        linger: float | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        """`linger`: the server ends so many seconds after its last client has gone; None: never by itself. Where it is
        given the socket that listens, that stays the caller's."""
        self.router, self.registry = router, registry
        self.directory: Path = router.config.directory
        self._process = f"{_PROCESS}-{os.getpid():x}."
        self.generation = self._process + os.urandom(8).hex()
        """Tells this owner from those before and after it, and its process from others."""
        self._linger = linger
        self._selector: selectors.BaseSelector
        self._listening = listening
        self._socket: Identity | None = None
        """The socket's file, where it is this server's own."""
        self._woken: deque[Callable[[], object]] = deque()
        """What other threads have left to be done here."""
        self._wake_in: socket.socket
        self._wake_out: socket.socket | None = None
        self._sessions: dict[socket.socket, Session] = {}
        self._left: dict[str, tuple[dict[str, SubscriptionKey | None], float]] = {}
        """What clients held that live and have lost their connections, and until when it is kept for them."""
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        """A heap of what is to be done at a time (monotonic)."""
        self._numbers = itertools.count()
        self._expected: set[str] = set()
        """Clients of the owner before that have yet to tell what they hold."""
        self._parked: list[tuple[Session, list[Any]]] | None = None
        """Requests that wait until all of them have."""
        self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._turn = 0
        """Rises when another thread goes on with serving, since this one is held up."""
        self._leader = 0
        """The serving thread's id."""
        self._putting = threading.Lock()
        """Guards the answers, and whose they are."""
        self._answers: dict[Session, list[bytes]] = {}
        """The answers of a round, which go together at its end."""
        self._busy_since: float | None = None
        """When the round began that is under way (monotonic)."""
        self._begun: deque[_Begun] = deque()
        """The writes of that round that are not waited for yet."""
        self._waited_for: Store | None = None
        """The store that is waited for just now."""
        self._slow: set[Store] = set()
        """Stores that have held up a round, and are not waited for here until they answer."""
        self._look = CoalescedJob(self._look_after)
        self.holds_start = False
        """This process ends with the server: nobody starts another owner before it has let go of the directory."""
        self.ended = threading.Event()
        """Set once the server serves no more."""
        self._idle_since: float | None = time.monotonic()

    # Starting and ending

    def start(self) -> None:
        """Begin to serve, on a thread. Raises as `disk_errors` where no socket can be."""
        self._begin()
        self._serve()

    def run(self) -> None:
        """Serve until the end, on this thread, unless another has to go on. Raises as `start`."""
        self._begin()
        self._run(self._turn)
        self.ended.wait()

    def _serve(self) -> None:
        """Let a thread serve from now on, until its turn is over."""
        self._thread = Thread(partial(self._run, self._turn), "share")
        self._thread.start()

    def _begin(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        _servers.add(self)
        self._expected = set(living(self.directory))
        if self._expected:
            self._parked = []
            self._at(GRACE_SECONDS, self._end_grace)
        if self._listening is None:
            with disk_errors(f"no client can come to {self.directory}"):
                self._listening, self._socket = bound(self.directory, BACKLOG)
        for sock in (self._listening, self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._listen_on()
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain)
        self._at(LOOK_SECONDS, self._look_at_socket)

    def _look_at_socket(self) -> None:
        """Make the socket's file anew if somebody has deleted it: nobody would find the owner, or could be another."""
        self._at(LOOK_SECONDS, self._look_at_socket)
        lost = self.router._directory_lock.lost()
        if lost is not None:  # clients start another owner
            self._failure, self._closing = lost, True
            return
        if self._listening is None or self._socket is None or is_left(self.directory):
            return
        log.warning("the socket in %s was deleted; it is made anew", self.directory)
        try:
            listening, self._socket = bound(self.directory, BACKLOG)
        except OSError as error:
            log.error("no client of %s can come: %s", self.directory, error)
            return
        with suppress(KeyError):  # it waits for room
            self._selector.unregister(self._listening)
        self._listening.close()
        self._listening = listening
        listening.setblocking(False)
        self._listen_on()

    def stop(self) -> None:
        """Finish what is in hand, and serve no more. Any other thread. Idempotent. Clients give their leases back."""
        self._closing = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, turn: int) -> None:
        self._leader = threading.get_ident()
        try:
            while not self._closing and self._turn == turn:
                self._step()
        except BaseException as error:
            self._failure, self._closing = error, True
            log.exception("the clients of %s are not served any more", self.directory)
        finally:
            if self._turn == turn:
                self._end()

    def _end(self) -> None:
        if self.holds_start:
            hold_start(self.directory)
        if self._listening is not None and self._socket is not None:
            remove(self.directory, self._socket)
            self._listening.close()
        deadline = time.monotonic() + FINISH_SECONDS
        while any(one.in_hand > 0 for one in list(self._sessions.values())) and time.monotonic() < deadline:
            time.sleep(0.001)
        for session in list(self._sessions.values()):
            if self._failure is None and not session.in_hand:
                session.send(pack(0, None, None))
        for session in list(self._sessions.values()):
            with suppress(OSError):
                session.sock.setblocking(True)
                session.sock.settimeout(1.0)
                session.flush()
            self._left[session.client] = (self._drop(session), 0.0)
        given_back = [future for held, _ in self._left.values() for future in self._give_back(held)]
        self._left.clear()
        wait(given_back, GRACE_SECONDS)  # the router may stay open, and serve again
        self._selector.close()
        self._wake_in.close()
        wake, self._wake_out = self._wake_out, None
        if wake is not None:
            wake.close()
        self.ended.set()

    def leave(self) -> None:
        """Let go of all that is the parent's, in a forked child: a client would wait for what nobody answers."""
        if self._listening is not None:
            self._listening.close()
        for sock in [self._wake_in, self._wake_out, *self._sessions]:
            if sock is not None:
                sock.close()
        self._selector.close()

    def sessions(self) -> list[dict[str, Any]]:
        """Return who is connected, and what each holds: plain values. Any thread."""
        return [session.shown() for session in list(self._sessions.values()) if session.client]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it serves no more; return whether that is so. Any thread."""
        return self.ended.wait(timeout)

    @property
    def failure(self) -> BaseException | None:
        """Return why the server has ended by itself, if it was a defect."""
        return self._failure

    # The loop

    def _step(self) -> None:
        requests: list[tuple[Session, list[Any]]] = []
        for key, events in self._selector.select(self._until_timer()):
            handle = key.data
            if type(handle) is Session:
                if events & selectors.EVENT_WRITE:
                    self._flush(handle)
                if events & selectors.EVENT_READ:
                    self._read(handle, requests)
            else:
                handle()
        while self._woken:
            self._woken.popleft()()
        self._ring()
        if requests:
            self._round(requests)

    def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("a client of %s could not be let in: %s", self.directory, error)
                self._selector.unregister(self._listening)
                self._at(RETRY_SECONDS, self._listen_on)
                return
            user = user_of(sock)
            if user not in (os.getuid(), 0):
                log.warning("a process of user %d was refused at %s", user, self.directory)
                sock.close()
                continue
            sock.setblocking(False)
            session = self._sessions[sock] = Session(sock, self._later_watch)
            session.watched = selectors.EVENT_READ
            self._selector.register(sock, session.watched, session)
            self._idle_since = None

    def _listen_on(self) -> None:
        """Let clients in again: there may be room for one by now."""
        if self._listening is not None:
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def _read(self, session: Session, requests: list[tuple[Session, list[Any]]]) -> None:
        try:
            requests += [(session, request) for request in session.read()]
        except BlockingIOError:
            return
        except (OSError, EOFError):
            self._gone(session)
        except ProtocolError as error:
            log.warning("a client of %s, process %d, is dropped: %s", self.directory, session.pid, error)
            session.fail(0, error)
            self._gone(session)
        else:
            if session.is_busy:
                self._watch(session)

    def _flush(self, session: Session) -> None:
        session.flush()
        self._watch(session)

    def _watch(self, session: Session) -> None:
        """Look again at what is waited for at a session's socket."""
        if session.is_closed:
            return
        session.is_unread = True  # first: who answers looks at it then
        session.is_unread = session.is_busy
        events = (selectors.EVENT_WRITE if session.out else 0) | (0 if session.is_unread else selectors.EVENT_READ)
        if events != session.watched:
            if not events:
                self._selector.unregister(session.sock)
            elif not session.watched:
                self._selector.register(session.sock, events, session)
            else:
                self._selector.modify(session.sock, events, session)
            session.watched = events

    def _later_watch(self, session: Session) -> None:
        """Watch a socket that takes no more for now. Any thread."""
        self._later(partial(self._watch, session))
        if len(session.out) > UNREAD_MAX:
            self._later(partial(self._at, UNREAD_SECONDS, partial(self._drop_slow, session)))

    def _drop_slow(self, session: Session) -> None:
        if len(session.out) > UNREAD_MAX and not session.is_closed:
            log.warning(
                "a client of %s, process %d, is dropped: it has not read %d bytes in %.0f s",
                self.directory, session.pid, len(session.out), UNREAD_SECONDS,
            )  # fmt: skip
            self._gone(session)

    # Other threads, and times

    def _later(self, call: Callable[[], object]) -> None:
        """Leave something to be done by the serving thread. Any thread."""
        self._woken.append(call)
        self._wake()

    def _wake(self) -> None:
        if self._wake_out is not None:  # else it looks before it begins to wait
            with suppress(OSError):  # a full buffer wakes it as well
                self._wake_out.send(b"\0")

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _at(self, seconds: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), call))

    def _until_timer(self) -> float | None:
        now = time.monotonic()
        due = [self._timers[0][0] - now] if self._timers else []
        if self._linger is not None and self._idle_since is not None:
            due.append(self._idle_since + self._linger - now)
        return min(max(min(due), 0), WAIT_MAX) if due else None

    def _ring(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        if self._linger is not None and self._idle_since is not None and now - self._idle_since >= self._linger:
            self._closing = True

    # A round

    def _round(self, requests: list[tuple[Session, list[Any]]]) -> None:
        """Do what was asked for: writes first, all together; then what looks."""
        turn, rest = self._turn, list[tuple[Session, list[Any]]]()
        answers = self._answers = {}
        begun = self._begun = deque()
        self._busy_since = time.monotonic()
        if self._look.last.begun:
            self._look.schedule(SLOW_SECONDS)
        for one in requests:
            session, request = one
            if session.is_closed:
                continue
            if self._parked is not None and request[1] != Op.HELLO:
                self._parked.append(one)
                continue
            op = request[1]
            try:
                if op == Op.SEND:
                    self._begin_send(session, request, begun)
                elif op == Op.ACK:
                    self._begin_ack(session, request, begun)
                else:
                    rest.append(one)
            except Exception as error:
                self._refuse(session, request, error)
        self._finish(begun)
        for at, (session, request) in enumerate(rest):
            if self._turn != turn:  # others were not to wait for this
                self._later(partial(self._round, rest[at:]))
                return
            try:
                self._OPS[request[1]](self, session, *request)
            except Exception as error:
                self._refuse(session, request, error)
        if self._turn == turn:
            self._busy_since = None
        _send(answers)
        for session, _ in requests:
            if session.is_unread:  # what it asked for waits for others now, perhaps
                self._watch(session)

    def _finish(self, begun: deque[_Begun]) -> None:
        """Wait for writes, and answer each. Any thread may take some out meanwhile."""
        while True:
            try:
                end, session, request, more, pending, store = begun.popleft()
            except IndexError:
                return
            self._waited_for = store
            try:
                end(session, request, more, pending.wait())
            except ClosedError:
                self._again(session, request)
            except Exception as error:
                self._refuse(session, request, error)
            finally:
                self._slow.discard(store)

    def _look_after(self) -> None:
        """Let another thread serve if a round takes long: its own goes on waiting for its stores. On a thread of the
        library."""
        since = self._busy_since
        if since is None or self._closing:
            return
        left = since + SLOW_SECONDS - time.monotonic()
        if left > 0:
            self._look.schedule(left)
            return
        slow, begun, answers = self._waited_for, self._begun, self._answers
        log.warning(
            "%s has not answered for %.1f s; its clients alone wait for it",
            f"store {slow.name!r}" if slow is not None else "a store", SLOW_SECONDS,
        )  # fmt: skip
        if slow is not None:
            self._slow.add(slow)
        with self._putting:
            self._leader, self._answers, self._busy_since = 0, {}, None
            self._turn += 1
        left_over: dict[Store, deque[_Begun]] = {}
        with suppress(IndexError):
            while True:
                one = begun.popleft()
                left_over.setdefault(one[-1], deque()).append(one)
        for some in left_over.values():
            shared().lead(partial(self._finish, some))
        self._serve()
        _send(answers)

    def _answer(self, session: Session, number: int, value: Any) -> None:
        """Answer a request, at the end of the round; at once if that is not this thread's any more."""
        self._put(session, pack(number, True, value))

    def _refuse(self, session: Session, request: list[Any], error: Exception) -> None:
        if isinstance(error, KeyError | IndexError) and not is_expected(error):
            error = ProtocolError(f"a request that is none: {request[1:2]}")
        elif not is_expected(error):
            log.exception("a request of a client failed: %s", error)
        self._put(session, pack(request[0], False, pack_error(error)))

    def _put(self, session: Session, frame: bytes) -> None:
        with self._putting:
            if threading.get_ident() == self._leader:
                self._answers.setdefault(session, []).append(frame)
                return
        session.send(frame, 1)

    # Sends

    def _begin_send(self, session: Session, request: list[Any], begun: deque[_Begun]) -> None:
        _, _, text, fields, sync = request
        destination = destination_of(text)
        store = self.registry.by_destination.get(destination)
        if type(fields[0]) is list:
            self._send_large(session, request)
            return
        if store is None or store.limited or not store.is_prompt or store in self._slow or not fields[5]:
            self._send_nowait(session, request)
            return
        message = session.outgoing_of(fields)
        try:
            pending = store.begin_send(destination, message, sync)
        except ClosedError:
            self._send_nowait(session, request)
            return
        begun.append((self._sent, session, request, self.registry.gates.removals, pending, store))

    def _sent(self, session: Session, request: list[Any], removals: int, receipt: Any) -> None:
        if self.registry.gates.removals != removals:
            self.registry.record_again(receipt.destination)
        self._answer(session, request[0], (receipt.seq, receipt.duplicate))

    def _again(self, session: Session, request: list[Any]) -> None:
        """Ask once more, without waiting here: the store was closed just now, or its destination moves."""
        if request[1] == Op.SEND:
            self._send_nowait(session, request)
        else:
            self._ack_nowait(session, request)

    def _send_nowait(self, session: Session, request: list[Any]) -> None:
        number, _, text, fields, sync = request
        destination = destination_of(text)
        message = session.outgoing_of(fields)
        registry = self.registry
        registry.require_open()
        registry.route(destination)

        def call(store: Store) -> Future[Any]:
            return store.send_nowait(
                destination, message.body, message.headers, message.message_id, sync, message.priority,
                message.expires_at_ms, message.persistent, message.deliver_at_ms,
            )  # fmt: skip

        removals = registry.gates.removals
        store = registry.by_destination.get(destination)
        again = partial(registry.deferred.send, destination, call, store)
        sent: Future[Any] | None = None
        if store is not None:
            with suppress(ClosedError):
                sent = call(store)
        future = again() if sent is None else registry.deferred.known(destination, sent, removals, again)
        future.add_done_callback(partial(self._answer_future, session, number, _receipt))

    def _send_large(self, session: Session, request: list[Any]) -> None:
        number, _, text, fields, sync = request
        destination, message = destination_of(text), session.outgoing_of(fields)

        def send() -> tuple[int, bool]:
            body: Any = message.body
            if not isinstance(body, LargeBody):
                body = kept(self.registry, destination, body, None, message.persistent)
            _, headers, name, priority, expires_at_ms, lasts, _, deliver_at_ms = message
            options = (body, headers, name, sync, priority, expires_at_ms, lasts, deliver_at_ms)
            return _receipt(self.registry.for_store(destination, methodcaller("send", destination, *options)))

        self._work(session, number, send)

    def _send_many(self, session: Session, number: int, _: int, text: str, messages: list[Any], sync: Any) -> None:
        queue: Endpoint[Any] = Endpoint(self.registry, destination_of(text))
        outgoing = [session.outgoing_of(fields) for fields in messages]
        self._work(session, number, lambda: [_receipt(one) for one in queue.send_many(outgoing, sync)])

    # Acks, and other ends of leases

    def _begin_ack(self, session: Session, request: list[Any], begun: deque[_Begun]) -> None:
        tokens = self._tokens(session, request[2])
        if len(tokens) > 1:
            self._require(tokens)
        first = tokens[0] if tokens else ""
        stores = {token[:32] for token in tokens}
        store = self.registry.open_store(bytes.fromhex(first[:32])) if len(stores) == 1 and first else None
        if store is None or not store.is_prompt or store in self._slow or self.registry.gates.moves:
            self._ack_nowait(session, request)
            return
        try:
            pending = store.begin_ack(tokens)
        except ClosedError:
            self._ack_nowait(session, request)
            return
        begun.append((self._acked, session, request, None, pending, store))

    def _require(self, tokens: list[str]) -> None:
        """Raise UnknownMessageError unless all of these can be settled: they are, or none of them."""
        for token in tokens:
            calls.store_of_lease(self.registry, token).require_leased([token])

    def _tokens(self, session: Session, given: list[str]) -> list[str]:
        """Return the tokens as they are now. Those that are gone are none that any store knows. Raises TypeError."""
        if type(given) is not list or not all(type(token) is str for token in given):
            raise TypeError("tokens are texts")
        return [session.now(token) or "" for token in given] if session.aliases else given

    def _acked(self, session: Session, request: list[Any], _: Any, results: list[AnabranchError | None]) -> None:
        number, _, given = request[:3]
        self._answer(session, number, self._ends(session, given, results))

    def _ends(self, session: Session, given: list[str], results: list[Any]) -> list[Any] | None:
        """Return what was wrong with each, None where nothing was with any. What an owner before had in hand, and is
        gone, was settled there."""
        if session.aliases:
            results = [
                None if isinstance(wrong, UnknownMessageError) and session.now(token) is None else wrong
                for token, wrong in zip(given, results, strict=True)
            ]
        if not any(results):
            session.let_go(given)
            return None
        gone = [t for t, wrong in zip(given, results, strict=True) if isinstance(wrong, UnknownMessageError | None)]
        session.let_go(gone)
        return [None if wrong is None else pack_error(wrong) for wrong in results]

    def _ack_nowait(self, session: Session, request: list[Any]) -> None:
        self._settle(session, request[0], Op.SETTLE, request[2], Settlement.ACK.value, None, True, None)

    def _settle(
        self, session: Session, number: int, _: int, given: list[str], how: str, reason: list[Any] | None,
        delivered: bool, delay: float | None, whole: bool = False,
    ) -> None:  # fmt: skip
        tokens = self._tokens(session, given)
        if whole and len(tokens) > 1:
            self._require(tokens)
        way = Settlement(how)
        said = None if reason is None else calls.reason_of(*reason)
        future = self.router.settle_nowait(tokens, way, said, delivered=delivered, delay=delay)
        future.add_done_callback(partial(self._answer_future, session, number, partial(self._ends, session, given)))

    def _extend(self, session: Session, number: int, _: int, given: str, seconds: float | None) -> None:
        token = session.now(given) or ""
        store = calls.store_of_lease(self.registry, token)
        self._work(session, number, lambda: store.extend(store.leased(token), seconds))

    # Receiving

    def _receive(
        self, session: Session, number: int, _: int, text: str, key: Any, most: int, timeout: float | None,
        lease: float | None,
    ) -> None:  # fmt: skip
        destination, subscription = destination_of(text), consumer_key(key)
        require_count(most)
        require_timeout(timeout)
        if len(session.waiting) >= WAITING_MAX:
            raise ValueError(f"{WAITING_MAX} receives of this process wait already; no more may wait at once")
        store = self.registry.by_destination.get(destination)
        if store is not None and store.is_prompt and store not in self._slow:
            with suppress(ClosedError):
                self._waited_for = store
                messages = store.receive_many(destination, most, 0, subscription, lease)
                if messages or timeout == 0:
                    self._answer(session, number, session.hold(messages))
                    return
        if timeout == 0:
            given = (self.registry, session, destination, subscription, most, lease)
            self._work(session, number, partial(calls.receive, *given))
            return
        waiting = _Waiting(self, session, number, destination, subscription, most, lease)
        session.waiting[number] = waiting
        if timeout is not None:
            self._at(timeout, waiting.cancel)
        shared().lead(waiting.start)

    def _listen(
        self, session: Session, number: int, _: int, listener: int, text: str, key: Any, credit: int,
        lease: float | None, granted: int,
    ) -> None:  # fmt: skip
        """Begin to listen. `granted`: the credit that its client has given it since its beginning, of which `credit` is
        left."""
        destination, subscription = destination_of(text), consumer_key(key)
        session.granted[listener] = operator.index(granted)

        def on_message(message: Message[Any]) -> None:
            packed = session.hold([message])
            if packed is not None:
                session.send(pack(0, listener, packed))

        def on_end(error: Exception) -> None:
            session.listeners.pop(listener, None)
            session.send(pack(0, listener, None, pack_error(error)))

        def listen() -> None:
            begun = self.registry.for_store(
                destination,
                lambda store: store.listen(destination, on_message, credit, subscription, on_end, lease),
            )
            with session.lock:
                session.listeners[listener] = begun
                gone, more = session.is_closed, session.granted[listener] - granted
            if gone:
                begun.close()
            elif more:
                begun.add_credit(more)

        self._work(session, number, listen)

    def _credit(self, session: Session, number: int, _: int, listener: int, granted: int) -> None:
        """Grant a listener credit, which it may have got already as it began anew."""
        with session.lock:
            more = granted - session.granted.get(listener, granted)
            session.granted[listener] = max(granted, session.granted.get(listener, 0))
            begun = session.listeners.get(listener)  # else it is just beginning
        if begun is not None and more > 0:
            begun.add_credit(more)
        self._answer(session, number, None)

    def _unlisten(self, session: Session, number: int, _: int, listener: int) -> None:
        begun = session.listeners.get(listener)
        if begun is not None and begun.close():  # it is just given a message, which goes before the answer
            self._at(0.0005, partial(self._unlisten, session, number, _, listener))
            return
        session.listeners.pop(listener, None)
        session.answer(number, None)

    def _cancel(self, session: Session, number: int, _: int, other: int) -> None:
        """End a receive that waits, whose caller was interrupted."""
        waiting = session.waiting.get(other)
        if waiting is not None:
            waiting.cancel()
        self._answer(session, number, None)

    def _receive_pattern(
        self, session: Session, number: int, _: int, pattern: str, timeout: float | None, lease: float | None
    ) -> None:
        """Receive from many queues: on a thread of its own, for it may take long."""
        require_timeout(timeout)

        def run() -> None:
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                while True:
                    left = 1.0 if deadline is None else min(1.0, max(deadline - time.monotonic(), 0))
                    message = self.router.receive(pattern, left, lease=lease)
                    if message is not None or session.is_closed or left < 1.0:
                        break
                session.answer(number, session.hold([] if message is None else [message]))
            except Exception as error:
                session.fail(number, error)
            finally:
                session.end_long()

        session.begin_long()
        if timeout == 0:
            shared().lead(run)
        else:
            Thread(run, "pattern").start()

    def _browse(
        self, session: Session, number: int, _: int, text: str, key: Any, limit: int, after: list[int] | int
    ) -> None:
        self._work(
            session,
            number,
            partial(calls.browse, self.registry, session, destination_of(text), consumer_key(key), limit, after),
        )

    # The rest

    def _call(self, session: Session, number: int, _: int, name: str, *given: Any) -> None:
        if name in calls.OF_SESSION:
            run = partial(calls.OF_SESSION[name], self.registry, session, *given)
        elif name == "events":
            run = partial(calls.events, self.router, session)
        else:
            run = partial(calls.CALLS[name], self.router, self.registry, *given)
        if name in calls.LONG:
            session.begin_long()
            Thread(partial(self._run_long, session, number, run), "share-call").start()
        else:
            self._work(session, number, run)

    def _run_long(self, session: Session, number: int, run: Callable[[], Any]) -> None:
        try:
            session.answer(number, run())
        except Exception as error:
            session.fail(number, error)
        finally:
            session.end_long()

    def _commit(self, session: Session, number: int, _: int, *given: Any) -> None:
        self._work(session, number, partial(calls.commit, self.router, self.registry, session, *given))

    def _work(self, session: Session, number: int, call: Callable[[], Any]) -> None:
        """Run a call on a thread of the library, and answer with what it returns."""
        shared().call(call).add_done_callback(partial(self._answer_future, session, number, None))

    @staticmethod
    def _answer_future(
        session: Session, number: int, convert: Callable[[Any], Any] | None, future: Future[Any]
    ) -> None:
        try:
            session.answer(number, future.result() if convert is None else convert(future.result()))
        except Exception as error:
            if not is_expected(error):
                log.error("a request of a client failed", exc_info=error)
            session.fail(number, error)

    # Clients that come and go

    def _hello(self, session: Session, number: int, _: int, version: int, *rest: Any) -> None:
        """Greet a client. Its first request has the version in the same place whatever the version."""
        if version != VERSION:
            raise ClosedError(
                f"{self.directory} is served by process {os.getpid()}, which speaks version {VERSION} of the protocol, "
                f"and this process version {version}: run the same version of Anabranch in both, or stop the server"
            )
        client, pid, generation, held = rest
        if session.client or not CLIENT.fullmatch(client):
            raise ProtocolError("a client greets once, by its id")
        for other in list(self._sessions.values()):
            if other.client == client:
                self._gone(other)  # its connection was lost, and the end of it is not read yet
        session.client, session.pid = client, int(pid)
        left: dict[str, SubscriptionKey | None] = {}
        if generation == self.generation:
            left, _until = self._left.pop(client, ({}, 0.0))
            known = {token for token, *_ in held}
            with session.lock:
                session.held = {token: left.pop(token) for token in known if token in left}
            held = [one for one in held if one[0] not in session.held]
        was_here = generation != self.generation and generation.startswith(self._process)

        def take_up() -> None:
            for future in self._give_back(left):  # first: what it asks for again finds them at their places
                future.exception()
            self._lease_again(session, held, was_here)

        shared().call(take_up).add_done_callback(
            lambda done: self._later(partial(self._greeted, session, number, done))
        )

    def _lease_again(self, session: Session, held: list[Any], was_here: bool) -> None:
        """Lease again what a client held. What is gone was settled, and its client does not know it: but not where the
        server before `was_here`, in this process, since others may have received it meanwhile."""
        for given, text, key, seq, lease in held:
            destination, subscription = destination_of(text), consumer_key(key)
            again: str | None = None
            try:
                again = self.registry.for_held(
                    destination,
                    partial(
                        Store.lease_again, destination=destination, seq=seq, subscription=subscription, lease=lease
                    ),
                    None,
                )
            except AnabranchError as error:
                log.warning("message %d of %s cannot be leased again: %s", seq, destination, error)
                continue  # its holder hears that it is not leased any more
            with session.lock:
                if again is not None or not was_here:
                    session.aliases[given] = again
                if again is not None:
                    session.held[again] = subscription

    def _greeted(self, session: Session, number: int, done: Future[None]) -> None:
        if done.exception() is not None:
            log.error("a client's leases could not be taken up again", exc_info=done.exception())
        session.answer(number, [self.generation, os.getpid()])
        self._expected.discard(session.client)
        if not self._expected:
            self._end_grace()

    def _end_grace(self) -> None:
        """Do what was asked for meanwhile."""
        parked, self._parked = self._parked, None
        self._expected.clear()
        if parked:
            self._round(parked)

    def _gone(self, session: Session) -> None:
        """Close the connection of a client. What it held is given back; not yet if it lives, and may come again."""
        held = self._drop(session)
        self._expected.discard(session.client)
        if session.client and held and is_living(self.directory, session.client):
            self._left[session.client] = (held, time.monotonic() + GRACE_SECONDS)
            self._at(DEATH_SECONDS, partial(self._forget, session.client))
        else:
            self._give_back(held)

    def _drop(self, session: Session) -> dict[str, SubscriptionKey | None]:
        if self._sessions.pop(session.sock, None) is None:
            return {}
        with suppress(KeyError, ValueError):
            self._selector.unregister(session.sock)
        if not self._sessions:
            self._idle_since = time.monotonic()
        return session.close()

    def _forget(self, client: str) -> None:
        held, until = self._left.get(client, ({}, 0.0))
        if not held:
            return
        if until <= time.monotonic() or not is_living(self.directory, client):
            del self._left[client]
            self._give_back(held)
        else:
            self._at(DEATH_SECONDS, partial(self._forget, client))

    def _give_back(self, held: dict[str, SubscriptionKey | None]) -> list[Future[Any]]:
        """Give back what a client held that is gone, to its old places; returns what tells the end of it. It counts as
        a delivery where the store counts when it hands out."""
        given: list[Future[Any]] = []
        by_store: dict[str, list[str]] = {}
        for token in held:
            by_store.setdefault(token[:32], []).append(token)
        for store_id, tokens in by_store.items():
            store = self.registry.open_store(bytes.fromhex(store_id))
            if store is not None:
                counted = store.backend.settings.count_on_receive
                with suppress(AnabranchError):
                    given.append(self.router.settle_nowait(tokens, Settlement.RELEASE, delivered=counted, delay=0))
        return given

    _OPS: Final[dict[int, Callable[..., None]]] = {
        Op.HELLO: _hello, Op.SEND_MANY: _send_many, Op.RECEIVE: _receive, Op.RECEIVE_PATTERN: _receive_pattern,
        Op.LISTEN: _listen, Op.CREDIT: _credit, Op.UNLISTEN: _unlisten, Op.SETTLE: _settle, Op.EXTEND: _extend,
        Op.BROWSE: _browse, Op.COMMIT: _commit, Op.CALL: _call, Op.CANCEL: _cancel,
    }  # fmt: skip


_Begun = tuple[Callable[..., None], Session, list[Any], Any, Pending[Any], Store]
"""What ends a request that is begun, the request, something more for it, the write that is waited for, and where."""


def _send(answers: dict[Session, list[bytes]]) -> None:
    """Send the answers of a round."""
    while answers:
        session, frames = answers.popitem()
        session.send(b"".join(frames), len(frames))


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _leave_all() -> None:
    for server in list(_servers):
        server.leave()


os.register_at_fork(after_in_child=_leave_all)


def _receipt(receipt: Any) -> tuple[int, bool]:
    return receipt.seq, receipt.duplicate


class _Waiting:
    """A receive that waits: a listener for one message, with which come all others that are there then."""

    def __init__(
        self,
        server: Server,
        session: Session,
        number: int,
        destination: Destination,
        key: SubscriptionKey | None,
        most: int,
        lease: float | None,
    ) -> None:
        self._server, self._session, self._number = server, session, number
        self._destination, self._key, self._most, self._lease = destination, key, most, lease
        self._lock = threading.Lock()
        self._over = False
        self._listener: Any = None

    def start(self) -> None:
        """Stand in line. On a thread of the library: the store may have to be opened."""
        try:
            listener = self._server.registry.for_store(self._destination, self._begun)
        except Exception as error:
            self._failed(error)
            return
        if listener is None:
            return
        with self._lock:
            self._listener = listener
            over = self._over
        if over:
            listener.close()

    def _begun(self, store: Store) -> Listener | None:
        if not store.is_prompt:  # the serving thread has not looked, and a listener waits where this is refused
            messages = store.receive_many(self._destination, self._most, 0, self._key, self._lease)
            if messages:
                self._given(messages)
                return None
        return store.listen(self._destination, self._came, 1, self._key, self._failed, self._lease)

    def cancel(self) -> None:
        """Answer that nothing has come, unless something has."""
        self._end([])

    def _came(self, message: Message[Any]) -> None:
        messages = [message]
        if self._most > 1:
            with suppress(AnabranchError):
                messages += message._store.receive_many(  # type: ignore[attr-defined]
                    self._destination, self._most - 1, 0, self._key, self._lease
                )
        self._given(messages)

    def _given(self, messages: list[Message[Any]]) -> None:
        if not self._end(messages):
            for one in messages:
                one._store.release([one], delivered=False)

    def _end(self, messages: list[Message[Any]]) -> bool:
        """Answer, unless that is done; returns whether it was not."""
        with self._lock:
            over, self._over = self._over, True
            listener = self._listener
        if over:
            return False
        self._session.waiting.pop(self._number, None)
        if listener is not None:
            listener.close()
        self._session.answer(self._number, self._session.hold(messages))
        return True

    def _failed(self, error: Exception) -> None:
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._session.waiting.pop(self._number, None)
            self._session.fail(self._number, error)
