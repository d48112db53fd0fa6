"""From what is written to what is seen (E1, E2)."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from anabranch.policies.errors import ClosedError

from ..contract.disk import PATIENCE, A, take
from .made import onefile


def test_nothing_is_seen_before_its_write_has_counted() -> None:
    with onefile() as disk:
        store = disk.create()
        engine = store._engine
        numbers = []
        backend: Any = store.backend
        original = backend.write

        def write(plan: object) -> None:
            original(plan)
            numbers.append(engine.catalog.state(A).count)

        backend.write = write
        store.send(A, b"1")
        store.send(A, b"2")
        assert numbers == [0, 1]


def test_a_signal_handler_inside_is_refused() -> None:
    with onefile() as disk:
        store = disk.create()
        with store._engine.lock, pytest.raises(RuntimeError, match="signal handler"):
            store.depth(A)


def test_all_who_wait_hear_of_the_end() -> None:
    with onefile() as disk:
        store = disk.create()
        ended: SimpleQueue[Exception] = SimpleQueue()
        store.listen(A, lambda message: None, on_end=ended.put)
        store.close()
        assert isinstance(ended.get(timeout=PATIENCE), ClosedError)
        with pytest.raises(ClosedError):
            take(store)
