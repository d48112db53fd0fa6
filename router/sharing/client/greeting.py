"""How a client finds the owner of a directory, starts one where there is none, and is known to it."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from ....policies.errors import ConfigError, StoreFailedError, router_closed
from ..descriptors import READ_BYTES
from ..protocol import unpack
from ..socket_file import connected, peer_of
from .exchange import Exchange

PATIENCE: Final = 60.0
"""Seconds for which an owner that does not come, or does not answer its greeting, is waited for."""


class Greeter:
    """Connects to the owner of a directory, and waits meanwhile."""

    def __init__(self, start_owner: Callable[[], None], patience: float = PATIENCE) -> None:
        """`start_owner` starts an owner where there is none. An owner is waited for so many seconds."""
        self._start_owner, self._patience = start_owner, patience

    def connect(self, exchange: Exchange) -> tuple[socket.socket, bytearray]:
        """Return the socket of an owner that has answered a greeting, and what has come beyond that. Raises
        StoreFailedError if no owner comes, ConfigError for one that cannot be reached."""
        directory = exchange.directory
        deadline, pause = time.monotonic() + self._patience, 0.0005
        while True:
            if exchange.is_closed:
                raise router_closed()
            exchange.require_place()  # before an owner is started, which would make it anew
            is_there = True
            try:
                return self._greet(exchange)
            except (FileNotFoundError, ConnectionRefusedError):
                is_there = False
            except (ConnectionError, EOFError):
                pass  # it has just ended
            except TimeoutError as error:
                raise StoreFailedError(f"{directory} is open, and {error}") from None
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT):
                    raise ConfigError([f"the owner of {directory} cannot be reached: {error}"]) from error
            if not is_there:
                self._start_owner()
            if time.monotonic() > deadline:
                raise StoreFailedError(
                    f"no process that owns {directory} has answered in {self._patience:.0f} s; "
                    "serve.log there may say why"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _greet(self, exchange: Exchange) -> tuple[socket.socket, bytearray]:
        sock = connected(exchange.directory)
        try:
            sock.settimeout(self._patience)
            sock.sendall(exchange.hello())
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
                answers = unpack(buffer)
            exchange.greeted(answers[0])
            sock.settimeout(None)
            return sock, buffer
        except BaseException:
            sock.close()
            raise
