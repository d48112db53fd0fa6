"""The parts of a store on which its features stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..backend import Writer
from ..engine.engine import Engine
from ..engine.lease_times import LeaseTimes
from ..messages import MessageStore
from ..service.sending import Sending
from ..service.settling import Settling


@dataclass(frozen=True)
class Parts:
    """The parts of an open store that a feature may stand on."""

    engine: Engine
    writer: Writer
    store: MessageStore
    directory: Path
    """The store's."""
    index_directory: Path | None
    file_mode: int | None
    """Of new files."""
    sync: Callable[[], None]
    """Store.sync."""
    sending: Sending
    settling: Settling
    lease_times: LeaseTimes
