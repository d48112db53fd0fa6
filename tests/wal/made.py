"""Bytes of a log, made by hand."""

from __future__ import annotations

from google_crc32c import extend as crc32c

from anabranch.adapters.wal import format as w

KIND = 2


def header_of(number: int = 1, base_lsn: int = 1, **fields: int) -> w.SegmentHeader:
    values = dict.fromkeys(
        ("nonce", "durable_lsn", "prev_number", "prev_end", "prev_lsn", "counter", "snapshot_number",
         "snapshot_offset"), 0,
    )  # fmt: skip
    return w.SegmentHeader(
        log_id=b"0123456789abcdef", number=number, base_lsn=base_lsn, **{"capacity": 65536, **values, **fields}
    )


def batch_of(seed: int, offset: int, lsn: int, payloads: list[bytes], watermark: int = 0) -> bytes:
    """A whole batch at `offset`, of records of KIND with any payload."""
    records, at = b"", offset + w.BATCH_HEADER.size
    for payload in payloads:
        rest = w.RECORD_REST.pack(len(payload), lsn, KIND, 0, 0) + payload
        records += w.CRC.pack(crc32c(seed ^ (at + len(records)), rest)) + rest
        lsn += 1
    return w.encode_batch_header(seed, offset, len(records), len(payloads), lsn - len(payloads), watermark) + records
