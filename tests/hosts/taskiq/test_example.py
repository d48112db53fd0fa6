"""examples/taskiq: what a web process calls is executed, and its result told, though the workers are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CALLS = 60
PATIENCE = 300.0


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DIRECTORY", str(tmp_path))
    from examples.taskiq import app

    return app


def start() -> subprocess.Popen[bytes]:
    options = ["--workers=2", "--max-async-tasks=2", "--log-level=WARNING", "--no-configure-logging"]
    command = [sys.executable, "-m", "taskiq", "worker", "examples.taskiq.app:broker", *options]
    return subprocess.Popen(command, start_new_session=True)


def kill(worker: subprocess.Popen[bytes]) -> None:
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


async def use(app: Any, directory: Path) -> None:
    out = directory / "greetings"
    async with app.broker, asyncio.timeout(PATIENCE):
        called = [
            await app.greet.kicker().with_labels(**({} if number % 3 else {"delay": 0.1})).kiq(str(number))
            for number in range(CALLS)
        ]
        worker = start()
        try:
            for number in range(2):
                while not out.exists() or len(set(out.read_text().splitlines())) < CALLS * (number + 1) // 4:
                    await asyncio.sleep(0.01)
                kill(worker)
                worker = start()
            results = [await task.wait_result(check_interval=0.01) for task in called]
            assert [result.return_value for result in results] == [f"greeted {number}" for number in range(CALLS)]
            wrong = await app.broker.find_task("greet").kiq(("not", "a", "name"), 1)
            assert (await wrong.wait_result(check_interval=0.01)).is_err  # for the last time: it was retried
            await app.broker.router.queue("taskiq").send(b"no task")
            await app.broker.router.queue("taskiq").wait_empty()
        finally:
            kill(worker)


def test_what_was_called_is_executed_whoever_is_killed(app: Any, tmp_path: Path) -> None:
    asyncio.run(use(app, tmp_path))
    assert set((tmp_path / "greetings").read_text().splitlines()) == {f"hello {number}" for number in range(CALLS)}
    os.kill(int((tmp_path / "router.lock").read_text().split()[0]), signal.SIGTERM)
