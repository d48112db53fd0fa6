"""Branches of transactions over several stores, seen from inside the journal: what is synced, what retains a segment,
what a rebuild, a damaged record, a full or broken disk and an interruption make of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.engine import engine
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.record.encoding import HEAD
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.journal.encoding import SEND_OVERHEAD
from anabranch.adapters.journal.index import transaction_rows
from anabranch.adapters.system.background import CoalescedJob
from anabranch.adapters.wal import format as w
from anabranch.policies.errors import (
    CorruptionError,
    OutcomeUnknownError,
    StoreFailedError,
    StoreFullError,
    TransactionError,
)
from anabranch.policies.names.destination import Destination

from ..contract.disk import PATIENCE, A, B, C, assert_whole, bodies, drain, take
from ..contract.preparing import claim, prepare, to, transaction
from ..wal.logs import stalled
from .disk import JournalDisk, content, directory_of, listing, rebuilt, segments_of

POLICIES = ("always", "periodic", "never")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


def quiet(store: JournalStore) -> JournalStore:
    """Nothing happens in the background."""
    log, applier = store.backend._log, store.backend._applier
    log._idle_job = CoalescedJob(log._idle, never=True)
    applier._checkpoint_in_time = CoalescedJob(applier._background_checkpoint, never=True)
    store.backend._applier.on_empty = lambda: None
    return store


def outcome_bytes(store: JournalStore, name: bytes) -> int:
    """What a branch says that its outcome takes, at most."""
    return store._engine.sequencer.prepared[name].outcome_size


def interrupted(*_: object) -> None:
    """Ctrl-C, where holds have ended and the index knows nothing of it yet."""
    raise KeyboardInterrupt


def churn(store: JournalStore, destination: Destination = C) -> None:
    """Fill two or three segments with what is gone again."""
    store.send_many(destination, [b"z" * 1000] * 150)
    drain(store, destination)


def place_of(store: JournalStore, name: bytes) -> tuple[Path, int, int]:
    """File, offset and length of a branch's PREPARE record."""
    with store._engine.lock:
        store._engine.current()
        lsn, offset, length = dict(store.backend._index.transactions.prepared())[name]
        segment = store.backend._log.table.find(lsn)
    assert segment is not None
    return segment.path, offset, length


def spoil(path: Path, offset: int) -> None:
    """Flip a bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


class TestSyncs:
    @pytest.mark.parametrize("sync", POLICIES)
    def test_a_prepare_waits_for_the_disk_and_its_outcome_does_not(self, disk: JournalDisk, sync: str) -> None:
        """A durable decision stands behind the outcome; `sync` makes it durable for itself."""
        store = quiet(disk.create(sync=sync, sync_interval=60.0))
        store.send_many(A, [b"1", b"2"])
        store.sync()

        def syncs_of(call: Any) -> int:
            before = store.stats().syncs
            call()
            return store.stats().syncs - before

        assert syncs_of(lambda: prepare(store, 1, to(B, b"b"), [claim(store)])) == 1
        assert syncs_of(lambda: prepare(store, 2, (), [claim(store)])) == 1
        assert syncs_of(lambda: store.commit_prepared(transaction(1)).wait()) == 0
        assert syncs_of(lambda: store.rollback_prepared(transaction(2)).wait()) == 0
        assert syncs_of(store.sync) == 1
        assert syncs_of(store.sync) == 0
        assert store.backend._log.durable_lsn == store.backend._log.tail.lsn

    def test_a_prepare_that_need_not_be_synced(self, disk: JournalDisk) -> None:
        """`transactions.sync: never`: as durable as the store's policy makes it."""
        for sync, expected in (("always", 1), ("periodic", 0), ("never", 0)):
            store = quiet(disk.create(sync=sync, sync_interval=60.0))
            store.send(A, b"1")
            store.sync()
            before = store.stats().syncs
            store.prepare(transaction(1), [store.store_id], to(A, b"2"), [], False).wait()
            assert store.stats().syncs - before == expected

    def test_a_later_sync_covers_an_outcome(self, disk: JournalDisk) -> None:
        """Under `always` whoever receives what was committed and acks it has both on disk."""
        store = quiet(disk.create())
        store.commit_prepared(prepare(store, 1, to(A, b"x"))).wait()
        assert store.backend._log.durable_lsn < store.backend._log.tail.lsn
        take(store).ack()
        assert store.backend._log.durable_lsn == store.backend._log.tail.lsn

    def test_branches_that_wait_together_share_a_sync(self, disk: JournalDisk) -> None:
        store = quiet(disk.create())
        steps = [store.prepare(transaction(n), [store.store_id], to(A, b"x"), [], True) for n in range(10)]
        before = store.stats().syncs
        for step in steps:
            step.wait()
        assert store.stats().syncs - before == 1
        assert len(store.recover_prepared()) == 10


class TestRebuild:
    """The journal alone tells it all, whatever the last checkpoint had seen."""

    def mixed(self, store: JournalStore, checkpoint: str) -> None:
        """Two branches committed, two rolled back, two left; a checkpoint before, between or after."""
        store.send_many(A, [str(n).encode() for n in range(12)])
        if checkpoint == "before":
            store.checkpoint()
        for n in range(6):
            prepare(store, n, [(B, Outgoing(f"sent {n}".encode(), {"n": n}, f"id-{n}"))], [claim(store), claim(store)])
        store.send(B, b"plain", None, "id-5")
        if checkpoint == "between":
            store.checkpoint()
        for n in (3, 0):
            store.commit_prepared(transaction(n)).wait()
        for n in (1, 4):
            store.rollback_prepared(transaction(n)).wait()
        if checkpoint == "after":
            store.checkpoint()

    def same(self, store: JournalStore) -> None:
        assert [prepared.transaction for prepared in store.recover_prepared()] == [transaction(2), transaction(5)]
        assert [(prepared.sends, prepared.acks) for prepared in store.recover_prepared()] == [(1, 2)] * 2
        assert list(store.committed()) == [transaction(0), transaction(3)]
        assert bodies(store, B) == [b"plain", b"sent 3", b"sent 0"]
        assert bodies(store) == [str(n).encode() for n in (2, 3, 4, 5, 8, 9, 10, 11)]
        assert store.stats().leased == 4
        assert store.backend._index.transactions.count == 4
        assert_whole(store)

    @pytest.mark.parametrize("checkpoint", ["before", "between", "after"])
    @pytest.mark.parametrize("how", ["replayed", "rebuilt after close", "rebuilt after crash", "restored"])
    def test_whatever_has_become_of_them(self, disk: JournalDisk, checkpoint: str, how: str) -> None:
        store = quiet(disk.create(checkpoint_interval=3600.0))
        self.mixed(store, checkpoint)
        if how == "replayed":
            store = disk.crash(store)
        elif how == "restored":
            store._engine.interrupted = True  # what Ctrl-C in the middle of applying leaves
        else:
            store = rebuilt(disk, store, closed=how == "rebuilt after close")
        self.same(store)
        assert store.commit_prepared(transaction(5)).wait()[0].duplicate
        store.rollback_prepared(transaction(2)).wait()
        store = rebuilt(disk, store, closed=False)
        assert bodies(store, B) == [b"plain", b"sent 3", b"sent 0"]
        assert drain(store) == [str(n).encode() for n in (2, 3, 4, 5, 8, 9)]
        assert list(store.committed()) == [transaction(0), transaction(3), transaction(5)]
        assert_whole(store)

    def test_after_a_snapshot_has_let_their_records_go(self, disk: JournalDisk) -> None:
        """What the snapshot says, what lies before it in its own segment and what follows it: all at once (J6)."""
        store = quiet(disk.create(pool_files=0))
        self.mixed(store, "before")
        for n in (20, 21):
            prepare(store, n, to(A, b"never"))
            store.rollback_prepared(transaction(n)).wait()
        drain(store)  # what the first segment still held
        churn(store)
        prepare(store, 30, to(C, b"c"))
        store.commit_prepared(transaction(30)).wait()
        prepare(store, 31, to(C, b"d"))
        assert store.reclaim() > 0
        store.commit_prepared(transaction(31)).wait()
        prepare(store, 32, to(C, b"e"))
        before = content(store)
        for closed in (False, True, False):
            store = rebuilt(disk, store, closed)
            assert content(store) == before
            prepared = [prepared.transaction for prepared in store.recover_prepared()]
            assert prepared == [transaction(n) for n in (2, 5, 32)]
            assert list(store.committed()) == [transaction(n) for n in (0, 3, 30, 31)]
            assert store.backend._index.transactions.count == 7
            assert_whole(store)
        assert bodies(store, C) == [b"c", b"d"]

    def test_a_settled_branch_stays_dead(self, disk: JournalDisk) -> None:
        """Its PREPARE lies in a segment that a live message keeps; its outcome went with another one."""
        store = disk.create(pool_files=0)
        store.send(B, b"keeps the first segment")
        store.send_many(A, [b"1", b"2"])
        committed, undone = prepare(store, 1, to(A, b"3"), [claim(store)]), prepare(store, 2, to(A, b"4"))
        churn(store)
        store.commit_prepared(committed).wait()
        store.rollback_prepared(undone).wait()
        drain(store)
        churn(store)
        store.reclaim()
        assert segments_of(store)[0].name == "000000000001.seg"
        for closed in (False, True):
            store = rebuilt(disk, store, closed)
            assert list(store.recover_prepared()) == []
            assert (bodies(store), bodies(store, B)) == ([], [b"keeps the first segment"])
            assert_whole(store)

    def test_the_oldest_of_very_many_committed_are_forgotten(
        self, disk: JournalDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Invariant 10. What is prepared is never among them."""
        for module in (transaction_rows, engine):
            monkeypatch.setattr(module, "COMMITTED_MAX", 5)
        store = disk.create()
        prepare(store, 0, to(A, b"x"))
        for n in range(1, 12):
            store.commit_prepared(prepare(store, n, to(B, b"x"))).wait()
        for _ in range(2):
            assert list(store.committed()) == [transaction(n) for n in range(7, 12)]
            assert [prepared.transaction for prepared in store.recover_prepared()] == [transaction(0)]
            store = rebuilt(disk, store, closed=False)


class TestSegments:
    @pytest.mark.parametrize("commit", [True, False])
    @pytest.mark.parametrize("reopened", [True, False])
    def test_a_prepare_retains_its_segment_until_the_outcome(
        self, disk: JournalDisk, commit: bool, reopened: bool
    ) -> None:
        store = disk.create(pool_files=0)
        name = prepare(store, 1, to(B, b"b" * 100))
        for _ in range(3):
            churn(store)
        store.reclaim()
        assert segments_of(store)[0].name == "000000000001.seg"
        if reopened:
            store = rebuilt(disk, store, closed=False)
            assert segments_of(store)[0].name == "000000000001.seg"
        (store.commit_prepared if commit else store.rollback_prepared)(name).wait()
        churn(store)
        store.reclaim()
        assert segments_of(store)[0].name != "000000000001.seg"
        for closed in (False, True):
            store = rebuilt(disk, store, closed)
            assert list(store.recover_prepared()) == []
            assert bodies(store, B) == ([b"b" * 100] if commit else [])
            assert list(store.committed()) == ([name] if commit else [])
            assert_whole(store)

    def test_a_lost_segment_that_held_a_prepare_is_named(self, disk: JournalDisk) -> None:
        """Rule J7, with the index and without."""
        store = disk.create(pool_files=0)
        prepare(store, 1, to(B, b"b"))
        for _ in range(3):
            churn(store)
        store.reclaim()
        store.close()
        lost = segments_of(store)[0]
        assert lost.name == "000000000001.seg"
        lost.unlink()
        for _ in range(2):
            with pytest.raises(CorruptionError, match="missing") as caught:
                disk.reopen(store)
            assert caught.value.path == str(lost)
            (directory_of(store) / "index.mdb").unlink(missing_ok=True)


class TestDamage:
    """Invariant 9."""

    @pytest.mark.parametrize("closed", [True, False])
    def test_a_damaged_prepare_is_named(self, disk: JournalDisk, closed: bool) -> None:
        store = quiet(disk.create())
        store.send(A, b"1")
        name = prepare(store, 1, to(B, b"b" * 100), [claim(store)])
        store.send(A, b"2")
        store.checkpoint()
        path, offset, length = place_of(store, name)
        if closed:
            store.close()
        else:
            path = disk.copy(store) / "journal" / path.name
        spoil(path, offset + length - 10)
        directory = path.parent.parent
        before = listing(directory)
        for _ in range(2):
            with pytest.raises(CorruptionError, match=f"prepared transaction {name.hex()}") as caught:
                disk.open(directory)
            assert (caught.value.path, caught.value.offset) == (str(path), offset)
        assert listing(directory) == before, "an open that refuses changes nothing"
        spoil(path, offset + length - 10)
        store = disk.open(directory)
        store.commit_prepared(name).wait()
        assert (bodies(store), bodies(store, B)) == ([b"2"], [b"b" * 100])

    def test_without_the_index_too(self, disk: JournalDisk) -> None:
        store = disk.create()
        path, offset, _ = place_of(store, prepare(store, 1, to(B, b"b")))
        store.close()
        (directory_of(store) / "index.mdb").unlink()
        spoil(path, offset + 30)
        with pytest.raises(CorruptionError) as caught:
            disk.reopen(store)
        assert caught.value.path == str(path)

    def test_check_finds_it(self, disk: JournalDisk) -> None:
        """C5, and C4 where it is counted as dead."""
        store = disk.create()
        name = prepare(store, 1, to(B, b"b"))
        path, offset, _ = place_of(store, name)
        assert_whole(store)
        spoil(path, offset + 30)
        found = list(store.check())
        assert any(line.startswith("C5") and name.hex() in line for line in found), found
        spoil(path, offset + 30)
        with store._engine.lock:
            store._engine.current()
            store.backend._log.table.segments[0].mark_dead(store.backend._index.transactions.prepared()[0][1][0])
        found = list(store.check())
        assert any(line.startswith("C4") and name.hex() in line for line in found), found

    def test_a_torn_prepare_was_never_there(self, disk: JournalDisk) -> None:
        """Nobody was told that it is prepared: cut, and what it claimed is free."""
        store = quiet(disk.create(sync="never"))
        store.send_many(A, [b"1", b"2"])
        message = claim(store)
        store.prepare(transaction(1), [store.store_id], to(B, b"b"), [message], False).wait()
        path, offset, length = place_of(store, transaction(1))
        directory = disk.copy(store)
        spoil(directory / "journal" / path.name, offset + length - 1)
        store = disk.open(directory)
        assert list(store.recover_prepared()) == []
        assert drain(store) == [b"1", b"2"]

    def test_a_torn_commit_leaves_it_prepared(self, disk: JournalDisk) -> None:
        """Rules T8, T9: a commit is not synced, and a power failure may take it whole. The seq that it gave out is then
        given anew."""
        store = quiet(disk.create())
        store.send(A, b"1")
        name = prepare(store, 1, [*to(B, b"b"), *to(A, b"2")], [claim(store)])
        start = store.backend._log.tail.offset
        first = store.commit_prepared(name).wait()
        (path,) = segments_of(store)
        directory = disk.copy(store)
        spoil(directory / "journal" / path.name, start + 50)
        again = disk.open(directory)
        assert [prepared.transaction for prepared in again.recover_prepared()] == [name]
        assert list(again.committed()) == []
        assert (bodies(again), again.receive(A), bodies(again, B)) == ([b"1"], None, [])
        assert again.send(B, b"between").seq == first[0].seq
        assert [receipt.seq for receipt in again.commit_prepared(name).wait()] == [first[1].seq, first[1].seq + 1]
        assert (bodies(again), bodies(again, B)) == ([b"2"], [b"between", b"b"])
        assert_whole(rebuilt(disk, again, closed=False))


class TestFailures:
    """Invariant 7."""

    def broken(self, monkeypatch: pytest.MonkeyPatch, call: str, calls: list[int]) -> None:
        real = getattr(os, call)

        def fail(fd: int, *rest: Any) -> Any:
            if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".seg":
                calls.append(fd)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, *rest)

        monkeypatch.setattr(os, call, fail)

    @pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
    @pytest.mark.parametrize("step", ["prepare", "commit", "rollback", "sync"])
    def test_a_disk_that_breaks(self, disk: JournalDisk, monkeypatch: pytest.MonkeyPatch, step: str, call: str) -> None:
        """The step says that it does not know; the store has failed, and nothing is tried again; reopened it has the
        branch as it was before the step or as it is after it."""
        store = quiet(disk.create())
        store.send_many(A, [b"1", b"2"])
        message = claim(store)
        name = transaction(1)
        if step != "prepare":
            prepare(store, 1, to(B, b"b"), [message])
        if step == "sync":
            store.commit_prepared(name).wait()
        calls: list[int] = []
        with monkeypatch.context() as patch:
            self.broken(patch, call, calls)
            does_not_sync = call == "fdatasync" and step in ("commit", "rollback")
            does_not_write = call == "pwrite" and step == "sync"
            if does_not_sync or does_not_write:
                self.tell(store, step, name, message)
                assert calls == []
                return
            with pytest.raises(StoreFailedError if step == "sync" else OutcomeUnknownError):
                self.tell(store, step, name, message)
            for other in ("prepare", "commit", "rollback", "sync"):
                with pytest.raises(StoreFailedError):
                    self.tell(store, other, name, message)
            for ask in (store.recover_prepared, store.committed, lambda: store.forget([name])):
                with pytest.raises(StoreFailedError):
                    ask()
            assert len(calls) == 1, "a failed sync is never tried again"
        store = disk.reopen(store)
        if step == "sync":
            assert (bodies(store), bodies(store, B)) == ([b"2"], [b"b"])
        elif store.recover_prepared():
            assert store.commit_prepared(name).wait()
            assert (bodies(store), bodies(store, B)) == ([b"2"], [b"b"])
        else:
            assert step != "commit"
            assert (drain(store), bodies(store, B)) == ([b"1", b"2"], [])
        assert_whole(store)

    def tell(self, store: JournalStore, step: str, name: bytes, message: Message) -> None:
        if step == "prepare":
            store.prepare(name, [store.store_id], to(B, b"b"), [message], True).wait()
        elif step == "commit":
            store.commit_prepared(name).wait()
        elif step == "rollback":
            store.rollback_prepared(name).wait()
        else:
            store.sync()

    def test_a_full_disk(self, disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is written, the store goes on; a branch that cannot be committed now is prepared still, and nobody
        gets its room."""
        store = disk.create(max_messages=3)
        store.send(A, b"1")
        message = claim(store)
        name = prepare(store, 1, to(B, b"x" * 100_000), [message])

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(store.backend._log.files, "publish", full)
            for _ in range(3):
                with pytest.raises(StoreFullError, match="Nothing was written"):
                    store.commit_prepared(name).wait()
            sends = to(C, b"x" * 100_000)
            with pytest.raises(StoreFullError, match="Nothing was written"):
                store.prepare(transaction(2), [store.store_id], sends, [], True, store.reserve(sends)).wait()
            assert [prepared.transaction for prepared in store.recover_prepared()] == [name]
        store.send_many(A, [b"2", b"3"])  # what the branch sends takes the room of what it acks
        for _ in range(2):
            with pytest.raises(StoreFullError, match="max_messages"):
                store.send(A, b"4")
            store.commit_prepared(name).wait()
        assert (bodies(store), store.depth(B)) == ([b"2", b"3"], 1)
        with pytest.raises(StoreFullError, match="max_messages"):
            store.send(A, b"4")
        assert_whole(store)


class TestInterleavings:
    def test_an_interrupted_rollback_frees_each_message_once(
        self, disk: JournalDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C between holds and index: who receives next must not get what the second try would free again."""
        store = quiet(disk.create())
        store.send_many(A, [b"1", b"2", b"3", b"4"])
        message = claim(store)
        take(store).release()  # what was fetched ahead is there without asking the index
        name = prepare(store, 1, (), [message])
        assert store.depth(A) == 4  # the prepare is applied
        with monkeypatch.context() as patch:
            patch.setattr(store.backend, "apply", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.rollback_prepared(name).wait()
        assert take(store).body == b"1"
        assert store.depth(A) == 4
        assert drain(store) == [b"2", b"3", b"4"]
        assert_whole(store)

    def test_an_interrupted_commit_hands_no_acked_message_out(
        self, disk: JournalDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a restart what a branch has claimed lies before the cursor, among what is fetched ahead."""
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        store.release([take(store), claimed := take(store)])
        assert take(store).seq < claimed.seq
        store.claim(message := take(store))
        name = prepare(store, 1, (), [message])
        store = quiet(disk.crash(store))
        first = take(store)
        step = store.commit_prepared(name)
        step.wait()
        with monkeypatch.context() as patch:
            patch.setattr(store.backend, "apply", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.depth(A)
        assert take(store).body == b"3"
        assert store.receive(A) is None
        first.ack()
        assert bodies(store) == [b"3"]

    def test_a_commit_after_the_removal_of_its_destination(self, disk: JournalDisk) -> None:
        """It must name the destination again, for which the prepare had counted no space; it fits all the same, and
        zero-filling goes over nothing."""
        store = quiet(disk.create(sync="never", segment_size=1 << 20))
        named = Destination.parse("queue://" + "x" * 900)
        store.send(named, b"first", None, "id")
        name = prepare(store, 1, [(named, Outgoing(b"B" * 1000, None, "id")), *to(B, b"b")])
        store.delete(named)
        log = store.backend._log
        need = w.BATCH_HEADER.size + outcome_bytes(store, name)

        def left() -> int:
            return log.tail.segment.allocated - log.tail.offset

        overhead = w.BATCH_HEADER.size + SEND_OVERHEAD + HEAD.size
        store.send(C, b"k")
        while left() > need + 5000:
            store.send(C, b"z" * 1000)
        store.send(C, b"z" * (left() - need - overhead))
        assert left() == need
        assert not any(receipt.duplicate for receipt in store.commit_prepared(name).wait())
        store.send(C, b"next")
        for view in (store, disk.crash(store), rebuilt(disk, store, closed=False)):
            assert (bodies(view, named), bodies(view, B)) == ([b"B" * 1000], [b"b"])
            assert_whole(view)

    def test_an_outcome_comes_behind_what_was_queued_before(self, disk: JournalDisk) -> None:
        store = disk.create()
        earlier = store.send_nowait(A, b"earlier")
        name = prepare(store, 1, to(A, b"of the branch"))
        assert earlier.done() or earlier.result(PATIENCE)
        with stalled(store.backend._log):
            later = store.send_nowait(A, b"later")
            step = store.commit_prepared(name)
            assert not later.done()
        step.wait()
        assert later.result(PATIENCE).seq > earlier.result(PATIENCE).seq
        assert bodies(store) == [b"earlier", b"later", b"of the branch"]

    def test_both_outcomes_at_once(self, disk: JournalDisk) -> None:
        """A coordinator never says both; if two did, the first counts, in memory as in the journal."""
        store = disk.create()
        store.send(A, b"1")
        name = prepare(store, 1, to(B, b"b"), [claim(store)])
        step = store.commit_prepared(name)  # queued, and not written yet
        assert not store.rollback_prepared(name).wait()
        step.wait()
        for view in (store, rebuilt(disk, store, closed=False)):
            assert (bodies(view), bodies(view, B)) == ([], [b"b"])
            assert list(view.committed()) == [name]
            assert view.receive(A) is None
            assert_whole(view)

    def test_a_delete_beside_a_claim_is_refused_after_a_rebuild(self, disk: JournalDisk) -> None:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        prepare(store, 1, (), [claim(store)])
        store = rebuilt(disk, store, closed=False)
        with pytest.raises(TransactionError, match="claimed 1 of its messages"):
            store.delete(A)
        assert store.purge(A) == 1
        store.commit_prepared(transaction(1)).wait()
        assert store.delete(A) == 0
        assert_whole(rebuilt(disk, store, closed=True))


def test_what_a_branch_says_of_its_size_is_enough(disk: JournalDisk) -> None:
    """However many destinations, names and ids: the batch of the commit fits the space that was taken for it."""
    store = disk.create(segment_size=64 * 1024)
    chance: Sequence[int] = range(1, 60)
    for n in chance:
        sends = [
            (
                Destination.parse(f"queue://{'n' * (n * 7 % 400)}{n}.{k % 3}"),
                Outgoing(b"x" * (n * k % 700), None, f"{k}"),
            )
            for k in range(n % 9 + 1)
        ]
        name = prepare(store, n, sends)
        batch = store.backend._log.tail
        size = w.BATCH_HEADER.size + outcome_bytes(store, name)
        store.commit_prepared(name).wait()
        if store.backend._log.tail.segment is batch.segment:
            assert store.backend._log.tail.offset - batch.offset <= size
    assert_whole(rebuilt(disk, store, closed=False))
