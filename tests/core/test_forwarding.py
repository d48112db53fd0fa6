"""Messages in hand whose destination has moved to another store (adapters/core/forwarding.py)."""

from __future__ import annotations

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.forwarding import follow, give_back, is_moving
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
    assert both.target.counts(A) == (3, 1, 0)
    rest[3]._store.unclaim([rest[3]])
    assert [(message.body, message.deliveries) for message in (take(both.target) for _ in range(3))] == [
        (b"2", 2), (b"3", 1), (b"4", 2),
    ]  # fmt: skip
    with pytest.raises(UnknownMessageError):
        first.ack()


def test_after_the_store_was_closed(both: Both) -> None:  # noqa: F811
    both.source.send(A, b"1")
    message = take(both.source)
    moved(both, A)
    both.source.close()
    assert follow(message)
    store: Store = message._store
    assert store is both.target
    message.ack()
    assert both.target.depth(A) == 0


def test_what_its_receiver_never_saw_is_free(both: Both) -> None:  # noqa: F811
    both.source.send(A, b"1")
    message = take(both.source)
    assert not give_back(message._note)
    moved(both, A)
    assert give_back(message._note)
    assert take(both.target).deliveries == 1
