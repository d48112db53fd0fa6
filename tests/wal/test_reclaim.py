"""Segments go once a snapshot says what was still needed of them, and a lost one is told from a released one."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.adapters.wal import (
    SNAPSHOT,
    Log,
    LogOptions,
    Needed,
    Reclaimer,
    RecordBatch,
    RecordEncoder,
    SegmentFiles,
    record_ticket,
    records,
    settle,
    survey,
    take_over,
)
from anabranch.adapters.wal.files.archive import Archive
from anabranch.adapters.wal.segment import Segment
from anabranch.policies.errors import CorruptionError

from .logs import KIND, LOG_ID, SEGMENT_BYTES, created


class Kept:
    """An owner that needs only what came last: a snapshot says the number of the first segment that is needed, and the
    last payload before it."""

    def __init__(self, path: Path, archive: Archive | None = None) -> None:
        files = SegmentFiles(path, SEGMENT_BYTES)
        encoder = RecordEncoder(self.deliver)
        self.log = Log("the log", LOG_ID, files, LogOptions(SEGMENT_BYTES, pool_files=1), encoder)
        found = survey(files, LOG_ID, None, lambda payload: Needed(int(payload.split()[0]), {}))
        settle(found, files)
        self.last = found.snapshot.split()[1] if found.snapshot is not None else b""
        for record in records(found):
            if record.kind == KIND:
                self.last = record.payload
        encoder.snapshot_at = found.snapshot_at
        take_over(found, self.log)
        self.reclaimer = Reclaimer(
            self.log, self.snapshot, lambda payload: [(SNAPSHOT, payload, None)], self.log.forget_segments, archive
        )

    def deliver(self, batch: RecordBatch) -> None:
        for kind, payload, _ in batch.records:
            if kind == KIND:
                self.last = payload

    def snapshot(self) -> tuple[list[Segment], bytes]:
        tail = self.log.tail.segment
        old = [segment for segment in self.log.table.segments if segment is not tail]
        return old, b"%d %s" % (tail.number, self.last)

    def write(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.log.wait(self.log.submit(record_ticket([(KIND, payload, None)])))

    def close(self) -> None:
        self.log.close()
        self.reclaimer.finish()
        self.log.let_go()


def test_a_signal_handler_that_interrupts_its_own_reclaiming_is_refused(tmp_path: Path) -> None:
    created(tmp_path / "log").close()
    kept = Kept(tmp_path / "log")
    kept.write(b"0")
    snapshot, refused = kept.snapshot, []

    def struck() -> tuple[list[Segment], bytes]:
        with pytest.raises(RuntimeError, match="signal handler") as error:
            kept.reclaimer.run()
        refused.append(error)
        return snapshot()

    kept.reclaimer._snapshot = struck
    kept.reclaimer.run()
    assert len(refused) == 1
    kept.close()


BODIES = [f"{number:04d}".encode() * 700 for number in range(60)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    created(tmp_path / "log").close()
    return tmp_path / "log"


def test_what_is_not_needed_goes_and_what_was_said_stays(path: Path) -> None:
    one = Kept(path)
    one.write(*BODIES)
    before = len(list(path.glob("*.seg")))
    assert one.reclaimer.run() == (before - 1) * SEGMENT_BYTES
    assert len(list(path.glob("*.seg"))) == 1
    assert len(list(path.glob("*.free"))) >= 1
    assert one.reclaimer.run() == 0
    one.close()
    again = Kept(path)
    assert again.last == BODIES[-1]
    again.write(b"more")
    again.close()
    assert Kept(path).last == b"more"


def test_released_segments_may_be_kept_elsewhere(path: Path, tmp_path: Path) -> None:
    one = Kept(path, Archive(tmp_path / "archive"))
    one.write(*BODIES)
    gone = {file.name for file in path.glob("*.seg")} - {one.log.tail.segment.path.name}
    one.reclaimer.run()
    assert {file.name for file in (tmp_path / "archive").iterdir()} == gone
    one.close()


def test_a_segment_that_a_snapshot_needs_is_missed(path: Path) -> None:
    one = Kept(path)
    one.write(*BODIES)
    one.reclaimer.run()
    one.write(*BODIES)
    one.close()
    oldest = min(path.glob("*.seg"))
    oldest.unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        Kept(path)
