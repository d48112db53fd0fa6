"""The SQL store keeps the contract in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..sql.disk import PostgresDisk, TableSets, table_sets
from .contract import EssentialContract, StoreContract
from .disk import Disk

sets = pytest.fixture(scope="module")(table_sets)


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
