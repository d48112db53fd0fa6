"""What happens to messages."""

from __future__ import annotations

from anabranch.adapters.core.features.transient.changes import TransientChange, TransientEffect
from anabranch.adapters.core.features.transient.messages import TransientMessages
from anabranch.adapters.core.operations.table import apply_all
from anabranch.adapters.core.record.encoding import REQUEUED
from anabranch.adapters.core.state.states import Catalog

from ..contract.disk import A
from .made import journal, send_to, ticket_of
from .test_table import Heard


def test_a_name_that_is_not_written_yet_takes_room() -> None:
    a = Catalog().state(A)
    before = send_to(a).size
    a.declared = True
    assert send_to(a).size < before


def test_one_that_is_not_persistent_is_a_duplicate_of_either_kind() -> None:
    """Also within one ticket, and whatever was requeued in between; no backend is told of it."""
    with journal() as disk:
        engine = disk.create()._engine
        assert engine.make_transient is not None
        transient, sequencer, a = engine.make_transient(), engine.sequencer, engine.catalog.state(A)
        assert isinstance(transient, TransientMessages)
    passing = [
        TransientChange(transient, send_to(a, message_id=name, flags=flags))
        for name, flags in (("1", 0), ("2", 0), ("2", 0), ("2", REQUEUED), ("2", 0))
    ]
    ticket = ticket_of(send_to(a, message_id="1"), *passing)
    plan = sequencer.plan([ticket])
    assert ticket.outcomes == [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
    assert isinstance(plan.beside, TransientEffect)
    assert [one.inner.seq for one in plan.beside.apart] == [2, 3]
    heard = Heard()
    apply_all(plan.changes, heard)
    assert [call[0] for call in heard.calls] == ["declare", "put"]
