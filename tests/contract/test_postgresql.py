"""The SQL store keeps the contract in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..sql.disk import PostgresDisk
from .contract import StoreContract
from .disk import Disk


class TestPostgresql(StoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path, postgres_url: str) -> Iterator[Disk]:
        with PostgresDisk(tmp_path, postgres_url) as disk:
            yield disk
