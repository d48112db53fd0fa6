"""Logs of plain records, as an owner without an index opens them."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from anabranch.adapters.wal import (
    Log,
    LogOptions,
    RecordBatch,
    RecordEncoder,
    SegmentFiles,
    Ticket,
    create_log,
    record_ticket,
    records,
    settle,
    survey,
    take_over,
)

LOG_ID = bytes(range(16))
SEGMENT_BYTES = 64 * 1024
KIND = 1


@dataclass
class Opened:
    """A log that is open, what it held, and what has counted since."""

    log: Log
    held: list[bytes]
    counted: list[bytes] = field(default_factory=list)

    def submit(self, payload: bytes, sync: bool = False) -> Ticket:
        return self.log.submit(record_ticket([(KIND, payload, None)], sync))

    def write(self, *payloads: bytes) -> None:
        """Each in a batch of its own."""
        for payload in payloads:
            self.log.wait(self.submit(payload))

    def close(self) -> None:
        self.log.close()
        self.log.let_go()


def created(path: Path, **options: Any) -> Opened:
    """A new log in a directory that is not there yet."""
    create_log(path, LOG_ID, SEGMENT_BYTES)
    return opened(path, **options)


def opened(path: Path, **options: Any) -> Opened:
    """Raises what the survey raises."""
    files = SegmentFiles(path, SEGMENT_BYTES)
    counted: list[bytes] = []

    def deliver(batch: RecordBatch) -> None:
        counted.extend(payload for _, payload, _ in batch.records)

    log = Log("the log", LOG_ID, files, LogOptions(SEGMENT_BYTES, **options), RecordEncoder(deliver))
    found = survey(files, LOG_ID)
    settle(found, files)
    held = [record.payload for record in records(found)]
    take_over(found, log)
    return Opened(log, held, counted)


@contextmanager
def quiet(log: Log) -> Iterator[None]:
    """Nothing more is queued meanwhile, and all that was is written."""
    with log._planning:
        log.written()
        yield


@contextmanager
def stalled(log: Log) -> Iterator[threading.Event]:
    """The disk takes nothing of what is queued meanwhile: as if somebody else had begun to write. The event says that
    somebody has."""
    real, goes_on, begun = os.pwrite, threading.Event(), threading.Event()

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == log.tail.segment.path and any(memoryview(data)[:64]):
            begun.set()
            goes_on.wait(60)
        return real(fd, data, offset)

    with mock.patch("os.pwrite", pwrite):
        try:
            yield begun
        finally:
            goes_on.set()


def is_submitting(thread: threading.Thread) -> bool:
    """Whether a thread is about to queue something: it waits for who does so already."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not Log.submit.__code__:
        frame = frame.f_back
    return frame is not None


def killed(one: Opened, copy: Path) -> Path:
    """What a kill of the process would leave now: the page cache outlives it, so a copy shows it all."""
    with quiet(one.log):
        shutil.copytree(one.log.files.directory, copy, ignore=shutil.ignore_patterns("*.tmp"))
    return copy


def newest(path: Path) -> Path:
    """The segment that was begun last."""
    return max(path.glob("*.seg"))
