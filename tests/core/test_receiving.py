"""What comes out of a store, and what becomes of it when its bytes do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from anabranch.adapters.core.backend import ReadError
from anabranch.adapters.core.record.place import SEQ
from anabranch.adapters.core.service.receiving import PAGE
from anabranch.adapters.core.state.leases import Receiver
from anabranch.policies.errors import CorruptionError, StoreFailedError

from ..contract.disk import A, Parallel, drain, take
from .made import memory, onefile


class Unreadable:
    """A backend's bodies, which do not come: once, or for good."""

    def __init__(self, store: Any, error: CorruptionError) -> None:
        self.backend, self.error = store.backend, error
        self.bodies = store.backend.bodies
        store.backend.bodies = self

    def __call__(self, state: Any, places: Sequence[Any]) -> Iterator[bytes | None]:
        self.backend.bodies = self.bodies
        raise self.error


def test_what_the_disk_does_not_give_now_may_be_tried_again() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        Unreadable(store, ReadError("file", 0, "the disk does not answer"))
        with pytest.raises(ReadError):
            store.receive(A)
        assert drain(store) == [b"1", b"2"]


def test_what_is_damaged_stays_leased_and_others_go_on() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        Unreadable(store, CorruptionError("file", 0, "its checksum is wrong"))
        with pytest.raises(CorruptionError):
            store.receive(A)
        assert (drain(store), store.stats().leased) == ([b"2"], 1)


def test_what_is_damaged_is_told_and_acked_where_the_store_salvages() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        told: list[tuple[str, int]] = []
        backend: Any = store.backend
        backend.lose = lambda state, place, error, message_id: told.append((str(state.destination), place[SEQ]))
        Unreadable(store, CorruptionError("file", 0, "its checksum is wrong"))
        assert (drain(store), store.depth(A), store.stats().leased) == ([b"2"], 0, 0)
        assert told == [("queue://a", 1)]


def test_browse_goes_on_behind_what_dies_meanwhile() -> None:
    with memory() as disk:
        store = disk.create()
        count = 2 * PAGE + 10
        store.send_many(A, [b"%d" % n for n in range(count)])
        looked = store.browse(A)
        first = [next(looked).body for _ in range(5)]
        for _ in range(PAGE + 5):
            take(store).ack()
        assert first + [message.body for message in looked] == [
            b"%d" % n for n in (*range(5), *range(PAGE + 5, count))
        ]  # fmt: skip


def test_what_was_purged_after_it_was_fetched_is_not_received() -> None:
    with memory() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        one = take(store)
        assert store.purge(A) == 1
        assert store.receive(A) is None
        one.release()
        assert drain(store) == [b"1"]


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


def test_who_gets_in_line_as_the_store_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever told those that waited has not seen it yet."""
    with memory() as disk:
        store = disk.create()
        catalog = store._engine.catalog
        store.send(A, b"1")
        take(store).ack()

        def fail(state: Any, real: Callable[[Any], Any] = catalog.current) -> Any:
            store._engine.fail(StoreFailedError("the disk is gone"))
            return real(state)

        monkeypatch.setattr(catalog, "current", fail)  # which is asked just before
        with Parallel(lambda: store.receive(A, None)) as receiving, pytest.raises(StoreFailedError, match="disk"):
            receiving.result()
