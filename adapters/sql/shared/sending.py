"""Sends to a shared store: each is one statement, or several in one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

from ....policies.config.options import SqlOptions
from ....policies.errors import MessageTooLargeError, OutcomeUnknownError
from ....policies.names.destination import Destination
from ...core.messages import EXPIRES_MAX_MS, GROUP, LargeBody, MadeId, Outgoing, Readable, Receipt, checked, plain_body
from ...core.record.headers import pack_headers, pack_id
from ...core.record.large import Sized, not_as_said, require_size
from ..database.columns import escaped
from .database import Ask, SharedDatabase
from .queues import Queues
from .usage import Sent, Usage
from .waiting import Waiting

Sends = Sequence[tuple[int, Outgoing[bytes]]]
"""Messages with the numbers of their queues or topics."""
Put = tuple[int, Sequence[int] | None, Sequence[int]]
"""The seq of a message; the queues and subscriptions in which it was put, None if it was there before; and those of
them in which somebody waits."""

WINDOW_PARTS: Final = 20
"""Ids are forgotten once there are more than the window by such a part of it, about."""


class Stored:
    """What became of messages that were stored."""

    def __init__(self) -> None:
        self.seqs: list[tuple[int, bool]] = []
        """The seq of each, and whether it is a duplicate."""
        self.awaited: set[int] = set()
        """Queues and subscriptions in which somebody waited for them."""
        self.queues: set[int] = set()
        """All that have them."""
        self.sent: list[Sent] = []
        """Those that are none."""
        self.dropped = 0
        """How many had a topic without subscriptions."""


class Sending:
    """The sends to one open store. Threads: all."""

    def __init__(
        self, name: str, store_id: bytes, database: SharedDatabase, queues: Queues, options: SqlOptions,
        waiting: Waiting, usage: Usage,
    ) -> None:  # fmt: skip
        self._name, self._store_id, self._database, self._queues = name, store_id, database, queues
        self._options, self._waiting, self._usage = options, waiting, usage
        self._named = 0
        """Messages with an id since ids were forgotten."""
        self.sends: int = 0
        """Messages that were stored."""
        self.dropped: int = 0
        """Those of them that were for nobody."""

    def send(self, destination: Destination, message: Outgoing) -> Receipt:
        """Store one message."""
        return self.send_numbered(destination, *self.numbered(destination, message))

    def send_numbered(self, destination: Destination, number: int, message: Outgoing[bytes]) -> Receipt:
        """Store what `numbered` has returned for this destination."""
        if _group(message) is not None:
            return self._send_all([destination], [(number, message)])[0]
        seq, queues, awaited = self._once(number, message)
        if awaited:
            self._waiting.tell(awaited)
        return self._receipt(destination, number, message, seq, queues)

    def send_leased(
        self, destination: Destination, number: int, message: Outgoing[bytes], lease: tuple[int, int, int]
    ) -> tuple[Receipt, bool]:
        """Store one message of a queue, leased for so long (ms; 0: without an end) to this router, by this number.
        Returns also whether it was not there before."""
        seq, queues, _ = self._once(number, message, lease)
        return self._receipt(destination, number, message, seq, queues), queues is not None

    def _receipt(
        self, destination: Destination, number: int, message: Outgoing[bytes], seq: int, queues: Sequence[int] | None
    ) -> Receipt:
        """Count one message, tell of it, and return its receipt."""
        self.sends += 1
        if queues is None:
            return Receipt(destination, seq, _is_duplicate(message))
        self.dropped += not queues
        if self._usage.recorder is not None:
            self._usage.tell([Sent(number, seq, _size(message.body, _packed(message)), queues)], ())
        return Receipt(destination, seq)

    def send_all(self, sends: Iterable[tuple[Destination, Outgoing]]) -> list[Receipt]:
        """Store messages in one transaction."""
        sends = list(sends)
        if len(sends) == 1:
            return [self.send(*sends[0])]
        return self._send_all([destination for destination, _ in sends], self.all_numbered(sends))

    def _send_all(self, destinations: Sequence[Destination], numbered: Sends) -> list[Receipt]:
        if not numbered:
            return []
        if any(_group(m) is not None or self._is_named(m) or self._queues.is_topic(number) for number, m in numbered):
            stored = self._database.change(lambda ask: self.stored(ask, numbered))
        else:
            stored = self._once_all(numbered)
        self._waiting.tell(stored.awaited)
        self._usage.tell(stored.sent, ())
        return self.receipts(destinations, stored)

    def receipts(self, destinations: Iterable[Destination], stored: Stored) -> list[Receipt]:
        """Return the receipts of messages, once they have taken effect, and count them."""
        self.sends += len(stored.seqs)
        self.dropped += stored.dropped
        return [Receipt(to, *one) for to, one in zip(destinations, stored.seqs, strict=True)]

    def numbered(self, destination: Destination, given: Outgoing) -> tuple[int, Outgoing[bytes]]:
        """Return a message with the number of its queue. Raises what a send raises before anything is stored."""
        message = self._ready(destination, given)
        return self._queues.number(destination), message

    def all_numbered(
        self, sends: Iterable[tuple[Destination, Outgoing]], declared: bool = True
    ) -> list[tuple[int, Outgoing[bytes]]]:
        """Return messages with the numbers of their queues, as `numbered`."""
        numbered: list[tuple[int, Outgoing[bytes]]] = []
        last, number = None, 0
        for destination, given in sends:
            message = self._ready(destination, given)
            if destination is not last:
                last, number = destination, self._queues.number(destination, declared=declared)
            numbered.append((number, message))
        return numbered

    def _ready(self, destination: Destination, given: Outgoing) -> Outgoing[bytes]:
        """Return a message as it is stored. Raises what a send raises before anything is."""
        body = self.keep(given.body)
        message = checked(body, *given[1:])
        if self._waiting.ahead_ms and (message.deliver_at_ms or message.expires_at_ms):
            message = message._replace(
                deliver_at_ms=moved(message.deliver_at_ms, self._waiting.ahead_ms),
                expires_at_ms=moved(message.expires_at_ms, self._waiting.ahead_ms),
            )
        if message.message_id is not None:
            pack_id(message.message_id)
        size, most = _size(body, _packed(message)), self._options.message_bytes_max
        if size > most:
            raise MessageTooLargeError(
                f"a message of {size} bytes for {destination} is larger than message_bytes_max, {most}, of store "
                f"{self._name!r}; raise that, or send less"
            )
        return message

    def keep(self, body: object) -> Any:
        """Return a body as bytes: a file is read, up to `message_bytes_max`."""
        if type(body) is bytes:
            return body
        if type(body) is Sized:
            require_size(body.size)
            kept = self.keep(body.body)
            if len(kept) != body.size:
                raise not_as_said(len(kept), body.size)
            return kept
        most = self._options.message_bytes_max
        if isinstance(body, LargeBody):
            with body.open() as stream:
                return _read(stream, most, self._name)
        return _read(body, most, self._name) if isinstance(body, Readable) else plain_body(body)

    def stored(self, ask: Ask, sends: Sends) -> Stored:
        """Store messages, in order, in the transaction of `ask`."""
        stored = Stored()
        locks = {self._lock_of(number, group) for number, m in sends if (group := _group(m)) is not None}
        for lock in sorted(locks):
            ask("lock_group", lock)
        for (is_named, is_topic), some in groupby(
            sends, lambda one: (self._is_named(one[1]), self._queues.is_topic(one[0]))
        ):
            if is_named:
                for number, message in some:
                    put = self._store(ask, ask, number, message)
                    _note(stored, number, message, put, _packed(message))
                continue
            if is_topic:
                several = list(some)
                columns = _columns(several)
                for (number, message), (seq, awaited, queues), packed in zip(
                    several, ask("send_topics", *columns), columns[_PACKED], strict=True
                ):
                    _note(stored, number, message, (seq, queues, awaited), packed)
            else:
                self._store_all(stored, ask, list(some))
        return stored

    def _once_all(self, sends: Sends) -> Stored:
        """Store messages of queues, without ids and groups, in a statement by itself."""
        stored = Stored()

        def store(name: str, *given: Any) -> list[Any]:
            return self._database.once(name, *given, lost=lambda ids: [(ids, given[-1])])

        self._store_all(stored, store, sends)
        return stored

    def _store_all(self, stored: Stored, store: Ask, sends: Sends) -> None:
        """Store messages of queues, without ids."""
        name, columns, queues = "send", _columns(sends), {number for number, _ in sends}
        if all(column.count(column[0]) == len(column) for column in columns[:_PACKED]):
            name, columns[:_PACKED] = "send_alike", [column[0] for column in columns[:_PACKED]]
        ((ids, awaited),) = store(name, len(sends), *columns, list(queues))
        stored.seqs += [(seq, False) for seq in ids]
        stored.queues.update(queues)
        stored.awaited.update(awaited)
        stored.sent += [
            Sent(number, seq, _size(message.body, packed), (number,))
            for (number, message), seq, packed in zip(sends, ids, columns[_PACKED], strict=True)
        ]

    def _once(self, number: int, message: Outgoing[bytes], lease: tuple[int, ...] = ()) -> Put:
        """Store one message in a statement by itself, leased as `send_leased` says."""
        store = partial(self._database.once, lost=partial(self._lost, number, message))
        return self._store(store, self._database.look, number, message, lease)

    def _lost(self, number: int, message: Outgoing[bytes], ids: list[int]) -> list[Any]:
        """Return what a statement has returned that has stored a message."""
        (seq,), look, is_topic = ids, self._database.look, self._queues.is_topic(number)
        if self._is_named(message):
            known = look("id_of", number, _name(message))
            if known and known[0][0] != seq:
                return []
            there = ("find_of_topic", number, number, seq) if is_topic else ("find", number, seq)
            if not known and not look(*there):
                raise OutcomeUnknownError(
                    f"store {self._name!r}: the connection to its database was lost in a send, and so many others "
                    f"came meanwhile that its message_id is forgotten: nobody can tell whether it was stored; let "
                    f"duplicate_window be larger than {self._options.duplicate_window}"
                )
        if not is_topic:
            return [(seq, True)]
        ((subscriptions,),) = look("members", number)
        return [(seq, subscriptions, subscriptions)]

    def _store(self, store: Ask, look: Ask, number: int, message: Outgoing[bytes], lease: tuple[int, ...] = ()) -> Put:
        name, how = _name(message), "one"
        if self._is_named(message):
            self._named += 1
            how = "requeued" if message.requeued else "named"
        what = "send_leased" if lease else "send_topic" if self._queues.is_topic(number) else "send"
        while True:  # an id that was known may be forgotten before it is looked up
            found = store(
                f"{what}_{how}", number, name, message.deliver_at_ms, message.expires_at_ms, message.priority,
                _group(message), _packed(message), message.body, *lease,
            )  # fmt: skip
            if found:
                seq, awaited, *topic = found[0]
                queues = topic[0] if topic else [number]
                return seq, queues, awaited if topic else queues if awaited else ()
            for (seq,) in look("id_of", number, name):
                return seq, None, ()

    def _lock_of(self, number: int, group: str) -> int:
        """Return the number of the lock that senders to a group hold (rule Q14)."""
        named = self._store_id + number.to_bytes(8, "big") + group.encode()
        return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big", signed=True)

    def forget_ids(self) -> None:
        """Forget ids beyond the window, once there are more by a part of it. Raises StoreFailedError."""
        window = self._options.duplicate_window
        if window and self._named > window // WINDOW_PARTS:
            self._named = 0
            self._database.look("forget_ids", window)

    def _is_named(self, message: Outgoing[bytes]) -> bool:
        return bool(self._options.duplicate_window) and message.message_id is not None


def moved(ms: int, by: int) -> int:
    """Return a time by another clock (rule W14); 0 is none, and the last one is for ever."""
    return ms if ms in (0, EXPIRES_MAX_MS) else min(max(1, ms + by), EXPIRES_MAX_MS)


_PACKED: Final = -2
"""The place of the packed headers among `_columns`."""


def _columns(sends: Sends) -> list[list[Any]]:
    """Return the columns of messages as the statements that send several take them."""
    rows = [
        (m.deliver_at_ms, m.expires_at_ms, number, m.priority, _name(m), _group(m), _packed(m), m.body)
        for number, m in sends
    ]
    return list(map(list, zip(*rows, strict=True)))


def _note(stored: Stored, number: int, message: Outgoing[bytes], put: Put, packed: bytes | None) -> None:
    """Note what became of one message."""
    seq, queues, awaited = put
    if queues is None:
        stored.seqs.append((seq, _is_duplicate(message)))
        return
    stored.seqs.append((seq, False))
    stored.queues.update(queues)
    stored.awaited.update(awaited)
    stored.sent.append(Sent(number, seq, _size(message.body, packed), queues))
    stored.dropped += not queues


def _is_duplicate(message: Outgoing[Any]) -> bool:
    """Return whether the sender of a message that was there before is told so."""
    return type(message.message_id) is not MadeId


def _name(message: Outgoing[Any]) -> str | None:
    return None if message.message_id is None else escaped(str(message.message_id))


def _group(message: Outgoing[Any]) -> str | None:
    return message.headers.get(GROUP) if message.headers else None  # type: ignore[return-value]


def _size(body: Any, headers: bytes | None) -> int:
    return len(body) + len(headers or b"")


def _packed(message: Outgoing[Any]) -> bytes | None:
    return pack_headers(message.headers) if message.headers else None


def _read(source: Any, most: int, name: str) -> bytes:
    """Return what is left of a file. Raises MessageTooLargeError."""
    body = b"".join(iter(lambda: source.read(1 << 20), b"")) if most >= 1 << 30 else source.read(most + 1)
    if len(body) > most:
        raise MessageTooLargeError(
            f"a body of more than {most:,} bytes, message_bytes_max of store {name!r}, which is shared and keeps no "
            "body apart; raise that, or send it to another store"
        )
    return bytes(body)
