"""Fixtures of the tests of transactions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch

from .disk import Faults, config


@pytest.fixture
def cross(tmp_path: Path) -> Iterator[anabranch.Router]:
    """A router over the stores of disk.py."""
    with anabranch.open(config(tmp_path / "data")) as router:
        yield router


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Before the stores are opened: they look the calls up then."""
    return Faults(monkeypatch)
