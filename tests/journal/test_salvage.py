"""A damaged journal goes on with all that can be read of it, and says what is lost (invariant 9, MD1 to MD3)."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google_crc32c import extend as crc32c

from anabranch.adapters.core.record.place import OWN, SEQ
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.journal.backend import JournalBackend
from anabranch.adapters.journal.compaction import Compactor
from anabranch.adapters.journal.recovery.replay import UNNAMED
from anabranch.adapters.journal.recovery.salvage import LossReport, reports, salvage, summary
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files.segment_files import read_header
from anabranch.adapters.wal.log import Log
from anabranch.adapters.wal.reader import BatchReader, records_of
from anabranch.adapters.wal.reclaim import Reclaimer
from anabranch.adapters.wal.segment import Segment
from anabranch.policies.config import JournalOptions
from anabranch.policies.config.durability import OnCorruption
from anabranch.policies.errors import AnabranchError, CorruptionError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, assert_whole, take
from ..crash.calls import Crash, Faults, Jobs, simulated
from ..shares import Share
from .disk import JournalDisk, directory_of, segments_of

T = Destination.topic("prices")
X = "x"
SMALL: dict[str, Any] = {
    "segment_size": 64 * 1024,
    "checkpoint_interval": 3600.0,
    "compact_live_percent": 95,
    "compact_min_segments": 1,
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


Shown = dict[int, tuple[str, str | None]]
"""By seq: destination and message id."""


class Made(NamedTuple):
    """A store that was closed, and what it holds."""

    path: Path
    held: Shown


def shown(store: JournalStore) -> Shown:
    """All that is in a store, which is whole."""
    assert_whole(store)
    found = {}
    for destination in store.destinations():
        for message in store.browse(destination):
            found[message.seq] = str(destination), message.message_id
    return found


def made(path: Path, seed: int = 0, count: int = 150) -> Made:
    """A store of several segments in which some messages are acked."""
    chance = random.Random(seed)
    JournalStore.create("s", path, JournalOptions(**SMALL))
    store = JournalStore("s", path, JournalOptions(**SMALL))
    store.open()
    for number in range(count):
        queue = Destination.queue(f"q{number % 3}")
        store.send(queue, chance.randbytes(chance.randrange(10, 1500)), None, f"id{number}")
        if chance.random() < 0.4:
            take(store, queue).ack()
        if number == count // 2:
            store.compact()
            store.checkpoint()
        if number == count - 20:
            store.compact()
    held = shown(store)
    store.close()
    return Made(path, held)


def salvaged(path: Path) -> tuple[Shown, list[LossReport]]:
    """What is there once all of it was mended, and what is said of it."""
    salvage("s", path, path / "journal", path / "index.mdb", bytes.fromhex((path / "store.id").read_text()))
    store = JournalStore("s", path, JournalOptions(on_corruption=OnCorruption.SALVAGE, **SMALL))
    store.open()
    try:
        found = shown(store)
    finally:
        store.close()
    assert not list(path.glob("*.unfinished"))
    again = JournalStore("s", path, JournalOptions(**SMALL))  # mended is mended
    again.open()
    assert shown(again) == found
    again.close()
    (path / "index.mdb").unlink()
    rebuilt = JournalStore("s", path, JournalOptions(**SMALL))  # and the journal alone says as much
    rebuilt.open()
    assert {seq: name for seq, (name, _) in shown(rebuilt).items()} == {seq: name for seq, (name, _) in found.items()}
    rebuilt.close()
    return found, [report for _, report in reports(path)]


def copy_of(store: Made, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(store.path, to)
    return to


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << offset % 8
    path.write_bytes(data)


def place_of(store: JournalStore, destination: Destination, seq: int) -> tuple[Path, int, int]:
    """File, offset and length of a message's record."""
    backend = store.backend
    assert isinstance(backend, JournalBackend)
    assert store.depth(destination)  # all is in the index by now
    state = store._engine.catalog.destinations[destination]
    place = next(place for place in backend.rows(state, None, None, 0, 10_000) if place[SEQ] == seq)
    lsn, offset, length = place[OWN]
    segment = backend._log.table.find(lsn)
    assert segment is not None
    return segment.path, offset, length


def log_of(store: JournalStore) -> Log:
    assert isinstance(store.backend, JournalBackend)
    return store.backend._log


class TestOneMessage:
    @pytest.mark.parametrize("with_index", [True, False])
    def test_it_is_named_and_nothing_else_is_missing(self, disk: JournalDisk, with_index: bool) -> None:
        store = disk.create()
        for number in range(60):
            store.send(A, b"." * 1500, None, f"id{number}")
        store.send(B, b"other")
        path, offset, length = place_of(store, A, 31)
        store.close()
        flip(path, offset + length - 7)
        as_it_was = path.read_bytes()
        if not with_index:
            (directory_of(store) / "index.mdb").unlink()
        found, (report,) = salvaged(directory_of(store))
        assert sorted(found) == [seq for seq in range(1, 62) if seq != 31]
        (lost,) = report.lost
        assert (lost.destination, lost.seq, lost.message_id, lost.reads_as) == (f"{A}", 31, "id30", "message")
        if with_index:
            assert [(one.destination, one.seq, one.message_id) for one in report.messages] == [(f"{A}", 31, "id30")]
            assert summary(report) == "lost: 1 message"
        else:
            assert summary(report) == "lost: 1 record that may have been messages, or acks of messages that come again"
        assert report.damaged_files is not None
        damaged = directory_of(store) / report.damaged_files / path.name
        assert damaged.read_bytes() == as_it_was

    def test_without_the_option_nothing_is_changed_and_the_error_says_what_to_do(self, disk: JournalDisk) -> None:
        store = disk.create()
        store.send(A, b"x")
        store.close()
        (segment,) = segments_of(store)
        flip(segment, 40)
        before = segment.read_bytes()
        with pytest.raises(CorruptionError, match="anabranch salvage"):
            disk.reopen(store)
        assert segment.read_bytes() == before
        again = disk.reopen(store, on_corruption=OnCorruption.SALVAGE)
        assert shown(again) == {1: (f"{A}", None)}  # the header alone was damaged

    def test_what_is_not_damaged_is_not_touched(self, disk: JournalDisk) -> None:
        store = disk.create(on_corruption=OnCorruption.SALVAGE)
        store.send(A, b"x")
        store.close()
        (segment,) = segments_of(store)
        page = bytearray(segment.read_bytes())
        header = read_header(segment)
        page[8] = 99  # another version, with a checksum that is right
        fields = [getattr(header, name) for name in header.__slots__ if name != "log_id"]
        blank = w.SEGMENT_HEADER.pack(w.MAGIC, 99, 0, 0, header.log_id, *fields)
        whole = w.SEGMENT_HEADER.pack(w.MAGIC, 99, 0, crc32c(0, blank), header.log_id, *fields)
        segment.write_bytes(whole + bytes(page[len(whole) :]))
        with pytest.raises(CorruptionError, match="format version 99"):
            disk.reopen(store)
        assert not list(directory_of(store).glob("loss-*"))


class TestOtherRecords:
    def test_a_lost_ack_brings_its_message_back_where_the_index_does_not_know(self, disk: JournalDisk) -> None:
        store = disk.create(**SMALL)
        for number in range(3):
            store.send(A, b"." * 100, None, f"id{number}")
        tail = log_of(store).tail.offset
        take(store).ack()
        store.send(A, b"last")
        later = disk.copy(store)
        flip(later / "journal" / segments_of(store)[0].name, tail + w.BATCH_HEADER.size + w.RECORD_HEADER.size)
        found, (report,) = salvaged(later)
        assert sorted(found) == [1, 2, 3, 4]
        (lost,) = report.lost
        assert (lost.reads_as, lost.seq) == ("ack", 1)
        assert "come again" in summary(report)

    def test_a_lost_snapshot_is_told_where_the_index_is_gone_too(self, tmp_path: Path) -> None:
        store = made(tmp_path / "made")
        snapshots = [
            record
            for path in sorted((store.path / "journal").glob("*.seg"))
            for batch in BatchReader(Segment(read_header(path), path), w.HEADER_BYTES, read_header(path).base_lsn - 1)
            for record in records_of(batch)
            if record.kind == w.SNAPSHOT
        ]
        latest = snapshots[-1]
        flip(latest.segment.path, latest.offset + latest.length - 1)
        (store.path / "index.mdb").unlink()
        found, (report,) = salvaged(store.path)
        assert "a snapshot, so that messages acked long ago may come again" in summary(report)
        assert store.held.keys() <= found.keys()

    def test_a_lost_prepared_transaction_is_named_and_what_it_claimed_is_free(self, disk: JournalDisk) -> None:
        store = disk.create()
        store.send(A, b"claimed")
        message = take(store)
        store.claim(message)
        transaction = bytes(range(24))
        branch_at = log_of(store).tail.offset
        store.prepare(transaction, [store.store_id], [], [message], True).wait()
        store.close()
        flip(segments_of(store)[0], branch_at + w.BATCH_HEADER.size + w.RECORD_HEADER.size + 3)
        found, (report,) = salvaged(directory_of(store))
        assert sorted(found) == [1]
        assert report.transactions == [transaction.hex()]

    def test_messages_of_a_destination_whose_name_is_lost(self, disk: JournalDisk) -> None:
        store = disk.create()
        store.send(A, b"first")
        store.send(A, b"second")
        store.close()
        (directory_of(store) / "index.mdb").unlink()
        flip(segments_of(store)[0], w.HEADER_BYTES + w.BATCH_HEADER.size + w.RECORD_HEADER.size + 5)
        found, _ = salvaged(directory_of(store))
        assert {name for name, _ in found.values()} == {"queue://salvaged.1"}
        assert sorted(found) == [1, 2]

    def test_a_topics_message_is_lost_for_all(self, disk: JournalDisk) -> None:
        store = disk.create()
        one, two = Subscription(T, "one"), Subscription(T, "two")
        store.subscribe(one)
        store.subscribe(two)
        for number in range(5):
            store.send(T, f"{number}".encode())
        take(store, T, subscription=one.key).ack()
        path, offset, _ = place_of(store, T, 3)
        store.close()
        flip(path, offset + w.RECORD_HEADER.size + 1)
        salvaged(directory_of(store))
        store = disk.reopen(store)
        bodies = {which.name: [m.body for m in store.browse(T, subscription=which.key)] for which in (one, two)}
        assert bodies == {"one": [b"1", b"3", b"4"], "two": [b"0", b"1", b"3", b"4"]}


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_what_died_while_it_was_copied_stays_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_snapshot: bool
) -> None:
    """Its copy is on disk, and the record that says that the copies count comes after its ack. Without a snapshot the
    copies are read before the record that declares their destination."""
    for worker in (Compactor, Reclaimer):  # nothing goes by itself while the files are copied
        monkeypatch.setattr(worker, "notice", lambda *_: None)
    JournalStore.create("s", tmp_path / "data", JournalOptions(**SMALL))
    store = JournalStore("s", tmp_path / "data", JournalOptions(**SMALL))
    store.open()
    queue = Destination.queue("q")
    publish = Compactor._publish
    acked: list[int] = []

    def late(self: Compactor, *args: Any) -> None:
        is_first = not acked
        for _ in range(3 if is_first else 0):
            message = take(store, queue)
            acked.append(message.seq)
            message.ack()
        publish(self, *args)
        if is_first:
            shutil.copytree(tmp_path / "data", tmp_path / "killed")

    def fill() -> None:
        store.send_many(A, [bytes(1000)] * 100)
        for _ in range(100):
            take(store, A).ack()

    if has_snapshot:
        fill()
        store.reclaim()
    monkeypatch.setattr(Compactor, "_publish", late)
    sent = [receipt.seq for receipt in store.send_many(queue, [b"kept"] * 10)]
    fill()
    store.compact()
    store.close()
    (tmp_path / "killed/index.mdb").unlink()
    flip(min((tmp_path / "killed/journal").glob("*.seg")), 40)
    found, _ = salvaged(tmp_path / "killed")
    assert [seq for seq in found if seq in sent] == [seq for seq in sent if seq not in acked]


class TestDamage:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_all_that_is_whole_is_there_and_all_that_is_not_is_told(
        self, tmp_path: Path, share: Share, seed: int
    ) -> None:
        store = made(tmp_path / "made", seed)
        names = sorted(path.name for path in (store.path / "journal").iterdir() if path.suffix in (".seg", ".copies"))
        assert any(name.endswith(".copies") for name in names)
        trials = 0
        for number in share.of(range(4000), 160, seed):
            wrong = trial(store, tmp_path / "trial", names, random.Random(seed * 10_000 + number))
            assert wrong == "", f"trial {number}: {wrong}"
            trials += 1
        share.counts.append(f"{trials} damaged journals, all that is whole is there")


def trial(store: Made, path: Path, names: list[str], chance: random.Random) -> str:
    """Damage one file, salvage; what is wrong then."""
    copy_of(store, path)
    segment = path / "journal" / chance.choice(names)
    data = bytearray(segment.read_bytes())
    used = max(len(bytes(data).rstrip(b"\0")), w.HEADER_BYTES + 1)
    what, at = (
        chance.choice(["bit", "bytes", "page", "noise", "cut", "removed", "header"]),
        chance.randrange(w.HEADER_BYTES, used),
    )
    if what == "bit":
        data[at] ^= 1 << chance.randrange(8)
    elif what == "bytes":
        data[at : at + 8] = chance.randbytes(8)
    elif what == "page":
        data[at & ~4095 : (at & ~4095) + 4096] = bytes(4096)
    elif what == "noise":
        data[at : at + 3000] = chance.randbytes(3000)
    elif what == "cut":
        del data[at:]
    elif what == "header":
        data[chance.randrange(w.SEGMENT_HEADER.size)] ^= 4
    segment.write_bytes(data)
    if what == "removed":
        segment.unlink()
    has_index = chance.random() < 0.7
    if not has_index:
        (path / "index.mdb").unlink()
    found, told = salvaged(path)
    lost = {one.seq for report in told for one in report.messages} | {
        one.seq for report in told for one in report.lost if one.seq is not None
    }
    missing = store.held.keys() - found.keys()
    newer = any(one.is_newer(report.since_record) or "missing" in one.reason for report in told for one in report.lost)
    if what == "header" and (missing or found.keys() - store.held.keys()):
        return "a header's damage costs nothing"
    if what == "bit" and len(missing) > 1 and has_index:  # else it may have been in the snapshot
        return f"{len(missing)} messages are lost for a bit"
    if missing - lost and not newer:
        return f"{what}: {sorted(missing - lost)} are lost, and nothing tells of them"
    if found.keys() - store.held.keys() and not newer:
        return f"{what}: {sorted(found.keys() - store.held.keys())} are there again, and nothing tells of them"
    wrong = [
        seq
        for seq in found.keys() & store.held.keys()
        if found[seq][0] != store.held[seq][0] and not found[seq][0].startswith(f"queue://{UNNAMED}.")
    ]
    return f"{wrong} are others" if wrong else ""


class TestCrashes:
    @pytest.mark.parametrize("kind", ["crash", "eio", "enospc"])
    def test_it_goes_on_after_each_call_of_the_disk(self, tmp_path: Path, share: Share, kind: str) -> None:
        """MD3; a report is never without what it tells of, nor the other way round."""
        path = tmp_path / "data"
        store = made(path, 3, 60)
        segment = sorted((path / "journal").glob("*.seg"))[0]
        flip(segment, w.HEADER_BYTES + 500)
        flip(segment, 30)
        damaged = Made(path, store.held)
        shutil.copytree(path, tmp_path / "template")
        template = Made(tmp_path / "template", store.held)
        whole = copy_of(template, tmp_path / "expected")
        expected, _ = opened_once(whole)
        faults = spoilt(copy_of(template, path), tmp_path, kind, 0)
        calls = list(share.of(range(1, faults.count + 1), 25))
        for at in calls:
            faults = spoilt(copy_of(template, path), tmp_path, kind, at)
            found, told = opened_once(copy_of(damaged, tmp_path / "later"))  # the one that is gone has its lock still
            assert found == expected, f"{kind} at {faults.hit}"
            assert len(told) >= 1, f"{kind} at {faults.hit}: nothing is told"
        share.counts.append(f"{len(calls)} calls of a salvage: {kind}")


def spoilt(path: Path, root: Path, kind: str, at: int) -> Faults:
    """Open a damaged store while call number `at` fails."""
    faults, jobs = Faults(root, kind, at), Jobs()
    with simulated(jobs, "salvage"), faults.patched():
        with contextlib.suppress(Crash, OSError, AnabranchError):
            opened_once(path)
        faults.dead = faults.on = False
        jobs.forget()
    return faults


def opened_once(path: Path) -> tuple[Shown, list[LossReport]]:
    store = JournalStore("s", path, JournalOptions(on_corruption=OnCorruption.SALVAGE, **SMALL))
    try:
        store.open()
        return {seq: (name, None) for seq, (name, _) in shown(store).items()}, [one for _, one in reports(path)]
    finally:
        store.close()
