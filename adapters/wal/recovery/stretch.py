"""A stretch of a segment in which something does not read back, and what is put there instead (mending.py)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from google_crc32c import extend as crc32c

from ....policies.errors import CorruptionError
from .. import format as f
from ..reader import read_at
from ..segment import Segment

REMNANT_BYTES: Final = 64 << 10
"""Bytes of what is lost that are shown to the log's owner, who may make something of it."""
_LSN = struct.Struct("<Q")
LSN_AT: Final = 8
"""The offset of the LSN in a record's header."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A stretch of a segment that does not read back."""

    path: str
    offset: int
    size: int
    """Bytes."""
    first_lsn: int
    last_lsn: int
    """One before the first: no record was lost, but the header in front of some."""
    remnant: bytes = b""
    """The bytes that stand there, damaged, up to REMNANT_BYTES of them."""
    reason: str = "it does not read back"


class Stretch:
    """A part of a segment, from one batch boundary to another, in which something does not read back."""

    def __init__(
        self, segment: Segment, start: int, end: int, first_lsn: int, last_lsn: int, open_ended: bool = False
    ) -> None:
        """`open_ended`: nothing says where it ends, so what is left over behind its last record is not part of it."""
        self._segment, self._start, self._end = segment, start, end
        self._first, self._last, self._open_ended = first_lsn, last_lsn, open_ended

    def blank(self, watermark: int) -> bytes:
        """Return the bytes that stand there if all is lost."""
        return self._encode(
            [(f.BATCH_HEADER.size, self._end - self._start, self._first, self._last, False)], b"", watermark
        )

    def mend(self, watermark: int) -> tuple[bytes, list[Loss]]:
        """Return the bytes that stand there instead, and what is lost."""
        data = read_at(self._segment.reading(), self._start, self._end - self._start)
        data += bytes(self._end - self._start - len(data))  # a file that was cut short
        parts = self._parts(data)
        losses = [
            Loss(
                str(self._segment.path), self._start + start, end - start, first, last,
                data[start : min(end, start + REMNANT_BYTES)],
            )
            for start, end, first, last, whole in parts
            if not whole and last >= first
        ]  # fmt: skip
        if not losses:
            path, at = str(self._segment.path), self._start
            losses = [Loss(path, at, f.BATCH_HEADER.size, 1, 0, reason="a batch's header is damaged")]
        return self._encode(parts, data, watermark), losses

    def _parts(self, data: bytes) -> list[_Part]:
        """Return what there is behind the batch's header: records that are whole, and gaps with the LSNs that are
        missing."""
        parts: list[_Part] = []
        position, lsn = f.BATCH_HEADER.size, self._first
        while lsn <= self._last:
            found = self._record(data, position)
            if found is not None and found[0] == lsn:
                parts.append((position, position + found[1], lsn, lsn, True))
                position, lsn = position + found[1], lsn + 1
                continue
            following = self._following(data, position, lsn)
            if following is None:
                end = len(data)
                if self._open_ended:
                    least = position + (self._last - lsn + 1) * f.RECORD_HEADER.size
                    end = max(least, self._claimed(data, position))
                parts.append((position, end, lsn, self._last, False))
                position, lsn = end, self._last + 1
                break
            at, next_lsn = following
            parts.append((position, at, lsn, next_lsn - 1, False))
            position, lsn = at, next_lsn
        if position < len(data) and not self._open_ended:
            parts.append((position, len(data), lsn, lsn - 1, False))
        return _representable(parts)

    def _claimed(self, data: bytes, position: int) -> int:
        """Return where the damaged record at a place would end, if its length is right; 0 if it cannot be."""
        if position + f.RECORD_HEADER.size > len(data):
            return 0
        end = position + f.RECORD_HEADER.size + int(f.RECORD_HEADER.unpack_from(data, position)[1])
        return end if end <= len(data) else 0

    def _record(self, data: bytes, position: int) -> tuple[int, int] | None:
        """Return LSN and length of the record at a place; None if it is not whole."""
        if position + f.RECORD_HEADER.size > len(data):
            return None
        crc, length, lsn, _, _, _ = f.RECORD_HEADER.unpack_from(data, position)
        end = position + f.RECORD_HEADER.size + length
        if end > len(data) or not self._first <= lsn <= self._last:
            return None
        if crc32c(self._segment.seed ^ (self._start + position), data[position + f.CRC.size : end]) != crc:
            return None
        return lsn, end - position

    def _following(self, data: bytes, position: int, lsn: int) -> tuple[int, int] | None:
        """Return place and LSN of the first whole record behind a damaged one."""
        claimed = self._claimed(data, position)
        if claimed and (found := self._record(data, claimed)) is not None and found[0] == lsn + 1:
            return claimed, found[0]
        at, last = position + 1, len(data) - f.RECORD_HEADER.size
        unpack, first, highest = _LSN.unpack_from, lsn, self._last
        while at <= last:
            (found_lsn,) = unpack(data, at + LSN_AT)
            if first <= found_lsn <= highest and self._record(data, at) is not None:
                return at, found_lsn
            if not found_lsn and data[at : at + _ZEROS] == _BLANK:
                at += _ZEROS - LSN_AT - _LSN.size
            at += 1
        return None

    def _encode(self, parts: list[_Part], data: bytes, watermark: int) -> bytes:
        """Return the parts as batches: one, or one more wherever a batch's header alone is lost."""
        out, records, base, count, header_at = bytearray(), bytearray(), self._first, 0, 0
        seed = self._segment.seed

        def finish() -> None:
            start = self._start + header_at
            out.extend(f.encode_batch_header(seed, start, len(records), count, base, watermark))
            out.extend(records)

        for start, end, first, last, whole in parts:
            if whole:
                records += data[start:end]
                count += 1
            elif last < first:  # batches' headers alone: marks, but for the last of them
                for at in range(start, end, f.BATCH_HEADER.size):
                    finish()
                    records, base, count, header_at = bytearray(), first, 0, at
            else:
                size = end - start - (last - first) * f.RECORD_HEADER.size
                for lsn in range(first, last + 1):
                    records += lost_record(
                        seed, self._start + header_at + f.BATCH_HEADER.size + len(records), lsn, size
                    )
                    size = f.RECORD_HEADER.size
                count += last - first + 1
        finish()
        return bytes(out)


_Part = tuple[int, int, int, int, bool]
"""From, to, first and last LSN, whether it is a whole record. Without LSNs and not whole: headers of batches."""

_ZEROS: Final = 4096
_BLANK: Final = bytes(_ZEROS)


def _representable(parts: list[_Part]) -> list[_Part]:
    """Return parts in which each gap can be filled: else the record before it counts as lost, too."""
    fitting: list[_Part] = []
    for part in parts:
        while not _fits(part):
            if not fitting:
                raise CorruptionError("", part[0], "what is left of the log does not fit together", f.RESTORE)
            start, _, first, _, _ = fitting.pop()
            part = (start, part[1], first, part[3], False)
        fitting.append(part)
    return fitting


def _fits(part: _Part) -> bool:
    """Return whether a gap has room: one without LSNs is the headers of batches; any other has room for its records."""
    start, end, first, last, whole = part
    if last < first:
        return (end - start) % f.BATCH_HEADER.size == 0
    return whole or end - start >= (last - first + 1) * f.RECORD_HEADER.size


def lost_record(seed: int, offset: int, lsn: int, size: int) -> bytes:
    """Return a record of so many bytes, its header included, that stands where another one was."""
    rest = f.RECORD_REST.pack(size - f.RECORD_HEADER.size, lsn, f.LOST, 0, 0) + bytes(size - f.RECORD_HEADER.size)
    return f.CRC.pack(crc32c(seed ^ offset, rest)) + rest
