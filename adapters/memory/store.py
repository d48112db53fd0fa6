"""MemoryStore: the core over memory."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from ...policies.config.options import MemoryOptions
from ..core.backend import Backend
from ..core.store import Store
from .backend import MemoryBackend


class MemoryStore(Store):
    """A store that keeps nothing. All else its base class says."""

    backend_type: ClassVar[type[Backend]] = MemoryBackend
    options_model: ClassVar[type[BaseModel]] = MemoryOptions
    volatile = True
