"""What goes into a store: refused before anything is queued, and as much together as may be."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.engine.engine import APPLY_AT
from anabranch.adapters.core.messages import Outgoing, Receipt
from anabranch.adapters.core.state.priorities import FETCH
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import MessageTooLargeError, StoreFullError

from ..contract.disk import A, T, assert_whole, bodies, drain
from ..crash.interrupts import everywhere
from .made import journal, memory, onefile

MANY = [b"%d" % number for number in range(3 * FETCH)]
"""So many are one change, if they are bodies alone."""


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


def test_bodies_alone_are_kept_as_others_are() -> None:
    with journal() as disk:
        store = disk.create()
        receipts = store.send_many(A, MANY)
        others = store.send_many(A, [*MANY, Outgoing(b"last")])
        messages = list(store.browse(A))
        assert [message.body for message in messages] == [*MANY, *MANY, b"last"]
        assert [*receipts, *others] == [Receipt(A, message.seq) for message in messages]
        assert pickle.loads(pickle.dumps(receipts)) == receipts
        first, other = messages[0], messages[len(MANY)]
        for name in ("priority", "headers", "message_id", "expires_at_ms", "persistent", "deliveries"):
            assert getattr(first, name) == getattr(other, name)
        assert other.timestamp_ms >= first.timestamp_ms > 0
        stats = store.stats()
        assert (stats.sends, stats.messages) == (len(messages), len(messages))
        later = disk.crash(store)
        assert drain(later) == [*MANY, *MANY, b"last"]
        assert_whole(later)


@pytest.mark.parametrize("size", [100, 500, 70_000])
def test_bodies_alone_go_in_tickets_of_a_bounded_size(size: int, journal_store: Store) -> None:
    sent = [bytes([number % 251]) * size for number in range(3 * FETCH)]
    before = journal_store.stats().batches
    journal_store.send_many(A, sent)
    least = min(sum(map(len, sent)) // journal_store.backend.settings.ticket_bytes_max, len(sent))
    assert least <= journal_store.stats().batches - before <= 3 * least + 1
    assert bodies(journal_store) == sent


def test_one_bad_body_among_many_refuses_all() -> None:
    with journal() as disk:
        store = disk.create(message_bytes_max=10)
        with pytest.raises(MessageTooLargeError):
            store.send_many(A, [*MANY, b"x" * 11])
        with pytest.raises(TypeError):
            store.send_many(A, [*MANY, "text"])  # type: ignore[list-item]
        assert (bodies(store), store.stats().sends) == ([], 0)


def test_limits_count_each_of_many() -> None:
    with journal() as disk:
        store = disk.create(max_messages=len(MANY), max_bytes=1 << 20)
        with pytest.raises(StoreFullError):
            store.send_many(A, [*MANY, b"x"])
        store.send_many(A, MANY)
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        assert drain(store) == MANY
        with pytest.raises(StoreFullError):
            store.send_many(A, [b"x" * 10_000] * len(MANY))


def test_many_are_in_one_order_with_those_that_are_not_persistent(journal_store: Store) -> None:
    journal_store.send(A, b"first", persistent=False)
    journal_store.send_many(A, MANY)
    journal_store.send(A, b"last", persistent=False)
    assert journal_store.depth(A) == len(MANY) + 2
    assert drain(journal_store) == [b"first", *MANY, b"last"]
    assert journal_store.receive(A) is None
    journal_store.send_many(A, MANY)  # behind what was fetched
    assert drain(journal_store) == MANY


@pytest.mark.parametrize("options", [{"priorities": True}, {}])
def test_many_to_a_topic_and_by_priority(options: dict[str, bool]) -> None:
    with journal() as disk:
        store = disk.create(**options)
        store.subscribe(Subscription(T, "desk"))
        for destination, subscription in ((A, None), (T, ("", "desk"))):
            store.send_many(destination, MANY)
            store.send(destination, b"urgent", priority=9)
            expected = [b"urgent", *MANY] if options else [*MANY, b"urgent"]
            assert drain(store, destination, subscription) == expected
        assert_whole(store)


def test_many_of_which_nobody_has_looked_are_counted(journal_store: Store) -> None:
    many = MANY[: APPLY_AT - 2]
    journal_store.send_many(A, many)
    assert journal_store._engine.pending_counts().more == {journal_store._engine.catalog.destinations[A]: len(many)}
    assert journal_store._engine.pending_changes == len(many) + 1  # with what declares the queue
    assert journal_store.depth(A) == len(many)


def test_ctrl_c_stores_all_of_a_ticket_or_nothing(journal_store: Store) -> None:
    sent = MANY[: FETCH + 1]

    def prepare(at: int) -> Callable[[], object]:
        return lambda: journal_store.send_many(A, sent)

    def check(at: int, where: str) -> None:
        journal_store._writer.flush()  # what was queued is written
        found = drain(journal_store)
        assert found == sent or (where and not found), where
        assert_whole(journal_store)

    assert everywhere(prepare, check) > 30
