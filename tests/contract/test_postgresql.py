"""The SQL store keeps the contract in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..sql.disk import PostgresDisk, TableSets
from ..sql.server import PostgresServer
from .contract import EssentialContract, StoreContract
from .disk import Disk


@pytest.fixture(scope="module")
def sets(postgres: PostgresServer) -> Iterator[TableSets]:
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())
    yield sets
    sets.close()


class TestPostgresql(EssentialContract):
    # A server takes its time, and `make test` has the whole contract, and all places, in SQLite. What is written and
    # read here is so by the same statements: in what was not closed it is what reached the database.
    places = ("crashed",)

    @pytest.fixture
    def disk(self, tmp_path: Path, sets: TableSets) -> Iterator[Disk]:
        with PostgresDisk(tmp_path, sets) as disk:
            yield disk


@pytest.mark.campaign
@pytest.mark.weight(0)
class TestPostgresqlAll(StoreContract):
    @pytest.fixture
    def disk(self, tmp_path: Path, sets: TableSets) -> Iterator[Disk]:
        with PostgresDisk(tmp_path, sets) as disk:
            yield disk
