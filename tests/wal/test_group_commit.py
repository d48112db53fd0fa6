"""Who writes, for whom, and who waits for whom."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.adapters.wal import RecordBatch, group_commit, record_ticket
from anabranch.adapters.wal.group_commit import GroupCommit
from anabranch.policies.errors import ClosedError, StoreFullError

from ..contract.disk import eventually
from .logs import KIND, Opened, created, opened


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Opened]:
    one = created(tmp_path / "log")
    yield one
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


def test_what_is_queued_together_is_written_and_synced_together(one: Opened) -> None:
    batches, syncs = one.log.batches, one.log.syncs
    with one.log._lead:  # somebody else leads, on a slow disk
        threads = writing(one, *(b"%d" % number for number in range(20)))
        eventually(lambda: len(one.log._queue) == 20)
    joined(threads)
    assert (one.log.batches, one.log.syncs) == (batches + 1, syncs + 1)
    assert sorted(one.counted) == sorted(b"%d" % number for number in range(20))


def test_a_ticket_that_nobody_waits_for_is_written_all_the_same(one: Opened) -> None:
    ticket = one.submit(b"alone")
    one.log.proceed()
    eventually(lambda: ticket.done)
    assert one.counted == [b"alone"]


def test_what_proceeds_while_another_thread_leads_is_written_after_it(one: Opened) -> None:
    """By the one that comes once the leader has let go, be it a mark or the log's end."""
    for lead in (one.log._mark, lambda: one.log.wait(one.submit(b"own"))):
        with one.log._lead:
            one.submit(b"left")
            one.log.proceed()
            assert not one.log._lead_due
        lead()
        eventually(lambda: not one.log._has_work())
    assert one.counted == [b"left", b"left", b"own"]


def test_what_nobody_waits_for_is_written_behind_one_that_was_refused_alone(one: Opened) -> None:
    """Which stands at the head of the queue until somebody leads."""
    refused: list[BaseException] = []

    def send() -> None:
        try:
            one.write(b"refused")
        except StoreFullError as error:
            refused.append(error)

    thread = threading.Thread(target=send)
    with one.log._lead:
        thread.start()
        eventually(lambda: one.log._queue and one.log._queue[0].waiter is not None)
        left = one.submit(b"left")
        one.log.proceed()
        one.log._queue[0].finish(StoreFullError("there is no room for it"))
        joined([thread])
    one.log._hand_on()
    eventually(lambda: left.done)
    assert (len(refused), one.counted) == (1, [b"left"])


class Lead:
    """The lead; when somebody first sees that another thread has it, that one lets go of it at once, and hands on."""

    def __init__(self, log: GroupCommit) -> None:
        self._log, self._lock = log, threading.Lock()
        self._lock.acquire()
        self._seen = False

    def locked(self) -> bool:
        locked = self._lock.locked()
        if locked and not self._seen:
            self._seen = True
            self._lock.release()
            self._log._hand_on()
        return locked

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_who_has_just_seen_another_thread_lead_is_not_passed_over(one: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on its way to sleep when that thread handed on: the hint found nobody to wake."""
    monkeypatch.setattr(group_commit, "HINT_WAIT", 3600.0)
    monkeypatch.setattr(one.log, "_lead", Lead(one.log))
    joined(writing(one, b"own"))
    assert one.counted == [b"own"]


def test_no_one_sleeps_behind_a_ticket_that_was_refused_alone(one: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is woken no more."""
    monkeypatch.setattr(group_commit, "HINT_WAIT", 3600.0)
    with one.log._lead:
        refused = one.submit(b"refused")
        refused.attend()
        threads = writing(one, b"next")
        eventually(lambda: len(one.log._queue) == 2 and one.log._queue[1].waiter is not None)
        refused.finish(StoreFullError("there is no room for it"))
    one.log._hand_on()
    joined(threads)
    assert one.counted == [b"next"]


def test_nobody_needs_to_look_whether_somebody_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads, while marks are written and others come first: each is handed the lead, or its ticket is done."""
    monkeypatch.setattr(group_commit, "HINT_WAIT", 3600.0)
    one = created(tmp_path / "log")

    def work(number: int) -> None:
        for count in range(200):
            if number:
                one.write(b"%d.%d" % (number, count))
            elif count % 2:
                one.log._mark()
            else:
                ticket = record_ticket([(KIND, b"0.%d" % count, None)], sync=True)
                ticket.unsynced = True
                one.log.submit_first(ticket)
                one.log.wait(ticket)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    joined(threads)
    assert len(one.counted) == 11 * 200 + 100
    one.close()


def test_what_a_signal_handlers_error_interrupts_is_led_by_others(one: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    left = one.submit(b"left")

    def struck() -> None:
        monkeypatch.undo()
        raise TimeoutError

    monkeypatch.setattr(one.log, "_lead_once", struck)
    with pytest.raises(TimeoutError):
        one.write(b"own")
    eventually(lambda: left.done)


def test_flush_waits_for_what_others_have_queued(one: Opened) -> None:
    one.submit(b"1")
    one.submit(b"2")
    one.log.flush()
    assert one.counted == [b"1", b"2"]


def test_a_leader_waits_for_those_who_shared_the_last_slow_sync(one: Opened) -> None:
    """They come just after it, and would wait for two syncs otherwise."""
    batches = one.log.batches
    one.log._expected, one.log._gather_seconds = 3, 3600.0
    threads = writing(one, b"a")
    eventually(lambda: one.log._gathering is not None)
    threads += writing(one, b"b")
    eventually(lambda: len(one.log._queue) == 2)
    assert one.log.batches == batches
    threads += writing(one, b"c")
    joined(threads)
    assert one.log.batches == batches + 1
    assert sorted(one.counted) == [b"a", b"b", b"c"]


def test_a_leader_does_not_wait_for_ever_for_those_who_do_not_come(one: Opened) -> None:
    one.log._expected, one.log._gather_seconds = 50, 0.001
    one.write(b"a")
    assert one.counted == [b"a"]


def test_a_leader_lets_nobody_wait_who_needs_no_sync(one: Opened) -> None:
    one.log._expected, one.log._gather_seconds = 3, 3600.0
    threads = writing(one, b"a")
    eventually(lambda: one.log._gathering is not None)
    unsynced = record_ticket([(KIND, b"unsynced", None)])
    unsynced.unsynced = True
    one.log.wait(one.log.submit(unsynced))
    assert one.counted == [b"unsynced"]
    threads += writing(one, b"b", b"c")
    joined(threads)
    assert sorted(one.counted[1:]) == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("seconds", "queued", "expected"),
    [(0.00001, 12, 0), (0.0001, 3, 0), (0.0001, 4, 4), (0.0001, 12, 8), (0.004, 1, 0), (0.004, 2, 2), (0.004, 12, 12)],
)
def test_how_many_a_leader_waits_for(one: Opened, seconds: float, queued: int, expected: int) -> None:
    """For all after a slow sync; for a few after a quick one, if they are more than two or three."""
    tickets = [one.submit(b"%d" % number) for number in range(queued)]
    one.log._synced(seconds)
    assert one.log._expected == expected
    one.log._expected = 0
    for ticket in tickets:
        one.log.wait(ticket)


def test_a_signal_handler_that_interrupts_its_own_write_is_refused(one: Opened) -> None:
    """It would wait for itself."""
    refused: list[str] = []

    def handler(*_: object) -> None:
        try:
            one.write(b"from the handler")
        except RuntimeError as error:
            refused.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        deliver = one.log._deliver

        def interrupted(batch: RecordBatch) -> None:
            signal.raise_signal(signal.SIGUSR1)
            deliver(batch)

        one.log._deliver = interrupted
        one.write(b"interrupted")
        one.log._deliver = deliver
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [error for error in refused if "called from a signal handler" in error]
    one.write(b"after")
    assert one.counted == [b"interrupted", b"after"]


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
