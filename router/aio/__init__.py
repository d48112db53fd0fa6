"""Anabranch for asyncio: a shared directory, whose calls are awaited.

    async with anabranch.aio.open("data") as router:
        queue = router.queue("orders")
        await queue.send(b"...")
        async for message in queue:
            async with message:
                ...

Names, meanings and errors are those of the blocking API, whose code this is. No await costs a thread. Whatever is
cancelled, no message is lost or doubled: a send, a settlement or a commit takes effect all the same, and a receive has
leased nothing.
"""

from .endpoints import AsyncMap, AsyncMessage, AsyncQueue, AsyncSubscriber, AsyncTopic, AsyncTransaction
from .routers import AsyncRouter, open

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
