"""Threads that execute tasks until they are told to end."""

from __future__ import annotations

import logging
import signal
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final

from django.db import close_old_connections
from django.utils.crypto import get_random_string

import anabranch
from anabranch.worker import SIGNALS

from .backend import AnabranchBackend

log = logging.getLogger(__name__)

_PATIENCE: Final = 1.0
"""Seconds that a thread waits for a task before it looks whether it is to end."""


def work(backend: AnabranchBackend, queue: str | None = None, threads: int = 1) -> None:
    """Execute the tasks of one queue, or of all queues of a backend, until the process is told to end. In the main
    thread. SIGTERM and Ctrl-C finish what is in hand; a second one gives it back, and does not wait.

    Raises AnabranchError where the store fails, once what is in hand is done.
    """
    router, stopping = backend.router, Event()
    heard: SimpleQueue[int | BaseException | None] = SimpleQueue()
    """The numbers of signals, and how a thread has ended."""
    in_hand: set[anabranch.Message] = set()
    source: Any = backend.queue(queue).destination if queue is not None else f"queue://django.{backend.alias}.queue.>"

    def run() -> None:
        end: BaseException | None = None
        worker_id = get_random_string(32)
        try:
            while not stopping.is_set():
                message = router.receive(source, _PATIENCE)
                if message is None:
                    continue
                in_hand.add(message)
                close_old_connections()
                try:
                    backend.run(message, worker_id)
                except Exception as error:
                    log.exception("%r was given back, since its outcome cannot be written", message)
                    with suppress(anabranch.AnabranchError):
                        message.release(reason=error)
                finally:
                    close_old_connections()
                    in_hand.discard(message)
        except BaseException as error:
            end = error
        heard.put(end)

    before = {number: signal.signal(number, lambda number, _: heard.put(number)) for number in SIGNALS}
    try:
        for number in range(threads):
            Thread(target=run, name=f"anabranch-worker-{number}", daemon=True).start()
        left, told, failure = threads, 0, None
        while left:
            what = heard.get()
            stopping.set()
            if isinstance(what, int):
                told += 1
                if told > 1:
                    for message in list(in_hand):
                        with suppress(anabranch.AnabranchError):  # it was just settled
                            message.release(delivered=False)
                    return
                log.info("what is in hand is finished; a second signal gives it back")
            else:
                left, failure = left - 1, failure or what
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failure is not None:
        raise failure
