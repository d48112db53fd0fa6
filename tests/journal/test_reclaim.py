"""Reclaiming: files really go, nothing else does, and the journal alone still tells everything (rules J6, J7)."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.journal import JournalStore
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, C, assert_whole, bodies, drain, eventually, take
from .disk import JournalDisk, content, directory_of, rebuilt, segments_of


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


def fill(store: Store, count: int, size: int = 1000, destination: Destination = A) -> None:
    for n in range(count):
        store.send(
            destination, f"{n:06d}".encode().ljust(size, b"."), {"n": n}, f"{destination}-{n}" if n % 3 else None
        )


def test_files_go_when_all_in_them_is_acked(disk: JournalDisk) -> None:
    store = disk.create(pool_files=0)
    fill(store, 600)
    assert len(segments_of(store)) > 8
    drain(store)
    freed = store.reclaim()
    # One that the background was about to remove may go between the two looks.
    eventually(lambda: len(segments_of(store)) == sum(map(store.stats().segments.__getitem__, ("active", "retained"))))
    assert len(segments_of(store)) <= 2 and store.stats().journal_bytes <= 2 * 64 * 1024
    assert freed % (64 * 1024) == 0
    assert_whole(store)


def test_files_go_by_themselves(disk: JournalDisk) -> None:
    """Nobody has to ask, and what bounds the disk is what is live."""
    store = disk.create(pool_files=1)
    peak = 0
    for n in range(100):
        fill(store, 20, 2000)
        drain(store)
        if n > 10:
            peak = max(peak, store.stats().journal_bytes)
    store.reclaim()
    assert len(segments_of(store)) <= 2
    assert peak < 100 * 40_000 / 2
    assert_whole(store)


def test_acks_retain_nothing(disk: JournalDisk) -> None:
    """KahaDB's chains: an old message holds its own file, and no file that holds acks of others."""
    store = disk.create(pool_files=0)
    store.send(B, b"old")
    for _ in range(10):
        fill(store, 60)
        drain(store)
    store.reclaim()
    assert len(segments_of(store)) <= 3
    assert bodies(store, B) == [b"old"]
    assert segments_of(store)[0].name == "000000000001.seg"


@pytest.mark.parametrize("closed", [True, False])
def test_the_journal_alone_tells_everything(disk: JournalDisk, closed: bool) -> None:
    store = disk.create(duplicate_window=50)
    chance = random.Random(7)
    for _ in range(6):
        fill(store, 60)
        fill(store, 40, 500, B)
        for destination, count in ((A, 55), (B, 35)):
            messages = [take(store, destination) for _ in range(count)]
            chance.shuffle(messages)
            store.ack(messages[: count - 3])
            store.release(messages[count - 3 :])
        store.purge(Destination.parse("topic://nothing"))
    assert store.reclaim() >= 0
    before, window = content(store), store._engine.sequencer.window.items()
    again = rebuilt(disk, store, closed)
    assert content(again) == before
    assert again._engine.sequencer.window.items() == window
    assert_whole(again)
    assert again.reclaim() >= 0
    twice = rebuilt(disk, again, closed)
    assert content(twice) == before
    assert_whole(twice)


def test_dead_messages_stay_dead(disk: JournalDisk) -> None:
    """Their acks went with the files that held them; the snapshot's bits remember."""
    store = disk.create(pool_files=0)
    fill(store, 50)
    kept = take(store)
    store.ack([take(store) for _ in range(49)])
    fill(store, 300, 1000, B)
    drain(store, B)
    store.reclaim()  # unless the background was quicker
    assert len(segments_of(store)) <= 3
    kept.release()
    again = rebuilt(disk, store, closed=True)
    assert [m.seq for m in again.browse(A)] == [kept.seq]
    assert_whole(again)


def test_a_removed_destination_whose_name_was_reclaimed(disk: JournalDisk) -> None:
    """What the segment of the snapshot says of it before the snapshot must not stop a rebuild."""
    store = disk.create(pool_files=0)
    fill(store, 70)
    fill(store, 70, 1000, B)
    take(store).ack()
    store.delete(A)
    drain(store, B)
    store.reclaim()
    assert not (directory_of(store) / "journal" / "000000000001.seg").exists()
    again = rebuilt(disk, store, closed=False)
    assert list(again.destinations()) == [B]
    assert_whole(again)
    fill(again, 5)
    assert_whole(rebuilt(disk, again, closed=True))


def test_a_removed_destination_that_came_back(disk: JournalDisk) -> None:
    store = disk.create(pool_files=0)
    fill(store, 120)
    store.delete(A)
    store.send(A, b"back", None, f"{A}-1")
    store.reclaim()
    assert bodies(store) == [b"back"]
    again = rebuilt(disk, store, closed=False)
    assert bodies(again) == [b"back"]
    assert again.send(A, b"x", None, f"{A}-1").duplicate
    assert not again.send(A, b"x", None, f"{A}-2").duplicate
    assert_whole(again)


def test_seqs_and_names_go_on_after_everything_is_gone(disk: JournalDisk) -> None:
    store = disk.create(pool_files=0)
    fill(store, 200)
    last = store.send(A, b"last").seq
    drain(store)
    store.reclaim()
    again = rebuilt(disk, store, closed=True)
    assert list(again.destinations()) == [A]
    assert again.send(A, b"x").seq > last
    assert again.send(B, b"x").seq > last


def test_a_pooled_file_never_shows_its_old_records(disk: JournalDisk) -> None:
    store = disk.create(pool_files=3)
    for n in range(20):
        fill(store, 40)
        drain(store)
        store.reclaim()
        store.send(B, f"{n}".encode())
        store = disk.crash(store)
        assert bodies(store, B) == [f"{k}".encode() for k in range(n + 1)]
        assert store.depth(A) == 0
        if n % 5 == 4:
            store = rebuilt(disk, store, closed=False)
            assert store.depth(A) == 0
    numbers = [int(path.stem) for path in segments_of(store)]
    assert len(numbers) == len(set(numbers))
    assert_whole(store)


def test_pooled_files_are_used_again(disk: JournalDisk) -> None:
    store = disk.create(pool_files=2)
    fill(store, 400)
    drain(store)
    store.reclaim()
    stats = store.stats()
    assert stats.segments["pooled"] in (2, 3)  # one may just have been made ahead
    assert stats.pool_bytes == stats.segments["pooled"] * 64 * 1024
    inodes = {path.stat().st_ino for path in (directory_of(store) / "journal").glob("*.free")}
    fill(store, 600)  # several files: one or two may have been prepared ahead
    assert inodes & {path.stat().st_ino for path in segments_of(store)}


@pytest.mark.parametrize(("segment_size", "pooled"), [(256 * 1024, [256 * 1024]), (4 * 1024 * 1024, [])])
def test_a_segment_that_a_crash_left_short_is_pooled_at_its_full_size_or_not(
    disk: JournalDisk, segment_size: int, pooled: list[int]
) -> None:
    """What counts on the pool for room finds it allocated; and 500 small stores do not take 500 whole segments."""
    store = disk.create(segment_size=segment_size)
    store.send(A, b"x")
    store = disk.crash(store)
    assert segments_of(store)[0].stat().st_size < segment_size
    drain(store)
    store.send(A, b"stays")
    store.reclaim()
    assert [path.stat().st_size for path in sorted((directory_of(store) / "journal").glob("*.free"))] == pooled
    assert store.stats().pool_bytes == sum(pooled)
    assert bodies(disk.reopen(store)) == [b"stays"]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_pooled_file_that_was_cut_short_harms_nobody(disk: JournalDisk, opened: bool, size: int) -> None:
    """Not even if that is shorter than a segment's header, and happens while the store is open."""
    store = disk.create(pool_files=2)
    fill(store, 400)
    drain(store)
    store.reclaim()
    if not opened:
        store.close()
    files = list((directory_of(store) / "journal").glob("*.free"))
    assert files
    for file in files:
        os.truncate(file, size)
    if not opened:
        store = disk.reopen(store)
        assert store.stats().pool_bytes == 0
        assert not any(file.exists() for file in files)
    fill(store, 200, destination=B)
    sent = bodies(store, B)
    assert len(sent) == 200
    assert_whole(store)
    assert bodies(disk.reopen(store), B) == sent


def test_segments_are_never_larger_than_asked_but_for_one_message(disk: JournalDisk) -> None:
    store = disk.create()
    fill(store, 300)
    store.send(A, b"x" * 500_000)
    fill(store, 100)
    sizes = sorted(path.stat().st_size for path in segments_of(store))
    assert sum(size > 64 * 1024 for size in sizes) == 1
    drain(store)
    store.reclaim()
    assert all(path.stat().st_size == 64 * 1024 for path in (directory_of(store) / "journal").glob("*.free"))


def test_archive_directory(disk: JournalDisk, tmp_path: Path) -> None:
    """Two stores with one archive: no file of one replaces the other's."""
    archive = tmp_path / "archive"
    stores = [disk.create(archive_directory=archive) for _ in range(2)]
    released = 0
    for store in stores:
        fill(store, 300)
        drain(store)
        store.reclaim()
        assert store.stats().segments["pooled"] <= 1  # none but what was prepared ahead
        assert_whole(store)
        store.close()
        left = segments_of(store)
        released += int(left[-1].stem) - len(left)
    archived = [path for path in archive.rglob("*") if path.is_file()]
    assert len(archived) == released > 6
    assert all(path.read_bytes()[:8] == b"ANBRSEG\n" for path in archived)


def test_an_archive_has_limits(disk: JournalDisk, tmp_path: Path) -> None:
    """Those of one store; another one that shares the directory keeps its own."""
    archive = tmp_path / "archive"
    other = disk.create(archive_directory=archive)
    fill(other, 300)
    drain(other)
    other.reclaim()
    other.close()
    kept = set(archive.rglob("*.seg"))
    store = disk.create(archive_directory=archive, archive_max_bytes=3 * 64 * 1024)
    fill(store, 600)
    drain(store)
    store.reclaim()
    store.close()
    mine = sorted(path for path in archive.rglob("*.seg") if path not in kept)
    assert kept <= set(archive.rglob("*.seg"))
    assert 1 <= len(mine) <= 3
    assert sum(path.stat().st_size for path in mine) <= 3 * 64 * 1024
    assert int(mine[-1].stem) >= int(segments_of(store)[0].stem) - 2
    store = disk.reopen(store, archive_max_bytes=1)
    assert set(archive.rglob("*.seg")) == kept
    assert_whole(store)


@pytest.mark.parametrize(("options", "number"), [({"pool_files": -1}, 100), ({"pool_files": 1}, 1),
                                                 ({"pool_files": 0, "min_files": 5}, 5)])  # fmt: skip
def test_how_many_files_are_kept(disk: JournalDisk, options: dict[str, int], number: int) -> None:
    store = disk.create(**options)
    fill(store, 600)
    most = len(segments_of(store))
    assert most > 6
    drain(store)
    store.reclaim()
    count = store.stats().segments
    files = count["active"] + count["retained"] + count["pooled"]
    if number == 100:
        assert files >= most
    elif number == 1:
        assert count["pooled"] in (1, 2)  # one may just have been made ahead
    else:
        assert files in (5, 6)
    assert_whole(store)


def test_files_are_made_ahead(disk: JournalDisk) -> None:
    store = disk.create(min_files=4, pool_files=0)
    eventually(lambda: store.stats().segments["pooled"] == 3)
    assert store.stats().pool_bytes == 3 * 64 * 1024
    fill(store, 100)
    assert_whole(store)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """`ulimit -n 200`"""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.usefixtures("few_descriptors")
def test_files_open_at_a_time_are_bounded(disk: JournalDisk) -> None:
    """Invariant 10: not one for each segment, whether it is written, read, checked or recovered."""

    def opened(store: JournalStore) -> int:
        directory = str(directory_of(store))
        return sum(str(link.resolve()).startswith(directory) for link in Path("/proc/self/fd").iterdir())

    store = disk.create(sync="never")
    store.send_many(A, [b"x" * 30_000] * 200)
    assert len(segments_of(store)) > 90
    counts = [opened(store)]
    list(store.browse(A))
    counts.append(opened(store))
    assert_whole(store)
    counts.append(opened(store))
    store = disk.reopen(store)
    counts.append(opened(store))
    store = rebuilt(disk, store, closed=True)
    counts.append(opened(store))
    assert max(counts) <= 50, counts
    store.close()
    assert opened(store) == 0


def test_dead_messages_of_a_removed_destination_stay_dead(disk: JournalDisk) -> None:
    """A rebuild passes them over, and the next snapshot must tell a second rebuild so, should the name come back."""
    store = disk.create(pool_files=0)
    fill(store, 60)
    fill(store, 20, 1000, B)
    store.delete(A)  # some of its messages lie in the segment that the snapshot goes to
    store.reclaim()
    store = rebuilt(disk, store, closed=False)
    store.send(A, b"back")
    for _ in range(2):
        fill(store, 100, 1000, C)
        drain(store, C)
        store.reclaim()
        store = rebuilt(disk, store, closed=False)
        assert bodies(store) == [b"back"]
        assert_whole(store)
