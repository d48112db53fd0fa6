"""The checksums of the index's pages: what is damaged is not opened, what is whole is not rebuilt (rule
X8)."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.adapters.journal import JournalStore
from anabranch.adapters.journal.index.checksums import IndexBrokenError, PageChecksums, path_of
from anabranch.adapters.journal.index.file import create_lmdb, open_lmdb
from anabranch.adapters.journal.index.row_format import KEY
from anabranch.policies.errors import StoreFailedError

from ..contract.children import reaped
from ..contract.disk import A, B, assert_whole, bodies, take
from .disk import JournalDisk, directory_of, segments_of

PAGE = 4096
REBUILT = "the index is rebuilt from the journal"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


def index_of(store: JournalStore) -> Path:
    return directory_of(store) / "index.mdb"


def of_all_pages(index: Path) -> list[int]:
    """The checksums of a file's last commit, found by walking its whole tree."""
    checksums = PageChecksums(index)
    checksums.write(checksums.open_files())
    return whole_of(checksums)


def whole_of(checksums: PageChecksums) -> list[int]:
    sums = list(checksums._sums)
    while sums and not sums[-1]:
        sums.pop()
    return sums


class TestPages:
    @pytest.mark.parametrize("seed", range(4))
    def test_what_a_commit_changed_is_all_that_is_read(self, tmp_path: Path, seed: int) -> None:
        """Small rows, rows of several pages, deleted again, in several trees; now and then a commit without checksums,
        now and then one that is undone."""
        chance = random.Random(seed)
        index = tmp_path / "index.mdb"
        create_lmdb(index, 1 << 28)
        env = open_lmdb(index, 1 << 28, 8)
        tables = [env.open_db(b"%d" % number) for number in range(3)]
        checksums = PageChecksums(index)
        last = 0
        for commit in range(24):
            with env.begin(write=True) as txn:
                for _ in range(chance.choice([1, 5, 200, 1500])):
                    last += 1
                    table = chance.choice(tables)
                    if chance.random() < (0.6 if commit < 14 else 0.3):
                        size = chance.choice([16, 16, 1000, 9000]) if table is tables[0] else 16
                        txn.put(b"%012d" % last, bytes(size), db=table)
                    else:
                        with txn.cursor(db=table) as cursor:
                            if cursor.set_range(b"%012d" % chance.randrange(last)):
                                cursor.delete()
            if chance.random() < 0.2 and commit < 23:
                continue
            checksums.write(checksums.open_files())
            copy = Path(shutil.copy(index, tmp_path / "copy.mdb"))
            assert whole_of(checksums) == of_all_pages(copy)
        pages = checksums._sums
        env.close()
        assert PageChecksums(index).verify() is False
        data = bytearray(index.read_bytes())
        newest = checksums._commit % 2
        for at in range(0, len(data), 4801):
            data[at] ^= 1 << at % 8
            index.write_bytes(data)
            if at // PAGE != 1 - newest and at // PAGE < len(pages) and pages[at // PAGE]:
                with pytest.raises(IndexBrokenError, match=f"page {at // PAGE} "):
                    PageChecksums(index).verify()
            else:
                assert PageChecksums(index).verify() is (at // PAGE == 1 - newest)
            data[at] ^= 1 << at % 8

    def test_a_commit_without_checksums_is_undone(self, tmp_path: Path) -> None:
        """Also the first one of a file that was just made (rule X5)."""
        index = tmp_path / "index.mdb"
        create_lmdb(index, 1 << 20)
        checksums = PageChecksums(index)
        env = open_lmdb(index, 1 << 20, 1)
        for value in (b"one", b"two", b"three"):
            with env.begin(write=True) as txn:
                txn.put(b"key", value)
            if value != b"three":
                checksums.write(checksums.open_files())
        env.close()
        for _ in range(2):
            assert PageChecksums(index).verify() is True
        for value in (b"two", b"four"):
            env = open_lmdb(index, 1 << 20, 1)
            with env.begin(write=True) as txn:
                assert txn.get(b"key") == value
                txn.put(b"key", b"four")
            env.close()


def sent(disk: JournalDisk, count: int = 200) -> JournalStore:
    """An open store with a checkpoint behind its messages, some of which are acked."""
    store = disk.create()
    for number in range(count):
        store.send(A, b"%06d" % number)
    for _ in range(20):
        take(store).ack()
    store.checkpoint()
    return store


class TestKilled:
    """What a crash leaves, as a copy of the files shows it, is opened without reading the whole journal."""

    def test_at_any_time(self, disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
        store = sent(disk)
        store.send(A, b"later")
        again = disk.crash(store)
        assert REBUILT not in caplog.text
        assert len(bodies(again)) == 181
        assert_whole(again)

    def test_before_the_checksums_were_written(self, disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
        store = sent(disk)
        before = path_of(index_of(store)).read_bytes()
        for _ in range(30):
            take(store).ack()
        store.checkpoint()
        path_of(index_of(store)).write_bytes(before)
        for _ in range(2):
            store = disk.crash(store)
            assert REBUILT not in caplog.text
            assert len(bodies(store)) == 150
            assert_whole(store)

    def test_two_checkpoints_later(self, disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
        """The checksums are far too old, as after a power failure that took the newer ones."""
        store = sent(disk)
        before = path_of(index_of(store)).read_bytes()
        for _ in range(4):
            take(store).ack()
            store.checkpoint()
        path_of(index_of(store)).write_bytes(before)
        again = disk.crash(store)
        assert REBUILT in caplog.text
        assert len(bodies(again)) == 176
        assert_whole(again)

    def test_when_segments_have_gone_meanwhile(self, disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
        """The checkpoint before still needs them: the journal does not."""
        store = disk.create()
        store.backend._applier.on_empty = lambda: None  # reclaimed when the test says so
        for _ in range(300):
            store.send(B, bytes(1000))
        store.checkpoint()
        while message := store.receive(B):
            message.ack()
        store.send(A, b"here")
        before = path_of(index_of(store)).read_bytes()
        assert store.reclaim() > 0
        path_of(index_of(store)).write_bytes(before)
        again = disk.crash(store)
        assert bodies(again) == [b"here"]
        assert_whole(again)
        assert len(segments_of(again)) < 4
        assert REBUILT in caplog.text


def test_checksums_that_cannot_be_written(disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
    """The store goes on; without them the index is not believed at the next open."""
    store = sent(disk)
    path = path_of(index_of(store))
    path.unlink()
    path.mkdir()
    for _ in range(3):
        store.send(A, b"more")
        store.checkpoint()
    assert caplog.text.count("the next open rebuilds the index") == 1
    path.rmdir()
    again = disk.crash(store)
    assert "its checksums are missing" in caplog.text
    assert len(bodies(again)) == 183
    store.send(A, b"more")
    store.checkpoint()
    caplog.clear()
    assert len(bodies(disk.reopen(store))) == 184
    assert REBUILT not in caplog.text


def test_rows_out_of_order_in_an_open_index(disk: JournalDisk, tmp_path: Path) -> None:
    """The last of 180 rows says that it is the 100th: who goes on behind it would never come to an end. No checksum
    helps, since the file was damaged after it had been verified."""
    report = tmp_path / "report"
    store = sent(disk)
    number, options, directory = store._engine.catalog.destinations[A].number, store.options, disk.copy(store)
    wrong, right = KEY.pack(number, 100), KEY.pack(number, 200)
    pid = os.fork()
    if pid == 0:
        try:
            mine = JournalStore("mine", directory, options)
            mine.open()
            data = index_of(mine).read_bytes()
            with index_of(mine).open("r+b") as file:
                file.write(data.replace(right, wrong))
            try:
                while mine.receive(A):
                    pass
            except StoreFailedError as error:
                report.write_text(str(error))
            mine.close()
            mine = JournalStore("mine", directory, options)
            mine.open()
            report.write_text(f"{report.read_text()}; then {mine.depth(A)} {len(bodies(mine))}")
        finally:
            os._exit(0)
    assert reaped(pid) == 0
    assert "rows are out of order" in report.read_text()
    assert report.read_text().endswith("; then 180 180")
