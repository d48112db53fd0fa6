"""Who holds what, and who waits."""

from __future__ import annotations

import pytest

from anabranch.adapters.core.state.leases import CLAIMED, LEAVING, Receiver, claimed
from anabranch.policies.errors import UnknownMessageError

from ..contract.disk import A
from .made import onefile


def test_a_lease_that_ended_is_no_ticket_to_the_next() -> None:
    """Who gave a message back cannot ack it for who holds it now."""
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        first = store.receive(A)
        assert first is not None
        first.release()
        second = store.receive(A)
        assert second is not None
        with pytest.raises(UnknownMessageError):
            first.ack()
        second.ack()


def test_a_lease_says_what_became_of_it() -> None:
    with onefile() as disk:
        store = disk.create()
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
