"""Who gets which message, who holds it, and who waits."""

from __future__ import annotations

import heapq

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.operations.changes import Ack
from anabranch.adapters.core.record.place import SEQ
from anabranch.adapters.core.state.delivery import Delivery
from anabranch.adapters.core.state.leases import CLAIMED, LEASED, LEAVING, Receiver, claimed
from anabranch.policies.errors import StoreFullError, UnknownMessageError

from ..contract.disk import A, take
from ..contract.leasing import LONG, Lasting, timed
from .made import onefile

# Who holds what and who is next (H1 to H4)


def test_who_came_first_is_served_first(store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    engine = store._engine
    channel = engine.catalog.state(A).channel
    receivers = [Receiver() for _ in range(3)]
    for receiver in receivers:
        receiver.prepare()
        channel.receivers[receiver] = None
    with engine.lock:
        engine.delivery.hand_over(channel, store.backend)
    seqs = [receiver.lease.seq if receiver.lease is not None else None for receiver in receivers]
    assert (seqs, list(channel.receivers)) == ([1, 2, None], receivers[2:])


def test_moves_are_all_or_none(store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    one, two = store.receive(A), store.receive(A)
    assert one is not None and two is not None
    delivery = store._engine.delivery
    delivery.take(store, [two], LEASED, LEAVING)
    with pytest.raises(UnknownMessageError):
        delivery.take(store, [one, two], LEASED, LEAVING)
    assert one._note.hold == LEASED
    delivery.put_back([two._note], LEASED)
    store.ack([one, two])


def test_who_waits_at_the_limit_of_leases_is_served_later() -> None:
    with onefile() as disk:
        store = disk.create(max_leases=1)
        store.send_many(A, [b"1", b"2"])
        message = store.receive(A)
        assert message is not None
        with pytest.raises(StoreFullError):
            store.receive(A, timeout=0)
        heard: list[bytes] = []
        store.listen(A, lambda m: heard.append(m.body))
        with store._engine.lock:
            store._engine.delivery.hand_over(store._engine.catalog.state(A).channel, store.backend)
        assert heard == []
        message.ack()


def test_an_empty_one_has_nothing() -> None:
    delivery = Delivery("s", 10)
    with onefile() as disk:
        store = disk.create()
        channel = store._engine.catalog.state(A).channel
        assert not delivery.lease(channel, store.backend, Receiver())


def test_one_that_is_fetched_and_has_returned_is_given_once(store: Store) -> None:
    """Its place may be one object in both: a backend may keep it."""
    store.send_many(A, [b"1", b"2", b"3"])
    channel, delivery = store._engine.catalog.state(A).channel, store._engine.delivery
    with store._engine.lock:
        delivery.first(channel, store.backend)
        assert channel.first.ready is not None
        place = channel.first.ready[1]
        channel.returned_places[place[SEQ]] = place
        heapq.heappush(channel.returned, place[:2])
    given = []
    while delivery.lease(channel, store.backend, receiver := Receiver()):
        assert receiver.lease is not None
        given.append(receiver.lease.seq)
        store._sending.write([Ack(channel.state, receiver.lease.seq, 0)])
    assert given == [1, 2, 3]


# Who holds what, and who waits


def test_a_lease_that_ended_is_no_ticket_to_the_next(store: Store) -> None:
    """Who gave a message back cannot ack it for who holds it now."""
    store.send(A, b"1")
    first = store.receive(A)
    assert first is not None
    first.release()
    second = store.receive(A)
    assert second is not None
    with pytest.raises(UnknownMessageError):
        first.ack()
    second.ack()


def test_a_lease_says_what_became_of_it(store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    one, two = store.receive(A), store.receive(A)
    assert one is not None and two is not None
    channel = store._engine.catalog.state(A).channel
    assert [lease.is_held for lease in channel.held.values()] == [True, True]
    lease = one._note
    assert (lease.is_settled, lease.is_kept, lease.time_limit, claimed(channel)) == (False, False, None, 0)
    store.claim(one)
    assert (lease.hold, lease.is_settled, claimed(channel)) == (CLAIMED, True, 1)
    store.unclaim([one])
    two.ack()
    store.stats()  # what was acked is applied
    assert (two._note.hold, two._note.is_held, claimed(channel)) == (LEAVING, False, 0)


def test_who_waits_is_told_once_for_each_time() -> None:
    """And who is awake already does not mind."""
    with onefile() as disk:
        channel = disk.create()._engine.catalog.state(A).channel
        receivers = [Receiver(), Receiver()]
        for receiver in receivers:
            receiver.prepare()
            channel.receivers[receiver] = None
        channel.wake()
        channel.wake()
        assert [receiver.wait(0) for receiver in receivers] == [True, False]
        channel.wake_all()
        assert [receiver.wait(0) for receiver in receivers] == [True, True]


# What is done with a message before its receiver sees it


def test_nothing_where_nothing_is_asked_for() -> None:
    with onefile() as disk:
        assert not disk.create()._receiving.hand_out.needed
        assert disk.create(lease_timeout=LONG)._receiving.hand_out.needed


def test_a_time_of_its_own_comes_before_that_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = Lasting(monkeypatch)
    with onefile() as disk:
        store = disk.create(lease_timeout=LONG)
        store.send_many(A, [b"1", b"2"])
        messages = [timed(store, 3 * LONG), take(store)]
        lasting.go_on(store)
        assert take(store).body == b"2"
        messages[0].ack()
