"""The SQL store keeps the contract in SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..sql.disk import SqliteDisk
from .contract import StoreContract
from .disk import Disk


class TestSqlite(StoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Disk]:
        with SqliteDisk(tmp_path) as disk:
            yield disk
