"""What every store must do, done by a client of its owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store

from ..contract.contract import EssentialContract, StoreContract, VolatileStoreContract
from ..contract.disk import Disk
from ..contract.expiring import Clock, going_by
from ..contract.leasing import LONG
from ..journal import disk as journal
from ..journal.disk import JournalDisk
from ..memory import disk as memory
from ..memory.disk import MemoryDisk
from ..sql import disk as sql
from ..sql.disk import SqliteDisk
from .disk import SharedDisk
from .not_remote import OF_STORES, leave_out
from .owner import Owner


class OwnersClock(Clock):
    """The wall clock of this process, and of the owner's."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in ("offset_ms", "_began_ns") and "_began_ns" in vars(self):
            self._owner.ask("set_time", self.time_ns())


class OwnersLasting:
    """The clock by which leases run out, of the owner."""

    def __init__(self, owner: Owner) -> None:
        self._owner, self.ahead = owner, 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "ahead":
            self._owner.ask("set_ahead", value)

    def go_on(self, store: Store, seconds: float = 2 * LONG) -> None:
        """So much time passes, and the store looks what has run out."""
        self.ahead += seconds
        self._owner.ask("look")


class Shared:
    """What stores of all kinds need."""

    @pytest.fixture
    def clock(self, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
        yield from going_by(OwnersClock(owner), monkeypatch)
        owner.ask("set_time", None)

    @pytest.fixture
    def lasting(self, owner: Owner) -> Iterator[OwnersLasting]:
        yield OwnersLasting(owner)
        owner.ask("set_ahead", 0.0)


def disk_of(owner: Owner, path: Path, like: type[Disk], kind: str, **options: Any) -> Iterator[Disk]:
    with SharedDisk(owner, path, like, kind, **options) as disk:
        yield disk


class TestJournal(Shared, StoreContract):
    @pytest.fixture
    def disk(self, owner: Owner, tmp_path: Path) -> Iterator[Disk]:
        yield from disk_of(owner, tmp_path, JournalDisk, "journal", **journal.SMALL)


@pytest.mark.campaign  # whether it waits for the disk is the owner's alone, as that it swaps is
@pytest.mark.weight(0)
class TestJournalPeriodic(Shared, EssentialContract):
    @pytest.fixture
    def disk(self, owner: Owner, tmp_path: Path) -> Iterator[Disk]:
        given = {**journal.SMALL, "sync": "periodic", "sync_interval": 0.02}
        yield from disk_of(owner, tmp_path, JournalDisk, "journal", **given)


@pytest.mark.campaign  # what a client does is the same for each kind
@pytest.mark.weight(0)
class TestSqlite(Shared, StoreContract):
    @pytest.fixture
    def disk(self, owner: Owner, tmp_path: Path) -> Iterator[Disk]:
        yield from disk_of(owner, tmp_path, SqliteDisk, "sql", **sql.SMALL)


@pytest.mark.campaign
@pytest.mark.weight(0)
class TestMemory(Shared, VolatileStoreContract):
    @pytest.fixture
    def disk(self, owner: Owner, tmp_path: Path) -> Iterator[Disk]:
        yield from disk_of(owner, tmp_path, MemoryDisk, "memory")


@pytest.mark.campaign
@pytest.mark.weight(0)
class TestMemorySwapping(Shared, VolatileStoreContract):
    @pytest.fixture
    def disk(self, owner: Owner, tmp_path: Path) -> Iterator[Disk]:
        yield from disk_of(owner, tmp_path, MemoryDisk, "memory", **memory.SMALL)


for _contract in (TestJournal, TestJournalPeriodic, TestSqlite, TestMemory, TestMemorySwapping):
    leave_out(_contract, OF_STORES)
