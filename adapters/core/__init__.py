"""Every store: the contract (store.py) over a small backend (backend.py)."""

from __future__ import annotations

from .backend import Backend, BackendStats, Found, Host, NotTakenError, ReadError, Settings
from .store import Store

__all__ = ["Backend", "BackendStats", "Found", "Host", "NotTakenError", "ReadError", "Settings", "Store"]
