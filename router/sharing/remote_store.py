"""The store of a shared directory as its clients see it: one, whichever store of the owner a destination lives in.

Queues, topics, maps, messages and transactions call it as they call any store (adapters/core/store.py, whose promises
hold); each call is a request to the owner.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final
from weakref import WeakValueDictionary

from ...adapters.core.messages import (
    DEFAULT_PRIORITY,
    Headers,
    LargeBody,
    Message,
    Outgoing,
    Readable,
    Reason,
    Receipt,
    checked,
    note_received,
    note_settled,
    plain_body,
    require_leased,
)
from ...adapters.core.record.headers import pack_headers
from ...adapters.core.record.keys import key_bytes
from ...adapters.core.record.large import Sized, not_as_said, read_bytes, require_size
from ...adapters.core.service.failures import Failure, failure_of
from ...adapters.core.service.listening import require_credit
from ...adapters.core.state.due import delay_ms
from ...adapters.core.state.leases import ACKED, CLAIMED, LEASED, LEAVING, REJECTED, RELEASED, ROLLED_BACK
from ...adapters.core.store_types import Change, Counts, Done, Settlement, Subscription, SubscriptionKey
from ...adapters.system.background import shared
from ...policies.errors import AnabranchError, ClosedError, TransactionError, UnknownMessageError, router_closed
from ...policies.names.destination import Destination
from ..upkeep.dead_letters import SWEEP_SECONDS
from .calls import PAGE, packed_subscription, subscription_of
from .connection import Connection
from .protocol import EVENTS, Op, unpack_error
from .session import consumer_key, destination_of

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a large body that go over at once."""
GONE: Final = "its queue or subscription was removed"
ENDS: Final = {Settlement.ACK: ACKED, Settlement.RELEASE: RELEASED, Settlement.REJECT: REJECTED}
"""How leases end that are settled by their tokens."""
NOT_SHARED: Final = (
    "cannot be given to a shared directory, whose owner is another process; open the directory without `shared`"
)


class RemoteLease:
    """The hold that this client has on a message."""

    __slots__ = (
        "__weakref__",
        "destination",
        "end",
        "hold",
        "kept",
        "key",
        "lost",
        "reason",
        "seconds",
        "seq",
        "store",
        "token",
    )

    def __init__(
        self,
        store: RemoteStore,
        token: str,
        destination: str,
        key: SubscriptionKey | None,
        seq: int,
        seconds: float | None,
    ) -> None:
        self.store = store
        self.token, self.destination, self.key, self.seq, self.seconds = token, destination, key, seq, seconds
        self.hold = LEASED
        self.kept = False
        """Somebody has its token."""
        self.end = ""
        """How it ended."""
        self.lost = False
        """Its holder did not end it."""
        self.reason: Failure | None = None
        """Why it is about to be given back."""

    def __del__(self) -> None:
        """Give it back if nobody has got its message: its caller was interrupted."""
        try:
            if self.hold == LEASED and not (self.kept or self.store.connection.is_closed or sys.is_finalizing()):
                self.store._settle_later([self.token], delivered=False)
        except AttributeError:
            pass  # the interpreter ends

    @property
    def is_settled(self) -> bool:
        """True if its holder has done with it, or a transaction has it."""
        return self.hold in (CLAIMED, LEAVING) and not self.lost


class RemoteBody(LargeBody):
    """A large body, which the owner keeps for this client as long as this object is there."""

    __slots__ = ("_bodies", "number", "size")

    def __init__(self, bodies: RemoteStore, size: int, number: int) -> None:
        self._bodies, self.size, self.number = bodies, size, number

    def open(self) -> BinaryIO:
        """Return a stream of the body."""
        return io.BufferedReader(_BodyStream(self._bodies, self), CHUNK_BYTES)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the body."""
        return self._bodies.ask(Op.CALL, "body_read", self.number, offset, size)  # type: ignore[no-any-return]

    @property
    def packed(self) -> list[int]:
        """Return the body as it goes over the socket."""
        return [self.size, self.number]

    def __len__(self) -> int:
        return 64

    def __del__(self) -> None:
        self._bodies.unused_bodies.append(self.number)


class _BodyStream(io.RawIOBase):
    def __init__(self, store: RemoteStore, body: RemoteBody) -> None:
        self._body: RemoteBody | None = body
        self._at = 0

    @property
    def _opened(self) -> RemoteBody:
        if self._body is None:
            raise ValueError("I/O operation on a closed file")
        return self._body

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._opened.size}[whence]
        if start + offset < 0:
            raise ValueError(f"negative seek position {start + offset}")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._body = None  # the owner need not keep it for this stream any more
        super().close()

    def readinto(self, buffer: Any) -> int:
        body = self._opened
        size = min(len(buffer), max(body.size - self._at, 0), CHUNK_BYTES)
        data = body.read(self._at, size) if size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Abandoned:
    """Messages that this client has received and let go of without settling them."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._tokens: deque[str] = deque()

    def note(self, message: Message[Any]) -> None:
        """Note a message that nobody holds any more. Any thread, with any lock."""
        lease, store = message._note, self._store
        if lease.kept or lease.hold != LEASED or store.connection.is_closed or sys.is_finalizing():
            return
        lease.hold = LEAVING
        if not self._tokens:
            self._tokens.append(lease.token)
            shared().schedule_while_alive(SWEEP_SECONDS, self.give_back)  # as an owner's own are
        else:
            self._tokens.append(lease.token)
        warnings.warn(
            f"{message!r} was received and let go of without ack, release or reject: it is free again, delivered once "
            "more; settle it, best with `with message:`, or keep its token",
            ResourceWarning, stacklevel=3, source=message,
        )  # fmt: skip

    def give_back(self) -> None:
        """Give back what was noted."""
        tokens = []
        while self._tokens:
            tokens.append(self._tokens.popleft())
        try:
            self._store.settle(tokens, Settlement.RELEASE)
        except AnabranchError as error:
            log.debug("messages that nobody holds could not be given back: %s", error)


class RemoteStore:
    """All stores of one owner. Threads: all."""

    volatile = shared = limited = False
    failed: BaseException | None = None
    store_id = bytes(16)

    def __init__(self, directory: Path, owner: object) -> None:
        self.name = directory.name
        self.directory = directory
        self.owner = owner
        self.connection: Connection
        self.abandoned = _Abandoned(self)
        self.maps = RemoteMaps(self)
        self._leases: WeakValueDictionary[str, RemoteLease] = WeakValueDictionary()
        """What this client holds, by token. One that nobody has is none: who was given it was interrupted."""
        self._kept: dict[str, RemoteLease] = {}
        """Those whose tokens somebody has."""
        self._listeners: dict[int, RemoteListener] = {}
        self._listener_numbers = iter(range(1, sys.maxsize))
        self.on_event: Callable[[list[Any]], None] = lambda packed: None
        """Called with each event of the owner's router that it was asked for."""
        self._standing: dict[tuple[Any, ...], None] = {}
        """Requests that each owner is to have been sent."""
        self.unused_bodies: deque[int] = deque()
        """Numbers of bodies that the owner need not keep for this client any more."""

    def connect(self, connection: Connection) -> None:
        """Take a connection."""
        self.connection = connection
        connection.on_push = self._pushed
        connection.on_reconnect = self._listen_again
        connection.on_fork = self._forked

    def close(self) -> None:
        """Close the connection: the owner gives back what is held. Idempotent."""
        if hasattr(self, "connection"):
            self.connection.close()
        while self._listeners:
            self._listeners.popitem()[1].end(router_closed())

    def held(self) -> list[list[Any]]:
        """Return what this client holds, for an owner that does not know."""
        return [[one.token, one.destination, one.key, one.seq, one.seconds] for one in list(self._leases.values())]

    def _forked(self) -> None:
        for lease in list(self._leases.values()):
            lease.hold, lease.end = LEAVING, "it is the parent process's"
        self._leases.clear()
        self._kept.clear()
        self._listeners.clear()
        self._standing.clear()
        self.unused_bodies.clear()

    def ask(
        self, *fields: Any, on_answer: Callable[[Any], Any] | None = None,
        on_late: Callable[[Any], object] | None = None,
    ) -> Any:  # fmt: skip
        """Ask the owner, and wait."""
        if self.unused_bodies:
            self._let_go_of_bodies()
        return self.connection.call(*fields, on_answer=on_answer, on_late=on_late)

    def _call(self, name: str, destination: Destination, *given: Any) -> Any:
        return self.ask(Op.CALL, name, str(destination), *given)

    # Sending

    def send(
        self,
        destination: Destination,
        body: bytes | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        persistent: bool = True,
        deliver_at_ms: int = 0,
    ) -> Receipt:
        """Send one message, as Store.send."""
        fields = self._fields(body, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms)
        seq, duplicate = self.ask(Op.SEND, str(destination), fields, bool(sync))
        return Receipt(destination, seq, duplicate and message_id is not None)

    def send_nowait(
        self,
        destination: Destination,
        body: bytes | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        persistent: bool = True,
        deliver_at_ms: int = 0,
    ) -> Future[Receipt]:
        """Send without waiting, as Store.send_nowait."""
        fields = self._fields(body, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms)
        known = message_id is not None
        return self.connection.call_nowait(
            Op.SEND, str(destination), fields, bool(sync),
            on_answer=lambda answer: Receipt(destination, answer[0], answer[1] and known),
        )  # fmt: skip

    def send_many(
        self,
        destination: Destination,
        messages: Iterable[Outgoing | bytes],
        sync: bool | None = None,
        done: list[Receipt] | None = None,
    ) -> list[Receipt]:
        """Send many, as Store.send_many: in one request for each part of so many bytes."""
        receipts = [] if done is None else done
        part: list[list[Any]] = []
        known: list[bool] = []
        size = 0
        for message in messages:
            outgoing = message if isinstance(message, Outgoing) else Outgoing(message)
            outgoing = checked(*outgoing)
            known.append(outgoing.message_id is not None)
            part.append(self._outgoing(outgoing))
            size += len(part[-1][0])
            if len(part) >= PAGE or size >= CHUNK_BYTES:
                receipts += self._send_part(destination, part, known, sync)
                part, known, size = [], [], 0
        return receipts + self._send_part(destination, part, known, sync) if part else receipts

    def _send_part(
        self, destination: Destination, part: list[list[Any]], known: list[bool], sync: bool | None
    ) -> list[Receipt]:
        answers = self.ask(Op.SEND_MANY, str(destination), part, bool(sync))
        return [
            Receipt(destination, seq, duplicate and is_known)
            for (seq, duplicate), is_known in zip(answers, known, strict=True)
        ]

    def _fields(
        self, body: Any, headers: Headers | None, message_id: str | None, priority: int, expires_at_ms: int,
        persistent: bool, deliver_at_ms: int,
    ) -> list[Any]:  # fmt: skip
        """Return a message that was given by its parts as it goes over the socket."""
        if isinstance(body, Sized):
            body = self.keep(body, persistent)
        return self._outgoing(
            checked(body, headers, message_id, priority, expires_at_ms, persistent, False, deliver_at_ms)
        )

    def _outgoing(self, message: Outgoing) -> list[Any]:
        """Return a message as it goes over the socket, with an id by which it can be sent again."""
        body: Any = message.body
        if type(body) is not bytes and type(body) is not RemoteBody:
            body = self.keep(body, message.persistent)
        if message.headers:
            pack_headers(message.headers)  # which says what is wrong with them
        name = message.message_id if message.message_id is not None else self.connection.new_id()
        return [body, message.headers, name, *message[3:]]

    def keep(self, body: object, persistent: bool = True) -> bytes | LargeBody:
        """Read a body into the owner's keeping, as Store.keep."""
        size = None
        if isinstance(body, Sized):
            body, size = body
            require_size(size)
        if isinstance(body, LargeBody):
            if size is not None and size != body.size:
                raise not_as_said(body.size, size)
            return body if isinstance(body, RemoteBody) else self.keep(body.open(), persistent)
        if isinstance(body, bytes | bytearray | memoryview) or not isinstance(body, Readable):
            plain = plain_body(body)
            if size is not None and size != len(plain):
                raise not_as_said(len(plain), size)
            return plain
        kept = RemoteBody(self, 0, self.ask(Op.CALL, "body_begin"))
        while data := read_bytes(body, CHUNK_BYTES if size is None else min(CHUNK_BYTES, size - kept.size + 1)):
            kept.size += len(data)
            if size is not None and kept.size > size:
                raise not_as_said(kept.size, size, "at least ")
            self.ask(Op.CALL, "body_more", kept.number, bytes(data))
        if size is not None and kept.size != size:
            raise not_as_said(kept.size, size)
        return kept

    def _let_go_of_bodies(self) -> None:
        numbers = []
        while self.unused_bodies:
            numbers.append(self.unused_bodies.popleft())
        self.connection.call(Op.CALL, "bodies_end", numbers)

    def send_within(self, connection: Any, destination: Destination, messages: Iterable[Outgoing | bytes]) -> Any:
        """Refuse: a database connection belongs to its process."""
        raise TransactionError(f"a connection {NOT_SHARED}")

    def declare(self, destination: Destination) -> None:
        """Declare a destination."""
        self._call("declare", destination)

    # Receiving

    def receive(
        self,
        destination: Destination,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
    ) -> Message | None:
        """Receive one message, as Store.receive."""
        messages = self.receive_many(destination, 1, timeout, subscription, lease)
        return messages[0] if messages else None

    def receive_many(
        self,
        destination: Destination,
        most: int,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
    ) -> list[Message]:
        """Receive many messages, as Store.receive_many."""
        messages: list[Message] = self.ask(
            Op.RECEIVE, str(destination), subscription, most, timeout, lease,
            on_answer=partial(self._received, lease), on_late=self._came_late,
        )  # fmt: skip
        return messages

    def receive_pattern(self, pattern: str, timeout: float | None, lease: float | None) -> Message | None:
        """Receive from many queues, as Router.receive."""
        messages = self.ask(
            Op.RECEIVE_PATTERN, pattern, timeout, lease,
            on_answer=partial(self._received, lease), on_late=self._came_late,
        )  # fmt: skip
        return messages[0] if messages else None

    def _received(self, seconds: float | None, answer: list[Any] | None) -> list[Message]:
        try:
            messages = [self._message(fields, seconds) for fields in answer or ()]
            for message in messages:
                note_received(message)
        except BaseException:
            self._came_late(answer)
            raise
        return messages

    def _came_late(self, answer: list[Any] | None) -> None:
        """Give back what has come for a caller that was interrupted."""
        if answer:
            self._settle_later([fields[0] for fields in answer], delivered=False)

    def _message(self, fields: list[Any], seconds: float | None = None) -> Message:
        token, seq, body, headers, name, timestamp_ms, priority, expires_at_ms, deliveries, lasts, text, key = fields
        subscription = consumer_key(key)
        lease = None
        if token is not None:
            lease = self._leases[token] = RemoteLease(self, token, text, subscription, seq, seconds)
        if type(body) is list:
            body = RemoteBody(self, *body)
        return Message(
            self, destination_of(text), seq, body, headers, name, timestamp_ms, lease is not None, lease, priority,
            expires_at_ms, deliveries, subscription, lasts,
        )  # fmt: skip

    def listen(
        self,
        destination: Destination,
        on_message: Callable[[Message], object],
        credit: int = 1,
        subscription: SubscriptionKey | None = None,
        on_end: Callable[[Exception], object] | None = None,
        lease: float | None = None,
    ) -> RemoteListener:
        """Listen, as Store.listen."""
        require_credit(credit)
        number = next(self._listener_numbers)
        listener = RemoteListener(self, number, (str(destination), subscription, lease), on_message, credit, on_end)
        self._listeners[number] = listener
        try:
            self.ask(Op.LISTEN, number, str(destination), subscription, credit, lease, credit)
        except BaseException:
            self._listeners.pop(number, None)
            raise
        self.connection.keep_reading()
        return listener

    def stand(self, request: tuple[Any, ...]) -> None:
        """Ask something of this owner, and of each that follows it."""
        self._standing[request] = None
        self.ask(*request)
        self.connection.keep_reading()

    def _listen_again(self) -> list[tuple[Any, ...]]:
        return [*self._standing] + [
            (Op.LISTEN, number, text, key, wanted, lease, granted)
            for number, one in list(self._listeners.items())
            for text, key, lease in [one.place]
            for wanted, granted in [one.credit()]
        ]

    def _pushed(self, number: int, messages: list[Any] | None, error: list[Any] | None) -> None:
        if number == EVENTS:
            self.on_event(messages or [])
            return
        listener = self._listeners.get(number)
        if error is not None:
            if listener is not None:
                self._listeners.pop(number, None)
                listener.end(unpack_error(error))
            return
        received = [self._message(fields, listener.place[2] if listener else None) for fields in messages or ()]
        if listener is not None:
            listener.take(received)
        else:  # it was closed meanwhile: as if nobody had held them
            self._settle_later([one._note.token for one in received], delivered=False)

    def _settle_later(self, tokens: list[str], delivered: bool) -> None:
        """Give leases back without waiting, from the thread that reads."""
        shared().lead(lambda: self._quietly(tokens, delivered))

    def _quietly(self, tokens: list[str], delivered: bool) -> None:
        """Give leases back that nobody has seen."""
        for token in tokens:
            self._ended(token, RELEASED)
        try:
            self.ask(Op.SETTLE, tokens, Settlement.RELEASE.value, None, delivered, None)
        except AnabranchError as error:
            log.debug("messages could not be given back: %s", error)

    def unlisten(self, listener: RemoteListener) -> None:
        """End a listener. What it is given comes before the answer."""
        if listener.number in self._listeners:
            with suppress(ClosedError):
                self.ask(Op.UNLISTEN, listener.number)
            self._listeners.pop(listener.number, None)

    def add_credit(self, listener: RemoteListener, granted: int) -> None:
        """Let the owner give a listener so many messages in all."""
        with suppress(ClosedError):
            self.ask(Op.CREDIT, listener.number, granted)

    # Settling

    def _take(
        self, messages: Sequence[Message[Any]], hold: int, next_hold: int, leases: list[RemoteLease] | None = None
    ) -> list[RemoteLease]:
        """Move the leases of messages that are held so, all or none, and add them to a list: interrupted from there on,
        whoever has that moves them back. Raises UnknownMessageError."""
        if self.connection.is_closed:
            raise router_closed()
        leases = [] if leases is None else leases
        for message in messages:
            lease = message._note
            if not isinstance(lease, RemoteLease) or lease.hold != hold:  # also one that is named twice
                for taken in leases:
                    taken.hold = hold
                raise _not_held(message)
            leases.append(lease)
            lease.hold = next_hold
        return leases

    def _ended(self, token: str, end: str, lost: bool = False) -> None:
        lease = self._leases.pop(token, None)
        self._kept.pop(token, None)
        if lease is not None:
            lease.hold, lease.end, lease.lost = LEAVING, end, lost

    def _lost(self, message: Message[Any], error: UnknownMessageError) -> None:
        """Note that a message is not held any more, as the owner says; what it says of a token is said of it."""
        token = message._note.token
        text = str(error).replace(f"the message of token {token}", repr(message))
        if text != str(error):
            self._ended(token, text.rpartition(_NOT_HELD)[2], lost=True)
            error.args = (text,)

    def _finished(
        self, messages: Sequence[Message[Any]], leases: list[RemoteLease], hold: int, end: str, answer: list[Any] | None
    ) -> None:
        """Note what has become of leases, all of which were to end so. Raises the first error."""
        wrong = [None if one is None else unpack_error(one) for one in answer or [None] * len(leases)]
        for lease, error, message in zip(leases, wrong, messages, strict=True):
            if error is None:
                self._ended(lease.token, end)
            elif isinstance(error, UnknownMessageError):
                self._lost(message, error)
            else:
                lease.hold = hold
        note_settled(message for message, error in zip(messages, wrong, strict=True) if error is None)
        first = next((error for error in wrong if error is not None), None)
        if first is not None:
            raise first

    def _settled(self, messages: Sequence[Message[Any]], hold: int, end: str, *request: Any) -> None:
        """Settle messages that are held so by a request, which has their tokens behind its op."""
        leases: list[RemoteLease] = []
        op, *rest = request
        try:
            self._take(messages, hold, LEAVING, leases)
            answer = self.ask(op, [lease.token for lease in leases], *rest)
        except BaseException as error:
            for lease in leases:
                lease.hold = hold
            if isinstance(error, UnknownMessageError) and len(leases) == len(messages):
                for message in messages:
                    self._lost(message, error)
            raise
        self._finished(messages, leases, hold, end, answer)

    def ack(self, messages: Sequence[Message[Any]]) -> None:
        """Ack messages, as Store.ack."""
        if messages:
            self._settled(messages, LEASED, ACKED, Op.ACK)

    def ack_nowait(self, messages: Sequence[Message[Any]]) -> Future[None]:
        """Ack messages without waiting, as Store.ack_nowait."""
        return self._settled_nowait(list(messages), ACKED, Op.ACK)

    def _settled_nowait(self, messages: list[Message[Any]], end: str, *request: Any) -> Future[None]:
        leases: list[RemoteLease] = []
        op, *rest = request
        done = partial(self._finished, messages, leases, LEASED, end)
        try:
            self._take(messages, LEASED, LEAVING, leases)
            return self.connection.call_nowait(op, [lease.token for lease in leases], *rest, on_answer=done)
        except BaseException:
            for lease in leases:
                lease.hold = LEASED
            raise

    def ack_within(self, connection: Any, messages: Sequence[Message[Any]]) -> None:
        """Refuse: a database connection belongs to its process."""
        raise TransactionError(f"a connection {NOT_SHARED}")

    def release(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Give messages back, as Store.release."""
        if reason is not None:
            self.note_failure(messages, reason)
        self.delay_ms(delay)
        self._give_back(messages, LEASED, delivered, delay)

    def _give_back(self, messages: Sequence[Message[Any]], hold: int, delivered: bool, delay: float | None) -> None:
        if messages:
            end = RELEASED if hold == LEASED else ROLLED_BACK
            self._settled(messages, hold, end, *self._release_of(messages, delivered, delay))

    @staticmethod
    def _release_of(messages: Sequence[Message[Any]], delivered: bool, delay: float | None) -> tuple[Any, ...]:
        note = messages[0]._note
        reason = note.reason if isinstance(note, RemoteLease) else None
        return Op.SETTLE, Settlement.RELEASE.value, reason, delivered, delay, True

    def release_nowait(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[None]:
        """Give messages back without waiting, as Store.release_nowait."""
        if reason is not None:
            self.note_failure(messages, reason)
        self.delay_ms(delay)
        return self._settled_nowait(list(messages), RELEASED, *self._release_of(messages, delivered, delay))

    def reject(self, message: Message[Any], reason: Reason) -> None:
        """Put a message into its dead-letter queue, as Router.reject."""
        failure = failure_of(reason)
        self._settled([message], LEASED, REJECTED, Op.SETTLE, Settlement.REJECT.value, failure, True, None)

    def extend(self, message: Message[Any], seconds: float | None = None) -> None:
        """Lease a message for longer, as Store.extend."""
        lease = message._note
        if not isinstance(lease, RemoteLease) or lease.hold != LEASED:
            raise _not_held(message)
        try:
            self.ask(Op.EXTEND, lease.token, seconds)
        except UnknownMessageError as error:
            self._lost(message, error)
            raise
        if seconds is not None:
            lease.seconds = seconds

    def claim(self, message: Message[Any]) -> None:
        """Claim a message for a transaction of this client."""
        self._take([message], LEASED, CLAIMED)

    def unclaim(self, messages: Sequence[Message[Any]], delivered: bool = True, delay: float | None = None) -> None:
        """Give back what a transaction held."""
        self._give_back(messages, CLAIMED, delivered, delay)

    def token(self, message: Message[Any]) -> str:
        """Return the token of a leased message."""
        lease = message._note
        if not isinstance(lease, RemoteLease) or lease.token not in self._leases:
            raise _not_held(message)
        lease.kept = True
        self._kept[lease.token] = lease
        return lease.token

    def settle(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None,
        reason: Reason | None = None,
    ) -> list[AnabranchError | None]:  # fmt: skip
        """Settle messages by their tokens, as Store.settle; also rejects them."""
        failure = None if reason is None else failure_of(reason)
        given = list(tokens)
        asked = self._unclaimed(given)
        return self._ends_of(how, given, asked, self.ask(Op.SETTLE, asked, how.value, failure, delivered, delay))

    def _unclaimed(self, tokens: list[str]) -> list[str]:
        """Return those of tokens that no transaction of this client has. Raises TypeError for what is no str."""
        for one in tokens:
            if not isinstance(one, str):
                raise TypeError(f"a token is a str, not {type(one).__name__}: {one!r}")
        return [one for one in tokens if one not in self._leases or self._leases[one].hold != CLAIMED]

    def settle_nowait(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[list[AnabranchError | None]]:  # fmt: skip
        """Settle messages by their tokens without waiting."""
        failure = None if reason is None else failure_of(reason)
        given = list(tokens)
        asked = self._unclaimed(given)
        return self.connection.call_nowait(
            Op.SETTLE, asked, how.value, failure, delivered, delay, on_answer=partial(self._ends_of, how, given, asked)
        )

    def _ends_of(
        self, how: Settlement, tokens: list[str], asked: list[str], answer: list[Any] | None
    ) -> list[AnabranchError | None]:  # fmt: skip
        """Note what has become of leases by their tokens; returns what was wrong with each. Those that were not asked
        for are claimed."""
        wrong: list[Any] = [None if one is None else unpack_error(one) for one in answer or [None] * len(asked)]
        for token, error in zip(asked, wrong, strict=True):
            if error is None:
                self._ended(token, ENDS[how])
            elif isinstance(error, UnknownMessageError):
                self._ended(token, str(error).rpartition(_NOT_HELD)[2], lost=True)
        if len(asked) < len(tokens):
            left = iter(wrong)
            unclaimed = set(asked)
            wrong = [next(left) if token in unclaimed else _claimed(token) for token in tokens]
        return wrong

    def delay_ms(self, delay: float | None) -> int | None:
        """Return a delay in milliseconds. Raises TypeError, ValueError."""
        return None if delay is None else delay_ms(delay)

    def note_failure(self, messages: Sequence[Message[Any]], reason: Reason) -> None:
        """Note why messages are about to be given back."""
        failure = failure_of(reason)
        for message in messages:
            if isinstance(message._note, RemoteLease):
                message._note.reason = failure

    def note_rejected(self, message: Message[Any]) -> None:
        """Do nothing: the owner knows."""

    def tell_spent(self, messages: Sequence[Message[Any]]) -> None:
        """Do nothing: the owner sees it."""

    def count_expired(self, messages: Iterable[Message[Any]]) -> None:
        """Do nothing: the owner counts them."""

    def give_back(self, lease: Any) -> None:
        """Give back what is leased so."""
        self._settle_later([lease.token], delivered=False)

    # Looking

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        """Look at messages, as Store.browse: a page at a time."""
        left = sys.maxsize if limit is None else limit
        while left > 0:
            behind = [after.seq, after.priority] if isinstance(after, Message) else after
            page = self.ask(Op.BROWSE, str(destination), subscription, min(left, PAGE), behind)
            for fields in page:
                after = self._message(fields)
                left -= 1
                yield after
            if not page:
                return

    def find(self, destination: Destination, message_id: str) -> Message | None:
        """Look at the message of an id."""
        fields = self._call("find", destination, message_id)
        return None if fields is None else self._message(fields)

    def open_body(self, message: Message[Any]) -> BinaryIO:
        """Open a message's body."""
        content = message.content
        return io.BytesIO(content) if isinstance(content, bytes) else content.open()

    def large_body(self, reference: bytes) -> Any:
        """Refuse: references are the owner's."""
        raise AssertionError("a client knows no references of bodies")

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Return how many messages are held."""
        return int(self._call("depth", destination, subscription))

    def counts(self, destination: Destination, subscription: SubscriptionKey | None = None) -> Counts:
        """Return the numbers of messages."""
        answer = self._call("counts", destination, subscription)
        if answer is None:
            return Counts(0, 0)
        *numbers, oldest = answer
        counts = Counts(*numbers)
        counts.oldest_ready_seconds = oldest
        return counts

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Remove what nobody holds."""
        return int(self._call("purge", destination, subscription))

    def delete(self, destination: Destination) -> int:
        """Remove a destination; returns how many messages it had."""
        count = int(self._call("delete", destination))
        self._gone(destination)
        return count

    def _gone(self, destination: Destination, key: SubscriptionKey | None = None) -> None:
        """Note that nothing is left of what this client held of a destination, or for a subscription."""
        for lease in list(self._leases.values()):
            if lease.destination == str(destination) and key in (None, lease.key):
                self._ended(lease.token, GONE)

    # Subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        """Begin a durable subscription."""
        return bool(self.ask(Op.CALL, "subscribe", packed_subscription(subscription), retroactive))

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        """End a durable subscription."""
        count = int(self._call("unsubscribe", topic, subscription))
        self._gone(topic, subscription)
        return count

    def subscriptions_of(self, topic: Destination) -> list[Subscription]:
        """Return the subscriptions of a topic."""
        return [subscription_of(one) for one in self._call("subscriptions_of", topic)]

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        """Commit a whole transaction, as Store.commit."""
        leases: list[RemoteLease] = []
        try:
            self._take(acks, CLAIMED, LEAVING, leases)
            answer = self.commit_as(sends, acks, changes, None, "commit")
        except BaseException:
            for lease in leases:
                lease.hold = CLAIMED
            raise
        self.settled(acks)
        return _receipts(answer, sends)

    def commit_as(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        changes: Sequence[Change],
        xid: list[Any] | None,
        mode: str,
    ) -> list[Any]:
        """Send a whole transaction, to be committed, prepared under its xid, or to vote."""
        answer: list[Any] = self.ask(
            Op.COMMIT, False, xid, mode,
            [[str(destination), self._outgoing(checked(*message))] for destination, message in sends],
            [message._note.token for message in acks],
            [[packed_subscription(one.subscription), one.subscribe, one.retroactive] for one in changes],
        )  # fmt: skip
        return answer

    def end_vote(
        self, number: int, commit: bool, acks: Sequence[Message], sends: Sequence[tuple[Destination, Outgoing]]
    ) -> list[Receipt]:
        """Say the outcome of a transaction that has voted."""
        answer = self.ask(Op.CALL, "end_vote", number, commit, [message._note.token for message in acks])
        for message in acks:
            self._ended(message._note.token, ACKED if commit else ROLLED_BACK)
        note_settled(acks)
        return _receipts(answer, sends)

    def settled(self, acks: Sequence[Message]) -> None:
        """Note that a transaction has these messages for good."""
        for message in acks:
            self._ended(message._note.token, ACKED)
        note_settled(acks)

    def prepared(self, acks: Sequence[Message]) -> list[RemoteLease]:
        """Note that a transaction has these messages until its manager decides; returns what stands for them."""
        leases = [self._leases.pop(message._note.token) for message in acks]
        note_settled(acks)
        return leases

    def rollback_prepared(self, transaction: bytes) -> Done[bool]:
        """Return that nothing of that name is prepared by this client."""
        return Done(False)


_NOT_HELD: Final = " is not leased here any more: "


def _not_held(message: Message[Any]) -> UnknownMessageError:
    """Return the error of a message that this client does not hold so."""
    lease = message._note
    if not isinstance(lease, RemoteLease):
        require_leased(message)
        return UnknownMessageError(f"{message!r} was received from another router; ack it there")
    claimed = "a transaction has claimed it, or acked it" if lease.hold == CLAIMED else "it is just being settled"
    return UnknownMessageError(f"{message!r}{_NOT_HELD}{lease.end or claimed}")


def _claimed(token: str) -> UnknownMessageError:
    return UnknownMessageError(f"the message of token {token}{_NOT_HELD}a transaction has claimed it")


def _receipts(answer: list[Any], sends: Sequence[tuple[Destination, Outgoing]]) -> list[Receipt]:
    return [
        Receipt(destination_of(text), seq, duplicate and message.message_id is not None)
        for (text, seq, duplicate), (_, message) in zip(answer, sends, strict=False)
    ]


class RemoteMaps:
    """The values of maps, as their clients see them (core/engine/hooks.py's KeyedValues)."""

    def __init__(self, store: RemoteStore) -> None:
        self._ask = store._call

    def _call(self, name: str, destination: Destination, key: str, *given: Any) -> Any:
        key_bytes(key)
        return self._ask(name, destination, key, *given)

    def get(self, destination: Destination, key: str) -> bytes | None:
        """Return the value of a key."""
        return self._call("map_get", destination, key)  # type: ignore[no-any-return]

    def count(self, destination: Destination) -> int:
        """Return how many keys have a value."""
        return int(self._ask("map_count", destination))

    def items(
        self, destination: Destination, prefix: str = "", after: str | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield keys and values, a page at a time."""
        while page := self._ask("map_items", destination, prefix, after):
            for key, body in page:
                after = key
                yield key, body

    def wait(self, destination: Destination, key: str, timeout: float | None) -> bytes | None:
        """Return the value of a key once it has one."""
        return self._call("map_wait", destination, key, timeout)  # type: ignore[no-any-return]

    def put(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool | None = None
    ) -> None:
        """Give a key a value."""
        self._call("map_put", destination, key, value, expires_at_ms, sync)

    def put_if_absent(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool = False
    ) -> bytes | None:
        """Put a value unless the key has one."""
        answer: bytes | None = self._call("map_put_if_absent", destination, key, value, expires_at_ms, sync)
        return answer

    def compare_and_set(
        self, destination: Destination, key: str, expected: bytes | None, value: bytes | None,
        expires_at_ms: int = 0, sync: bool = False,
    ) -> bool:  # fmt: skip
        """Put a value if the key has the expected one."""
        return bool(self._call("map_compare_and_set", destination, key, expected, value, expires_at_ms, sync))

    def pop(self, destination: Destination, key: str, sync: bool = False) -> bytes | None:
        """Remove a key."""
        answer: bytes | None = self._call("map_pop", destination, key, sync)
        return answer

    def increment(
        self, destination: Destination, key: str, by: int = 1, expires_at_ms: int = 0, sync: bool = False
    ) -> int:
        """Add to the number of a key."""
        added = str(by) if type(by) is int else by  # of any size
        return int(self._call("map_increment", destination, key, [added], expires_at_ms, sync))


class RemoteListener:
    """A listener of a client: its callback runs on a thread of the library, one message at a time, in order."""

    def __init__(
        self,
        store: RemoteStore,
        number: int,
        place: tuple[str, SubscriptionKey | None, float | None],
        on_message: Callable[[Message], object],
        credit: int,
        on_end: Callable[[Exception], object] | None,
    ) -> None:
        self._store, self.number, self.place = store, number, place
        self._on_message, self._on_end = on_message, on_end
        self.wanted = credit
        """How many messages the owner may still give it."""
        self._granted = credit
        """How many it could give it since the beginning."""
        self._lock = threading.RLock()
        self._messages: deque[Message] = deque()
        self._runs = self._calling = self._over = False
        self._error: Exception | None = None

    def add_credit(self, more: int) -> None:
        """Ask for more messages."""
        require_credit(more)
        with self._lock:
            self.wanted += more
            self._granted += more
            granted = self._granted
        self._store.add_credit(self, granted)

    def credit(self) -> tuple[int, int]:
        """Return how many messages the owner may still give it, and how many since the beginning."""
        with self._lock:
            return self.wanted, self._granted

    def close(self) -> bool:
        """End it; returns whether a callback runs."""
        with self._lock:
            self._over = True
            calling = self._calling
        self._store.unlisten(self)
        with self._lock:
            left = [message._note.token for message in self._messages]
            self._messages.clear()
        if left:
            self._store._quietly(left, delivered=False)
        return calling

    def take(self, messages: list[Message]) -> None:
        """Take messages that have come. By the thread that reads."""
        with self._lock:
            self.wanted -= len(messages)
            self._messages += messages
            if not self._over:
                self._run()

    def end(self, error: Exception) -> None:
        """End it: the owner has."""
        with self._lock:
            self._error = error
            self._run()

    def _run(self) -> None:
        if not self._runs:
            self._runs = True
            shared().lead(self._call_all)

    def _call_all(self) -> None:
        while True:
            with self._lock:
                if not self._messages or self._over:
                    self._runs = False
                    break
                message = self._messages.popleft()
                self._calling = True
            note_received(message)
            try:
                self._on_message(message)
            except BaseException as error:
                log.exception("who listens to %s raised an error; its message is free again", self.place[0])
                try:
                    message.release(reason=error)
                except AnabranchError as wrong:
                    log.debug("it could not be given back: %s", wrong)
            finally:
                self._calling = False
            del message
        error_of_end = self._error
        if error_of_end is not None and not self._over:
            self._over = True
            if self._on_end is not None:
                try:
                    self._on_end(error_of_end)
                except BaseException:
                    log.exception("who listens to %s raised an error when told of the end", self.place[0])
