"""Reading messages back from the journal's files, while other threads ack, purge and reclaim them."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Final

from google_crc32c import extend as crc32c

from ...policies.errors import CorruptionError
from ..core.backend import Host, ReadError
from ..core.record.place import OWN, SEQ, Place
from ..core.state.leases import DestinationState
from ..core.state.rows import Rows
from ..system.acceleration import inner_loop
from ..system.files import is_out_of_files, refused
from ..wal.log import Log
from ..wal.segment import Segment
from .encoding import SEND, SEND_OVERHEAD

log: logging.Logger = logging.getLogger(__name__)

SPAN_BYTES: Final = 1 << 20
"""Messages that lie so close together are read with one call."""

AHEAD_BYTES: Final = 16 << 10
NEAR_BYTES: Final = 4 << 10
"""Who reads a message that lies so close behind the last one, or before it, may well read the next ones: so much is
read at once."""

CHUNK: Final = 64
"""Messages that are taken apart at once: Ctrl-C may have to wait for so many."""

HEAD = struct.Struct("<I4xQB3xIQ")
"""The head of a whole SEND, as a reader looks at it: CRC, LSN, kind, destination, seq."""
assert HEAD.size == SEND_OVERHEAD
_unpack = HEAD.unpack_from


class Bodies:
    """The messages of one store. Reading takes no lock of the store; a message that is not where the index said is
    looked up once more, to tell one that has died meanwhile, or was copied, from damage."""

    def __init__(self, host: Host, wal: Log, rows: Rows) -> None:
        self._host, self._log, self._rows = host, wal, rows
        self._ahead = b"", 0, 0
        """Bytes of a segment that were read ahead, their offset, and the segment's seed. A message in them says its
        LSN, which no other has."""
        self._last = 0, 0, 0
        """The number of the segment of the message that was read last, and where the message begins and ends."""

    def one(self, state: DestinationState, place: Place) -> bytes | None:
        """Return the record of a message, as Backend.bodies. Raises OutOfDescriptorsError, too."""
        while True:
            lsn, offset, length = place[OWN]
            body = body_of(*self._ahead, state.number, place)
            if body is not None:
                return body
            segment = self._log.table.find(lsn)
            if segment is not None:
                number, begin, end = self._last
                first, size = offset, length
                if segment.number == number and 0 <= offset - end < NEAR_BYTES:
                    size = max(length, AHEAD_BYTES)
                elif segment.number == number and 0 <= begin - offset - length < NEAR_BYTES:  # who goes backwards
                    first = max(min(offset, offset + length - AHEAD_BYTES), 0)
                    size = offset + length - first
                try:
                    file = segment.open()
                    data = os.pread(file.fd, size, first)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    if is_out_of_files(error):
                        what = f"message {place[SEQ]} of {state.destination} cannot be read now"
                        raise refused(f"{self._log.name}: {what}: {error}", error) from error
                    raise ReadError(str(segment.path), offset, f"the disk cannot read it: {error}") from error
                else:
                    self._last = segment.number, offset, offset + length
                    if size > length:
                        self._ahead = data, first, segment.seed
                    body = body_of(data, first, segment.seed, state.number, place)
                    if body is not None:
                        return body
            alive = self._now(state, place)
            if alive is None:
                return None
            if alive[OWN] == place[OWN]:
                break
            place = alive  # it was copied meanwhile (rule J8)
        where = str(segment.path) if segment is not None else str(self._log.files.directory)
        raise CorruptionError(
            where,
            offset,
            f"message {place[SEQ]} of {state.destination} does not read back: its bytes are damaged",
            "receivers go on behind it; restore the file from a backup to have it again",
        )

    def _now(self, state: DestinationState, place: Place) -> Place | None:
        """Return where a message is by now, if it lives."""
        return self._host.looked_up(lambda: self._rows.row(state, None, place[SEQ]))

    def page(self, state: DestinationState, places: Sequence[Place]) -> Iterator[Iterable[bytes | None]]:
        """Yield the records of a page, some at a time, in order."""
        for segment, run, start, end in self._segments_of(places):
            data = self._read_ahead(segment, start, end)
            for first in range(0, len(run), CHUNK):
                chunk = run[first : first + CHUNK]
                found = bodies_of(data, start, segment.seed if segment is not None else 0, state.number, chunk)
                # Those that are not there are read one by one, once each is asked for: they may be large.
                yield found if None not in found else map(partial(self._one_unless_found, state), chunk, found)

    def _one_unless_found(self, state: DestinationState, place: Place, found: bytes | None) -> bytes | None:
        return found if found is not None else self.one(state, place)

    def _segments_of(self, places: Sequence[Place]) -> Iterator[tuple[Segment | None, Sequence[Place], int, int]]:
        """Yield the parts of a page, cut where the segment changes, and where in it they begin and end; by priority a
        page may come back to one."""
        find = self._log.table.find
        lowest, highest, start, end = span_of(places)
        segment = find(lowest)
        if segment is find(highest):
            yield segment, places, start, end
            return
        for segment, run in groupby(places, lambda place: find(place[OWN][0])):
            part = list(run)
            yield segment, part, *span_of(part)[2:]

    def _read_ahead(self, segment: Segment | None, start: int, end: int) -> bytes:
        """Return the bytes between these offsets; nothing if that would read too much or cannot be done: each message
        is then read on its own, and errors are told there."""
        if segment is not None and end - start <= SPAN_BYTES:
            try:
                file = segment.open()
                return os.pread(file.fd, end - start, start)
            except OSError as error:
                log.debug("segment %s cannot be read ahead: %s", segment.path, error)
        return b""


@inner_loop
def span_of(places: Sequence[Place]) -> tuple[int, int, int, int]:
    """Return the lowest LSN of messages, the highest, and the offsets where the first begins and the last ends."""
    owns = [place[OWN] for place in places]
    lsns, starts = [lsn for lsn, _, _ in owns], [offset for _, offset, _ in owns]
    return min(lsns), max(lsns), min(starts), max([offset + length for _, offset, length in owns])


@inner_loop
def bodies_of(data: bytes, start: int, seed: int, number: int, places: Sequence[Place]) -> list[bytes | None]:
    """Return the records of many messages, as `body_of`."""
    return [body_of(data, start, seed, number, place) for place in places]


@inner_loop
def body_of(data: bytes, start: int, seed: int, number: int, place: Place) -> bytes | None:
    """Return the message's record in the journal's, in `data` that was read from offset `start` on; None if it is not
    there (damage, or a file used again)."""
    lsn, offset, length = place[OWN]
    first = offset - start
    if length < SEND_OVERHEAD or not 0 <= first <= len(data) - length:
        return None
    record = data[first : first + length]
    crc, found_lsn, kind, found_number, seq = _unpack(record)
    if crc != crc32c(seed ^ offset, record[4:]) or (found_lsn, kind, found_number, seq) != (
        lsn, SEND, number, place[SEQ],
    ):  # fmt: skip
        return None
    return record[SEND_OVERHEAD:]
