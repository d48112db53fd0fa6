"""huey's own tests, with its storage swapped: those of storages, and those of what stands on one, which its suite runs
in memory. Its other storages' own tests need their servers, and say nothing of ours."""

from __future__ import annotations

import importlib
import os
import pkgutil
import unittest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

os.environ["HUEY_SLOW_TESTS"] = "1"  # before its base module is imported
import huey.tests
from huey.tests.base import BaseTestCase
from huey.tests.test_storage import StorageTests

import anabranch
from anabranch.hosts.huey import AnabranchHuey

OTHER_STORAGES = {"test_django_tasks", "test_postgres", "test_sql_huey", "test_storage", "test_wrappers"}
DEVIATIONS = {
    "test_api.TestChordPrimitive.test_chord_bookkeeping_cleared": "reads a field of MemoryStorage; ours counts nothing",
}
"""Tests that fail, and why they may. One that passes is to be taken out."""


def get_huey(self: unittest.TestCase, **options: Any) -> AnabranchHuey:
    place = TemporaryDirectory()
    self.addCleanup(place.cleanup)
    journal = anabranch.JournalOptions(priorities=True, sync=anabranch.Sync.NEVER)
    router = anabranch.open(anabranch.Config(Path(place.name), [anabranch.StoreConfig("all", [">"], journal=journal)]))
    self.addCleanup(router.close)
    return AnabranchHuey(router=router, utc=False, read_timeout=0.01, **options)


class AnabranchStorageTests(StorageTests, BaseTestCase):
    __test__ = False  # as it is; it is one of the cases below
    get_huey = get_huey


def cases() -> list[unittest.TestCase]:
    loader = unittest.TestLoader()
    names = {module.name for module in pkgutil.iter_modules(huey.tests.__path__) if module.name.startswith("test_")}
    modules = [importlib.import_module(f"huey.tests.{name}") for name in sorted(names - OTHER_STORAGES)]
    suite = unittest.TestSuite(map(loader.loadTestsFromModule, modules))
    suite.addTests(loader.loadTestsFromTestCase(AnabranchStorageTests))
    return list(flat(suite))


def flat(suite: Any) -> Any:
    for one in suite:
        yield from flat(one) if isinstance(one, unittest.TestSuite) else [one]


CASES = {case.id().removeprefix("huey.tests."): case for case in cases()}


def test_the_suite_is_whole() -> None:
    assert len(CASES) > 200 and DEVIATIONS.keys() <= CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_of_huey(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseTestCase, "get_huey", get_huey)
    result = unittest.TestResult()
    CASES[name].run(result)
    told = "".join(text for _, text in result.failures + result.errors)
    assert bool(told) is (name in DEVIATIONS), told or f"{name} passes, and is listed as one that does not"
