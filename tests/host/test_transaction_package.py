"""What the `transaction` package (5.1, Zope Public License 2.1) demands of a data manager, by its own tests and docs.

Its tests and its page on savepoints drive a sample data manager, a mapping that is kept in memory. Here the mapping is
one over queues: each key is a queue, the value its last message, and what joins the transaction is our data manager.
transaction-savepoint.rst is the package's docs/savepoint.rst unchanged, under transaction-LICENSE.txt.
"""

from __future__ import annotations

import doctest
import itertools
import json
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transaction
from transaction.tests import savepointsample, test__manager, test__transaction, test_savepoint

import anabranch

_numbers = itertools.count()


class QueueMapping:
    """As the package's SampleSavepointDataManager, on queues in two stores."""

    router: anabranch.Router

    def __init__(self) -> None:
        self._prefix = f"mapping{next(_numbers)}."
        self._manager: Any = None

    def _queue(self, key: str) -> anabranch.Queue:
        return self.router.queue(f"{self._prefix}{'even' if len(key) % 2 == 0 else 'odd'}.{key}")

    def __setitem__(self, key: str, value: Any) -> None:
        self._manager = self.router.join()
        if hasattr(self, "should_retry"):
            self._manager.should_retry = self.should_retry
        queue = self._queue(key)
        while (old := queue.receive()) is not None:
            self._manager.ack(old)
        self._manager.send(queue.destination, json.dumps(value).encode())

    def _values(self) -> dict[str, Any]:
        found = {}
        for destination in self.router.destinations():
            for message in self.router.queue(destination).browse():
                found[destination.name] = message.body
        if self._manager is not None and self._manager.active:
            for participant in self._manager._transaction._operations.participants().values():
                found.update({destination.name: message.body for destination, message in participant.sends})
        ours = {name: body for name, body in found.items() if name.startswith(self._prefix)}
        return {name.rpartition(".")[2]: json.loads(body) for name, body in ours.items()}

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __contains__(self, key: str) -> bool:
        return key in self._values()

    def keys(self) -> Iterator[str]:
        return iter(self._values())


@pytest.fixture(autouse=True)
def _over_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    options = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER)
    stores = [
        anabranch.StoreConfig("even", ["queue://*.even.>"], journal=options),
        anabranch.StoreConfig("rest", [">"], journal=options),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        monkeypatch.setattr(QueueMapping, "router", router, raising=False)
        monkeypatch.setattr(savepointsample, "SampleSavepointDataManager", QueueMapping)
        yield
        transaction.abort()


THEIRS = [
    *map(test_savepoint.SavepointTests, unittest.TestLoader().getTestCaseNames(test_savepoint.SavepointTests)),
    test__transaction.MiscellaneousTests("test_bug239086"),
    test__manager.TransactionManagerTests("test_attempts_defer_to_dm"),
    test__manager.TransactionManagerTests("test_run_defer_to_dm"),
]
"""Those of the package's tests that use its data manager with savepoints."""


@pytest.mark.parametrize("case", THEIRS, ids=lambda case: case._testMethodName)
def test_their_test_passes(case: unittest.TestCase) -> None:
    case.debug()


def test_their_page_on_savepoints() -> None:
    page = Path(__file__).with_name("transaction-savepoint.rst")
    failed, tried = doctest.testfile(str(page), module_relative=False, report=True)
    assert (failed, tried > 60) == (0, True)
