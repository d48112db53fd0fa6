"""When what waits for its time is due (H8, H9), and how long what was given back waits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.backend import Settings
from anabranch.adapters.core.features import scheduled
from anabranch.adapters.core.features.scheduled import backoff_ms
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.operations.changes import Postponed
from anabranch.adapters.core.service import sending
from anabranch.adapters.core.state.delivery import RETURNED_MAX
from anabranch.adapters.core.state.due import delay_ms
from anabranch.adapters.system.background import shared
from anabranch.policies.config.fields import Redelivery
from anabranch.policies.errors import ConfigError, StoreFullError

from ..contract.disk import PATIENCE, A, B, Parallel, assert_whole, bodies, drain, eventually, take
from ..contract.expiring import HOUR, Clock, stopped_clock
from ..contract.features import schedule_of
from ..thirdparty.disk import OneFileDisk
from .made import journal, memory, onefile

clock = pytest.fixture(stopped_clock)


def test_milliseconds_are_rounded_up() -> None:
    assert [delay_ms(seconds) for seconds in (0, 1, 1.5, 0.0001, 0.0011, 10**9)] == [0, 1000, 1500, 1, 2, 10**12]


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, math.inf, -math.inf, 2**63, 1e300])
def test_what_is_no_time_to_wait(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"deliver_in is a number of seconds from 0 .*not"):
        delay_ms(seconds, "deliver_in")


@pytest.mark.parametrize("seconds", ["1", None, True, 1j])
def test_what_is_no_number(seconds: Any) -> None:
    with pytest.raises(TypeError, match="delay is a number of seconds"):
        delay_ms(seconds)


def test_backoff() -> None:
    settings = Settings(redelivery=Redelivery(delay=1, multiplier=2, max_delay=10))
    assert [backoff_ms(settings, times) for times in (1, 2, 3, 4, 5, 2**32)] == [1000, 2000, 4000, 8000, 10_000, 10_000]
    assert backoff_ms(Settings(), 5) == 0


def test_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a part at most, and never longer than the limit."""
    settings = Settings(redelivery=Redelivery(delay=1, max_delay=1.2, jitter=0.5))
    drawn = [0.0, 0.5, 0.6, 0.9999]
    monkeypatch.setattr(random, "random", lambda: drawn.pop(0))
    assert [backoff_ms(settings, 1) for _ in range(4)] == [500, 1000, 1100, 1200]


def test_who_waits_and_who_does_not(clock: Clock) -> None:
    with memory() as disk:
        store = disk.create(priorities=False)
        store.send_many(A, [b"1", b"2"])
        leases = [take(store)._note for _ in range(2)]
        for settings, delay, expected in (
            (Settings(), None, []),
            (Settings(), 5, [5, 5]),
            (Settings(max_deliveries=1), 5, []),
            (Settings(max_deliveries=2, redelivery=Redelivery(delay=7)), None, [7000, 7000]),
            (Settings(redelivery=Redelivery(delay=7)), 0, []),
        ):
            store.backend.settings = settings
            changes = schedule_of(store).postponements(leases, True, delay)
            assert [change.due - clock.now for change in changes if isinstance(change, Postponed)] == expected


def test_a_backend_that_does_not_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with onefile() as disk:
        store = disk.create()
        for module in (scheduled, sending):
            monkeypatch.setattr(module, "ScheduledRows", pytest.MonkeyPatch)  # which no backend is
        store = disk.reopen(store)
        store.send(A, b"1")
        for call in (
            lambda: store.send(A, b"2", deliver_at_ms=2**50),
            lambda: store.send_many(A, [b"2", Outgoing(b"3", deliver_at_ms=2**50)]),
            lambda: store.commit([(A, Outgoing(b"3", deliver_at_ms=2**50))], []),
            lambda: take(store).release(delay=1),
        ):
            with pytest.raises(ConfigError, match="of kind 'onefile', in which no message can wait"):
                call()
        assert bodies(store) == [b"1"]
        with pytest.raises(ConfigError, match="redelivery"):
            disk.create(redelivery={"delay": 1})


def test_nothing_is_asked_while_nothing_waits(monkeypatch: pytest.MonkeyPatch, journal_store: Store) -> None:
    monkeypatch.setattr(schedule_of(journal_store), "bring", lambda whole=False: pytest.fail("nothing waits"))
    journal_store.send_many(A, [b"1", b"2"])
    take(journal_store).release()
    assert drain(journal_store) == [b"1", b"2"]
    assert (journal_store._engine.delivery.next_due, schedule_of(journal_store)._at) == (0, 0.0)


def test_one_timer_serves_all(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, and also once the clock was looked at in vain."""
    set_for: list[float] = []
    schedule = shared().schedule_while_alive

    def count(seconds: float, job: Any) -> None:
        if getattr(job, "__func__", None) is scheduled.Waiting._look:
            set_for.append(seconds)
        schedule(seconds, job)

    monkeypatch.setattr(shared(), "schedule_while_alive", count)
    with memory() as disk:
        store = disk.create()
        store.send_many(A, [Outgoing(b"x", deliver_at_ms=clock.now + HOUR + number) for number in range(1000)])
        eventually(lambda: len(set_for) >= 3)
        assert len(set_for) <= 6
        assert set(set_for) == {scheduled.TICK_SECONDS}


def test_what_cannot_be_written_comes_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, journal_store: Store
) -> None:
    journal_store.send(A, b"1", deliver_at_ms=clock.now + HOUR)
    journal_store.send(A, b"2")
    schedule: Any = schedule_of(journal_store)
    write, tried = schedule._write, []

    def full(changes: Any, unsynced: bool) -> None:
        tried.append(changes)
        raise StoreFullError("the disk is full")

    schedule._write = full
    clock.offset_ms = HOUR
    assert drain(journal_store) == [b"2"]
    eventually(lambda: len(tried) > 3)
    with Parallel(lambda: take(journal_store, timeout=PATIENCE)) as parallel:
        schedule._write = write
        assert parallel.result().body == b"1"


def test_more_are_due_than_are_kept_in_hand(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are fetched anew, and none is received twice."""
    monkeypatch.setattr("anabranch.adapters.core.state.delivery.RETURNED_MAX", 7)
    assert RETURNED_MAX > 7
    for made in (journal, memory):
        for priorities in (False, True):
            with made() as disk:
                store = disk.create(priorities=priorities)
                clock.offset_ms = 0
                sent = [b"%d" % number for number in range(100)]
                store.send_many(A, [Outgoing(one, deliver_at_ms=clock.now + HOUR) for one in sent])
                store.send_many(A, [b"free"] * 3)
                held = take(store)
                clock.offset_ms = HOUR
                assert drain(store) == [*sent, b"free", b"free"]
                held.release()
                assert (drain(store), store.depth(A)) == ([b"free"], 0)
                assert_whole(store)


def test_a_destination_that_was_removed_holds_nothing_up(clock: Clock) -> None:
    for made in (journal, memory, onefile):
        with made() as disk:
            clock.offset_ms = 0
            many = 10 if isinstance(disk, OneFileDisk) else 5000
            store = disk.create()
            store.send_many(A, [Outgoing(b"x", deliver_at_ms=clock.now + HOUR) for _ in range(many)])
            store.send(B, b"1", deliver_at_ms=clock.now + HOUR)
            assert store.delete(A) == many
            clock.offset_ms = HOUR
            eventually(lambda: store.receive(B, 0) is not None)  # noqa: B023
            assert_whole(store)


def test_a_store_with_watchers_stays_open_while_something_waits(clock: Clock, journal_store: Store) -> None:
    woken: list[bool] = []
    journal_store.send(A, b"1", deliver_at_ms=clock.now + HOUR)
    watch: Any = journal_store.receive_or_watch(A, woken.append)
    assert not journal_store.retire()
    clock.offset_ms = HOUR
    eventually(lambda: woken)
    assert woken == [False]
    watch.leave()
    assert journal_store.retire()
