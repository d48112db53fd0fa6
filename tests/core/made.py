"""Parts of the core, made by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabranch.adapters.core.operations.changes import Send
from anabranch.adapters.core.operations.plan import Sequencer
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.record.encoding import encode
from anabranch.adapters.core.state.leases import DestinationState
from anabranch.adapters.core.state.states import Catalog
from anabranch.policies.names.destination import Destination

from ..journal.disk import JournalDisk
from ..memory.disk import MemoryDisk
from ..model import FAST
from ..thirdparty.disk import OneFileDisk


def send_to(state: DestinationState, body: bytes = b"x", message_id: str | None = None, flags: int = 0) -> Send:
    """A send as a store makes it."""
    record, name = encode(state.destination, body, None, message_id, 1 << 20, flags=flags)
    return Send(state, record, name)


def ticket_of(*changes: Any) -> Ticket:
    return Ticket(changes, 0)


def sequencer_of(window: int = 100) -> tuple[Sequencer, DestinationState]:
    """One that is new, and a queue."""
    catalog = Catalog()
    return Sequencer(catalog, window), catalog.state(Destination.parse("a"))


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="anabranch-core-", dir=FAST) as path:
        yield Path(path)


@contextmanager
def onefile() -> Iterator[OneFileDisk]:
    """Where stores of the smallest backend lie."""
    with _directory() as path, OneFileDisk(path) as disk:
        yield disk


@contextmanager
def journal() -> Iterator[JournalDisk]:
    """Where journal stores lie."""
    with _directory() as path, JournalDisk(path) as disk:
        yield disk


@contextmanager
def memory() -> Iterator[MemoryDisk]:
    """Where stores lie to which whoever calls writes himself."""
    with _directory() as path, MemoryDisk(path) as disk:
        yield disk
