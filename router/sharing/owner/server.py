"""The owner's server of a shared directory: one thread that serves all clients, from its sockets to their ends."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any, Final

from ....adapters.system.conditions import Thread
from ....adapters.system.files import disk_errors
from ...router import Router
from ..clients import GRACE_SECONDS
from ..protocol import Hello, Ping, ProtocolError, pack
from ..socket_file import Identity, bound, is_left, remove, user_of
from ..starting import hold_start
from .loop import Loop
from .presence import Presence
from .rounds import Asked, Rounds
from .session import UNREAD_MAX, Session

log: logging.Logger = logging.getLogger(__name__)

UNREAD_SECONDS: Final = 30.0
"""A client that reads nothing for so long, while too much waits for it, is dropped."""
RETRY_SECONDS: Final = 1.0
"""For so long no client is let in after one could not be: there is no descriptor left, say."""
BACKLOG: Final = 1024
"""Connections that may wait to be accepted."""
FINISH_SECONDS: Final = 5.0
"""For so long an owner that ends waits for what it has in hand."""
LOOK_SECONDS: Final = 1.0
"""How often it looks whether its socket's file is still there, and shows that it lives to whom it does not read."""
SIGN: Final = pack(0, True, None)


class Server:
    """Serves the clients of one router. All is done on its thread, if not said otherwise."""

    def __init__(self, router: Router, linger: float | None = None, listening: socket.socket | None = None) -> None:
        """`linger`: the server ends so many seconds after its last client has gone; None: never by itself. Where it is
        given the socket that listens, that stays the caller's."""
        self.router = router
        self.directory: Path = router.config.directory
        self._linger = linger
        self._listening = listening
        self._socket: Identity | None = None
        """The socket's file, where it is this server's own."""
        self._loop = Loop()
        self._rounds = Rounds(router, self._loop, self._serve, self._round, self._watch)
        self._presence = Presence(router, self._loop, self._round)
        self._rounds.ops[Hello] = self._presence.hello
        self._sessions = self._presence.sessions
        self.grace_over: threading.Event = self._presence.grace_over
        """Set once the clients of an owner before have told what they hold, or have had the time."""
        self.failure: BaseException | None = None
        """Why the server has ended by itself, if it was a defect."""
        self._thread: threading.Thread | None = None
        self.holds_start = False
        """This process ends with the server: nobody starts another owner before it has let go of the directory."""
        self.ended: Final = threading.Event()
        """Set once the server serves no more."""

    # Starting and ending

    def start(self) -> None:
        """Begin to serve, on a thread. Raises as `disk_errors` where no socket can be."""
        self._begin()
        self._serve()

    def run(self) -> None:
        """Serve until the end, on this thread, unless another has to go on. Raises as `start`."""
        self._begin()
        self._run(self._rounds.turn)
        self.ended.wait()

    def _serve(self) -> None:
        """Let a thread serve from now on, until its turn is over."""
        self._thread = Thread(partial(self._run, self._rounds.turn), "share")
        self._thread.start()

    def _begin(self) -> None:
        self._loop.open()
        _servers.add(self)
        self._presence.begin()
        if self._listening is None:
            with disk_errors(f"no client can come to {self.directory}"):
                self._listening, self._socket = bound(self.directory, BACKLOG)
        self._listen_on()
        self._loop.at(LOOK_SECONDS, self._look_at_socket)

    def _look_at_socket(self) -> None:
        """Make the socket's file anew if somebody has deleted it: nobody would find the owner, or could be another."""
        self._loop.at(LOOK_SECONDS, self._look_at_socket)
        self._show_life()
        lost = self.router._directory_lock.lost()
        if lost is not None:  # clients start another owner
            self.failure, self._loop.closing = lost, True
            return
        if self._listening is None or self._socket is None or is_left(self.directory):
            return
        log.warning("the socket in %s was deleted; it is made anew", self.directory)
        try:
            listening, self._socket = bound(self.directory, BACKLOG)
        except OSError as error:
            log.error("no client of %s can come: %s", self.directory, error)
            return
        self._loop.watch(self._listening, 0, 0, None)
        self._listening.close()
        self._listening = listening
        self._listen_on()

    def _show_life(self) -> None:
        """Tell clients that wait for an answer, and are not read meanwhile: what they ask to see who lives stays with
        them."""
        for session in list(self._sessions.values()):
            if session.is_unread and not session.out:
                session.send(SIGN)

    def stop(self) -> None:
        """Finish what is in hand, and serve no more. Any other thread. Idempotent. Clients give their leases back."""
        self._loop.closing = True
        self._loop.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, turn: int) -> None:
        def goes_on() -> bool:
            return self._rounds.turn == turn

        self._loop.thread = threading.get_ident()
        self._rounds.answers.flush(self._loop.thread)
        try:
            while not self._loop.closing and self._rounds.turn == turn:
                self._step(goes_on)
        except BaseException as error:
            self.failure, self._loop.closing = error, True
            log.exception("the clients of %s are not served any more", self.directory)
        finally:
            if self._rounds.turn == turn:
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
        changing = {session for session, _ in list(self._rounds.changing)}  # what they do would be begun again
        for session in list(self._sessions.values()):
            if self.failure is None and not session.in_hand and session not in changing:
                session.send(pack(0, None, None))
        wait(self._presence.end(), GRACE_SECONDS)  # the router may stay open, and serve again
        self._loop.close()
        self.ended.set()

    def leave(self) -> None:
        """Let go of all that is the parent's, in a forked child: a client would wait for what nobody answers."""
        for sock in [self._listening, *self._sessions]:
            if sock is not None:
                sock.close()
        self._loop.close()

    def sessions(self) -> list[dict[str, Any]]:
        """Return who is connected, and what each holds: plain values. Any thread."""
        return [session.shown() for session in list(self._sessions.values()) if session.client]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it serves no more; return whether that is so. Any thread."""
        return self.ended.wait(timeout)

    # Serving

    def _step(self, goes_on: Callable[[], bool]) -> None:
        come = self._loop.wait(self._until_end())
        for handle, _ in come:
            if type(handle) is not Session:
                handle()
        if not self._loop.run_due(goes_on):
            return  # a round was among it that took long: another thread serves, and reads what has come
        requests: list[Asked] = []
        for handle, events in come:
            if type(handle) is Session and not handle.is_closed:
                if events & selectors.EVENT_WRITE:
                    handle.flush()
                    self._watch(handle)
                if events & selectors.EVENT_READ:
                    self._read(handle, requests)
        if not come and self._until_end() == 0:
            self._loop.closing = True
        if requests:
            self._round(requests)
        self._rounds.answers.flush()

    def _until_end(self) -> float | None:
        """Return in how many seconds the server ends, if nobody comes."""
        idle_since = self._presence.idle_since
        if self._linger is None or idle_since is None:
            return None
        return max(idle_since + self._linger - time.monotonic(), 0)

    def _round(self, requests: list[Asked]) -> None:
        turn = self._rounds.turn
        self._rounds.run(self._presence.admitted(requests))
        self._rounds.answers.flush()
        for session, _, _ in requests:
            if session.is_unread:  # what it asked for waits for others now, perhaps
                if self._rounds.turn == turn:
                    self._watch(session)
                else:  # another thread serves
                    self._loop.later(partial(self._watch, session))

    def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("a client of %s could not be let in: %s", self.directory, error)
                self._loop.watch(self._listening, 0, 0, None)
                self._loop.at(RETRY_SECONDS, self._listen_on)
                return
            user = user_of(sock)
            if user not in (os.getuid(), 0):
                log.warning("a process of user %d was refused at %s", user, self.directory)
                sock.close()
                continue
            sock.setblocking(False)
            session = self._sessions[sock] = Session(sock, self._later_watch, self.router)
            self._watch(session)
            self._presence.idle_since = None

    def _listen_on(self) -> None:
        """Let clients in again: there may be room for one by now."""
        if self._listening is not None:
            self._listening.setblocking(False)
            self._loop.watch(self._listening, selectors.EVENT_READ, 0, self._accept)

    def _read(self, session: Session, requests: list[Asked]) -> None:
        if session.is_held_up:
            self._watch(session)
            return
        try:
            for number, request in session.read():
                if type(request) is Ping:
                    session.answer(number, None)  # whatever store holds up the round
                else:
                    requests.append((session, number, request))
        except BlockingIOError:
            return
        except (OSError, EOFError):
            self._presence.gone(session)
        except ProtocolError as error:
            log.warning("a client of %s, process %d, is dropped: %s", self.directory, session.pid, error)
            session.fail(0, error)
            self._presence.gone(session)
        else:
            if session.is_busy:
                self._watch(session)

    def _watch(self, session: Session) -> None:
        """Look again at what is waited for at a session's socket."""
        if session.is_closed:
            return
        session.is_unread = True  # first: who answers looks at it then
        session.is_unread = session.is_busy
        events = (selectors.EVENT_WRITE if session.out else 0) | (0 if session.is_unread else selectors.EVENT_READ)
        if events != session.watched:
            self._loop.watch(session.sock, events, session.watched, session)
            session.watched = events

    def _later_watch(self, session: Session) -> None:
        """Watch a socket that takes no more for now. Any thread."""
        self._loop.later(partial(self._watch, session))
        if len(session.out) > UNREAD_MAX and not session.is_looked_at:
            session.is_looked_at = True
            self._loop.later(partial(self._look_later, session))

    def _look_later(self, session: Session) -> None:
        """Look in a while whether a client has read any of what waits for it."""
        session.is_looked_at = True
        self._loop.at(UNREAD_SECONDS, partial(self._drop_slow, session, session.taken))

    def _drop_slow(self, session: Session, taken: int) -> None:
        """Drop a client of which too much waits, if it has taken no more than before."""
        session.is_looked_at = False  # first: who sends it more looks at it behind that
        if len(session.out) <= UNREAD_MAX or session.is_closed:
            return
        if session.taken > taken:
            self._look_later(session)
            return
        log.warning(
            "a client of %s, process %d, is dropped: it has not read %d bytes in %.0f s",
            self.directory, session.pid, len(session.out), UNREAD_SECONDS,
        )  # fmt: skip
        self._presence.gone(session)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _leave_all() -> None:
    for server in list(_servers):
        server.leave()


os.register_at_fork(after_in_child=_leave_all)
