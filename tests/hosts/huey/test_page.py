"""The program of docs/hosts.md."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ...pages import of_host


def test_what_is_called_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(of_host("huey"), names)
    huey = names["huey"]
    names["resize"]("cat.jpg")
    task = huey.dequeue()
    assert task.args == ("cat.jpg",)
    huey.execute(task)
    assert huey.pending_count() == 0
    huey.storage.close()
    os.kill(int(Path("data/router.lock").read_text().split()[0]), signal.SIGTERM)
