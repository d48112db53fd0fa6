"""What comes out of a store, what becomes of it when its bytes do not, and how it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.backend import ReadError
from anabranch.adapters.core.record.place import SEQ
from anabranch.adapters.core.service import failures
from anabranch.adapters.core.service.damaged import is_damage, readable
from anabranch.adapters.core.service.failures import TEXT_MAX, TYPE_MAX, Failure, failure_of
from anabranch.adapters.core.state.leases import Receiver
from anabranch.policies.config.durability import OnCorruption
from anabranch.policies.errors import CorruptionError, StoreFailedError, StoreFullError

from ..contract.disk import A, Parallel, drain, take
from ..contract.keyed import M
from ..journal.disk import JournalDisk
from ..journal.test_lost_messages import damaged, told
from .made import memory, onefile

# What comes out of a store, and what becomes of it when its bytes do not


class Unreadable:
    """A backend's bodies, which do not come: once, or for good."""

    def __init__(self, store: Any, error: CorruptionError) -> None:
        self.backend, self.error = store.backend, error
        self.bodies = store.backend.bodies
        store.backend.bodies = self

    def __call__(self, state: Any, places: Sequence[Any]) -> Iterator[bytes | None]:
        self.backend.bodies = self.bodies
        raise self.error


def test_what_the_disk_does_not_give_now_may_be_tried_again(store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    Unreadable(store, ReadError("file", 0, "the disk does not answer"))
    with pytest.raises(ReadError):
        store.receive(A)
    assert drain(store) == [b"1", b"2"]


def test_what_is_damaged_stays_leased_and_others_go_on(store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    Unreadable(store, CorruptionError("file", 0, "its checksum is wrong"))
    with pytest.raises(CorruptionError):
        store.receive(A)
    assert (drain(store), store.stats().leased) == ([b"2"], 1)


def test_what_is_damaged_is_told_and_acked_where_the_store_salvages(store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    told: list[tuple[str, int]] = []
    backend: Any = store.backend
    backend.lose = lambda state, place, error, message_id: told.append((str(state.destination), place[SEQ]))
    Unreadable(store, CorruptionError("file", 0, "its checksum is wrong"))
    assert (drain(store), store.depth(A), store.stats().leased) == ([b"2"], 0, 0)
    assert told == [("queue://a", 1)]


def test_what_was_purged_after_it_was_fetched_is_not_received(memory_store: Store) -> None:
    memory_store.send_many(A, [b"1", b"2"])
    one = take(memory_store)
    assert memory_store.purge(A) == 1
    assert memory_store.receive(A) is None
    one.release()
    assert drain(memory_store) == [b"1"]


def test_the_room_of_what_was_purged_after_it_was_fetched_goes_to_who_waits_for_it() -> None:
    with onefile() as disk:
        store = disk.create(max_leases=1)
        store.send_many(A, [b"1", b"2"])
        engine = store._engine
        channel = engine.catalog.state(A).channel
        receivers = [Receiver(), Receiver()]
        with engine.lock:
            for receiver in receivers:
                receiver.prepare()
                channel.receivers[receiver] = None
            engine.hand_over(channel)
        first, second = receivers
        assert first.lease is not None and second.lease is None
        store._receiving.let_go(first.lease)
        assert second.wait(0)


def test_who_gets_in_line_as_the_store_fails_is_told(monkeypatch: pytest.MonkeyPatch, memory_store: Store) -> None:
    """Whoever told those that waited has not seen it yet."""
    catalog = memory_store._engine.catalog
    memory_store.send(A, b"1")
    take(memory_store).ack()

    def fail(state: Any, real: Callable[[Any], Any] = catalog.current) -> Any:
        memory_store._engine.fail(StoreFailedError("the disk is gone"))
        return real(state)

    monkeypatch.setattr(catalog, "current", fail)  # which is asked just before
    with Parallel(lambda: memory_store.receive(A, None)) as receiving, pytest.raises(StoreFailedError, match="disk"):
        receiving.result()


# Which errors say that a message's bytes are damaged, and what a store that does not salvage makes of them


def test_what_the_disk_did_not_give_is_not_damaged() -> None:
    assert is_damage(CorruptionError("file", 0, "flipped"))
    assert not is_damage(ReadError("file", 0, "not now"))
    assert not is_damage(StoreFailedError("away"))


def test_a_value_is_named_by_its_key(tmp_path: Path) -> None:
    """In the call that meets it; put anew it is whole."""
    with JournalDisk(tmp_path) as disk:
        store = disk.create()
        for key in ("a", "b"):
            store.maps.put(M, key, key.encode())
        damaged(store, 2, destination=M)
        for call in (lambda: store.maps.get(M, "b"), lambda: store.maps.pop(M, "b"), lambda: list(store.maps.items(M))):
            with pytest.raises(CorruptionError, match=r"the value of 'b' in map://m: .* damaged; put another one, or"):
                call()
        store.maps.put(M, "b", b"c")
        assert list(store.maps.items(M)) == [("a", b"a"), ("b", b"c")]


@pytest.mark.parametrize("salvages", [True, False])
def test_what_reads_is_given(tmp_path: Path, salvages: bool) -> None:
    with JournalDisk(tmp_path) as disk:
        store = disk.create(on_corruption=OnCorruption.SALVAGE if salvages else OnCorruption.REFUSE)
        store.send_many(A, [b"1", b"2", b"3"])
        damaged(store, 1, 3)
        engine = store._engine
        state = engine.catalog.destinations[A]
        places = engine.asked(lambda: engine.rows.rows(state, None, None, 0, 10))
        records = readable(engine, state, places, ["one", "two", "three"])
        if salvages:
            assert [record is not None for record in records] == [False, True, False]
            assert [one.message_id for report in told(store) for one in report.messages] == ["one", "three"]
        else:
            with pytest.raises(CorruptionError, match="message 1 of queue://a"):
                next(records)
            assert told(store) == []
        assert store.depth(A) == 3


# An ack that the disk refuses. How else messages leave those who hold them, the contract asks


def test_an_ack_that_cannot_be_written_leaves_them_leased(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    store.send(A, b"1")
    message = take(store)

    def full(plan: object) -> None:
        raise StoreFullError("the disk is full")

    with monkeypatch.context() as patches:
        patches.setattr(store.backend, "write", full)
        with pytest.raises(StoreFullError):
            message.ack()
    assert store.receive(A) is None
    message.ack()
    assert drain(store) == []


# Why messages were given back last


class OwnError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("reason", "failure"),
    [
        (ValueError("no such part"), Failure("ValueError", "no such part")),
        (KeyError("k"), Failure("KeyError", "'k'")),
        (KeyboardInterrupt(), Failure("KeyboardInterrupt", "")),
        (OwnError(), Failure(f"{__name__}.OwnError", "its text cannot be had: RuntimeError")),
        ("out of stock", Failure(None, "out of stock")),
        ("", Failure(None, "")),
        ("a\ud800b", Failure(None, "a?b")),
    ],
)
def test_what_is_kept_of_a_reason(reason: Any, failure: Failure) -> None:
    assert failure_of(reason) == failure


def test_it_is_bounded() -> None:
    name, text = failure_of(type("E" * 1000, (ValueError,), {})("x" * 5000))
    assert name is not None
    assert (len(name), len(text)) == (TYPE_MAX, TEXT_MAX)
    assert text.endswith("...")


@pytest.mark.parametrize("reason", [5, None, b"x", ValueError])
def test_what_is_no_reason(reason: Any) -> None:
    with pytest.raises(TypeError, match="a reason is a str or an exception, not "):
        failure_of(reason)


def test_so_many_are_kept_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FAILURES_MAX", 2)
    with memory() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        messages = [take(store) for _ in range(3)]
        for message in (*messages, messages[1]):
            store.note_failure([message], f"of {message.seq}")
        assert [store.failure_of(message) for message in messages] == [
            None, Failure(None, f"of {messages[1].seq}"), Failure(None, f"of {messages[2].seq}"),
        ]  # fmt: skip


def test_who_holds_it_no_more_says_nothing_of_it(memory_store: Store) -> None:
    memory_store.send(A, b"1")
    before = take(memory_store)
    before.release(reason="first")
    now = take(memory_store)
    memory_store.note_failure([before], "late")
    assert memory_store.failure_of(now) == Failure(None, "first")
    now.release()
    assert memory_store.failure_of(take(memory_store)) == Failure(None, "first")


def test_a_release_with_what_is_no_reason_does_nothing(memory_store: Store) -> None:
    memory_store.send(A, b"1")
    message = take(memory_store)
    with pytest.raises(TypeError, match="a reason is a str or an exception, not int: 5"):
        message.release(reason=5)  # type: ignore[arg-type]
    message.ack()
