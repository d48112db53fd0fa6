"""Batches: messages of a queue that are received together, and sent elsewhere in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ...adapters.core.messages import Message, Outgoing
from ...policies.errors import AnabranchError, StoreFullError
from ...policies.names.destination import Destination
from ..api.queue import Queue
from ..api.transaction import Transaction


def received(queue: Queue[Any], most: int, size: int) -> list[Message]:
    """Receive the next messages, at most so many, and of about so many bytes; fewer where no more can be leased."""
    batch: list[Message] = []
    try:
        while len(batch) < most and size > 0:
            try:
                message = queue.receive()
            except StoreFullError:
                if not batch:
                    raise
                break
            if message is None:
                break
            batch.append(message)
            size -= len(message.content)
    except BaseException:
        give_back(batch)
        raise
    return batch


def give_back(messages: Iterable[Message]) -> None:
    """Release messages as if nobody had received them."""
    for message in messages:
        with suppress(AnabranchError):  # the transaction has freed it, or its store has failed
            message.release(delivered=False)


def send_on(
    begin: Callable[[], Transaction], sends: Iterable[tuple[Destination, Outgoing]], received: Iterable[Message[Any]]
) -> None:
    """Send messages that were some before, and ack these, in one transaction."""
    with begin() as transaction:
        for destination, message in sends:
            transaction._carry(destination, message)
        for one in received:  # last: what is given back by a transaction counts as delivered
            transaction.ack(one)
        transaction.commit()  # not at the end of the block: Ctrl-C just before that would leave it open
