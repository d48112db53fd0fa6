"""Which files wait for a sync, and up to where all is on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from anabranch.adapters.system.descriptors import unsynced_files
from anabranch.adapters.wal.files.file import File
from anabranch.adapters.wal.syncing import UNSYNCED_FILES_MAX, Syncer


class Appended:
    """An appender as a syncer sees it."""

    durable = 3
    durable_lsn = 30


@pytest.fixture
def syncer() -> Syncer:
    return Syncer(Appended())  # type: ignore[arg-type]


def sealed(syncer: Syncer, path: Path) -> File:
    file = File(path, os.O_RDWR | os.O_CREAT)
    syncer.seal(file)
    return file


def test_what_is_durable_behind_a_file_that_waits_does_not_count(syncer: Syncer, tmp_path: Path) -> None:
    """A watermark counts only if all before it is on disk (rule J2)."""
    assert (syncer.durable, syncer.durable_lsn) == (3, 30)
    sealed(syncer, tmp_path / "a")
    syncer._appender.durable, syncer._appender.durable_lsn = 5, 50
    sealed(syncer, tmp_path / "b")
    assert (syncer.durable, syncer.durable_lsn) == (3, 30)
    syncer.sync_sealed(3)
    assert (syncer.count, len(syncer.sealed)) == (0, 2)
    syncer.sync_sealed(4)
    assert (syncer.count, syncer.sealed, syncer.durable, syncer.durable_lsn) == (2, [], 5, 50)


def test_earlier_files_come_first(syncer: Syncer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [sealed(syncer, tmp_path / name) for name in "ab"]
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    syncer.sync_sealed(4)
    assert synced == [file.fd for file in files]
    assert not unsynced_files & set(files)


def test_after_an_error_nothing_is_durable_any_more(
    syncer: Syncer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried again a sync says yes, though pages are lost (invariant 7)."""

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sealed(syncer, tmp_path / "a")
    with monkeypatch.context() as patches:
        patches.setattr(os, "fdatasync", broken)
        with pytest.raises(OSError, match="Input/output"):
            syncer.sync_sealed(4)
    with pytest.raises(OSError, match="Input/output"):
        syncer.sync_sealed(4)
    assert syncer.durable == 3
    syncer.let_go()


def test_what_is_let_go_of_while_it_is_synced_does_not_count(
    syncer: Syncer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the log, which has failed, under the feet of one that waits."""
    files = [sealed(syncer, tmp_path / name) for name in "ab"]
    monkeypatch.setattr(os, "fdatasync", lambda fd: syncer.let_go())
    for _ in range(2):
        with pytest.raises(OSError, match="canceled"):
            syncer.sync_sealed(4)
    assert syncer.durable == 3
    assert syncer.count == 1
    assert not unsynced_files & set(files)
    syncer.let_go()


def test_as_many_files_wait_as_may(syncer: Syncer, tmp_path: Path) -> None:
    for number in range(UNSYNCED_FILES_MAX):
        assert not syncer.is_full
        sealed(syncer, tmp_path / str(number))
    assert syncer.is_full
    syncer.sync_sealed(4)
    assert not syncer.is_full


def test_a_log_that_is_closed_leaves_no_file_waiting(syncer: Syncer, tmp_path: Path) -> None:
    file = sealed(syncer, tmp_path / "a")
    assert file in unsynced_files
    syncer.let_go()
    assert file not in unsynced_files
