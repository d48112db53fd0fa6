"""What the disk refuses a journal store reaches its callers as an error of ours, whichever call meets it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anabranch.policies.errors import StoreFailedError

from ..contract.disk import A, assert_whole, bodies
from ..crash.calls import Faults
from .disk import JournalDisk, directory_of


class NothingReads(Faults):
    """All that is read comes back with EIO; what runs in the background meanwhile is left alone."""

    def call(self, name: str, real: Callable[..., Any], target: str, *arguments: Any) -> Any:
        if name == "pread":
            self.hit = target
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        return real(*arguments)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path / "data") as disk:
        yield disk


def test_a_check_that_cannot_read_the_segments_says_so(disk: JournalDisk, tmp_path: Path) -> None:
    store = disk.create()
    store.send_many(A, [b"x" * 30_000] * 6)
    faults = NothingReads(tmp_path)
    with faults.patched(), pytest.raises(StoreFailedError, match=r"cannot be checked: .*Input/output error"):
        list(store.check())
    assert faults.hit
    assert_whole(store)


def test_an_index_that_was_deleted_under_its_store_is_rebuilt_at_the_next_open(disk: JournalDisk) -> None:
    store = disk.create(checkpoint_interval=3600.0)
    store.send_many(A, [b"1", b"2"])
    (index,) = directory_of(store).rglob("index.mdb")
    index.unlink()
    with suppress(StoreFailedError):
        store.checkpoint()
    with suppress(StoreFailedError):
        store.close()
    store = disk.open(directory_of(store))
    assert bodies(store) == [b"1", b"2"]
    assert_whole(store)
