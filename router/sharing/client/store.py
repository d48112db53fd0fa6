"""The store of a shared directory as its clients see it: one, whichever store of the owner a destination lives in.

Queues, topics, maps, messages and transactions call it as they call any store (adapters/core/store.py, whose promises
hold); each call is a request to the owner.
"""

from __future__ import annotations

import io
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ....adapters.core.messages import (
    DEFAULT_PRIORITY,
    Headers,
    LargeBody,
    Message,
    Outgoing,
    Readable,
    Receipt,
    checked,
    note_settled,
)
from ....adapters.core.record.headers import pack_headers, pack_id
from ....adapters.core.record.large import CHUNK_BYTES, Sized
from ....adapters.core.service.leased_sending import require_leasable
from ....adapters.core.state.leases import ACKED, CLAIMED, REJECTED, ROLLED_BACK
from ....adapters.core.store_types import Change, Counts, Done, Subscription, SubscriptionKey
from ....policies.errors import OutcomeUnknownError, TransactionError, router_closed
from ....policies.names.destination import Destination, Kind
from ...transactions.xid import Xid
from ..protocol import (
    EVENTS,
    PAGE,
    Call,
    Commit,
    Listen,
    OutgoingFields,
    Receive,
    ReceivePattern,
    Request,
    Send,
    SendMany,
    unpack_error,
)
from .exchange import Exchange
from .leases import NOT_SHARED, RemoteLease, RemoteLeases, require_lease
from .listeners import Listeners, RemoteListener
from .maps import RemoteMaps

log: logging.Logger = logging.getLogger(__name__)


class RemoteStore(RemoteLeases):
    """All stores of one owner. Threads: all."""

    volatile = shared = limited = False
    failed: BaseException | None = None
    store_id: bytes = bytes(16)

    def __init__(self, directory: Path, owner: object) -> None:
        super().__init__(directory)
        self.name: str = directory.name
        self.owner = owner
        self.maps: RemoteMaps = RemoteMaps(self.call)
        self._listeners = Listeners(
            self.ask, lambda call: self.connection.later(call),
            lambda seconds, method: self.connection.schedule(seconds, method), self._quietly,
        )  # fmt: skip
        self.on_event: Callable[[list[Any]], None] = lambda packed: None
        """Called with each event of the owner's router that it was asked for."""
        self._standing: list[Request] = []
        """Requests that each owner is to have been sent."""

    def connect(self, connection: Exchange) -> None:
        """Take a connection."""
        self.connection = connection
        connection.on_push = self._pushed
        connection.on_reconnect = lambda: [*self.bodies.again(), *self._standing, *self._listeners.again()]
        connection.on_refused = self._refused
        connection.on_fork = self._forked
        connection.on_life = self._tell_going_back

    def close(self) -> None:
        """Close the connection: the owner gives back what is held. Idempotent."""
        if hasattr(self, "connection"):
            self.connection.close()
        self._listeners.close(router_closed())

    def _forked(self) -> None:
        self._forget_leases()
        self._listeners.forget()
        self._standing.clear()

    def of(self, name: str, destination: Destination, *given: Any) -> Any:
        """Call a function of the owner that takes a destination first."""
        return self.call(name, str(destination), *given)

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
        message = self._outgoing(body, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms)
        return Receipt(destination, *self.ask(Send(str(destination), message, bool(sync))))

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
        message = self._outgoing(body, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms)
        request = Send(str(destination), message, bool(sync))
        if type(message.body) is bytes:
            return self.connection.ask_nowait(request, lambda answer: Receipt(destination, *answer))
        sent: Future[Receipt] = Future()  # while the owner reads a large body, what is sent behind it would overtake it
        try:
            sent.set_result(Receipt(destination, *self.ask(request)))
        except Exception as error:  # the caller of result() is told
            sent.set_exception(error)
        return sent

    def send_leased(
        self, destination: Destination, message: Outgoing, lease: float | None = None, sync: bool | None = None
    ) -> Message | Receipt:
        """Send a message that this client holds, as Store.send_leased."""
        require_lease(lease)
        require_leasable(destination, message)
        given = str(destination), self._packed(message), bool(sync), lease, random.getrandbits(62), False
        messages, *receipt = self.ask(
            Call("send_leased", given),
            lambda answer: (self._received(lease, answer[0]), *answer[1:]),
            lambda answer: self._came_late(answer[0]),
        )
        return messages[0] if messages else Receipt(destination, *receipt)

    def send_many(
        self,
        destination: Destination,
        messages: Iterable[Outgoing | bytes],
        sync: bool | None = None,
        done: list[Receipt] | None = None,
    ) -> list[Receipt]:
        """Send many, as Store.send_many: in one request for each part of so many bytes."""
        receipts = [] if done is None else done
        part: list[OutgoingFields] = []
        size = 0
        for message in messages:
            outgoing = checked(*(message if isinstance(message, Outgoing) else Outgoing(message)))
            part.append(self._packed(outgoing))
            size += len(part[-1].body)
            if len(part) >= PAGE or size >= CHUNK_BYTES:
                receipts += self._send_part(destination, part, sync)
                part, size = [], 0
        return receipts + self._send_part(destination, part, sync) if part else receipts

    def _send_part(self, destination: Destination, part: list[OutgoingFields], sync: bool | None) -> list[Receipt]:
        answers = self.ask(SendMany(str(destination), part, bool(sync)))
        return [Receipt(destination, *answer) for answer in answers]

    def _outgoing(
        self, body: Any, headers: Headers | None, message_id: str | None, priority: int, expires_at_ms: int,
        persistent: bool, deliver_at_ms: int,
    ) -> OutgoingFields:  # fmt: skip
        """Return a message that was given by its parts as it goes over the socket."""
        if isinstance(body, Sized):
            body = self.bodies.keep(body)
        return self._packed(
            checked(body, headers, message_id, priority, expires_at_ms, persistent, False, deliver_at_ms)
        )

    def _packed(self, message: Outgoing) -> OutgoingFields:
        """Return a message as it goes over the socket. One without an id is known by its request, if that is sent
        again."""
        body: Any = message.body
        if type(body) is not bytes:
            body = self.bodies.keep(body)
        if message.headers:
            pack_headers(message.headers)  # which says what is wrong with them
        return OutgoingFields(body, *message[1:-1])  # its group is among the headers

    def keep(self, body: object, persistent: bool = True) -> bytes | LargeBody:
        """Read a body into the owner's keeping, as Store.keep."""
        return self.bodies.keep(body)

    def send_within(self, connection: Any, destination: Destination, messages: Iterable[Outgoing | bytes]) -> Any:
        """Refuse: a database connection belongs to its process."""
        raise TransactionError(f"a connection {NOT_SHARED}")

    def declare(self, destination: Destination) -> None:
        """Declare a destination."""
        self.of("declare", destination)

    # Receiving

    def receive(
        self,
        destination: Destination,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
        newest: bool = False,
    ) -> Message | None:
        """Receive one message, as Store.receive."""
        messages = self.receive_many(destination, 1, timeout, subscription, lease, newest)
        return messages[0] if messages else None

    def receive_many(
        self,
        destination: Destination,
        most: int,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
        newest: bool = False,
    ) -> list[Message]:
        """Receive many messages, as Store.receive_many. `newest`: one, as Store.receive."""
        require_lease(lease)
        request = Receive(str(destination), subscription, most, timeout, lease, newest)
        messages: list[Message] = self.ask(request, partial(self._received, lease), self._came_late)
        return messages

    def receive_pattern(self, pattern: str, timeout: float | None, lease: float | None) -> Message | None:
        """Receive from many queues, as Router.receive."""
        require_lease(lease)
        request = ReceivePattern(pattern, timeout, lease)
        messages = self.ask(request, partial(self._received, lease), self._came_late)
        return messages[0] if messages else None

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
        require_lease(lease)
        listener = self._listeners.begin(str(destination), on_message, credit, subscription, on_end, lease)
        self.connection.keep_reading()
        return listener

    def listen_to_all(
        self, patterns: list[str], on_message: Callable[[Message], object], credit: int,
        on_end: Callable[[Exception], object] | None, lease: float | None,
    ) -> RemoteListener:  # fmt: skip
        """Listen to many queues, as Router.listen."""
        listener = self._listeners.begin(", ".join(patterns), on_message, credit, None, on_end, lease, patterns)
        self.connection.keep_reading()
        return listener

    def stand(self, name: str, *given: Any) -> None:
        """Ask something of this owner, and of each that follows it."""
        request = Call(name, given)
        if request not in self._standing:
            self._standing.append(request)
        self.ask(request)
        self.connection.keep_reading()

    def _pushed(self, number: int, messages: list[Any] | None, error: list[Any] | None) -> None:
        if number == EVENTS:
            self.on_event(messages or [])
        elif error is not None:
            self._listeners.fail(number, unpack_error(error))
        else:
            lease = self._listeners.lease_of(number)
            received = [self._message(fields, lease) for fields in messages or ()]
            if not self._listeners.take(number, received):  # it was closed meanwhile: as if nobody had held them
                self._settle_later([one._note.token for one in received])

    def _refused(self, request: Request, error: Exception) -> None:
        """Tell that an owner that has come refuses what each owner is asked."""
        if isinstance(request, Listen):
            self._listeners.fail(request.listener, error)
        else:
            log.warning("process %d, which owns %s by now, refuses %s: %s",
                self.connection.owner_pid, self.directory, request, error)  # fmt: skip

    # Looking

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
        leased: bool = True,
    ) -> Iterator[Message]:
        """Look at messages, as Store.browse: a page at a time."""
        left = sys.maxsize if limit is None else limit
        while left > 0:
            behind = _place_of(after) if isinstance(after, Message) else after
            page = self.of("browse", destination, subscription, min(left, PAGE), behind, leased)
            for fields in page:
                after = self._message(fields)
                left -= 1
                yield after
            if not page:
                return

    def find(self, destination: Destination, message_id: str) -> Message | None:
        """Look at the message of an id."""
        pack_id(message_id)  # which says what is wrong with it
        fields = self.of("find", destination, message_id)
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
        return int(self.of("depth", destination, subscription))

    def counts(self, destination: Destination, subscription: SubscriptionKey | None = None) -> Counts:
        """Return the numbers of messages."""
        numbers, oldest = self.of("counts", destination, subscription) or ((0, 0), None)
        counts = Counts(*numbers)
        counts.oldest_ready_seconds = oldest
        return counts

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Remove what nobody holds."""
        return int(self.of("purge", destination, subscription))

    def delete(self, destination: Destination) -> int:
        """Remove a destination; returns how many messages it had."""
        count = int(self.of("delete", destination))
        self._gone(destination)
        return count

    # Subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        """Begin a durable subscription."""
        return bool(self.call("subscribe", subscription, retroactive))

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        """End a durable subscription."""
        count = int(self.of("unsubscribe", topic, subscription))
        self._gone(topic, subscription)
        return count

    def subscriptions_of(self, topic: Destination) -> list[Subscription]:
        """Return the subscriptions of a topic."""
        return msgspec.convert(self.of("subscriptions_of", topic), list[Subscription])

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        """Commit a whole transaction, as Store.commit."""
        try:
            answer = self._asked_of(acks, CLAIMED, [], lambda tokens: self.commit_as("commit", sends, acks, changes))
        except OutcomeUnknownError:
            self._release_later(acks)  # behind the commit, if that is carried out still
            raise
        self._end_all(acks, ACKED)
        return _receipts(answer, sends)

    def commit_as(
        self,
        mode: Any,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        changes: Sequence[Change],
        xid: Xid | None = None,
        on_answer: Callable[[list[Any]], Any] | None = None,
    ) -> list[Any]:
        """Send a whole transaction, to be committed, prepared under its xid, or to vote. A vote whose caller was
        interrupted before its answer, or has given up, is rolled back."""
        outgoing = [(str(destination), self._packed(_checked(destination, message))) for destination, message in sends]
        leases: list[RemoteLease] = [message._note for message in acks]
        rejected: dict[str, tuple[str | None, str]] = {
            one.token: one.rejection for one in leases if one.rejection is not None
        }
        tokens, others = [one.token for one in leases], _destinations(acks)
        request = Commit(False, xid, mode, outgoing, tokens, list(changes), others, rejected)
        on_late = (lambda answer: self.roll_back_later(answer[0], acks)) if mode == "vote" else None
        try:
            answer: list[Any] = self.ask(request, on_answer, on_late)
        except (KeyboardInterrupt, OutcomeUnknownError):
            if on_late is not None:
                self.connection.keep_reading()  # what comes late, though nobody may ask for anything any more
            raise
        return answer

    def roll_back_later(self, number: int, acks: Sequence[Message]) -> None:
        """Let the owner roll back a transaction that has voted, once it answers."""
        tokens = [message._note.token for message in acks]
        request = Call("end_vote", (number, False, tokens, [], [], False))
        self.connection.later(partial(self._quietly, tokens, request))

    def end_vote(
        self,
        number: int,
        commit: bool,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        changes: Sequence[Change],
    ) -> list[Receipt]:
        """Say the outcome of a transaction that has voted."""
        sent = [(str(destination), (b"", None, *message[2:-1])) for destination, message in sends]
        tokens = [message._note.token for message in acks]
        others = [*_destinations(acks), *(str(change.subscription.topic) for change in changes)]
        end = ROLLED_BACK
        try:
            rejects = any(message._note.rejection is not None for message in acks)
            answer = self.call("end_vote", number, commit, tokens, others, sent, rejects)
            end = ACKED if commit else ROLLED_BACK
        finally:
            self._end_all(acks, end)  # whatever has become of it, they are the owner's
        return _receipts(answer, sends)

    def _end_all(self, acks: Sequence[Message], end: str) -> None:
        """Note that a transaction has done with these messages."""
        for message in acks:
            lease = message._note
            self._ended(lease.token, REJECTED if end is ACKED and lease.rejection is not None else end)
        note_settled(acks)

    def prepared(self, acks: Sequence[Message]) -> list[RemoteLease]:
        """Note that a transaction has these messages until its manager decides; returns what stands for them."""
        leases = [self._leases.pop(message._note.token) for message in acks]
        note_settled(acks)
        return leases

    def rollback_prepared(self, transaction: bytes) -> Done[bool]:
        """Return that nothing of that name is prepared by this client."""
        return Done(False)


def _checked(destination: Destination, message: Outgoing) -> Outgoing:
    """Return a message of a transaction, as `checked`. A key of a map, its id, may begin with any character."""
    if destination.kind is not Kind.MAP:
        return checked(*message)
    return checked(*message._replace(message_id=None))._replace(message_id=message.message_id)


def _destinations(acks: Sequence[Message]) -> list[str]:
    """Return the destinations of messages."""
    return list(dict.fromkeys(str(message.destination) for message in acks))


def _place_of(message: Message[Any]) -> tuple[int, int, bytes | None]:
    """Return the place of a message, with the id of the store that it was seen in."""
    note = message._note
    return message.seq, message.priority, bytes.fromhex(note.token[:32]) if isinstance(note, RemoteLease) else note


def _receipts(answer: list[Any], sends: Sequence[tuple[Destination, Outgoing]]) -> list[Receipt]:
    return [Receipt(destination, *one) for one, (destination, _) in zip(answer, sends, strict=False)]
