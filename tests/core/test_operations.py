"""What may happen to a store: changes, tickets and plans, what a backend is told of them, branches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.features.transient.changes import TransientChange, TransientEffect
from anabranch.adapters.core.features.transient.messages import TransientMessages
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.operations.branches import Branch, Commit, Forget, Prepare, Rollback, branch_of, payload_of
from anabranch.adapters.core.operations.changes import MARK, Ack, AckRange, Mark, Returned, Send
from anabranch.adapters.core.operations.destination_changes import Declare, Remove, Subscribe, Unsubscribe
from anabranch.adapters.core.operations.pending_counts import PendingCounts
from anabranch.adapters.core.operations.plan import Plan
from anabranch.adapters.core.operations.table import apply_all
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.record.encoding import REQUEUED
from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import CorruptionError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, T, bodies
from .made import journal, onefile, send_to, sequencer_of, ticket_of

# What a backend is told


class Heard:
    """A table that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def test_messages_to_one_destination_come_together() -> None:
    catalog = Catalog()
    a, b = catalog.state(A), catalog.state(B)
    sends = [send_to(a), send_to(a), send_to(b), send_to(a), send_to(a)]
    acks = [Ack(a, 1, 0), Ack(a, 2, 0)]
    changes: list[Any] = [*sends[:4], acks[0], sends[4], acks[1]]
    heard = Heard()
    apply_all(changes, heard)
    assert heard.calls == [("put", [*sends[:2], *sends[3:]]), ("put", [sends[2]]), ("ack", acks)]

    in_order = Heard()
    apply_all(iter(changes), in_order)
    assert in_order.calls == [
        ("put", sends[:2]), ("put", [sends[2]]), ("put", [sends[3]]), ("ack", acks[:1]), ("put", [sends[4]]),
        ("ack", acks[1:]),
    ]  # fmt: skip


def test_nothing_but_messages_and_acks_changes_its_place() -> None:
    a = Catalog().state(A)
    first, second = send_to(a), send_to(a)
    one, six = Ack(a, 1, 0), Ack(a, 6, 0)
    heard = Heard()
    apply_all([one, first, AckRange(a, 2, 5, 0), second, six], heard)
    assert heard.calls == [
        ("put", [first]), ("ack", [one]), ("ack_range", a, 2, 5, 0), ("put", [second]), ("ack", [six]),
    ]  # fmt: skip


def test_each_has_a_method() -> None:
    a = Catalog().state(A)
    heard = Heard()
    apply_all([AckRange(a, 1, 5, 0), Returned(a, 1, 0, 3), Remove(a), Forget([b"t"])], heard)
    assert heard.calls == [
        ("ack_range", a, 1, 5, 0), ("returned", a, 1, 0, 3, None), ("remove", a), ("forget", [b"t"]),
    ]  # fmt: skip


# The order of changes: seqs, duplicates, what depends on what was before (P1 to P3)


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


# What happens to messages


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
        TransientChange(transient._effect, send_to(a, message_id=name, flags=flags))
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


# What happens to destinations and subscriptions


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


# A ticket's changes take effect together


def test_its_changes_share_one_write(store: Store) -> None:
    catalog = store._engine.catalog
    before = store._engine.batches
    ticket = Ticket([send_to(catalog.state(A)), send_to(catalog.state(B)), send_to(catalog.state(A))], 0)
    store._writer.submit(ticket)
    assert [duplicate for _, duplicate in store._writer.wait(ticket)] == [False] * 3
    assert store._engine.batches - before == 1
    assert (bodies(store), bodies(store, B)) == ([b"x", b"x"], [b"x"])


def test_one_of_no_effect_is_done_too(memory_store: Store) -> None:
    state = memory_store._engine.catalog.state(A)
    empty, gone = Ticket([], 0), Ticket([Ack(state, 99, 0)], 0)
    for ticket in (empty, gone):
        memory_store._writer.submit(ticket)
        memory_store._writer.wait(ticket)
        assert (ticket.done, ticket.error) == (True, None)


# How many messages there will be once what is pending is applied


def test_what_is_sent_and_acked_is_counted() -> None:
    catalog = Catalog()
    queue, other = catalog.load(1, A), catalog.load(2, B)
    counts = PendingCounts(catalog)
    for change in (send_to(queue), send_to(queue), Ack(queue, 1, 0)):
        change.add_to(counts)
    assert (counts.of(queue), counts.of(other), counts.unknown) == (1, 0, set())


def test_of_a_topic_only_each_subscription_is_known() -> None:
    """A message that one has acked is there for others still, or is not."""
    catalog = Catalog()
    topic = catalog.load(1, T)
    desk, book = (catalog.load_subscription(n, topic, Subscription(T, name), 0) for n, name in ((2, "a"), (3, "b")))
    counts = PendingCounts(catalog)
    send = send_to(topic)
    send.recipients = [desk, book]
    send.add_to(counts)
    assert (counts.of(topic), counts.of(desk), counts.of(book), counts.unknown) == (1, 1, 1, set())
    Ack(topic, 1, desk.number).add_to(counts)
    assert (counts.of(desk), counts.of(book), counts.unknown) == (0, 1, {topic})


def test_how_many_go_at_once_is_not_known() -> None:
    catalog = Catalog()
    topic = catalog.load(1, T)
    desk = catalog.load_subscription(2, topic, Subscription(T, "desk"), 0)
    counts = PendingCounts(catalog)
    AckRange(topic, 1, 9, desk.number).add_to(counts)
    assert counts.unknown == {topic, desk}


# A prepared branch as bytes


def test_it_comes_back_as_it_was() -> None:
    catalog = Catalog()
    a, t = catalog.state(A), catalog.state(T)
    desk = Subscription(T, "desk", "c1", "price > 1", True)
    sent = send_to(a, b"one", "id")
    changes: list[Any] = [
        Mark(a, MARK + b"tx", True),
        Mark(t, MARK + b"tx", False),
        Subscribe(t, 7, desk, True),
        Unsubscribe(t, ("c2", "other")),
        sent,
        send_to(t, b"two"),
        Ack(a, 5, 0),
        Ack(t, 6, 3),
        Ack(a, 7, 0, drops=True),
    ]
    payload = payload_of([b"1" * 16, b"2" * 16], changes)
    other = Catalog()
    other.state(Destination.parse("elsewhere"))
    branch = branch_of(b"t" * 32, payload, other, priorities=False)
    assert branch.participants == (b"1" * 16, b"2" * 16)
    mark, mark_of_topic, begun, ended, one, two, acked, acked_for, dropped = branch.changes
    assert isinstance(mark, Mark) and isinstance(mark_of_topic, Mark)
    assert (mark.state.destination, mark.name, mark.declares, mark_of_topic.declares) == (A, b"\0\0tx", True, False)
    assert isinstance(begun, Subscribe) and isinstance(ended, Unsubscribe)
    assert (begun.subscription, begun.retroactive, ended.key) == (desk, True, ("c2", "other"))
    assert isinstance(one, Send) and isinstance(two, Send)
    assert (one.state.destination, one.name, two.state.destination) == (A, b"id", T)
    assert one.record == sent.record
    assert isinstance(acked, Ack) and isinstance(acked_for, Ack) and isinstance(dropped, Ack)
    assert (acked.state.destination, acked.seq, acked_for.seq, acked_for.number) == (A, 5, 6, 3)
    assert (dropped.seq, [ack.drops for ack in branch.acks]) == (7, [False, False, True])
    assert (branch.summary.sends, branch.summary.acks) == (2, 3)
    assert payload_of(branch.participants, branch.changes) == payload


def test_one_that_does_not_read_is_damage() -> None:
    with pytest.raises(msgspec.DecodeError):
        branch_of(b"t" * 32, b"\xc1", Catalog(), False)
    cut = msgspec.msgpack.encode([[], [(A.kind.value, A.name)], [(0, b"head", 100)], [], []])
    with pytest.raises(ValueError, match="4 bytes of a message of 100"):
        branch_of(b"t" * 32, cut, Catalog(), False)
    with onefile() as disk:
        store = disk.create()
        store.prepare(b"t" * 32, [store.store_id], [(B, Outgoing(b"x"))], [], True).wait()
        store.commit([], [], changes=[Change(Subscription(T, "desk"), True)])
        backend = store.backend
        backend._next.prepared[(b"t" * 32).hex()] = b"\xc1"  # type: ignore[attr-defined]
        store.send(A, b"x")
        with pytest.raises(CorruptionError, match="does not read"):
            disk.crash(store)
