"""MemoryStore: the contract of adapters/base.py in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from ...policies.options import MemoryOptions
from ..base import Message
from ..core import Backend, CoreStore
from ..core.delivery import OWN, Lease
from .backend import MemoryBackend
from .directory import TransientDirectory


class MemoryStore(CoreStore):
    """A store that keeps nothing. All else its base class says."""

    backend_type: ClassVar[type[Backend]] = MemoryBackend
    options_model: ClassVar[type[BaseModel]] = MemoryOptions
    volatile = True


def companion(
    name: str, directory: Path, options: MemoryOptions, position: Callable[[], int] | None = None
) -> MemoryStore:
    """A store with an id of its own, open, that nobody opens again. Its directory is made when something is swapped,
    and removed at close. `position` is asked, under the store's lock, when messages take effect, and kept with them."""
    store = MemoryStore(name, directory, options)
    assert isinstance(store.backend, MemoryBackend)
    store.backend.directory = TransientDirectory(directory)
    store.backend.position = position
    store.open()
    return store


def position_of(message: Message) -> int:
    """What the `position` of its store said when the message took effect; 0 if it has none."""
    place = message.note.place if isinstance(message.note, Lease) else message.note
    if place is None:
        return 0
    chunk, index = place[OWN]
    return chunk.positions[index] if chunk.positions is not None else 0
