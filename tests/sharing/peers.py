"""A client that speaks the protocol byte by byte, and says what it likes."""

from __future__ import annotations

import enum
import os
import socket
from pathlib import Path
from typing import Any

from anabranch.router.sharing.clients import ClientFile
from anabranch.router.sharing.protocol import VERSION, Request, Unfit, pack, unpack
from anabranch.router.sharing.socket_file import connected

PATIENCE = 60.0


def tag_of(kind: type[Request]) -> int:
    """Return the op of a kind of requests, which is its first field."""
    tag = kind.__struct_config__.tag
    assert isinstance(tag, int)
    return tag


KINDS = {tag_of(kind): kind for kind in Request.__subclasses__() if kind is not Unfit}


class Op(enum.IntEnum):
    """The ops, which are in the first field of a request."""

    HELLO = 0
    SEND = 1
    SEND_MANY = 2
    RECEIVE = 3
    RECEIVE_PATTERN = 4
    LISTEN = 5
    CREDIT = 6
    UNLISTEN = 7
    ACK = 8
    SETTLE = 9
    COMMIT = 10
    CALL = 11
    CANCEL = 12
    PING = 13
    BODY = 20


assert {op.name.replace("_", ""): op.value for op in Op} == {kind.__name__.upper(): op for op, kind in KINDS.items()}


class Peer:
    """One connection to the owner of a directory."""

    def __init__(self, directory: Path, greets: bool = True) -> None:
        self.sock = connected(directory)
        self.sock.settimeout(PATIENCE)
        self._buffer = bytearray()
        self._number = 0
        self._file: ClientFile | None = None
        if greets:
            client = f"{os.getpid():x}-{os.urandom(6).hex()}"
            self._file = ClientFile(directory, client)
            ok, value = self.ask(Op.HELLO, VERSION, client, os.getpid(), "", [])
            assert ok, value

    def send(self, *fields: Any) -> int:
        """Send a request; returns its number."""
        self._number += 1
        self.sock.sendall(pack(self._number, fields))
        return self._number

    def ask(self, *fields: Any) -> tuple[Any, Any]:
        """Ask, and wait for the answer: whether it is none but an error, and which."""
        number = self.send(*fields)
        while True:
            frame = self.next()
            if frame[0] in (number, 0):
                return frame[1], frame[2]

    def next(self) -> list[Any]:
        """Return the next frame. Raises EOFError once the owner has ended the connection."""
        while True:
            found = unpack(self._buffer)
            if found:
                rest = b"".join(pack(*frame) for frame in found[1:])
                self._buffer[:0] = rest
                frame: list[Any] = found[0]
                return frame
            try:
                data = self.sock.recv(1 << 18)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self._buffer += data

    def ended(self) -> list[list[Any]]:
        """Wait until the owner ends the connection; returns what it said before."""
        said = []
        try:
            while True:
                said.append(self.next())
        except EOFError:
            return said

    def shut(self) -> None:
        """Send no more."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection."""
        self.sock.close()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
