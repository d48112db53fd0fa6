"""What happens to destinations and subscriptions."""

from __future__ import annotations

from anabranch.adapters.core.operations.changes import Send
from anabranch.adapters.core.operations.destination_changes import Declare, Remove, Subscribe, Unsubscribe
from anabranch.adapters.core.store_types import Subscription

from ..contract.disk import T
from .made import send_to, sequencer_of, ticket_of
from .test_plan import kinds


def test_what_is_removed_is_declared_anew_and_has_forgotten_its_ids() -> None:
    sequencer, a = sequencer_of()
    sequencer.accept(sequencer.plan([ticket_of(send_to(a, message_id="1"))]))
    ticket = ticket_of(Remove(a), send_to(a, message_id="1"), Remove(a), Remove(a))
    plan = sequencer.plan([ticket])
    assert kinds(plan) == [Remove, Declare, Send, Remove]
    assert ticket.outcomes[1] == (2, False)
    sequencer.accept(plan)
    assert not a.declared
    assert sequencer.window.get((a.number, b"1")) is None


def test_subscriptions_begin_and_end_once() -> None:
    sequencer, _ = sequencer_of()
    t = sequencer.catalog.state(T)
    desk = Subscription(T, "desk")
    number = sequencer.catalog.next_number()
    ticket = ticket_of(
        send_to(t), Subscribe(t, number, desk, False), Subscribe(t, 99, desk, False), send_to(t),
        Unsubscribe(t, desk.key), Unsubscribe(t, desk.key), send_to(t),
    )  # fmt: skip
    plan = sequencer.plan([ticket])
    assert kinds(plan) == [Declare, Send, Subscribe, Send, Unsubscribe, Send]
    known = ticket.outcomes[1][0]
    assert (known.number, known.start) == (number, 1)
    assert [len(change.recipients) for change in plan.changes if isinstance(change, Send)] == [0, 1, 0]
    assert ticket.outcomes[4:6] == [(known, True), (None, False)]
    sequencer.accept(plan)
    assert (sequencer.dropped, sequencer.subscribed, sequencer.catalog.subscriptions) == (2, {}, {})
