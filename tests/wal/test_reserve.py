"""The reserve of a log (rule J10): what grows is refused while it lacks files, what makes room may use them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from anabranch.adapters.wal import (
    SNAPSHOT,
    Needed,
    Reclaimer,
    RecordEncoder,
    SegmentFiles,
    Ticket,
    record_ticket,
    records,
    survey,
)
from anabranch.adapters.wal.files.reserve import BYTES_MIN, FILES, Reserve
from anabranch.adapters.wal.records import RecordTicket
from anabranch.adapters.wal.segment import Segment
from anabranch.policies.errors import StoreFullError

from .logs import KIND, LOG_ID, SEGMENT_BYTES, Opened, created, opened


class FullDisk:
    """From `fill` to `free` nothing takes more of the disk than it has: neither a longer file nor a new one grows."""

    def __init__(self) -> None:
        self.is_full = False
        self._pwrite, self._fallocate = os.pwrite, os.posix_fallocate

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if self.is_full and offset + len(data) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(fd, data, offset)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        if self.is_full and offset + size > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fallocate(fd, offset, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    full = FullDisk()
    monkeypatch.setattr(os, "pwrite", full.pwrite)
    monkeypatch.setattr(os, "posix_fallocate", full.posix_fallocate)
    return full


def shrinking(payload: bytes) -> Ticket:
    return record_ticket([(KIND, payload, None)], shrinks=True)


def shrink(one: Opened, payload: bytes, unsynced: bool = False) -> None:
    ticket = shrinking(payload)
    ticket.unsynced = unsynced
    one.log.wait(one.log.submit(ticket))


def write_until_full(one: Opened) -> None:
    with pytest.raises(StoreFullError, match="free some space"):
        for number in range(10_000):
            one.write(f"{number}".encode() * 20)


def releasing(one: Opened) -> Reclaimer:
    """Everything but the segment that is being written may go at any time."""

    def snapshot() -> tuple[list[Segment], bytes]:
        *old, last = one.log.table.segments
        return old, b"from %d" % last.number

    return Reclaimer(one.log, snapshot, lambda payload: [(SNAPSHOT, payload, None)], one.log.forget_segments)


def spare(path: Path) -> list[int]:
    return sorted(file.stat().st_size for file in path.glob("*.spare"))


def test_a_log_that_takes_something_in_has_a_reserve(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    assert spare(tmp_path / "log") == []
    one.write(b"x")
    sizes = spare(tmp_path / "log")
    assert len(sizes) == FILES
    assert min(sizes) > BYTES_MIN
    one.close()


def test_what_grows_is_refused_and_what_shrinks_is_not(tmp_path: Path, disk: FullDisk) -> None:
    one = created(tmp_path / "log")
    one.write(b"x")
    disk.is_full = True
    write_until_full(one)
    count = len(one.counted)
    shrink(one, b"less")
    with pytest.raises(StoreFullError):
        one.write(b"more")
    assert one.counted[count:] == [b"less"]
    disk.is_full = False
    one.write(b"more")
    assert one.counted[count:] == [b"less", b"more"]
    one.close()


@pytest.mark.parametrize("unsynced", [False, True])
def test_it_is_used_over_and_over_while_segments_are_released(tmp_path: Path, disk: FullDisk, unsynced: bool) -> None:
    """The snapshot that releases some does not wait for what waits for it, in the same queue or in the other."""
    one = created(tmp_path / "log")
    reclaimer = releasing(one)
    one.write(b"x")
    disk.is_full = True
    write_until_full(one)
    count = len(one.counted)
    for number in range(3000):
        shrink(one, b"%d" % number * 20, unsynced)
    shown = [payload for payload in one.counted[count:] if not payload.startswith(b"from")]
    assert shown == [b"%d" % number * 20 for number in range(3000)]
    reclaimer.finish()
    one.close()
    found = survey(SegmentFiles(tmp_path / "log", SEGMENT_BYTES), LOG_ID, None, lambda p: Needed(int(p[5:]), {}))
    assert [record.payload for record in records(found)][-1] == b"2999" * 20
    assert len(found.chain) < 4


def test_where_nothing_can_be_released_it_comes_to_an_end(tmp_path: Path, disk: FullDisk) -> None:
    one = created(tmp_path / "log")
    one.write(b"x")
    disk.is_full = True
    write_until_full(one)
    with pytest.raises(StoreFullError, match="Nothing was written"):
        for number in range(10_000):
            shrink(one, b"%d" % number * 20)
    disk.is_full = False
    shrink(one, b"at last")
    assert one.counted[-1] == b"at last"
    one.close()


def test_a_batch_of_both_loses_what_grows(tmp_path: Path, disk: FullDisk) -> None:
    one = created(tmp_path / "log")
    one.write(b"x")
    disk.is_full = True
    write_until_full(one)
    count = len(one.counted)
    tickets = [shrinking(b"1"), record_ticket([(KIND, b"refused", None)]), shrinking(b"2"), shrinking(b"3")]
    one.log.submit_all(tickets)
    one.log.flush()
    assert [type(ticket.error) for ticket in tickets] == [type(None), StoreFullError, type(None), type(None)]
    assert one.counted[count:] == [b"1", b"2", b"3"]
    one.close()


def test_a_recovery_begins_in_it(tmp_path: Path, disk: FullDisk) -> None:
    one = created(tmp_path / "log")
    one.write(b"x")
    disk.is_full = True
    write_until_full(one)
    one.log.fail(RuntimeError("killed"))
    one.log.let_go()
    again = opened(tmp_path / "log")
    assert len(again.held) == len(one.counted)
    assert len(spare(tmp_path / "log")) == FILES - 1
    shrink(again, b"less")
    again.close()


def test_only_what_marks_itself_shrinks(tmp_path: Path) -> None:
    ticket = record_ticket([(KIND, b"", None)])
    assert isinstance(ticket, RecordTicket)
    assert not ticket.shrinks


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
def test_what_cannot_be_made_leaves_nothing_behind(tmp_path: Path, call: str) -> None:
    reserve = Reserve(tmp_path)
    failing: Callable[..., None] = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
    with mock.patch.object(os, call, failing), pytest.raises(OSError, match="full"):
        reserve.keep(0, 0, 0)
    assert (reserve.files, list(tmp_path.iterdir())) == ((), [])
    reserve.keep(0, 0, 0)
    assert len(reserve.files) == len(list(tmp_path.iterdir())) == FILES


def test_it_grows_and_is_cut_down_with_what_is_promised(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path)
    reserve.keep(0, 0, 500_000)
    assert len(spare(tmp_path)) == FILES + 1
    assert min(spare(tmp_path)) > 500_000
    reserve.keep(0, 0, 0)
    assert max(spare(tmp_path)) < 2 * BYTES_MIN


class Once:
    """Raises KeyboardInterrupt the first time that a spare file becomes a segment, before or after that."""

    def __init__(self, before: bool) -> None:
        self._before, self._rename, self.struck = before, Path.rename, False

    def __call__(self, path: Path, target: Path) -> Path:
        strikes = not self.struck and path.suffix == ".spare"
        self.struck |= strikes
        if strikes and self._before:
            raise KeyboardInterrupt
        renamed = self._rename(path, target)
        if strikes:
            raise KeyboardInterrupt
        return renamed


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("grows", [True, False])
def test_who_is_interrupted_while_a_spare_file_is_begun_stops_no_log(
    tmp_path: Path, disk: FullDisk, monkeypatch: pytest.MonkeyPatch, before: bool, grows: bool
) -> None:
    one = created(tmp_path / "log")
    reclaimer = releasing(one)
    one.write(b"x")
    disk.is_full = True
    write_until_full(one)
    count, once = len(one.counted), Once(before)
    monkeypatch.setattr(Path, "rename", lambda path, target: once(path, target))
    for number in range(3000):
        try:
            shrink(one, b"%d" % number * 20)
        except KeyboardInterrupt:
            break
    assert once.struck
    if grows:
        with pytest.raises(StoreFullError):
            one.write(b"more" * 20)
    shrink(one, b"goes on")
    assert one.log.failed is None
    assert one.counted[count:][-1] == b"goes on"
    reclaimer.finish()
    one.close()


def test_a_segment_in_which_little_is_needed_gives_way_to_a_spare_file(tmp_path: Path, disk: FullDisk) -> None:
    """Where the disk is full, once after each change: the log has nothing else that could be released."""
    one = created(tmp_path / "log", pool_files=0)
    reclaimer = releasing(one)
    relief = one.log.relief
    one.log.relief = lambda: len(one.log.table.segments) > 1 and relief()
    one.write(b"x")
    disk.is_full = True
    needed = SEGMENT_BYTES
    with mock.patch.object(RecordEncoder, "needed_bytes", lambda *_: needed):
        write_until_full(one)
        assert [segment.number for segment in one.log.table.all] == [1]
        releases = one.log.releases
        with pytest.raises(StoreFullError):
            one.write(b"more" * 100)
        needed = 0
        with pytest.raises(StoreFullError):
            one.write(b"more" * 100)  # nothing has changed since it was looked at
        shrink(one, b"less")
        one.write(b"more" * 100)
        assert one.log.releases > releases
        assert 1 not in [segment.number for segment in one.log.table.all]
        assert len(spare(tmp_path / "log")) == FILES
    assert one.counted[-1] == b"more" * 100
    reclaimer.finish()
    one.close()
