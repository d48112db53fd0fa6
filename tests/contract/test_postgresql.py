"""The SQL store keeps the contract in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..sql.disk import PostgresDisk, TableSets
from ..sql.server import PostgresServer
from .contract import StoreContract
from .disk import Disk


@pytest.fixture(scope="module")
def sets(postgres: PostgresServer) -> Iterator[TableSets]:
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())
    yield sets
    sets.close()


class TestPostgresql(StoreContract):
    # A server takes its time. What a closed store is opened with is read by the same statements after a crash, and
    # written by the same as to SQLite, where `make test` has both.
    places = ("here", "crashed", pytest.param("closed", marks=[pytest.mark.campaign, pytest.mark.weight(0)]))

    @pytest.fixture
    def disk(self, tmp_path: Path, sets: TableSets) -> Iterator[Disk]:
        with PostgresDisk(tmp_path, sets) as disk:
            yield disk
