"""What goes into a store: refused before anything is queued, and as much together as may be."""

from __future__ import annotations

import pytest

from anabranch.adapters.messages import Outgoing
from anabranch.policies.errors import MessageTooLargeError, StoreFullError

from ..contract.disk import A, bodies
from .made import memory, onefile


def test_one_bad_message_refuses_all() -> None:
    with onefile() as disk:
        store = disk.create(message_bytes_max=10)
        with pytest.raises(MessageTooLargeError):
            store.send_many(A, [b"1", b"x" * 11, b"2"])
        assert (bodies(store), store.stats().sends) == ([], 0)


def test_many_go_in_tickets_of_a_bounded_size() -> None:
    with memory() as disk:
        store = disk.create(max_bytes=64 << 20)
        size = store.backend.settings.ticket_bytes_max
        before = store._engine.batches
        store.send_many(A, [b"x" * (size // 2 - 200)] * 5)
        assert store._engine.batches - before == 3
        assert store.depth(A) == 5


def test_no_room_is_kept_by_what_was_refused() -> None:
    with onefile() as disk:
        store = disk.create(max_messages=3)
        store.send(A, b"1")
        for _ in range(3):
            with pytest.raises(StoreFullError):
                store.send_many(A, [b"x"] * 3)
            with pytest.raises(StoreFullError):
                store.commit([(A, Outgoing(b"x"))] * 3, [])
        store.send_many(A, [b"2", b"3"])
        assert bodies(store) == [b"1", b"2", b"3"]


def test_a_duplicate_takes_no_room() -> None:
    with onefile() as disk:
        store = disk.create(max_messages=1)
        first = store.send(A, b"1", message_id="id")
        for _ in range(3):
            again = store.send(A, b"1", message_id="id")
            assert (again.seq, again.duplicate) == (first.seq, True)
