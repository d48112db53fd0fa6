from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kombu import Connection, Exchange, Queue

import anabranch.hosts.kombu  # noqa: F401  it makes the URL known

from .working import timed

BACKENDS = {"anabranch": 1000, "filesystem no sync": 1000, "redis always": 500}


def url_of(backend: str, directory: Path) -> str:
    match backend:
        case "anabranch":
            (directory / "data").mkdir(exist_ok=True)
            return f"anabranch://{directory}/data"
        case "filesystem no sync":
            return "filesystem://"
    return os.environ["BENCH_REDIS"]


def options_of(backend: str, directory: Path) -> dict[str, Any]:
    if "filesystem" not in backend:
        return {}
    folders = {name: directory / name for name in ("messages", "control")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    messages = str(folders["messages"])
    return {"data_folder_in": messages, "data_folder_out": messages, "control_folder": str(folders["control"])}


def run(backend: str, directory: Path, count: int) -> Iterator[tuple[str, float]]:
    queue = Queue("bench", Exchange("bench", "direct"), "bench")
    with Connection(url_of(backend, directory), transport_options=options_of(backend, directory)) as connection:
        producer, consumed = connection.Producer(), 0

        def publish() -> None:
            producer.publish({"number": 1}, exchange=queue.exchange, routing_key="bench")

        def consume(body: Any, message: Any) -> None:
            nonlocal consumed
            message.ack()
            consumed += 1

        queue(producer.channel).declare()
        publish()
        yield "kombu-publish", timed(publish, count)
        with connection.Consumer([queue], callbacks=[consume]) as consumer:
            consumer.qos(prefetch_count=50)

            def drain() -> None:
                while consumed <= count:
                    connection.drain_events(timeout=60)

            yield "kombu-consume", timed(drain, 1)
