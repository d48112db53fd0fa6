"""Maps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.features.keyed import keyed, maps
from anabranch.adapters.core.features.keyed.keyed import KeyChangedError, Keys, KeyVersions, Unchanged
from anabranch.adapters.core.in_memory import key_index
from anabranch.adapters.core.in_memory.key_index import KeyIndex
from anabranch.adapters.core.operations.changes import Ack, AckRange
from anabranch.adapters.core.operations.destination_changes import Remove
from anabranch.adapters.core.operations.plan import Sequencer
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.state.leases import DestinationState
from anabranch.adapters.core.state.rows import KeyedRows
from anabranch.policies.errors import DestinationError
from anabranch.policies.names.destination import Destination, Kind

from ..memory.disk import MemoryDisk
from .made import onefile, send_to, sequencer_of, ticket_of

# What was read of a map is still so when it is written, or the ticket is refused (E3)


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


# Which key of a map leads to which message, in memory


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_a_dict_in_order(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """Blocks of keys are split and go; whether somebody has asked for the order before, or not."""
    monkeypatch.setattr(key_index, "BLOCK_MAX", 8)
    keys, model, rng = KeyIndex(), dict[bytes, int](), random.Random(7)
    if asked:
        keys.page(b"", 1)
    for seq in range(1, 2000):
        name = b"%03d" % rng.randrange(150)
        if name in model and rng.randrange(2):
            keys.forget(model.pop(name))
        elif name not in model:
            keys.put(name, seq)
            model[name] = seq
        assert (keys.get(name), len(keys)) == (model.get(name), len(model))
    assert keys.page(b"", 1000) == sorted(model.items()) == sorted(keys.items())
    assert keys.page(b"05", 7) == [item for item in sorted(model.items()) if item[0] >= b"05"][:7]
    for seq in list(model.values()):
        keys.forget(seq)
    assert (len(keys), keys.cost, keys.page(b"", 10)) == (0, 0, [])


def test_what_is_done_again_changes_nothing() -> None:
    keys = KeyIndex()
    keys.page(b"", 1)
    for _ in range(2):
        keys.put(b"a", 1)
        keys.put(b"b", 2)
    cost = keys.cost
    keys.put(b"a", 3)
    assert (keys.page(b"", 10), keys.cost) == ([(b"a", 1), (b"b", 2)], cost)
    for _ in range(2):
        keys.forget(1)
        keys.forget(7)
    assert keys.page(b"", 10) == [(b"b", 2)]
    keys.put(b"a", 3)
    assert (keys.get(b"a"), keys.cost) == (3, cost)


# Keyed values, where the contract's tests (tests/contract/keyed.py) do not see them


M = Destination.map("m")


def test_who_loses_a_race_looks_again(monkeypatch: pytest.MonkeyPatch, journal_store: Store) -> None:
    """Another puts between the look and the write, again and again."""
    others = iter((b"10", b"20", b"30"))
    submit: Callable[..., Any] = journal_store._engine.submit

    def race(ticket: Ticket) -> object:
        other = next(others, None)
        if other is not None:
            journal_store.maps.put(M, "n", other)
        return submit(ticket)

    journal_store._engine.submit = race
    assert journal_store.maps.increment(M, "n", 5) == 35
    journal_store._engine.submit = submit
    assert journal_store.maps.get(M, "n") == b"35"


def test_a_value_that_is_replaced_while_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with MemoryDisk(tmp_path) as disk:
        store = disk.create()
        for key in ("a", "b", "c"):
            store.maps.put(M, key, b"1")
        backend = store._engine.backend
        bodies = backend.bodies

        def replaced(state: Any, places: Any) -> Any:
            monkeypatch.setattr(backend, "bodies", bodies)
            store.maps.put(M, "a", b"2")
            store.maps.pop(M, "c")
            store._engine.asked(lambda: None)
            return bodies(state, places)

        monkeypatch.setattr(backend, "bodies", replaced)
        assert store.maps.get(M, "a") == b"2"
        store.maps.put(M, "a", b"1")
        store.maps.put(M, "c", b"1")
        monkeypatch.setattr(backend, "bodies", replaced)
        assert list(store.maps.items(M)) == [("a", b"2"), ("b", b"1")]


def test_a_kind_of_store_that_keeps_no_maps_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with onefile() as disk:
        monkeypatch.setattr(maps, "KeyedRows", pytest.MonkeyPatch)  # which no backend is
        store = disk.create()
        with pytest.raises(
            DestinationError, match=r"keeps no maps, 'onefile'; route map://m to a store of another kind"
        ):
            store.maps.put(M, "a", b"1")


def test_a_page_is_all_that_is_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(maps, "PAGE", 3)
    with MemoryDisk(tmp_path) as disk:
        store = disk.create()
        for number in range(8):
            store.maps.put(M, str(number), b"%d" % number)
        pages: list[int] = []
        keys = cast(KeyedRows, store.backend).keys

        def counted(state: Any, start: bytes, limit: int) -> Any:
            found = keys(state, start, limit)
            pages.append(len(found))
            return found

        monkeypatch.setattr(store.backend, "keys", counted)
        assert list(store.maps.items(M)) == [(str(number), b"%d" % number) for number in range(8)]
        assert pages == [3, 3, 2]
