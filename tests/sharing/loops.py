"""The event loops that programs have: that of asyncio, and uvloop's."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
import uvloop

LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def each(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `asyncio.run` make this loop. A fixture, of LOOPS."""
    monkeypatch.setattr(asyncio.events, "new_event_loop", LOOPS[request.param])
