"""The journal's bytes: the one place that knows them. Drawn in docs/format.md, pinned by tests/journal/test_golden.py.

All integers are little-endian. The checksum is CRC-32C (Castagnoli, polynomial 0x1EDC6F41), as google-crc32c computes
it; records and batches start it from `seed ^ offset` (rule J1), so that neither a reused file's old bytes nor a
message body that contains a journal can parse: a segment's seed is the CRC of its store id and its random nonce.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from google_crc32c import extend as crc32c

from ...policies.destination import NAME_BYTES_MAX
from ...policies.errors import CorruptionError
from ..base import TRANSACTION_BYTES

VERSION: Final = 1
MAGIC: Final = b"ANBRSEG\n"

RESTORE: Final = "restore it from a backup"
"""What to do about a store's file that is damaged or gone."""

HEADER_BYTES: Final = 4096
"""A segment's first page holds its header; batches follow."""

SEGMENT_HEADER = struct.Struct("<8sHHI16sQQQQQQQQQQQ")
assert SEGMENT_HEADER.size == 120

BATCH_MAGIC: Final = b"\xabBat"
BATCH_HEADER = struct.Struct("<4sIIIQQ")
assert BATCH_HEADER.size == 32

BATCH_REST = struct.Struct("<IIQQ")
"""A batch header behind its CRC."""
RECORD_HEADER = struct.Struct("<IIQBBH")
assert RECORD_HEADER.size == 20
CRC = struct.Struct("<I")
RECORD_REST = struct.Struct("<IQBBH")
"""A record's header without its CRC, which covers these bytes and the payload."""
assert CRC.size + RECORD_REST.size == RECORD_HEADER.size

SEND: Final = 1
ACK: Final = 2
ACK_RANGE: Final = 3
DESTINATION: Final = 4
DESTINATION_GONE: Final = 5
SNAPSHOT: Final = 6
PREPARE: Final = 7
COMMIT: Final = 8
ROLLBACK: Final = 9
SUBSCRIBE: Final = 10
UNSUBSCRIBE: Final = 11
DELIVERED: Final = 12
RECORD_TYPES: Final = frozenset(range(SEND, DELIVERED + 1))
"""What a store's journal holds. The router's decision log holds, beside SNAPSHOT, those below."""
EPOCH: Final = 16
XA_PREPARED: Final = 17
DECISION: Final = 18
FORGOTTEN: Final = 19

SEQ = struct.Struct("<Q")
SEQ_MAX: Final = (1 << 64) - 1
MESSAGE = struct.Struct("<IBBHIQQ")
"""What follows the seq in a SEND: destination id, priority, flags, bytes of the message id, bytes of the headers,
sent at (ms since the epoch), expires at (ms, 0 = never). Then message id, headers (msgpack), body."""
assert MESSAGE.size == 28
REQUEUED: Final = 1
"""In a SEND's flags: a dead letter that was put back, stored whatever the duplicate window said."""
FLAGS_AT: Final = 5
"""Where in MESSAGE the flags are."""
SEND_START = struct.Struct("<IQBBHQ")
"""A SEND's record header without its CRC, and the seq: what the leader puts before the rest."""
assert SEND_START.size == RECORD_REST.size + SEQ.size
MESSAGE_READ = struct.Struct("<8xQB3xQIBxHIQQ")
"""What a reader needs of a whole SEND: LSN, type, seq, destination id, priority, bytes of the message id and of the
headers, sent at, expires at."""
assert MESSAGE_READ.size == RECORD_HEADER.size + SEQ.size + MESSAGE.size

ACK_PAYLOAD = struct.Struct("<IIQ")
"""Destination id, subscription id (0: a queue), seq."""
assert ACK_PAYLOAD.size == 16

ACK_RECORD = struct.Struct("<IQBBHIIQ")
"""A whole ACK but for its CRC."""
assert ACK_RECORD.size == RECORD_REST.size + ACK_PAYLOAD.size

RANGE_PAYLOAD = struct.Struct("<IIQQ")
"""Destination id, subscription id, first and last seq: all the destination's messages between them are dead."""
assert RANGE_PAYLOAD.size == 24

DESTINATION_PAYLOAD = struct.Struct("<IB")
"""Destination id, kind (policies.destination.Kind). Then the name in UTF-8."""
assert DESTINATION_PAYLOAD.size == 5

DECLARATION_BYTES_MAX: Final = RECORD_HEADER.size + DESTINATION_PAYLOAD.size + NAME_BYTES_MAX
GONE_PAYLOAD = struct.Struct("<I")
"""Destination id: all its messages are dead, and the id needs a new DESTINATION before it is used again."""

SUBSCRIBE_PAYLOAD = struct.Struct("<IIQBHHI")
"""Destination id, subscription id, start (the seq after which messages are for it), flags, bytes of client, name and
selector. Then these three in UTF-8."""
assert SUBSCRIBE_PAYLOAD.size == 25
NO_LOCAL: Final = 1
HAS_SELECTOR: Final = 2
CLIENT_BYTES_MAX: Final = 1024
"""Of a client, and of a subscription's name."""
SELECTOR_BYTES_MAX: Final = 64 * 1024

UNSUBSCRIBE_PAYLOAD = struct.Struct("<II")
"""Destination id, subscription id."""
DELIVERED_PAYLOAD = struct.Struct("<IIQI")
"""Destination id, subscription id (0: a queue), seq, how often it has come back."""
assert DELIVERED_PAYLOAD.size == 20
DELIVERIES_MAX: Final = (1 << 32) - 1

SEND_OVERHEAD: Final = RECORD_HEADER.size + SEQ.size + MESSAGE.size
"""Bytes of a send in the journal beside message id, headers and body."""
ACK_BYTES: Final = RECORD_HEADER.size + ACK_PAYLOAD.size
RANGE_BYTES: Final = RECORD_HEADER.size + RANGE_PAYLOAD.size
GONE_BYTES: Final = RECORD_HEADER.size + GONE_PAYLOAD.size
DELIVERED_BYTES: Final = RECORD_HEADER.size + DELIVERED_PAYLOAD.size
UNSUBSCRIBE_BYTES: Final = RECORD_HEADER.size + UNSUBSCRIBE_PAYLOAD.size
BRANCH_ACK_BYTES: Final = max(ACK_BYTES, DELIVERED_BYTES)
"""An ack in a prepared branch: its commit writes the ack, its rollback that the message has come back."""
OUTCOME_BYTES: Final = RECORD_HEADER.size + TRANSACTION_BYTES
"""COMMIT and ROLLBACK: the transaction's id. A PREPARE's payload begins with it; the rest is transactions.py's."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself and of the one before (rule J1)."""

    store_id: bytes
    number: int
    nonce: int
    base_lsn: int
    """The LSN that its first record has, or would have."""
    durable_lsn: int
    """Known to be on disk when the segment was published."""
    prev_number: int
    """The segment before, 0 if this is the first. What lies between the two numbers is void."""
    prev_end: int
    """Where that one ends: what lies past it is void for ever."""
    prev_lsn: int
    """The last LSN of that one."""
    counter: int
    """The owner's number, as it was then: a store's highest seq."""
    snapshot_number: int
    """The segment that holds the latest snapshot by then, 0 if there is none."""
    snapshot_offset: int
    """The offset of the batch that holds it."""
    capacity: int
    """The file's size once it is full."""

    def encode(self) -> bytes:
        """A whole page, zeros after the header."""
        fields = (
            self.number, self.nonce, self.base_lsn, self.durable_lsn, self.prev_number, self.prev_end,
            self.prev_lsn, self.counter, self.snapshot_number, self.snapshot_offset, self.capacity,
        )  # fmt: skip
        blank = SEGMENT_HEADER.pack(MAGIC, VERSION, 0, 0, self.store_id, *fields)
        return SEGMENT_HEADER.pack(MAGIC, VERSION, 0, crc32c(0, blank), self.store_id, *fields).ljust(
            HEADER_BYTES, b"\0"
        )

    @classmethod
    def decode(cls, page: bytes, path: str) -> SegmentHeader:
        """Raises CorruptionError; its text tells a newer version from damage."""
        if len(page) < SEGMENT_HEADER.size or page[:8] != MAGIC:
            raise CorruptionError(path, 0, "not a journal segment: its header is missing or damaged", RESTORE)
        _, version, flags, crc, store_id, *fields = SEGMENT_HEADER.unpack_from(page)
        if version != VERSION:
            reason = f"format version {version}; this program reads version {VERSION}"
            raise CorruptionError(path, 8, reason, "use the version that wrote it")
        blank = SEGMENT_HEADER.pack(MAGIC, version, flags, 0, store_id, *fields)
        if crc32c(0, blank) != crc:
            raise CorruptionError(path, 0, "the segment header's checksum does not match", RESTORE)
        return cls(store_id, *fields)

    @property
    def seed(self) -> int:
        return segment_seed(self.store_id, self.nonce)


def segment_seed(store_id: bytes, nonce: int) -> int:
    """Where the checksums of a segment start from."""
    return int(crc32c(crc32c(0, store_id), nonce.to_bytes(8, "little")))


def encode_batch_header(seed: int, offset: int, length: int, count: int, base_lsn: int, watermark: int) -> bytes:
    """The header of a batch at `offset` whose records take `length` bytes (rule J2)."""
    rest = BATCH_REST.pack(length, count, base_lsn, watermark)
    return BATCH_MAGIC + CRC.pack(crc32c(seed ^ offset, rest)) + rest


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The header of one group commit."""

    length: int
    """Bytes of its records, this header not included."""
    count: int
    base_lsn: int
    watermark: int
    """The LSN known to be on disk when it was written."""


def decode_batch_header(data: bytes, seed: int, offset: int) -> BatchHeader | None:
    """None if `data` does not begin with a batch header of this segment at this offset."""
    if len(data) < BATCH_HEADER.size or data[:4] != BATCH_MAGIC:
        return None
    rest = data[8 : BATCH_HEADER.size]
    if crc32c(seed ^ offset, rest) != CRC.unpack_from(data, 4)[0]:
        return None
    return BatchHeader(*BATCH_REST.unpack(rest))
