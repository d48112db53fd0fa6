"""All of it. See the package's docstring."""

from __future__ import annotations

import pytest

from anabranch.adapters.base import Store

from .disk import Disk
from .lifecycle import LifecycleContract
from .limits import LimitsContract
from .preparing import PreparingContract
from .receiving import ReceivingContract
from .sending import SendingContract
from .settling import SettlingContract
from .threads import ThreadsContract


class StoreContract(
    SendingContract,
    ReceivingContract,
    SettlingContract,
    PreparingContract,
    LimitsContract,
    LifecycleContract,
    ThreadsContract,
):
    """Inherit it, and give a fixture `disk`."""

    @pytest.fixture
    def store(self, disk: Disk) -> Store:
        """A new store."""
        return disk.create()
