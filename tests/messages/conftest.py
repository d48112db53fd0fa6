"""The router's fixtures, and a router of each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch

from ..router.conftest import cross, faults, synced, tmp_path  # noqa: F401
from ..sharing.fixtures import owned  # noqa: F401
from ..sharing.fixtures import run_shared as pytest_generate_tests  # noqa: F401
from .test_hosting import KINDS, config


@pytest.fixture(params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:  # noqa: F811
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[anabranch.Router]:  # noqa: F811
    """For what a kind of store has no part in."""
    with anabranch.open(config(tmp_path / "data", "memory")) as router:
        yield router
