"""A worker process, and when its tasks were executed: each writes the time into a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE = 600.0
DONE = Path(os.environ.get("BENCH_DIRECTORY", "."), "done")


def note() -> None:
    """Note that a task is executed."""
    with DONE.open("a") as file:
        file.write(f"{time.monotonic()}\n")


def timed(call: Callable[[], object], count: int) -> float:
    """Return how long so many calls take, in seconds."""
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - begun


def send_and_work(host: str, call: Callable[[], object], command: list[str], count: int) -> Iterator[tuple[str, float]]:
    """Call a task so often, once it was called once, then let a worker execute them all."""
    call()
    yield f"{host}-send", timed(call, count)
    with Path(os.environ["BENCH_DIRECTORY"], "log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + PATIENCE
    try:
        while not DONE.exists() or len(times := DONE.read_text().split()) <= count:
            if worker.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the worker of {host} did not do it:\n{Path(log.name).read_text()}")
            time.sleep(0.05)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    yield f"{host}-work", max(map(float, times)) - min(map(float, times))
