"""Endpoint: queues and topics have in common that messages are sent to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from operator import methodcaller
from sys import maxsize
from typing import TYPE_CHECKING, Any, Generic, TypedDict, cast

from ...adapters.core import Store
from ...adapters.core.messages import (
    DEFAULT_PRIORITY,
    EXPIRES_MAX_MS,
    Headers,
    LargeBody,
    Message,
    Outgoing,
    Readable,
    Receipt,
    T,
    checked,
    in_group,
    plain_body,
    require_persistent,
)
from ...adapters.core.record.large import Sized
from ...adapters.core.service.sending import WaitingFuture, plain_bodies
from ...adapters.core.state.due import delay_ms
from ...adapters.system.clock import now_ms
from ...policies.errors import ClosedError, StoreFailedError
from ...policies.names.destination import Destination
from .codecs import Codec, encode, encode_one

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry


class SendOptions(TypedDict, total=False):
    """Further options of a send; see Endpoint.send."""

    priority: int
    expires_in: float | None
    persistent: bool
    size: int | None
    deliver_in: float | None
    deliver_at: float | datetime | None
    group: str | None


class Endpoint(Generic[T]):
    """A destination as its senders hold it. Cheap to make, cheap to keep; any thread may use it. Promises of each call:
    adapters/core/store.py. A body is bytes, or what its codec takes."""

    __slots__ = ("_codec", "_registry", "destination")

    def __init__(self, registry: StoreRegistry, destination: Destination, codec: Codec[T] | None = None) -> None:
        self._registry = registry
        self.destination: Destination = destination
        self._codec = codec

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.destination.name}>"

    def send(
        self,
        body: T | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        *,
        priority: int = DEFAULT_PRIORITY,
        expires_in: float | None = None,
        persistent: bool = True,
        size: int | None = None,
        connection: Any = None,
        deliver_in: float | None = None,
        deliver_at: float | datetime | None = None,
        group: str | None = None,
    ) -> Receipt:
        """Store one message; returns once it is as durable as its store's policy says (invariant 1).

        `sync=True` asks for more than the policy: durable against power loss on return. A `message_id` that the store
        has seen lately is stored once, and the receipt says `duplicate`: so an unsure sender simply sends again.
        `priority` is 0 to 65,535, the highest received first where the store's option `priorities` is set. After
        `expires_in` seconds it is no longer delivered. With `persistent=False` the message is kept in memory alone,
        swapped to disk if there are many, and gone when its store closes; its place among the others is kept. Before
        `deliver_in` seconds are over, or before `deliver_at` (seconds since the epoch, or a datetime that knows its
        time zone), nobody receives it, and others pass it; then it is at its place, the one at which it was sent. The
        message waits over a restart, too. While a message of the same `group` is leased, nobody receives another of
        that group from the same queue or subscription.

        A `body` may also be a file opened for reading bytes, or anything else with `read(size)`. The file is read from
        where it stands to its end, of any size and in bounded memory (docs/messages.md). With `size` it is refused,
        with ValueError, if it has more bytes or fewer. An error of the file is raised, and nothing was sent.

        With a `connection` to the database that its store is in, of SQLAlchemy, psycopg, sqlite3 or Django, the message
        is part of the transaction there: seen once that has committed, never if it is rolled back. The receipt has seq
        0 then, and `sync` means nothing.

        Raises StoreFullError and MessageTooLargeError (nothing was stored) and OutcomeUnknownError (send again with
        the same `message_id`), TransactionError for a connection to another database; TypeError and ValueError for a
        body that a codec does not take (no codec takes a file), and for headers with another `content_type` than its.
        """
        if persistent is not True:
            require_persistent(persistent)
        expires_at_ms = 0 if expires_in is None else expiry(expires_in)
        deliver_at_ms = 0 if deliver_in is None and deliver_at is None else due(deliver_in, deliver_at)
        registry, destination = self._registry, self.destination
        content: Any = body
        if self._codec is not None:
            content, headers = encode(self._codec, content, headers, destination)
        if group is not None:
            headers = in_group(headers, group)
        if connection is not None:
            if size is not None and size != len(plain_body(content)):
                raise ValueError(
                    f"the body has {len(plain_body(content))} bytes, and size says {size}; nothing was sent"
                )
            message = Outgoing(
                content, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms=deliver_at_ms
            )
            return self._send_within(connection, [message])[0]
        if type(content) is not bytes or size is not None:
            content = kept(registry, destination, content, size, persistent)
        removals = registry.gates.removals
        store = registry.by_destination.get(destination)
        if store is not None:
            try:  # what nearly always comes of it; `for_store` would take a send half a microsecond more
                receipt = store.send(
                    destination, content, headers, message_id, sync, priority, expires_at_ms, persistent, deliver_at_ms
                )
            except ClosedError:
                pass
            else:
                if registry.gates.removals != removals:
                    registry.record_again(destination)
                return receipt
        send: Callable[[Store], Receipt] = methodcaller(
            "send", destination, content, headers, message_id, sync, priority, expires_at_ms, persistent, deliver_at_ms
        )  # makes no cells, which each send would pay for
        return registry.for_store(destination, send)

    def _send_within(self, connection: Any, messages: Sequence[Outgoing | bytes]) -> list[Receipt]:
        registry, destination = self._registry, self.destination
        try:
            return registry.for_store(destination, lambda store: store.send_within(connection, destination, messages))
        except StoreFailedError as error:
            if registry.store_of(destination) is None:
                error.add_note(
                    f"The store of {destination} is to be made now, with its tables, from which SQLite keeps it while "
                    "your transaction has written: call declare() once, before you begin one."
                )
            raise

    def send_many(
        self, messages: Iterable[T | Outgoing[T] | Readable], sync: bool | None = None, *, connection: Any = None
    ) -> list[Receipt]:
        """Store many, in order, with one wait for the disk for each batch of them. Not atomic: a crash half way keeps a
        prefix; a transaction keeps all or none. With a `connection`, as `send`. If one cannot be encoded none is sent.
        An empty list makes no destination: `declare` makes an empty one."""
        if isinstance(messages, bytes | bytearray | memoryview | str | Outgoing) or not isinstance(messages, Iterable):
            raise TypeError(
                f"send_many takes a list of messages, or what else can be iterated, not {type(messages).__name__}; one "
                "message is sent by send()"
            )
        codec: Any = self._codec
        given = messages if codec is None else (encode_one(codec, one, self.destination) for one in messages)
        outgoing = cast("tuple[Outgoing | bytes, ...]", tuple(given))
        if not outgoing:
            self._registry.require_open()
            return []
        if connection is not None:
            return self._send_within(connection, outgoing)
        if plain_bodies(outgoing, 0, maxsize, maxsize)[0] < len(outgoing):
            outgoing = tuple(map(self._outgoing, outgoing))
        done: list[Receipt] = []  # of those that a store had stored before its destination moved to another one
        return self._registry.for_store(
            self.destination, lambda store: store.send_many(self.destination, outgoing[len(done) :], sync, done)
        )

    def _outgoing(self, message: Outgoing | bytes | Readable) -> Outgoing | bytes:
        """Return a message of many; a body that is a file is read by now."""
        if not isinstance(message, Outgoing):
            if not isinstance(message, Readable):
                return message
            message = Outgoing(message)
        require_persistent(message.persistent)
        if type(message.body) is bytes:
            return message
        return message._replace(body=kept(self._registry, self.destination, message.body, None, message.persistent))

    def send_nowait(
        self,
        body: T | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        *,
        priority: int = DEFAULT_PRIORITY,
        expires_in: float | None = None,
        persistent: bool = True,
        size: int | None = None,
        deliver_in: float | None = None,
        deliver_at: float | datetime | None = None,
        group: str | None = None,
    ) -> Future[Receipt]:
        """Send without waiting: the future resolves when `send` would have returned, on a thread of ours. If the store
        is not open, it is opened on such a thread too. The sends of one thread keep their order, with `send` as well. A
        body that is a file is read before this returns; a value that cannot be encoded is refused at once."""
        if persistent is not True:
            require_persistent(persistent)
        expires_at_ms = 0 if expires_in is None else expiry(expires_in)
        deliver_at_ms = 0 if deliver_in is deliver_at is None else due(deliver_in, deliver_at)
        registry, destination = self._registry, self.destination
        content: Any = body
        if self._codec is not None:
            content, headers = encode(self._codec, content, headers, self.destination)
        if group is not None:
            headers = in_group(headers, group)
        if type(content) is not bytes or size is not None:
            content = kept(registry, destination, content, size, persistent)
        removals, sent = registry.gates.removals, None
        store = registry.by_destination.get(destination)
        if store is not None:
            with suppress(ClosedError):
                sent = store.send_nowait(
                    destination, content, headers, message_id, sync, priority, expires_at_ms, persistent, deliver_at_ms
                )
        if sent is not None and registry.gates.removals == removals and type(sent) is not WaitingFuture:
            return sent
        content, headers, *_ = checked(
            content, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms=deliver_at_ms
        )
        send: Callable[[Store], Future[Receipt]] = methodcaller(
            "send_nowait", destination, content, headers, message_id, sync, priority, expires_at_ms, persistent,
            deliver_at_ms,
        )  # fmt: skip
        again = partial(registry.deferred.send, destination, send, store)
        return again() if sent is None else registry.deferred.known(destination, sent, removals, again)

    def declare(self) -> None:
        """Declare the destination: it is there, empty, over restarts (of a memory store: while it lives), until it is
        deleted. On return that survives a power failure, whatever its store's policy. Changes nothing where it is there
        already."""
        self._registry.for_store(self.destination, lambda store: store.declare(self.destination))

    def delete(self) -> int:
        """Remove the destination with all its messages, leased ones too, and its durable subscriptions; returns how
        many messages there were. Nothing of it is left behind; a store that was its own goes with it, if nobody waits
        there."""
        return self._registry.removal.delete(self.destination)


def kept(
    registry: StoreRegistry, destination: Destination, body: object, size: int | None, persistent: bool
) -> bytes | LargeBody:
    """Read a body that is not bytes, or whose size was said, into the store of a destination, once. A send may be tried
    again, and a file is at its end by then. Raises as Endpoint.send."""
    if isinstance(body, Message):  # which can be read, too
        raise TypeError(f"a message body is bytes, or a file to read them from, not a message: send {body!r}.content")
    given = body if size is None else Sized(body, size)
    if size is None and not isinstance(body, Readable):
        return body if isinstance(body, LargeBody) else plain_body(body)
    return registry.for_store(destination, lambda store: store.keep(given, persistent))


def due(deliver_in: float | None, deliver_at: float | datetime | None) -> int:
    """Return the time (ms) before which a message that is sent now is not delivered. 0: at once, also where that time
    is over already. Raises ValueError, TypeError, ClockError."""
    if deliver_in is not None and deliver_at is not None:
        raise ValueError(f"give deliver_in or deliver_at, not both: {deliver_in!r} and {deliver_at!r}")
    now = now_ms()
    if deliver_in is not None:
        ms = delay_ms(deliver_in, "deliver_in")
        return now + ms if ms else 0
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise ValueError(f"deliver_at has no time zone: {deliver_at!r}; use datetime.now(UTC), say")
        deliver_at = deliver_at.timestamp()
    if not isinstance(deliver_at, int | float) or isinstance(deliver_at, bool):
        raise TypeError(
            f"deliver_at is a datetime or a number of seconds since the epoch, not {type(deliver_at).__name__}: "
            f"{deliver_at!r}"
        )
    if not 0 <= deliver_at <= EXPIRES_MAX_MS / 1000 - 1:  # not so of nan either
        raise ValueError(f"deliver_at is a time from 1970 on, up to 2**63 ms after that, not {deliver_at!r}")
    at = -int(-deliver_at * 1000 // 1)
    return at if at > now else 0


def expiry(expires_in: float, name: str = "expires_in") -> int:
    """Return when a message or a value that is sent now expires. `name` is the parameter's. Raises ValueError,
    TypeError, ClockError."""
    if not isinstance(expires_in, int | float) or isinstance(expires_in, bool):
        raise TypeError(f"{name} is a number of seconds, not {type(expires_in).__name__}: {expires_in!r}")
    now = now_ms()
    if not 0 < expires_in <= (EXPIRES_MAX_MS - now) / 1000 - 1:  # not so of nan either
        raise ValueError(
            f"{name} is a number of seconds above 0, up to 2**63 ms from now, not {expires_in!r}; None is for ever"
        )
    return now + max(1, int(expires_in * 1000))
