"""Moving makes messages of one queue those of another, a page in each transaction: killed anywhere, each is in one of
both.

    done = move_messages(router.transaction, router.queue("orders.eu"), router.queue("orders.all"), limit=100)

Messages keep their order, ids, headers, priorities and expiry; their time, and the count of their deliveries, begin
anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from ...adapters.core.messages import Message, Outgoing
from ...policies.errors import AnabranchError, DestinationError
from ..api.queue import Queue
from ..api.transaction import Transaction
from ..upkeep.batches import give_back, received, send_on

PAGE_MESSAGES: Final = 1000
PAGE_BYTES: Final = 4 << 20
"""The limits of one transaction; a message that is larger goes alone."""


def move_messages(
    begin: Callable[[], Transaction],
    source: Queue,
    target: Queue,
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda moved, total: None,
) -> int:
    """Move the messages that are ready, at most `limit`, in order; returns how many. Messages that come meanwhile may
    stay. `progress` is called with how many have moved, of how many.

    Raises DestinationError where both are one, and as Transaction.commit. Messages that moved before the error stay
    moved, and a note of the error says how many. The target's duplicate window drops none of them.
    """
    return move_pages(partial(move_page, begin, source, target), source, target, limit, progress)


def move_pages(
    move: Callable[[int], int],
    source: Queue,
    target: Queue,
    limit: int | None,
    progress: Callable[[int, int], None],
) -> int:
    """Move messages as `move_messages`, by a function that moves a page of at most so many, and returns how many."""
    if source.destination == target.destination:
        raise DestinationError(f"{source.destination} is where its messages are already; name another queue to move to")
    total = source.counts().ready if limit is None else min(limit, source.counts().ready)
    moved = 0
    try:
        while moved < total:
            progress(moved, total)
            page = move(total - moved)
            if not page:
                break
            moved += page
    except AnabranchError as error:
        error.add_note(f"{moved} messages of {source.destination} were moved before this.")
        raise
    return moved


def move_page(begin: Callable[[], Transaction], source: Queue, target: Queue, most: int) -> int:
    """Move the next messages in one transaction, at most so many; returns how many."""
    page = received(source, min(most, PAGE_MESSAGES), PAGE_BYTES)
    if page:
        try:
            send_on(begin, ((target.destination, as_it_is(message)) for message in page), page)
        except BaseException:
            give_back(page)
            raise
    return len(page)


def as_it_is(message: Message) -> Outgoing:
    """Return a message as one to be sent, which no duplicate window turns away."""
    return Outgoing(
        message.content, message.headers, message.message_id, message.priority, message.expires_at_ms,
        message.persistent, requeued=True,
    )  # fmt: skip
