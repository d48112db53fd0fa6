"""Fixtures of the router's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.wal import log
from anabranch.router.transactions import decision_cleanup, resolver

from ..model import FAST
from .disk import Faults, config


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: hundreds of stores are made here, and how long a disk takes is not what is looked at."""
    with tempfile.TemporaryDirectory(prefix="anabranch-router-", dir=FAST) as name:
        path = Path(name) / "test"  # what a test puts beside it goes with it
        path.mkdir()
        yield path


@pytest.fixture
def cross(tmp_path: Path) -> Iterator[anabranch.Router]:
    """A router over the stores of disk.py."""
    with anabranch.open(config(tmp_path / "data")) as router:
        yield router


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """A disk that fails where it is told to."""
    return Faults(monkeypatch)


@pytest.fixture
def synced(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> anabranch.Config:
    """Prepares and decisions wait for the disk, nothing else is synced or forgotten in between."""
    monkeypatch.setattr(resolver, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 3600)
    monkeypatch.setattr(log, "IDLE_SECONDS", 3600)
    return config(tmp_path / "data", sync=anabranch.Sync.ALWAYS)
