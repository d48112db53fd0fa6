"""What is written when, and what becomes of it when the disk says no."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from anabranch.adapters.wal import SNAPSHOT, RecordBatch, log, record_ticket
from anabranch.adapters.wal.ticket import GROWS
from anabranch.policies.config.durability import Sync
from anabranch.policies.errors import (
    ClosedError,
    CorruptionError,
    OutcomeUnknownError,
    StoreFailedError,
    StoreFullError,
)

from ..contract.disk import Parallel, eventually
from .logs import KIND, SEGMENT_BYTES, Opened, created, is_submitting, killed, newest, opened, quiet, stalled


def no(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("sync", "waits"), [(Sync.ALWAYS, 3), (Sync.PERIODIC, 0), (Sync.NEVER, 0)])
def test_who_waits_for_the_disk(tmp_path: Path, sync: Sync, waits: int) -> None:
    one = created(tmp_path / "log", sync=sync, sync_interval=3600.0)
    before = one.log.syncs
    one.write(b"1", b"2", b"3")
    assert one.log.syncs - before == waits
    assert (one.log.durable_lsn == one.log.tail.lsn) == (sync is Sync.ALWAYS)
    one.log.wait(one.submit(b"4", sync=True))
    assert one.log.durable_lsn == one.log.tail.lsn == 4
    one.close()


def test_a_ticket_may_say_that_it_need_not_be_synced(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    before = one.log.syncs
    ticket = record_ticket([(KIND, b"known elsewhere", None)])
    ticket.unsynced = True
    one.log.wait(one.log.submit(ticket))
    assert one.log.syncs == before
    one.close()
    assert opened(tmp_path / "log").held == [b"known elsewhere"]


def test_a_killed_process_loses_nothing_that_returned(tmp_path: Path) -> None:
    one = created(tmp_path / "log", sync=Sync.NEVER)
    bodies = [b"%d" % number * 1000 for number in range(200)]
    one.write(*bodies)
    assert opened(killed(one, tmp_path / "copy")).held == bodies
    one.close()


def test_a_failed_sync_stops_the_log_and_says_that_the_outcome_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = created(tmp_path / "log")
    one.write(b"kept")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no)
        with pytest.raises(OutcomeUnknownError, match=r"failed while it wrote: .*Input/output error"):
            one.write(b"perhaps")
    with pytest.raises(StoreFailedError, match="has stopped after an error"):
        one.write(b"no more")
    assert one.counted == [b"kept"]
    one.close()
    assert opened(tmp_path / "log").held in ([b"kept"], [b"kept", b"perhaps"])


def test_all_that_share_a_failed_write_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = created(tmp_path / "log")
    one.write(b"kept")
    tickets = [one.submit(b"%d" % number) for number in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no)
        for ticket in tickets:
            with pytest.raises(OutcomeUnknownError):
                one.log.wait(ticket)
    one.close()
    assert opened(tmp_path / "log").held == [b"kept"]


def test_a_full_disk_refuses_before_the_first_byte_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = created(tmp_path / "log", pool_files=0)
    one.write(b"kept")
    tail = one.log.tail

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreFullError, match=r"free some space and try again\. Nothing was written"):
            one.write(bytes(SEGMENT_BYTES))
        assert one.log.tail == tail
    one.write(b"goes on", bytes(SEGMENT_BYTES))
    one.close()
    assert opened(tmp_path / "log").held == [b"kept", b"goes on", bytes(SEGMENT_BYTES)]


def test_what_an_encoder_raises_is_for_the_tickets_it_was_given(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    bad = record_ticket([("no number", b"", None)])  # type: ignore[list-item]
    one.log.submit(bad)
    with pytest.raises(Exception, match="required argument is not an integer"):
        one.log.wait(bad)
    one.write(b"goes on")
    one.close()
    assert opened(tmp_path / "log").held == [b"goes on"]


def test_many_threads_each_find_all_they_wrote_in_their_order(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    written = {name: [b"%s.%d" % (name, number) for number in range(60)] for name in (b"a", b"b", b"c", b"d")}
    threads = [threading.Thread(target=one.write, args=payloads) for payloads in written.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = list(one.counted)
    one.close()
    held = opened(tmp_path / "log").held
    assert held == counted
    for name, payloads in written.items():
        assert [payload for payload in held if payload.startswith(name)] == payloads


def test_what_is_written_while_all_else_is_synced_is_synced_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing is written after it, and the burst was over long ago when that sync ended."""
    one = created(tmp_path / "log", sync=Sync.PERIODIC, sync_interval=0.05)
    log, real = one.log, os.fdatasync

    def slow(fd: int) -> None:
        monkeypatch.undo()
        with Parallel(lambda: one.write(b"2")) as writing:
            writing.result()
        log._last_write = 0.0
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    one.write(b"1")
    eventually(lambda: one.counted == [b"1", b"2"] and log.durable_lsn == log.tail.lsn)
    one.close()


def writing(one: Opened, *payloads: bytes) -> list[threading.Thread]:
    """A thread for each."""
    threads = [threading.Thread(target=one.write, args=(payload,), daemon=True) for payload in payloads]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_what_is_queued_together_is_synced_together(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    one.write(b"first")
    batches, syncs = one.log.batches, one.log.syncs
    with stalled(one.log):
        first = writing(one, b"0")
        eventually(lambda: one.log.batches == batches + 1)
        others = writing(one, *(b"%d" % number for number in range(1, 20)))
        eventually(lambda: one.log.batches == batches + 20)
    joined(first + others)
    assert one.log.syncs <= syncs + 3
    assert sorted(one.counted[1:]) == sorted(b"%d" % number for number in range(20))
    one.close()


def test_a_ticket_that_nobody_waits_for_is_written_all_the_same(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    ticket = record_ticket([(KIND, b"alone", None)])
    ticket.future = (Future(), lambda done: None)
    one.log.submit(ticket)
    one.log.proceed()
    eventually(lambda: ticket.done)
    assert one.counted == [b"alone"]
    one.close()


def test_flush_waits_for_what_others_have_queued(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    one.submit(b"1")
    one.submit(b"2")
    one.log.flush()
    assert one.counted == [b"1", b"2"]
    one.close()


def test_what_a_signal_handlers_error_interrupts_is_done_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = created(tmp_path / "log")
    left = one.submit(b"left")

    def struck(*_: object) -> None:
        monkeypatch.undo()
        raise TimeoutError

    monkeypatch.setattr(one.log, "_settle", struck)
    with pytest.raises(TimeoutError):
        one.write(b"own")
    eventually(lambda: left.done)
    one.close()


def test_a_signal_handler_that_interrupts_its_own_write_is_refused(tmp_path: Path) -> None:
    """It would wait for itself."""
    one = created(tmp_path / "log")
    refused: list[str] = []

    def handler(*_: object) -> None:
        try:
            one.write(b"from the handler")
        except RuntimeError as error:
            refused.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    encoder = one.log._encoder
    try:
        for name in ("deliver", "accept"):
            real = getattr(encoder, name)

            def interrupted(batch: RecordBatch, real: Callable[[RecordBatch], None] = real) -> None:
                signal.raise_signal(signal.SIGUSR1)
                real(batch)

            setattr(encoder, name, interrupted)
            one.write(b"interrupted")
            setattr(encoder, name, real)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len([error for error in refused if "called from a signal handler" in error]) == len(refused) == 2
    one.write(b"after")
    assert one.counted == [b"interrupted", b"interrupted", b"after"]
    one.close()


def test_a_signal_handler_that_interrupts_the_sync_of_earlier_segments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = created(tmp_path / "log", sync=Sync.NEVER)
    one.write(b"1")
    with one.log._planning:
        one.log._writer.roll(0)
    assert one.log._syncer.sealed
    refused: list[RuntimeError] = []
    real = os.fdatasync

    def interrupted(fd: int) -> None:
        monkeypatch.undo()
        for call in (lambda: one.submit(b"2"), one.log.sync):
            with pytest.raises(RuntimeError, match="signal handler") as error:
                call()
            refused.append(error.value)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", interrupted)
    one.log.sync()
    assert (len(refused), one.log.batches) == (2, 1)
    one.close()


def test_a_sync_covers_a_segment_that_is_sealed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = created(tmp_path / "log", sync=Sync.NEVER)
    one.write(b"1")
    log, real_sync, first = one.log, os.fdatasync, one.log.tail.segment
    file, real, synced = first.open(), log._syncer.sync_sealed, []

    def meanwhile(number: int) -> None:
        real(number)
        if log.tail.segment is first:
            with log._planning:
                log._writer.roll(0)
            one.write(b"2")

    def fdatasync(fd: int) -> None:
        real_sync(fd)
        synced.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(log._syncer, "sync_sealed", meanwhile)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    log.sync()
    assert os.fstat(file.fd).st_ino in synced
    one.close()


def test_a_future_is_resolved_though_others_look_while_its_ticket_waits_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "IDLE_SECONDS", 3600.0)
    one = created(tmp_path / "log", sync=Sync.NEVER)
    ticket = record_ticket([(KIND, b"1", None)])
    ticket.future = (Future(), lambda done: None)

    def send() -> None:
        one.log.submit(ticket)
        one.log.proceed()

    thread = threading.Thread(target=send)
    with quiet(one.log):
        thread.start()
        eventually(lambda: is_submitting(thread))
        one.log._attend()
    thread.join()
    eventually(lambda: ticket.done)
    one.close()


def test_who_waits_for_nothing_does_not_wait_for_the_next_segment_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A background thread begins it; who comes behind, and waits, keeps its place."""
    one = created(tmp_path / "log", pool_files=0)
    one.write(b"first")
    real, goes_on = os.fsync, threading.Event()

    def hanging(fd: int) -> None:
        goes_on.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fsync", hanging)
    tickets = [record_ticket([(KIND, bytes([n]) * 30_000, None)]) for n in range(5)]
    for ticket in tickets:
        ticket.future = (Future(), lambda done: None)
        one.log.submit(ticket)
        one.log.proceed()
    assert not all(ticket.done for ticket in tickets)
    behind = writing(one, b"behind")
    goes_on.set()
    joined(behind)
    one.log.flush()
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert one.counted == [b"first", *(bytes([n]) * 30_000 for n in range(5)), b"behind"]
    one.close()


def test_what_makes_room_goes_before_who_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record that lets segments go is written by the thread to which the others were left."""
    one = created(tmp_path / "log")
    one.write(b"first")
    log, full = one.log, [True]
    make_room = log._writer.make_room

    def none_for_more(size: int, promised: int, leaves: int) -> None:
        if full and leaves == GROWS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make_room(size, promised, leaves)

    def relief() -> None:
        log.releasing = threading.get_ident()
        log.wait(log.submit(record_ticket([(SNAPSHOT, b"", None)], sync=True)))
        full.clear()
        log.releases += 1
        log.releasing = 0

    monkeypatch.setattr(log._writer, "make_room", none_for_more)
    monkeypatch.setattr(log._encoder, "needed_bytes", lambda segment: 0)
    log.relief, log._writer.limit = relief, 0
    tickets = [record_ticket([(KIND, b"%d" % n, None)]) for n in range(3)]
    for ticket in tickets:
        ticket.future = (Future(), lambda done: None)
        log.submit(ticket)
        log.proceed()
    one.write(b"behind")
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert one.counted == [b"first", b"", b"0", b"1", b"2", b"behind"]
    one.close()


def test_what_was_not_written_when_it_failed_never_is(tmp_path: Path) -> None:
    """Who is told that nothing was written does it again elsewhere."""
    one = created(tmp_path / "log")
    one.write(b"kept")
    tickets = [one.submit(b"%d" % number) for number in range(3)]
    one.log.fail(OSError("the index"))
    for ticket in tickets:
        with pytest.raises(StoreFailedError, match="has stopped after an error: the index"):
            one.log.wait(ticket)
    one.close()
    assert opened(tmp_path / "log").held == [b"kept"]


def test_a_thread_that_is_struck_just_after_the_link_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is in the log, though nothing was built on it."""
    one = created(tmp_path / "log")

    def struck(batch: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    for round in (b"making room", b"plain"):
        monkeypatch.setattr(one.log._encoder, "accept", struck)
        with pytest.raises(KeyboardInterrupt):
            one.submit(b"struck, " + round)
        one.write(b"next")
    assert one.counted == [b"struck, making room", b"next", b"struck, plain", b"next"]
    one.close()
    assert opened(tmp_path / "log").held == one.counted


def test_a_closed_log_refuses_and_says_so(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    one.write(b"kept")
    one.close()
    with pytest.raises(ClosedError, match="the log is closed; open it again"):
        one.write(b"late")
    assert opened(tmp_path / "log").held == [b"kept"]


def test_what_was_queued_when_it_is_closed_is_written(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    tickets = [one.submit(b"%d" % number) for number in range(5)]
    one.close()
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert opened(tmp_path / "log").held == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("sync", list(Sync))
def test_who_goes_on_writing_is_not_marked_and_under_never_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Sync
) -> None:
    monkeypatch.setattr(log, "IDLE_SECONDS", 3600.0)
    one = created(tmp_path / "log", sync=sync, sync_interval=3600.0)
    one.write(b"1")
    before = one.log.batches
    one.log._idle()
    assert one.log.batches == before
    assert (one.log.durable_lsn == one.log.tail.lsn) == (sync is not Sync.NEVER)
    one.close()


@pytest.mark.parametrize("sync", list(Sync))
def test_after_some_idleness_all_is_on_disk_and_vouched_for(tmp_path: Path, sync: Sync) -> None:
    one = created(tmp_path / "log", sync=sync, sync_interval=0.01)
    one.write(b"first", b"second")
    eventually(lambda: one.log.batches == 3, lambda: one.log.batches)
    assert one.log.durable_lsn == one.log.tail.lsn
    left = killed(one, tmp_path / "left")
    one.close()
    segment = newest(left)
    data = bytearray(segment.read_bytes())
    data[data.index(b"second")] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptionError, match="known to be on disk"):
        opened(left)
