"""What a kind of store says of itself, and what the core does where it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabranch_onefile.backend import OneFileBackend, OneFileOptions

from anabranch.adapters.core.backend import BackendStats, Found, Settings
from anabranch.adapters.journal.backend import JournalBackend
from anabranch.adapters.memory.backend import MemoryBackend
from anabranch.adapters.sql.backend import SqlBackend

from ..contract.disk import A
from .made import onefile

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
