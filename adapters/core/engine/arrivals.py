"""Messages that are sent to a queue whose receivers have had all there was: they are put behind what was fetched of it
before they are applied, and nobody has to look them up. That is how a queue is used that is nearly empty, as most are.

Y1  A level whose `end` is the delivery's `epoch` has nothing in the rows beyond its cursor, nor in what was looked at
    and is not applied yet. It is not at its end while something is put there: who is interrupted leaves it so, and the
    next receiver asks the rows. They are asked only once all is applied, and what was put is held until then, or ready.
Y2  Only messages, acks and counts are passed on so, and do not end an epoch. Anything else begins another one, in which
    no level is known to be at its end before it has been fetched from.

In stores without priorities, whose levels are `Channel.first`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ..operations.changes import Ack, Change, Mark, Postponed, Returned, Send
from ..operations.destination_changes import Declare
from ..state.priorities import FETCH
from ..state.stack import STACK_MAX

if TYPE_CHECKING:
    from ..operations.plan import Plan
    from ..state.delivery import Delivery
    from ..state.leases import Channel
    from ..state.stack import Stack


_NOTHING_COMES: Final = frozenset((Ack, Declare, Mark, Returned))
"""By these no message comes into the rows: what is given back is in `Channel.returned`."""


def pass_on(changes: Iterable[Change], delivery: Delivery) -> None:
    """Pass on the messages that have come, in order. An interruption makes a message seen twice, never out of sight:
    cursors go behind what is ready, and a level is at its end once all is. May be done again."""
    for change in changes:
        if type(change) is Send:
            level, seq = change.state.channel.first, change.seq
            if level.end == delivery.epoch and level.cursor < seq:
                level.end = 0
                ready = level.ready
                if ready is not None and len(ready) < FETCH:
                    delivery.records[seq] = change.record
                    ready.append((change.order, seq, change.expires_at_ms, 0, change.own))
                    level.cursor = seq
                    level.end = delivery.epoch
        elif type(change) not in _NOTHING_COMES:
            delivery.epoch += 1
            if type(change) is Postponed and change.due:  # what was sent just before it was passed on
                delivery.records.pop(change.seq, None)
                for channel in change.state.channels(change.number):
                    channel.remove_fetched(change.seq, change.seq)


def follow(stack: Stack, channel: Channel, plans: Sequence[Plan], delivery: Delivery) -> bool:
    """Put on top of a stack (newest.py) what its queue was sent since, by plans that are not applied: `plans` end with
    them, and grow meanwhile. False if they tell more than messages and acks: then the rows have to be asked."""
    count = first = len(plans)
    while first and plans[first - 1].number > stack.number:
        first -= 1
    for plan in [plans[at] for at in range(first, count)]:
        if plan.number == stack.number:
            continue  # it is in there twice, since somebody was interrupted
        for change in plan.changes:
            if type(change) is Send:
                if change.state.channel is channel:
                    delivery.records[change.seq] = change.record
                    stack.places.append((change.order, change.seq, change.expires_at_ms, 0, change.own))
            elif type(change) not in _NOTHING_COMES:
                return False
        stack.number = plan.number
    del stack.places[:-STACK_MAX]
    return True
