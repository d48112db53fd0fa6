"""A message that is found damaged while its store is open, and salvages: it is named, and costs nothing else."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core.engine.hooks import KeyedValues
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.journal.recovery import lost_messages
from anabranch.adapters.journal.recovery.salvage import LossReport, reports, summary
from anabranch.policies.config import JournalOptions
from anabranch.policies.config.durability import OnCorruption
from anabranch.policies.errors import AnabranchError, CorruptionError
from anabranch.policies.names.destination import Destination

from ..contract.disk import PATIENCE, A, B, drain, take
from ..crash.calls import Crash, Faults, Jobs, simulated
from ..shares import Share
from .disk import JournalDisk, directory_of, segments_of
from .test_salvage import flip, place_of

T = Destination.topic("prices")
M = Destination.map("m")
SALVAGE = OnCorruption.SALVAGE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


def damaged(store: JournalStore, *seqs: int, destination: Destination = A) -> None:
    """Flip a bit in the body of each of these messages."""
    for seq in seqs:
        path, offset, length = place_of(store, destination, seq)
        flip(path, offset + length - 1)


def told(store: JournalStore) -> list[LossReport]:
    return [report for _, report in reports(directory_of(store))]


def lost(store: JournalStore) -> list[tuple[str, int, str | None]]:
    return [(one.destination, one.seq, one.message_id) for report in told(store) for one in report.messages]


def copied(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to


def filled(disk: JournalDisk) -> JournalStore:
    store = disk.create(on_corruption=SALVAGE)
    for number in range(1, 7):
        store.send(A, b"body %d" % number, None, f"id{number}")
    return store


def test_it_is_named_and_never_comes_again(disk: JournalDisk) -> None:
    store = filled(disk)
    damaged(store, 1, 4)
    as_it_was = segments_of(store)[0].read_bytes()
    assert take(store).seq == 2
    assert lost(store) == [("queue://a", 1, "id1")]
    assert [m.seq for m in store.receive_many(A, 10)] == [3, 5, 6]
    assert lost(store) == [("queue://a", 1, "id1"), ("queue://a", 4, "id4")]
    (report,) = told(store)
    assert summary(report) == "lost: 2 messages"
    (first, fourth) = report.lost
    assert (first.file, first.reads_as, first.records) == (f"journal/{segments_of(store)[0].name}", "message", 1)
    assert report.damaged_files is not None
    kept = directory_of(store) / report.damaged_files / f"{segments_of(store)[0].name}-{fourth.offset}"
    assert kept.read_bytes() == as_it_was[fourth.offset : fourth.offset + fourth.size]
    store.close()
    store = disk.reopen(store, on_corruption=SALVAGE)
    assert store.depth(A) == 4
    assert drain(store) == [b"body %d" % n for n in (2, 3, 5, 6)]
    assert len(told(store)) == 1


def test_without_the_option_it_is_raised(disk: JournalDisk) -> None:
    store = disk.create()
    store.send(A, b"1")
    damaged(store, 1)
    with pytest.raises(CorruptionError, match="message 1 of queue://a"):
        store.receive(A)
    assert (told(store), store.depth(A)) == ([], 1)


def test_who_looks_at_a_queue_goes_on_behind_it(disk: JournalDisk) -> None:
    store = filled(disk)
    damaged(store, 1, 2, 6)
    assert [m.seq for m in store.browse(A)] == [3, 4, 5]
    assert [m.seq for m in store.browse(A)] == [3, 4, 5]  # and is told once
    assert [seq for _, seq, _ in lost(store)] == [1, 2, 6]
    assert store.depth(A) == 6
    assert drain(store) == [b"body 3", b"body 4", b"body 5"]
    assert [seq for _, seq, _ in lost(store)] == [1, 2, 6]


def test_it_ends_no_listener(disk: JournalDisk) -> None:
    store = filled(disk)
    damaged(store, 1, 3)
    found: list[int] = []
    whole = threading.Event()

    def on_message(message: Message) -> None:
        found.append(message.seq)
        message.ack()
        if len(found) == 4:
            whole.set()

    with contextlib.closing(store.listen(A, on_message, credit=10)):
        assert whole.wait(PATIENCE)
    assert (found, [seq for _, seq, _ in lost(store)]) == ([2, 4, 5, 6], [1, 3])


def test_a_topics_message_is_lost_for_each_and_told_once(disk: JournalDisk) -> None:
    store = disk.create(on_corruption=SALVAGE)
    subscriptions = [Subscription(T, name) for name in ("one", "two")]
    for subscription in subscriptions:
        store.subscribe(subscription)
    store.send_many(T, [b"1", b"2", b"3"])
    damaged(store, 2, destination=T)
    for subscription in subscriptions:
        assert drain(store, T, subscription=subscription.key) == [b"1", b"3"]
        assert store.depth(T, subscription.key) == 0
    assert lost(store) == [("topic://prices", 2, None)]


def test_what_expires_is_no_dead_letter(disk: JournalDisk) -> None:
    store = disk.create(on_corruption=SALVAGE)
    store.send(A, b"1", expires_at_ms=2)
    store.send(A, b"2", expires_at_ms=2)
    damaged(store, 1)
    assert [one.message.body for one in store.take_undelivered()] == [b"2"]
    assert [seq for _, seq, _ in lost(store)] == [1]


def test_a_value_of_a_map_is_lost_alone(disk: JournalDisk) -> None:
    store = disk.create(on_corruption=SALVAGE)
    maps, keys = store.maps, ["a", "b", "c", "d", "e", "f"]
    for key in keys:
        maps.put(M, key, key.encode())
    damaged(store, 1, 3, 4, 5, 6, destination=M)
    assert list(maps.items(M)) == [("b", b"b")]
    assert [(maps.get(M, key), maps.count(M)) for key in keys] == [(b"b" if key == "b" else None, 1) for key in keys]
    assert maps.put_if_absent(M, "a", b"new") is None
    assert [seq for _, seq, _ in lost(store)] == [1, 3, 4, 5, 6]
    assert lost(store)[0] == ("map://m", 1, "a")
    store.close()
    store = disk.reopen(store, on_corruption=SALVAGE)
    assert list(store.maps.items(M)) == [("a", b"new"), ("b", b"b")]
    assert len(told(store)) == 1


@pytest.mark.parametrize(
    ("meet", "result", "then"),
    [
        (lambda maps: maps.get(M, "k"), None, None),
        (lambda maps: maps.pop(M, "k"), None, None),
        (lambda maps: maps.wait(M, "k", 0), None, None),
        (lambda maps: list(maps.items(M)), [], None),
        (lambda maps: maps.put_if_absent(M, "k", b"8"), None, b"8"),
        (lambda maps: maps.compare_and_set(M, "k", b"7", b"8"), False, None),
        (lambda maps: maps.compare_and_set(M, "k", None, b"8"), True, b"8"),
        (lambda maps: maps.increment(M, "k"), 1, b"1"),
    ],
)
def test_a_value_that_is_lost_is_not_there(
    disk: JournalDisk, meet: Callable[[KeyedValues], object], result: object, then: bytes | None
) -> None:
    """However it is met first."""
    store = disk.create(on_corruption=SALVAGE)
    store.maps.put(M, "k", b"7")
    damaged(store, 1, destination=M)
    assert meet(store.maps) == result
    assert (lost(store), store.maps.get(M, "k")) == ([("map://m", 1, "k")], then)


def test_a_damaged_value_that_is_replaced_is_not_told_of(disk: JournalDisk) -> None:
    store = disk.create(on_corruption=SALVAGE)
    store.maps.put(M, "a", b"1")
    damaged(store, 1, destination=M)
    store.maps.put(M, "a", b"2")
    assert (store.maps.pop(M, "a"), told(store)) == (b"2", [])


def test_a_damaged_value_is_raised_without_the_option(disk: JournalDisk) -> None:
    store = disk.create()
    store.maps.put(M, "a", b"1")
    damaged(store, 1, destination=M)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="message 1 of map://m"):
            store.maps.pop(M, "a")
    assert (told(store), store.maps.count(M)) == ([], 1)


def test_what_is_looked_for_by_its_id(disk: JournalDisk) -> None:
    store = filled(disk)
    damaged(store, 3)
    assert store.find(A, "id3") is None
    assert lost(store) == [("queue://a", 3, "id3")]
    assert (store.find(A, "id4") or take(store)).body == b"body 4"


def test_a_report_has_an_end(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_messages, "MESSAGES_MAX", 2)
    store = filled(disk)
    damaged(store, *range(1, 6))
    assert drain(store) == [b"body 6"]
    assert sorted(len(report.messages) for report in told(store)) == [1, 2, 2]
    assert sorted(seq for _, seq, _ in lost(store)) == [1, 2, 3, 4, 5]


def test_a_report_that_cannot_be_written_loses_nothing(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(disk)
    damaged(store, 1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(lost_messages, "write_report", full)
        with pytest.raises(AnabranchError, match="cannot be written down"):
            store.receive(A)
    assert (store.depth(A), told(store)) == (6, [])
    assert take(store).seq == 2
    assert [seq for _, seq, _ in lost(store)] == [1]


def test_what_is_damaged_is_told_before_it_is_gone(disk: JournalDisk, tmp_path: Path, share: Share) -> None:
    """A crash at each call of the disk: the message is there, or a report names it."""
    store = filled(disk)
    store.send(B, b"other")
    damaged(store, 1)
    store.close()
    template = disk.copy(store)

    def receives(path: Path) -> None:
        store = JournalStore("s", path, JournalOptions(on_corruption=SALVAGE))
        store.open()
        try:
            assert take(store).seq == 2
        finally:
            store.close()

    calls = 0
    at, last = 1, 1
    while at <= last:
        path = copied(template, tmp_path / f"c{at}")
        faults, jobs = Faults(tmp_path, "crash", at), Jobs()
        with simulated(jobs, "salvage"), faults.patched():
            with contextlib.suppress(Crash, OSError, AnabranchError):
                receives(path)
            faults.dead = faults.on = False
            jobs.forget()
        last = max(last, faults.count)
        later = JournalStore("s", copied(path, tmp_path / f"l{at}"), JournalOptions())
        later.open()
        names = [one.seq for _, report in reports(later.directory) for one in report.messages]
        try:
            there = later.depth(A)
            assert there == 6 or names, f"call {at}: {faults.hit}"
        finally:
            later.close()
        calls += 1
        at += 1
    share.counts.append(f"{calls} calls of the disk while a damaged message is met: it is there, or named")
