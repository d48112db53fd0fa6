"""What a store does with a directory that is not as it left it: right again, or one error that says what is wrong."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.adapters.journal import JournalStore
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal import log
from anabranch.policies.config import JournalOptions
from anabranch.policies.config.durability import Sync
from anabranch.policies.errors import (
    AnabranchError,
    ClosedError,
    ConfigError,
    CorruptionError,
    PlacementError,
    StoreFailedError,
    StoreLockedError,
)
from anabranch.policies.names.destination import Destination

from ..children import run_program
from ..contract.children import reaped
from ..contract.disk import A, B, Parallel, assert_whole, bodies, drain, take
from .disk import JournalDisk, directory_of, listing, segments_of


@pytest.fixture
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing vouches for what was written last, however long the test takes."""
    monkeypatch.setattr(log, "IDLE_SECONDS", 3600.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


def sent(disk: JournalDisk, count: int = 300, size: int = 1000) -> JournalStore:
    """A closed store of several segments."""
    store = disk.create()
    for n in range(count):
        store.send(A, f"{n:06d}".encode().ljust(size, b"."))
    store.close()
    assert len(segments_of(store)) >= 4
    return store


class TestGaps:
    """Rule J7: a lost segment never looks like a reclaimed one."""

    @pytest.mark.parametrize("with_index", [True, False])
    @pytest.mark.parametrize("which", [0, 1, -2])
    def test_a_lost_segment_is_named(self, disk: JournalDisk, which: int, with_index: bool) -> None:
        store = sent(disk)
        lost = segments_of(store)[which]
        lost.unlink()
        if not with_index:
            (directory_of(store) / "index.mdb").unlink()
        before = listing(directory_of(store))
        for _ in range(2):
            with pytest.raises(CorruptionError, match="missing") as caught:
                disk.reopen(store)
            assert caught.value.path == str(lost)
        assert listing(directory_of(store)) == before, "an open that refuses changes nothing"

    def test_the_last_segment_is_missed_by_the_index(self, disk: JournalDisk) -> None:
        store = sent(disk)
        lost = segments_of(store)[-1]
        lost.unlink()
        with pytest.raises(CorruptionError, match="missing") as caught:
            disk.reopen(store)
        assert caught.value.path == str(lost)

    @pytest.mark.parametrize("with_index", [True, False])
    def test_a_lost_segment_after_reclaiming(self, disk: JournalDisk, with_index: bool) -> None:
        """Some are gone rightly; the one that still held a message is not one of them."""
        store = disk.create(pool_files=0)
        store.send(B, b"old")
        for _ in range(3):
            for _ in range(100):
                store.send(A, bytes(1000))
            drain(store)
        store.reclaim()
        store.close()
        lost = segments_of(store)[0]
        assert lost.name == "000000000001.seg"
        lost.unlink()
        if not with_index:
            (directory_of(store) / "index.mdb").unlink()
        with pytest.raises(CorruptionError, match="missing") as caught:
            disk.reopen(store)
        assert caught.value.path == str(lost)

    def test_what_lay_in_it_is_named(self, disk: JournalDisk) -> None:
        """Fourteen destinations, of which each message says in which segment it was."""
        store = disk.create()
        there: Counter[tuple[Path, str]] = Counter()
        for number in range(280):
            destination = Destination.parse(f"q{number % 14:02d}")
            store.send(destination, bytes(1000))
            there[segments_of(store)[-1], str(destination)] += 1
        for _ in range(3):
            take(store, Destination.parse("q00")).ack()
            there[segments_of(store)[0], "queue://q00"] -= 1
        store.close()
        lost = segments_of(store)[1]
        held = {destination: count for (path, destination), count in there.items() if path == lost and count}
        assert len(held) == 14
        for harm in (lambda: lost.write_bytes(b"\0" + lost.read_bytes()[1:]), lost.unlink):
            harm()
            with pytest.raises(CorruptionError) as caught:
                disk.reopen(store)
            assert caught.value.held == held
            shown = sorted(held, key=lambda name: (-held[name], name))
            for name in shown[:10]:
                assert f"{held[name]} of {name}" in str(caught.value)
            rest = sum(held[name] for name in shown[10:])
            assert f" and {rest} in 4 more destinations" in str(caught.value)
            assert "messages in this segment by the index's last checkpoint" in str(caught.value)

    def test_what_lay_in_all_of_them_is_named(self, disk: JournalDisk) -> None:
        store = sent(disk)
        for path in segments_of(store):
            path.unlink()
        with pytest.raises(CorruptionError, match=f"messages in this store by the index's last checkpoint: 300 of {A}"):
            disk.reopen(store)

    def test_put_back_it_opens(self, disk: JournalDisk) -> None:
        store = sent(disk)
        lost = segments_of(store)[1]
        aside = lost.with_suffix(".extras")
        lost.rename(aside)
        with pytest.raises(CorruptionError):
            disk.reopen(store)
        aside.rename(lost)
        assert len(bodies(disk.reopen(store))) == 300

    def test_all_segments_gone(self, disk: JournalDisk) -> None:
        store = sent(disk)
        for path in segments_of(store):
            path.unlink()
        with pytest.raises(CorruptionError, match="segments are gone"):
            disk.reopen(store)

    def test_a_segment_under_another_name(self, disk: JournalDisk) -> None:
        store = sent(disk)
        path = segments_of(store)[1]
        path.rename(path.with_name("000000000099.seg"))
        with pytest.raises(CorruptionError, match="says that this is segment 2"):
            disk.reopen(store)


class TestIdentity:
    def test_a_segment_of_another_store(self, disk: JournalDisk) -> None:
        """Rules I4 and J1."""
        one, two = sent(disk), sent(disk)
        shutil.copy(segments_of(one)[1], segments_of(two)[1])
        with pytest.raises(CorruptionError, match=one.store_id.hex()) as caught:
            disk.reopen(two)
        assert caught.value.path == str(segments_of(two)[1])

    def test_an_id_file_of_another_store(self, disk: JournalDisk) -> None:
        """Rule I4."""
        one, two = sent(disk), sent(disk)
        shutil.copy(directory_of(one) / "store.id", directory_of(two) / "store.id")
        with pytest.raises(CorruptionError, match="belongs to store"):
            disk.reopen(two)

    @pytest.mark.parametrize("text", ["", "xyz", "00" * 15, "00" * 17])
    def test_a_damaged_id_file(self, disk: JournalDisk, text: str) -> None:
        store = sent(disk)
        (directory_of(store) / "store.id").write_text(text)
        with pytest.raises(PlacementError, match=r"store\.id is damaged"):
            disk.reopen(store)

    def test_a_newer_version(self, disk: JournalDisk) -> None:
        store = sent(disk)
        path = segments_of(store)[-1]
        page = bytearray(path.read_bytes())
        struct.pack_into("<H", page, 8, w.VERSION + 1)
        path.write_bytes(page)
        before = listing(directory_of(store))
        with pytest.raises(CorruptionError, match=f"version {w.VERSION + 1}; this program reads version {w.VERSION}"):
            disk.reopen(store)
        assert listing(directory_of(store)) == before

    def test_a_renamed_directory_is_the_same_store(self, disk: JournalDisk) -> None:
        store = sent(disk)
        path = directory_of(store)
        moved = path.with_name("elsewhere")
        path.rename(moved)
        again = JournalStore("any", moved, JournalOptions(segment_size=65536))
        again.open()
        assert again.store_id == store.store_id
        assert len(bodies(again)) == 300
        again.close()


class TestIndex:
    """It is derived: missing, damaged or another's, it is rebuilt, and says so in the log."""

    @pytest.mark.parametrize(
        "harm",
        [
            lambda path: path.unlink(),
            lambda path: path.write_bytes(b""),
            lambda path: path.write_bytes(b"not LMDB" * 2000),
            lambda path: path.write_bytes(path.read_bytes()[:5000]),
            lambda path: path.write_bytes(path.read_bytes().rstrip(b"\0")[:-1]),
            lambda path: path.write_bytes(path.read_bytes()[: len(path.read_bytes().rstrip(b"\0")) // 2]),
            lambda path: path.write_bytes(bytes(8192) + path.read_bytes()[8192:]),
        ],
    )
    def test_a_broken_index(
        self, disk: JournalDisk, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
    ) -> None:
        store = sent(disk)
        harm(directory_of(store) / "index.mdb")
        with caplog.at_level(logging.WARNING):
            again = disk.reopen(store)
        assert "the index is rebuilt from the journal" in caplog.text
        assert len(bodies(again)) == 300
        assert_whole(again)

    def test_the_index_of_another_store(self, disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
        one, two = sent(disk), sent(disk, 200)
        for name in ("index.mdb", "index.sums"):
            shutil.copy(directory_of(one) / name, directory_of(two) / name)
        again = disk.reopen(two)
        assert "of another store" in caplog.text
        assert len(bodies(again)) == 200
        assert_whole(again)

    def test_an_older_index_of_the_same_store(self, disk: JournalDisk) -> None:
        """A backup put back: the journal goes on from there."""
        store = sent(disk)
        old = {name: (directory_of(store) / name).read_bytes() for name in ("index.mdb", "index.sums")}
        again = disk.reopen(store)
        for _ in range(100):
            again.send(B, bytes(1000))
        for _ in range(20):
            take(again).ack()
        again.close()
        for name, data in old.items():
            (directory_of(store) / name).write_bytes(data)
        last = disk.reopen(store)
        assert (last.depth(A), last.depth(B)) == (280, 100)
        assert_whole(last)

    def test_an_index_ahead_of_its_journal(self, disk: JournalDisk) -> None:
        """A journal put back from an older backup: the index names messages that are not there. Each is an error that
        names its file, until the index and the watermark are taken away: then what is there opens."""
        store = disk.create()
        store.send_many(A, [b"x"] * 10)
        store.close()
        old = listing(directory_of(store))
        store = disk.reopen(store)
        store.send_many(A, [b"y"] * 200)
        store.close()
        for path in segments_of(store):
            path.unlink()
        for name, data in old.items():
            if name.endswith(".seg"):
                (directory_of(store) / name).write_bytes(data)
        ahead = disk.reopen(store)
        with pytest.raises(CorruptionError, match="does not read back"):
            bodies(ahead)
        assert list(ahead.check()) != []
        ahead.close()
        for path in segments_of(store):
            path.unlink()
        for name, data in old.items():
            if name.endswith(".seg"):
                (directory_of(store) / name).write_bytes(data)
        (directory_of(store) / "index.mdb").unlink()
        with pytest.raises(CorruptionError, match="records 12 to 211 were known to be on disk"):
            disk.open(directory_of(store))
        (directory_of(store) / "journal" / "watermark").unlink()
        again = disk.open(directory_of(store))
        assert bodies(again) == [b"x"] * 10
        assert_whole(again)

    def test_an_index_in_a_directory_of_its_own(self, disk: JournalDisk, tmp_path: Path) -> None:
        store = sent(disk)
        (directory_of(store) / "index.mdb").unlink()
        indexes, path = tmp_path / "indexes", directory_of(store)
        for _ in range(2):
            again = JournalStore(path.name, path, JournalOptions(segment_size=65536), index_directory=indexes)
            again.open()
            assert len(bodies(again)) == 300
            again.close()
        assert [file.name for file in indexes.glob("*.mdb")] == [f"{store.store_id.hex()}.mdb"]
        assert not (path / "index.mdb").exists()

    def test_progress_of_a_rebuild(self, disk: JournalDisk) -> None:
        store = sent(disk)
        (directory_of(store) / "index.mdb").unlink()
        seen: list[tuple[str, int, int]] = []
        again = disk.unopened(store)
        again.open(lambda *step: seen.append(step))
        again.close()
        assert seen
        done = [step[1] for step in seen]
        assert done == sorted(done)
        assert {step[2] for step in seen} == {done[-1]}


class TestDamage:
    """Invariant 9: a torn tail is cut; damage to what was acknowledged is an error with file and offset."""

    def test_a_damaged_body_is_named(self, disk: JournalDisk) -> None:
        store = sent(disk)
        path = segments_of(store)[1]
        data = bytearray(path.read_bytes())
        at = data.index(b"000100")
        data[at] ^= 1
        path.write_bytes(data)
        again = disk.reopen(store)
        assert bodies(again, B) == []
        with pytest.raises(CorruptionError, match="damaged") as caught:
            list(again.browse(A))
        assert caught.value.path == str(path)
        assert caught.value.offset < at < caught.value.offset + 1200
        assert any("C1" in line and path.name in line for line in again.check())
        again.close()
        (directory_of(again) / "index.mdb").unlink()
        with pytest.raises(CorruptionError) as caught:
            disk.reopen(again)
        assert caught.value.path == str(path)

    @pytest.mark.usefixtures("unmarked")
    def test_a_torn_tail_is_cut(self, disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
        store = disk.create(sync="never", checkpoint_interval=100)
        store.send_many(A, [b"x" * 100] * 10)
        path = disk.copy(store)
        segment = sorted((path / "journal").glob("*.seg"))[-1]
        data = segment.read_bytes().rstrip(b"\0")
        segment.write_bytes(data[:-50])
        again = disk.open(path)
        assert "torn tail cut" in caplog.text
        assert bodies(again) == []
        again.send(A, b"after")
        assert bodies(disk.crash(again)) == [b"after"]
        assert_whole(again)

    @pytest.mark.usefixtures("unmarked")
    def test_a_torn_tail_keeps_the_prefix(self, disk: JournalDisk) -> None:
        store = disk.create(sync="never", checkpoint_interval=100)
        for n in range(50):
            store.send(A, f"{n:04d}".encode() * 25)
        source = disk.copy(store)
        whole = len(sorted((source / "journal").glob("*.seg"))[-1].read_bytes().rstrip(b"\0"))
        for cut in range(w.HEADER_BYTES, whole, 331):
            path = disk.copy(store)
            segment = sorted((path / "journal").glob("*.seg"))[-1]
            segment.write_bytes(segment.read_bytes()[:cut])
            found = disk.open(path)
            got = bodies(found)
            assert got == [f"{n:04d}".encode() * 25 for n in range(len(got))]
            assert_whole(found)
            found.close()

    def test_a_cut_segment_that_was_synced_is_damage(self, disk: JournalDisk) -> None:
        store = sent(disk)
        path = segments_of(store)[-1]
        os.truncate(path, w.HEADER_BYTES + 10)
        with pytest.raises(CorruptionError, match="known to be on disk") as caught:
            disk.reopen(store)
        assert path.name in caught.value.path

    @pytest.mark.parametrize("size", [0, 8, 119])
    def test_a_header_that_is_cut(self, disk: JournalDisk, size: int) -> None:
        store = sent(disk)
        path = segments_of(store)[1]
        os.truncate(path, size)
        with pytest.raises(CorruptionError, match="header") as caught:
            disk.reopen(store)
        assert caught.value.path == str(path)


class TestDirectories:
    def test_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        store = JournalStore("x", tmp_path / "nothing", JournalOptions())
        with pytest.raises(PlacementError, match="missing"):
            store.open()
        assert list(tmp_path.iterdir()) == []

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        store = JournalStore("x", tmp_path / "store", JournalOptions())
        with pytest.raises(PlacementError, match=r"store\.id is missing"):
            store.open()
        assert list((tmp_path / "store").iterdir()) == []

    def test_half_a_directory(self, disk: JournalDisk) -> None:
        store = sent(disk)
        shutil.rmtree(directory_of(store) / "journal")
        with pytest.raises(CorruptionError, match="segments are gone"):
            disk.reopen(store)
        assert (directory_of(store) / "index.mdb").exists()

    def test_what_is_unfinished_goes(self, disk: JournalDisk) -> None:
        store = sent(disk)
        journal = directory_of(store) / "journal"
        (journal / "000000000099.tmp").write_bytes(b"half a header")
        (journal / "pool-9.tmp").write_bytes(b"x")
        again = disk.reopen(store)
        assert list(journal.glob("*.tmp")) == []
        assert len(bodies(again)) == 300

    def test_create_refuses_what_exists(self, disk: JournalDisk) -> None:
        store = sent(disk)
        before = listing(directory_of(store))
        with pytest.raises(AnabranchError, match="exists"):
            JournalStore.create("x", directory_of(store), JournalOptions())
        assert listing(directory_of(store)) == before
        assert [path.name for path in directory_of(store).parent.iterdir()] == [directory_of(store).name]

    def test_a_read_only_directory(self, disk: JournalDisk) -> None:
        """One clear error. As an ordinary user, since root may write anywhere."""
        store = sent(disk, 250)
        path = directory_of(store)
        before = listing(path)
        for directory in (path, *path.parents):
            mode = stat.S_IMODE(directory.stat().st_mode)
            if os.getuid() == 0 and mode & 0o055 != 0o055:
                directory.chmod(mode | 0o055)  # pytest's own, which root keeps to itself; others stay as they are
        (path / "store.lock").unlink()
        path.chmod(0o555)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                JournalStore("x", path, JournalOptions()).open()
                os.write(writer, b"opened")
            except ConfigError as error:
                os.write(writer, str(error).encode())
            except BaseException as error:
                os.write(writer, repr(error).encode())
            os._exit(0)
        assert reaped(pid) == 0
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        path.chmod(0o755)
        assert str(path) in said
        assert "Permission denied" in said
        assert listing(path) == before


class TestOwners:
    def test_two_processes(self, disk: JournalDisk) -> None:
        store = disk.create()
        store.send(A, b"x")
        other = (
            "import sys; from pathlib import Path\n"
            "from anabranch.adapters.journal import JournalStore\n"
            "from anabranch.policies.config import JournalOptions\n"
            "from anabranch.policies.errors import StoreLockedError\n"
            "store = JournalStore('x', Path(sys.argv[1]), JournalOptions(segment_size=65536))\n"
            "try:\n"
            "    store.open()\n"
            "except StoreLockedError as error:\n"
            "    print(error)\n"
            "else:\n"
            "    print('opened', store.stats().messages)\n"
        )
        code, told = run_program(other, str(directory_of(store)))
        assert code == 0 and f"process {os.getpid()} on " in told
        store.send(A, b"y")
        store.close()
        assert run_program(other, str(directory_of(store))) == (0, "opened 2\n")

    def test_a_forked_child_that_ends_in_order_does_not_unlock(self, disk: JournalDisk) -> None:
        """With all its finalizers, as an interpreter does that reaches its end."""
        program = (
            "import os, sys; from pathlib import Path\n"
            "from anabranch.adapters.journal import JournalStore\n"
            "from anabranch.policies.config import JournalOptions\n"
            "store = JournalStore('x', Path(sys.argv[1]), JournalOptions(segment_size=65536))\n"
            "store.open()\n"
            "if os.fork() == 0:\n"
            "    store.close(); del store; sys.exit(0)\n"
            "os.wait()\n"
            "try:\n"
            "    JournalStore('x', Path(sys.argv[1]), JournalOptions(segment_size=65536)).open()\n"
            "except Exception as error:\n"
            "    print(type(error).__name__)\n"
            "store.send(__import__('anabranch').Destination.parse('a'), b'z')\n"
            "store.close()\n"
        )
        store = disk.create()
        store.close()
        run = subprocess.run(
            [sys.executable, "-c", program, str(directory_of(store))], capture_output=True, text=True, check=True
        )
        assert run.stdout == "StoreLockedError\n", run.stderr
        assert bodies(disk.reopen(store)) == [b"z"]


class TestFailure:
    """Invariant 7, as far as one store goes: after a failed sync everybody hears at once, and reopening recovers."""

    @pytest.fixture
    def failing(self, disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        def fail() -> None:
            def refuse(_: int) -> None:
                raise OSError(5, "Input/output error")

            monkeypatch.setattr(os, "fdatasync", refuse)

        return fail

    def test_waiting_receivers_hear_of_it(self, disk: JournalDisk, failing: Callable[[], None]) -> None:
        store = disk.create()
        store.send(A, b"x")
        with Parallel(lambda: store.receive(B, None)) as receiver:
            assert receiver.outlives(0.05)
            failing()
            with pytest.raises(StoreFailedError):
                store.send(A, b"y")
            with pytest.raises(StoreFailedError, match="Input/output error"):
                receiver.result()

    def test_it_stays_failed_until_it_is_reopened(
        self, disk: JournalDisk, failing: Callable[[], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        message, claimed = take(store), take(store)
        store.claim(claimed)
        failing()
        with pytest.raises(StoreFailedError):
            store.send(A, b"unknown", None, "id")
        monkeypatch.undo()
        for call in (
            lambda: store.send(A, b"x"),
            lambda: store.send_nowait(A, b"x"),
            lambda: store.receive(A),
            lambda: store.browse(A).__next__(),
            lambda: store.depth(A),
            message.ack,
            message.release,
            lambda: store.commit([], [claimed]),
            lambda: store.unclaim([claimed]),
            lambda: store.purge(A),
            lambda: store.reclaim(),
            lambda: list(store.check()),
        ):
            with pytest.raises(StoreFailedError):
                call()
        assert "Input/output error" in (store.stats().failed or "")
        again = disk.reopen(store)
        again.send(A, b"unknown", None, "id")
        assert sorted(bodies(again)) == [b"1", b"2", b"3", b"unknown"]
        assert_whole(again)

    def test_the_same_object_opens_again_after_a_failure(
        self, disk: JournalDisk, failing: Callable[[], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = disk.create()
        store.send(A, b"1")
        message = take(store)
        failing()
        with pytest.raises(StoreFailedError):
            store.send(A, b"2")
        monkeypatch.undo()
        store.close()
        with pytest.raises(ClosedError):
            store.send(A, b"3")
        store.open()
        with pytest.raises(LookupError):
            message.ack()
        store.send(A, b"4")
        assert bodies(store)[0] == b"1"
        assert bodies(store)[-1] == b"4"
        assert_whole(store)


def test_a_lock_of_a_dead_process_does_not_matter(disk: JournalDisk) -> None:
    store = sent(disk)
    (directory_of(store) / "store.lock").write_text("1 elsewhere\n")
    assert len(bodies(disk.reopen(store))) == 300


def test_a_new_store_has_recovered_nothing_and_is_live(disk: JournalDisk, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        store = disk.create()
        assert store.stats().live_percent == 100
        store.send(A, b"x")
        store.send(B, b"y")
        stats = store.stats()
        assert stats.live_percent == 100
        assert 0 < stats.live_bytes < 1000 < stats.held_bytes, "most of the file is not used yet"
        assert stats.live_bytes + stats.held_bytes == stats.journal_bytes
        disk.reopen(disk.create())
        disk.crash(disk.create())
        assert caplog.text == ""
        disk.crash(store)
    assert "recovered 2 messages" in caplog.text
    take(store).ack()
    assert 0 < store.stats().live_percent < 100
    take(store, B).ack()
    assert (store.stats().live_percent, store.stats().live_bytes) == (0, 0)


def test_locked_names_this_process(disk: JournalDisk) -> None:
    store = disk.create()
    with pytest.raises(StoreLockedError, match="this process"):
        disk.unopened(store).open()


@pytest.mark.usefixtures("unmarked")
def test_a_snapshot_above_the_watermark(disk: JournalDisk) -> None:
    """Killed just after a snapshot was written, with segments before it that were never known to be on disk and are
    still there: what counts of them is settled, the rest is not looked for."""
    store = disk.create(sync="never", checkpoint_interval=3600, pool_files=0)
    store.send(B, b"kept")
    for n in range(300):
        store.send(A, f"{n:06d}".encode().ljust(1000, b"."))
    early = disk.copy(store)
    store.ack([take(store) for _ in range(300)])
    store.reclaim()
    late = disk.copy(store)
    (late / "index.mdb").unlink()
    for path in (early / "journal").glob("*.seg"):
        if not (late / "journal" / path.name).exists():
            shutil.copy(path, late / "journal")  # the release of it did not reach the disk
    again = disk.open(late)
    assert (bodies(again, B), bodies(again, A)) == ([b"kept"], [])
    assert_whole(again)


@pytest.mark.parametrize("own", [False, True])
def test_the_index_s_bytes_are_told(tmp_path: Path, own: bool) -> None:
    """Of the file and its checksums, wherever it lies."""
    indexes = tmp_path / "indexes" if own else None
    options = JournalOptions(segment_size=65536, sync=Sync.NEVER)
    JournalStore.create("s", tmp_path / "s", options)
    store = JournalStore("s", tmp_path / "s", options, index_directory=indexes)
    store.open()
    try:
        empty = store.stats().index_bytes
        store.send_many(A, [b"x"] * 20_000)
        store.checkpoint()
        files = [p for p in (indexes or tmp_path / "s").iterdir() if p.suffix in (".mdb", ".sums")]
        assert store.stats().index_bytes == sum(path.stat().st_size for path in files) > empty > 0
    finally:
        store.close()
