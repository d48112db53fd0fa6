"""Compaction: what lives in segments that are mostly dead moves together, and nothing else changes (rule J8)."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import JournalStore, compaction
from anabranch.adapters.journal.index import file as index_file
from anabranch.adapters.journal.index.checksums import PageChecksums
from anabranch.adapters.journal.index.file import IndexFile
from anabranch.adapters.wal import skimming
from anabranch.adapters.wal.files import copies as wal_copies
from anabranch.adapters.wal.files.file import File
from anabranch.adapters.wal.format import HEADER_BYTES
from anabranch.adapters.wal.reader import read_at
from anabranch.policies.errors import CorruptionError, StoreFullError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, assert_whole, bodies, drain, eventually, take
from .disk import JournalDisk, content, directory_of, rebuilt, segments_of

TOPIC = Destination.parse("topic://t")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    """Compaction comes when it is asked for: `compact`."""
    with JournalDisk(tmp_path, compact_min_segments=10_000, pool_files=0, sync="never") as disk:
        yield disk


def compact(store: Store) -> int:
    """Of what pays; returns how many segments were copied from."""
    assert isinstance(store, JournalStore)
    return store.backend._compactor.run(1)


def mixed(store: Store, rounds: int = 12, size: int = 1000, first: int = 0) -> None:
    """In each round one message that lives and so many that die that a segment is full."""
    for n in range(first, first + rounds):
        store.send(B, f"{n:06d}".encode().ljust(size, b"+"), {"n": n}, f"kept-{n}")
        store.send_many(A, [b"." * size] * 60)
        drain(store, A)


def copies_of(store: Store) -> list[Path]:
    return sorted((directory_of(store) / "journal").glob("*.copies"))


def test_what_lives_takes_as_much_as_it_is(disk: JournalDisk) -> None:
    store = disk.create()
    mixed(store, rounds=60)
    store.reclaim()
    before, held = store.stats(), content(store)
    assert before.segments["retained"] >= 60
    while compact(store):
        pass
    store.reclaim()
    after = store.stats()
    assert content(store) == held
    assert after.compactions == len(copies_of(store)) == after.segments["copies"] == 2
    assert after.segments["retained"] <= 2
    assert sum(path.stat().st_size for path in copies_of(store)) < 60 * 1000 + 2 * 4096 + 60 * 150
    assert after.journal_bytes < before.journal_bytes / 15
    assert_whole(store)
    assert drain(store, B) == [message[1] for message in held[str(B)]]

    def gone() -> bool:
        """Free a segment, so that a snapshot pays: the background may have made one small file of copies more."""
        store.send_many(A, [b"." * 1000] * 120)
        drain(store, A)
        store.reclaim()
        return not copies_of(store)

    eventually(gone)
    assert_whole(store)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("released", [True, False])
def test_the_journal_alone_tells_where_they_are(disk: JournalDisk, closed: bool, released: bool) -> None:
    """With the index and without it, before a snapshot speaks of the copies and after."""
    store = disk.create()
    mixed(store)
    for name in ("one", "two"):
        store.subscribe(Subscription(TOPIC, name))
    for n in range(200):
        store.send(TOPIC, f"{n}".encode().ljust(900, b"t"), None, f"t-{n}")
    for _ in range(190):
        for name in ("one", "two"):
            message = store.receive(TOPIC, subscription=("", name))
            assert message is not None
            message.ack()
    held = store.receive(B)
    assert held is not None
    store.release([held])
    assert compact(store)
    if released:
        store.reclaim()
    before = content(store)
    kept = store.counts(TOPIC, ("", "one"))
    again = disk.reopen(store) if closed else disk.crash(store)
    assert content(again) == before
    assert_whole(again)
    alone = rebuilt(disk, again, closed)
    assert content(alone) == before
    assert alone.counts(TOPIC, ("", "one")) == kept
    assert_whole(alone)
    first = take(alone, B)
    assert (first.body[:6], first.deliveries) == (b"000000", 2)
    assert alone.send(B, b"again", None, "kept-11").duplicate
    drain(alone, B)
    alone.reclaim()
    assert_whole(alone)


def test_who_holds_a_message_reads_and_acks_it(disk: JournalDisk) -> None:
    """Leases, what was fetched ahead, and a walk over all of it know the place where a message was."""
    store = disk.create()
    mixed(store, rounds=30)
    held = take(store, B)
    walk = store.browse(B)
    seen = [next(walk).body for _ in range(3)]
    assert compact(store)
    store.reclaim()
    seen += [message.body for message in walk]
    assert len(seen) == 30
    store.release([held])
    assert drain(store, B) == seen
    assert_whole(store)


def test_an_ack_that_comes_first_counts(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the copy and the record that says it counts messages die, and their destinations go."""
    store = disk.create()
    mixed(store)
    store.send(Destination.parse("gone"), b"gone")
    mixed(store, rounds=1, first=12)
    publish = compaction.Compactor._publish

    def late(self: compaction.Compactor, *args: object) -> None:
        store.ack([take(store, B) for _ in range(5)])
        store.delete(Destination.parse("gone"))
        publish(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(compaction.Compactor, "_publish", late)
    assert compact(store)
    assert [body[:6] for body in bodies(store, B)] == [f"{n:06d}".encode() for n in range(5, 13)]
    assert_whole(store)
    held = content(store)
    store.reclaim()
    assert content(rebuilt(disk, store, False)) == held
    assert content(rebuilt(disk, store, True)) == held


def test_a_prepared_transaction_keeps_its_segment(disk: JournalDisk) -> None:
    store = disk.create()
    branch = Prepared(store, b"t" * 32)
    mixed(store)
    held = content(store)
    assert compact(store) == 11
    assert compact(store) == 0
    store.reclaim()
    assert segments_of(store)[0].name == "000000000001.seg"
    assert content(store) == held
    assert_whole(store)
    store.commit_prepared(branch.transaction).wait()
    assert bodies(store, Destination.parse("c")) == [b"of the branch"]
    assert compact(store)
    store.reclaim()
    assert segments_of(store)[0].name != "000000000001.seg"
    assert_whole(store)


def test_a_segment_is_looked_at_once_its_transaction_has_an_outcome(tmp_path: Path) -> None:
    """Also where nothing else is sealed, or dies, behind it; while it waits the look is not repeated for each ack."""
    with JournalDisk(tmp_path, compact_min_segments=1, pool_files=0, sync="never") as disk:
        store = disk.create()
        branch = Prepared(store, b"t" * 32)
        store.send(B, b"+" * 1000)
        for _ in range(60):
            store.send(A, b"." * 1000)
        assert store.stats().segments["retained"] == 1
        looks: list[None] = []
        notice = store.backend._applier.on_compactable
        store.backend._applier.on_compactable = lambda: looks.append(notice())
        drain(store, A)
        assert 0 < len(looks) < 50
        assert (store.stats().segments["retained"], store.stats().compactions) == (1, 0)
        store.commit_prepared(branch.transaction).wait()
        eventually(lambda: store.stats().compactions == 1)
        assert_whole(store)


class Prepared:
    """A branch that waits for its outcome."""

    def __init__(self, store: Store, transaction: bytes) -> None:
        self.transaction = transaction
        sends = [(Destination.parse("c"), Outgoing(b"of the branch"))]
        store.prepare(transaction, [store.store_id], sends, [], True).wait()


@pytest.mark.parametrize("failing", ["write", "sync", "rename", "full"])
def test_a_disk_that_fails_changes_nothing(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    store = disk.create()
    mixed(store)
    held = content(store)
    error = OSError(errno.ENOSPC if failing == "full" else errno.EIO, "no")

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        if failing in ("write", "full"):
            patched.setattr(wal_copies, "write_all", fail)
        elif failing == "sync":
            patched.setattr(os, "fsync", fail)
        else:
            patched.setattr(store.backend._log.files, "names", fail)
        assert compact(store) == 0
    assert content(store) == held
    assert not copies_of(store)
    assert not list((directory_of(store) / "journal").glob("*.tmp"))
    assert compact(store)
    assert content(store) == held
    assert_whole(store)


def test_a_damaged_segment_stays(disk: JournalDisk) -> None:
    """What cannot be read is not taken for dead."""
    store = disk.create()
    mixed(store)
    path = next(path for path in segments_of(store)[1:] if b"+" * 100 in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES] ^= 1  # the header of its first batch, ahead of what lives
    path.write_bytes(data)
    assert compact(store)
    assert compact(store) == 0
    store.reclaim()
    assert path.exists()
    assert len(segments_of(store)) <= 3
    assert len(list(store.browse(B))) == 12


def test_a_bad_sector_holds_up_no_other_segment(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk.create()
    mixed(store)
    held, first = content(store), segments_of(store)[0]

    def fail(file: File, offset: int, size: int) -> bytes:
        if os.fstat(file.fd).st_ino == first.stat().st_ino:
            raise OSError(errno.EIO, "no")
        return read_at(file, offset, size)

    monkeypatch.setattr(skimming, "read_at", fail)
    assert compact(store) > 5
    assert compact(store) == 0
    store.reclaim()
    assert segments_of(store)[0] == first
    assert len(segments_of(store)) == 2
    assert content(store) == held


def test_copies_that_are_gone_are_told(disk: JournalDisk) -> None:
    store = disk.create()
    mixed(store)
    assert compact(store)
    store.reclaim()
    path = disk.copy(store)
    (lost,) = (path / "journal").glob("*.copies")
    lost.unlink()
    with pytest.raises(CorruptionError, match="file of copies is missing"):
        disk.open(path)
    (path / "index.mdb").unlink()
    with pytest.raises(CorruptionError, match="file of copies is missing"):
        disk.open(path)


def test_what_no_record_speaks_of_goes(disk: JournalDisk) -> None:
    """A crash before the record: the file is a leftover."""
    store = disk.create()
    mixed(store)
    path = disk.copy(store)
    assert compact(store)
    (made,) = copies_of(store)
    (path / "journal" / made.name).write_bytes(made.read_bytes())
    (path / "journal" / f"{made.name}.tmp").write_bytes(b"half")
    again = disk.open(path)
    assert not copies_of(again)
    assert content(again) == content(store)
    assert_whole(again)


def test_it_goes_on_by_itself(disk: JournalDisk) -> None:
    """Nobody has to ask, while others send, receive and look."""
    store = disk.create(compact_min_segments=2, checkpoint_interval=0.05)
    stop = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not stop.is_set():
            seqs = [message.seq for message in store.browse(B)]
            assert seqs == sorted(seqs)
            seen.append(len(seqs))

    staging = threading.Thread(target=look)
    staging.start()
    try:
        rounds = 0
        while store.stats().compactions < 3:
            mixed(store, rounds=4, first=rounds)
            rounds += 4
            assert rounds < 400
    finally:
        stop.set()
        staging.join()
    assert seen == sorted(seen)
    assert len(bodies(store, B)) == rounds
    assert_whole(store)
    held = content(store)
    assert content(rebuilt(disk, store, True)) == held


@pytest.mark.parametrize(("rounds", "rest"), [(4, compaction.PAUSE), (12, compaction.HURRIED_PAUSE)])
def test_it_hurries_where_many_wait(
    disk: JournalDisk, monkeypatch: pytest.MonkeyPatch, rounds: int, rest: float
) -> None:
    monkeypatch.setattr(compaction.Compactor, "notice", lambda self: None)
    store = disk.create(compact_min_segments=2)
    mixed(store, rounds=rounds)
    rests: list[float] = []
    clock = SimpleNamespace(sleep=rests.append, perf_counter=time.perf_counter, monotonic=time.monotonic)
    monkeypatch.setattr("anabranch.adapters.journal.compaction.time", clock)
    assert compact(store)
    assert set(rests) == {rest}
    assert_whole(store)


def test_what_was_copied_from_goes_before_more_is_copied(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background: else all of it would be on the disk twice."""
    monkeypatch.setattr(compaction.Compactor, "notice", lambda self: None)
    store = disk.create(compact_min_segments=2, compact_live_percent=90)
    assert isinstance(store, JournalStore)
    for n in range(12):  # so much lives that two segments fill a file of copies
        store.send_many(B, [f"{n:06d}".encode().ljust(1000, b"+")] * 30)
        store.send_many(A, [b"." * 1000] * 30)
        drain(store, A)
    held = content(store)
    before, most = len(segments_of(store)), 0
    publish = compaction.Compactor._publish

    def counted(self: compaction.Compactor, *args: object) -> None:
        nonlocal most
        publish(self, *args)  # type: ignore[arg-type]
        most = max(most, len(segments_of(store)) + len(copies_of(store)) - before)

    monkeypatch.setattr(compaction.Compactor, "_publish", counted)
    store.backend._compactor._run_in_background()
    assert store.stats().compactions > 3
    assert most <= 2
    assert content(store) == held
    assert_whole(store)


def test_what_finds_no_room_to_be_released_is_tried_again(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "AGAIN_SECONDS", 0.01)
    store = disk.create()
    mixed(store, rounds=2)  # until then it has no reserve
    compactor = store.backend._compactor
    told: list[int] = []

    def full() -> None:
        told.append(1)
        raise StoreFullError("no room to write the index out")

    monkeypatch.setattr(compactor, "_release", full)
    monkeypatch.setattr(compactor, "run", lambda _: len(told) < 3)
    compactor._run_in_background()
    eventually(lambda: len(told) == 3)


def test_a_snapshot_may_come_at_any_time(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the copies are there and nothing says yet that they count."""
    store = disk.create()
    mixed(store)
    held = content(store)
    submit = store.backend._log.submit
    crashed: list[Path] = []

    def late(ticket: object) -> object:
        if getattr(ticket, "unsynced", False) and not crashed:
            store.checkpoint()
            crashed.append(disk.copy(store))
            store.reclaim()
            crashed.append(disk.copy(store))
        return submit(ticket)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(store.backend._log, "submit", late)
        assert compact(store)
    assert content(store) == held
    store.reclaim()
    assert_whole(store)
    for path in crashed:
        again = disk.open(path)
        assert content(again) == held
        again.reclaim()
        assert_whole(again)
        assert content(rebuilt(disk, again, True)) == held


# The index


def test_the_index_becomes_as_small_as_what_is_in_it(disk: JournalDisk) -> None:
    store = disk.create(segment_size=1 << 20)
    for n in range(20):
        store.send_many(A, [b"."] * 2000)
        store.send(B, b"kept", None, f"kept-{n}")
    drain(store, A)
    store.checkpoint()
    index = directory_of(store) / "index.mdb"
    before, held = index.stat().st_size, content(store)
    assert store.compact() > before / 2
    assert index.stat().st_size < before / 4
    assert content(store) == held
    assert_whole(store)
    store.send(B, b"more")
    store.checkpoint()
    held = content(store)
    for again in (disk.crash(store), disk.reopen(store)):
        assert content(again) == held
        assert_whole(again)


@pytest.mark.parametrize("failing", ["sync", "rename", "verify"])
def test_an_index_that_cannot_be_compacted_stays(
    disk: JournalDisk, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store = disk.create(segment_size=1 << 20)
    store.send_many(A, [b"."] * 20_000)
    store.send(B, b"kept")
    drain(store, A)
    held = content(store)
    compact_file = IndexFile.compact

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    def fails(self: IndexFile) -> int:
        with monkeypatch.context() as patched:
            if failing == "sync":
                patched.setattr(os, "fsync", fail)
            elif failing == "rename":
                patched.setattr(index_file, "sync_directory", fail)
            else:
                patched.setattr(PageChecksums, "verify", fail)
            return compact_file(self)

    with monkeypatch.context() as patched:
        patched.setattr(IndexFile, "compact", fails)
        store.compact()
    assert content(store) == held
    store.send(B, b"more")
    store.checkpoint()
    assert_whole(store)
    assert [message.body for message in disk.crash(store).browse(B)] == [b"kept", b"more"]


def test_values_of_maps_and_what_a_transaction_has_claimed_move_too(tmp_path: Path) -> None:
    options = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER, compact_min_segments=10_000)
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], journal=options)])
    xid = anabranch.Xid(1, "held")

    def seen(router: anabranch.Router) -> tuple[object, ...]:
        values = router.map("values")
        queue = router.queue("q")
        return [values.get(f"k{n}") for n in range(8)], queue.counts(), [m.body for m in queue.browse()]

    with anabranch.open(config) as router:
        values, queue = router.map("values"), router.queue("q")
        for n in range(8):
            values.put(f"k{n % 6}", b"%d" % n)
            queue.send(b"%d" % n)
            router.queue("gone").send_many([b"." * 1000] * 60)
            router.queue("gone").purge()
        values.pop("k3")
        transaction = router.transaction(xid=xid)
        message = queue.receive()
        assert message is not None
        transaction.ack(message)
        transaction.prepare()
        before = seen(router)
        router.compact()
        assert router.stats().stores["all"].compactions > 0
        assert seen(router) == before
        (store,) = router._registry.open_stores()
        assert_whole(store)
    (tmp_path / "data" / "stores" / "all" / "index.mdb").unlink()
    with anabranch.open(config) as router:
        assert seen(router) == before
        router.commit(xid)
        assert [m.body for m in router.queue("q").browse()] == [b"%d" % n for n in range(1, 8)]
        assert router.compact() >= 0
        (store,) = router._registry.open_stores()
        assert_whole(store)


def test_it_looks_when_messages_die(tmp_path: Path) -> None:
    """No segment is sealed meanwhile, and no checkpoint written."""
    with JournalDisk(tmp_path, pool_files=0, sync="never", compact_min_segments=2) as disk:
        store = disk.create(checkpoint_interval=3600.0, checkpoint_operations=1_000_000)
        for n in range(200):
            store.send(A, f"{n}".encode().ljust(1000, b"."))
        segments = len(segments_of(store))
        for n in range(150):
            message = take(store, A)
            if n % 10:
                message.ack()
        with store._engine.lock:
            store._engine.current()
        eventually(lambda: len(segments_of(store)) < segments - 1 and store.stats().compactions > 0)
        assert_whole(store)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_it_is_tried_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """After a disk that was full, or that failed, though nobody sends or acks any more."""
    monkeypatch.setattr(compaction, "AGAIN_SECONDS", 0.01)
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise OSError(code, os.strerror(code))

    with JournalDisk(tmp_path, pool_files=0, sync="never", compact_min_segments=2) as disk:
        store = disk.create(checkpoint_interval=3600.0, checkpoint_operations=1_000_000)
        with monkeypatch.context() as patched:
            patched.setattr(wal_copies, "write_all", fail)
            mixed(store, rounds=6)
            with store._engine.lock:
                store._engine.current()
            assert failed.wait(60)
            assert store.stats().compactions == 0
        eventually(lambda: store.stats().compactions > 0)
        assert_whole(store)
    assert ("compaction failed" in caplog.text) is (code == errno.EIO)
