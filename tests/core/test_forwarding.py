"""Messages in hand whose destination has moved to another store (adapters/core/engine/forwarding.py)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.engine.forwarding import follow, give_back, is_moving
from anabranch.adapters.core.service import settling
from anabranch.adapters.core.state.gates import Gate, LeaseMovedError
from anabranch.policies.errors import UnknownMessageError

from ..contract.disk import A, B, take
from .test_copying import Both, both, sets  # noqa: F401
from .test_live_copy import moved


def test_each_is_settled_where_it_is(both: Both) -> None:  # noqa: F811
    """Also those that are given together with others."""
    both.source.send_many(A, [b"%d" % number for number in range(6)])
    both.source.send(B, b"stays")
    first, stays, *rest = [take(both.source), take(both.source, B), *(take(both.source) for _ in range(4))]
    assert not is_moving([first])
    moved(both, A)
    assert is_moving([stays, first])
    both.source.ack([first, stays])
    assert (both.target.depth(A), both.source.depth(B)) == (5, 0)
    both.source.ack_nowait([rest[0]]).result(10)
    both.source.release([rest[1]])
    both.source.release_nowait([rest[2]], delivered=False).result(10)
    both.source.claim(rest[3])
    assert both.target.counts(A) == (3, 1, 0, 0)
    rest[3]._store.unclaim([rest[3]])
    assert [(message.body, message.deliveries) for message in (take(both.target) for _ in range(3))] == [
        (b"2", 2), (b"3", 1), (b"4", 2),
    ]  # fmt: skip
    with pytest.raises(UnknownMessageError):
        first.ack()


def test_a_move_that_is_given_up_just_then(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Between the refusal and the look at the message: it is settled where it stayed."""
    store = both.source
    store.send_many(A, [b"%d" % number for number in range(6)])
    delivery = store._engine.delivery
    take_of = delivery.take

    def refuse_once(*_: Any) -> Any:
        monkeypatch.undo()
        raise LeaseMovedError(Gate.passed(A))

    for settle in (
        lambda message: store.ack([message]),
        lambda message: store.ack_nowait([message]).result(10),
        lambda message: store.release([message]),
        lambda message: store.release_nowait([message]).result(10),
        store.claim,
    ):
        message = take(store)
        monkeypatch.setattr(delivery, "take", refuse_once)
        monkeypatch.setattr(settling, "leave", refuse_once)
        settle(message)
        assert delivery.take == take_of
    assert store.depth(A) == 4


def test_after_the_store_was_closed(both: Both) -> None:  # noqa: F811
    both.source.send(A, b"1")
    message = take(both.source)
    moved(both, A)
    both.source.close()
    assert follow(message)
    assert cast(Store, message._store) is both.target
    message.ack()
    assert both.target.depth(A) == 0


def test_what_its_receiver_never_saw_is_free(both: Both) -> None:  # noqa: F811
    both.source.send(A, b"1")
    message = take(both.source)
    assert not give_back(message._note)
    moved(both, A)
    assert give_back(message._note)
    assert take(both.target).deliveries == 1
