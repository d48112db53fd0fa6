"""The placement record damaged: an error of ours each time, and the remedy that it names works (rule X9)."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.wal.files.record_file import COPY_BYTES, FIRST, SLOT_BYTES
from anabranch.policies.errors import CorruptionError, StoreFullError
from anabranch.router.placement.record import DestinationRow, DestinationsTable, StoreRow

from ..contract.disk import eventually
from ..router.disk import config, contents


def filled(path: Path, destinations: int) -> DestinationsTable:
    """A closed record with rows that came and went."""
    placement = DestinationsTable(path)
    placement.open()
    for number in range(2):
        placement.record_store(StoreRow(bytes([number]) * 16, f"stores/{number}", "journal", f"s{number}"))
    rows = [DestinationRow(0, f"queue.{n}" + "x" * n, bytes([n % 2]) * 16, ">") for n in range(destinations)]
    for row in rows:
        placement.record_destinations([row])
    for row in rows[::3]:
        placement.forget_destination(row.destination)
    placement.close()
    return placement


@pytest.mark.parametrize("destinations", [1, 40])
def test_one_flipped_bit_is_an_error_of_ours_or_changes_nothing(tmp_path: Path, destinations: int) -> None:
    path = tmp_path / "placement.records"
    filled(path, destinations)
    whole, good = DestinationsTable(path), path.read_bytes()
    whole.open()
    whole.close()
    end = len(good.rstrip(b"\0"))
    for at in range(end + 100):
        flipped = bytearray(good)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        again = DestinationsTable(path)
        if at >= FIRST and at < end:  # a slot is there twice
            with pytest.raises(CorruptionError, match="the placement record is damaged"):
                again.open()
        else:
            again.open()
            assert (again.stores, again.destinations) == (whole.stores, whole.destinations)
        again.close()


def test_a_row_that_two_record_at_once_on_a_full_disk_is_told_to_neither(tmp_path: Path) -> None:
    """The one whose batch was to bring it for both cannot write it."""
    placement, told = DestinationsTable(tmp_path / "placement.records"), list[Exception]()
    placement.open()
    placement.record_store(StoreRow(b"s" * 16, "stores/s", "journal", "s"))
    row = DestinationRow(0, "q", b"s" * 16, ">")

    def reserve(count: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def record() -> None:
        try:
            placement.record_new([row], lambda row: True)
        except StoreFullError as error:
            told.append(error)

    placement._file.reserve = reserve  # type: ignore[assignment,method-assign]
    threads = [threading.Thread(target=record) for _ in range(2)]
    with placement._lock:
        for thread in threads:
            thread.start()
        eventually(lambda: len(placement._waiting) == 2)
    for thread in threads:
        thread.join()
    assert len(told) == 2 and not placement.destinations
    placement.close()


@pytest.mark.parametrize("where", ["a row", "all rows", "a slot", "the end"])
def test_put_aside_it_is_recorded_again(tmp_path: Path, where: str) -> None:
    settings = config(tmp_path / "data")
    with anabranch.open(settings) as router:
        for name in ("a.x", "b.x", "each.x", "each.y"):
            router.queue(name).send(name.encode())
        store_id = next(iter(router._registry.open_stores())).store_id
    path = tmp_path / "data" / "placement.records"
    data = bytearray(path.read_bytes())
    if where == "a row":
        at = data.index(store_id)
        while at >= 0:
            data[at] ^= 1
            at = data.find(store_id, at + 1)
    elif where == "all rows":
        data[FIRST:] = b"\xff" * (len(data) - FIRST)
    elif where == "a slot":
        data[20] ^= 1
        data[COPY_BYTES + 20] ^= 1
    else:
        del data[FIRST + 100 :]
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"move the file away and open again") as caught:
            anabranch.open(settings)
        assert caught.value.path == str(path)
        assert path.read_bytes() == data  # it is left for who wants to look at it
    path.rename(path.with_suffix(".damaged"))
    for _ in range(2):
        with anabranch.open(settings) as router:
            assert [contents(router, name) for name in ("a.x", "b.x", "each.x", "each.y")] == [
                [b"a.x"], [b"b.x"], [b"each.x"], [b"each.y"],
            ]  # fmt: skip


def test_slots_that_do_not_follow_each_other(tmp_path: Path) -> None:
    """The slot of the commit before the last is as it was two commits earlier: the disk has lost a write."""
    path = tmp_path / "placement.records"
    placement = filled(path, 5)
    before = path.read_bytes()
    placement.open()
    for number in range(2):
        placement.record_destinations([DestinationRow(0, f"more.{number}", bytes(16), ">")])
    placement.close()
    good = path.read_bytes()
    refused = 0
    for at in (0, SLOT_BYTES):
        path.write_bytes(good[:at] + before[at : at + SLOT_BYTES] + good[at + SLOT_BYTES :])
        try:
            placement.open()
        except CorruptionError as error:
            assert "are of the commits" in str(error)
            refused += 1
        placement.close()
    assert refused == 1  # without the last slot it is the commit before
