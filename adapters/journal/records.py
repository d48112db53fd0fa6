"""Building the bytes of a batch from records, for owners whose batches are small and need no more."""

from __future__ import annotations

from collections.abc import Sequence

from google_crc32c import extend as crc32c

from . import format as f
from .ticket import Tail


def encode_records(tail: Tail, records: Sequence[tuple[int, bytes]], watermark: int) -> tuple[bytes, Tail]:
    """The batch after `tail` that holds these records, each a kind and a payload, and the log's end behind it."""
    seed, lsn, offset = tail.segment.seed, tail.lsn, tail.offset + f.BATCH_HEADER.size
    parts = [b""]
    for kind, payload in records:
        lsn += 1
        record = f.RECORD_REST.pack(len(payload), lsn, kind, 0, 0) + payload
        parts += (f.CRC.pack(crc32c(seed ^ offset, record)), record)
        offset += len(record) + f.CRC.size
    length = offset - tail.offset - f.BATCH_HEADER.size
    parts[0] = f.encode_batch_header(seed, tail.offset, length, len(records), tail.lsn + 1, watermark)
    return b"".join(parts), tail._replace(offset=offset, lsn=lsn)
