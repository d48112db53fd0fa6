"""A file of records: what is there after a kill, an error or Ctrl-C at any of its calls, and on a full disk."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.record_file import FIRST, SLOT_BYTES, SPARE, RecordFile
from anabranch.policies.destination import Destination
from anabranch.policies.errors import StoreFullError
from anabranch.router.destinations_table import DestinationRow, DestinationsTable, StoreRow

CALLS = ("pwrite", "fdatasync")
STORE = StoreRow(b"i" * 16, "stores/a", "journal", "a")


def opened(path: Path) -> RecordFile:
    file = RecordFile(path, 7)
    file.create()
    file.open()
    return file


def read(path: Path) -> list[bytes]:
    version, records = RecordFile(path, 7).open()
    assert version == 7
    return records


@contextmanager
def struck(monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException], after: bool) -> Iterator[None]:
    """Call number `at` raises, before or after it was made."""
    left = [at]

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            left[0] -= 1
            result = real(*arguments) if left[0] != 0 or after else None
            if left[0] == 0:
                raise error()
            return result

        return call

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, wrapped(name))
        yield


def test_the_bytes(tmp_path: Path) -> None:
    """Drawn in docs/format.md; the first slot is that of the second commit."""
    file = opened(tmp_path / "file")
    file.append(b"one")
    data = (tmp_path / "file").read_bytes()
    assert data[:SLOT_BYTES].rstrip(b"\0").hex() == (
        "414272656373000107000000020000000000000000040000000000000704000000000000a60ecb49e2242ad6"
    )
    assert data[SLOT_BYTES:FIRST].rstrip(b"\0").hex() == (
        "414272656373000107000000010000000000000000040000000000000004000000000000000000006775639f"
    )
    assert data[FIRST : FIRST + 8] == b"\x03\0\0\0one\0"
    assert read(tmp_path / "file") == [b"one"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, lambda: OSError(errno.EIO, "EIO")])
@pytest.mark.parametrize("at", range(1, 5))
def test_a_commit_cut_off_at_any_call_has_happened_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException], after: bool
) -> None:
    """The same file goes on from what there is, and so does the next process."""
    path = tmp_path / "file"
    file = opened(path)
    wanted: list[bytes] = []
    for number in range(6):
        record = b"%d" % number * 100
        replaces = number in (2, 4)
        with struck(monkeypatch, at, error, after), pytest.raises((KeyboardInterrupt, OSError)):
            (file.replace if replaces else file.append)(record)
        both = ([*([] if replaces else wanted), record], wanted)
        wanted = read(path)
        assert wanted in both
        file.append(b"more")
        wanted.append(b"more")
        assert read(path) == wanted


def test_what_counts_no_more_goes(tmp_path: Path) -> None:
    """However much is written, the file stays some times as large as what is in it, and its records what they were."""
    file, dice, wanted = opened(tmp_path / "file"), random.Random(1), list[bytes]()
    for _ in range(3000):
        more = dice.randbytes(dice.randrange(400))
        file.reserve(len(more))
        if file.is_crowded(len(more)):
            assert read(tmp_path / "file") == wanted
            wanted = [more]
            file.replace(more)
        else:
            wanted.append(more)
            file.append(more)
    assert read(tmp_path / "file") == wanted
    assert (tmp_path / "file").stat().st_size < 8 * SPARE


def test_on_a_full_disk_rows_can_always_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    table = DestinationsTable(path)
    table.open()
    rows = [DestinationRow(0, f"q.{number}" + "x" * (number % 300), STORE.store_id, ">") for number in range(2000)]
    table.record_store(STORE, rows)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    size, number, refused = path.stat().st_size, 0, False
    while not refused:
        try:
            table.record_destinations([DestinationRow(0, f"more.{number}", STORE.store_id, ">")])
            number += 1
        except StoreFullError as error:
            assert "free some space" in str(error)
            refused = True
    assert len(table.destinations) == 2000 + number
    for destination in list(table.destinations)[:-1]:
        table.forget_destination(destination)
    assert path.stat().st_size == size
    last = set(table.destinations)
    assert len(last) == 1
    table.close()
    table.open()
    assert (set(table.destinations), set(table.stores)) == (last, {STORE.store_id})
    table.record_destinations([DestinationRow(0, "again", STORE.store_id, ">")])  # there is room again
    assert Destination.parse("again") in table.destinations
    table.close()
