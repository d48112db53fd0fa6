"""Moving makes messages of one queue those of another, a page in each transaction: killed anywhere, each is in one of
both.

    done = move_messages(router.transaction, router.queue("orders.eu"), router.queue("orders.all"), limit=100)

Messages keep their order, ids, headers, priorities and expiry; their time, and the count of their deliveries, begin
anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ...adapters.core.messages import Message, Outgoing
from ...policies.errors import AnabranchError, DestinationError, StoreFullError

if TYPE_CHECKING:
    from ..api.queue import Queue
    from ..api.transaction import Transaction

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
    if source.destination == target.destination:
        raise DestinationError(f"{source.destination} is where its messages are already; name another queue to move to")
    total = source.counts().ready if limit is None else min(limit, source.counts().ready)
    moved = 0
    try:
        while moved < total:
            progress(moved, total)
            page = _page(source, total - moved)
            if not page:
                break
            try:
                _move(begin, target, page)
            except BaseException:
                for message in page:
                    with suppress(AnabranchError):  # the transaction has freed it, or its store has failed
                        message.release(delivered=False)
                raise
            moved += len(page)
    except AnabranchError as error:
        error.add_note(f"{moved} messages of {source.destination} were moved before this.")
        raise
    return moved


def _page(source: Queue, most: int) -> list[Message]:
    page: list[Message] = []
    size = 0
    while len(page) < min(most, PAGE_MESSAGES) and size < PAGE_BYTES:
        try:
            message = source.receive()
        except StoreFullError:  # no more can be leased
            if not page:
                raise
            break
        if message is None:
            break
        page.append(message)
        size += len(message.content)
    return page


def _move(begin: Callable[[], Transaction], target: Queue, page: list[Message]) -> None:
    with begin() as transaction:
        for message in page:
            transaction._carry(
                target.destination,
                Outgoing(
                    message.content, message.headers, message.message_id, message.priority, message.expires_at_ms,
                    message.persistent, requeued=True,
                ),
            )  # fmt: skip
        for message in page:  # last: what is given back by a transaction counts as delivered
            transaction.ack(message)
        transaction.commit()  # not at the end of the block: Ctrl-C just before that would leave it open
