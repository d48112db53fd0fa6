from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from celery import Celery

from .kombu import BACKENDS as TRANSPORTS
from .kombu import options_of, url_of
from .working import note, send_and_work

BACKENDS = dict.fromkeys(TRANSPORTS, 600)

if "BENCH_BACKEND" in os.environ:
    backend, directory = os.environ["BENCH_BACKEND"], Path(os.environ["BENCH_DIRECTORY"])
    app = Celery("bench", broker=url_of(backend, directory))
    app.conf.update(
        broker_transport_options=options_of(backend, directory), task_acks_late=True, task_ignore_result=True,
        broker_connection_retry_on_startup=True,
    )  # fmt: skip

    @app.task
    def add(first: int, second: int) -> int:
        note()
        return first + second


def run(backend: str, directory: Path, count: int) -> Iterator[tuple[str, float]]:
    options = ["-c", "2", "--without-gossip", "--without-mingle", "-l", "WARNING"]
    command = ["-m", "celery", "-A", "tests.bench.hosts.celery", "worker", *options]
    yield from send_and_work("celery", lambda: add.delay(1, 2), command, count)
