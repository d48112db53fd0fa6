"""The SQL store keeps the contract's part about branches with PostgreSQL's own prepared transactions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core import Store

from ..sql.disk import NativeDisk, TableSets
from ..sql.server import PostgresServer
from .disk import Disk
from .preparing import PreparingContract


@pytest.fixture(scope="module")
def sets(postgres: PostgresServer) -> Iterator[TableSets]:
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())
    yield sets
    sets.close()


class TestNative(PreparingContract):
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "place" in metafunc.fixturenames:
            metafunc.parametrize("place", ["crashed"])

    @pytest.fixture
    def disk(self, tmp_path: Path, sets: TableSets) -> Iterator[Disk]:
        with NativeDisk(tmp_path, sets) as disk:
            yield disk

    @pytest.fixture
    def store(self, disk: Disk) -> Store:
        return disk.create()
