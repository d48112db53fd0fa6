"""Every store: the contract of adapters/base.py over a small backend."""

from __future__ import annotations

from .backend import Backend, BackendStats, Found, Host, NotTakenError, ReadError, Settings
from .store import CoreStore

__all__ = ["Backend", "BackendStats", "CoreStore", "Found", "Host", "NotTakenError", "ReadError", "Settings"]
