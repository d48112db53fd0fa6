"""What the usage log's tests share: a router over each kind of store, and what it recorded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch

from ..model import FAST


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, as those of the router are."""
    with tempfile.TemporaryDirectory(prefix="anabranch-usage-", dir=FAST) as name:
        path = Path(name) / "test"
        path.mkdir()
        yield path


def config(directory: Path, usage: Any = {}) -> anabranch.Config:  # noqa: B006  it is only read
    """A journal for j.> and all topics, a database for s.>, memory for the rest."""
    never = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, dead_letter="j.dead")
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("journal", ["queue://j.>", "topic://>"], journal=never),
            anabranch.StoreConfig("sql", ["queue://s.>"], sql={}),
            anabranch.StoreConfig("memory", ["queue://m.>"], memory={}),
        ],
        transactions=anabranch.TransactionOptions(sync=anabranch.Sync.NEVER),
        usage=usage,
    )
