"""The order of changes: seqs, duplicates, what depends on what was before (P1 to P3)."""

from __future__ import annotations

import pytest

from anabranch.adapters.core.operations.branches import Branch, Commit, Forget, Prepare, Rollback
from anabranch.adapters.core.operations.changes import Send
from anabranch.adapters.core.operations.destination_changes import Declare
from anabranch.adapters.core.operations.plan import Plan
from anabranch.adapters.core.record.encoding import REQUEUED
from anabranch.policies.names.destination import Destination

from .made import send_to, sequencer_of, ticket_of

T = Destination.parse("topic://t")


def kinds(plan: Plan) -> list[type]:
    return [type(change) for change in plan.changes]


def test_a_plan_may_be_made_again_until_it_is_accepted() -> None:
    sequencer, a = sequencer_of()
    ticket = ticket_of(send_to(a, message_id="1"), send_to(a), send_to(a, message_id="1"))
    first, again = sequencer.plan([ticket]), sequencer.plan([ticket])
    assert kinds(first) == kinds(again) == [Declare, Send, Send]
    assert ticket.outcomes == [(1, False), (2, False), (1, True)]
    assert (first.last_seq, sequencer.last_seq, a.declared) == (2, 0, False)
    sequencer.accept(again)
    sequencer.accept(again)
    assert (sequencer.last_seq, sequencer.number, a.declared) == (2, 1, True)


def test_a_duplicate_of_a_plan_before() -> None:
    sequencer, a = sequencer_of()
    sequencer.accept(sequencer.plan([ticket_of(send_to(a, message_id="1"))]))
    ticket = ticket_of(send_to(a, message_id="1"), send_to(a, message_id="1", flags=REQUEUED))
    sequencer.accept(sequencer.plan([ticket]))
    assert ticket.outcomes == [(1, True), (2, False)]
    ticket = ticket_of(send_to(a, message_id="1"))
    assert not sequencer.plan([ticket]).changes
    assert ticket.outcomes == [(2, True)]


def test_the_window_forgets_the_oldest() -> None:
    sequencer, a = sequencer_of(window=2)
    for name in "123":
        sequencer.accept(sequencer.plan([ticket_of(send_to(a, message_id=name))]))
    ticket = ticket_of(send_to(a, message_id="1"), send_to(a, message_id="3"))
    sequencer.plan([ticket])
    assert ticket.outcomes == [(4, False), (3, True)]


def test_an_outcome_is_carried_out_once() -> None:
    sequencer, a = sequencer_of()
    branch = Branch(b"t" * 32, (), [send_to(a)])
    before = ticket_of(Commit(branch))
    assert not sequencer.plan([before]).changes
    assert before.outcomes == [None]
    sequencer.accept(sequencer.plan([ticket_of(Prepare(branch))]))
    assert list(sequencer.prepared) == [b"t" * 32]
    ticket = ticket_of(Commit(branch), Commit(branch), Rollback(branch))
    plan = sequencer.plan([ticket])
    assert kinds(plan) == [Declare, Send, Commit]
    assert ticket.outcomes == [[(1, False)], None, False]
    sequencer.accept(plan)
    assert not sequencer.prepared


def test_seqs_that_are_given_out_between_plans_are_nobody_elses() -> None:
    """Also while a plan is made that began before the first of them."""
    sequencer, a = sequencer_of()
    between: list[int] = []

    class Meanwhile(Forget):
        """Another thread sends what is not persistent, while this is planned."""

        def plan(self, plan: Plan) -> None:
            sequencer.mix()
            between.append(sequencer.next_seq())

    ticket = ticket_of(send_to(a), Meanwhile([]), send_to(a))
    sequencer.accept(sequencer.plan([ticket]))
    between.append(sequencer.next_seq())
    later = ticket_of(send_to(a), send_to(a))
    sequencer.accept(sequencer.plan([later]))
    between.append(sequencer.next_seq())
    planned = [outcome[0] for outcome in (ticket.outcomes[0], ticket.outcomes[2], *later.outcomes)]
    assert planned == sorted(planned)
    assert between == sorted(between)
    assert len({*planned, *between}) == 7
    assert between[1] < planned[2] < planned[3] < between[2]
    with sequencer.lock, pytest.raises(RuntimeError):
        sequencer.next_seq()  # in a signal handler
