"""Threads that execute tasks until they are told to end."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from django.db import close_old_connections
from django.utils.crypto import get_random_string

import anabranch.worker

from .backend import AnabranchBackend


def work(backend: AnabranchBackend, queue: str | None = None, threads: int = 1) -> None:
    """Execute the tasks of one queue, or of all queues of a backend, until the process is told to end. In the main
    thread. SIGTERM and Ctrl-C finish what is in hand; a second one gives it back, and does not wait.

    Raises AnabranchError where the router has failed, once what is in hand is done.
    """
    worker_id = get_random_string(32)
    queues = backend.queue(queue).destination if queue is not None else f"queue://django.{backend.alias}.queue.>"
    source: Any = SimpleNamespace(listen=partial(backend.router.listen, queues))

    def execute(message: anabranch.Message[Any]) -> None:
        close_old_connections()
        try:
            backend.run(message, worker_id)
        finally:
            close_old_connections()

    anabranch.worker.run(source, execute, threads)
