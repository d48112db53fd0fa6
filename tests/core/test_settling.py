"""How messages leave those who hold them: all or none, or each for itself by its token."""

from __future__ import annotations

import pytest

from anabranch.adapters.core.store_types import Settlement
from anabranch.policies.errors import StoreFullError, UnknownMessageError

from ..contract.disk import A, drain, take
from .made import onefile


def test_an_ack_that_is_refused_leaves_all_as_they_were() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        one, two, three = (take(store) for _ in range(3))
        two.release()
        with pytest.raises(UnknownMessageError):
            store.ack([one, two, three])
        store.ack([one, three])
        assert drain(store) == [b"2"]


def test_an_ack_that_cannot_be_written_leaves_them_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = take(store)

        def full(plan: object) -> None:
            raise StoreFullError("the disk is full")

        with monkeypatch.context() as patches:
            patches.setattr(store.backend, "write", full)
            with pytest.raises(StoreFullError):
                message.ack()
        assert store.receive(A) is None
        message.ack()
        assert drain(store) == []


def test_each_token_has_an_outcome_of_its_own() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        messages = [take(store) for _ in range(3)]
        tokens = [store.token(message) for message in messages]
        messages[1].release()
        outcomes = store.settle(tokens, Settlement.ACK)
        assert [type(outcome) for outcome in outcomes] == [type(None), UnknownMessageError, type(None)]
        assert drain(store) == [b"2"]
        (refused,) = store.settle(["x"], Settlement.RELEASE)
        assert "is no token" in str(refused)


def test_a_token_is_of_one_lease() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = take(store)
        first = store.token(message)
        message.release()
        second = store.token(take(store))
        assert first != second
        (outcome,) = store.settle([first], Settlement.ACK)
        assert isinstance(outcome, UnknownMessageError)
        assert store.settle([second], Settlement.RELEASE) == [None]
        assert take(store).deliveries == 3
