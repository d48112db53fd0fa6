"""The journal as bytes: files of batches, batches of records, and what is left of them after damage.

    batch   int32 28 | byte 2 | "WRITE BATCH" | int32 S | int64 Adler-32 of S bytes | S bytes of records
    record  int32 L, these 5 bytes included | byte 1 | L - 5 bytes of payload
    end     "-qMa4" where the next batch would begin

All big-endian. Memory is bounded by the largest batch, not by the journal. A batch whose checksum is wrong is left out
whole, since nothing says which of its records is the bad one; reading goes on at the next batch that proves whole.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Final, NamedTuple

from .commands import CommandError, RewrittenDataFile, decode
from .files import Damage, JournalFile, StoreFiles, open_file

BATCH_MAGIC = b"\x00\x00\x00\x1c\x02WRITE BATCH"
BATCH_HEADER = struct.Struct(">16sIQ")  # magic, bytes of records, Adler-32 (0: not computed)
assert BATCH_HEADER.size == 28
RECORD_HEADER = struct.Struct(">IB")
assert RECORD_HEADER.size == 5
END_MARK = b"-qMa4"
USER_RECORD = 1
REWRITTEN_FILE = 16  # the command that an ack-compaction file begins with
_ZEROS = b"\x00" * len(END_MARK)
_LOADED = b"LOADED "  # the first record after each start of the broker
_CHUNK = 1 << 20

Report = Callable[[Damage], object]


class Record(NamedTuple):
    """One record where it lies. `(file, offset, length)` is what ActiveMQ calls its location."""

    file: int
    offset: int
    length: int
    share: int
    """Its share of its batch's header: summed over a file, `length + share` is every byte that was written."""
    payload: bytes
    """The command number, then the command."""


class _Batch(NamedTuple):
    end: int
    checked: bool
    records: list[Record]


class _BadBatchError(Exception):
    """The bytes at a place are not a whole batch, for this reason; `torn` if they may be one that was never
    finished."""

    def __init__(self, reason: str, torn: bool = False) -> None:
        super().__init__(reason)
        self.torn = torn


class FileReader:
    """The batches of one file. Not for threads; use as `for record in FileReader(...)`, once."""

    def __init__(
        self, file: JournalFile, stream: BinaryIO, report: Report, *, is_last: bool, checked: bool = False
    ) -> None:
        self._file = file
        self._stream = stream
        self._report = report
        self._is_last = is_last
        self.checked: bool = checked
        """True if the last batch had a checksum; to begin with, that of the file before."""
        self._size = stream.seek(0, 2)
        self.saw_end_mark: bool = self._read(max(0, self._size - len(END_MARK)), len(END_MARK)) == END_MARK
        self.ended_without_mark: int | None = None
        self.end: int = 0
        """The offset where the data ends, once it was read."""

    def __iter__(self) -> Iterator[Record]:
        position = 0
        while True:
            try:
                batch = self._batch(position)
            except _BadBatchError as error:
                resume = self._resume(position)
                self._report_loss(position, resume, error)
                if resume is None:
                    return
                position = resume
                continue
            if batch is None:
                self.end = position
                return
            yield from batch.records
            self.checked, position = batch.checked, batch.end

    def _batch(self, position: int) -> _Batch | None:
        """Return the batch at `position`; None if the data properly ends there; raises _BadBatchError for anything
        else."""
        header = self._read(position, BATCH_HEADER.size)
        if header[:16] == BATCH_MAGIC:
            return self._load(position, header)
        if header[:5] == END_MARK:
            self.saw_end_mark = True
            return None
        rest = self._size - position
        if header[:5] == _ZEROS or rest < len(END_MARK):
            if self._resume(position) is not None:
                raise _BadBatchError("zeros where a batch should be")
            self.ended_without_mark = position
            return None
        if BATCH_MAGIC.startswith(header):
            raise _BadBatchError("the file ends inside the header of a batch", torn=True)
        raise _BadBatchError("neither a batch nor the end mark")

    def _load(self, position: int, header: bytes) -> _Batch:
        if len(header) < BATCH_HEADER.size:
            raise _BadBatchError("the file ends inside the header of a batch", torn=True)
        _, size, checksum = BATCH_HEADER.unpack(header)
        start = position + BATCH_HEADER.size
        if size > self._size - start:
            left = self._size - start
            raise _BadBatchError(f"the batch should hold {size} bytes, the file ends after {left}", torn=True)
        body = self._read(start, size)
        if checksum and zlib.adler32(body) != checksum:
            # The end mark is written with the batch and after it: where it is, the batch was whole once.
            finished = self._read(start + size, len(END_MARK)) == END_MARK
            raise _BadBatchError(f"the checksum of a batch of {size} bytes is wrong", torn=not finished)
        if self.checked and not checksum and _LOADED not in body[:64]:
            # Only a restart can switch checksums off; elsewhere this is a header that lost its bytes.
            raise _BadBatchError("a batch without checksum follows batches that have one")
        records = self._split(start, body)
        return _Batch(start + size, bool(checksum), records)

    def _split(self, start: int, body: bytes) -> list[Record]:
        places = []
        at = 0
        while at < len(body):
            if at + RECORD_HEADER.size > len(body):
                raise _BadBatchError(f"a record's header is cut at offset {start + at}")
            length, kind = RECORD_HEADER.unpack_from(body, at)
            if kind != USER_RECORD or length <= RECORD_HEADER.size or at + length > len(body):
                raise _BadBatchError(f"no record of type {kind} and length {length} can be at offset {start + at}")
            places.append((at, length))
            at += length
        if not places:
            raise _BadBatchError("a batch without records")
        share, rest = divmod(BATCH_HEADER.size, len(places))
        number = self._file.number
        return [
            Record(number, start + at, length, share + (1 if i < rest else 0), body[at + 5 : at + length])
            for i, (at, length) in enumerate(places)
        ]

    def _resume(self, bad: int) -> int | None:
        """Return the next place after `bad` where a whole batch lies."""
        position = bad + 1
        while (position := self._find(BATCH_MAGIC, position)) >= 0:
            try:
                self._load(position, self._read(position, BATCH_HEADER.size))
            except _BadBatchError:
                position += 1
            else:
                return position
        return None

    def _report_loss(self, bad: int, resume: int | None, error: _BadBatchError) -> None:
        path = str(self._file.path)
        if resume is not None:
            reason = f"{error}; {resume - bad} bytes are skipped, the next whole batch is at {resume}"
            self._report(Damage(path, bad, reason, "damaged", resume - bad))
            return
        self.end = bad
        length = self._size - bad
        if error.torn and self._is_last:
            reason = f"{error}; it is the last one of the file being written: normal after a crash"
            self._report(Damage(path, bad, reason, "torn", length))
        else:
            reason = f"{error}; no whole batch follows, the last {length} bytes of the file are lost"
            self._report(Damage(path, bad, reason, "damaged", length))

    def _read(self, position: int, length: int) -> bytes:
        self._stream.seek(position)
        return self._stream.read(length)

    def _find(self, pattern: bytes, position: int) -> int:
        """Return where `pattern` is next, at or after `position`; -1 if nowhere."""
        overlap = len(pattern) - 1
        while position < self._size:
            chunk = self._read(position, _CHUNK + overlap)
            if (at := chunk.find(pattern)) >= 0:
                return position + at
            if len(chunk) <= overlap:
                break
            position += len(chunk) - overlap
        return -1


@dataclass(frozen=True, slots=True)
class FileSummary:
    """The findings of reading one file."""

    number: int
    used_bytes: int
    records: int


class Journal:
    """The records of one store, in the order of the file numbers. Copies that ack compaction made come at the place of
    the file that they are from: what was sent after it is not theirs to ack.

    Constructing it touches nothing. It may be read any number of times; each reading reports the damage it meets.
    """

    def __init__(self, files: StoreFiles, progress: Callable[[int, int], None] | None = None) -> None:
        self.files = files
        self._progress = progress
        self.total_bytes: Final = sum(file.bytes for file in files.files)

    def records(self, report: Report, summaries: dict[int, FileSummary] | None = None) -> Iterator[Record]:
        """Yield every whole record. `report` gets each Damage, `summaries` what each file held, as the reading goes
        on."""
        unmarked: list[tuple[JournalFile, int, bool]] = []
        marked, checked, done = False, False, 0
        last = self.write_file()
        sources = {file: _source(self._heads[file.number]) for file in self.files.files}
        for file in sorted(self.files.files, key=lambda file: (sources[file] or file.number, file.number)):
            is_copy = sources[file] is not None  # of another time: its checksums say nothing of those beside it
            is_last = last is not None and file.number == last.number
            try:
                with open_file(file.path) as stream:
                    before = checked and not is_copy
                    reader, count = FileReader(file, stream, report, is_last=is_last, checked=before), 0
                    for record in reader:
                        count += 1
                        yield record
            except OSError as error:
                report(_unreadable(file, error))
                continue
            if not is_copy:
                checked = reader.checked
            marked = marked or reader.saw_end_mark
            if reader.ended_without_mark is not None:
                unmarked.append((file, reader.ended_without_mark, is_last))
            if summaries is not None:
                summaries[file.number] = FileSummary(file.number, reader.end, count)
            done += file.bytes
            if self._progress is not None:
                self._progress(done, self.total_bytes)
        _report_unmarked(unmarked, marked, report)

    def write_file(self) -> JournalFile | None:
        """Return the file that the broker was writing: the last with data in it that ack compaction did not make.

        Compaction files get numbers above that of the file being written.
        """
        for file in reversed(self.files.files):
            head = self._heads[file.number]
            if head[:16] == BATCH_MAGIC and head[33:34] != bytes([REWRITTEN_FILE]):
                return file
        return self.files.files[-1] if self.files.files else None

    def looks_like_one(self) -> bool:
        """Return whether any file begins as a journal file does; tells a damaged journal from something else
        altogether."""
        return any(head[:16] == BATCH_MAGIC or head[:5] == END_MARK for head in self._heads.values())

    @cached_property
    def _heads(self) -> dict[int, bytes]:
        """The first bytes of each file by number. They are read once, so that files have one order in each reading."""
        return {file.number: _head(file) for file in self.files.files}


def _head(file: JournalFile) -> bytes:
    try:
        with open_file(file.path) as stream:
            return stream.read(64)
    except OSError:
        return b""  # reported when the file is read


def _source(head: bytes) -> int | None:
    """Return the number of the file whose acks the one with this head holds copies of; None where ack compaction did
    not make it."""
    if head[:16] != BATCH_MAGIC or head[33:34] != bytes([REWRITTEN_FILE]):
        return None
    try:
        command = decode(head[33 : 28 + int.from_bytes(head[28:32])])
    except CommandError:
        return None  # reported when the file is read
    return command.source_file if isinstance(command, RewrittenDataFile) else None


def _unreadable(file: JournalFile, error: OSError) -> Damage:
    if isinstance(error, FileNotFoundError):
        return Damage(str(file.path), 0, "the file vanished while the journal was being read", "missing", file.bytes)
    return Damage(str(file.path), 0, f"cannot be read: {error.strerror}", "unreadable", file.bytes)


def _report_unmarked(unmarked: list[tuple[JournalFile, int, bool]], marked: bool, report: Report) -> None:
    """Name the files whose data ends without the end mark: cut short, unless the whole journal is from before it."""
    if not unmarked:
        return
    if not marked:
        file, end, _ = unmarked[-1]
        reason = "no file of this journal has an end mark: an old broker wrote it, or its end was cut off"
        report(Damage(str(file.path), end, reason, "torn"))
        return
    for file, end, is_last in unmarked:
        reason = "the data ends without an end mark: what followed was cut off or overwritten with zeros"
        report(Damage(str(file.path), end, reason, "torn" if is_last else "damaged", max(0, file.bytes - end)))
