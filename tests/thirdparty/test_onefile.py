"""A third party's store keeps the contract, found by its entry point."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.policies.config.adapters import known_kinds, load_adapter

from ..contract.contract import EssentialContract, StoreContract
from ..contract.disk import Disk
from ..model import FAST
from .disk import OneFileDisk


@pytest.fixture
def disk() -> Iterator[Disk]:
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-onefile-", dir=FAST) as path,
        OneFileDisk(Path(path)) as disk,
    ):
        yield disk


@pytest.mark.campaign
@pytest.mark.weight(0)
class TestOneFileAll(StoreContract):
    pass


class TestOneFile(EssentialContract):
    def test_it_is_found_by_its_entry_point(self, disk: Disk) -> None:
        assert "onefile" in known_kinds()
        assert type(disk.create()) is load_adapter("onefile")
