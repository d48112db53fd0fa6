"""Anabranch for asyncio: see router/aio/."""

from .router.aio import (
    AsyncMap,
    AsyncMessage,
    AsyncQueue,
    AsyncRouter,
    AsyncSubscriber,
    AsyncTopic,
    AsyncTransaction,
    open,
)

__all__ = [
    "AsyncMap",
    "AsyncMessage",
    "AsyncQueue",
    "AsyncRouter",
    "AsyncSubscriber",
    "AsyncTopic",
    "AsyncTransaction",
    "open",
]
