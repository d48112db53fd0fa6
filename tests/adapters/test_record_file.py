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

from anabranch.adapters.wal.files import record_file
from anabranch.adapters.wal.files.record_file import COPY_BYTES, FIRST, SLOT_BYTES, SPARE, RecordFile
from anabranch.policies.errors import StoreFullError
from anabranch.policies.names.destination import Destination
from anabranch.router.placement.record import DestinationRow, DestinationsTable, StoreRow

from ..crash.calls import Crash, Faults
from ..crash.disk import Recorder, build, states

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
    slots = [
        "414272656373000107000000020000000000000000040000000000000704000000000000a60ecb49e2242ad6",
        "414272656373000107000000010000000000000000040000000000000004000000000000000000006775639f",
    ]
    assert data[:FIRST] == b"".join(
        (bytes.fromhex(slot).ljust(COPY_BYTES, b"\0") * 2).ljust(SLOT_BYTES, b"\0") for slot in slots
    )
    assert data[FIRST : FIRST + 8] == b"\x03\0\0\0one\0"
    assert read(tmp_path / "file") == [b"one"]


def test_a_slot_that_is_written_in_part_is_the_old_one_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = opened(path)
    for number in range(4):
        before, wanted = path.read_bytes(), read(path)
        file.append(b"%d" % number)
        after, slot = path.read_bytes(), (number + 2) % 2 * SLOT_BYTES
        assert before[:slot] == after[:slot]
        for end in range(slot, slot + SLOT_BYTES):
            (tmp_path / "torn").write_bytes(after[:end] + before[end : slot + SLOT_BYTES] + after[slot + SLOT_BYTES :])
            assert read(tmp_path / "torn") in (wanted, read(path))
            assert read(tmp_path / "torn") in (wanted, read(path))  # what it has shown stays


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


WORK: list[tuple[str, bytes]] = [
    ("append", b"a" * 30), ("append", b"b" * 900), ("replace", b"c" * 700), ("append", b"d"), ("replace", b"e" * 100),
]  # fmt: skip


def worked(base: Path, recorder: Recorder, at: int, marks: list[tuple[int, list[list[bytes]]]]) -> bool:
    """A process that opens the file and works on it, gone at call `at`; whether it was. The marks say what may be found
    from so many calls on: what somebody has seen, and what is just being done."""
    faults = Faults(base, "crash", at, watch=recorder.watch)
    try:
        with faults.patched():
            file = RecordFile(base / "data" / "file", 7)
            file.create()
            shown = file.open()[1]
            marks.append((recorder.now(), [shown]))
            for how, record in WORK:
                after = [*(shown if how == "append" else []), record]
                marks.append((recorder.now(), [shown, after]))
                getattr(file, how)(record)
                shown = after
                marks.append((recorder.now(), [shown]))
    except Crash:
        return True
    return False


def test_no_power_failure_takes_back_what_the_process_after_a_kill_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was killed has left in the page cache what the disk does not have."""
    monkeypatch.setattr(record_file, "SPARE", 512)
    monkeypatch.setattr(record_file, "AHEAD", 512)
    synced, seen, killed, at = os.fdatasync, 0, True, 0
    while killed:
        at += 1
        base = tmp_path / str(at)
        (base / "data").mkdir(parents=True)
        recorder, marks = Recorder(base), [(0, [list[bytes]()])]
        killed = worked(base, recorder, at, marks)
        since = recorder.now()
        worked(base, recorder, 0, marks)
        for number, state in enumerate(states(recorder.calls)):
            if state.point < since or state.point > since + 14:
                continue
            found_in = base / f"state{number}"
            build(recorder.calls, state, found_in)
            path = found_in / "data" / "file"
            with monkeypatch.context() as patched:
                patched.setattr(os, "fdatasync", lambda fd: None)
                found = read(path) if path.exists() else []
            allowed = [some for point, some in marks if point <= state.point][-1]
            assert found in allowed, (at, state)
            seen += 1
            path.unlink(missing_ok=True)
    assert os.fdatasync is synced
    assert (at > 25, seen > 1000) == (True, True)


def test_a_slot_whose_sync_failed_is_written_again_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may take its page for clean after the error."""
    file = opened(tmp_path / "file")
    with struck(monkeypatch, 4, lambda: OSError(errno.EIO, "EIO"), after=False), pytest.raises(OSError, match="EIO"):
        file.append(b"one")
    calls: list[int] = []
    real_write, real_sync = os.pwrite, os.fdatasync

    def write(fd: int, data: bytes, at: int) -> int:
        calls.append(at)
        return real_write(fd, data, at)

    def sync(fd: int) -> None:
        calls.append(-1)
        real_sync(fd)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fdatasync", sync)
    file.append(b"two")
    assert calls == [0, -1, FIRST + 7, -1, SLOT_BYTES, -1]
    assert read(tmp_path / "file") == [b"one", b"two"]


def test_over_many_short_processes_what_counts_no_more_goes(tmp_path: Path) -> None:
    path, anew = tmp_path / "file", 0
    for _ in range(100):
        file = opened(path)
        file.reserve(2000)
        if file.is_crowded(2000):
            anew += 1
            file.replace(bytes(100))
        else:
            file.append(bytes(2000))
        file.close()
    assert anew > 1
    assert path.stat().st_size < 8 * SPARE


def test_there_is_always_room_to_write_all_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the records' sizes: the next commit finds it without the disk's help."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    for seed in range(30):
        dice, file, length = random.Random(seed), opened(tmp_path / str(seed)), 0
        for _ in range(30):
            size = int(10 ** dice.uniform(1, 5.7))
            file.reserve(size)
            if file.is_crowded(size):
                length += size - dice.randrange(length + 1)
                file.replace(bytes(length))
            else:
                length += size
                file.append(bytes(size))
            slot, end = file._last(), (tmp_path / str(seed)).stat().st_size
            counts = slot.end - slot.start
            assert slot.start - FIRST >= counts or end - slot.end >= counts
