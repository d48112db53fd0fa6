"""examples/dramatiq: what a web process calls is executed, though the workers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CALLS = 60
PATIENCE = 300.0


def test_what_was_called_is_executed_whoever_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIRECTORY", str(tmp_path))
    from examples.dramatiq import app

    command = [sys.executable, "-m", "dramatiq", "examples.dramatiq.app", "--processes=2", "--threads=2"]
    expected = {f"hello {number}" for number in range(CALLS)}
    out, until = tmp_path / "greetings", time.monotonic() + PATIENCE

    def greeted() -> set[str]:
        return set(out.read_text().splitlines()) if out.exists() else set()

    for number in range(CALLS):
        app.greet.send_with_options(args=(str(number),), delay=100 if number % 3 == 0 else None)
    app.router.queue("dramatiq.default").send(b"no message of Dramatiq's", priority=9)
    running = subprocess.Popen(command, start_new_session=True)
    try:
        for kill in range(2):
            while len(greeted()) < CALLS * (kill + 1) // 4:
                assert time.monotonic() < until
                time.sleep(0.01)
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            running = subprocess.Popen(command, start_new_session=True)
        while greeted() != expected or app.router.queue("dramatiq.default").depth():
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        app.router.close()
        os.kill(int((tmp_path / "router.lock").read_text().split()[0]), signal.SIGTERM)
