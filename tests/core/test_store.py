"""A store by itself: what its kind says, opening and closing, from written to seen, what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anabranch_onefile.backend import OneFileBackend, OneFileOptions

from anabranch.adapters.core import Store
from anabranch.adapters.core.backend import BackendStats, Found, Settings
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Counts, Subscription
from anabranch.adapters.journal.backend import JournalBackend
from anabranch.adapters.memory.backend import MemoryBackend
from anabranch.adapters.sql.backend import SqlBackend
from anabranch.policies.errors import StoreFailedError

from ..contract.disk import A, B, T, bodies, take
from .made import onefile

# What the face of a store does by itself: opening and closing


def test_a_close_that_fails_frees_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it fails: the store can be opened again in the same process."""
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        close = store._writer.close

        def fail() -> None:
            close()
            raise StoreFailedError("the disk")

        monkeypatch.setattr(store._writer, "close", fail)
        with pytest.raises(StoreFailedError):
            store.close()
        again = disk.unopened(store)
        again.open()
        disk.opened.append(again)
        assert bodies(again) == [b"1"]


# What a kind of store says of itself, and what the core does where it says nothing


KINDS: dict[str, Any] = {
    "journal": JournalBackend,
    "sql": SqlBackend,
    "memory": MemoryBackend,
    "onefile": OneFileBackend,
}


def test_each_kind_has_its_name() -> None:
    assert {name: kind.kind for name, kind in KINDS.items()} == {name: name for name in KINDS}


def test_common_options_become_settings() -> None:
    options = OneFileOptions(priorities=True, duplicate_window=7, max_messages=8, max_leases=9)
    found = Settings.of(options, max_bytes=10)
    assert (found.priorities, found.duplicate_window, found.max_messages, found.max_leases, found.max_bytes) == (
        True, 7, 8, 9, 10,
    )  # fmt: skip
    assert Settings.of(OneFileOptions()).max_deliveries is None


def test_an_empty_store_is_what_is_found_without_a_word() -> None:
    found = Found()
    assert (found.last_seq, list(found.ids), list(found.prepared), list(found.committed)) == (0, [], [], [])
    assert BackendStats().live_percent == 100.0


def test_what_a_small_backend_leaves_out(tmp_path: Path) -> None:
    """There is nothing to write out, to free."""
    left_out = {"checkpoint", "reclaim", "writer", "is_contained"}
    assert not left_out & set(vars(OneFileBackend))
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        store.checkpoint()
        assert store.reclaim() == 0
        assert not OneFileBackend.is_contained(OneFileOptions())


# From what is written to what is seen (E1, E2)


def test_nothing_is_seen_before_its_write_has_counted(store: Store) -> None:
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


def test_a_signal_handler_inside_is_refused(store: Store) -> None:
    with store._engine.lock, pytest.raises(RuntimeError, match="signal handler"):
        store.depth(A)


# What a store says of itself


DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def test_both_kinds_of_messages_are_counted(store: Store) -> None:
    store.subscribe(DESK)
    store.subscribe(BOOK)
    for destination in (A, T):
        store.send_many(destination, [b"1", Outgoing(b"2", persistent=False)])
    take(store)
    assert (store.depth(A), store.counts(A)) == (2, Counts(1, 1))
    assert (store.depth(T), store.depth(T, DESK.key), store.counts(T, BOOK.key)) == (2, 2, Counts(2, 0))
    assert (store.depth(B), store.counts(B)) == (0, Counts(0, 0))
    stats = store.stats()
    assert (stats.messages, stats.destinations, stats.subscriptions) == (4, {A: 2, T: 2}, {DESK: 2, BOOK: 2})
    assert (stats.leased, stats.sends, stats.kind, stats.failed) == (1, 4, "onefile", None)


def test_a_store_that_has_failed_says_so(store: Store) -> None:
    """And its last figures; counts are refused."""
    store.send(A, b"1")
    store._engine.fail(StoreFailedError("the disk is gone"))
    stats = store.stats()
    assert stats.messages == 1
    assert stats.failed is not None and "the disk is gone" in stats.failed
    with pytest.raises(StoreFailedError, match="the disk is gone"):
        store.depth(A)
