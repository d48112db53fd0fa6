"""Log records that outlive their process: `logging`'s own QueueHandler and QueueListener over a queue of ours.

    python examples/log_records.py [DIRECTORY]

A call of a logger waits for no disk, and none of its handlers holds it up. A record is acked once the handlers have had
it. Those that they have not had when the process is killed are there when the next one starts: here a child is killed
in the middle. A record may be handled twice. Under `sync: periodic` a power failure may cost the last second.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import Empty
from threading import Event, local
from typing import Any

import anabranch
from anabranch import Config, JournalOptions, StoreConfig

RECORDS = 1000


class DurableQueue:
    """What `logging` asks of a queue."""

    def __init__(self, queue: anabranch.Queue) -> None:
        self._queue, self._hand = queue, local()
        self._last: Future[Any] | None = None

    def put_nowait(self, record: logging.LogRecord | None) -> None:  # None: the listener is told to stop
        # QueueHandler has made its message a text, and taken out the exception's traceback.
        body = json.dumps(record and vars(record), default=str).encode()
        self._last = self._queue.send_nowait(body, persistent=record is not None)  # it is for this listener alone

    put = put_nowait

    def get(self, block: bool = True, timeout: float | None = None) -> logging.LogRecord | None:
        message = self._queue.receive(timeout if block else 0)
        if message is None:
            raise Empty
        self._hand.message = message
        values = json.loads(message.body)
        return logging.makeLogRecord(values) if values is not None else None

    def task_done(self) -> None:
        self._hand.message.ack_nowait()

    def flush(self) -> None:
        """Wait until all that was logged has been written."""
        if self._last is not None:
            self._last.result()


class HangingHandler(logging.FileHandler):
    """A file that takes 300 records, and no more."""

    taken = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.taken += 1
        if self.taken > 300:
            Event().wait()
        super().emit(record)


def opened(directory: str) -> anabranch.Router:
    options = JournalOptions(sync=anabranch.Sync.PERIODIC)
    return anabranch.open(Config(directory, [StoreConfig("log", [">"], journal=options)]))


def die(directory: str) -> None:
    """Log, with a handler that hangs, and be killed."""
    queue = DurableQueue(opened(directory).queue("log"))
    log = logging.getLogger("shop")
    log.setLevel(logging.INFO)
    log.addHandler(QueueHandler(queue))
    QueueListener(queue, HangingHandler(Path(directory, "shop.log"))).start()
    for number in range(RECORDS):
        log.info("sold %d", number)
    queue.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str) -> None:
    child = subprocess.run([sys.executable, __file__, directory, "die"])
    path = Path(directory, "shop.log")
    with opened(directory) as router:
        queue, file = DurableQueue(router.queue("log")), logging.FileHandler(path)
        with suppress(Empty):
            while (record := queue.get(block=False)) is not None:
                file.handle(record)
                queue.task_done()
        file.close()
    print(f"killed: {child.returncode == -signal.SIGKILL}")
    missing = {f"sold {number}" for number in range(RECORDS)} - set(path.read_text().splitlines())
    print(f"{RECORDS} records logged, {len(missing)} missing")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        die(sys.argv[1])
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
