"""What a transaction does in one store."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import ClosedError
from anabranch.router.transactions.participant import Participant, unclaim

from ..router.disk import bodies, config, take

DESTINATION = anabranch.Destination.parse("a.out")


def test_a_store_that_was_closed_for_being_idle_is_opened_again(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.send("a.out", b"0")
        (before,) = (store for store in router._registry.open_stores() if store.name == "a")
        one = Participant(before.store_id, before, DESTINATION)
        one.sends.append((DESTINATION, Outgoing(b"1")))
        before.close()
        one.call(router._registry, lambda store: store.commit(one.sends, []))
        assert one.store is not before
        assert bodies(router, "a.out") == [[b"0", b"1"]]


def test_one_that_has_acked_lost_its_leases_with_the_store(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.send("a.out", b"0")
        message = take(router, "a.out")
        store = cast(Store, message._store)
        one = Participant(store.store_id, store, DESTINATION)
        one.acks.append(message)
        store.close()
        with pytest.raises(ClosedError):
            one.call(router._registry, lambda store: store.commit([], one.acks))
        one.unclaim()


def test_what_is_free_already_does_not_keep_the_others(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("a.in").send_many([b"1", b"2", b"3"])
        messages = [take(router, "a.in") for _ in range(3)]
        store = messages[0]._store
        for message in messages:
            store.claim(message)
        store.unclaim([messages[1]])
        unclaim(messages)
        assert [take(router, "a.in").body for _ in range(3)] == [b"1", b"2", b"3"]


def test_where_it_sends_to_and_subscribes(tmp_path: Path) -> None:
    topic = anabranch.Destination.parse("topic://a.t")
    one = Participant(b"s" * 16)
    one.sends += [(DESTINATION, Outgoing(b"1")), (DESTINATION, Outgoing(b"2"))]
    one.changes += [
        Change(Subscription(topic, "desk"), True),
        Change(Subscription(topic, "book"), False),
    ]
    assert one.destinations() == [DESTINATION, topic]
