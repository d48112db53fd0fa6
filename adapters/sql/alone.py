"""What is done alone in its batch, by statements that are run at once: changes of subscriptions, purge and delete.

What they do depends on all that was before, and many rows may change of which nothing is known in memory; so the
destination is counted anew at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Change, Subscription
from ..delivery import Feed
from ..subscriptions import require_same, require_unclaimed, shown, unknown
from .destinations import DestinationState, Durable
from .messages import escaped
from .state import LAST
from .tickets import SUBSCRIBE, UNSUBSCRIBE, Ticket

if TYPE_CHECKING:
    from .batch import Batch


def check_changes(batch: Batch, ticket: Ticket) -> None:
    """Before anything of it is done."""
    for kind, subject in ticket.operations:
        if kind not in (SUBSCRIBE, UNSUBSCRIBE):
            continue
        change, strict = subject
        subscription = change.subscription
        there = batch.view(batch.state.destination(subscription.topic)).get(subscription.key)
        if not strict:
            continue
        if kind == SUBSCRIBE:
            if there is not None:
                require_same(there.subscription, subscription)
        elif there is None:
            raise unknown(subscription.topic, subscription.key)
        else:
            what = f"the {shown(subscription.topic, subscription.key)}"
            require_unclaimed(what, "removed", batch.state.delivery.claimed(there.feed))


def apply_change(batch: Batch, change: Change) -> None:
    """Of a transaction that was prepared: what is no change any more is passed over."""
    if change.subscribe:
        subscribe(batch, change)
    else:
        unsubscribe(batch, change.subscription)


def subscribe(batch: Batch, change: Change) -> bool:
    """False if it is there."""
    subscription = change.subscription
    state = batch.state.destination(subscription.topic)
    view = batch.view(state)
    if subscription.key in view:
        return False
    topic = batch.declare(state)
    batch.flush("insert.destination")
    batch.last_number += 1
    number, start = batch.last_number, 0 if change.retroactive else batch.last_seq + 1
    if start > batch.free_until:
        batch.find_free()
        start = batch.last_seq + 1
    if batch.wrapped and not change.retroactive:  # what is there may have a higher seq than what is to come
        start = 0
    batch.run(
        "insert.durable",
        {
            "number": number,
            "clientid": escaped(subscription.client_id),
            "durablename": escaped(subscription.name),
            "topicname": subscription.topic.name,
            "selector": None if subscription.selector is None else escaped(subscription.selector),
            "nolocal": int(subscription.no_local),
            "destination": topic,
            "startid": start,
        },
    )
    if batch.wrapped and not change.retroactive:
        batch.run("insert.acks.range", {"subscription": number, "topic": topic, "first": 0, "last": LAST})
    durable = Durable(subscription, number, start, Feed(state, number, subscription.key))
    batch.views[state] = {**view, subscription.key: durable}
    batch.recount[state] = None
    return True


def unsubscribe(batch: Batch, subscription: Subscription) -> int:
    """How many messages it had yet to ack."""
    state = batch.state.destination(subscription.topic)
    view = batch.view(state)
    durable = view.get(subscription.key)
    if durable is None:
        return 0
    _delete_durable(batch, durable)
    finish(batch, state)
    batch.views[state] = {key: other for key, other in view.items() if other is not durable}
    batch.removed.append(durable)
    return durable.count


def _delete_durable(batch: Batch, durable: Durable) -> None:
    """With all that is its own."""
    for name in ("delete.durable", "delete.durable.acks", "delete.durable.redeliveries"):
        batch.run(name, {"subscription": durable.number})


def finish(batch: Batch, state: DestinationState) -> None:
    """Messages that all have acked that are entitled to them are dead."""
    for what in ("chunks", "messages", "acks", "redeliveries"):
        batch.run(f"delete.finished.{what}", {"topic": state.number})
    batch.recount[state] = None


def purge(batch: Batch, state: DestinationState, durable: Durable | None) -> int:
    """Remove what nobody holds, of a destination or for one subscription; how many."""
    if not state.number or (durable is not None and batch.view(state).get(durable.subscription.key) is not durable):
        return 0
    feeds = [durable.feed] if durable is not None else list(state.feeds())
    with batch.state.lock:
        for feed in feeds:
            feed.purging += 1  # nobody shall receive what is about to go
            batch.purging.append(feed)
        held = sorted(batch.state.held_of(feeds))
    # What lies before its start is not the subscription's to ack (S2): its rows in ACKS would outlive the messages.
    first = 0 if durable is None else batch.start(durable)
    ranges = [
        {"topic": state.number, "first": after + 1, "last": before - 1}
        for after, before in zip([first - 1, *held], [*held, LAST + 1], strict=True)
        if after + 1 < before
    ]
    before = durable.count if durable is not None else state.count
    if durable is None:
        for what in ("chunks", "acks", "redeliveries", "messages"):
            if state.is_topic or what in ("chunks", "messages"):
                batch.run(f"delete.range.{what}", ranges)
        batch.recount[state] = None
    else:
        batch.run("insert.acks.range", [{**limits, "subscription": durable.number} for limits in ranges])
        finish(batch, state)
    batch.purged.append(state)
    batch.count(state)
    counts, of_durables = batch.counted[state]
    return before - (of_durables[durable] if durable is not None else sum(row[1] for row in counts))


def delete(batch: Batch, state: DestinationState) -> int:
    """Remove a destination with everything; how many messages. Raises TransactionError."""
    claimed = sum(batch.state.delivery.claimed(feed) for feed in state.feeds())
    require_unclaimed(str(state.destination), "deleted", claimed)
    if not state.number:
        return 0
    everything = {"topic": state.number, "first": 0, "last": LAST}
    for what in ("chunks", "acks", "redeliveries", "messages"):
        batch.run(f"delete.range.{what}", everything)
    for durable in state.durables.values():
        _delete_durable(batch, durable)
        batch.removed.append(durable)
    batch.run("delete.duplicates.destination", {"topic": state.number})
    batch.run("delete.destination", {"destination": state.number})
    batch.gone.append(state)
    return state.count
