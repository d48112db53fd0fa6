"""Messages that are sent to a queue whose receivers have had all there was: they are put behind what was fetched of it
as they are applied, and nobody has to look them up. That is how a queue is used that is nearly empty, as most are.

Y1  A lane whose `end` is the delivery's `era` has nothing in the rows beyond its cursor, as far as is applied. It is
    not at its end while something is being applied that may change this: who is interrupted there leaves it so, and the
    next receiver asks the rows.
Y2  Only messages and acks, few of them, are passed on so. Anything else begins another era, in which no lane is known
    to be at its end before it has been fetched from.

In stores without priorities, whose lanes are `Feed.first`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .changes import Change, Send
from .lanes import FETCH, Lane

if TYPE_CHECKING:
    from .delivery import Delivery


def expected(changes: Sequence[Change], delivery: Delivery, may_pass_on: bool) -> list[Send]:
    """Of what is about to be applied, the messages to pass on once it is."""
    if not may_pass_on or len(changes) > FETCH:
        delivery.era += 1
        return []
    era = delivery.era
    arriving = [change for change in changes if type(change) is Send and change.state.feed.first.end == era]
    for send in arriving:
        send.state.feed.first.end = 0
    return arriving


def pass_on(arriving: Sequence[Send], delivery: Delivery) -> None:
    """They are in the rows. Interrupted it makes a message seen twice, never out of sight: cursors go behind what is
    ready, and a lane is at its end once all is."""
    latest: dict[Lane, int] = {}
    for send in arriving:
        lane = send.state.feed.first
        latest[lane] = send.seq
        if lane.ready is not None and len(lane.ready) < FETCH:
            lane.ready.append((send.order, send.seq, send.expires_at_ms, 0, send.own))
            lane.cursor = send.seq
    for lane, seq in latest.items():
        if lane.cursor == seq:
            lane.end = delivery.era
