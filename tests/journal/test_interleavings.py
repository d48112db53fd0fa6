"""Interleavings that once lost, doubled or hid a message, each brought about on purpose."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.operations.branches import Branch
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.record.encoding import HEAD
from anabranch.adapters.core.state.leases import LEASED, LEAVING
from anabranch.adapters.journal.encoding import NUMBER, SEND_OVERHEAD
from anabranch.adapters.wal import format as w
from anabranch.policies.errors import StoreFullError, UnknownMessageError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, Parallel, assert_whole, bodies, drain, eventually, take
from ..contract.preparing import prepare, to
from ..wal.logs import quiet, stalled
from .disk import JournalDisk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


def test_a_send_that_must_name_its_destination_again_is_not_overwritten(
    disk: JournalDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that comes just before makes the send longer than its sender counted: the batch may run past the
    allocated space, and zero-filling from there would go over acknowledged records."""
    store = disk.create(sync="never", segment_size=1 << 20)
    named = Destination.parse("queue://" + "x" * 900)
    store.send(named, b"first")
    store.send(B, b"k")
    log = store.backend._log

    def left() -> int:
        return log.tail.segment.allocated - log.tail.offset

    body = b"B" * 1000
    overhead = SEND_OVERHEAD + HEAD.size
    need = w.BATCH_HEADER.size + w.RECORD_HEADER.size + NUMBER.size + overhead + len(body)
    alone = w.BATCH_HEADER.size + overhead
    while left() > need + 5000:
        store.send(B, b"z" * 1000)
    store.send(B, b"z" * (left() - need - alone))
    assert left() == need
    submit = store._engine.submit

    def late(ticket: Ticket) -> object:
        monkeypatch.undo()
        store.delete(named)
        return submit(ticket)

    monkeypatch.setattr(store._engine, "submit", late)
    store.send(named, body)
    store.send(B, b"next")
    store = disk.reopen(store)
    assert bodies(store, named) == [body]
    assert_whole(store)


def test_a_refused_purge_leaves_every_message_once(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk.create()
    store.send_many(A, [b"0", b"1", b"2", b"3"])
    first, second = take(store), take(store)
    store.release([first])

    def full(ticket: object) -> None:
        raise StoreFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store._engine, "submit", full)
        with pytest.raises(StoreFullError):
            store.purge(A)
    assert take(store).body == b"0"
    store.release([second])
    assert drain(store) == [b"1", b"2", b"3"]


def test_a_restored_index_leaves_holds_and_what_was_fetched_alone(disk: JournalDisk) -> None:
    """The replay meets the removal of the destination once more; what is held now came after it (H3)."""
    store = disk.create(checkpoint_interval=3600.0)
    store.send(A, b"old")
    store.delete(A)
    store.send_many(A, [b"0", b"1", b"2", b"3", b"4"])
    message = take(store)
    store._engine.interrupted = True  # what Ctrl-C in the middle of applying leaves
    assert store.depth(A) == 5
    message.ack()
    assert drain(store) == [b"1", b"2", b"3", b"4"]
    assert_whole(store)


def test_a_restored_index_counts_nothing_twice(disk: JournalDisk) -> None:
    store = disk.create(checkpoint_interval=3600.0)
    topic = Destination.parse("topic://nobody's")
    for _ in range(2):
        store.send_many(topic, [b"1", b"2"])
        store._engine.interrupted = True  # what Ctrl-C in the middle of applying leaves
    assert store.stats().dropped == 4
    store._engine.interrupted = True
    store.send(topic, b"3")
    assert store.stats().dropped == 5
    assert disk.reopen(store).stats().dropped == 0


def test_an_interrupted_reclaim_brings_nothing_back(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just before the checkpoint: the acks in the segments to be released are replayed once more."""
    store = disk.create(checkpoint_interval=3600.0, checkpoint_operations=1_000_000, pool_files=0)
    store.backend._applier.on_empty = lambda: None  # nothing in the background
    store.send_many(B, [b"k" * 1000] * 30)
    held = [take(store, B) for _ in range(10)]

    def churn() -> None:
        store.send_many(A, [b"z" * 1000] * 100)
        drain(store)

    churn()
    store.ack(held)
    churn()
    churn()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.backend._index, "commit_partial", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.reclaim()
    assert store.depth(B) == 20
    assert_whole(store)
    assert store.reclaim() > 0
    store = disk.reopen(store)
    assert (store.depth(A), store.depth(B)) == (0, 20)
    assert_whole(store)


def test_an_ack_that_lands_after_its_message_was_released_ends_it(disk: JournalDisk) -> None:
    store = disk.create()
    store.send(A, b"1")
    message = take(store)

    log = store.backend._log
    before = log.batches

    def interrupt() -> None:
        eventually(lambda: log.batches == before + 2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with stalled(log) as begun:
        earlier = threading.Thread(target=store.send, args=(B, b"x"))  # it writes for both
        earlier.start()
        assert begun.wait(60)
        with pytest.raises(KeyboardInterrupt), Parallel(interrupt):
            message.ack()
        releasing = threading.Thread(target=message.release)
        releasing.start()
        eventually(lambda: log.batches == before + 3)
    for thread in (earlier, releasing):
        thread.join()
    log._finish()
    assert store.depth(A) == 0
    assert store.receive(A) is None


def test_a_handler_that_calls_the_store_which_it_interrupted_is_refused(disk: JournalDisk) -> None:
    """Rule G3: an error instead of a deadlock, and nothing queued."""
    store = disk.create()
    store.send(A, b"1")
    with store._engine.lock, pytest.raises(RuntimeError, match="signal handler"):
        store.receive(A)
    with quiet(store.backend._log), pytest.raises(RuntimeError, match="signal handler"):
        store.send_nowait(A, b"2")
    assert bodies(store) == [b"1"]


def test_what_a_refused_handler_would_have_settled_is_leased_still(disk: JournalDisk) -> None:
    """Rules G3, X6: neither acked, nor free, nor lost sight of until the next open."""
    store = disk.create()
    store.send(A, b"1")
    message = take(store)
    with store._engine.lock, pytest.raises(RuntimeError, match="signal handler"):
        message.release()
    with quiet(store.backend._log):
        for call in (message.release, message.ack):
            with pytest.raises(RuntimeError, match="signal handler"):
                call()
        store.claim(message)
        with pytest.raises(RuntimeError, match="signal handler"):
            store.commit([], [message])
    store.unclaim([message])
    take(store).ack()
    assert bodies(store) == []


def test_who_releases_what_another_thread_is_just_acking_disturbs_nothing(disk: JournalDisk) -> None:
    store = disk.create()
    store.send(A, b"1")
    message = take(store)
    store._engine.delivery.take(store, [message], LEASED, LEAVING)
    for _ in range(2):
        with pytest.raises(UnknownMessageError):
            message.release()
    assert store.receive(A) is None


def test_released_files_are_closed(disk: JournalDisk) -> None:
    """An open file keeps its space on the disk, whatever its name."""
    store = disk.create(pool_files=0)
    store.send_many(A, [b"z" * 1000] * 300)
    for _ in store.browse(A):
        pass
    drain(store)
    store.reclaim()  # unless the background was quicker
    assert store.stats().segments["retained"] == 0
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in links if str(disk._path) in str(path) and str(path).endswith("(deleted)")]


def test_who_sees_that_a_branch_is_committed_can_make_it_durable(disk: JournalDisk) -> None:
    """The coordinator forgets a decision once its stores have nothing prepared of it and have synced (rule T5): a
    commit must not be missing from what is prepared before `sync` would reach it."""
    store = disk.create(sync="never", checkpoint_interval=3600)
    name = prepare(store, 1, to(A, b"1"))
    the_log = store.backend._log
    unsynced: list[int] = []

    class Watched(dict[bytes, Branch]):
        def pop(self, *key: Any) -> Any:
            thread = threading.Thread(target=store.sync)
            thread.start()
            thread.join()
            unsynced.append(the_log.tail.lsn - the_log.durable_lsn)
            return super().pop(*key)

    store._engine.sequencer.prepared = Watched(store._engine.sequencer.prepared)
    store.commit_prepared(name).wait()
    assert unsynced == [0]


def test_ids_of_a_short_lived_queue_are_found_at_once(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others there are: they go under the lock."""
    store = disk.create(duplicate_window=300)
    store.commit([(B, Outgoing(b"x", message_id=str(n))) for n in range(300)], [])
    looked: list[object] = []
    decode = msgspec.msgpack.decode

    def look(data: bytes) -> object:
        looked.append(data)
        return decode(data)

    for place in range(3):
        store.send(A, b"x", message_id="1")
        store.depth(A)
        monkeypatch.setattr(msgspec.msgpack, "decode", look)
        assert store.delete(A) == 1
        monkeypatch.undo()
        assert len(looked) <= 1
        looked.clear()
        assert not store.send(A, b"y", message_id="1").duplicate
        store.delete(A)
        assert store.send(B, b"x", message_id="299").duplicate
        if place < 2:
            store = disk.reopen(store) if place else disk.crash(store)
    assert store.delete(B) == 300
    assert not store.send(B, b"x", message_id="299").duplicate
    assert_whole(store)
