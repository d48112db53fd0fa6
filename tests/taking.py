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
