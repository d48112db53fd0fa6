"""The bytes of a log: segment headers, batches and the records in them. The one place that knows them; what a record's
payload is, its owner knows. Drawn in docs/format.md, pinned by golden bytes.

All integers are little-endian. The checksum is CRC-32C (Castagnoli, polynomial 0x1EDC6F41), as google-crc32c computes
it; records and batches start it from `seed ^ offset` (rule J1), so that neither a reused file's old bytes nor a
payload that contains a log can parse: a segment's seed is the CRC of its owner's id and its random nonce.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from google_crc32c import extend as crc32c

from ...policies.errors import CorruptionError

VERSION: Final = 3
MAGIC: Final = b"ANBRSEG\n"

RESTORE: Final = "restore it from a backup, or go on with all that can be read: see `anabranch salvage --help`"
"""Advice on what to do about a store's file that is damaged or gone."""

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

COPIES: Final = 1 << 63
"""From here on numbers are those of files of copies (copies.py), and LSNs those of records in them: no log comes so
far."""

SNAPSHOT: Final = 6
"""The kind of record after which earlier segments may be released: it says what in them was still needed. All other
kinds are the owner's, but for the next."""
LOST: Final = 20
"""The kind of record that stands where a damaged one was (mending.py). It says nothing."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header of a segment, which tells of it and of the one before (rule J1)."""

    log_id: bytes
    """The id of the log: 16 random bytes, a store's id (rule I4)."""
    number: int
    nonce: int
    base_lsn: int
    """The LSN that its first record has, or would have."""
    durable_lsn: int
    """Known to be on disk when the segment was published."""
    prev_number: int
    """The segment before, 0 if this is the first. All that lies between the two numbers is void."""
    prev_end: int
    """The offset where that one ends: what lies past it is void for ever."""
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
        """Return the header as a whole page, zeros behind it."""
        fields = (
            self.number, self.nonce, self.base_lsn, self.durable_lsn, self.prev_number, self.prev_end,
            self.prev_lsn, self.counter, self.snapshot_number, self.snapshot_offset, self.capacity,
        )  # fmt: skip
        blank = SEGMENT_HEADER.pack(MAGIC, VERSION, 0, 0, self.log_id, *fields)
        return SEGMENT_HEADER.pack(MAGIC, VERSION, 0, crc32c(0, blank), self.log_id, *fields).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, page: bytes, path: str) -> SegmentHeader:
        """Return the header in a page. Raises CorruptionError; its text tells a newer version from damage."""
        if len(page) < SEGMENT_HEADER.size or page[:8] != MAGIC:
            raise CorruptionError(path, 0, "not a journal segment: its header is missing or damaged", RESTORE)
        _, version, flags, crc, log_id, *fields = SEGMENT_HEADER.unpack_from(page)
        if version != VERSION:
            reason = f"format version {version}; this program reads version {VERSION}"
            raise CorruptionError(path, 8, reason, "use the version that wrote it")
        blank = SEGMENT_HEADER.pack(MAGIC, version, flags, 0, log_id, *fields)
        if crc32c(0, blank) != crc:
            raise CorruptionError(path, 0, "the segment header's checksum does not match", RESTORE)
        return cls(log_id, *fields)

    @property
    def seed(self) -> int:
        return segment_seed(self.log_id, self.nonce)


def segment_seed(log_id: bytes, nonce: int) -> int:
    """Return the number from which the checksums of a segment start."""
    return int(crc32c(crc32c(0, log_id), nonce.to_bytes(8, "little")))


def encode_batch_header(seed: int, offset: int, length: int, count: int, base_lsn: int, watermark: int) -> bytes:
    """Return the header of a batch at `offset` whose records take `length` bytes (rule J2)."""
    rest = BATCH_REST.pack(length, count, base_lsn, watermark)
    return BATCH_MAGIC + CRC.pack(crc32c(seed ^ offset, rest)) + rest


class BatchHeader(NamedTuple):
    """The header of one batch."""

    length: int
    """Bytes of its records, this header not included."""
    count: int  # type: ignore[assignment]  # instead of tuple's
    base_lsn: int
    watermark: int
    """The LSN known to be on disk when it was written."""


def decode_batch_header(data: bytes, seed: int, offset: int) -> BatchHeader | None:
    """Return the header of a batch. None if `data` does not begin with a batch header of this segment at this
    offset."""
    if len(data) < BATCH_HEADER.size or data[:4] != BATCH_MAGIC:
        return None
    rest = data[8 : BATCH_HEADER.size]
    if crc32c(seed ^ offset, rest) != CRC.unpack_from(data, 4)[0]:
        return None
    return BatchHeader(*BATCH_REST.unpack(rest))
