"""The messages that a broker has yet to deliver: each destination's pending messages and durable subscriptions, read by
location.

    with pending_of("/var/lib/activemq/kahadb") as pending:
        for found in pending.destinations:
            for message in found.messages():      # in the broker's order
                message.command, message.waiting

Ids and locations are in memory, some 500 bytes a message; one message's body at a time. Nothing is written. The `lock`
file of a broker is locked, shared, until the end: one that runs has it, and one that starts meanwhile waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ...policies.errors import StoreLockedError, TraceError
from .commands import AddMessage, CommandError, KahaDestination, UpdateMessage, decode
from .entries import Outcome, Transaction, decided
from .files import Damage, StoreFiles, find_stores, open_file
from .journal import RECORD_HEADER, USER_RECORD
from .openwire import OpenWireError, SubscriptionInfo, read_subscription
from .replay import DestinationState, Message, replayed

_OPEN_MAX: Final = 8
"""Files that are kept open of a store: messages lie in order, but for those that were written again."""

Progress = Callable[[int, int], None]


class PendingMessage(NamedTuple):
    """A message, and the keys of the subscriptions that have not acked it; none in a queue."""

    command: AddMessage
    waiting: frozenset[str]


@dataclass(slots=True)
class PendingDestination:
    """One destination: of one store, but for an mKahaDB whose filters were changed."""

    destination: KahaDestination
    subscriptions: dict[str, SubscriptionInfo] = field(default_factory=dict)
    """By key."""
    subscriptions_unreadable: int = 0
    count: int = 0
    """Messages."""
    bytes: int = 0
    """Bytes of their records."""
    _parts: list[tuple[_Records, list[Message]]] = field(default_factory=list)

    def messages(self) -> Iterator[PendingMessage]:
        """Yield messages in the broker's order. May be called again. Raises TraceError if a file has changed meanwhile,
        OSError."""
        for records, messages in self._parts:
            for message in messages:
                yield PendingMessage(records.read(message), frozenset(message.waiting or ()))

    def _add(self, records: _Records, state: DestinationState) -> None:
        messages = sorted(state.messages.values(), key=lambda message: message.turn)
        self._parts.append((records, messages))
        self.count += len(messages)
        self.bytes += sum(message.bytes for message in messages)
        for key, subscription in state.subscriptions.items():
            try:
                self.subscriptions[key] = read_subscription(subscription.info or b"")
            except OpenWireError:
                self.subscriptions_unreadable += 1


@dataclass(frozen=True, slots=True)
class Pending:
    """The pending messages of a directory."""

    directory: Path
    destinations: tuple[PendingDestination, ...]
    """Destinations with messages or subscriptions, by name."""
    unfinished: tuple[Transaction, ...]
    """Prepared, which wait for their outcome; and open, which a broker discards when it starts."""
    damages: tuple[Damage, ...]

    @property
    def prepared(self) -> tuple[Transaction, ...]:
        """Return the XA transactions that were left prepared."""
        return tuple(one for one in self.unfinished if one.outcome is Outcome.PREPARED)


@contextmanager
def pending_of(directory: str | Path, progress: Progress | None = None) -> Iterator[Pending]:
    """Read what the KahaDB or mKahaDB in a directory has pending, by its live files, for as long as the block runs.

    Raises TraceError where there is no live journal, StoreLockedError where a broker runs. Damaged parts are in
    `damages`. `progress` is called with (bytes read, bytes in all), from 0 again for each of two readings of a store.
    """
    found = find_stores(directory)
    damages: dict[Damage, None] = {}
    with ExitStack() as stack:
        for path in dict.fromkeys((found.directory, *(store.directory for store in found.stores))):
            stack.enter_context(_unused(path))
        by_destination: dict[KahaDestination, PendingDestination] = {}
        unfinished: dict[str, Transaction] = {}
        ids = decided(found.transaction_store, damages.setdefault)
        for files in found.stores:
            live = files.live
            if not live.files:
                raise TraceError(f"{files.directory} holds archived files only: nothing is pending there")
            _, outcomes, replay = replayed(live, damages.setdefault, progress, ids)
            records = stack.enter_context(_Records(live))
            unfinished.update((one.id.text, one) for one in outcomes.unfinished())
            for destination, state in replay.destinations.items():
                if state.messages or state.subscriptions:
                    by_destination.setdefault(destination, PendingDestination(destination))._add(records, state)
        ordered = sorted(by_destination.values(), key=lambda one: str(one.destination))
        yield Pending(found.directory, tuple(ordered), tuple(unfinished.values()), tuple(damages))


@contextmanager
def _unused(directory: Path) -> Iterator[None]:
    """Keep a broker out while the block runs. Raises StoreLockedError if a broker has the directory."""
    try:
        fd = os.open(directory / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield  # there is none, or it cannot be asked
        return
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StoreLockedError(
                    f"{directory} is in use by a broker, which has {directory / 'lock'} locked; stop the broker first, "
                    "so that nothing is consumed while it is copied"
                ) from None
            # A file system without locks: nothing can be told.
        yield
    finally:
        os.close(fd)


class _Records:
    """Records of one store by location. Close it."""

    def __init__(self, files: StoreFiles) -> None:
        self._paths = {file.number: file.path for file in files.files}
        self._open: dict[int, BinaryIO] = {}

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read(self, message: Message) -> AddMessage:
        """Return the record of a pending message."""
        stream = self._stream(message.file)
        stream.seek(message.offset)
        data = stream.read(message.bytes)
        try:
            if data[: RECORD_HEADER.size] == RECORD_HEADER.pack(message.bytes, USER_RECORD):
                command = decode(data[RECORD_HEADER.size :])
                found = command.message if isinstance(command, UpdateMessage) else command
                if isinstance(found, AddMessage) and found.message_id == message.id:
                    return found
        except CommandError:
            pass
        raise TraceError(
            f"{self._paths[message.file]} at offset {message.offset}: the record of message {message.id} is not there "
            "any more: something writes to the journal; stop the broker, and begin again"
        )

    def _stream(self, number: int) -> BinaryIO:
        stream = self._open.pop(number, None)
        if stream is None:
            if len(self._open) >= _OPEN_MAX:
                self._open.pop(next(iter(self._open))).close()
            try:
                stream = open_file(self._paths[number])
            except FileNotFoundError:
                raise TraceError(f"{self._paths[number]} vanished while it was read; stop the broker first") from None
        self._open[number] = stream  # the one that was used last is last
        return stream
