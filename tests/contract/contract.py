"""All of it. See the package's docstring."""

from __future__ import annotations

from typing import ClassVar

import pytest

from anabranch.adapters.core import Store

from .ages import AgesContract
from .changing import ChangingContract
from .counting import CountingContract
from .crediting import CreditingContract
from .deliveries import DeliveriesContract
from .disk import PLACES, Disk
from .expiring import ExpiringContract
from .grouping import GroupingContract
from .hosting import HostingContract
from .keyed import KeyedContract
from .large import LargeContract
from .leasing import LeasingContract
from .lifecycle import LifecycleContract
from .limits import LimitsContract
from .marking import MarkingContract
from .newest import NewestContract
from .nonpersistent import NonpersistentContract
from .ordering import OrderingContract
from .preparing import PreparingContract
from .receiving import ReceivingContract
from .removing import RemovingContract
from .sending import SendingContract
from .sending_leased import SendingLeasedContract
from .sequences import SequencesContract
from .settling import SettlingContract
from .threads import ThreadsContract
from .topics import TopicsContract
from .volatile import VolatileContract
from .waiting import WaitingContract
from .when_full import WhenFullContract


class EssentialContract(
    SendingContract,
    ReceivingContract,
    SettlingContract,
    DeliveriesContract,
    CountingContract,
    LeasingContract,
    TopicsContract,
    RemovingContract,
    PreparingContract,
    LimitsContract,
    LifecycleContract,
    ThreadsContract,
):
    """What may come out otherwise if a store of a kind that keeps the whole contract syncs otherwise."""

    places: ClassVar[tuple[object, ...]] = PLACES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each test that asks for a `place` runs in all of them."""
        if "place" in metafunc.fixturenames:
            metafunc.parametrize("place", self.places)

    @pytest.fixture
    def store(self, disk: Disk) -> Store:
        """A new store."""
        return disk.create()


class StoreContract(
    OrderingContract,
    ExpiringContract,
    ChangingContract,
    CreditingContract,
    SequencesContract,
    GroupingContract,
    HostingContract,
    KeyedContract,
    MarkingContract,
    NewestContract,
    SendingLeasedContract,
    NonpersistentContract,
    LargeContract,
    WhenFullContract,
    WaitingContract,
    AgesContract,
    EssentialContract,
):
    """All of it. Inherit it, and give a fixture `disk`."""


class VolatileStoreContract(VolatileContract, StoreContract):
    """The same for a store of which nothing survives: instead of what survives, that nothing does."""

    places: ClassVar[tuple[str, ...]] = PLACES[:1]


_parts = (*EssentialContract.__bases__, *StoreContract.__bases__)
_tests = [name for part in _parts for name in vars(part) if name.startswith("test_")]
assert len(_tests) == len(set(_tests)), "one test hides another of the same name"
for _name in _tests:
    if getattr(getattr(StoreContract, _name), "survives", False):
        setattr(VolatileStoreContract, _name, None)
