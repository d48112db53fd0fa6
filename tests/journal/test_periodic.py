"""What a power failure may cost under `periodic` (rule G5)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.adapters.wal import log

from ..contract.disk import A
from .disk import JournalDisk

INTERVAL = 3600.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path, sync="periodic", sync_interval=INTERVAL) as disk:
        yield disk


def test_who_comes_after_the_interval_waits_for_the_disk(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now, real = disk.create(), [1000.0], os.fdatasync
    synced: list[int] = []

    def fdatasync(fd: int) -> None:
        real(fd)
        synced.append(threading.get_ident())

    def waits() -> bool:
        before = synced.count(threading.get_ident())
        store.send(A, b"x")
        return synced.count(threading.get_ident()) > before

    monkeypatch.setattr(log, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert not waits() and not waits()
    now[0] += INTERVAL + 1
    assert waits(), "nothing has synced for longer than what may be lost"
    assert not waits()
