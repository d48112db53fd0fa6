"""Messages that must be there."""

from __future__ import annotations

from typing import TypeVar

import anabranch

T = TypeVar("T")


def take(source: anabranch.Queue[T] | anabranch.Subscriber[T], timeout: float | None = 0) -> anabranch.Message[T]:
    """Receive the next one."""
    message = source.receive(timeout)
    assert message is not None
    return message


def drained(source: anabranch.Queue[T] | anabranch.Subscriber[T]) -> list[T]:
    """Receive and ack until nothing is left; returns the bodies."""
    found = []
    while (message := source.receive()) is not None:
        found.append(message.body)
        message.ack()
    return found
