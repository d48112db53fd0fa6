"""The report of a store to the usage log (router/usage/), for each batch that took effect: sends and acks.

    store.usage = Recorder(buffer, "orders", store_id)       # None, as usual: nothing is paid

The thread that has written a batch packs a row for each operation and appends them to the buffer, which is all it does:
no lock, no file, no other thread is woken. Rows hold numbers instead of names; `Buffer.declared` says which is whose.
Whoever empties the buffer takes the rows first and what was declared after them, so that no row comes without.

U4  An operation is told of in the order in which it took effect in its store, once, or is counted as lost.
U5  What is buffered, rows and names, is bounded, in bytes. Beyond it operations are lost, and counted; nobody waits.
U6  Nothing that goes wrong here is the caller's affair: the buffer is `broken` then, and takes nothing more.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ....policies.names.destination import Destination
from ...system.acceleration import inner_loop
from ..operations.branches import Commit
from ..operations.changes import Ack, AckRange, Change, Send, SendMany
from ..operations.destination_changes import Remove, Unsubscribe
from ..operations.leased_sends import LeasedSend
from ..state.leases import DestinationState, SubscriptionState

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..operations.plan import Plan
    from ..operations.tickets import Ticket

log: logging.Logger = logging.getLogger(__name__)

ROW: Final = struct.Struct("<QQIIIIHBB")
"""Time (microseconds of the monotonic clock), seq, destination's number, amount, transaction, who, acks needed, kind,
flags. Drawn in docs/format.md."""
assert ROW.size == 36

SENT: Final = 1
"""amount: bytes of the message's record. who: the set of subscriptions that it is for, 0: a queue's."""
ACKED: Final = 2
"""amount: 0. who: the subscription's number, 0: for all."""
ACKED_RANGE: Final = 3
"""An ack of all, as ACKED, from `seq` on to the one amount + transaction * 2**32 behind it."""
ENDED: Final = 4
"""A subscription, `who`, has ended."""
REMOVED: Final = 5
"""A destination is gone with all that it held."""
"""Kinds of rows."""

ACROSS: Final = 1
"""A flag: the transaction is one over several stores, numbered by its coordinator. Else the buffer numbers it."""

TOPIC: Final = 1 << 32
WHOLE: Final = 1 << 32
"""The threshold that keeps every message."""
NEEDED_MAX: Final = (1 << 16) - 1
AMOUNT_MAX: Final = (1 << 32) - 1
NAMES_MAX: Final = 100_000
"""Destinations and sets of subscriptions that are known by number between two emptyings; beyond it they are declared
anew (invariant 10)."""
NAMES_BYTES_MAX: Final = 64 << 20
"""Memory, about, of what was declared and not taken yet."""
NAME_BYTES: Final = 400
"""Memory, about, of one declaration beside its text: a number, two tuples, two lists, and its place."""
SUBSCRIBER_BYTES: Final = 150
"""Memory, about, of each subscription that a declaration names."""

_MASK: Final = (1 << 64) - 1

Declared = tuple[int, Any]
"""A number and what it stands for: a DestinationName, or the numbers of a set's subscriptions."""

DestinationName = tuple[str, str, bool, str, list[tuple[int, str]]]
"""Store, the token that its messages' ids begin with, whether it forgets all when it is closed, destination,
and the subscriptions that a topic has: number and `client:name`."""


def hash_of(seq: int) -> int:
    """Return 32 bits that look like chance, the same for a message's send and its acks: MurmurHash3's finaliser."""
    seq ^= seq >> 33
    seq = seq * 0xFF51AFD7ED558CCD & _MASK
    seq ^= seq >> 33
    seq = seq * 0xC4CEB9FE1A85EC53 & _MASK
    return (seq ^ seq >> 33) >> 32


@inner_loop
class Rows:
    """The rows that all stores of a router have told and nobody has taken yet. Any thread appends; one takes."""

    __slots__ = ("_chunks", "_room", "_transactions", "broken", "lost", "numbers", "size")

    def __init__(self, room: int, threshold: int) -> None:
        """`room`: bytes of rows that may wait. `threshold`: a message is kept whose hash is below it."""
        self.numbers: dict[DestinationState, int] = {}
        """Numbers of those declared since the names were taken; 0 of one that is not recorded, and a topic's is TOPIC
        more. Replaced then."""
        self.broken: bool = False
        """Nothing more is taken in."""
        self.lost: int = 0
        """Operations that found no room, about."""
        self.size: int = 0
        """Bytes that wait, about: a store's thread may be about to put its rows in."""
        self._room = room
        self._chunks: deque[bytes] = deque()
        self._transactions = itertools.count(1)

    def next_transaction(self) -> int:
        """Return the number of a transaction in one store."""
        return next(self._transactions) & AMOUNT_MAX or next(self._transactions)

    def append(self, rows: bytes) -> None:
        """Put them in, or lose them."""
        if self.broken or self.size + len(rows) > self._room:
            self.lost += len(rows) // ROW.size
        elif rows:
            self._chunks.append(rows)
            self.size += len(rows)

    def take(self) -> bytes:
        """Take all rows that wait."""
        taken = b"".join([self._chunks.popleft() for _ in range(len(self._chunks))])
        self.size = sum(map(len, list(self._chunks)))
        return taken


@inner_loop
class Source:
    """The rows that a Recorder begins with."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows: Rows = rows


class Buffer:
    """The rows, and what their numbers stand for."""

    def __init__(
        self, room: int, threshold: int = WHOLE, takes: Callable[[Destination], bool] = lambda _: True
    ) -> None:
        """Record those for which `takes` holds; the rest as Rows."""
        self.rows: Rows = Rows(room, threshold)
        self.threshold = threshold
        self.takes = takes
        self.declared: deque[Declared] = deque()
        self.declared_bytes: int = 0
        """Memory that these take, about."""
        self.sets: dict[tuple[int, ...], int] = {}
        """Numbers of sets of subscriptions."""
        self._next = itertools.count(1)

    def empty(self) -> tuple[bytes, list[Declared]]:
        """Take the rows that wait, and all that was declared for them and not taken before. By one thread at a time."""
        self.rows.numbers, self.sets = {}, {}  # first: what comes now is declared anew, so that each file has its names
        rows = self.rows.take()
        declared = [self.declared.popleft() for _ in range(len(self.declared))]
        self.declared_bytes = 0
        return rows, declared

    def declare(self, name: Any, size: int) -> int:
        """Return the number by which rows know a thing from now on; 0 if there is no room for it. `size`: bytes of its
        text and of its subscriptions."""
        if self.declared_bytes > NAMES_BYTES_MAX:
            return 0
        number = next(self._next) & AMOUNT_MAX or next(self._next)
        self.declared_bytes += NAME_BYTES + size
        self.declared.append((number, name))
        return number


class Recorder(Source):
    """One store's way into a buffer, for one opening of it."""

    __slots__ = ("buffer", "store", "token", "volatile")

    def __init__(self, buffer: Buffer, store: str, token: str, volatile: bool = False) -> None:
        """`token`: what ids of its messages begin with; of a volatile store another one for each opening."""
        super().__init__(buffer.rows)
        self.buffer: Buffer = buffer
        self.store: str = store
        self.token: Final = token
        self.volatile: bool = volatile

    def __call__(self, plan: Plan) -> None:
        """Tell of a plan that has just taken effect."""
        record_usage(self, plan)

    def number(self, state: DestinationState) -> int | None:
        """Return the number of a destination, which is declared if need be. 0 if the destination is not recorded, None
        if there is no room for its name."""
        buffer = self.buffer
        numbers = buffer.rows.numbers
        number = numbers.get(state)
        if number is None:
            number = 0  # of a map too: the advisor knows no destination whose messages take each other's place
            if not state.is_map and buffer.takes(state.destination):
                text, subscribers = str(state.destination), _named(state.subscriptions.values())
                name = (self.store, self.token, self.volatile, text, subscribers)
                # Not after it is remembered: who finds the number shall find the name.
                number = buffer.declare(name, len(text) + _size(subscribers))
                if not number:
                    return None
            number += TOPIC if state.is_topic else 0
            _remember(numbers, state, number)
        return number & AMOUNT_MAX

    def set_number(self, recipients: Sequence[SubscriptionState]) -> int | None:
        """Return the number of the set of subscriptions that a message is for; None if there is no room for their
        names."""
        buffer = self.buffer
        sets, key = buffer.sets, tuple([one.number for one in recipients])
        number = sets.get(key)
        if number is None:
            named = _named(recipients)
            number = buffer.declare(named, _size(named))
            if not number:
                return None
            _remember(sets, key, number)
        return number


def _remember(numbers: dict[Any, int], key: Any, number: int) -> None:
    if len(numbers) >= NAMES_MAX:
        numbers.clear()
    numbers[key] = number


def _named(subscribers: Iterable[SubscriptionState]) -> list[tuple[int, str]]:
    return [(one.number, ":".join(one.subscription.key)) for one in list(subscribers)]


def _size(named: list[tuple[int, str]]) -> int:
    return sum([SUBSCRIBER_BYTES + len(text) for _, text in named])


@inner_loop
def record_usage(recorder: Recorder, plan: Plan) -> None:
    """Tell the usage log of a plan that has just taken effect. Raises nothing."""
    rows = recorder.rows
    try:
        now = time.monotonic_ns() // 1000
        rows.append(b"".join(_rows(recorder, plan.tickets, now)))
    except Exception:  # a fault of ours: the messages are safe, and who sent them shall not hear of it
        rows.broken = True
        rows.lost += len(plan.changes)
        log.exception("the usage log stops: store %r cannot be recorded", recorder.store)


def _rows(recorder: Recorder, tickets: Iterable[Ticket], now: int) -> Iterator[bytes]:
    for ticket in tickets:
        content, transaction = ticket.content, 0
        if len(content) > 1 and ticket.transaction:
            transaction = recorder.rows.next_transaction()
        for change, outcome in zip(content, ticket.outcomes, strict=True):
            if type(change) is Commit:
                if outcome is not None:  # else it was committed before
                    across = int.from_bytes(change.branch.transaction[-4:], "big")
                    for part, done in zip(change.branch.changes, outcome, strict=True):
                        yield from _rows_of(recorder, part, done, now, across, ACROSS)
            else:
                yield from _rows_of(recorder, change, outcome, now, transaction, 0)


def _rows_of(
    recorder: Recorder, change: Change, outcome: Any, now: int, transaction: int, flags: int
) -> Iterator[bytes]:
    """Yield the rows of a change. `outcome`: what its `plan` returned."""
    buffer = recorder.buffer
    if type(change) is LeasedSend:
        change = change.send
    threshold, kind = buffer.threshold, type(change)
    if not isinstance(change, Send | Ack | SendMany | AckRange | Remove | Unsubscribe):
        return
    if type(change) is Send and outcome[0] != change.seq:
        return  # it was there already
    if kind is Unsubscribe and not outcome[1]:
        return
    number = recorder.number(change.state)
    if number is None:
        recorder.rows.lost += len(change.bodies) if isinstance(change, SendMany) else 1
        return
    if not number:
        return
    if isinstance(change, Send):
        if hash_of(change.seq) < threshold:
            needed, who = 1, 0
            if change.state.is_topic:
                needed = min(len(change.recipients), NEEDED_MAX)
                recipients = recorder.set_number(change.recipients)
                if recipients is None:
                    recorder.rows.lost += 1
                    return
                who = recipients
            amount = min(len(change.record), AMOUNT_MAX)
            yield ROW.pack(now, change.seq, number, amount, transaction, who, needed, SENT, flags)
    elif isinstance(change, Ack):
        if hash_of(change.seq) < threshold:
            yield ROW.pack(now, change.seq, number, 0, transaction, change.number, 0, ACKED, flags)
    elif isinstance(change, SendMany):
        for seq, body in enumerate(change.bodies, change.seq):
            if hash_of(seq) < threshold:
                amount = min(len(change.head) + len(body), AMOUNT_MAX)
                yield ROW.pack(now, seq, number, amount, transaction, 0, 1, SENT, flags)
    elif isinstance(change, AckRange):
        high, low = divmod(change.last - change.first, 1 << 32)
        yield ROW.pack(now, change.first, number, low, high, change.number, 0, ACKED_RANGE, flags)
    elif isinstance(change, Remove):
        yield ROW.pack(now, 0, number, 0, transaction, 0, 0, REMOVED, flags)
    else:
        yield ROW.pack(now, 0, number, 0, transaction, change.subscriber.number, 0, ENDED, flags)
