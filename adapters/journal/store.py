"""The journal store: the core over a journal."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from ...policies.config import JournalOptions
from ..core.backend import Backend
from ..core.store import Store
from .backend import JournalBackend


class JournalStore(Store):
    """A store in a directory of its own."""

    backend_type: ClassVar[type[Backend]] = JournalBackend
    options_model: ClassVar[type[BaseModel]] = JournalOptions
    backend: JournalBackend
