"""Each kind of store beside the model."""

from __future__ import annotations

import shutil
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from anabranch.adapters.base import Store
from anabranch.adapters.journal import JournalStore

from ..contract.disk import Disk
from ..journal.disk import JournalDisk, directory_of
from ..memory.disk import SMALL, MemoryDisk
from ..sql.disk import PostgresDisk, SqliteDisk, TableSets
from ..sql.server import PostgresServer
from ..thirdparty.disk import OneFileDisk
from . import SETTINGS
from .machine import StoreMachine


def part(share: int) -> settings:
    """A share, in percent, of the examples."""
    return settings(SETTINGS, max_examples=max(1, SETTINGS.max_examples * share // 100))


class JournalMachine(StoreMachine):
    """Its index deleted between, checkpointed at any time; the segments that are not needed go."""

    def new_disk(self, data: st.DataObject) -> Disk:
        options: dict[str, Any] = {
            "sync": data.draw(st.sampled_from(["always", "periodic", "never"])),
            "pool_files": data.draw(st.integers(0, 2)),
        }
        if data.draw(st.booleans()):
            options |= {"checkpoint_operations": 3, "checkpoint_interval": 0.01, "sync_interval": 0.01}
        return JournalDisk(self.path, **options)

    @rule()
    def checkpoint(self) -> None:
        cast(JournalStore, self.store).checkpoint()

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


TestJournal = JournalMachine.TestCase
TestJournal.settings = SETTINGS
TestMemory = MemoryMachine.TestCase
TestMemory.settings = part(60)
TestSqlite = SqliteMachine.TestCase
TestSqlite.settings = part(15)
TestThirdParty = OneFileMachine.TestCase
TestThirdParty.settings = part(40)


def test_postgresql(postgres: PostgresServer) -> None:
    """A few, since a server takes its time."""
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())

    class PostgresMachine(StoreMachine):
        def new_disk(self, data: st.DataObject) -> Disk:
            return PostgresDisk(self.path, sets)

    try:
        run_state_machine_as_test(PostgresMachine, settings=part(5))
    finally:
        sets.close()
