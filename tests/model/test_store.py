"""Each kind of store beside the model."""

from __future__ import annotations

import shutil
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from anabranch.adapters.core import Store
from anabranch.adapters.journal import JournalStore

from ..contract.disk import Disk
from ..journal.disk import JournalDisk, directory_of
from ..memory.disk import SMALL, MemoryDisk
from ..shares import Share
from ..sql.disk import PostgresDisk, SqliteDisk, TableSets
from ..sql.server import PostgresServer
from ..thirdparty.disk import OneFileDisk
from . import check
from .machine import StoreMachine


class JournalMachine(StoreMachine):
    """Its index deleted between, checkpointed at any time; the segments that are not needed go."""

    def new_disk(self, data: st.DataObject) -> Disk:
        options: dict[str, Any] = {
            "sync": data.draw(st.sampled_from(["always", "periodic", "never"])),
            "pool_files": data.draw(st.integers(0, 2)),
            "compact_live_percent": data.draw(st.sampled_from([50, 95])),
        }
        if data.draw(st.booleans()):
            options |= {"checkpoint_operations": 3, "checkpoint_interval": 0.01, "sync_interval": 0.01}
        return JournalDisk(self.path, **options)

    @rule()
    def checkpoint(self) -> None:
        cast(JournalStore, self.store).checkpoint()

    @rule()
    def compact(self) -> None:
        cast(JournalStore, self.store).compact()

    def reopened(self, data: st.DataObject) -> Store:
        self.store.close()
        if data.draw(st.booleans(), "without index"):
            (directory_of(self.store) / "index.mdb").unlink()
        return self.disk.reopen(self.store)

    def crashed(self, data: st.DataObject) -> Store:
        disk = cast(JournalDisk, self.disk)
        path = disk.copy(self.store)
        self.store.close()
        shutil.rmtree(directory_of(self.store))
        if data.draw(st.booleans(), "without index"):
            (path / "index.mdb").unlink()
        return disk.open(path)

    @invariant()
    def few_segments(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats()
            kept = stats.messages + len(self.branches)
            assert stats.segments["active"] + stats.segments["retained"] <= 2 + kept + 40


class MemoryMachine(StoreMachine):
    """With all in memory, or with next to nothing, where what is prepared fits all the same."""

    size_max = 2_000

    def new_disk(self, data: st.DataObject) -> Disk:
        return MemoryDisk(self.path, **(SMALL if data.draw(st.booleans(), "swapping") else {}))


class SqliteMachine(StoreMachine):
    def new_disk(self, data: st.DataObject) -> Disk:
        return SqliteDisk(self.path)


class OneFileMachine(StoreMachine):
    def new_disk(self, data: st.DataObject) -> Disk:
        return OneFileDisk(self.path)


@pytest.mark.parametrize(
    ("machine", "few", "many"),
    [(JournalMachine, 40, 1600), (MemoryMachine, 24, 960), (SqliteMachine, 8, 240), (OneFileMachine, 16, 640)],
)
def test_a_store_does_what_the_model_does(machine: type[StoreMachine], few: int, many: int, share: Share) -> None:
    check(machine, share, few, many)


def test_postgresql_does_what_the_model_does(postgres: PostgresServer, share: Share) -> None:
    """A few, since a server takes its time."""
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())

    class PostgresMachine(StoreMachine):
        def new_disk(self, data: st.DataObject) -> Disk:
            return PostgresDisk(self.path, sets)

    try:
        check(PostgresMachine, share, 4, 80)
    finally:
        sets.close()
