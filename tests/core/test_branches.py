"""A prepared branch as bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.operations.branches import branch_of, payload_of
from anabranch.adapters.core.operations.changes import MARK, Ack, Mark, Send
from anabranch.adapters.core.operations.destination_changes import Subscribe, Unsubscribe
from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import CorruptionError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, T
from .made import onefile, send_to


def test_it_comes_back_as_it_was() -> None:
    catalog = Catalog()
    a, t = catalog.state(A), catalog.state(T)
    desk = Subscription(T, "desk", "c1", "price > 1", True)
    sent = send_to(a, b"one", "id")
    changes: list[Any] = [
        Mark(a, MARK + b"tx", True),
        Mark(t, MARK + b"tx", False),
        Subscribe(t, 7, desk, True),
        Unsubscribe(t, ("c2", "other")),
        sent,
        send_to(t, b"two"),
        Ack(a, 5, 0),
        Ack(t, 6, 3),
        Ack(a, 7, 0, drops=True),
    ]
    payload = payload_of([b"1" * 16, b"2" * 16], changes)
    other = Catalog()
    other.state(Destination.parse("elsewhere"))
    branch = branch_of(b"t" * 32, payload, other, priorities=False)
    assert branch.participants == (b"1" * 16, b"2" * 16)
    mark, mark_of_topic, begun, ended, one, two, acked, acked_for, dropped = branch.changes
    assert isinstance(mark, Mark) and isinstance(mark_of_topic, Mark)
    assert (mark.state.destination, mark.name, mark.declares, mark_of_topic.declares) == (A, b"\0\0tx", True, False)
    assert isinstance(begun, Subscribe) and isinstance(ended, Unsubscribe)
    assert (begun.subscription, begun.retroactive, ended.key) == (desk, True, ("c2", "other"))
    assert isinstance(one, Send) and isinstance(two, Send)
    assert (one.state.destination, one.name, two.state.destination) == (A, b"id", T)
    assert one.record == sent.record
    assert isinstance(acked, Ack) and isinstance(acked_for, Ack) and isinstance(dropped, Ack)
    assert (acked.state.destination, acked.seq, acked_for.seq, acked_for.number) == (A, 5, 6, 3)
    assert (dropped.seq, [ack.drops for ack in branch.acks]) == (7, [False, False, True])
    assert (branch.summary.sends, branch.summary.acks) == (2, 3)
    assert payload_of(branch.participants, branch.changes) == payload


def test_one_that_does_not_read_is_damage() -> None:
    with pytest.raises(msgspec.DecodeError):
        branch_of(b"t" * 32, b"\xc1", Catalog(), False)
    cut = msgspec.msgpack.encode([[], [(A.kind.value, A.name)], [(0, b"head", 100)], [], []])
    with pytest.raises(ValueError, match="4 bytes of a message of 100"):
        branch_of(b"t" * 32, cut, Catalog(), False)
    with onefile() as disk:
        store = disk.create()
        store.prepare(b"t" * 32, [store.store_id], [(B, Outgoing(b"x"))], [], True).wait()
        store.commit([], [], changes=[Change(Subscription(T, "desk"), True)])
        backend = store.backend
        backend._next.prepared[(b"t" * 32).hex()] = b"\xc1"  # type: ignore[attr-defined]
        store.send(A, b"x")
        with pytest.raises(CorruptionError, match="does not read"):
            disk.crash(store)
