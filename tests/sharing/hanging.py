"""A disk that hangs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ..contract.disk import PATIENCE


def hang(monkeypatch: pytest.MonkeyPatch, part: str = "") -> threading.Event:
    """Let syncs hang of the files with that in their paths, until the event is set which this returns."""
    go_on, sync = threading.Event(), os.fdatasync

    def fdatasync(fd: int) -> None:
        if part in str(Path(f"/proc/self/fd/{fd}").readlink()):
            assert go_on.wait(PATIENCE)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return go_on
