"""Parts of a journal store, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anabranch.adapters.core.engine.engine import Engine
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.state.leases import DestinationState
from anabranch.adapters.journal.backend import JournalBackend
from anabranch.adapters.journal.index.states import indexed
from anabranch.adapters.journal.writing import JournalBatch, JournalEncoder
from anabranch.adapters.wal.ticket import Tail
from anabranch.policies.config import JournalOptions
from anabranch.policies.names.destination import Destination


def engine_of(last_seq: int = 0, duplicate_window: int = 10) -> Engine:
    """Of a journal store that is not open."""
    options = JournalOptions(duplicate_window=duplicate_window)
    engine = Engine("made", JournalBackend("made", Path("nowhere"), options))
    engine.sequencer.last_seq = last_seq
    return engine


def state_of(engine: Engine, number: int, name: str, declared: bool = True) -> DestinationState:
    """A destination of that number."""
    state = DestinationState(number, Destination.parse(name))
    state.declared = declared
    indexed(state)
    engine.catalog.add(state)
    return state


def batch_of(engine: Engine, tail: Tail, changes: Sequence[Any], watermark: int = 0) -> JournalBatch:
    """What one ticket of these changes becomes."""
    return JournalEncoder(engine).encode(tail, Ticket(changes, 0), watermark)
