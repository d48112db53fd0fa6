"""The program of docs/hosts.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery.contrib.testing.worker import start_worker

from ...pages import of_host

PATIENCE = 120.0


def test_what_is_called_is_executed(directory: Path) -> None:
    names: dict[str, Any] = {}
    exec(of_host("kombu", {"/srv/tasks": str(directory)}), names)
    with start_worker(names["app"], perform_ping_check=False):
        assert names["resize"].delay("cat.jpg").get(timeout=PATIENCE) is None
