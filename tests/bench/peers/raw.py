"""The limit of plain Python on this disk: a header, a CRC-32C, a write, and where it is durable an fdatasync.

The file is written with zeros beforehand and the messages overwrite it, so that a sync has no allocation to record:
no library that keeps a journal can be faster with one thread. With several threads each does its own write and sync;
the kernel merges what it can. Nothing is kept that could find a message again.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import google_crc32c

HEADER = struct.Struct("<IQI")
FILL_BYTES = 16 * 2**20


class Raw:
    name = "raw"

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._directory, self._apart = directory, list[Raw]()
        path = directory / "raw.bin"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._durable = durable
        self._lock = threading.Lock()
        self._end = 0
        self._count = 0

    def reserve(self, messages: int, payload_bytes: int) -> None:
        """Writes the zeros that the messages will overwrite."""
        for offset in range(0, messages * (HEADER.size + payload_bytes), FILL_BYTES):
            os.pwrite(self._file, bytes(FILL_BYTES), offset)
        os.fsync(self._file)

    def sender(self) -> Callable[[bytes], None]:
        file, durable = self._file, self._durable
        extend, pack = google_crc32c.extend, HEADER.pack

        def send(body: bytes) -> None:
            with self._lock:
                lsn, offset = self._count, self._end
                self._count, self._end = lsn + 1, offset + HEADER.size + len(body)
            os.pwrite(file, pack(len(body), lsn, extend(0, body)) + body, offset)
            if durable:
                os.fdatasync(file)

        return send

    def senders_apart(self, count: int, messages: int, payload_bytes: int) -> list[Callable[[bytes], None]]:
        """Each to a file of its own."""
        for number in range(count):
            directory = self._directory / str(number)
            directory.mkdir()
            raw = Raw(directory, durable=self._durable)
            self._apart.append(raw)
            raw.reserve(messages, payload_bytes)
        return [raw.sender() for raw in self._apart]

    def batch_sender(self) -> Callable[[list[bytes]], None]:
        file, durable = self._file, self._durable
        extend, pack = google_crc32c.extend, HEADER.pack

        def send(bodies: list[bytes]) -> None:
            parts = []
            for lsn, body in enumerate(bodies, self._count):
                parts += [pack(len(body), lsn, extend(0, body)), body]
            record = b"".join(parts)
            offset = self._end
            self._count, self._end = self._count + len(bodies), offset + len(record)
            os.pwrite(file, record, offset)
            if durable:
                os.fdatasync(file)

        return send

    transaction = batch_sender

    def cross_transaction(self, stores: int) -> Callable[[list[bytes]], None]:
        """What two phases cost that go from store to store: 2N+2 syncs in sequence, ActiveMQ's mKahaDB's count, each of
        a write that is as small as it can be; the bodies go with the first N."""
        send = self.batch_sender()

        def commit(bodies: list[bytes]) -> None:
            for number in range(stores):
                send(bodies[number::stores])
            for _ in range(stores + 2):
                send([b"commit"])

        return commit

    def reader(self) -> Callable[[], int]:
        def read() -> int:
            count, offset, chunk = 0, 0, b""
            while more := os.pread(self._file, 2**20, offset):
                offset += len(more)
                chunk, start = chunk + more, 0
                while start + HEADER.size <= len(chunk):
                    length, _, _ = HEADER.unpack_from(chunk, start)
                    stop = start + HEADER.size + length
                    if length == 0:
                        return count
                    if stop > len(chunk):
                        break
                    _ = chunk[start + HEADER.size : stop]
                    start, count = stop, count + 1
                chunk = chunk[start:]
            return count

        return read

    def close(self) -> None:
        os.close(self._file)
        for raw in self._apart:
            raw.close()


PEERS = [Raw]
