"""Messages of both kinds are one queue to who looks at it."""

from __future__ import annotations

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.record.place import SEQ
from anabranch.adapters.core.store_types import Subscription

from ..contract.disk import A, T, assert_whole, bodies, drain
from ..contract.nonpersistent import passing
from .made import onefile

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def test_pages_and_orders_of_both_kinds() -> None:
    """However they lie between each other, in any priority."""
    with onefile() as disk:
        store = disk.create(priorities=True)
        sent = []
        for number in range(60):
            body, priority = b"%d" % number, number // 3 % 2
            store.send(A, body, priority=priority, persistent=bool(number % 3))
            sent.append((-priority, number, body))
        store.send_many(A, [Outgoing(b"60", priority=1), passing(b"61")._replace(priority=1)])
        sent += [(-1, 60, b"60"), (-1, 61, b"61")]
        expected = [body for _, _, body in sorted(sent)]
        rows, state = store._engine.rows, store._engine.catalog.state(A)
        with store._engine.lock:
            orders = [rows.next_order(state, None, order) for order in (0, 65_535 - 1, 65_535)]
            assert orders == [65_534, 65_534, 65_535]
            page = rows.rows(state, None, 65_535, 0, 7)
            assert [place[SEQ] for place in page] == sorted(place[SEQ] for place in page)
            for place in page:
                assert rows.row(state, None, place[SEQ]) == rows.row(state, None, place[SEQ], 65_535) == place
            assert rows.rows(state, None, 65_535, page[-1][SEQ], 1)[0] not in page
        assert bodies(store) == expected
        assert drain(store) == expected
        assert_whole(store)


def test_each_subscription_sees_what_is_for_it() -> None:
    with onefile() as disk:
        store = disk.create()
        store.subscribe(DESK)
        store.send_many(T, [b"1", passing(b"2")])
        store.subscribe(BOOK)
        store.send_many(T, [passing(b"3"), b"4"])
        assert bodies(store, T) == [b"1", b"2", b"3", b"4"]
        assert [bodies(store, T, one.key) for one in (DESK, BOOK)] == [[b"1", b"2", b"3", b"4"], [b"3", b"4"]]
        store.unsubscribe(T, DESK.key)
        assert bodies(store, T) == [b"3", b"4"]
        assert_whole(store)
