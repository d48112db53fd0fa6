"""The records by which each change is written in the journal, and read back: one record each, of the kind that stands
beside it below. Drawn in docs/format.md, pinned by tests/journal/test_golden.py. All integers are little-endian.

wal/format.py says what a record's header and a batch are; a message's record behind its seq, core/record/encoding.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from ...policies.errors import CorruptionError
from ...policies.names.destination import Destination, Kind
from ..core.messages import EXPIRES_MAX_MS
from ..core.operations.branches import Branch, Commit, Forget, Prepare, Rollback
from ..core.operations.changes import Ack, AckRange, Change, Postponed, Returned, Send
from ..core.operations.destination_changes import Declare, Remove, Subscribe, Unsubscribe
from ..core.operations.table import SEQ_MAX
from ..core.record.encoding import HEAD
from ..core.record.keys import KEY_BYTES_MAX
from ..core.record.place import order_of
from ..core.state.due import DUE_MAX_MS
from ..core.state.leases import DestinationState, SubscriptionState
from ..core.store_types import TRANSACTION_BYTES, Subscription
from ..wal import format as w
from ..wal.reader import BatchReader, Record, records_of
from ..wal.recovery.opening import require_end
from ..wal.segment import Segment
from .changes import Compacted, Copied, WriteSnapshot

Own = tuple[int, int, int]
"""The place of a record: its LSN, its offset in the segment, its length. A Send and a Branch have as `own`, and a Place
as its last field."""

SEND: Final = 1
ACK: Final = 2
ACK_RANGE: Final = 3
DECLARE: Final = 4
REMOVE: Final = 5
SNAPSHOT: Final = w.SNAPSHOT
PREPARE: Final = 7
COMMIT: Final = 8
ROLLBACK: Final = 9
SUBSCRIBE: Final = 10
UNSUBSCRIBE: Final = 11
RETURNED: Final = 12
FORGET: Final = 13
POSTPONED: Final = 14
COMPACTED: Final = 15

NUMBER = struct.Struct("<I")
"""A destination's number: what all begin with but those of a transaction. All of a REMOVE."""
SEND_START = struct.Struct("<IQ")
"""Destination and seq. Then the message's record."""
ACK_PAYLOAD = struct.Struct("<IIQ")
"""Destination, subscription (0: a queue, or all of a topic's), seq."""
RANGE_PAYLOAD = struct.Struct("<IIQQ")
"""Destination, subscription, first and last seq: all the messages between them are dead."""
DECLARE_START = struct.Struct("<IB")
"""Destination, kind (policies.destination.Kind). Then the name in UTF-8."""
SUBSCRIBE_START = struct.Struct("<IIQBIII")
"""Destination, subscription, start (the seq after which messages are for it), flags, bytes of client, name and
selector. Then these three in UTF-8."""
NO_LOCAL: Final = 1
HAS_SELECTOR: Final = 2
UNSUBSCRIBE_PAYLOAD = struct.Struct("<II")
"""Destination, subscription."""
RETURNED_PAYLOAD = struct.Struct("<IIQI")
"""Destination, subscription (0: a queue), seq, how often it has been given back."""
POSTPONED_PAYLOAD = struct.Struct("<IIQQ")
"""Destination, subscription (0: a queue, or all of a topic's), seq, until when it waits (ms; 0: no longer)."""
assert POSTPONED_PAYLOAD.size == 24
COMPACTED_PAYLOAD = struct.Struct("<QQQI")
"""Number of a file of copies, its nonce, where its records end, how many there are."""
DELIVERIES_MAX: Final = (1 << 32) - 1
NUMBER_MAX: Final = (1 << 31) - 1
"""The highest number of a destination or a subscription."""

SEND_OVERHEAD: Final = w.RECORD_HEADER.size + SEND_START.size
"""Bytes of a send in the journal beside the message's record."""

SEND_HEAD = struct.Struct("<IQBBHIQ")
"""A SEND's record header without its CRC, destination and seq: what stands before the message's record."""
assert SEND_HEAD.size == w.RECORD_REST.size + SEND_START.size
ACK_RECORD = struct.Struct("<IQBBHIIQ")
"""A whole ACK but for its CRC."""
assert ACK_RECORD.size == w.RECORD_REST.size + ACK_PAYLOAD.size


class Numbers(Protocol):
    """The meaning of a record's numbers to its reader: the index, as far as it was filled."""

    priorities: bool
    states: dict[int, DestinationState]
    subscriptions: dict[int, SubscriptionState]

    def find_copies(self, number: int, nonce: int, end: int, count: int) -> Segment:
        """Return the file of copies of which a record says so much. Raises CorruptionError where it is not there."""


class Codec(NamedTuple):
    """The codec of one type of change."""

    kind: int
    encode: Callable[[Any], bytes]
    """The payload of its record."""
    decode: Callable[[Record, Numbers], Change | None]
    """None for what concerns a destination or a subscription that was removed. Raises KeyError for a message of a
    destination that is not declared."""


def _encode_send(change: Send) -> bytes:
    return SEND_START.pack(change.state.number, change.seq) + change.record


def decode_send(record: Record, numbers: Numbers) -> Send:
    payload = record.payload
    number, seq = SEND_START.unpack_from(payload)
    if not 0 < seq < SEQ_MAX >> 1:
        raise ValueError(f"seq {seq} is none")
    priority, _, id_bytes, headers_bytes, _, expires_at_ms = HEAD.unpack_from(payload, SEND_START.size)
    name_at = SEND_START.size + HEAD.size
    if name_at + id_bytes + headers_bytes > len(payload):
        raise ValueError("its id and its headers are longer than it is")
    if expires_at_ms > EXPIRES_MAX_MS:
        raise ValueError(f"it expires at {expires_at_ms}")
    name = payload[name_at : name_at + id_bytes] if id_bytes else None
    state, order = numbers.states[number], order_of(priority, numbers.priorities)
    if state.is_map and not 0 < id_bytes <= KEY_BYTES_MAX:
        raise ValueError(f"the key of a map's value takes {id_bytes} bytes")
    change = Send(state, payload[SEND_START.size :], name, order, expires_at_ms)
    change.seq, change.own = seq, own_of(record)
    return change


def require_number(number: int) -> None:
    """Raise ValueError for what is no number of a destination or a subscription."""
    if not 0 < number <= NUMBER_MAX:
        raise ValueError(f"{number} is no number of a destination, nor of a subscription")


def own_of(record: Record) -> Own:
    """Return where a record is."""
    return record.lsn, record.offset, record.length


def _state(record: Record, numbers: Numbers) -> DestinationState | None:
    return numbers.states.get(NUMBER.unpack_from(record.payload)[0])


def _encode_ack(change: Ack) -> bytes:
    return ACK_PAYLOAD.pack(change.state.number, change.number, change.seq)


def _decode_ack(record: Record, numbers: Numbers) -> Ack | None:
    state = _state(record, numbers)
    _, number, seq = ACK_PAYLOAD.unpack(record.payload)
    return Ack(state, seq, number) if state is not None else None


def _encode_range(change: AckRange) -> bytes:
    return RANGE_PAYLOAD.pack(change.state.number, change.number, change.first, change.last)


def _decode_range(record: Record, numbers: Numbers) -> AckRange | None:
    state = _state(record, numbers)
    _, number, first, last = RANGE_PAYLOAD.unpack(record.payload)
    return AckRange(state, first, last, number) if state is not None else None


def _encode_returned(change: Returned) -> bytes:
    return RETURNED_PAYLOAD.pack(change.state.number, change.number, change.seq, min(change.count, DELIVERIES_MAX))


def _decode_returned(record: Record, numbers: Numbers) -> Returned | None:
    state = _state(record, numbers)
    _, number, seq, count = RETURNED_PAYLOAD.unpack(record.payload)
    return Returned(state, seq, number, count) if state is not None else None


def _encode_postponed(change: Postponed) -> bytes:
    return POSTPONED_PAYLOAD.pack(change.state.number, change.number, change.seq, change.due)


def _decode_postponed(record: Record, numbers: Numbers) -> Postponed | None:
    state = _state(record, numbers)
    _, number, seq, due = POSTPONED_PAYLOAD.unpack(record.payload)
    if due > DUE_MAX_MS:
        raise ValueError(f"it waits until {due}")
    return Postponed(state, seq, number, due) if state is not None else None


def _encode_declare(change: Declare) -> bytes:
    destination = change.state.destination
    return DECLARE_START.pack(change.state.number, destination.kind.value) + destination.name.encode()


def decode_declare(record: Record, numbers: Numbers) -> Declare:
    number, kind = DECLARE_START.unpack_from(record.payload)
    require_number(number)
    destination = Destination(Kind(kind), record.payload[DECLARE_START.size :].decode())
    state = numbers.states.get(number)
    if state is None:
        state = DestinationState(number, destination)
    if state.destination != destination:
        raise ValueError(f"{destination} has the number {number}, which is that of {state.destination}")
    return Declare(state)


def _encode_remove(change: Remove) -> bytes:
    return NUMBER.pack(change.state.number)


def _decode_remove(record: Record, numbers: Numbers) -> Remove | None:
    if len(record.payload) != NUMBER.size:
        raise ValueError(f"{len(record.payload)} bytes, not {NUMBER.size}")
    state = _state(record, numbers)
    return Remove(state) if state is not None else None


def _encode_subscribe(change: Subscribe) -> bytes:
    begun = change.subscriber
    _, name, client, selector, no_local = begun.subscription
    flags = (NO_LOCAL if no_local else 0) | (HAS_SELECTOR if selector is not None else 0)
    texts = [text.encode() for text in (client, name, selector or "")]
    start = SUBSCRIBE_START.pack(begun.topic.number, begun.number, begun.start, flags, *map(len, texts))
    return start + b"".join(texts)


def _decode_subscribe(record: Record, numbers: Numbers) -> Subscribe | None:
    state, payload = _state(record, numbers), record.payload
    if state is None:
        return None
    if not state.is_topic:
        raise ValueError(f"{state.destination} is no topic")
    _, number, start, flags, client_bytes, name_bytes, _ = SUBSCRIBE_START.unpack_from(payload)
    require_number(number)
    begun = numbers.subscriptions.get(number)
    if begun is None:
        name_at = SUBSCRIBE_START.size + client_bytes
        client = payload[SUBSCRIBE_START.size : name_at].decode()
        name = payload[name_at : name_at + name_bytes].decode()
        selector = payload[name_at + name_bytes :].decode() if flags & HAS_SELECTOR else None
        subscription = Subscription(state.destination, name, client, selector, bool(flags & NO_LOCAL))
        begun = SubscriptionState(number, state, subscription, start)
    if begun.topic is not state:
        raise ValueError(f"{begun.subscription} of {state.destination} has the number {number} already")
    change = Subscribe(state, number, begun.subscription, retroactive=False)
    change.subscriber = begun
    return change


def _encode_unsubscribe(change: Unsubscribe) -> bytes:
    return UNSUBSCRIBE_PAYLOAD.pack(change.state.number, change.subscriber.number)


def _decode_unsubscribe(record: Record, numbers: Numbers) -> Unsubscribe | None:
    state = _state(record, numbers)
    ended = numbers.subscriptions.get(UNSUBSCRIBE_PAYLOAD.unpack(record.payload)[1])
    if state is None or ended is None:
        return None
    change = Unsubscribe(state, ended.subscription.key)
    change.subscriber = ended
    return change


def _branch(transaction: bytes) -> Branch:
    if len(transaction) != TRANSACTION_BYTES:
        raise ValueError(f"a transaction's id takes {len(transaction)} bytes, not {TRANSACTION_BYTES}")
    return Branch(transaction, (), ())


def _encode_prepare(change: Prepare) -> bytes:
    return change.branch.transaction + change.branch.payload


def decode_prepare(record: Record, numbers: Numbers) -> Prepare:
    branch = _branch(record.payload[:TRANSACTION_BYTES])
    branch.payload, branch.own = record.payload[TRANSACTION_BYTES:], own_of(record)
    return Prepare(branch)


def _encode_outcome(change: Commit | Rollback) -> bytes:
    return change.branch.transaction


def _decode_commit(record: Record, numbers: Numbers) -> Commit:
    return Commit(_branch(record.payload))


def _decode_rollback(record: Record, numbers: Numbers) -> Rollback:
    return Rollback(_branch(record.payload))


def _encode_forget(change: Forget) -> bytes:
    return b"".join(change.transactions)


def _decode_forget(record: Record, numbers: Numbers) -> Forget:
    payload = record.payload
    if len(payload) % TRANSACTION_BYTES:
        raise ValueError(f"transactions' ids take {len(payload)} bytes, not {TRANSACTION_BYTES} each")
    return Forget([payload[at : at + TRANSACTION_BYTES] for at in range(0, len(payload), TRANSACTION_BYTES)])


def _encode_snapshot(change: WriteSnapshot) -> bytes:
    return change.payload


def _decode_snapshot(record: Record, numbers: Numbers) -> None:
    """Ignore a snapshot: it says again what was said before it."""


def _encode_compacted(change: Compacted) -> bytes:
    copies = change.copies
    count = copies.last_lsn + 1 - copies.base_lsn
    return COMPACTED_PAYLOAD.pack(copies.number, copies.nonce, copies.end or 0, count)


def _decode_compacted(record: Record, numbers: Numbers) -> Compacted:
    copies = numbers.find_copies(*COMPACTED_PAYLOAD.unpack(record.payload))
    return Compacted(copies, list(copied_in(copies)))


def copied_in(copies: Segment) -> Iterator[Copied]:
    """Yield the messages of a file of copies, from the file. Raises CorruptionError, OSError."""
    reader = BatchReader(copies, w.HEADER_BYTES, copies.base_lsn - 1, copies.end)
    for batch in reader:
        for record in records_of(batch):
            if record.kind == w.LOST:
                continue  # where it was copied from it may still be
            if record.kind != SEND:
                reason = f"record of unknown kind {record.kind}; a newer version wrote it"
                raise CorruptionError(str(copies.path), record.offset, reason)
            number, seq = SEND_START.unpack_from(record.payload)
            yield Copied(number, seq, own_of(record))
    require_end(reader, copies, copies.end)


CODECS: Final[dict[type, Codec]] = {
    Send: Codec(SEND, _encode_send, decode_send),
    Ack: Codec(ACK, _encode_ack, _decode_ack),
    AckRange: Codec(ACK_RANGE, _encode_range, _decode_range),
    Returned: Codec(RETURNED, _encode_returned, _decode_returned),
    Postponed: Codec(POSTPONED, _encode_postponed, _decode_postponed),
    Declare: Codec(DECLARE, _encode_declare, decode_declare),
    Remove: Codec(REMOVE, _encode_remove, _decode_remove),
    Subscribe: Codec(SUBSCRIBE, _encode_subscribe, _decode_subscribe),
    Unsubscribe: Codec(UNSUBSCRIBE, _encode_unsubscribe, _decode_unsubscribe),
    Prepare: Codec(PREPARE, _encode_prepare, decode_prepare),
    Commit: Codec(COMMIT, _encode_outcome, _decode_commit),
    Rollback: Codec(ROLLBACK, _encode_outcome, _decode_rollback),
    Forget: Codec(FORGET, _encode_forget, _decode_forget),
    Compacted: Codec(COMPACTED, _encode_compacted, _decode_compacted),
    WriteSnapshot: Codec(SNAPSHOT, _encode_snapshot, _decode_snapshot),
}
"""By type of change."""

DECODERS: Final = {codec.kind: codec.decode for codec in CODECS.values()}
"""By kind of record."""
