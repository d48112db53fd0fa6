"""The journal store keeps the contract, under each of its sync policies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..journal.disk import JournalDisk
from .contract import StoreContract
from .disk import Disk


class TestJournalAlways(StoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Disk]:
        with JournalDisk(tmp_path, sync="always") as disk:
            yield disk


class TestJournalPeriodic(StoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Disk]:
        with JournalDisk(tmp_path, sync="periodic", sync_interval=0.02) as disk:
            yield disk


class TestJournalNever(StoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Disk]:
        with JournalDisk(tmp_path, sync="never") as disk:
            yield disk
