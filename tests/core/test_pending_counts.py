"""How many messages there will be once what is pending is applied."""

from __future__ import annotations

from anabranch.adapters.core.operations.changes import Ack, AckRange
from anabranch.adapters.core.operations.pending_counts import PendingCounts
from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Subscription

from ..contract.disk import A, B, T
from .made import send_to


def test_what_is_sent_and_acked_is_counted() -> None:
    catalog = Catalog()
    queue, other = catalog.load(1, A), catalog.load(2, B)
    counts = PendingCounts(catalog)
    for change in (send_to(queue), send_to(queue), Ack(queue, 1, 0)):
        change.add_to(counts)
    assert (counts.of(queue), counts.of(other), counts.unknown) == (1, 0, set())


def test_of_a_topic_only_each_subscription_is_known() -> None:
    """A message that one has acked is there for others still, or is not."""
    catalog = Catalog()
    topic = catalog.load(1, T)
    desk, book = (catalog.load_subscription(n, topic, Subscription(T, name), 0) for n, name in ((2, "a"), (3, "b")))
    counts = PendingCounts(catalog)
    send = send_to(topic)
    send.recipients = [desk, book]
    send.add_to(counts)
    assert (counts.of(topic), counts.of(desk), counts.of(book), counts.unknown) == (1, 1, 1, set())
    Ack(topic, 1, desk.number).add_to(counts)
    assert (counts.of(desk), counts.of(book), counts.unknown) == (0, 1, {topic})


def test_how_many_go_at_once_is_not_known() -> None:
    catalog = Catalog()
    topic = catalog.load(1, T)
    desk = catalog.load_subscription(2, topic, Subscription(T, "desk"), 0)
    counts = PendingCounts(catalog)
    AckRange(topic, 1, 9, desk.number).add_to(counts)
    assert counts.unknown == {topic, desk}
