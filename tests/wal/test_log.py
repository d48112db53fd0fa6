"""What is written when, and what becomes of it when the disk says no."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from time import monotonic

import pytest

from anabranch.adapters.wal import log, record_ticket
from anabranch.adapters.wal.ticket import Tail
from anabranch.policies.config.durability import Sync
from anabranch.policies.errors import CorruptionError, OutcomeUnknownError, StoreFailedError, StoreFullError

from ..contract.disk import eventually
from .logs import KIND, SEGMENT_BYTES, created, killed, newest, opened


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
    bad = one.log.submit(record_ticket([(KIND, b"", None)]))
    bad.content = [("no number", b"", None)]
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
    log, syncer = one.log, one.log._syncer
    through = syncer.through

    def slow(tail: Tail) -> None:
        monkeypatch.undo()
        syncer.dirty_since = monotonic()  # else the next write would sync by itself
        one.write(b"2")
        log._last_write = 0.0
        through(tail)

    monkeypatch.setattr(syncer, "through", slow)
    one.write(b"1")
    eventually(lambda: one.counted == [b"1", b"2"] and syncer.durable_lsn == log._writer.tail.lsn)
    one.close()


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
