"""A log's directory: segment files, the pool of files to use again, and what makes a change of names durable.

    <number>.seg      a published segment: its header is whole, its name is durable
    pool-<n>.free     a released or prepared file of a segment's full size, zero-filled or with void content, waiting to
                      become a segment
    <n>.copies        what still counts of earlier segments (copies.py)
    <n>.spare         the reserve (reserve.py)
    watermark         says which segment is the newest (watermark.py)
    *.tmp             unfinished; removed at open

A segment is published by writing its header, fsync, rename, directory fsync (rule J1), and released by rename to the
pool or unlink, then directory fsync (rule J7).
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ....policies.errors import CorruptionError
from ...system.files import FILE_MODE, allocate, new_directory, open_to_read, sync_file, write_all, zero_fill
from ..format import COPIES, HEADER_BYTES, SegmentHeader
from .archive import Archive
from .file import FILL_MAX, FILL_MIN, File
from .reserve import SPARE_SUFFIX, Reserve
from .watermark import Watermark, WatermarkFile

log: logging.Logger = logging.getLogger(__name__)

SEGMENT_SUFFIX: Final = ".seg"
POOL_SUFFIX: Final = ".free"
COPIES_SUFFIX: Final = ".copies"
UNFINISHED_SUFFIX: Final = ".tmp"


class SegmentFiles:
    """The files of one log's directory.

    One thread at a time publishes (who submits), one releases (the reclaimer), one prepares; these three may run beside
    each other: a file enters the pool when all is durable that makes it free, and only who publishes takes it.

    A file in the pool is allocated up to `segment_bytes` at least.
    """

    def __init__(
        self,
        directory: Path,
        segment_bytes: int,
        count_sync: Callable[[], None] = lambda: None,
        file_mode: int = FILE_MODE,
    ) -> None:
        """`count_sync` is called before each wait for the disk."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        """Bytes of a segment, unless one ticket needs a larger one."""
        self.file_mode = file_mode
        self.pool: list[tuple[Path, int]] = []
        """Files to use again and their sizes."""
        self.reserve: Final = Reserve(directory, file_mode)
        self._short: list[Path] = []
        """Files called as those of the pool are, and too short for it."""
        self.count_sync = count_sync
        self._pool_numbers = itertools.count(1)

    def path(self, number: int) -> Path:
        return segment_path(self.directory, number)

    def _named(self, start: str, end: str) -> list[Path]:
        """Return the files whose names begin and end so, in no order; none if there is no directory. Path.glob would
        find none either where the directory cannot be read. Raises OSError."""
        try:
            paths = list(self.directory.iterdir())
        except FileNotFoundError:
            return []
        return [path for path in paths if path.name.startswith(start) and path.name.endswith(end)]

    def headers(self) -> Iterator[SegmentHeader]:
        """Yield the headers of all published segments, in no order. Raises CorruptionError for one that has no valid
        header."""
        for path in self._named("", SEGMENT_SUFFIX):
            header = read_header(path)
            if self.path(header.number) != path:
                raise CorruptionError(str(path), 16, f"the header says that this is segment {header.number}")
            yield header

    def copies(self) -> dict[int, Path]:
        """Return the files of copies by number; what is in them is not looked at. Raises OSError."""
        paths = self._named("", COPIES_SUFFIX)
        return {COPIES | int(path.stem): path for path in paths if path.stem.isdigit()}

    def load_pool(self) -> int:
        """Take stock of the pool and of the reserve at open; returns the highest segment number that a file in them
        ever was (rule I1)."""
        highest, last = 0, 0
        spare = self._named("", SPARE_SUFFIX)
        for path in spare:
            highest = max(highest, _number(path))
        self.reserve.load(spare)
        for path in self._named("pool-", POOL_SUFFIX):
            highest = max(highest, _number(path))
            size = path.stat().st_size
            if size >= self.segment_bytes:
                self.pool.append((path, size))
            else:
                self._short.append(path)
            last = max(last, int(path.stem.partition("-")[2]))
        self._pool_numbers = itertools.count(last + 1)
        return highest

    @property
    def pool_bytes(self) -> int:
        return sum(size for _, size in list(self.pool))

    def clean(self) -> None:
        """Remove what an interrupted creation left, and what is too short for the pool."""
        for path in self._named("", UNFINISHED_SUFFIX):
            path.unlink()
        while self._short:
            self._short[-1].unlink(missing_ok=True)
            self._short.pop()

    def publish(
        self, header: SegmentHeader, seal: Callable[[], None], size: int = 0, spare: Path | None = None
    ) -> tuple[File, int]:
        """Make a segment: of a `spare` file of the reserve; else from the pool if it has a file and `capacity` is the
        standard one; else anew, with room for `size` bytes behind its header.

        Returns the file and up to where it is allocated, which the file itself tells. `seal` is called just before
        the segment may be seen on disk: after an OSError before that nothing has changed.
        """
        path = self.path(header.number)
        source, flags = path.with_suffix(UNFINISHED_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_TRUNC
        pooled = None
        if spare is not None:
            source, flags = spare, os.O_RDWR
        elif header.capacity == self.segment_bytes and self.pool:
            pooled = self.pool.pop()
            source, flags = pooled[0], os.O_RDWR
        try:
            file = File(source, flags, self.file_mode)
            write_all(file.fd, header.encode(), 0)
            if spare is None and pooled is None and size:
                _fill(file, HEADER_BYTES + size, header.capacity)
            self.count_sync()
            sync_file(file.fd)
            allocated = os.fstat(file.fd).st_size
            names = self.names()
        except OSError:
            if pooled:
                self.pool.append(pooled)
            elif spare is None:
                source.unlink(missing_ok=True)
            raise
        if spare is not None:
            self.reserve.taken(spare)  # first: interrupted later, it would be taken for a spare file still
        seal()
        source.rename(path)
        self.sync_names(names)
        return file, allocated

    def prepare(self) -> None:
        """Put a zero-filled file into the pool, ahead of need."""
        size = self.segment_bytes
        target = self._pool_path()
        unfinished = target.with_suffix(UNFINISHED_SUFFIX)
        file = File(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, self.file_mode)
        try:
            zero_fill(file.fd, 0, size)
            sync_file(file.fd)
        except OSError:
            unfinished.unlink()
            raise
        unfinished.rename(target)
        self.pool.append((target, size))

    def release(self, segments: list[tuple[int, int]], pool_files: int, archive: Archive | None, names: File) -> None:
        """Take segments (number, capacity) off the log, oldest first: into the archive if there is one, else into
        the reserve while it lacks files, else into the pool while it has room, else away. One that a kill has left
        shorter than its capacity does not go into the pool, unless it lacks so little that it is filled up.

        `names` is what names() returned. Reserve and pool get them only once the directory is synced: a header written
        before that into a file which after a power failure has its old name again would be damage to that segment.
        """
        adopted: list[tuple[Path, int]] = []
        spare: list[tuple[Path, int]] = []
        for number, capacity in segments:
            path = self.path(number)
            if archive is not None and number < COPIES:  # what is copied was in a segment before
                archive.take(path)
            elif (made := self.reserve.make_of(path, len(spare))) is not None:
                spare.append(made)
            elif (
                capacity == self.segment_bytes
                and len(self.pool) + len(adopted) < pool_files
                and _fill_up(path, self.segment_bytes)
            ):
                target = self._pool_path()
                path.rename(target)
                adopted.append((target, self.segment_bytes))
            else:
                path.unlink(missing_ok=True)
        if segments:
            self.sync_names(names)
            self.pool.extend(adopted)
            self.reserve.put_in(spare)

    def names(self) -> File:
        """Return the directory, open for sync_names. Whoever changes names when there is no way back opens it before,
        when running out of descriptors does no harm."""
        return File(self.directory, os.O_RDONLY | os.O_DIRECTORY)

    def sync_names(self, names: File) -> None:
        """Make what was renamed or removed durable."""
        self.count_sync()
        sync_file(names.fd)

    def _pool_path(self) -> Path:
        return self.directory / f"pool-{next(self._pool_numbers)}{POOL_SUFFIX}"


def _fill(file: File, end: int, capacity: int) -> None:
    """Allocate a new segment up to `end` at least. Raises OSError."""
    if end - HEADER_BYTES > FILL_MAX:
        allocate(file.fd, HEADER_BYTES, end)
        return
    try:
        zero_fill(file.fd, HEADER_BYTES, min(capacity, max(end, FILL_MIN)))
    except OSError:
        if os.fstat(file.fd).st_size < end:
            raise


def _number(path: Path) -> int:
    """Return the number of the segment that a file was; 0 if it was none."""
    try:
        return read_header(path).number
    except CorruptionError:
        return 0  # never was a segment, or was half way to be one again: nothing in it counts


def _fill_up(path: Path, size: int) -> bool:
    """Return whether a file is allocated up to `size`. Fills a little that is missing, if the disk has it: a segment is
    not grown to its end when the batch after its last one does not fit."""
    try:
        missing = size - path.stat().st_size
        if missing > FILL_MAX:
            return False
        if missing > 0:
            file = File(path, os.O_RDWR)
            zero_fill(file.fd, size - missing, size)
            sync_file(file.fd)
    except OSError as error:
        log.debug("%s is not used again: %s", path, error)
        return False
    return True


def segment_path(directory: Path, number: int) -> Path:
    """Return where a segment of the log in a directory lies, or a file of copies."""
    if number >= COPIES:
        return directory / f"{number - COPIES:012d}{COPIES_SUFFIX}"
    return directory / f"{number:012d}{SEGMENT_SUFFIX}"


def read_header(path: Path) -> SegmentHeader:
    """Return the header of one segment file. Raises CorruptionError."""
    with open_to_read(path) as file:
        return SegmentHeader.decode(file.read(HEADER_BYTES), str(path))


def create_log(directory: Path, log_id: bytes, segment_bytes: int, file_mode: int = FILE_MODE) -> None:
    """Make a directory that holds an empty log: one segment without records. It is durable once the directory's own
    name is. Raises OSError."""
    new_directory(directory, file_mode)
    header = SegmentHeader(
        log_id=log_id, number=1, nonce=int.from_bytes(os.urandom(8), "little"), base_lsn=1, durable_lsn=0,
        prev_number=0, prev_end=0, prev_lsn=0, counter=0, snapshot_number=0, snapshot_offset=0, capacity=segment_bytes,
    )  # fmt: skip
    WatermarkFile(directory, log_id, file_mode=file_mode).write(Watermark(header.number, 0, header.nonce))
    SegmentFiles(directory, segment_bytes, file_mode=file_mode).publish(header, lambda: None)
