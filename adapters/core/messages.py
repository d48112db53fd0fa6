"""Messages, on their way in and on their way out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import MemberDescriptorType, TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    Self,
    TypeGuard,
    TypeVar,
    cast,
    runtime_checkable,
)

from ...policies.errors import (
    AnabranchError,
    DeadLetterError,
    LargeMessageError,
    MessageTooLargeError,
    UnknownMessageError,
)
from ...policies.names.destination import Destination
from ..system.background import shared

if TYPE_CHECKING:
    import typing_extensions

    from .store_types import SubscriptionKey

    T = typing_extensions.TypeVar("T", default=bytes)
    T_co = typing_extensions.TypeVar("T_co", default=bytes, covariant=True)
else:
    T, T_co = TypeVar("T"), TypeVar("T_co", covariant=True)
"""What a body is: bytes where nobody says otherwise."""

HeaderValue = str | int | float | bool | bytes | None | Sequence["HeaderValue"] | Mapping[str, "HeaderValue"]
"""Plain, or lists and maps of such, as JSON nests them; a tuple comes back as a list."""
Headers = Mapping[str, HeaderValue]
"""The headers that a sender may attach to a message: names to values."""
NESTED_MAX: Final = 64
"""How deep lists and maps may nest in a header."""


PRIORITY_MAX: Final = (1 << 16) - 1
DEFAULT_PRIORITY: Final = 4
EXPIRES_MAX_MS: Final = (1 << 63) - 1
_NEVER: Final = 0

_new = tuple.__new__


@runtime_checkable
class Readable(Protocol):
    """A source that a body is read from: a file opened for reading bytes, a pipe, a socket's file."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes, or fewer; none at the end."""


class LargeBody:
    """A body of any size, which a store keeps apart from its message: `Message.content`. It can be sent on as it is. It
    is there as long as this object is, though its message is acked meanwhile."""

    __slots__ = ()

    size: int
    """The size of the body, in bytes."""

    def open(self) -> BinaryIO:
        """Return a stream of its bytes, which can seek. Raises ClosedError once its store is closed."""
        raise AssertionError("a store keeps bodies of a class of its own")

    def __len__(self) -> int:
        """Return how many bytes of memory the body's message takes, which is what a transaction counts."""
        raise AssertionError("likewise")


class Outgoing(NamedTuple, Generic[T]):
    """A message to be sent."""

    body: T | Readable | LargeBody
    headers: Headers | None = None
    message_id: str | None = None
    priority: int = DEFAULT_PRIORITY
    """0 to 65,535, the highest first where its store orders by priority; elsewhere it is kept and handed back."""
    expires_at_ms: int = 0
    """When it is no longer to be delivered, in milliseconds since the epoch by the wall clock; 0: never."""
    persistent: bool = True
    """False: memory alone, gone when its store is closed."""
    requeued: bool = False
    """True: a dead letter that goes back where it came from. It is stored even if its `message_id` is in the duplicate
    window, which from then on knows the id as this message's."""
    deliver_at_ms: int = 0
    """Before that nobody receives it, in milliseconds since the epoch by the wall clock; 0: at once."""
    group: str | None = None
    """While a message of this group is leased no other of the group is received. It is stored as the header GROUP."""


GROUP: Final = "message_group"
"""The header that names a message's group."""
GROUP_BYTES_MAX: Final = 1024

_PLAIN: Final = frozenset((str, int, float, bool, bytes, type(None)))


def plain_body(body: object) -> bytes:
    """Return the body as bytes of its own. Raises TypeError."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    step = "open it for reading bytes" if isinstance(body, os.PathLike) else "encode it first"
    raise TypeError(f"a message body is bytes, or a file to read them from, not {type(body).__name__}; {step}")


def _is_kept_apart(body: object) -> TypeGuard[Readable | LargeBody]:
    """Return whether a store keeps a body apart, or reads it from a file and checks it there."""
    return isinstance(body, LargeBody | Readable)


def plain_headers(headers: Headers) -> dict[str, Any]:
    """Return the headers as a dict of their own. Raises TypeError for what is not plain, ValueError for what nests too
    deep."""
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers map names to plain values; found {type(headers).__name__}")
    plain = {}
    for name, value in headers.items():
        if type(name) is not str or type(value) not in _PLAIN:
            name, value = _plain_name(name, value), _plain_value(name, value, 1)
        plain[name] = value
    if GROUP in plain:
        _require_group(plain[GROUP])
    return plain


def in_group(headers: Headers | None, group: str) -> dict[str, Any]:
    """Return the headers of a message of this group. Raises TypeError, and ValueError, also for headers that name
    another group."""
    plain = plain_headers(headers) if headers else {}
    if plain.setdefault(GROUP, group) != group:
        raise ValueError(f"the header {GROUP} is {plain[GROUP]!r}, and group is {group!r}; leave one of them out")
    _require_group(group)
    return plain


def _require_group(group: object) -> None:
    if not isinstance(group, str):
        raise TypeError(f"a group (the header {GROUP}) is a str, not {type(group).__name__}: {group!r}")
    size = len(encoded_text(group, "group"))
    if not 0 < size <= GROUP_BYTES_MAX:
        raise ValueError(f"the group {group[:40]!r} takes {size} bytes; 1 to {GROUP_BYTES_MAX} are allowed")


def _plain_name(name: object, value: object) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    raise _not_plain(name, value)


def _plain_value(name: object, value: object, depth: int) -> Any:
    """Return a value of derived types (an IntEnum, say) as the plain one that it comes back as; nested ones copied."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return bytes(value)
    if depth > NESTED_MAX:
        raise ValueError(f"header {str(name)[:40]!r} nests deeper than {NESTED_MAX} lists and maps")
    if isinstance(value, Mapping):
        return {_plain_name(key, one): _plain_value(name, one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(name, one, depth + 1) for one in value]
    raise _not_plain(name, value)


def _not_plain(name: object, value: object) -> TypeError:
    return TypeError(
        f"header {name!r}: {value!r} is not plain: names are str, values str, int, float, bool, bytes, None, or lists "
        "and maps of these"
    )


MADE: Final = "\0"
"""The character that ids made by the library begin with. Nobody is shown such an id, and no caller may send one."""


class MadeId(str):
    """An id that begins with MADE. By it a message that came without an id is stored once, if it comes again."""

    __slots__ = ()


def shown_id(name: bytes) -> str | None:
    """Return a message id as its receiver sees it: None for one that the library has made. Raises ValueError."""
    return name.decode() if name and name[0] else None


def encoded_id(message_id: object) -> bytes:
    """Return a message id as it is stored. Raises TypeError, and ValueError for what is not valid unicode, or begins as
    the library's own do."""
    if not isinstance(message_id, str):
        raise TypeError(f"a message_id is a str, not {type(message_id).__name__}: {message_id!r}")
    if message_id.startswith(MADE) and type(message_id) is not MadeId:
        raise ValueError(f"message_id {message_id[:40]!r} begins with {MADE!r}, as only ids made by the library do")
    return encoded_text(message_id, "message_id")


def encoded_text(text: str, what: str) -> bytes:
    """Return text in UTF-8. Raises ValueError for what is not valid unicode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {text[:40]!r} is not valid unicode: {error.reason}") from None


def checked(
    body: object,
    headers: Headers | None,
    message_id: str | None,
    priority: int = DEFAULT_PRIORITY,
    expires_at_ms: int = 0,
    persistent: bool = True,
    requeued: bool = False,
    deliver_at_ms: int = 0,
    group: str | None = None,
) -> Outgoing:
    """Return a message that is sent later: copied, and refused now if its types are wrong. Raises TypeError,
    ValueError."""
    if message_id is not None:
        encoded_id(message_id)
    if priority is not DEFAULT_PRIORITY or expires_at_ms is not _NEVER:
        require_order(priority, expires_at_ms)
    if deliver_at_ms:
        require_time("deliver_at_ms", deliver_at_ms)
    plain = in_group(headers, group) if group is not None else plain_headers(headers) if headers else None
    if type(body) is not bytes and not _is_kept_apart(body):
        body = plain_body(body)
    if persistent is not True:
        require_persistent(persistent)
    fields = (body, plain, message_id, priority, expires_at_ms, persistent, requeued, deliver_at_ms, None)
    return _new(Outgoing, fields)  # as its own, less a call


def require_persistent(persistent: object) -> None:
    """Raise TypeError for what is neither True nor False: None, say, with which a message would not be kept."""
    if persistent is not True and persistent is not False:
        raise TypeError(f"persistent is True or False, not {type(persistent).__name__}: {persistent!r}")


def require_order(priority: object, expires_at_ms: object) -> None:
    """Raise TypeError or ValueError for what is no priority or no time."""
    for what, value, most in (
        ("priority", priority, PRIORITY_MAX),
        ("expires_at_ms", expires_at_ms, EXPIRES_MAX_MS),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{what} is an int, not {type(value).__name__}: {value!r}")
        if not 0 <= value <= most:
            raise ValueError(f"{what} {value} is not between 0 and {most}")


def require_time(what: str, value: object) -> None:
    """Raise TypeError or ValueError for what is no time in milliseconds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} is an int, not {type(value).__name__}: {value!r}")
    if not 0 <= value <= EXPIRES_MAX_MS:
        raise ValueError(f"{what} {value} is not between 0 and {EXPIRES_MAX_MS}")


DROPPED: Final = -1


class Receipt(NamedTuple):
    """The result of a send."""

    destination: Destination
    seq: int
    """The message's place in its store's order, and its name there for life (rule I2). -1: it was dropped."""
    duplicate: bool = False
    """Its `message_id` was in the duplicate window: `seq` is that of the message already stored."""

    @property
    def dropped(self) -> bool:
        """Return whether the message was not stored, for want of room, as `when_full: drop_new` says. Its `seq` is
        -1."""
        return self.seq == DROPPED

    def __repr__(self) -> str:
        shown = f"Receipt(destination={self.destination!r}, seq={self.seq}, duplicate={self.duplicate}"
        return f"{shown}, dropped=True)" if self.dropped else f"{shown})"


EXPIRED: Final = "expired"
"""Its time is over."""
DELIVERY_LIMIT: Final = "delivery_limit"
"""The reason of a message that was given back as often as `max_deliveries` says."""
REJECTED: Final = "rejected"
"""Its receiver has rejected it, and said no reason of its own."""


Reason = str | BaseException
"""Why a message is given back, or rejected."""


class MessageStore(Protocol):
    """The store that a message lies in, as its holders need it. Each method does as Store's of that name."""

    name: str
    directory: Path
    store_id: bytes

    @property
    def owner(self) -> object:
        """Whoever has opened it: a router, or nobody."""

    def open_body(self, message: Message[Any]) -> BinaryIO:
        """Return a stream of its body."""

    def large_body(self, reference: bytes) -> Any:
        """Return the body that a record refers to."""

    def ack(self, messages: Sequence[Message[Any]]) -> None:
        """Remove them for good."""

    def ack_nowait(self, messages: Sequence[Message[Any]]) -> Future[None]:
        """Remove them soon."""

    def ack_within(self, connection: Any, messages: Sequence[Message[Any]]) -> None:
        """Remove them once the transaction on the connection has committed."""

    def release(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Give them back."""

    def release_nowait(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[None]:
        """Give them back soon."""

    def extend(self, message: Message[Any], seconds: float | None = None) -> None:
        """Lease it for longer."""

    def token(self, message: Message[Any]) -> str:
        """Return what somebody else may settle it by."""

    def claim(self, message: Message[Any]) -> None:
        """Hold it for a transaction."""

    def unclaim(self, messages: Sequence[Message[Any]], delivered: bool = True, delay: float | None = None) -> None:
        """Give back what a transaction held."""

    def delay_ms(self, delay: float | None) -> int | None:
        """Return a delay in milliseconds, if the store can wait."""

    def note_failure(self, messages: Sequence[Message[Any]], reason: Reason) -> None:
        """Remember why they were given back."""

    def note_rejected(self, message: Message[Any]) -> None:
        """Remember that its holder rejected it."""

    def tell_spent(self, messages: Sequence[Message[Any]]) -> None:
        """Tell the owner of those that were given back for the last time."""

    def count_expired(self, messages: Iterable[Message[Any]]) -> None:
        """Count them as expired."""

    @property
    def abandoned(self) -> Any:
        """Its messages that nobody holds any more (engine/abandoned.py)."""

    def give_back(self, lease: Any) -> None:
        """Give back what is leased so, which its holder has never seen."""


@runtime_checkable
class Rejecting(Protocol):
    """A store's owner, which knows where its dead letters go."""

    def reject(self, message: Message[Any], reason: Reason) -> None:
        """Reject a message, as Message.reject."""

    def _spent(self, store: MessageStore) -> None:
        """Hear that messages of a store have just been given back for the last time: they become dead letters soon. The
        store knows their reason as long as it is open."""


class Message(Generic[T_co]):
    """A message read from a store. Read-only by convention; compares by identity. Its `body` is bytes, or what the
    codec of the queue makes of them that it was received from.

    One that `receive` gave is leased to this process until `ack()`, `release()` or `reject()`, or until the process
    ends; if nobody has it any more without that, it is free again, with a ResourceWarning. One that `browse` gave is a
    look only. Safe to hand to another thread.
    """

    __slots__ = (
        "_codec", "_decoded", "_note", "_store", "body", "deliveries", "destination", "expires_at_ms",
        "headers", "leased", "message_id", "persistent", "priority", "seq", "subscription", "timestamp_ms",
    )  # fmt: skip

    _plain: ClassVar[type[Message[Any]]]
    """The class of the message once it is settled: its class, or that which its class is one of."""
    _received: ClassVar[type[Message[Any]]]
    """The class of the message while its consumer holds it (ReceivedMessage)."""
    body: T_co
    """Bytes, or a value. Raises LargeMessageError for a large one, and DecodeError for bytes that the codec of its
    queue does not take, when it is asked for first."""
    _codec: Callable[[Message[Any], bytes], Any]
    _decoded: Any

    def __init__(
        self,
        store: MessageStore,
        destination: Destination,
        seq: int,
        body: bytes | LargeBody,
        headers: dict[str, Any],
        message_id: str | None,
        timestamp_ms: int,
        leased: bool,
        note: Any = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        deliveries: int = 1,
        subscription: SubscriptionKey | None = None,
        persistent: bool = True,
    ) -> None:
        self._store = store
        self.destination: Destination = destination
        self.seq: int = seq
        self.body = body  # type: ignore[assignment]
        if isinstance(body, LargeBody):
            self.__class__ = LargeMessage  # type: ignore[assignment]
        self.headers: dict[str, Any] = headers
        self.message_id: str | None = message_id
        self.timestamp_ms: int = timestamp_ms
        self.leased: bool = leased
        self._note = note
        """The store's own; nobody else looks at it."""
        self.priority: int = priority
        self.expires_at_ms: int = expires_at_ms
        self.deliveries: int = deliveries
        """How often it has been handed out, this time too: 1 the first time. For a browsed message: how often it came
        back."""
        self.subscription: SubscriptionKey | None = subscription
        """The subscription of a topic's message; None if it was browsed or leased for the topic as a whole."""
        self.persistent: bool = persistent
        """True if its sender said so; whatever that was, nothing of a memory store survives."""

    @property
    def _large(self) -> LargeBody | None:
        """Return the body, if that is kept apart."""
        return None

    @property
    def is_large(self) -> bool:
        """True if the body is kept apart: then `body` raises LargeMessageError."""
        return self._large is not None

    @property
    def size(self) -> int:
        """Return the size of the body in bytes."""
        large = self._large
        return len(self.raw_body) if large is None else large.size

    @property
    def content(self) -> bytes | LargeBody:
        """Return the body as it can be sent on: bytes, or one that is kept apart, which is not read for that."""
        return self.raw_body if self._large is None else self._large

    def open(self) -> BinaryIO:
        """Return a stream of the body, whatever its size; it can seek. No more than a chunk of a large body is in
        memory, and what is read was verified: CorruptionError names the file, or the table, and the offset. It may be
        read as long as this message or the stream is held, though it is acked meanwhile, until the store is closed:
        then reading raises ClosedError."""
        return self._store.open_body(self)

    def read(self, limit: int | None = None) -> bytes:
        """Return all of the body as it is stored, in memory. Raises MessageTooLargeError if it has more than `limit`
        bytes, and as `open`."""
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            raise TypeError(f"limit is a number of bytes, not {type(limit).__name__}: {limit!r}")
        if limit is not None and self.size > limit:
            raise MessageTooLargeError(
                f"{self!r} has a body that is larger than the limit of {limit} bytes; open it instead"
            )
        if self._large is None:
            return self.raw_body
        with self.open() as stream:
            return stream.read()

    def __copy__(self) -> Self:
        """Return the message itself: there is one for each lease."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def ack(self, *, connection: Any = None) -> None:
        """Ack the message: it is removed for good, durable as its store's policy says. Raises UnknownMessageError if it
        is not leased, or not any more.

        With a `connection` to the database that its store is in, of SQLAlchemy, psycopg, sqlite3 or Django, it is
        removed once the transaction there commits. Until then nobody else can settle it; if it is rolled back it is
        free again, as after a release. Raises TransactionError if its store is in another database, or in none.
        """
        if connection is not None:
            self._store.ack_within(connection, [self])
        else:
            self._store.ack([self])

    def ack_nowait(self) -> Future[None]:
        """Do `ack` without waiting: refused at once if the message is not leased. Otherwise the future resolves when
        `ack` would have returned, on a thread of ours."""
        return self._store.ack_nowait([self])

    def release(self, delivered: bool = True, delay: float | None = None, reason: Reason | None = None) -> None:
        """Give it back: the next receive finds it at its old place in the order, delivered once more; not so unless
        `delivered`. With a `delay`, in seconds, only once that is over, be it after a restart, while others pass it;
        None: as the store's option `redelivery` says. The last `reason`, an exception or text, is told by the dead
        letter that it may become. Raises UnknownMessageError, and TypeError and ValueError for what is no time to wait,
        or no reason."""
        self._store.release([self], delivered, delay, reason)

    def release_nowait(
        self, delivered: bool = True, delay: float | None = None, reason: Reason | None = None
    ) -> Future[None]:
        """Do `release` without waiting, as `ack_nowait`."""
        return self._store.release_nowait([self], delivered, delay, reason)

    def extend(self, seconds: float | None = None) -> None:
        """End the lease so many seconds from now; with None, as many as it was leased for. A lease that has no end has
        none then either. Raises UnknownMessageError if it is not leased, or its time is over."""
        self._store.extend(self, seconds)

    def reject(self, reason: Reason = REJECTED) -> None:
        """Put it into its store's dead-letter queue, with the `reason`, text or an exception, in one step: after any
        crash it is in one of the two. Dropped, and counted, if its store has none. Raises UnknownMessageError, and what
        a transaction's commit raises; the message is then free again, as after a release."""
        owner = self._store.owner
        if not isinstance(owner, Rejecting):
            raise DeadLetterError(
                f"{self!r} cannot be rejected: store {self._store.name!r} was opened without a router, which knows the "
                "dead-letter queues; ack it, or release it"
            )
        owner.reject(self, reason)

    def reject_nowait(self, reason: Reason = REJECTED) -> Future[None]:
        """Do `reject` without waiting: on a thread of ours, where the future resolves. A message that is not leased is
        refused at once."""
        require_leased(self)
        return shared().call(lambda: self.reject(reason))

    def __enter__(self) -> Self:
        """Return the message: `with message:` acks it at the end, and releases it, delivered once more and with the
        error as the reason, if one is raised; neither if it was settled inside, or a transaction has it. Raises
        UnknownMessageError for one that was browsed."""
        require_leased(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ack or release the message. Raises as `ack`: UnknownMessageError too where its lease has run out. After an
        error that one alone is raised."""
        if self._note.is_settled:
            return
        if kind is None:
            self.ack()
            return
        with suppress(AnabranchError):  # in a store that has stopped nobody holds anything
            self.release(reason=error)

    @property
    def token(self) -> str:
        """Return the token by which `Router.settle` settles the message without this object. A token holds while the
        message is leased, and tells no secret. Raises UnknownMessageError for a message that is not leased."""
        return self._store.token(self)

    @property
    def group(self) -> str | None:
        """Return the message's group; None if it has none."""
        return self.headers.get(GROUP)

    @property
    def redelivered(self) -> bool:
        """True if the message was handed out before."""
        return self.deliveries > 1

    @property
    def raw_body(self) -> bytes:
        """Return the body as it is stored: the same as `body`, unless that is decoded by a codec."""
        return cast("bytes", self.body)

    def __repr__(self) -> str:
        return f"<Message {self.seq} of {self.destination}, {self.size} bytes>"


class ReceivedMessage(Message[T_co]):
    """A message that was handed to its consumer and is not settled: what becomes of it if nobody has it any more is
    seen to. Once it is settled it is a Message as any other (`note_settled`): that costs less than to ask each at its
    end."""

    __slots__ = ()

    def __del__(self) -> None:
        """Note that the message's holder has let go of it. May run between any two steps of any thread:
        abandoned.py."""
        try:
            self._store.abandoned.note(self)
        except AttributeError:
            pass  # the interpreter ends
        except BaseException:  # Ctrl-C, which Python does not raise from here
            self._store.abandoned.note(self)
            raise


Message._plain, Message._received = Message, ReceivedMessage
_stored_body: Final = cast(MemberDescriptorType, vars(Message)["body"])


class LargeMessage(Message[bytes]):
    """A message whose body is kept apart. A class of its own, so that no other message is asked whether it is one."""

    __slots__ = ()

    @property
    def body(self) -> bytes:  # type: ignore[override]  # nobody sets it
        """Refuse to read the body. Raises LargeMessageError."""
        raise _not_in_memory(self)

    @property
    def _large(self) -> LargeBody:
        body: LargeBody = _stored_body.__get__(self)
        return body


class ReceivedLargeMessage(LargeMessage):
    """A large message that was handed to its consumer and is not settled, as ReceivedMessage."""

    __slots__ = ()

    __del__: Final = ReceivedMessage.__del__


LargeMessage._plain, LargeMessage._received = LargeMessage, ReceivedLargeMessage


def _not_in_memory(message: Message[Any]) -> LargeMessageError:
    return LargeMessageError(
        f"{message!r} has a large body, which is not in memory: read it from `message.open()`, or whole into memory "
        "with `message.read()`"
    )


def note_received(message: Message[Any]) -> None:
    """Note that a message is handed to its consumer: see ReceivedMessage."""
    message.__class__ = message._received


def warn_abandoned(message: Message[Any]) -> None:
    """Warn who has let go of a message without settling it; to be called by `abandoned.note`."""
    warnings.warn(
        f"{message!r} was received and let go of without ack, release or reject: it is free again, delivered once "
        "more; settle it, best with `with message:`, or keep its token",
        ResourceWarning, stacklevel=4, source=message,
    )  # fmt: skip


def note_settled(messages: Iterable[Message[Any]]) -> None:
    """Note that nobody need see to these messages any more. May be said again, and of any."""
    for message in messages:
        message.__class__ = message._plain


class DecodedMessage(Message[Any]):
    """A message whose `body` is what a codec makes of the stored bytes, which are in `raw_body`. A class of its own, so
    that no other message is asked for its codec."""

    __slots__ = ()

    @property
    def body(self) -> Any:  # nobody sets it
        """Return what the codec has decoded: decoded when asked for first, later the same object again. Raises
        DecodeError for bytes that the codec does not take. Also raises it for bytes of another codec, by the header
        `content_type`."""
        try:
            return self._decoded
        except AttributeError:
            pass
        self._decoded = decoded = self._codec(self, self.raw_body)
        return decoded

    @property
    def raw_body(self) -> bytes:
        """Return the body as it is stored."""
        raw: bytes | LargeBody = _stored_body.__get__(self)
        if isinstance(raw, bytes):
            return raw
        raise _not_in_memory(self)

    @property
    def _large(self) -> LargeBody | None:
        stored: bytes | LargeBody = _stored_body.__get__(self)
        return None if isinstance(stored, bytes) else stored


class ReceivedDecodedMessage(DecodedMessage):
    """A decoded message that was handed to its consumer and is not settled, as ReceivedMessage."""

    __slots__ = ()

    __del__: Final = ReceivedMessage.__del__


DecodedMessage._plain, DecodedMessage._received = DecodedMessage, ReceivedDecodedMessage


def decoded(message: Message[Any], decode: Callable[[Message[Any], bytes], Any]) -> Message[Any]:
    """Return the same object, whose `body` is from now on what `decode` makes of the message and its bytes."""
    message._codec = decode
    # Not a copy: whoever watches over its lease watches this object.
    message.__class__ = ReceivedDecodedMessage if type(message) is message._received else DecodedMessage
    return message


def require_leased(message: Message[Any]) -> None:
    """Refuse a message that was only looked at."""
    if not message.leased:
        raise UnknownMessageError(
            f"{message!r} was browsed, not received; receive it before you ack, release or claim it"
        )


class Undelivered(NamedTuple):
    """A message that receive skips, leased: for the router to dead-letter."""

    message: Message
    reason: str
    """EXPIRED or DELIVERY_LIMIT."""
