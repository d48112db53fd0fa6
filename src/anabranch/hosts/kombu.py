"""A kombu transport: `anabranch:///srv/tasks` in place of a broker, for Celery and all that stands on kombu.

    import anabranch.hosts.kombu                        # makes the URL known: kombu finds no transport by itself

    app = Celery("shop", broker="anabranch:///srv/tasks", backend="anabranch:///srv/tasks")

The result backend is in _celery.py, and Celery finds it by itself: an entry point names it.

The directory is shared: workers, web processes and beat are clients of one owner (docs/processes.md). A queue `mail` is
`queue://kombu.mail`, the bindings of exchanges are the map `kombu.bindings`. A message is leased until it is acked, for
as long as its consumer's process lives: there is no visibility timeout. What its consumer had not acked when it closed
or died goes back to its old place.

A queue that says when it expires (`x-expires`: those for remote control, replies and events) has an entry in the map
`kombu.expiring`, which its consumer writes anew again and again. Everybody who has such a queue looks there, and
deletes queues whose entries have stood still for too long. No clock is compared with another's.

Needs the extra `kombu`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.json import dumps, loads

import anabranch
from anabranch import ClosedError, ConfigError, Message, Settlement, StoreFailedError

__all__ = ["Transport"]

log: logging.Logger = logging.getLogger(__name__)

SCHEME: Final = "anabranch"
_SEPARATOR: Final = "\x06"
"""Stands between the parts of a binding's key: no name of an exchange or a queue has it."""
_CONFIGURATION: Final = """\
directory: .
stores:
  - name: all
    match: [">"]
    journal: {priorities: true}
"""
_AUTO_DELETE_SECONDS: Final = 60.0
"""When a queue goes that is to be deleted once nobody consumes it, and does not say how soon."""
_REFRESHES: Final = 4
"""How often an entry of an expiring queue is written in the time that it may stand still."""


def directory_of(virtual_host: str | None, hostname: str | None) -> Path:
    """Return the directory that a URL names. Raises ConfigError if it names none, or nothing is there."""
    if hostname not in (None, "", "localhost") or not (virtual_host or "").strip("/"):
        given = f"{SCHEME}://{hostname or ''}/{virtual_host or ''}"
        raise ConfigError(
            [f"{given} names no directory; write the whole path behind three slashes: {SCHEME}:///srv/tasks"]
        )
    path = Path(f"/{virtual_host}")
    if not path.exists():
        raise ConfigError([f"{path} is not there; make the directory (mkdir {path}), or correct {SCHEME}://{path}"])
    return path


def _configure(directory: Path) -> None:
    """Write a new directory's configuration, unless another process has."""
    made = directory / f".stores.{uuid.uuid4().hex}"
    made.write_text(_CONFIGURATION)
    with suppress(FileExistsError):
        (directory / "stores.yaml").hardlink_to(made)
    made.unlink()


class Broker:
    """One directory in this process: its router, and the expiring queues that this process has declared or consumes.
    Threads: all. In a forked child the router is a client of its own, which holds nothing."""

    def __init__(self, path: Path) -> None:
        """Open the directory. An empty one gets a stores.yaml. Raises what anabranch.open does."""
        with suppress(OSError):  # who may not write there is told by `open`
            if path.is_dir() and all(file.name.startswith(".") for file in path.iterdir()):
                _configure(path)
        self.router: anabranch.Router = anabranch.open(path, shared=True)
        self.bindings: Final = self.router.map("kombu.bindings")
        self.results: Final = self.router.map("kombu.results")
        self._expiring = self.router.map("kombu.expiring")
        self.begin()

    def begin(self) -> None:
        """Look after no expiring queue yet: also in a forked child, whose parent does so."""
        self._own: dict[str, tuple[float, int]] = {}
        """The seconds after which an expiring queue goes, and how many consume it here."""
        self._bound: dict[str, dict[str, bytes]] = {}
        """The bindings of such queues that were made here."""
        self._lock = threading.Lock()
        self._is_kept = False
        """A thread looks after expiring queues."""
        self._is_declared = threading.Event()
        """Another one is there, which may have to be looked after sooner."""

    def queue(self, name: str) -> anabranch.Queue:
        """Return a queue, as kombu calls it."""
        return self.router.queue(anabranch.Destination.queue(f"kombu.{name}"))

    def delete(self, queue: str) -> None:
        """Delete a queue with its messages and its bindings."""
        with self.router.transaction() as tx:
            for key, _ in self.bindings.items(""):
                if key.rpartition(_SEPARATOR)[2] == queue:
                    tx.remove(self.bindings, key)
        self.router.delete(self.queue(queue))
        with self._lock:
            self._own.pop(queue, None)
            self._bound.pop(queue, None)

    def bind(self, queue: str, key: str, value: bytes) -> None:
        """Make a binding of a queue."""
        self.bindings.put(key, value)
        with self._lock:
            if queue in self._own:
                self._bound.setdefault(queue, {})[key] = value

    def unbind(self, queue: str, key: str) -> None:
        """Undo a binding."""
        with self._lock:
            self._bound.get(queue, {}).pop(key, None)
        with self.router.transaction() as tx:
            tx.remove(self.bindings, key)

    def declare(self, name: str, expires: float | None) -> None:
        """Make a queue, which goes once nobody has used it for `expires` seconds."""
        self.queue(name).declare()
        if expires:
            self._expiring.put(name, _entry(expires))
            with self._lock:
                self._own[name] = expires, self._own.get(name, (0, 0))[1]
                self._is_declared.set()
                if not self._is_kept:
                    self._is_kept = True
                    threading.Thread(target=self._keep, name="anabranch-kombu", daemon=True).start()

    def consume(self, name: str, by: int) -> None:
        """Note that one more, or one less, consumes a queue here."""
        with self._lock:
            if name in self._own:
                expires, consumers = self._own[name]
                self._own[name] = expires, consumers + by

    def _keep(self) -> None:
        seen: dict[str, tuple[bytes, float]] = {}
        while True:
            with self._lock:
                own = dict(self._own)
            shortest = min((expires for expires, _ in own.values()), default=_AUTO_DELETE_SECONDS)
            self._is_declared.wait(max(shortest / _REFRESHES, 0.05))
            self._is_declared.clear()
            try:
                for name, (expires, consumers) in own.items():
                    if consumers:
                        self._refresh(name, expires)
                seen = self._swept(seen)
            except ClosedError:  # its owner speaks another version, say: whoever declares a queue again begins anew
                with self._lock:
                    self._is_kept = False
                return
            except anabranch.AnabranchError as error:  # its owner is stopped, say: the next look may find it well
                log.debug("expiring queues are not looked at: %s", error)

    def _refresh(self, name: str, expires: float) -> None:
        """Keep a queue that is consumed here, and make it anew where others have deleted it: this process stood still
        for longer than its queue may."""
        self._expiring.put(name, _entry(expires))
        queue = self.queue(name)
        if not self.router.exists(queue):
            with self._lock:
                bound = dict(self._bound.get(name, {}))
            with self.router.transaction() as tx:
                for key, value in bound.items():
                    tx.put(self.bindings, key, value)
            queue.declare()

    def _swept(self, before: dict[str, tuple[bytes, float]]) -> dict[str, tuple[bytes, float]]:
        """Delete the queues whose entries have not changed for too long; return the others."""
        seen = {}
        for name, value in list(self._expiring.items()):
            known, since = before.get(name, (b"", 0.0))
            expires = float(value.partition(b":")[0])
            if value != known:
                seen[name] = value, time.monotonic()
            elif time.monotonic() - since < expires:
                seen[name] = known, since
            elif self._expiring.compare_and_set(name, value, mine := _entry(expires)):
                self.delete(name)  # if it fails the entry is there, and stands still anew
                self._expiring.compare_and_set(name, mine, None)
        return seen


def _entry(expires: float) -> bytes:
    """Return what is written of a queue that goes after so many seconds: each time something else."""
    return f"{expires}:{uuid.uuid4().hex}".encode()


_brokers: dict[Path, Broker] = {}
_opening = threading.Lock()


def _begin_in_child() -> None:
    global _opening
    _opening = threading.Lock()
    for broker in _brokers.values():
        broker.begin()


os.register_at_fork(after_in_child=_begin_in_child)


def broker_of(path: Path) -> Broker:
    """Return the directory's broker in this process, opened once. Raises what opening does."""
    with _opening:
        if path not in _brokers:
            _brokers[path] = Broker(path)
        return _brokers[path]


class QoS(virtual.QoS):
    """The messages that a channel has delivered and that are not acked."""

    def ack(self, delivery_tag: str) -> None:
        """Ack a message. The consumer goes on meanwhile: if the ack is lost with the machine, it comes again."""
        self._settle(delivery_tag, Settlement.ACK)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give a message back to its old place, or put it into the dead letters, if its store has some."""
        self._settle(delivery_tag, Settlement.RELEASE if requeue else Settlement.REJECT)

    def _settle(self, tag: str, how: Settlement) -> None:
        self.channel.settle([tag], how)
        super().ack(tag)
        self.channel.refill()

    def restore_unacked(self) -> list[Any]:
        """Give back what is not acked, each to its old place."""
        self._flush()
        tags = list(self._delivered)
        self._delivered.clear()
        with suppress(ClosedError, StoreFailedError):  # then all of it is free already, or soon
            self.channel.settle(tags, Settlement.RELEASE)
        return []


class Channel(virtual.Channel):
    """A channel. Each of its consumers has credit for one message at a time; as it is delivered, for the next."""

    QoS = QoS
    supports_fanout = True
    body_encoding = None

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        self.broker: Broker = connection.broker
        self._process = os.getpid()
        self.listeners: dict[str, anabranch.Listener] = {}
        self.no_ack: set[str] = set()
        """The tags of consumers whose messages are acked as they are delivered."""
        self.dry: set[str] = set()
        """The tags of consumers that have used up their credit."""
        self.ttls: dict[str, float] = {}
        """The seconds after which the messages of a queue expire, as far as this channel knows (x-message-ttl)."""

    # Queues and exchanges

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> dict[str, Any]:
        """Return a queue's options under the names that RabbitMQ gives them."""
        prepared: dict[str, Any] = to_rabbitmq_queue_arguments(arguments, **options)
        return prepared

    def _new_queue(
        self, queue: str, arguments: dict[str, Any] | None = None, auto_delete: bool = False, **options: Any
    ) -> None:
        arguments = arguments or {}
        if arguments.get("x-message-ttl") is not None:
            self.ttls[queue] = arguments["x-message-ttl"] / 1000
        expires = arguments.get("x-expires")
        self.broker.declare(queue, expires / 1000 if expires else _AUTO_DELETE_SECONDS if auto_delete else None)

    def _has_queue(self, queue: str, **options: Any) -> bool:
        return self.broker.router.exists(self.broker.queue(queue))

    def _size(self, queue: str) -> int:
        return self.broker.queue(queue).counts().ready

    def _purge(self, queue: str) -> int:
        return self.broker.queue(queue).purge()

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **options: Any) -> None:
        """Delete a queue, whoever has declared it."""
        if not (if_empty and self._size(queue)):
            self.broker.delete(queue)
            self.state.queue_bindings_delete(queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        key = _SEPARATOR.join((exchange, routing_key or "", queue))
        self.broker.bind(queue, key, str(self.ttls.get(queue, "")).encode())

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", *_: Any, **options: Any
    ) -> None:
        """Undo a binding."""
        exchange = exchange or "amq.direct"
        self.state.binding_delete(queue, exchange, routing_key)
        self.broker.unbind(queue, _SEPARATOR.join((exchange, routing_key or "", queue)))

    def get_table(self, exchange: str) -> list[tuple[str, str | None, str]]:
        """Return the bindings of an exchange, as all processes have made them."""
        kind, table = self.typeof(exchange), []
        for key, ttl in self.broker.bindings.items(exchange + _SEPARATOR):
            routing_key, queue = key.split(_SEPARATOR)[1:]
            table.append(kind.prepare_bind(queue, exchange, routing_key, None))
            if ttl:
                self.ttls[queue] = float(ttl)
        return table

    # Sending

    def _options(self, queue: str, message: dict[str, Any]) -> dict[str, Any]:
        properties = message["properties"]
        given = properties.get("expiration")
        times = [max(int(given), 1) / 1000] if given else []
        return {
            "priority": self._get_message_priority(message),
            "expires_in": min([*times, *([self.ttls[queue]] if queue in self.ttls else [])], default=None),
            "persistent": properties.get("delivery_mode") != 1,
        }

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        self.broker.queue(queue).send(dumps(message).encode(), **self._options(queue, message))

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **options: Any) -> None:
        queues, body = {queue for *_, queue in self.get_table(exchange)}, dumps(message).encode()
        with self.broker.router.transaction() as tx:
            for queue in queues:
                tx.send(self.broker.queue(queue), body, **self._options(queue, message))

    # Receiving

    def settle(self, tags: list[str], how: Settlement) -> None:
        """Settle messages, an ack without waiting for it. A forked child leaves them to its parent, whose they are."""
        if tags and self._process == os.getpid():
            settled = self.broker.router.settle_nowait(tags, how)
            if how is not Settlement.ACK:
                settled.result()

    def payload(self, message: Message, no_ack: bool) -> dict[str, Any] | None:
        """Return a leased message as kombu has it. One that is not kombu's is rejected: None."""
        try:
            payload: dict[str, Any] = loads(message.body.decode())
            payload["properties"]["delivery_info"]["redelivered"] = message.deliveries > 1
            payload["properties"]["delivery_tag"] = message.token
        except (ValueError, LookupError, TypeError) as error:
            log.error("%r is no message of kombu's, and is rejected: %s", message, error)
            message.reject(f"no message of kombu's: {error}")
            return None
        if no_ack:
            message.ack_nowait()
        return payload

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Receive one message of kombu's, if there is one."""
        payload = None
        while payload is None:
            message = self.broker.queue(queue).receive(0)
            if message is None:
                return None
            payload = self.payload(message, no_ack)
        received = self.Message(payload, channel=self)
        if not no_ack:
            self.qos.append(received, received.delivery_tag)
        return received

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any) -> None:
        """Begin to consume."""
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        if no_ack:
            self.no_ack.add(consumer_tag)
        self.broker.consume(queue, 1)
        come = self.connection.come
        self.listeners[consumer_tag] = self.broker.queue(queue).listen(
            lambda message: come(self, consumer_tag, message), on_end=lambda error: come(self, consumer_tag, error)
        )

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer."""
        listener = self.listeners.pop(consumer_tag, None)
        if listener is not None:
            listener.close()
            self.connection.give_back(self, consumer_tag)
            self.broker.consume(self._tag_to_queue[consumer_tag], -1)
            self.no_ack.discard(consumer_tag)
            self.dry.discard(consumer_tag)
        super().basic_cancel(consumer_tag)

    def basic_qos(self, *arguments: Any, **options: Any) -> None:
        """Change how many messages may be delivered and not acked."""
        super().basic_qos(*arguments, **options)
        self.refill()

    def refill(self) -> None:
        """Give credit to the consumers that have none, if the channel may have more messages. Any thread."""
        if not self.closed and self.dry and self.qos.can_consume():
            for tag, listener in list(self.listeners.items()):
                with suppress(KeyError):
                    self.dry.remove(tag)  # by one thread
                    listener.add_credit(1)

    def deliver(self, tag: str, message: Message | Exception) -> bool:
        """Deliver what has come for a consumer; returns whether it was delivered. Raises the error of its end."""
        queue = self._tag_to_queue.get(tag)
        if isinstance(message, Exception):
            if queue is not None:
                raise message
            return False
        if self.closed or queue is None:
            message.release_nowait(delivered=False)
            return False
        if not self.qos.can_consume():  # another queue's came first: whoever else is there gets this one
            message.release(delivered=False)
            self.dry.add(tag)
            self.refill()
            return False
        self.dry.add(tag)
        try:
            payload = self.payload(message, tag in self.no_ack)
            if payload is not None:
                self.connection._deliver(payload, queue)
            return payload is not None
        finally:
            self.refill()


class Transport(virtual.Transport):
    """The transport. One connection has one line of what has come for its consumers."""

    Channel = Channel
    driver_type = driver_name = SCHEME
    implements: Any = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    connection_errors: tuple[type[BaseException], ...] = (ClosedError, StoreFailedError, anabranch.StoreLockedError)
    channel_errors: tuple[type[BaseException], ...] = (*virtual.Transport.channel_errors, anabranch.AnabranchError)
    recoverable_connection_errors = connection_errors
    """A connection that is made anew may do better; not so with a wrong directory, which is told at once."""
    recoverable_channel_errors: tuple[type[BaseException], ...] = ()

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self._inbox: SimpleQueue[tuple[Any, str, Message | Exception]] = SimpleQueue()
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._forget: Callable[[], object] = lambda: None
        """Takes the waker out of an event loop."""
        self.broker: Any = None

    @property
    def default_connection_params(self) -> dict[str, Any]:
        """Return nothing: a URL has a path alone."""
        return {}

    def driver_version(self) -> str:
        """Return our version."""
        return anabranch.__version__

    def establish_connection(self) -> Transport:
        """Open the directory. Raises ConfigError for one that is not there or is something else, and StoreLockedError,
        ClosedError and StoreFailedError for one that this process cannot share."""
        self.broker = broker_of(directory_of(self.client.virtual_host, self.client.hostname))
        self.broker.router.exists(self.broker.bindings.destination)  # its owner may speak another version by now
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        """Close the channels, and give back what they have not acked."""
        self._forget()
        waker, self._waker = self._waker, None
        super().close_connection(connection)
        for end in waker or ():
            end.close()

    def come(self, channel: Any, tag: str, message: Message | Exception) -> None:
        """Put what has come for a consumer in line. By a thread of the library."""
        self._inbox.put((channel, tag, message))
        waker = self._waker
        if waker is not None:
            with suppress(OSError):  # full: it wakes; closed: nobody is there
                waker[1].send(b"\0")

    def give_back(self, channel: Any, tag: str) -> None:
        """Give back what has come for a consumer that has ended, as if nobody had held it."""
        others = []
        with suppress(Empty):
            while True:
                item = self._inbox.get_nowait()
                if item[:2] != (channel, tag):
                    others.append(item)
                elif isinstance(item[2], Message):
                    item[2].release_nowait(delivered=False)
        for item in others:
            self._inbox.put(item)

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises TimeoutError if none has come in that time (None: waits for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            try:
                channel, tag, message = self._inbox.get(timeout=left)
            except Empty:
                raise TimeoutError(f"no message in {timeout} s") from None
            if channel.deliver(tag, message):
                return

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver what comes in an event loop of kombu's, as Celery's worker does."""
        self._waker = receiving, sending = socket.socketpair()
        receiving.setblocking(False)
        sending.setblocking(False)
        self._forget = lambda: loop.remove(receiving)
        loop.add_reader(receiving, self._readable, receiving)
        sending.send(b"\0")  # for what has come before

    def _readable(self, receiving: socket.socket) -> None:
        with suppress(OSError):
            receiving.recv(65536)
        while self._waker is not None:
            try:
                channel, tag, message = self._inbox.get_nowait()
            except Empty:
                return
            channel.deliver(tag, message)


TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"
