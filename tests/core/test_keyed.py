"""What was read of a map is still so when it is written, or the ticket is refused (E3)."""

from __future__ import annotations

import pytest

from anabranch.adapters.core.features.keyed import keyed
from anabranch.adapters.core.features.keyed.keyed import KeyChangedError, Keys, KeyVersions, Unchanged
from anabranch.adapters.core.operations.changes import Ack, AckRange
from anabranch.adapters.core.operations.destination_changes import Remove
from anabranch.adapters.core.operations.plan import Sequencer
from anabranch.adapters.core.state.leases import DestinationState
from anabranch.policies.names.destination import Destination, Kind

from .made import send_to, sequencer_of, ticket_of

MADE: dict[str, Keys] = {}


def unchanged(state: DestinationState, name: bytes, number: int) -> Unchanged:
    """The condition of a ticket for the keys that `made` made last."""
    return Unchanged(MADE["keys"], state, (name,), number)


def made() -> tuple[Sequencer, DestinationState]:
    sequencer, _ = sequencer_of()
    sequencer.naming[Kind.MAP] = MADE["keys"] = Keys()
    return sequencer, sequencer.catalog.state(Destination.map("m"))


def put(state: DestinationState, key: str, behind: int | None = None) -> object:
    """A ticket that puts a value, if the key is as it was after that plan."""
    send = send_to(state, message_id=key)
    return ticket_of(send) if behind is None else ticket_of(unchanged(state, key.encode(), behind), send)


def is_refused(sequencer: Sequencer, *tickets: object) -> list[bool]:
    """Plan and accept them; which were refused, whole."""
    plan = sequencer.plan(tickets)  # type: ignore[arg-type]
    sequencer.accept(plan)
    assert len(plan.tickets) == sum(ticket.error is None for ticket in tickets)  # type: ignore[attr-defined]
    return [isinstance(ticket.error, KeyChangedError) for ticket in tickets]  # type: ignore[attr-defined]


def test_a_later_plan_has_written_the_key() -> None:
    sequencer, state = made()
    assert is_refused(sequencer, put(state, "a"), put(state, "b")) == [False, False]
    assert is_refused(sequencer, put(state, "a", 0), put(state, "c", 0)) == [True, False]
    assert is_refused(sequencer, put(state, "a", 1), put(state, "c", 1)) == [False, True]
    assert is_refused(sequencer, put(state, "c", 3)) == [False]


def test_a_ticket_of_the_same_plan_has_written_the_key() -> None:
    sequencer, state = made()
    tickets = put(state, "a", 0), put(state, "a", 0), put(state, "b", 0)
    assert is_refused(sequencer, *tickets) == [False, True, False]
    ack = ticket_of(unchanged(state, b"a", 1), Ack(state, 1, 0))
    assert is_refused(sequencer, ack, put(state, "a", 1)) == [False, True]  # a removal counts too


def test_no_duplicate_window_turns_a_value_away() -> None:
    sequencer, state = made()
    first, second = put(state, "a"), put(state, "a")
    assert is_refused(sequencer, first, second) == [False, False]
    assert [first.outcomes, second.outcomes] == [[(1, False)], [(2, False)]]  # type: ignore[attr-defined]
    assert not len(sequencer.window)


@pytest.mark.parametrize("purge", [True, False])
def test_all_keys_may_have_been_written(purge: bool) -> None:
    sequencer, state = made()
    is_refused(sequencer, put(state, "a"))
    assert is_refused(sequencer, ticket_of(AckRange(state, 0, 9, 0) if purge else Remove(state))) == [False]
    assert is_refused(sequencer, put(state, "b", 1)) == [True]
    if purge:
        assert is_refused(sequencer, put(state, "b", 3)) == [False]


def test_what_is_forgotten_may_have_been_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "VERSIONS_MAX", 3)
    versions = KeyVersions()
    for number, name in enumerate((b"a", b"b", b"a", b"c", b"d"), 1):
        versions.add([(1, name)], number)
    assert [versions.get((1, name)) for name in (b"a", b"b", b"c", b"d", b"never")] == [3, 3, 4, 5, 3]
    versions.add_all(9)
    assert [versions.get((1, name)) for name in (b"a", b"never")] == [9, 9]


def test_fresh_keys_are_let_go_once_they_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "RECENT_MAX", 2)
    sequencer, state = made()
    fresh = MADE["keys"].recent
    fresh._most = 2
    for number, key in enumerate("abacd", 1):
        plan = sequencer.plan([put(state, key)])  # type: ignore[list-item]
        sequencer.accept(plan)
        for effect in (*plan.effects, *plan.effects):  # may be done again
            effect.take(plan, number - 2)
    found = {key: fresh.get((state.number, key.encode())) for key in "abcd"}
    assert {key: written.number for key, written in found.items() if written is not None} == {"a": 3, "c": 4, "d": 5}
    popped = sequencer.plan([ticket_of(unchanged(state, b"d", 9), Ack(state, 5, 0))])
    sequencer.accept(popped)
    popped.effects[0].take(popped, 5)
    assert fresh.get((state.number, b"d")) == (6, None)
    purged = sequencer.plan([ticket_of(AckRange(state, 0, 9, 0))])
    purged.effects[0].take(purged, 5)
    assert fresh.get((state.number, b"d")) is None
