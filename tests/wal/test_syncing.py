"""Which files wait for a sync, and up to where all is on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from anabranch.adapters.system.descriptors import unsynced_files
from anabranch.adapters.wal.files.file import File
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.syncing import UNSYNCED_FILES_MAX, Syncer
from anabranch.adapters.wal.ticket import Tail
from anabranch.policies.errors import StoreFailedError

from .made import header_of


class Written:
    """A log as its syncs see it: files that are real, an end that a test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segment = Segment(header_of(), path / "1.seg")
        self.segment.file = self.file("1.seg")
        self.lsn = 0
        self.failed: list[BaseException] = []
        self.syncer = Syncer(lambda: self.tail, self.failed.append, self.require_not_failed)

    def file(self, name: str) -> File:
        return File(self.path / name, os.O_RDWR | os.O_CREAT)

    @property
    def tail(self) -> Tail:
        return Tail(self.segment, 0, self.lsn, 0)

    @property
    def is_dirty(self) -> bool:
        return self.syncer.dirty_since is not None

    def write(self, lsn: int) -> Tail:
        self.lsn = lsn
        self.syncer.dirty_since = self.syncer.dirty_since or 1.0
        return self.tail

    def require_not_failed(self) -> None:
        if self.failed:
            raise StoreFailedError("it has stopped")


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_what_is_durable_is_not_synced_again(written: Written) -> None:
    tail = written.write(5)
    written.syncer.through(tail)
    assert (written.syncer.durable_lsn, written.syncer.count, written.syncer.dirty_since) == (5, 1, None)
    written.syncer.through(tail)
    assert written.syncer.count == 1


def test_what_was_written_meanwhile_waits_for_the_next(written: Written) -> None:
    tail = written.write(5)
    written.write(6)
    written.syncer.through(tail)
    assert written.syncer.durable_lsn == 5
    assert written.is_dirty
    written.syncer.through(written.tail)
    assert written.syncer.durable_lsn == 6
    assert not written.is_dirty


def test_earlier_segments_come_first(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watermark counts only if all before it is on disk (rule J2)."""
    earlier = [written.file("a"), written.file("b")]
    for file in earlier:
        written.syncer.sealed(file)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    written.syncer.through(written.write(9))
    assert written.segment.file is not None
    assert synced == [earlier[0].fd, earlier[1].fd, written.segment.file.fd]
    assert not unsynced_files & set(earlier)


def test_after_an_error_nothing_is_durable_any_more(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again a sync says yes, though pages are lost (invariant 7)."""

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tail = written.write(3)
    with monkeypatch.context() as patches:
        patches.setattr(os, "fdatasync", broken)
        with pytest.raises(OSError, match="Input/output"):
            written.syncer.through(tail)
    assert len(written.failed) == 1
    with pytest.raises(StoreFailedError):
        written.syncer.through(tail)
    assert written.syncer.durable_lsn == 0


def test_as_many_files_wait_as_may(written: Written) -> None:
    for number in range(UNSYNCED_FILES_MAX):
        assert not written.syncer.is_full
        written.syncer.sealed(written.file(str(number)))
    assert written.syncer.is_full
    written.syncer.through(written.write(1))
    assert not written.syncer.is_full


def test_a_log_that_is_closed_leaves_no_file_waiting(written: Written) -> None:
    file = written.file("a")
    written.syncer.sealed(file)
    assert file in unsynced_files
    written.syncer.let_go()
    assert file not in unsynced_files
