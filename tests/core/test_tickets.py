"""A ticket's changes take effect together."""

from __future__ import annotations

from anabranch.adapters.core.operations.changes import Ack
from anabranch.adapters.core.operations.tickets import Ticket

from ..contract.disk import A, B, bodies
from .made import memory, onefile, send_to


def test_its_changes_share_one_write() -> None:
    with onefile() as disk:
        store = disk.create()
        catalog = store._engine.catalog
        before = store._engine.batches
        ticket = Ticket([send_to(catalog.state(A)), send_to(catalog.state(B)), send_to(catalog.state(A))], 0)
        store._writer.submit(ticket)
        assert [duplicate for _, duplicate in store._writer.wait(ticket)] == [False] * 3
        assert store._engine.batches - before == 1
        assert (bodies(store), bodies(store, B)) == ([b"x", b"x"], [b"x"])


def test_one_of_no_effect_is_done_too() -> None:
    with memory() as disk:
        store = disk.create()
        state = store._engine.catalog.state(A)
        empty, gone = Ticket([], 0), Ticket([Ack(state, 99, 0)], 0)
        for ticket in (empty, gone):
            store._writer.submit(ticket)
            store._writer.wait(ticket)
            assert (ticket.done, ticket.error) == (True, None)
