"""A worker on asyncio: many queues, no thread for each, and an event loop that never waits for the disk.

    python examples/event_loop.py [DIRECTORY]

A listener is called on a thread of the library and hands the message to the loop; its credit bounds how many of its
queue are in hand. The loop settles them by token, and awaits Futures. In the end each message is settled, or free.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import anabranch
from anabranch import Config, JournalOptions, Listener, Message, Settlement, StoreConfig

JOBS, QUEUES = 300, 30
IN_HAND = 4
"""Messages of one queue that are worked on at once."""


class Worker:
    """Works on the messages of some queues, on the event loop that made it."""

    def __init__(self, router: anabranch.Router) -> None:
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[str, Listener] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.settled = 0
        self.all_settled = asyncio.Event()

    async def listen(self, name: str) -> None:
        def on_message(message: Message) -> None:  # on a thread of the library, which it must not hold up
            self._loop.call_soon_threadsafe(self._begin, name, message)

        # It opens the queue's store, which may take its time. Nothing is wanted before we know the listener.
        listener = await asyncio.wrap_future(self._router.queue(name).listen_nowait(on_message, 0))
        self._listeners[name] = listener
        listener.add_credit(IN_HAND)

    def _begin(self, name: str, message: Message) -> None:
        task = self._loop.create_task(self._work(name, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, name: str, message: Message) -> None:
        token = message.token  # all that has to be kept of it to settle it, here or in another thread
        await asyncio.sleep(0)  # the work itself
        how = Settlement.REJECT if message.body.endswith(b"13") else Settlement.ACK
        (error,) = await asyncio.wrap_future(self._router.settle_nowait(token, how, reason="nobody makes thirteen"))
        if error is not None:  # its store has failed, say: the message is free, and comes again
            print(f"{message!r} could not be settled: {error}")
        self._listeners[name].add_credit(1)
        self.settled += 1
        if self.settled == JOBS:
            self.all_settled.set()

    async def close(self) -> None:
        """Take no more, and end what has begun. What nobody was called with is free for others at once."""
        for listener in self._listeners.values():
            while listener.close():  # its callback runs just now
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # what the last callbacks have handed to the loop begins
        while self._tasks:
            await asyncio.gather(*self._tasks)


async def work(router: anabranch.Router) -> None:
    worker = Worker(router)
    names = [f"jobs.{n}" for n in range(QUEUES)]
    for name in names[: QUEUES // 2]:
        await worker.listen(name)
    sent = [router.queue(names[n % QUEUES]).send_nowait(b"job %d" % n) for n in range(JOBS)]
    await asyncio.gather(*map(asyncio.wrap_future, sent))  # each is as durable now as its store's policy says
    for name in names[QUEUES // 2 :]:
        await worker.listen(name)
    await asyncio.wait_for(worker.all_settled.wait(), timeout=60)
    await worker.close()


def main(directory: str) -> None:
    options = JournalOptions(dead_letter="dead")
    config = Config(directory, [StoreConfig("jobs", ["jobs.>"], journal=options), StoreConfig("rest", [">"])])
    with anabranch.open(config) as router:
        asyncio.run(work(router))
        left = sum(router.queue(f"jobs.{n}").depth() for n in range(QUEUES))
        print(f"{JOBS} jobs in {QUEUES} queues: {left} left")
        for letter in sorted(router.queue("dead").browse(), key=lambda letter: letter.body):
            print(f"dead: {letter.body.decode()} ({letter.headers['dead_letter_reason']})")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
