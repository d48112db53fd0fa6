"""The memory store keeps the contract of volatile stores, with all in memory and with next to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..memory.disk import SMALL, MemoryDisk
from .contract import VolatileStoreContract
from .disk import Disk


class TestMemory(VolatileStoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Disk]:
        with MemoryDisk(tmp_path) as disk:
            yield disk


class TestMemorySwapping(VolatileStoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Disk]:
        with MemoryDisk(tmp_path, **SMALL) as disk:
            yield disk
