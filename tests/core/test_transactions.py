"""A store's part in a transaction over several: prepared, then committed or rolled back, told as often as one likes."""

from __future__ import annotations

import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.policies.errors import StoreFullError

from ..contract.disk import A, B, bodies, drain, take
from .made import onefile

NAME = b"t" * 32


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("commit", [True, False])
def test_an_outcome_may_be_told_twice(commit: bool, reopened: bool) -> None:
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = take(store)
        store.claim(message)
        store.prepare(NAME, [store.store_id], [(B, Outgoing(b"2"))], [message], True).wait()
        if reopened:
            store = disk.reopen(store)
        assert (store.receive(A), bodies(store, B)) == (None, [])
        for _ in range(3):
            (store.commit_prepared if commit else store.rollback_prepared)(NAME).wait()
        assert list(store.recover_prepared()) == []
        assert (drain(store), drain(store, B)) == (([], [b"2"]) if commit else ([b"1"], []))
        assert list(store.committed()) == ([NAME] if commit else [])
        store.forget([NAME])
        assert list(store.committed()) == []


def test_what_is_prepared_has_its_room() -> None:
    """Before its outcome too (rule T1)."""
    with onefile() as disk:
        store = disk.create(max_messages=2)
        room = store.reserve([(A, Outgoing(b"1")), (A, Outgoing(b"2"))])
        with pytest.raises(StoreFullError):
            store.send(B, b"x")
        sends = [(A, Outgoing(b"1")), (A, Outgoing(b"2"))]
        store.prepare(NAME, [store.store_id], sends, [], True, room).wait()
        del room
        store = disk.reopen(store)
        with pytest.raises(StoreFullError):
            store.send(B, b"x")
        store.rollback_prepared(NAME).wait()
        store.send(B, b"x")
