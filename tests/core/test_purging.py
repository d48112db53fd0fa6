"""Many messages go a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.adapters.core.purging import PAGE, PAGES, purge

from ..contract.disk import A, B
from .made import onefile


def test_others_get_their_turn_in_between() -> None:
    """Between two writes nothing is locked: another queue's messages come and go."""
    with onefile() as disk:
        store = disk.create()
        count = 2 * PAGE * PAGES + 5
        store.send_many(A, [b"x"] * count)
        engine = store._engine
        state = engine.catalog.state(A)
        writes: list[int] = []

        def write(changes: Sequence[Any]) -> object:
            assert not engine.lock._is_owned()  # type: ignore[attr-defined]
            writes.append(sum(change.last - change.first + 1 for change in changes))
            store.send(B, b"y")
            message = store.receive(B)
            assert message is not None
            message.ack()
            return store._sending.write(changes)

        assert purge(engine, state, state.feeds(), write) == (count, count)
        assert writes == [PAGE * PAGES, PAGE * PAGES, 5]
        assert store.depth(A) == 0


def test_what_somebody_holds_stays() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [str(n).encode() for n in range(10)])
        held = [store.receive(A) for _ in range(3)]
        assert held[1] is not None
        held[1].release()
        assert store.purge(A) == 8
        assert [message.body for message in store.browse(A)] == [b"0", b"2"]
