"""Tasks, for web processes that call them and `taskiq worker examples.taskiq.app:broker`, which executes them.

mkdir data
DIRECTORY=data taskiq worker examples.taskiq.app:broker
DIRECTORY=data python -m examples.taskiq.app carol
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from taskiq import SimpleRetryMiddleware

from .broker import AnabranchBroker, AnabranchResults

directory = Path(os.environ["DIRECTORY"])
broker = AnabranchBroker(directory).with_middlewares(SimpleRetryMiddleware())
broker = broker.with_result_backend(AnabranchResults(broker))


@broker.task("greet", retry_on_error=True, max_retries=3)
async def greet(name: str) -> str:
    with (directory / "greetings").open("a") as file:
        file.write(f"hello {name}\n")
    return f"greeted {name}"


async def main(name: str) -> None:
    async with broker:
        task = await greet.kiq(name)
        print((await task.wait_result(timeout=60)).return_value)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
