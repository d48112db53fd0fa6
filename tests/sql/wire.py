"""The way to a server, which a test can cut: before a word has reached it, or after it has acted on it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from .server import PATIENCE, free_port

CHUNK: Final = 1 << 16


class Wire:
    """A port that leads to another one. Threads: one for each direction of each connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = free_port()
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._listener: socket.socket | None = None
        self._word: tuple[bytes, bool, bool] | None = None
        self._passed = 0
        """Times that the word passes before the cut."""
        self._then: Callable[[], None] = lambda: None
        self.cut = threading.Event()
        """Whether the word has come that `cut_at` waits for."""
        self.join()

    def url(self, url: str) -> str:
        """The same database, this way."""
        return re.sub(r"@127\.0\.0\.1:\d+/", f"@127.0.0.1:{self.port}/", url)

    def join(self) -> None:
        """Connections are taken (again)."""
        assert self._listener is None
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=100)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def sever(self) -> None:
        """Every connection is cut, and no new one is taken."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._close(pair)

    def cut_at(
        self, word: bytes, *, acted_on: bool, stay: bool = False, then: Callable[[], None] = lambda: None,
        after: int = 0,
    ) -> None:  # fmt: skip
        """The next connection on which the client says `word` is cut: before the server has heard it, or once it has
        answered, which the client does not hear. `stay`: the whole way is severed then, until `join`. `then` is called
        first. `after`: so many times it passes before."""
        self.cut.clear()
        self._then, self._passed = then, after
        self._word = (word, acted_on, stay)

    def spare(self) -> None:
        """Nothing is cut any more."""
        self._word = None

    def close(self) -> None:
        self.spare()
        self.sever()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to), PATIENCE)
            except OSError:
                if self._listener is not listener:
                    return
                with suppress(OSError, UnboundLocalError):
                    client.close()  # the server is down, and so are we
                continue
            server.settimeout(None)
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
            if self._listener is not listener:
                self._close(pair)
                return
            deaf = threading.Event()  # what the server answers is no longer passed on
            for forward in (True, False):
                threading.Thread(target=self._pass_on, args=(pair, forward, deaf), daemon=True).start()

    def _pass_on(self, pair: tuple[socket.socket, socket.socket], forward: bool, deaf: threading.Event) -> None:
        source, target = pair if forward else pair[::-1]
        while True:
            try:
                data = source.recv(CHUNK)
                if not data:
                    break
                if forward and self._meets(data, deaf):
                    if not deaf.is_set():
                        self._then()
                        break
                    target.sendall(data)
                    continue
                if not forward and deaf.is_set():
                    self._then()
                    break
                target.sendall(data)
            except OSError:
                break
        if self.cut.is_set() and self._word is not None and self._word[2] and (deaf.is_set() or forward):
            self._word = None
            self.sever()  # first: who notices that he is cut off must not get through on another connection
        self._close(pair)

    def _meets(self, data: bytes, deaf: threading.Event) -> bool:
        """Whether this is the connection to cut; `deaf` if the server shall hear it all the same."""
        with self._lock:
            if self._word is None or self.cut.is_set() or self._word[0] not in data:
                return False
            self._passed -= 1
            if self._passed >= 0:
                return False
            if self._word[1]:
                deaf.set()
            self.cut.set()
            return True

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
