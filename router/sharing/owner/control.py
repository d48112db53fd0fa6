"""The control socket of a router that has its directory for itself: other processes look in meanwhile, and use it.

One thread of the process sleeps until somebody connects to any of them. Only then is the server loaded and started,
and it ends once its last client has gone. So looking in costs nothing while nobody does, and keeps a router
that nobody holds alive only while somebody is connected.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ....adapters.system.background import shared
from ....adapters.system.conditions import Thread
from ....adapters.system.files import disk_errors
from ..clients import GRACE_SECONDS, living
from ..socket_file import bound_without_file

if TYPE_CHECKING:
    from ...placement.registry import StoreRegistry
    from ...router import Router
    from .server import Server

log: logging.Logger = logging.getLogger(__name__)

BACKLOG: Final = 128
LINGER_SECONDS: Final = 2.0
"""For so long a server stays after its last client has gone: one that lives, and has lost its connection, comes
again."""
RETRY_SECONDS: Final = 1.0
HAS_SOCKETS: Final = hasattr(select, "epoll") and hasattr(socket, "SO_PEERCRED")
"""Where not, as on macOS, nobody looks in."""
WAKES_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT if HAS_SOCKETS else 0
TRIES: Final = 5
"""How often a name that is taken is asked for, before it is logged."""


class ControlSocket:
    """The control socket of one router, which holds the directory's lock, and the server that it was asked for. A
    router opens all the same where no socket can be, which is logged. Threads: all."""

    def __init__(self, router: Router, registry: StoreRegistry, listens: bool = True) -> None:
        """Begin to listen; without `listens`, as an owner: once it serves. Clients that came by this socket before
        would be another server's, and each server waits for all clients of the owner before."""
        self._router, self._registry = weakref.ref(router, lambda _: self.leave()), weakref.ref(registry)
        self._directory = registry.config.directory
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None
        """The one that serves, or served last."""
        self.server: Server | None = None
        """Serves while somebody is connected."""
        self._over = False
        self._tries = 0
        self._asked_for: Server | None = None
        """The server that `serve` has begun."""
        self._lock = threading.RLock()
        """Guards it."""
        self._listens_later = registry.config.control and not listens
        if registry.config.control and listens:
            with disk_errors(f"the clients in {self._directory} cannot be looked at"):
                has_clients = any(living(self._directory))
            self._listen()
            if has_clients:
                self._wait_for_clients()

    def serve(self, linger: float | None) -> Server:
        """Serve until that is stopped, as Router.serve."""
        router, registry = self._router(), self._registry()
        assert router is not None
        assert registry is not None  # whoever calls holds them
        with self._lock:
            if self._asked_for is None or self._asked_for.ended.is_set():
                server = _server_of(router, linger)
                server.start()
                self._asked_for = server
                if self._listens_later:
                    self._listens_later = False
                    self._listen()
            return self._asked_for

    def sessions(self) -> list[dict[str, Any]]:
        """Return who is connected to any server of the router, and what each holds."""
        return [one for server in (self._asked_for, self.server) if server is not None for one in server.sessions()]

    def _listen(self) -> None:
        if self._over or not HAS_SOCKETS:
            return
        try:
            self._door = _door()
            self._listening = listening = bound_without_file(self._directory, BACKLOG)
            self._door.watch(listening.fileno(), self)
        except (OSError, RuntimeError) as error:
            self._tries += 1
            if getattr(error, "errno", None) == errno.EADDRINUSE and self._tries < TRIES:
                shared().schedule_while_alive(RETRY_SECONDS, self._listen)
                return
            log.warning("no other process can look into %s while it is open: %s", self._directory, error)
        if self._over:  # it was closed meanwhile
            self.leave()

    def _wait_for_clients(self) -> None:
        """Wait until the clients of an owner before have told what they hold, or have had the time: whoever opens the
        router would receive it."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not self._over and self._has_clients():
            server = self.server
            if time.monotonic() > deadline if server is None else server.grace_over.is_set():
                return
            time.sleep(0.005)

    def _has_clients(self) -> bool:
        try:
            return any(living(self._directory))
        except OSError:  # for want of a descriptor, say: there were some
            return True

    def come(self) -> None:
        """Serve whoever has connected, on a thread. The thread that watches alone."""
        router, registry = self._router(), self._registry()
        if router is not None and registry is not None and not self._over:
            self._thread = Thread(partial(self._serve, router, registry), "control-serve")
            self._thread.start()

    def _serve(self, router: Router, registry: StoreRegistry) -> None:
        try:
            self.server = server = _server_of(router, LINGER_SECONDS, self._listening)
            if not self._over:  # looked at behind the line above: `close` looks the other way round
                server.run()
            failure = server.failure
        except Exception as error:
            log.exception("nobody can look into %s now", self._directory)
            failure = error
        self.server = None
        if failure is None:
            self._watch_again()
        else:
            shared().schedule_while_alive(RETRY_SECONDS, self._watch_again)

    def _watch_again(self) -> None:
        if not self._over and self._listening is not None:
            self._door.watch_again(self._listening)

    def leave(self) -> None:
        """Close the socket, also of a router that nobody holds any more, and in a forked child, whose parent keeps it.
        Any thread, with any lock."""
        self._over = True
        listening = self._listening
        if listening is not None:
            self._door.forget(listening.fileno())
            listening.close()

    def close(self) -> None:
        """Let whoever is connected go once what is in hand is done, and close the socket. Idempotent."""
        self._over = True
        if self._asked_for is not None:
            self._asked_for.stop()
        server, thread = self.server, self._thread
        if server is not None:
            server.stop()
        if thread is not None and thread.is_alive():
            thread.join()
        self.leave()


def _server_of(router: Router, linger: float | None, listening: socket.socket | None = None) -> Server:
    """Return a server, whose module is loaded for who needs one alone."""
    from .server import Server

    return Server(router, linger, listening)


class _Door:
    """Watches the control sockets of this process, on a thread that sleeps until somebody connects to one."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[int, ControlSocket] = {}
        """By their descriptors. Each change is one step."""
        self._thread = Thread(self._run, "control")
        self._thread.start()

    def watch(self, fd: int, of: ControlSocket) -> None:
        """Watch a socket."""
        self._sockets[fd] = of
        self._epoll.register(fd, WAKES_ONCE)

    def watch_again(self, listening: socket.socket) -> None:
        """Watch a socket again at which somebody has come."""
        with suppress(OSError, ValueError):  # it was closed just now
            self._epoll.modify(listening.fileno(), WAKES_ONCE)

    def forget(self, fd: int) -> None:
        """Watch a socket no more, which is closed then."""
        self._sockets.pop(fd, None)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                of = self._sockets.get(fd)
                if of is not None:
                    try:
                        of.come()
                    except RuntimeError as error:  # no thread can be started
                        log.warning("nobody can look in now: %s", error)
                del of

    def leave(self) -> None:
        """Let go of all that is the parent's, in a forked child."""
        self._epoll.close()
        for of in list(self._sockets.values()):
            of.leave()


_watching: list[_Door] = []
_making = threading.RLock()


def _door() -> _Door:
    """Return the one of this process."""
    with _making:
        if not _watching:
            _watching.append(_Door())
        return _watching[0]


def _begin_in_child() -> None:
    global _making
    _making = threading.RLock()
    for door in _watching:
        door.leave()
    _watching.clear()


os.register_at_fork(after_in_child=_begin_in_child)
