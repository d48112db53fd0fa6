"""Redis and RabbitMQ: servers of their own for each run, as Debian brings them, reached over loopback.

Redis: a list in an append-only file. Durable: `appendfsync always`, one fdatasync for what all its clients asked for
meanwhile; its default, `everysec`, loses up to a second on a power failure. Not durable: `appendfsync no`. A message is
taken by LMOVE into a list of those in hand and removed by LREM, so that a client that dies loses none.

RabbitMQ: a quorum queue on one node, persistent messages, publisher confirms: one call waits for its confirm, which
comes after the fsync of the queue's log. It has no way not to sync, so both kinds of run are the same.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

PATIENCE: Final = 120.0
"""Seconds that a server gets to start or stop."""
NAME: Final = "bench"


def free_port() -> int:
    """Return a port that nobody listens on. The kernel gives connections higher ones: none takes it meanwhile."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A process that is ready once `connect` returns, and is stopped with all that it started."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment),
                start_new_session=True,
            )
        self._log = log
        self._ended = weakref.finalize(self, _end, self._process)  # also where a run fails

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def connect(self, connect: Callable[[], Any], not_yet: type[Exception]) -> Any:
        """What `connect` returns once it raises no `not_yet` any more."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return connect()
            except not_yet:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise RuntimeError(f"the server did not start:\n{self._log.read_text()}") from None
                time.sleep(0.05)

    def close(self) -> None:
        """End the process, and what it started; the directory is the caller's."""
        self._ended()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Redis:
    name = "redis"
    server = shutil.which("redis-server")

    def __init__(self, directory: Path, *, durable: bool) -> None:
        import redis

        assert self.server is not None
        self.port = port = free_port()
        options = {
            "bind": "127.0.0.1", "port": str(port), "dir": str(directory), "save": "", "appendonly": "yes",
            "appendfsync": "always" if durable else "no",
        }  # fmt: skip
        command = [self.server, *(word for name, value in options.items() for word in (f"--{name}", value))]
        self._server = Server(command, directory / "redis.log", {})
        self._connect: Callable[[], Any] = lambda: redis.Redis("127.0.0.1", port)
        self._clients: list[Any] = []
        self._server.connect(self._new().ping, redis.ConnectionError)

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._server.pid

    def _new(self) -> Any:
        client = self._connect()
        self._clients.append(client)
        return client

    def sender(self) -> Callable[[bytes], object]:
        client = self._new()
        return lambda body: client.rpush(NAME, body)

    def batch_sender(self) -> Callable[[list[bytes]], object]:
        client = self._new()
        return lambda bodies: client.rpush(NAME, *bodies)

    transaction = batch_sender

    def receiver(self) -> Callable[[], bytes]:
        client = self._new()

        def take() -> bytes:
            body: bytes = client.lmove(NAME, "in-hand", "LEFT", "RIGHT")
            client.lrem("in-hand", 1, body)
            return body

        return take

    def reader(self) -> Callable[[], int]:
        client = self._new()
        return lambda: len(client.lrange(NAME, 0, -1))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._server.close()


class RabbitMQ:
    name = "rabbitmq"
    server = shutil.which("rabbitmq-server", path=os.pathsep.join(["/usr/lib/rabbitmq/bin", os.environ["PATH"]]))

    def __init__(self, directory: Path, *, durable: bool) -> None:
        import pika

        assert self.server is not None
        configuration = directory / "rabbitmq.conf"
        if not configuration.exists():  # else it is opened again: a node's name says where its files are
            configuration.write_text(f"listeners.tcp.1 = 127.0.0.1:{free_port()}\n")
        port, self._epmd_port = int(configuration.read_text().rpartition(":")[2]), str(free_port())
        (directory / "enabled_plugins").write_text("[].\n")
        environment = {
            "HOME": str(directory),
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(configuration),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": self._epmd_port,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        self._server = Server([self.server], directory / "rabbitmq.log", environment)
        self._new: Callable[[], Any] = lambda: pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
        self._persistent = pika.BasicProperties(delivery_mode=2)
        self._connections = [self._server.connect(self._new, pika.exceptions.AMQPError)]
        self._connections[0].channel().queue_declare(NAME, durable=True, arguments={"x-queue-type": "quorum"})

    def _channel(self) -> Any:
        self._connections.append(self._new())
        return self._connections[-1].channel()

    def sender(self) -> Callable[[bytes], object]:
        channel = self._channel()
        channel.confirm_delivery()
        return lambda body: channel.basic_publish("", NAME, body, self._persistent, mandatory=True)

    def receiver(self) -> Callable[[], bytes]:
        channel = self._channel()

        def take() -> bytes:
            method, _, body = channel.basic_get(NAME)
            channel.basic_ack(method.delivery_tag)
            return bytes(body)

        return take

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._server.close()
        subprocess.run(["epmd", "-port", self._epmd_port, "-kill"], stdout=subprocess.DEVNULL, check=True)


PEERS = [peer for peer in (Redis, RabbitMQ) if peer.server is not None]
