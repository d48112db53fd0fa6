"""The Celery application that the tests run, in workers and beside them: the directory is in ANABRANCH_TEST_URL."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery, signals

import anabranch.hosts.kombu  # noqa: F401  it makes the URL known

URL = os.environ["ANABRANCH_TEST_URL"]
app = Celery("tasks", broker=URL, backend=URL)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=int(os.environ.get("ANABRANCH_TEST_PREFETCH", "4")),
    broker_connection_retry_on_startup=True,
    task_queue_max_priority=9,
    result_chord_join_timeout=60,
)


def note(path: str, text: object) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@app.task
def add(x: Any, y: Any) -> Any:
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def write(path: str, text: object) -> object:
    note(path, text)
    return text


@app.task(bind=True, max_retries=3)
def twice_wrong(self: Any, path: str) -> int:
    note(path, self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@app.task
def now() -> float:
    return time.time()


@app.task
def wait_for(path: str) -> int:
    while not Path(path).exists():
        time.sleep(0.01)
    return os.getpid()


@app.task
def large(size: int) -> str:
    return "x" * size


@app.task
def part(path: str, number: int, dies: bool) -> int:
    note(path, number)
    return number


@app.task
def body(numbers: list[int], path: str) -> int:
    note(path, "body")
    return sum(numbers)


@signals.task_postrun.connect
def die_once(task: Any, args: Any, **_: Any) -> None:
    """Die once all is done and counted, before the task is acked; the worker, too, which would know that it is done."""
    if task.name == part.name and args[2] and Path(args[0]).read_text().split().count(str(args[1])) == 1:
        os.killpg(0, signal.SIGKILL)
