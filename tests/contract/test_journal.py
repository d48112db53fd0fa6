"""The journal store keeps the contract, under each of its sync policies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..journal.disk import JournalDisk
from ..model import FAST
from .contract import EssentialContract, StoreContract
from .disk import Disk


class TestJournalAlways(StoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Disk]:
        with JournalDisk(tmp_path, sync="always") as disk:
            yield disk


def quick(**options: Any) -> Iterator[Disk]:
    """In memory: how long a disk takes is seen above."""
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-contract-", dir=FAST) as path,
        JournalDisk(Path(path), **options) as disk,
    ):
        yield disk


class TestJournalPeriodic(EssentialContract):
    @pytest.fixture
    def disk(self) -> Iterator[Disk]:
        yield from quick(sync="periodic", sync_interval=0.02)


class TestJournalNever(EssentialContract):
    @pytest.fixture
    def disk(self) -> Iterator[Disk]:
        yield from quick(sync="never")
