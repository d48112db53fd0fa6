"""When large bodies come and go; what users see of it is in tests/contract/large.py."""

from __future__ import annotations

import gc
import io
import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.engine.engine import Engine
from anabranch.adapters.core.features.large import bodies as large_bodies
from anabranch.adapters.core.features.large.files import LargeFiles
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.migration import copying
from anabranch.adapters.core.record.large import CHUNK_BYTES, StoredBody
from anabranch.adapters.core.state.leases import DestinationState
from anabranch.policies.errors import CorruptionError, StoreFullError, UnknownMessageError
from anabranch.policies.names.destination import Destination

from ..contract.disk import PATIENCE, A, B, Disk, Parallel, assert_whole, take
from ..contract.features import bodies_of, limits_of
from ..contract.large import body, contents, kept
from ..crash.interrupts import everywhere
from ..journal.disk import JournalDisk
from ..sql.disk import SqliteDisk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with JournalDisk(tmp_path) as disk:
        yield disk


@pytest.fixture
def store(disk: Disk) -> Store:
    return disk.create(large_message_size=1024)


def files(store: Store) -> list[Path]:
    return sorted((store.directory / "large").iterdir())


def test_a_note_that_names_another_body_is_not_believed(disk: Disk, store: Store) -> None:
    """Two bodies each say that the other's message is theirs."""
    for seed in (1, 2):
        store.send(A, io.BytesIO(body(seed=seed)))
    bodies_of(store).tidy()
    notes = [path.read_bytes()[36:52] for path in files(store)]
    assert notes[0] != notes[1]
    for path, note in zip(files(store), reversed(notes), strict=True):
        with path.open("r+b") as file:
            file.seek(36)
            file.write(note)
    again = disk.crash(store)
    assert (contents(again), kept(again)) == ([body(seed=1), body(seed=2)], 2)
    assert_whole(again)


def test_a_damaged_start_loses_no_body(disk: Disk, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.send(A, io.BytesIO(body()))
    (path,) = files(store)
    path.write_bytes(b"\0" * 64 + path.read_bytes()[64:])
    again = disk.crash(store)
    assert "start of a large body is damaged" in caplog.text
    assert (contents(again), kept(again)) == ([body()], 1)


def test_a_message_that_cannot_be_read_keeps_what_nobody_names(
    disk: Disk, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.send(A, io.BytesIO(body()))
    unsent = store.keep(io.BytesIO(body(seed=2)))
    assert isinstance(unsent, StoredBody)
    type_of = type(store.backend)
    plain = type_of.bodies

    def damaged(*_: object) -> Iterator[bytes | None]:
        raise CorruptionError("here", 0, "it is damaged")

    monkeypatch.setattr(type_of, "bodies", damaged)
    again = disk.crash(store)
    assert "all stay" in caplog.text
    monkeypatch.setattr(type_of, "bodies", plain)
    assert kept(again) == 2
    assert contents(again) == [body()]
    take(again).ack()
    assert kept(again) == 2, "the next open tells which are nobody's"
    assert kept(disk.reopen(again)) == 0


def test_a_damaged_message_holds_up_neither_the_open_nor_the_check(tmp_path: Path) -> None:
    with JournalDisk(tmp_path, large_message_size=1024) as disk:
        store = disk.create()
        store.send(A, b"0123456789" * 10)
        store.send(A, io.BytesIO(body(seed=1)))
        store.send(A, b"another")
        assert isinstance(store.keep(io.BytesIO(body(seed=2))), StoredBody)
        store.checkpoint()
        path = disk.copy(store)
        for segment in (path / "journal").glob("*.seg"):
            segment.write_bytes(segment.read_bytes().replace(b"0123456789" * 10, b"-" * 100))
        again = disk.open(path)
        assert any("does not read back" in violation for violation in again.check())
        with pytest.raises(CorruptionError, match="message 1"):
            again.receive(A, 0)
        assert take(again).read() == body(seed=1)


def test_a_check_goes_on_while_others_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournalDisk(tmp_path, large_message_size=1024) as disk:
        store = disk.create()
        for seed in range(2):
            store.send(A, io.BytesIO(body(seed=seed)))
        monkeypatch.setattr(Engine, "behind", True)  # as after a send of another thread
        assert_whole(store)


def test_a_body_that_goes_while_others_are_listed_is_no_violation(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.send(A, io.BytesIO(body()))
    bodies = bodies_of(store)
    holders = [one for those in bodies._live.values() for one in those.values()]
    take(store).ack()
    bodies.tidy()

    def listed(real: Callable[[], Any] = bodies.storage.kept) -> Any:
        names = list(real())
        assert names
        holders.clear()
        gc.collect()
        bodies._remove_unreferenced()
        return names

    monkeypatch.setattr(bodies.storage, "kept", listed)
    assert_whole(store)
    assert not files(store)


def test_check_reads_every_body(store: Store) -> None:
    store.send(A, io.BytesIO(body(CHUNK_BYTES + 5)))
    assert_whole(store)
    (path,) = files(store)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (violation,) = store.check()
    assert str(path) in violation
    assert "message 1 of queue://a" in violation
    path.unlink()
    assert "damaged or missing" in next(iter(store.check()))
    with pytest.raises(CorruptionError, match="missing"):
        take(store).read()


def test_a_failed_send_of_a_message_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **others: object) -> None:
        raise StoreFullError("there is no room")

    with monkeypatch.context() as patch:
        patch.setattr(store._engine, "submit", full)
        with pytest.raises(StoreFullError):
            store.send(A, io.BytesIO(body()))
    assert kept(store) == 0


def test_what_the_page_cache_may_hold_goes_after_the_ack_is_synced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    storage, sync, remove = bodies_of(store).storage, bodies_of(store)._sync, bodies_of(store).storage.remove

    def synced() -> None:
        done.append("sync")
        sync()

    def removed(name: bytes) -> None:
        done.append("remove")
        remove(name)

    monkeypatch.setattr(bodies_of(store), "_sync", synced)
    monkeypatch.setattr(storage, "remove", removed)
    store.send(A, io.BytesIO(body()))
    take(store).ack()
    assert kept(store) == 0
    assert done == ["sync", "remove"]


def test_what_cannot_be_synced_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.send(A, io.BytesIO(body()))
    take(store).ack()

    def full() -> None:
        raise StoreFullError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(bodies_of(store), "_sync", full)
        assert kept(store) == 1
    assert kept(store) == 0


def test_a_sweep_removes_what_its_last_holder_has_let_go_of(store: Store) -> None:
    store.send(A, io.BytesIO(body()))
    message = take(store)
    message.ack()
    assert kept(store) == 1
    del message
    gc.collect()
    assert bodies_of(store).unreferenced
    store.take_undelivered()
    assert kept(store) == 0


def test_an_open_tells_how_many_are_nobodys(disk: Disk, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    unsent = store.keep(io.BytesIO(body()))
    with caplog.at_level(logging.INFO):
        disk.crash(store)
    assert "1 large bodies belong to no message" in caplog.text
    del unsent


@pytest.mark.parametrize("seed", range(3))
def test_as_many_as_there_are_survive_any_history(disk: Disk, store: Store, seed: int) -> None:
    """Random sends, shared bodies, acks, notes and crashes: each message has its body, and there is no other."""
    rng = random.Random(seed)
    held: dict[Destination, list[bytes]] = {A: [], B: []}
    for number in range(60):
        destination = rng.choice((A, B))
        what = rng.random()
        if what < 0.4:
            sent = body(seed=number)
            store.send(destination, io.BytesIO(sent))
            held[destination].append(sent)
        elif what < 0.5 and held[destination]:
            message = next(iter(store.browse(destination)))
            other = B if destination == A else A
            store.send(other, message.content)
            held[other].append(message.read())
            del message
        elif what < 0.8 and held[destination]:
            take(store, destination).ack()
            held[destination].pop(0)
        elif what < 0.9:
            store = disk.crash(store) if rng.random() < 0.7 else disk.reopen(store)
        else:
            bodies_of(store).tidy()
        if number % 7 == 0:
            assert {A: contents(store), B: contents(store, B)} == held
    assert kept(store) == len({*held[A], *held[B]})
    assert_whole(store)


def test_what_has_to_stay_free_of_the_disk_stays_so(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at before a body is written, and now and then; what is written counts once."""
    store = disk.create(large_message_size=1024, min_free_disk=1 << 60)
    with pytest.raises(StoreFullError, match="min_free_disk"):
        store.send(A, io.BytesIO(body()))
    assert kept(store) == 0
    store = disk.create(large_message_size=1024, min_free_disk=1 << 20)
    store.send(A, io.BytesIO(body(CHUNK_BYTES + 1)))
    monkeypatch.setattr("anabranch.adapters.core.features.large.bodies.LOOK_CHUNKS", 1)
    asked: list[int] = []
    monkeypatch.setattr(limits_of(store), "require_disk", asked.append)
    store.send(A, io.BytesIO(body(2 * CHUNK_BYTES + 1)))
    assert asked == [CHUNK_BYTES] * 3
    assert bodies_of(store).size_of(store._engine.catalog.state(A)) == 3 * CHUNK_BYTES + 2


# From store to store


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "other").mkdir()
    with SqliteDisk(tmp_path / "other") as disk:
        yield disk.create(large_message_size=1024)


def test_copies_take_their_bodies_along(store: Store, other: Store) -> None:
    for seed in (1, 2):
        store.send(A, io.BytesIO(body(CHUNK_BYTES + seed, seed)))
        store.send(A, b"between")
    copying.bring(other, A, copying.read(store, A))
    assert copying.common(store, other, A) == 4
    copying.remove(store, A)
    assert (kept(store), kept(other)) == (0, 2)
    assert contents(other) == [body(CHUNK_BYTES + 1, 1), b"between", body(CHUNK_BYTES + 2, 2), b"between"]
    assert_whole(other)
    copying.bring(store, A, copying.read(other, A))
    copying.remove(other, A)
    assert (kept(store), kept(other)) == (2, 0)


def test_who_copies_from_elsewhere_holds_up_nobody_who_sends_on_what_is_here(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.send(A, io.BytesIO(body()))
    other.send(A, io.BytesIO(body(seed=2)))
    message, (elsewhere,) = take(store), other.browse(A)
    append, copying_now, go_on = bodies_of(store).storage.append, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        copying_now.set()
        assert go_on.wait(PATIENCE)
        append(*arguments)

    monkeypatch.setattr(bodies_of(store).storage, "append", slow)
    with Parallel(lambda: store.send(B, elsewhere.content)) as copying_elsewhere:
        assert copying_now.wait(PATIENCE)
        with Parallel(lambda: store.send(A, message.content)) as sending:
            sending.result()
        assert contents(store, B) == []
        go_on.set()
        copying_elsewhere.result()
    assert (len(contents(store)), contents(store, B)) == (2, [body(seed=2)])


def test_a_copy_that_is_begun_anew_has_its_bodies(store: Store, other: Store) -> None:
    store.send(A, io.BytesIO(body()))
    for _ in range(2):
        copying.bring(other, A, copying.read(store, A))
        assert kept(other) == 1
        copying.remove(other, A)
    copying.bring(other, A, copying.read(store, A))
    assert (contents(other), kept(other)) == ([body()], 1)


def test_a_damaged_body_is_not_copied(store: Store, other: Store) -> None:
    store.send(A, io.BytesIO(body()))
    (path,) = files(store)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(CorruptionError, match="large body"):
        copying.bring(other, A, copying.read(store, A))
    assert (contents(other), kept(other), kept(store)) == ([], 0, 1)


@pytest.mark.parametrize("shares", [False, True], ids=["noted", "shared"])
def test_a_body_that_is_shared_just_when_it_is_noted_whose_it_is(
    disk: Disk, store: Store, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """That it is several's stands in the end (rule B7): else it went with the first of them after a crash."""
    monkeypatch.setattr(large_bodies, "SOON_SECONDS", 3600.0)
    store.send(A, io.BytesIO(body()))
    content = next(store.browse(A)).content
    steps: list[Callable[[], object]] = [bodies_of(store).tidy, partial(store.send, B, content)]
    other = threading.Thread(target=steps[not shares])
    note = LargeFiles.note

    def noted(files: LargeFiles, name: bytes, what: bytes, sync: bool) -> None:
        if sync:
            note(files, name, what, sync)
        if not other.ident:
            other.start()
            other.join(0.3)  # all of it, where nobody waits for the other
        if not sync:
            note(files, name, what, sync)

    monkeypatch.setattr(LargeFiles, "note", noted)
    steps[shares]()
    other.join(PATIENCE)
    again = disk.crash(store)
    take(again, A).ack()
    again.sync()
    bodies_of(again).tidy()
    assert take(again, B).read() == body()
    assert_whole(again)


def test_what_was_not_to_survive_is_copied_for_what_is(store: Store) -> None:
    """A body that was not synced is not named by a message that is."""
    store.send(A, io.BytesIO(body()), persistent=False)
    (passing,) = store.browse(A)
    store.send(B, passing.content)
    (lasting,) = store.browse(B)
    assert isinstance(passing.content, StoredBody)
    assert isinstance(lasting.content, StoredBody)
    assert passing.content.name != lasting.content.name
    assert kept(store) == 2


# Ctrl-C


@pytest.mark.parametrize("how", ["send", "commit", "ack"])
def test_an_interruption_loses_no_body_and_leaves_none(store: Store, how: str) -> None:
    """At every place of a call: what is sent has its body, and what is not sent leaves none."""
    message: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        if how == "send":
            return lambda: store.send(A, io.BytesIO(body(seed=at)))
        store.send(A, io.BytesIO(body(seed=at)))
        message[:] = [take(store)]
        if how == "ack":
            return lambda: message[0].ack()
        store.claim(message[0])
        return lambda: store.commit([(B, Outgoing(io.BytesIO(body(seed=at + 1))))], message)

    def check(at: int, where: str) -> None:
        store._writer.flush()  # what was queued is written
        gc.collect()
        with suppress(UnknownMessageError):
            if how == "commit":
                store.unclaim(message)
            elif message:
                message[0].release()
        message.clear()
        there, sent = contents(store), contents(store, B)
        if how == "send":
            assert there in ([], [body(seed=at)]), where
        elif how == "ack":
            assert there in ([body(seed=at)], []), where
        else:
            assert (there, sent) in (([body(seed=at)], []), ([], [body(seed=at + 1)])), where
        assert kept(store) == len(there) + len(sent), where
        assert_whole(store)
        store.delete(A)
        store.delete(B)
        assert kept(store) == 0, where

    assert everywhere(prepare, check) > 15


def test_a_message_that_takes_effect_just_then_keeps_its_body(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is suspected with all others of its destination before it is in any row."""
    store.send(A, io.BytesIO(body()))
    engine = store._engine
    may_be_dead = bodies_of(store).may_be_dead

    def also_late(state: DestinationState) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "help", lambda: None)
            store.send(A, io.BytesIO(body(seed=2)))
        may_be_dead(state)

    with engine.lock:
        engine.drain()
        also_late(engine.catalog.state(A))
        assert engine.behind
        while bodies_of(store)._find_dead():
            pass
    assert (contents(store), kept(store)) == ([body(), body(seed=2)], 2)
