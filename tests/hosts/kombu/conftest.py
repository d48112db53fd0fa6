from __future__ import annotations

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("env", "flaky"):
        config.addinivalue_line("markers", f"{mark}: of kombu's own tests")


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all tests: to start an owner takes longer than most of them."""
    return tmp_path_factory.mktemp("data")
