"""Keyed values, where the contract's tests (tests/contract/keyed.py) do not see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from anabranch.adapters.core.features.keyed import maps
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.state.rows import KeyedRows
from anabranch.policies.errors import DestinationError
from anabranch.policies.names.destination import Destination

from ..memory.disk import MemoryDisk
from .made import journal, onefile

M = Destination.map("m")


def test_who_loses_a_race_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another puts between the look and the write, again and again."""
    with journal() as disk:
        store = disk.create()
        others = iter((b"10", b"20", b"30"))
        submit: Callable[..., Any] = store._engine.submit

        def race(ticket: Ticket) -> object:
            other = next(others, None)
            if other is not None:
                store.maps.put(M, "n", other)
            return submit(ticket)

        store._engine.submit = race
        assert store.maps.increment(M, "n", 5) == 35
        store._engine.submit = submit
        assert store.maps.get(M, "n") == b"35"


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
