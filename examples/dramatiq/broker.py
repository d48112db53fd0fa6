"""A broker for Dramatiq over a directory that web processes and workers share.

An actor's messages are leased while they are executed: those of a worker that is killed are executed again. Delays and
retries are the store's own. What has failed for good is in the store's `dead_letter`, if it has one.
"""

from __future__ import annotations

import time
from typing import Any

import dramatiq
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.errors import DecodeError, QueueJoinTimeout, QueueNotFound

import anabranch


class AnabranchBroker(Broker):  # type: ignore[misc]
    def __init__(self, router: anabranch.Router, middleware: list[Any] | None = None) -> None:
        super().__init__(middleware)
        self.router = router

    def _queue(self, name: str) -> anabranch.Queue:
        if name not in self.queues:
            raise QueueNotFound(name)
        queue: anabranch.Queue = self.queues[name]
        return queue

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = self.router.queue(f"dramatiq.{queue_name}")
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        queue = self._queue(message.queue_name)
        self.emit_before("enqueue", message, delay)
        queue.send(message.encode(), deliver_in=delay and max(delay, 0) / 1000)
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> Consumer:
        return LeasingConsumer(self._queue(queue_name), prefetch, timeout / 1000)

    def flush(self, queue_name: str) -> None:
        self._queue(queue_name).purge()

    def flush_all(self) -> None:
        for queue in self.queues.values():
            queue.purge()

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        queue, until = self._queue(queue_name), None if timeout is None else time.monotonic() + timeout / 1000
        while queue.depth():
            if until is not None and time.monotonic() > until:
                raise QueueJoinTimeout(queue_name)
            time.sleep(0.01)


class LeasingConsumer(Consumer):  # type: ignore[misc]
    def __init__(self, queue: anabranch.Queue, prefetch: int, timeout: float) -> None:
        self._queue, self._prefetch, self._timeout = queue, prefetch, timeout
        self._in_hand: dict[int, tuple[MessageProxy, anabranch.Message]] = {}

    def __next__(self) -> MessageProxy | None:
        if len(self._in_hand) >= self._prefetch:
            time.sleep(min(self._timeout, 0.01))
            return None
        leased = self._queue.receive(self._timeout)
        if leased is None:
            return None
        try:
            proxy = MessageProxy(dramatiq.Message.decode(leased.body))
        except DecodeError as error:  # or it would come again, before all others
            leased.reject(error)
            raise
        self._in_hand[id(proxy)] = proxy, leased
        return proxy

    def _taken(self, message: MessageProxy) -> anabranch.Message:
        return self._in_hand.pop(id(message))[1]

    def ack(self, message: MessageProxy) -> None:
        self._taken(message).ack()

    def nack(self, message: MessageProxy) -> None:
        self._taken(message).reject(repr(message._exception))

    def requeue(self, messages: Any) -> None:
        for message in messages:
            self._taken(message).release(delivered=False)
