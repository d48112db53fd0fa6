"""A broker for Taskiq, and its results, over a directory that web processes and workers share.

    broker = AnabranchBroker("data")
    broker = broker.with_result_backend(AnabranchResults(broker))

A task's message is leased while it is executed: those of a worker that is killed are executed again. The label `delay`
says in how many seconds a task is due. Its `priority` counts where the store of the queue has `priorities: true`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from os import PathLike
from typing import Any

from taskiq import AckableMessage, AsyncBroker, AsyncResultBackend, BrokerMessage, TaskiqResult

import anabranch.aio


class AnabranchBroker(AsyncBroker):
    def __init__(self, directory: str | PathLike[str], name: str = "taskiq") -> None:
        super().__init__()
        self._directory, self._name = directory, name

    async def startup(self) -> None:
        self.router = await anabranch.aio.open(self._directory)
        self._tasks = self.router.queue(self._name)
        await super().startup()

    async def shutdown(self) -> None:
        await super().shutdown()
        await self.router.close()

    async def kick(self, message: BrokerMessage) -> None:
        delay, priority = float(message.labels.get("delay", 0)), int(message.labels.get("priority", 4))
        await self._tasks.send(message.message, deliver_in=delay, priority=priority)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        async for message in self._tasks:
            try:
                self.formatter.loads(message.body).parse_labels()
            except Exception as error:  # Taskiq would log it and never ack it: it came again and again
                await message.reject(error)
            else:
                yield AckableMessage(data=message.body, ack=message.ack)


class AnabranchResults(AsyncResultBackend[Any]):
    """Results, in a map beside the broker's queue, for `ttl` seconds."""

    def __init__(self, broker: AnabranchBroker, name: str = "taskiq.results", ttl: float = 86400) -> None:
        self._broker, self._name, self._ttl = broker, name, ttl

    async def startup(self) -> None:
        self._results = self._broker.router.map(self._name)

    async def set_result(self, task_id: str, result: TaskiqResult[Any]) -> None:
        await self._results.put(task_id, result.model_dump_json().encode(), ttl=self._ttl)

    async def is_result_ready(self, task_id: str) -> bool:
        return await self._results.get(task_id) is not None

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[Any]:
        return TaskiqResult.model_validate_json(await self._results.get(task_id))
