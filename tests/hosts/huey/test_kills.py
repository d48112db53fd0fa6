"""A web process and `huey_consumer` share a directory, whose owner is a third: none of them may lose a task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huey import chord

TASKS = 150
PATIENCE = 300.0
"""Seconds after which a task is taken for lost, on the busiest machine."""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HUEY_DIRECTORY", str(tmp_path / "data"))
    from . import app

    yield app
    app.huey.storage.close()
    os.kill(owner(tmp_path), signal.SIGTERM)


def owner(tmp_path: Path) -> int:
    return int((tmp_path / "data/router.lock").read_text().split()[0])


def consumer(kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "huey.bin.huey_consumer", "tests.hosts.huey.app.huey", "-w", "4", "-k", kind, "-q"]
    return subprocess.Popen(command, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """With its workers, where those are processes."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_what_was_called_is_executed_whatever_is_killed(app: Any, tmp_path: Path) -> None:
    """Chains, chords and scheduled tasks among it: each result is there, and right."""
    calls: list[Callable[[int], tuple[Any, Any]]] = [
        lambda n: (app.double(n), 2 * n),
        lambda n: (app.double.schedule((n,), delay=0.1), 2 * n),
        lambda n: (app.huey.enqueue(app.double.s(n).then(app.add, 1)), [2 * n, 2 * n + 1]),
        lambda n: (app.huey.enqueue(chord([app.double.s(n + m) for m in range(3)], app.total.s())).callback, 6 * n + 6),
    ]
    called: list[tuple[Any, Any]] = []
    progress = threading.Semaphore(0)

    def web() -> None:
        for number in range(TASKS):
            called.append(calls[number % len(calls)](number))
            progress.release()

    thread = threading.Thread(target=web)
    running = consumer("thread")
    try:
        thread.start()
        ended = 0
        for number in range(6):
            for _ in range(TASKS // 8):
                progress.acquire()
                result, expected = called[ended]
                assert result.get(blocking=True, timeout=PATIENCE) == expected
                ended += 1
            if number % 2:
                os.kill(owner(tmp_path), signal.SIGKILL)
            else:
                kill(running)
                running = consumer("process" if number == 2 else "thread")
        thread.join()
        for result, expected in called[ended:]:
            assert result.get(blocking=True, timeout=PATIENCE) == expected
    finally:
        kill(running)
    assert not list(app.huey.storage.tasks.dead_letters())
    assert app.huey.scheduled_count() == 0
