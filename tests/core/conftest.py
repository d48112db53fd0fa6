"""A new store of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anabranch.adapters.core import Store

from . import made


@pytest.fixture
def store() -> Iterator[Store]:
    """One of the smallest backend."""
    with made.onefile() as disk:
        yield disk.create()


@pytest.fixture
def journal_store() -> Iterator[Store]:
    with made.journal() as disk:
        yield disk.create()


@pytest.fixture
def memory_store() -> Iterator[Store]:
    """One to which whoever calls writes himself."""
    with made.memory() as disk:
        yield disk.create()
